"""Checkpoints on the page of a run, in a real Chromium: going on from one, removing one, comparing two."""

from __future__ import annotations

import fcntl
import re
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from browser import expect_axe_finds_nothing
from conftest import SMALL
from forked_launcher import HELD
from page_server import PageServer
from patience import PATIENCE
from playwright.sync_api import Page, expect

FLAGS = (
    *SMALL,
    *("--model_family=sdxl", "--model_flavour=tiny", "--instance_data_dir=shapes", "--max_train_steps=6"),
    *("--train_batch_size=1", "--validation_prompt=a circle", "--validation_num_inference_steps=1"),
    *("--validation_step_interval=2", "--checkpoint_step_interval=2", "--output_dir=out"),
    *("--use_ema=true", "--ema_validation=none"),
)
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
CONFIG = "".join(f"{name[2:]} = '{value}'\n" for name, _, value in (flag.partition("=") for flag in FLAGS))


@pytest.fixture(scope="module")
def folder(folder: Path, shapes: Path) -> Path:
    (folder / "shapes").symlink_to(shapes)
    (folder / "run.toml").write_text(CONFIG)
    return folder


def held_process(folder: Path) -> psutil.Process:
    """Wait for a process of the page that has stopped before it begins."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for path in folder.glob("[0-9]*.json"):
            with suppress(psutil.NoSuchProcess):
                if (process := psutil.Process(int(path.stem))).status() == psutil.STATUS_STOPPED:
                    return process
        time.sleep(0.05)
    raise AssertionError("the page has started nothing")


@pytest.mark.long
def test_going_on_from_a_checkpoint_comparing_two_and_deleting_one(page: Page, server: PageServer, folder: Path):
    assert server.post("/runs/start", {"file": "run.toml"}).code == 200
    page.goto(f"{server.origin}/runs/watch?run=out")
    state, listed = page.locator("#live-status .state"), page.locator("#live-checkpoints tbody tr")
    expect(state).to_have_text("finished")
    expect(listed).to_have_count(3)
    assert [row.locator("th").inner_text() for row in listed.all()] == [f"checkpoint-00000{step}" for step in (6, 4, 2)]
    assert "next start" in listed.first.inner_text() and "complete" in listed.last.inner_text()

    page.locator("summary", has_text="Compare two checkpoints").click()
    page.get_by_label("Second", exact=True).select_option("checkpoint-000004")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.wait_for_url("**/runs/checkpoints/compare?run=out&one=checkpoint-000002&two=checkpoint-000004")
    assert page.locator("figcaption").all_inner_texts() == ["trained, step 2", "trained, step 4"]
    page.locator("figure img").last.scroll_into_view_if_needed()
    for image in page.locator(
        "figure img"
    ).all():  # wait_for_function looks once, then asks for an eval, which CSP forbids
        expect(image).not_to_have_js_property("naturalWidth", 0)
    loss = (
        page.locator("tr", has=page.get_by_role("rowheader", name="Loss", exact=True)).locator("td").all_inner_texts()
    )
    assert len(set(loss)) == 2 and all(float(each) > 0 for each in loss)
    expect_axe_finds_nothing(page)
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1280, "height": 900})
    page.go_back()

    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
    page.get_by_role("button", name="Go on from checkpoint-000002").click()
    page.wait_for_url("**/runs/watch?run=out")
    aside = folder / "out" / "checkpoints" / "set-aside"
    assert asked == [
        "Go on from checkpoint-000002? 2 later checkpoints of out will be moved to checkpoints/set-aside; "
        "nothing is deleted."
    ]
    expect(page.locator("#log-text")).to_contain_text("later checkpoints are set aside")
    assert sorted(each.name for each in aside.iterdir()) == ["checkpoint-000004", "checkpoint-000006"]
    expect(state).to_have_text("finished")
    expect(listed).to_have_count(3)
    expect(page.get_by_role("button", name=re.compile("Start .* again"))).to_be_visible()

    page.get_by_role("button", name="Export checkpoint-000006").click()
    exports = page.locator("#live-results")
    expect(exports.locator(".notice.done")).to_contain_text("checkpoint-000006 is exported")
    expect(exports.get_by_role("row", name="out/pipeline-000006")).to_contain_text("step 6")
    (folder.parent / HELD).touch()
    page.get_by_role("button", name="Export checkpoint-000006").click()
    process = held_process(folder.parent)
    expect(exports.get_by_role("progressbar")).to_be_visible()
    (folder.parent / HELD).unlink()
    process.resume()
    assert asked[-1] == "checkpoint-000006 is exported already: write it again, in its place?"
    expect(exports.get_by_role("progressbar")).to_have_count(0)
    assert (folder / "out" / "pipeline-000006" / "simpletuner.json").is_file()
    page.get_by_role("button", name="Export EMA of checkpoint-000006").click()
    expect(exports.locator(".notice.done")).to_contain_text("EMA of checkpoint-000006 is exported")
    expect(exports.get_by_role("row", name="out/pipeline-ema-000006")).to_contain_text("pipeline, EMA")
    assert len(asked) == 2, "only what is there already is asked for"
    trained, average = ((folder / "out" / f"pipeline{kind}-000006" / WEIGHTS).read_bytes() for kind in ("", "-ema"))
    assert trained != average
    assert average == (folder / "out" / "pipeline-ema" / WEIGHTS).read_bytes()
    expect_axe_finds_nothing(page)

    # One that lacks bytes cannot be gone on from.
    checkpoints = folder / "out" / "checkpoints"
    weights = next((checkpoints / "checkpoint-000004" / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    expect(listed.nth(1)).to_contain_text("is damaged")
    expect(page.get_by_role("button", name="Go on from checkpoint-000004")).to_have_count(0)
    page.get_by_role("button", name="Delete checkpoint-000004").click()
    expect(listed).to_have_count(2)
    assert sorted(each.name for each in checkpoints.iterdir()) == [
        "checkpoint-000002",
        "checkpoint-000006",
        "set-aside",
    ]
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390

    # Not of a run that goes on, and nothing that is no checkpoint of this run.
    with (folder / "out" / ".lock").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused = server.post("/runs/checkpoints/delete", {"run": "out", "name": "checkpoint-000002"})
    assert refused.code == 400 and "a run may be using out" in refused.text
    for name in ("set-aside", "../out", "checkpoint-000002/../checkpoint-000006", "checkpoint-000004", ""):
        assert server.post("/runs/checkpoints/delete", {"run": "out", "name": name}).code == 400
        assert server.post("/runs/checkpoints/export", {"run": "out", "name": name}).code == 400
        assert server.post("/runs/start", {"file": "run.toml", "checkpoint": name or "."}).code == 400
        assert server.get("/runs/checkpoints/compare", run="out", one=name, two="checkpoint-000002").code == 400
    (checkpoints / "checkpoint-000009").symlink_to(folder.parent)
    assert server.post("/runs/checkpoints/delete", {"run": "out", "name": "checkpoint-000009"}).code == 400
    assert folder.parent.is_dir() and (checkpoints / "checkpoint-000002").is_dir()
