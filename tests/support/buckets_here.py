"""A bucket that this process, and what it starts, may open without further settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from s3_server import Proxy, s3_proxy, s3_server


@contextmanager
def bucket_server(folder: Path) -> Iterator[tuple[Proxy, Path]]:
    """Serve a bucket; yield the proxy before it, and a settings file with the variables that open it, for ranks."""
    with s3_server() as server, s3_proxy(server) as proxy:
        given = {
            "ENDPOINT_URL": proxy.address,
            "ACCESS_KEY_ID": "A",
            "SECRET_ACCESS_KEY": "hidden7",
            "REGION": "eu-west-1",
        }
        variables = {f"AWS_{name}": value for name, value in given.items()}
        before = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        for name in before:
            del os.environ[name]
        os.environ.update(variables)
        config = folder / "bucket.env"
        config.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
        try:
            yield proxy, config
        finally:
            for name in variables:
                del os.environ[name]
            os.environ.update(before)
