"""Messages to an address: validation rounds, with images if the service takes them, alarms, the end.

Formats: JSON alone, or with an image as Discord and ntfy take it. Discord: multipart/form-data of
`payload_json` and `files[0]` (docs.discord.com, "Execute Webhook" and "Uploading Files"). ntfy: the image as
body, the message in headers (docs.ntfy.sh/publish, "Attach local file"). Slack, Mattermost and Teams take
JSON alone: their webhooks show no image but one that is at a public address.
"""

from __future__ import annotations

import json
import secrets
import sys
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from email.header import Header
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request

from simpletuner.errors import SimpleTunerError, Stopped, without_errno
from simpletuner.runs.images import SHOWN_PIXELS, grid_file, read_rgb, thumbnail
from simpletuner.runs.metrics import METRICS, last_row
from simpletuner.session import Session
from simpletuner.system.network import http_request
from simpletuner.system.processes.threads import SerialWorker
from simpletuner.training.hooks import RunHook

Format = Literal["json", "discord", "ntfy"]
Wanted = Format | Literal["auto"]
HOSTS: dict[str, Format] = {"discord.com": "discord", "discordapp.com": "discord", "ntfy.sh": "ntfy"}
JSON_HEADERS = {"Content-Type": "application/json"}
IMAGE = "validation.jpg"
# Longer sides of the image: the first at which it is within MAX_BYTES. ntfy.sh takes 15 MB, Discord 10.
EDGES_PX = (1600, 1000, 600, 300)
MAX_BYTES = 1 << 20
# Discord refuses a longer `content`; a header of ntfy becomes a file beyond 4,096 bytes.
TEXT_LETTERS = 2000


def format_of(url: str, wanted: Wanted) -> Format:
    """Return the format that is wanted, or with `auto` that of the service at an address."""
    if wanted != "auto":
        return wanted
    host = f".{urlsplit(url).hostname or ''}"
    known: list[Format] = [name for ending, name in HOSTS.items() if host.endswith(f".{ending}")]
    return known[0] if known else "json"


def message_request(url: str, wanted: Wanted, content: Mapping[str, Any], image: bytes | None) -> Request:
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
        image = read_rgb(path, SHOWN_PIXELS)
    except OSError:
        return None
    content = b""
    for edge in EDGES_PX:
        content, _ = thumbnail(image, edge, "JPEG", quality=85)
        if len(content) <= MAX_BYTES:
            break
    return content


# For one POST. At the end of a run a message may have to wait for the one before.
SECONDS = 5.0


class Notifier(RunHook):
    """Post from a thread; a failed POST is one warning and never stops a run."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.output, logging = session.settings.training.output_dir, session.settings.logging
        self.url = logging.notify_url.get_secret_value()
        self.wanted: Wanted = logging.notify_format
        self.worker = SerialWorker("notify", self._warn)

    def evaluated(self, step: int) -> None:
        # Not unless an earlier message has been sent.
        # A server that does not answer must not queue up messages; the newest round is told by the next one.
        if self.worker.is_idle:
            self._send("round", f"step {step:,}", step)

    def alarmed(self, sentence: str) -> None:
        self._send("alarm", sentence)

    def finished(self) -> None:
        self._send("finished", "finished")
        self.worker.close()

    def failed(self, error: BaseException) -> None:
        if isinstance(error, Stopped):
            self._send("stopped", error.message)
        else:
            is_known = isinstance(error, SimpleTunerError)
            reason = error.message if is_known else f"{type(error).__name__}: {without_errno(error)}"
            self._send("failed", f"failed: {reason}")
        self.worker.close()

    def _send(self, event: str, message: str, step: int | None = None) -> None:
        self.worker.submit(self._post, event, message, step)

    def _warn(self, error: BaseException) -> None:
        """Warn of a message that could not be sent. The address is not shown: who knows it may post there."""
        why = error.reason if isinstance(error, URLError) and isinstance(error.reason, OSError) else error
        self.session.report.warn(
            f"no message could be sent to notify_url: {without_errno(why)}",
            "the run does not depend on it; later messages are tried, too",
        )

    def _post(self, event: str, message: str, step: int | None) -> None:
        takes_images = format_of(self.url, self.wanted) != "json"
        image = small_jpeg(grid_file(self.output / "validation", step)) if takes_images and step is not None else None
        request = message_request(self.url, self.wanted, self._content(event, message), image)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                answer.read(1 << 16)
        except HTTPError as error:
            error.close()  # it holds the connection
            raise

    def _content(self, event: str, message: str) -> Mapping[str, object]:
        row = last_row(self.output / METRICS)
        known = {name: row[name] for name in ("step", "epoch", "loss", "learning_rate") if name in row}
        run = self.output.absolute().name
        loss = f", loss {row['loss']:.4f} at step {row['step']:,}" if "loss" in row else ""
        text = f"{run}: {message}{loss}"[:TEXT_LETTERS]
        time = datetime.now(UTC).isoformat(timespec="seconds")
        # `text` and `content` are the names under which chat services expect a message.
        return {"event": event, "run": run, "message": message, "time": time, **known, "text": text, "content": text}
