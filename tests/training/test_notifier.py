"""Messages to an address: what is posted, and that no server can harm a run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from simpletuner.errors import Stopped, TrainingError
from simpletuner.report import Report
from simpletuner.training.publishing import notifier
from simpletuner.training.publishing.notifier import Notifier


class Receiver(ThreadingHTTPServer):
    """Keeps what is posted; answers with a status after a delay."""

    def __init__(self, status: int = 204, seconds: float = 0) -> None:
        super().__init__(("127.0.0.1", 0), Post)
        self.status, self.seconds = status, seconds
        self.daemon_threads, self.released = False, threading.Event()
        self.got: list[dict] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook?key=secret"


class Post(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        self.server.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.released.wait(self.server.seconds)
        with suppress(OSError):
            self.send_response(self.server.status)
            self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receiving(**answer) -> Iterator[Receiver]:
    with Receiver(**answer) as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        yield receiver
        receiver.released.set()
        receiver.shutdown()


def test_each_round_and_each_way_to_end_is_one_post(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "epoch": 1, "loss": 0.25, "learning_rate": 0.1}\n')
    ends = [None, Stopped(15, "stopped at step 7"), TrainingError("step 7: loss is nan"), ZeroDivisionError("oh")]
    with receiving() as receiver:
        for end in ends:
            with (
                suppress(Stopped, TrainingError, ZeroDivisionError),
                Notifier(receiver.url, tmp_path, Report()) as sent,
            ):
                sent.send_round(7)
                assert sent.worker.last is not None
                sent.worker.last.result()
                if end is not None:
                    raise end
    assert [each["event"] for each in receiver.got[::2]] == ["round"] * 4
    assert [(each["event"], each["message"]) for each in receiver.got[1::2]] == [
        ("finished", "finished"),
        ("stopped", "stopped at step 7"),
        ("failed", "failed: step 7: loss is nan"),
        ("failed", "failed: ZeroDivisionError: oh"),
    ]
    first = receiver.got[0]
    assert {name: first[name] for name in ("step", "loss", "epoch")} == {"step": 7, "loss": 0.25, "epoch": 1}
    assert first["text"] == first["content"] == f"{tmp_path.name}: step 7, loss 0.2500 at step 7"


@pytest.mark.parametrize("answer", [{"status": 500}, {"seconds": 30}, None])
def test_a_server_that_fails_hangs_or_is_gone_costs_a_warning_and_little_time(answer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(notifier, "SECONDS", 0.3)
    began = time.monotonic()
    with receiving(**(answer or {})) as receiver:
        url = receiver.url if answer else "http://127.0.0.1:9/hook?key=secret"
        with Notifier(url, tmp_path, Report()) as sent:
            before = time.monotonic()
            for step in range(5):
                sent.send_round(step)
            assert time.monotonic() - before < 1.0, "a round does not wait"
    assert time.monotonic() - began < 15
    said = capsys.readouterr().err
    assert said.count("warning: no message could be sent to notify_url") == 1 and "secret" not in said


def test_without_an_address_nothing_is_posted(tmp_path):
    with Notifier("", tmp_path, Report()) as sent:
        sent.send_round(1)
    assert sent.worker.last is None
