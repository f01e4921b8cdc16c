"""Addresses of folders in buckets."""

from __future__ import annotations

import pytest

from simpletuner.settings.values.parsed import check_bucket, parse_bucket


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("s3://b", ("s3", "b", "")),
        ("s3://b/", ("s3", "b", "")),
        ("gs://my.bucket/runs/flux", ("gs", "my.bucket", "runs/flux")),
        ("az://c/é+ x/", None),
        ("az://c/é+x/", ("az", "c", "é+x")),
    ],
)
def test_an_address_has_a_bucket_and_a_folder(address, parts):
    assert parse_bucket(address) == parts


@pytest.mark.parametrize(
    "address",
    ["b/run", "s3:/b", "s3://", "http://b/run", "s3://user:key@b/run", "s3://b/../x", "s3://b//x", "s3://b/x?y"],
)
def test_anything_else_is_refused(address):
    with pytest.raises(ValueError, match="use s3://BUCKET/FOLDER"):
        check_bucket(address)


def test_an_empty_text_is_none():
    assert check_bucket("") == "" and check_bucket("s3://b/x/") == "s3://b/x"
