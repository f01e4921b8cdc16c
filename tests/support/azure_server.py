"""A stand-in for Azure Blob Storage: as much of its protocol as an object store needs, with blobs in a dict."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

CONTAINER = "pictures"
BATCH = "batchresponse_7"
TIME = "Mon, 23 Nov 2026 07:00:00 GMT"


@dataclass
class AzureServer:
    """`blobs` by name; `requests` are the paths and ranges that came, `signatures` who signed, `fault` the status and
    code of each answer, `page` how many blobs an answer lists."""

    address: str = ""
    blobs: dict[str, bytes] = field(default_factory=dict)
    blocks: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    signatures: list[str] = field(default_factory=list)
    fault: tuple[int, str] | None = None
    page: int = 5000

    def listing(self, asked: dict[str, str]) -> bytes:
        names = sorted(name for name in self.blobs if name.startswith(asked.get("prefix", "")))
        if "delimiter" in asked:
            names = [name for name in names if "/" not in name[len(asked.get("prefix", "")) :]]
        first = int(asked.get("marker") or 0)
        rest = str(first + self.page) if len(names) > first + self.page else ""
        entries = (f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{TIME}</Last-Modified><Etag>"
                   f"{tag_of(self.blobs[name])}</Etag><Content-Length>{len(self.blobs[name])}</Content-Length>"
                   "<Content-Type>any</Content-Type></Properties></Blob>"
                   for name in names[first : first + self.page])  # fmt: skip
        return (f"<EnumerationResults><Blobs>{''.join(entries)}</Blobs><NextMarker>{rest}</NextMarker>"
                "</EnumerationResults>").encode()  # fmt: skip

    def remove(self, paths: list[bytes]) -> bytes:
        """Remove blobs, and return the answer to each of the requests of a batch."""
        parts = []
        for number, path in enumerate(paths):
            name = unquote(urlsplit(path.decode()).path).removeprefix(f"/{CONTAINER}/")
            status = "202 Accepted" if self.blobs.pop(name, None) is not None else "404 The blob does not exist"
            parts.append(
                f"--{BATCH}\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
                f"HTTP/1.1 {status}\r\nx-ms-version: 2018-11-09\r\n\r\n"
            )
        return f"{''.join(parts)}--{BATCH}--\r\n".encode()

    def answer(self, method: str, path: str, span: str, body: bytes) -> tuple[int, bytes | str]:
        """Return status and content, or an error's code."""
        url = urlsplit(path)
        asked = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        container, _, name = unquote(url.path).lstrip("/").partition("/")
        if self.fault or container != CONTAINER:
            return self.fault or (404, "ContainerNotFound")
        if asked.get("comp") == "list":
            return 200, self.listing(asked)
        if asked.get("comp") == "batch":
            return 202, self.remove(re.findall(rb"DELETE (\S+) HTTP", body))
        if asked.get("comp") == "block":
            self.blocks[asked["blockid"]] = body
        elif asked.get("comp") == "blocklist":
            self.blobs[name] = b"".join(self.blocks[each.decode()] for each in re.findall(rb">([^<>]+)</Un", body))
        elif method == "PUT":
            self.blobs[name] = body
        elif name not in self.blobs:
            return 404, "BlobNotFound"
        elif span:
            start, end = re.fullmatch(r"bytes=(\d+)-(\d*)", span).groups()
            return 206, self.blobs[name][int(start) : int(end) + 1 if end else None]
        else:
            return 200, self.blobs[name]
        return 201, b""


def tag_of(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


@contextmanager
def azure_server() -> Iterator[AzureServer]:
    server = AzureServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            span = self.headers.get("Range", "") or self.headers.get("x-ms-range", "")
            server.requests.append((unquote(self.path), span))
            server.signatures.append(self.headers.get("Authorization", ""))
            status, content = server.answer(self.command, self.path, span, sent)
            whole = server.blobs.get(unquote(urlsplit(self.path).path).removeprefix(f"/{CONTAINER}/"), b"")
            body = content if isinstance(content, bytes) else f"<Error><Code>{content}</Code></Error>".encode()
            self.send_response(status)
            self.send_header("Last-Modified", TIME)
            self.send_header("ETag", tag_of(whole))
            if "comp=batch" in self.path:
                self.send_header("Content-Type", f"multipart/mixed; boundary={BATCH}")
            if status == 206:
                start = int(re.findall(r"\d+", span)[0])
                self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{len(whole)}")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_PUT = do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    here = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    here.daemon_threads = True
    server.address = f"http://127.0.0.1:{here.server_address[1]}"
    threading.Thread(target=here.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        here.shutdown()
        here.server_close()
