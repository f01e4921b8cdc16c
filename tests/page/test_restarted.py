"""The page's server is started again while tabs are open: what was typed can be saved, and errors are said once."""

from __future__ import annotations

import socket
from pathlib import Path

from page_server import page_server
from playwright.sync_api import Browser, expect


def test_what_was_typed_is_saved_after_a_restart_and_errors_do_not_pile_up(browser: Browser, tmp_path: Path):
    work = tmp_path / "work"
    work.mkdir()
    config = work / "run.toml"
    config.write_text('model_family = "sdxl"\nmodel_flavour = "tiny"\n')
    (work / "out").mkdir()
    (work / "out" / "metrics.jsonl").write_text("")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = f"--port={free.getsockname()[1]}"
    context = browser.new_context()
    editor, watching = context.new_page(), context.new_page()
    with page_server(work, port) as server:
        editor.goto(server.address)
        editor.wait_for_url(server.origin + "/configurations*")
        editor.goto(f"{server.origin}/configurations/edit?file=run.toml&view=all")
        editor.locator("#f-seed").fill("77")
        watching.goto(f"{server.origin}/runs/watch?run=out")
    with page_server(work, port) as server:
        toasts = watching.locator("#toasts .toast", has_text="with its token")
        expect(toasts).to_have_count(1)
        watching.wait_for_timeout(5000)  # two more polls
        expect(toasts).to_have_count(1)
        entered = context.new_page()
        entered.goto(server.address)
        entered.wait_for_url(server.origin + "/configurations*")
        editor.get_by_role("button", name="Save").click()
        expect(editor.locator("#changed")).to_be_hidden(timeout=20000)
    assert "seed = 77" in config.read_text()
    context.close()
