"""Whether a machine will be taken away: answers like those of the clouds, to real commands and requests."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from patience import PATIENCE

from simpletuner.launch import preemption
from simpletuner.launch.launcher_connection import check_of_machine
from simpletuner.launch.preemption import Answer, ask, watch_preemption
from simpletuner.settings.declared.sections import Launch
from simpletuner.system.processes.signals import StopRequest

GOOGLE = "curl -sf -H 'Metadata-Flavor: Google' {}/computeMetadata/v1/instance/preempted | grep -q TRUE"
AZURE = "curl -sf -H Metadata:true '{}/metadata/scheduledevents?api-version=2020-07-01' | grep -q '\"Preempt\"'"
AWS = (
    'curl -sf -o /dev/null -H "X-aws-ec2-metadata-token: '
    "$(curl -sfX PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' {0}/latest/api/token)\" "
    "{0}/latest/meta-data/spot/instance-action"
)
"""Commands of docs/many-machines.md."""


class Metadata(BaseHTTPRequestHandler):
    """The metadata servers of three clouds; `taken` is the notice, `needs_token` means AWS with IMDSv2 alone."""

    taken = False
    needs_token = False

    def do_PUT(self) -> None:
        self.answer(200, "token7" if self.headers["X-aws-ec2-metadata-token-ttl-seconds"] else "")

    def do_GET(self) -> None:
        if self.path.startswith("/computeMetadata"):
            is_google = self.headers["Metadata-Flavor"] == "Google"
            self.answer(200 if is_google else 403, str(self.taken).upper())
        elif self.path.startswith("/metadata"):
            event = '{"EventType":"Preempt"}' if self.taken else ""
            self.answer(200 if self.headers["Metadata"] == "true" else 400, f'{{"Events":[{event}]}}')
        elif self.needs_token and self.headers["X-aws-ec2-metadata-token"] != "token7":
            self.answer(401, "")
        else:
            self.answer(200 if self.taken else 404, "")

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def cloud(monkeypatch) -> Iterator[str]:
    monkeypatch.setattr(Metadata, "taken", False)
    monkeypatch.setattr(Metadata, "needs_token", False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which must not be asked for this machine's metadata
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_commands_of_the_documentation_understand_the_clouds(cloud, monkeypatch):
    monkeypatch.setattr(Metadata, "needs_token", True)
    commands = [each.format(cloud) for each in (AWS, GOOGLE, AZURE)]
    assert [ask(each) for each in commands] == [Answer(False)] * 3
    monkeypatch.setattr(Metadata, "taken", True)
    assert [ask(each) for each in commands] == [Answer(True)] * 3


def test_an_address_means_yes_by_200_and_no_by_404(cloud, monkeypatch):
    monkeypatch.delenv("no_proxy")
    address = f"{cloud}/latest/meta-data/spot/instance-action"
    assert ask(address) == Answer(False)
    monkeypatch.setattr(Metadata, "taken", True)
    assert ask(address) == Answer(True)
    monkeypatch.setattr(Metadata, "needs_token", True)
    assert ask(address) == Answer(False, "answers with the status 401")


def test_what_cannot_be_asked_is_said_once(monkeypatch, capfd):
    monkeypatch.setattr(preemption, "ASK_SECONDS", 0.02)
    monkeypatch.setattr(preemption, "ANSWER_SECONDS", 0.2)
    assert ask("http://127.0.0.1:9/") == Answer(False, "cannot be reached: Connection refused")
    assert ask("sleep 5") == Answer(False, "has not answered within 0 s")
    assert "not found" in ask("no-such-program-7").problem and ask("exit 1") == Answer(False)
    with watch_preemption("no-such-program-7", request := StopRequest()):
        time.sleep(0.5)
    assert request.signal_number == 0
    assert capfd.readouterr().err.count("warning: preemption_check cannot be run") == 1


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_notice_asks_for_the_stop_that_sigterm_asks_for_and_the_sigterm_that_follows_does_not_end_it(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(preemption, "ASK_SECONDS", 0.02)
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    request = StopRequest(lambda: 7)
    request.save_seconds = lambda: 95.4
    notice = tmp_path / "notice"
    with watch_preemption(f"test -e {notice}", request):
        time.sleep(0.2)
        assert not request.signal_number
        notice.touch()
        parts: list[str] = []
        wait_for(lambda: parts.append(capfd.readouterr().err) or "signal again" in "".join(parts))
        assert request.signal_number == signal.SIGTERM
    said = "".join(parts)
    assert "preemption_check: this machine will be taken away" in said
    assert "stopping: finishing step 7, then saving a checkpoint, which takes about 95 s; signal again" in said
    time.sleep(1.1)
    request.receive(signal.SIGTERM)
    assert left == [], "it was announced"
    request.receive(signal.SIGTERM)
    assert left == [143]


def test_the_first_rank_of_each_machine_asks():
    launch = Launch(preemption_check="exit 1")
    assert [check_of_machine(launch, env) for env in ({}, {"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"})] == [
        "exit 1",
        "exit 1",
        "",
    ]
