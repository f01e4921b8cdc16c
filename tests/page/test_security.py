"""Who may use the page: each request here is one that a site, a machine or a user who may not would send."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_server import PageServer

from simpletuner.errors import SettingsError
from simpletuner.page.folders import Folders
from simpletuner.page.guard import names_this_machine


def test_only_the_printed_address_opens_the_page(server: PageServer):
    for cookie in ({}, {"Cookie": f"simpletuner-{server.port}=wrong"}, {"Cookie": "simpletuner-1=" + server.token}):
        refused = server.send("GET", "/runs", cookie)
        assert refused.code == 401 and "needs the address" in refused.text and server.token not in refused.text
    assert server.send("GET", "/runs?token=wrong", {}).code == 401
    entered = server.send("GET", "/runs?token=" + server.token, {})
    assert entered.code == 200 and 'url=/runs"' in entered.text
    cookie = entered.headers["set-cookie"]
    assert cookie.startswith(f"simpletuner-{server.port}={server.token};")
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert server.get("/runs").code == 200
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text(), "it starts in half a second"


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
