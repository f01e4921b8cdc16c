"""A hub of models on loopback: the few questions that huggingface_hub asks, answered from folders, and uploads."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves each folder below `root/owner/name`; remembers which files were fetched."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.root = root
        self.commit = COMMIT
        self.roots: dict[str, Path] = {}
        """Root of each commit but the newest, of which branches are."""
        self.fetched: list[str] = []
        self.created: list[dict] = []
        self.tokens: set[str] = set()

    def push(self, commit: str, root: Path) -> None:
        self.roots[self.commit] = self.root
        self.commit, self.root = commit, root

    def commit_named(self, revision: str) -> str:
        return revision if revision in self.roots else self.commit

    def root_of(self, commit: str) -> Path:
        return self.roots.get(commit, self.root)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    """Answers /api/models/ID/revision/R, /api/models/ID/tree/R and /ID/resolve/R/PATH, and of datasets the same."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_POST(self) -> None:
        """Answers /api/repos/create, /api/validate-yaml, and /api/models/ID/{preupload,commit}/R, with every file."""
        self.server.tokens.add(self.headers.get("Authorization", ""))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        words = unquote(urlsplit(self.path).path).strip("/").split("/")
        if words == ["api", "repos", "create"]:
            self.server.created.append(asked := json.loads(body))
            name = "/".join(filter(None, (asked.get("organization") or "me", asked["name"])))
            (self.server.root / name).mkdir(parents=True, exist_ok=True)
            self.reply(200, json.dumps({"url": f"{self.server.address}/{name}", "id": name}).encode(), {})
        elif words == ["api", "validate-yaml"]:  # of a model card
            self.reply(200, b'{"errors": [], "warnings": []}', {})
        elif words[4:5] == ["preupload"]:
            files = [{"path": each["path"], "uploadMode": "regular"} for each in json.loads(body)["files"]]
            self.reply(200, json.dumps({"files": [each | {"shouldIgnore": False} for each in files]}).encode(), {})
        elif words[4:5] == ["commit"]:
            self.commit("/".join(words[2:4]), [json.loads(line) for line in body.splitlines()])
        else:
            self.refuse("EntryNotFound")

    def commit(self, name: str, lines: list[dict]) -> None:
        for value in (line["value"] for line in lines if line["key"] == "file"):
            path = self.server.root / name / value["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(value["content"]))
        done = {"success": True, "commitOid": COMMIT, "commitUrl": f"{self.server.address}/{name}/commit/{COMMIT}"}
        self.reply(200, json.dumps(done).encode(), {})

    def answer(self, with_body: bool) -> None:
        words = unquote(urlsplit(self.path).path).strip("/").split("/")
        if words[:2] == ["api", "models"]:
            revision = words[5] if len(words) > 5 else ""
            if len(revision) == len(COMMIT) and revision not in (self.server.commit, *self.server.roots):
                self.refuse("RevisionNotFound")
                return
            commit = self.server.commit_named(revision)
            self.tell(self.server.root_of(commit) / words[2] / words[3], words[4], commit)
            return
        if words[:2] == ["api", "datasets"]:
            self.tell(self.server.root / "datasets" / words[2] / words[3], *words[4:5])
            return
        if words[0] == "datasets":
            words = ["datasets/" + words[1], *words[2:]]
        commit = self.server.commit_named("".join(words[3:4]))
        path = self.server.root_of(commit).joinpath(words[0], words[1], *words[4:])
        if not path.is_file():
            self.refuse("EntryNotFound")
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
        if with_body:
            self.server.fetched.append("/".join(words[4:]))
        self.reply(200, content, headers, with_body)

    def tell(self, folder: Path, question: str = "", commit: str = COMMIT) -> None:
        if not folder.is_dir():
            self.refuse("RepoNotFound")
            return
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        tree = [
            {
                "type": "file",
                "path": str(path.relative_to(folder)),
                "size": path.stat().st_size,
                "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
            }
            for path in files
        ]
        info = {
            "id": "/".join(folder.parts[-2:]),
            "sha": commit,
            "siblings": [{"rfilename": each["path"]} for each in tree],
            "tags": [],
            "private": False,
        }
        self.reply(200, json.dumps(tree if question == "tree" else info).encode(), {})

    def refuse(self, code: str) -> None:
        self.reply(404, b"{}", {"X-Error-Code": code})

    def reply(self, status: int, content: bytes, headers: dict[str, str], with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    with Hub(root) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()
