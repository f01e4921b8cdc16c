"""Addresses of folders in object stores: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER and az://CONTAINER/FOLDER."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ADDRESS = re.compile(r"(s3|gs|az)://([^/\s?#@:]+)((?:/[^/\s?#]+)*)/?")


class BucketAddress(NamedTuple):
    """Parts of an address; the folder is empty for the bucket as a whole."""

    scheme: str
    bucket: str
    folder: str


def parse_bucket(address: str) -> BucketAddress | None:
    """Return the parts of an address; None for what is none."""
    found = ADDRESS.fullmatch(address)
    if not found or {".", ".."} & {*address.split("/")}:
        return None
    return BucketAddress(found[1], found[2], found[3].strip("/"))


def no_url(folder: Path) -> Path:
    """Return a folder as it came. Raises ValueError for an address that is none of a bucket, such as `s3:/BUCKET`."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(folder)):
        raise ValueError("is no folder: use a path, or s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER")
    return folder


def check_bucket(address: str) -> str:
    """Return an address without a slash at its end. Raises ValueError for what is none."""
    if address and parse_bucket(address) is None:
        raise ValueError("use s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER")
    return address.rstrip("/")
