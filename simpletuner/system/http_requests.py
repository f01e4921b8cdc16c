"""HTTP requests by urllib, which takes no user and password in an address."""

from __future__ import annotations

import urllib.request
from base64 import b64encode
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit, urlunsplit


def http_request(
    url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> urllib.request.Request:
    """Make a request; `user:password@` of the address is sent as Basic authentication, and not to where it redirects.

    Raises ValueError for what is no address.
    """
    parts = urlsplit(url)
    credentials, has_credentials, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(urlunsplit(parts._replace(netloc=host)), body, dict(headers or {}))
    if has_credentials:
        token = b64encode(unquote(credentials).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")
    return request
