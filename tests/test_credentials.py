"""Credentials are in nothing that a run writes or says, nor on the page that shows it."""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import ranks
from conftest import SMALL
from page_server import page_server
from tabled import write_rows

from simpletuner.credentials import mask_credentials

USER, PASSWORD, SIGNATURE, HOOK = "somebody", "pa%40ssw0rd-of-mine", "c0ffee51", "who-knows-this-may-post"
SECRETS = (USER, PASSWORD, "pa@ssw0rd-of-mine", SIGNATURE, HOOK, "hf_never_shown")


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://me:pa%40ss@example.org/a?x=1", "https://...@example.org/a?x=1"),
        ("error: http://ghp_123@git.org:80: refused", "error: http://...@git.org:80: refused"),
        ("s3://u:p@ss@bucket/a", "s3://...@bucket/a"),
        ("'https://a.org/x?X-Amz-Signature=0f&X-Amz-Date=1'", "'https://a.org/x?X-Amz-Signature=...&X-Amz-Date=1'"),
        ("https://a.org/x?sv=1&sig=Ab%2B#top", "https://a.org/x?sv=1&sig=...#top"),
        ("https://a.org/x?access_token=t, api_key=k", "https://a.org/x?access_token=... api_key=k"),
        ("https://a.org/@me/photo?design=sig&monkey=1", "https://a.org/@me/photo?design=sig&monkey=1"),
        ("me@example.org, a: b@c", "me@example.org, a: b@c"),
    ],
)
def test_credentials_in_addresses_are_masked_and_nothing_else_is(text, masked):
    assert mask_credentials(text) == masked


@pytest.fixture
def server(shapes: Path) -> Iterator[tuple[str, Counter[str]]]:
    """Serve pictures, and take messages, with the right user and password; return host and what was asked for."""
    expected, asked = b64encode(f"{USER}:pa@ssw0rd-of-mine".encode()).decode(), Counter[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked[self.command] += 1
            file = shapes / self.path.partition("?")[0].lstrip("/")
            is_known = self.headers.get("Authorization") == f"Basic {expected}"
            status = 401 if not is_known else 404 if not file.is_file() and self.command == "GET" else 200
            content = file.read_bytes() if status == 200 and self.command == "GET" else b""
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True).start()
    yield f"127.0.0.1:{served.server_port}", asked
    served.shutdown()
    served.server_close()


def test_no_secret_is_in_what_a_run_writes_or_says_or_on_the_page(server, sdxl, shapes, starter, tmp_path):
    host, asked = server
    address, output = f"http://{USER}:{PASSWORD}@{host}", tmp_path / "run"
    names = [path.name for path in sorted(shapes.glob("*.png"))[:8]]
    rows = [
        {"url": f"{address}/{name}?X-Amz-Signature={SIGNATURE}", "text": "a shape"} for name in [*names, "gone.png"]
    ]
    (tmp_path / "elsewhere").mkdir()
    table = write_rows(tmp_path / "elsewhere" / "urls.csv", rows)
    dataset = {"id": "d", "type": "csv", "csv_file": str(table), "csv_cache_dir": str(tmp_path / "images")}
    dataset |= {"caption_strategy": "csv", "csv_caption_column": "text"}
    (tmp_path / "data.json").write_text(json.dumps([dataset]))
    config = tmp_path / "elsewhere" / "hook.env"
    config.write_text(f"SIMPLETUNER_NOTIFY_URL={address}/{HOOK}\n")
    flags = (*SMALL, "--model_family=sdxl", f"--pretrained_model_name_or_path={sdxl}")
    flags = (*flags, f"--data_backend_config={tmp_path / 'data.json'}", f"--output_dir={output}", "--push_to_hub")
    flags = (*flags, "--validation_prompt=a", "--validation_num_inference_steps=1", "--report_to=tensorboard")
    own = {"HF_ENDPOINT": f"http://{USER}:{PASSWORD}@127.0.0.1:9", "HF_TOKEN": "hf_never_shown"}

    def run(*more: str, **variables: str) -> str:
        started = starter.start(ranks.command_line_with, 1, own | variables, ["train", *flags, *more])
        assert started.wait() == [0], started.said
        return started.said

    said = run(f"--notify_url={address}/{HOOK}", "--max_train_steps=1")
    assert "1 address without an image left out" in said and "gone.png" in said, said
    posted = asked["POST"]
    assert "was not uploaded" in said and asked["GET"] == 9 and posted
    hook = {"HOOK_OF_TESTS": f"{address}/{HOOK}"}
    said += run(f"--config={config}", "--max_train_steps=2", "--notify_url={env:HOOK_OF_TESTS}", **hook)
    assert "settings changed since the last start" in said and "{env:HOOK_OF_TESTS}" in said and asked["POST"] > posted
    (output / "config.json").write_bytes((output / "settings.json").read_bytes())
    with page_server(tmp_path, f"--folder={output}", environment=hook) as page:
        answers = [page.get(path, run="run").text for path in ("/runs", "/runs/watch", "/runs/watch/news")]
        answers += [page.get(path, file="config.json").text for path in ("/configurations/edit", "/export")]
    assert "HOOK_OF_TESTS" in "".join(answers)
    shown = {"console": said, "page": "".join(answers)}
    for path in [*tmp_path.rglob("*")]:
        if path.is_file() and path.parent != table.parent:
            shown[str(path)] = path.read_bytes().decode("utf-8", "replace")
    assert len(shown) > 20
    assert not [(name, secret) for name, text in shown.items() for secret in SECRETS if secret in text]
