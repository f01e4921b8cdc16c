"""A real `simpletuner page` in a process of its own, and requests to it as a browser or as an attacker sends them."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast
from urllib.parse import urlencode, urlsplit

from forked_launcher import ForkedProcess, serve
from patience import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext


@dataclass
class Answer:
    """A response: its code, headers and text."""

    code: int
    headers: Mapping[str, str]
    text: str


@dataclass
class PageServer:
    """A started page: `address` is the one with a token that was printed last."""

    process: subprocess.Popen[str] | ForkedProcess
    stdout: TextIO
    folder: Path
    address: str
    wait_seconds: float = PATIENCE

    @property
    def origin(self) -> str:
        return self.address.partition("/?")[0]

    @property
    def token(self) -> str:
        return self.address.partition("token=")[2]

    @property
    def port(self) -> int:
        return urlsplit(self.address).port or 0

    def send(self, method: str, path: str, headers: Mapping[str, str], body: str | bytes = b"") -> Answer:
        """Send exactly this."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.wait_seconds)
        try:
            connection.request(method, path, body, headers={"Host": f"127.0.0.1:{self.port}", **headers})
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read().decode("utf-8", "replace"))
        finally:
            connection.close()

    @cached_property
    def cookie(self) -> dict[str, str]:
        """What a browser that has entered by the printed address sends."""
        entered = self.send("GET", "/?token=" + self.token, {})
        assert entered.code == 200, entered.text
        cookie = {"Cookie": entered.headers["set-cookie"].partition(";")[0]}
        self.address = self.next_address()
        return cookie

    def enter(self, context: BrowserContext) -> None:
        """Let all tabs of a browser's context enter."""
        name, _, value = self.cookie["Cookie"].partition("=")
        context.add_cookies([{"name": name, "value": value, "url": self.origin}])

    def next_address(self) -> str:
        """Return the address that is printed once the one before has been used."""
        return self.stdout.readline().strip()

    def get(self, path: str, **query: str) -> Answer:
        """Ask for a page as a browser that has entered."""
        return self.send("GET", f"{path}?{urlencode(query)}" if query else path, self.cookie)

    def script_headers(self) -> dict[str, str]:
        """What htmx on a page of this server sends with a request."""
        csrf = re.search(r'X-CSRF-Token": "(\w+)"', self.get("/runs").text)
        assert csrf is not None
        form = {"Content-Type": "application/x-www-form-urlencoded", "HX-Request": "true"}
        return {**self.cookie, "Origin": self.origin, "X-CSRF-Token": csrf[1], **form}

    def post(self, path: str, fields: Mapping[str, str | list[str]]) -> Answer:
        return self.send("POST", path, self.script_headers(), urlencode(fields, doseq=True))


@contextmanager
def page_server(
    folder: Path, *flags: str, environment: Mapping[str, str] | None = None, fork_server: Any = None
) -> Iterator[PageServer]:
    """Start a page in a folder, and stop it with Ctrl-C. With a fork server it is forked, as are the runs it starts."""
    said = (folder.parent / f"{folder.name}-page.log").open("w+")
    arguments = ["--no_browser", "--port=0", *flags]
    own = {"SIMPLETUNER_HOME": str(folder.parent / "home"), **(environment or {})}
    start = partial(forked_page, fork_server) if fork_server else cold_page
    process, stdout = start(folder, said, own, arguments)
    try:
        address = stdout.readline().strip()
        said.seek(0)
        assert address, said.read()
        yield PageServer(process, stdout, folder, address)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) in (130, -signal.SIGKILL), "SIGKILL is a campaign's"
        said.seek(0)
        assert "Traceback" not in said.read(), "nothing that a test asks for is a bug"
    finally:
        process.kill()
        process.wait()
        stdout.close()
        said.close()


def cold_page(
    folder: Path, said: TextIO, own: Mapping[str, str], arguments: list[str]
) -> tuple[subprocess.Popen[str], TextIO]:
    # The script, since `python -m` imports from the folder, too.
    program = str(Path(sys.executable).with_name("simpletuner"))
    process = subprocess.Popen(
        [program, "page", *arguments],
        cwd=folder,
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        stderr=said,
        text=True,
        # In a background job of a shell SIGINT is ignored, also by all that it starts.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    assert process.stdout is not None
    return process, cast(TextIO, process.stdout)


def forked_page(
    fork_server: Any, folder: Path, said: TextIO, own: Mapping[str, str], arguments: list[str]
) -> tuple[ForkedProcess, TextIO]:
    pipe = Path(f"{said.name}.pipe")
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    process = fork_server.Process(target=serve, args=(str(pipe), said.name, str(folder), dict(own), arguments))
    process.start()
    return ForkedProcess(process), pipe.open()
