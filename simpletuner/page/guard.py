"""Access control of the page: token, Host header, CSRF, size of a request; and the headers of every response.

A page on loopback can be reached by any site that is open in the same browser, so each check prevents one
attack: Host for DNS rebinding, Origin and a header of our own for cross-site requests, the cookie for other
users of this machine, and Content-Security-Policy for markup that came from a file, a prompt or a model
folder.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from simpletuner.settings.files.formats import MAX_FILE_BYTES

# A settings file in a form: percent-encoding can triple a text, but not one of settings.
MAX_BODY_BYTES = 2 * MAX_FILE_BYTES
# Photographs in base64.
BODY_BYTES_AT = {"/runs/sample": 48 << 20}
# parse_qsl has no bound by default (bpo-34866): 8 MiB of `a&` would be four million fields.
MAX_FIELDS = 5000
CSRF_HEADER = "X-CSRF-Token"
SAFE_METHODS = ("GET", "HEAD")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "media-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache, private",
}

WRONG_HOST = "This page does not answer to that name: use the address that `simpletuner page` printed."
NO_TOKEN = "This page needs the address that `simpletuner page` printed, with its token."
USED_TOKEN = "This address was used already, or is not one of this page: take the one that the terminal printed last."
FOREIGN = "This request did not come from this page: reload it and try again."
TOO_LARGE = "A request of this kind may have at most {} MiB."


class Secrets:
    """Credentials of visitors: tokens, each good for one browser, and the cookie that it keeps."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.session = secrets.token_urlsafe(32)
        """The cookie's value, which is never part of an address."""
        self.unused: set[str] = set()
        self.lock = threading.Lock()

    @property
    def cookie(self) -> str:
        # Browsers send cookies to all ports of a host, so the name has the port.
        return f"simpletuner-{self.port}"

    @property
    def csrf(self) -> str:
        return hmac.new(self.session.encode(), b"csrf", hashlib.sha256).hexdigest()

    def issue(self) -> str:
        """Return a new token."""
        token = secrets.token_urlsafe(32)
        with self.lock:
            self.unused.add(token)
        return token

    def use(self, given: str) -> bool:
        """Consume a token; False if it is unknown or already used."""
        with self.lock:
            found = [token for token in self.unused if is_same(token, given)]
            self.unused.difference_update(found)
        return bool(found)


def is_same(one: str, other: str) -> bool:
    # In constant time; hmac takes no text that is not ASCII.
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))


def names_this_machine(host: str, named: str) -> bool:
    """True for a Host header that means this machine: an address, localhost, its name or --host.

    DNS rebinding needs a name that the attacker owns. Ports may differ: a tunnel can have another one.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        # Not by getfqdn(), which asks the network.
        return name in {"localhost", named.lower(), socket.gethostname().lower()}
    return True


@dataclass
class Guard:
    """ASGI middleware; `refuse(request, code, sentence)` and `enter(request)` make its own responses."""

    app: ASGIApp
    secrets: Secrets
    host: str
    refuse: Callable[[Request, int, str], Response]
    enter: Callable[[Request], Response]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # `lifespan` is Starlette's start and end. Websockets would need their own checks: they get no answer.
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        request = Request(scope)
        scope.setdefault("state", {})
        answer = self.answer(request)
        if answer is None and request.method not in SAFE_METHODS:
            limit = BODY_BYTES_AT.get(request.url.path, MAX_BODY_BYTES)
            body = await read_body(receive, limit)
            if body is None:
                answer = self.refuse(request, 413, TOO_LARGE.format(limit >> 20))
            else:
                scope["state"]["form"] = parse_form(body)
        await (answer or self.app)(scope, receive, with_headers(send))

    def answer(self, request: Request) -> Response | None:
        """Return the response to a request that must not reach the application."""
        # First: a request by another name must not even use up a token.
        if not names_this_machine(request.headers.get("host", ""), self.host):
            return self.refuse(request, 421, WRONG_HOST)
        is_known = is_same(request.cookies.get(self.secrets.cookie, ""), self.secrets.session)
        token = request.query_params.get("token") if request.method == "GET" else None
        # The cookie before the token, so that a browser may load its first address again.
        if token is not None and (is_known or self.secrets.use(token)):
            return self.enter(request)
        if request.url.path.startswith("/static/"):  # the page of an error needs its style, which is public
            return None
        if not is_known:
            return self.refuse(request, 401, NO_TOKEN if token is None else USED_TOKEN)
        if request.method not in SAFE_METHODS and not self.is_from_here(request):
            refusal = self.refuse(request, 403, FOREIGN)
            if has_own_origin(request):  # a tab from before the server's last start: its script asks again with this
                refusal.headers[CSRF_HEADER] = self.secrets.csrf
            return refusal
        return None

    def is_from_here(self, request: Request) -> bool:
        """True if a script of this page sent the request, which changes something."""
        return has_own_origin(request) and is_same(request.headers.get(CSRF_HEADER, ""), self.secrets.csrf)


def has_own_origin(request: Request) -> bool:
    """Compare the Origin header, which no script can set, with the page's own address."""
    return request.headers.get("origin", "").partition("://")[2] == request.headers["host"]


async def read_body(receive: Receive, limit: int) -> bytes | None:
    """Return the body of a request; None for one that is too large."""
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            return None
        more = message.get("more_body", False)
    return b"".join(parts)


def parse_form(body: bytes) -> dict[str, list[str]]:
    """Parse an urlencoded form; anything else has no fields."""
    fields: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        return {}
    for name, value in pairs:
        # Browsers send the ends of lines as CR LF, whatever the text had.
        fields.setdefault(name, []).append(value.replace("\r\n", "\n"))
    return fields


def with_headers(send: Send) -> Send:
    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return add
