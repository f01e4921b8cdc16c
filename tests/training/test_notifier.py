"""Messages to an address: what is posted, and that no server can harm a run."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email import message_from_bytes
from email.header import decode_header, make_header
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import SecretStr

from simpletuner.errors import Stopped, TrainingError
from simpletuner.report import Report
from simpletuner.settings.declared.sections import Logging, Settings, Training
from simpletuner.training.publishing import notifier
from simpletuner.training.publishing.notifier import MAX_BYTES, Notifier, Wanted, format_of


def notifier_to(url: str, output: Path, wanted: Wanted = "auto") -> Notifier:
    logging = Logging(notify_url=SecretStr(url), notify_format=wanted)
    settings = Settings(training=Training(output_dir=output), logging=logging)
    session: Any = SimpleNamespace(settings=settings, report=Report())
    return Notifier(session)


class Receiver(ThreadingHTTPServer):
    """Keeps what is posted; answers with a status after a delay."""

    def __init__(self, status: int = 204, seconds: float = 0) -> None:
        super().__init__(("127.0.0.1", 0), Post)
        self.status, self.seconds = status, seconds
        self.daemon_threads, self.released = False, threading.Event()
        self.got: list[dict] = []
        self.requests: list[tuple[Message, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook?key=secret"


class Post(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.headers, body))
        if self.headers["Content-Type"] == "application/json":
            self.server.got.append(json.loads(body))
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
                notifier_to(receiver.url, tmp_path) as sent,
            ):
                sent.evaluated(7)
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
    with receiving() as receiver, notifier_to(receiver.url, tmp_path) as sent:
        sent.alarmed("steps take 2 times as long")
    assert [(each["event"], each["message"]) for each in receiver.got] == [
        ("alarm", "steps take 2 times as long"),
        ("finished", "finished"),
    ]


def round_of(folder, step: int) -> None:
    """Write a grid that is hard to compress, larger than a message may be."""
    (folder / "validation").mkdir(exist_ok=True)
    noise = np.random.default_rng(0).integers(0, 255, (2400, 2000, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "validation" / f"grid-{step:06d}.png")


def messages_to(folder, wanted: Wanted) -> list[tuple[Message, bytes]]:
    """Return the requests of a round with images, one without, one with a damaged grid, and the end."""
    round_of(folder, 7)
    (folder / "validation" / "grid-000009.png").write_bytes(b"torn")
    with receiving() as receiver, notifier_to(receiver.url, folder, wanted) as sent:
        for step in (7, 8, 9):
            sent.evaluated(step)
            assert sent.worker.last is not None
            sent.worker.last.result()
    return receiver.requests


def test_a_round_brings_its_images_where_the_service_takes_them(tmp_path):
    run = tmp_path / "猫 & co"
    run.mkdir()
    first, *others = messages_to(run, "discord")
    parts = message_from_bytes(f"Content-Type: {first[0]['Content-Type']}\r\n\r\n".encode() + first[1]).get_payload()
    fields = {part.get_param("name", header="content-disposition"): part for part in parts}
    assert json.loads(fields["payload_json"].get_payload(decode=True))["content"] == "猫 & co: step 7"
    image = fields["files[0]"].get_payload(decode=True)
    assert fields["files[0]"].get_filename() == "validation.jpg" and len(image) <= MAX_BYTES
    assert Image.open(io.BytesIO(image)).size == (833, 1000)
    assert [json.loads(body)["content"].rpartition(": ")[2] for _, body in others] == ["step 8", "step 9", "finished"]

    first, *others = messages_to(run, "ntfy")
    assert first[0]["Filename"] == "validation.jpg" and Image.open(io.BytesIO(first[1])).size == (833, 1000)
    assert str(make_header(decode_header(first[0]["Message"]))) == "猫 & co: step 7"
    assert all(str(make_header(decode_header(headers["Title"]))) == run.name for headers, _ in [first, *others])
    assert [body.decode() for _, body in others] == [f"{run.name}: {end}" for end in ("step 8", "step 9", "finished")]

    assert [json.loads(body)["event"] for _, body in messages_to(run, "auto")] == ["round"] * 3 + ["finished"]


def test_the_address_says_which_format_its_service_takes():
    hooks = (
        "https://discord.com/api/webhooks/1/x",
        "https://me:pw@ntfy.sh/topic",
        "https://notdiscord.com",
        "http://[::1]/",
    )
    assert [format_of(hook, "auto") for hook in hooks] == ["discord", "ntfy", "json", "json"]
    assert format_of("https://ptb.discord.com/x", "auto") == "discord" and format_of(hooks[0], "json") == "json"


@pytest.mark.parametrize("answer", [{"status": 500}, {"seconds": 30}, None])
def test_a_server_that_fails_hangs_or_is_gone_costs_a_warning_and_little_time(answer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(notifier, "SECONDS", 0.3)
    began = time.monotonic()
    with receiving(**(answer or {})) as receiver:
        url = receiver.url if answer else "http://127.0.0.1:9/hook?key=secret"
        with notifier_to(url, tmp_path) as sent:
            before = time.monotonic()
            for step in range(5):
                sent.evaluated(step)
            assert time.monotonic() - before < 1.0, "a round does not wait"
    assert time.monotonic() - began < 15
    said = capsys.readouterr().err
    assert said.count("warning: no message could be sent to notify_url") == 1 and "secret" not in said
