"""Bind a port, print the address with its token, and serve until Ctrl-C."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import uvicorn

from simpletuner.errors import EnvironmentNotReady
from simpletuner.page.application import build_application
from simpletuner.page.guard import Secrets
from simpletuner.page.rendering import render
from simpletuner.report import Report
from simpletuner.runs.folder import Folders

LOOPBACK = "127.0.0.1"
USUAL_PORT = 8001


@dataclass
class Doorkeeper:
    """Says by which address the page can be opened: the one printed last is good for one browser."""

    secrets: Secrets
    origin: str

    def new_address(self) -> str:
        return f"{self.origin}/?token={self.secrets.issue()}"

    def announce(self) -> None:
        """Print an address."""
        report = Report()
        report.text(self.new_address() + "\n")
        sys.stdout.flush()  # whoever reads it from a pipe waits for it

    def entered(self) -> None:
        """Print the next address once the last one is used."""
        if not self.secrets.unused:
            with suppress(OSError):  # nobody reads the output any more
                Report().say("a browser has opened the page; another one needs another address:")
                self.announce()


def serve(folders: Sequence[Path], config: Path | None, host: str, port: int | None, may_open: bool) -> None:
    """Serve the page. Raises EnvironmentNotReady where the address cannot be bound."""
    listener = bind(host, port)
    bound = listener.getsockname()[1]
    doorkeeper = Doorkeeper(Secrets(bound), f"http://{f'[{host}]' if ':' in host else host}:{bound}")
    application = build_application(Folders.of(folders), config, doorkeeper.secrets, host, doorkeeper.entered)
    doorkeeper.announce()
    say_how_to_use(Report(), host)
    settings = uvicorn.Config(
        application,
        log_level="warning",
        server_header=False,
        access_log=False,
        # By default uvicorn trusts X-Forwarded-* from 127.0.0.1, where the clients of this page usually are.
        proxy_headers=False,
        timeout_graceful_shutdown=2,  # a page that waits for news keeps its connection open
    )
    opened = opened_browser(doorkeeper.new_address()) if may_open and has_browser() else nullcontext()
    with opened:
        uvicorn.Server(settings).run(sockets=[listener])


@contextmanager
def opened_browser(address: str) -> Iterator[None]:
    """Open a browser by a file that leads to the address: every user can read a process's arguments."""
    with TemporaryDirectory(prefix="simpletuner-page-") as folder:  # which only this user may enter
        file = Path(folder) / "open.html"
        # Before it is written, so that no other user can read the token in between.
        file.touch(0o600)
        file.write_text(render("open", address=address), encoding="utf-8")
        # In a thread: a browser that BROWSER names with `%s` is waited for, and it waits for this page.
        threading.Thread(target=webbrowser.open, args=(file.as_uri(),), name="browser", daemon=True).start()
        yield


def say_how_to_use(report: Report, host: str) -> None:
    report.say("open this address in a browser; Ctrl-C stops the page, runs go on")
    if not is_loopback(host):
        report.warn(
            f"the page answers on {host} without encryption: whoever sees its traffic can use it",
            f"`ssh -L {USUAL_PORT}:localhost:{USUAL_PORT}` to this machine is safer, without --host",
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int | None) -> socket.socket:
    """Bound socket: at the port that was asked for, else at the usual one, else at any that is free."""
    try:
        family, _, _, _, found = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise EnvironmentNotReady(f"--host {host}: {error.strerror}", "name an address of this machine") from None
    ports = [USUAL_PORT, 0] if port is None else [port]
    for number in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        # Connections of a page that has just ended keep its port in TIME_WAIT for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((found[0], number))
            listener.listen()  # now: whoever reads the address may connect before uvicorn has started
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE and number != ports[-1]:
                continue
            hint = "give another --port" if error.errno == errno.EADDRINUSE else "give another --host or --port"
            raise EnvironmentNotReady(f"cannot listen on {host}:{number}: {error.strerror}", hint) from None
        return listener
    raise AssertionError("the last port is bound or refused")


def has_browser() -> bool:
    """True if this user sits at this machine and a browser would open a window: one in the terminal would
    cover the output."""
    on_screen = sys.platform in ("darwin", "win32") or {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ)
    return bool(on_screen) and sys.stdout.isatty() and "SSH_CONNECTION" not in os.environ
