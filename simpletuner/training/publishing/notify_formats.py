"""Requests to an address in the formats of services: JSON alone, or with an image as Discord and ntfy take it.

Discord: multipart/form-data of `payload_json` and `files[0]` (docs.discord.com, "Execute Webhook" and "Uploading
Files"). ntfy: the image as body, the message in headers (docs.ntfy.sh/publish, "Attach local file"). Slack, Mattermost
and Teams take JSON alone: their webhooks show no image but one that is at a public address.
"""

from __future__ import annotations

import io
import json
import secrets
import sys
from collections.abc import Mapping
from email.header import Header
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import Request

from simpletuner.system.http_requests import http_request
from simpletuner.training.images.image_files import read_rgb

Format = Literal["json", "discord", "ntfy"]
Wanted = Format | Literal["auto"]
HOSTS: dict[str, Format] = {"discord.com": "discord", "discordapp.com": "discord", "ntfy.sh": "ntfy"}
JSON_HEADERS = {"Content-Type": "application/json"}
IMAGE = "validation.jpg"
# Longer sides of the image: the first at which it is within MAX_BYTES. ntfy.sh takes 15 MB, Discord 10.
EDGES_PX = (1600, 1000, 600, 300)
MAX_BYTES = 1 << 20
# Of an image that is decoded: 8192x8192 px take 200 MB.
MAX_PIXELS = 1 << 26
TEXT_LETTERS = 2000
"""Discord refuses a longer `content`; a header of ntfy becomes a file beyond 4,096 bytes."""


def format_of(url: str, wanted: Wanted) -> Format:
    """Return the format that is wanted, or with `auto` that of the service at an address."""
    if wanted != "auto":
        return wanted
    host = f".{urlsplit(url).hostname or ''}"
    known: list[Format] = [name for ending, name in HOSTS.items() if host.endswith(f".{ending}")]
    return known[0] if known else "json"


def message_request(url: str, wanted: Wanted, content: Mapping[str, Any], image: bytes | None) -> Request:
    """Return the request that sends a message, with an image where the service takes one."""
    match format_of(url, wanted):
        case "ntfy":
            text = content["text"]
            headers = {"Title": as_header(content["run"])}
            if image is None:
                return http_request(url, text.encode(), headers)
            return http_request(url, image, {**headers, "Message": as_header(text), "Filename": IMAGE})
        case "discord" if image is not None:
            body, kind = multipart(json.dumps(content).encode(), image)
            return http_request(url, body, {"Content-Type": kind})
        case _:
            return http_request(url, json.dumps(content).encode(), JSON_HEADERS)


def as_header(text: str) -> str:
    """Encode a text as RFC 2047 does, on one line."""
    return Header(" ".join(text.split()), "utf-8").encode(maxlinelen=sys.maxsize)


def multipart(payload: bytes, image: bytes) -> tuple[bytes, str]:
    """Return a body of a JSON part and an image part, and its content type."""
    boundary = secrets.token_hex(16)  # which the JPEG has not in it
    parts = (
        ('name="payload_json"', "application/json", payload),
        (f'name="files[0]"; filename="{IMAGE}"', "image/jpeg", image),
    )
    body = b"".join(
        f"--{boundary}\r\nContent-Disposition: form-data; {name}\r\nContent-Type: {kind}\r\n\r\n".encode()
        + own
        + b"\r\n"
        for name, kind, own in parts
    )
    return body + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def small_jpeg(path: Path) -> bytes | None:
    """Return an image that is small enough to send; None for one that is missing or damaged."""
    try:
        image = read_rgb(path, MAX_PIXELS)
    except OSError:
        return None
    content = b""
    for edge in EDGES_PX:
        image.thumbnail((edge, edge))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=85)
        content = file.getvalue()
        if len(content) <= MAX_BYTES:
            break
    return content
