"""Who may use the page: each request here is one that a site, a machine or a user who may not would send."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urljoin
from urllib.request import urlopen

import pytest
from page_server import PageServer, page_server
from patience import PATIENCE
from terminal import Terminal

from simpletuner.errors import SettingsError
from simpletuner.page.guard import names_this_machine
from simpletuner.runs.folder import Folders

FOREGROUND_BROWSER = """#!/bin/sh
# As `BROWSER="w3m %s"` is one: it ends when its user closes it.
cd "$1"
file=${2#file://}
stat -c %a "$file" > mode
cp "$file" opened
echo "$2" > arguments.new
mv arguments.new arguments
for i in $(seq 1200); do [ -e closed ] && exit; sleep 0.1; done
"""


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[PageServer]:
    """A page that starts cold, as does what it starts."""
    with page_server(folder) as started:
        yield started


def test_the_printed_address_opens_the_page_for_one_browser(server: PageServer):
    session = server.cookie["Cookie"].partition("=")[2]  # what the first browser got
    token = server.token
    assert len({session, token}) == 2
    for cookie in ({}, {"Cookie": f"simpletuner-{server.port}={token}"}, {"Cookie": f"simpletuner-1={session}"}):
        refused = server.send("GET", "/runs", cookie)
        assert refused.code == 401 and "needs the address" in refused.text and token not in refused.text
    assert server.send("GET", "/runs?token=wrong", {}).code == 401
    assert server.send("HEAD", "/runs?token=" + token, {}).code == 401, "it is not used up by a look"
    assert server.get("/runs?token=" + token).code == 200, "nor by a browser that has entered"
    entered = server.send("GET", "/runs?token=" + token, {})
    assert entered.code == 200 and 'url=/runs"' in entered.text
    cookie = entered.headers["set-cookie"]
    assert cookie.startswith(f"simpletuner-{server.port}={session};") and token not in cookie
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    again = server.send("GET", "/runs?token=" + token, {})
    assert again.code == 401 and "was used already" in again.text and "set-cookie" not in again.headers
    server.address = server.next_address()
    assert server.token not in (token, session) and server.get("/runs").code == 200
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text(), "it starts in half a second"


@pytest.mark.parametrize(
    "path", ["//evil.example/x", "///evil.example", "/%5Cevil.example", "/%09/evil.example", "/%2F/x"]
)
def test_entering_leads_to_a_path_of_this_page(server: PageServer, path: str):
    shown = unescape(server.get(f"{path}?token=x").text)
    (target,) = re.findall(r'content="0; url=([^"]*)"', shown)
    resolved = urljoin(server.origin, re.sub(r"[\t\n\r]", "", target).replace("\\", "/"))
    assert resolved.startswith(server.origin + "/"), target


@pytest.mark.skipif(sys.platform != "linux", reason="a page opens a browser where DISPLAY is set")
def test_a_browser_is_opened_by_a_file_of_ours_and_no_argument_has_the_token(tmp_path, monkeypatch):
    fake = tmp_path / "browser"
    fake.write_text(FOREGROUND_BROWSER)
    fake.chmod(0o755)
    monkeypatch.setenv("DISPLAY", ":9")
    monkeypatch.setenv("BROWSER", f"{fake} {tmp_path} %s")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    terminal = Terminal(tmp_path, "page", "--port=0", columns=300)
    try:
        terminal.wait_for("Ctrl-C stops the page")
        end = time.monotonic() + PATIENCE
        while not (tmp_path / "arguments").exists():
            assert time.monotonic() < end, terminal.drawn
            time.sleep(0.02)
        (address,) = re.findall(r'url=(http[^"]*)"', (tmp_path / "opened").read_text())
        assert "token" not in (tmp_path / "arguments").read_text() and "token=" in address
        assert (tmp_path / "mode").read_text().strip() == "600"
        assert address not in terminal.drawn, "the printed one is another browser's"
        assert urlopen(address, timeout=PATIENCE).status == 200, "it answers a browser that is waited for"
        (tmp_path / "closed").touch()
        with pytest.raises(HTTPError):
            urlopen(address, timeout=PATIENCE)
        terminal.press("\x03")
        assert terminal.ended() == 130
        file = (tmp_path / "arguments").read_text().strip().removeprefix("file://")
        assert not Path(file).exists()
    finally:
        terminal.close()


def test_names_of_other_hosts_are_refused(server: PageServer):
    for host in ("evil.example", f"evil.example:{server.port}", "", "[", "127.0.0.1.evil.example"):
        assert server.send("GET", "/runs", server.cookie | {"Host": host}).code == 421, host
    for host in ("localhost:9999", "127.0.0.1", f"[::1]:{server.port}"):
        assert server.send("GET", "/runs", server.cookie | {"Host": host}).code == 200, host
    assert names_this_machine("node7:80", "node7") and not names_this_machine("node7:80", "0.0.0.0")


def test_a_request_that_changes_something_must_come_from_the_page(server: PageServer):
    own = server.script_headers()
    assert server.send("POST", "/runs", own).code == 405, "the guard lets it through"
    for changed in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": f"http://localhost:{server.port}"},
        {"X-CSRF-Token": ""},
        {"X-CSRF-Token": "é" * 10},
        {"X-CSRF-Token": server.token},
        {"X-CSRF-Token": server.cookie["Cookie"].partition("=")[2]},
    ):
        refused = server.send(
            "POST", "/runs", own | {name: value.encode().decode("latin-1") for name, value in changed.items()}
        )
        assert refused.code == 403 and "did not come from this page" in refused.text, changed
    assert server.send("POST", "/runs", {name: own[name] for name in own if name != "Cookie"}).code == 401
    assert server.send("DELETE", "/runs", own).code == 405
    assert server.send("POST", "/runs", own, b"a=" + b"x" * (9 << 20)).code == 413
    assert server.send("POST", "/runs", own, "&".join("a=1" for _ in range(6000))).code == 405


def test_every_response_has_the_headers(server: PageServer):
    for path in ("/runs", "/nowhere", "/static/style.css", "/?token=" + server.token):
        headers = {name.lower(): value for name, value in server.get(path).headers.items()}
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers
    assert "There is no such page" in server.get("/<script>").text


def test_what_is_outside_the_folders_is_refused_by_one_sentence(tmp_path, monkeypatch):
    root = tmp_path / "root"
    (root / "config").mkdir(parents=True)
    monkeypatch.chdir(root)
    (tmp_path / "secret.toml").write_text("seed = 1\n")
    (root / "link.toml").symlink_to(tmp_path / "secret.toml")
    (root / "up").symlink_to(tmp_path)
    (root / "loop").symlink_to("loop")
    (root / "inside.toml").symlink_to(root / "config" / "a.toml")
    folders = Folders.of([root, root / "config"])
    assert folders.resolve("config/a.toml") == folders.resolve(root / "inside.toml") == root / "config" / "a.toml"
    assert folders.shown(root / "config" / "a.toml") == "config/a.toml"
    for name in (
        *(
            "../secret.toml",
            "/etc/passwd",
            "~/x",
            "~nobody-here/x",
            "link.toml",
            "up/secret.toml",
            "config/../../secret.toml",
        ),
        *("a\0b", "", " ", "{env:HOME}/x", "{env:NO_SUCH_VARIABLE}", "/proc/self/environ", str(tmp_path / "root2")),
    ):
        with pytest.raises(SettingsError, match=r"is not in .*root") as error:
            folders.resolve(name)
        assert "--folder" in error.value.hint
        assert not folders.holds(name)
    with pytest.raises(SettingsError, match="there is no folder"):
        Folders.of([tmp_path / "missing"])
