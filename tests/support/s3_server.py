"""A real S3 server in a process of its own, and a proxy before it that delays, refuses and cuts what it answers."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
BUCKET = "pictures"
FORWARDED = ("Host", "Range", "Authorization", "Content-Type", "Content-Length", "x-amz-content-sha256", "x-amz-date")
SIGNED = "AWS4-HMAC-SHA256 Credential=A/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
KEPT = {"etag", "last-modified", "content-type", "content-range", "accept-ranges"}


@contextmanager
def s3_server() -> Iterator[str]:
    """Start moto's server, which ends with this process, and return its address."""
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout and process.stdin
        address = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        put(f"{address}/{BUCKET}")
        yield address
        process.stdin.close()


def put(url: str, content: bytes = b"") -> None:
    headers = {"Content-Type": "application/octet-stream"}  # urllib's own is that of a form, which moto parses
    urllib.request.urlopen(urllib.request.Request(quote(url, ":/"), content, headers, method="PUT")).close()


def upload(address: str, folder: Path, prefix: str = "") -> None:
    """Put all files below a folder into the bucket."""
    for path in folder.rglob("*"):
        if path.is_file():
            put(f"{address}/{BUCKET}/{prefix}{path.relative_to(folder).as_posix()}", path.read_bytes())


@dataclass
class Fault:
    """What the proxy does to requests whose path contains `part`: `times` of them (-1: all)."""

    part: str
    status: int = 0
    code: str = ""
    """Answer with this status and S3's code for it."""
    cut: float = 1.0
    """Close the connection after this part of the body."""
    times: int = -1
    method: str = ""
    """Of the requests that are meant; empty: any."""


@dataclass
class Proxy:
    """Forwards to `server`; `requests` are the paths and ranges that came, `signatures` who signed, `most_at_once` how
    many of them waited at one time."""

    server: str
    latency_seconds: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    signatures: list[tuple[str, str]] = field(default_factory=list)
    head_faults: bool = False
    """Whether faults are those of HEAD requests, too."""
    drops_conditions: bool = False
    """Whether the store ignores `If-None-Match`, as s3rver, rclone and the gateway of JuiceFS do."""
    page_keys: int = 0
    """How many keys an answer lists; 0 leaves it to the server."""
    has_ranges: bool = True
    """Whether parts of objects are asked for as they came; else the server answers with the whole, and 200."""
    waiting: int = 0
    most_at_once: int = 0
    address: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self) -> None:
        with self.lock:
            self.waiting += 1
            self.most_at_once = max(self.most_at_once, self.waiting)
        time.sleep(self.latency_seconds)
        with self.lock:
            self.waiting -= 1

    def fault_for(self, method: str, path: str) -> Fault:
        with self.lock:
            meant = (fault for fault in self.faults if fault.part in path and fault.method in ("", method))
            fault = next((fault for fault in meant if fault.times), Fault(""))
            fault.times -= 1
            return fault


@contextmanager
def s3_proxy(server: str) -> Iterator[Proxy]:
    proxy = Proxy(server)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            path = unquote(self.path)
            self.sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            proxy.requests.append((path, self.headers.get("Range", "")))
            signed, token = (self.headers.get(name, "") for name in ("Authorization", "X-Amz-Security-Token"))
            is_aws = "Credential=" in signed
            signer = signed.partition("Credential=")[2].partition("/")[0] if is_aws else signed
            proxy.signatures.append((signer, token))
            if not is_aws:  # moto fails on a bearer token of Google's
                del self.headers["Authorization"]
                self.headers["Authorization"] = SIGNED
            proxy.wait()
            fault = proxy.fault_for(self.command, path) if proxy.head_faults or self.command != "HEAD" else Fault("")
            status, headers, body = (fault.status, {}, error_body(fault.code)) if fault.status else self.forward()
            self.send_response(status)
            for name in KEPT & headers.keys():
                self.send_header(name, headers[name])
            self.send_header("Content-Length", headers.get("content-length", str(len(body))))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[: int(len(body) * fault.cut)])
            self.close_connection = fault.cut < 1

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        def forward(self) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection(urlsplit(proxy.server).netloc)
            kept = {name: self.headers[name] for name in FORWARDED if name in self.headers}
            if not proxy.has_ranges:
                kept.pop("Range", None)
            if not proxy.drops_conditions and "If-None-Match" in self.headers:
                kept["If-None-Match"] = self.headers["If-None-Match"]
            is_paged = proxy.page_keys and "list-type" in self.path
            path = self.path + f"&max-keys={proxy.page_keys}" * bool(is_paged)
            connection.request(self.command, path, self.sent or None, headers=kept)
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}, body

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server_here = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server_here.daemon_threads = True
    proxy.address = f"http://127.0.0.1:{server_here.server_address[1]}"
    threading.Thread(target=server_here.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield proxy
    finally:
        server_here.shutdown()
        server_here.server_close()


def error_body(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as the test asks</Message></Error>".encode()
