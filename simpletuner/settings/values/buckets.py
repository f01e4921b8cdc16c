"""Addresses of folders in object stores: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER and az://CONTAINER/FOLDER."""

from __future__ import annotations

import re
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


def check_bucket(address: str) -> str:
    """Return an address without a slash at its end. Raises ValueError for what is none."""
    if address and parse_bucket(address) is None:
        raise ValueError("use s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER")
    return address.rstrip("/")
