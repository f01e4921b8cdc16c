"""Messages to an address: one after each round of validation, with its images where the service takes them, and one at
the end of a run."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.error import HTTPError, URLError

from simpletuner.errors import SimpleTunerError, Stopped, without_errno
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.system.processes.threads import SerialWorker
from simpletuner.training.images.clip_files import grid_file
from simpletuner.training.metrics.metrics_reader import METRICS, last_row
from simpletuner.training.publishing.notify_formats import TEXT_LETTERS, Wanted, format_of, message_request, small_jpeg

# For one POST. At the end of a run a message may have to wait for the one before.
SECONDS = 5.0


class Notifier:
    """Post from a thread; a failed POST is one warning and never stops a run. Without an address, do nothing."""

    def __init__(self, url: str, output: Path, report: Report, wanted: Wanted = "auto") -> None:
        """`wanted` is a format of `notify_formats.py`, or auto."""
        self.url, self.output, self.report = url, output, report
        self.wanted: Wanted = wanted
        self.worker = SerialWorker("notify", self._warn)

    def send_round(self, step: int) -> None:
        """Post after a round, unless an earlier message has not been sent yet."""
        # A server that does not answer must not queue up messages; the newest round is told by the next one.
        if self.worker.is_idle:
            self._send("round", f"step {step:,}", step)

    def __enter__(self) -> Notifier:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self._send("finished", "finished")
        elif isinstance(error, Stopped):
            self._send("stopped", error.message)
        else:
            reason = (
                error.message
                if isinstance(error, SimpleTunerError)
                else f"{kind.__name__}: {without_errno(error or kind())}"
            )
            self._send("failed", f"failed: {reason}")
        self.worker.close()

    def _send(self, event: str, message: str, step: int | None = None) -> None:
        if self.url:
            self.worker.submit(self._post, event, message, step)

    def _warn(self, error: BaseException) -> None:
        """Warn of a message that could not be sent. The address is not shown: who knows it may post there."""
        why = error.reason if isinstance(error, URLError) and isinstance(error.reason, OSError) else error
        self.report.warn(
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

    def _content(self, event: str, message: str) -> Mapping[str, Any]:
        row = last_row(self.output / METRICS)
        known = {name: row[name] for name in ("step", "epoch", "loss", "learning_rate") if name in row}
        run = self.output.absolute().name
        loss = f", loss {row['loss']:.4f} at step {row['step']:,}" if "loss" in row else ""
        text = f"{run}: {message}{loss}"[:TEXT_LETTERS]
        time = datetime.now(UTC).isoformat(timespec="seconds")
        # `text` and `content` are the names under which chat services expect a message.
        return {"event": event, "run": run, "message": message, "time": time, **known, "text": text, "content": text}


def open_notifier(session: Session) -> Notifier:
    url = session.settings.logging.notify_url.get_secret_value() if session.world.is_first else ""
    return Notifier(url, session.settings.training.output_dir, session.report, session.settings.logging.notify_format)
