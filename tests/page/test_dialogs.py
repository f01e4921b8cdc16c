"""Detect Blocks and the DeepSpeed Builder in a real Chromium, exports, and caches: from click to file on disk."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import ranks
from browser import expect_axe_finds_nothing
from conftest import SMALL, Starter
from holders import holder
from page_server import PageServer, page_server
from playwright.sync_api import Locator, Page, expect

from simpletuner.app import main
from simpletuner.caches.store.shards import ShardWriter
from simpletuner.errors import EnvironmentNotReady
from simpletuner.page.child_processes import AwaitedCommands
from simpletuner.page.editing import blocks
from simpletuner.settings.declared.sections import Model
from simpletuner.settings.showing.export import FORMATS

CONFIG = """\
model_family = "sdxl"  # the base
instance_data_dir = "pictures"
num_processes = 2
validation_prompt = ["it's <b>bold</b>"]
"""


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[PageServer]:
    """A page that starts cold, as does what it starts."""
    with page_server(folder) as started:
        yield started


@pytest.fixture
def config(folder: Path) -> Path:
    (folder / "pictures").mkdir(exist_ok=True)
    (folder / "pictures" / "a.png").touch()
    path = folder / "run.toml"
    path.write_text(CONFIG)
    return path


def open_accelerate(page: Page, server: PageServer) -> None:
    page.goto(f"{server.origin}/configurations/edit?file=run.toml&view=accelerate")


def values_of(folder: Path, *command: str) -> dict[str, Any]:
    shown = [sys.executable, "-m", "simpletuner", "config", "show", "--all", "--json", *command]
    done = subprocess.run(shown, cwd=folder, capture_output=True, text=True, check=True)
    return {name: row["value"] for name, row in json.loads(done.stdout).items()}


@pytest.fixture
def training(folder: Path, sdxl: Path, shapes: Path) -> Path:
    """A file that two ranks can train with."""
    model = {"model_family": "sdxl", "pretrained_model_name_or_path": str(sdxl)}
    run = {"instance_data_dir": str(shapes), "output_dir": str(folder / "out"), "max_train_steps": 1}
    path = folder / "train.json"
    path.write_text(json.dumps({**model, **run, "num_processes": 2}, indent=2))
    return path


def open_blocks(page: Page, server: PageServer) -> Locator:
    """Open the dialog for train.json, and wait until it has found something."""
    page.goto(f"{server.origin}/configurations/edit?file=train.json&view=accelerate")
    page.get_by_role("button", name="Detect Blocks").click()
    dialog = page.get_by_role("dialog")
    dialog.locator("tbody tr").first.wait_for()
    return dialog


def test_blocks_are_detected_applied_and_trained_with(
    page: Page, server: PageServer, folder: Path, training: Path, starter: Starter
):
    """From the dialog to two ranks that shard the class that was chosen, by the file that the page has saved."""
    before = training.read_text()
    assert "Detected" in open_blocks(page, server).inner_text()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    # Cached now, so it is there at once; the server has not imported torch for it.
    page.get_by_role("button", name="Detect Blocks").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator("tbody tr").first).to_be_visible()
    assert "Cached" in dialog.inner_text() and "_no_split_modules" in dialog.inner_text()
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    ticked = dialog.locator("input[name=selected]:checked").evaluate_all("boxes => boxes.map(box => box.value)")
    assert ticked == ["ResnetBlock2D", "Transformer2DModel"], "what is recommended"
    assert dialog.locator("meter").first.get_attribute("value") is not None
    dialog.get_by_role("checkbox", name="Transformer2DModel").uncheck()
    dialog.get_by_role("button", name="Apply Selection").click()
    expect(page.get_by_label("Transformer Classes to Wrap")).to_have_value("ResnetBlock2D")
    page.get_by_label("Enable FSDP v2").select_option("true")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#toasts .done")).to_contain_text("2 settings changed")
    assert training.read_text().startswith(before.rstrip("}\n"))
    run = starter.start(ranks.command_line, 2, ["train", f"--config={training}", *SMALL])
    assert run.wait() == [0, 0], run.said
    assert "ResnetBlock2D" in run.said and (folder / "out" / "metrics.jsonl").is_file()


def test_detecting_that_takes_too_long_is_ended():
    with pytest.raises(EnvironmentNotReady, match="took longer than 0.05 s") as raised:
        AwaitedCommands().run(blocks.arguments_for(Model(model_family="sdxl")), 0.05)
    assert "simpletuner detect-blocks --json" in raised.value.hint and "--model_family=sdxl" in raised.value.hint


def test_axe_finds_nothing_in_dialogs_and_toasts(page: Page, server: PageServer, training: Path):
    open_blocks(page, server)
    expect_axe_finds_nothing(page)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="DeepSpeed Builder").click()
    page.get_by_role("dialog").get_by_label("Template name").fill("/")
    page.get_by_role("button", name="Save Template").click()
    page.locator("#toasts .toast").wait_for()
    expect_axe_finds_nothing(page)


def test_a_dialog_knows_what_is_not_saved_yet(page: Page, server: PageServer, config: Path):
    page.goto(f"{server.origin}/configurations/edit?file=run.toml&view=all")
    page.locator("#f-model_family").select_option("")
    page.get_by_role("button", name="Detect Blocks").click()
    expect(page.locator("#toasts .error")).to_contain_text("model_family")
    assert page.get_by_role("dialog").count() == 0, "an error opens none"
    page.locator("#f-model_family").select_option("sdxl")


def test_building_for_deepspeed(page: Page, server: PageServer, folder: Path, config: Path):
    open_accelerate(page, server)
    page.get_by_role("button", name="DeepSpeed Builder").click()
    dialog = page.get_by_role("dialog")
    json_of = dialog.get_by_role("region", name="DeepSpeed JSON")
    assert json.loads(json_of.inner_text())["zero_optimization"]["stage"] == 2
    before = dialog.locator("#preview table").inner_text()
    assert "together" in before and "GiB" in before
    dialog.get_by_label("Partition optimizer state").select_option("3")
    expect(json_of).to_contain_text('"stage": 3')
    dialog.get_by_label("Where is optimizer state kept?").select_option("cpu")
    expect(json_of).to_contain_text('"device": "cpu"')
    assert dialog.locator("#preview table").inner_text() != before
    dialog.get_by_label("Clip gradients").fill("much")
    expect(dialog.locator("#preview .error")).to_contain_text("max_grad_norm")
    dialog.get_by_label("Clip gradients").fill("0.5")
    expect(json_of).to_contain_text('"gradient_clipping": 0.5')
    dialog.get_by_label("Of each GPU").fill("24GiB")
    dialog.get_by_role("button", name="Recommend").click()
    expect(dialog.locator(".notice.done")).to_contain_text("fits 24.0 GiB per GPU")
    expect(json_of).to_contain_text('"gradient_clipping": 0.5')
    chosen = json.loads(json_of.inner_text())
    dialog.get_by_label("Template name").fill("../evil")
    dialog.get_by_role("button", name="Save Template").click()
    expect(dialog.locator("#toasts .error")).to_contain_text("cannot name a template")
    dialog.get_by_label("Template name").fill("mine")
    dialog.get_by_role("button", name="Save Template").click()
    expect(dialog.locator("#toasts .done")).to_contain_text("saved as the template mine")
    dialog.get_by_role("button", name="Save and Apply").click()
    expect(page.locator("#f-deepspeed_config")).to_have_value("deepspeed.json")
    assert json.loads((folder / "deepspeed.json").read_text()) == chosen
    page.get_by_role("button", name="Save", exact=False).first.click()
    expect(page.locator("#toasts")).to_contain_text("run.toml is saved: 1 setting changed")
    values = values_of(folder, "--config=run.toml")
    assert values["zero_stage"] == chosen["zero_optimization"]["stage"] and values["max_grad_norm"] == 0.5
    # The template is there for the next configuration, and an existing file stays.
    config.write_text(CONFIG)
    open_accelerate(page, server)
    page.get_by_role("button", name="DeepSpeed Builder").click()
    dialog.get_by_label("Start from a template").select_option("mine")
    expect(dialog.get_by_label("Clip gradients")).to_have_value("0.5")
    dialog.get_by_role("button", name="Save and Apply").click()
    expect(dialog.locator("#toasts .error")).to_contain_text("deepspeed.json exists already")


@pytest.mark.parametrize("to", list(FORMATS))
def test_exports_are_those_of_the_command(
    server: PageServer,
    folder: Path,
    config: Path,
    to: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """What is given to download, and what is shown to copy, is what `config export` prints and replays."""
    more = "zero_stage = 2\n" if to == "deepspeed" else ""
    config.write_text(CONFIG + more)
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit, match="^0$"):
        main(["config", "export", "--config=run.toml", f"--to={to}"])
    printed, said = capsys.readouterr()
    text = server.get("/export/download", file="run.toml", to=to)
    assert text.text == printed and "attachment" in text.headers["content-disposition"]
    page = server.get("/export", file="run.toml", to=to).text
    shown = [unescape(found) for found in re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.DOTALL)]
    assert shown[0].strip() == printed.strip()
    replay = shown[1].strip() if len(shown) > 1 else ""
    assert " ".join(replay.split()) in " ".join(said.split())
    assert to == "cli" or replay


def test_a_single_configuration_is_exported_without_asking(server: PageServer, folder: Path, config: Path):
    others = [path for path in folder.rglob("*.*") if path.suffix in (".json", ".toml", ".yaml", ".env")]
    for path in {*others} - {config}:
        path.unlink()
    assert 'id="export-text"' in server.get("/export").text
    other = folder / "other.toml"
    other.write_text(CONFIG)
    assert "Choose a configuration" in server.get("/export").text
    other.unlink()


def test_what_cannot_be_exported_says_why(page: Page, server: PageServer, config: Path):
    page.goto(server.origin + "/export")
    page.get_by_label("Configuration").select_option("run.toml")
    page.wait_for_url("**file=run.toml*")
    assert "it'\"'\"'s <b>bold</b>" in page.locator("#export-text").inner_text()
    page.get_by_role("button", name="Copy").click()
    page.get_by_label("Format").select_option("deepspeed")
    expect(page.locator(".notice.error")).to_contain_text("DeepSpeed is off")


def test_clearing_caches(page: Page, server: PageServer, folder: Path, config: Path):
    latents, detected = (
        folder / "output" / "cache" / "latents" / "abc",
        folder.parent / "home" / "fsdp_block_cache.json",
    )
    detected.parent.mkdir(exist_ok=True)
    detected.write_text('{"a": {}, "b": {}}')
    with ShardWriter(latents, 0) as writer:
        writer.write_broken("a.png", {"file": "1"}, "it is broken")
    page.goto(server.origin + "/preferences?file=run.toml")
    assert page.locator("tbody tr").count() == 4
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Clear FSDP Detection Cache").click()
    expect(page.locator("#toasts .done")).to_contain_text("FSDP Detection Cache: 1 cache, 18 bytes removed")
    expect(page.get_by_role("button", name="Clear FSDP Detection Cache")).to_be_disabled()
    assert not detected.exists()
    clear = page.get_by_role("button", name="Clear Latents Cache")
    with holder("file", folder / "output" / ".lock"), holder("cache", latents):
        (folder / "output" / ".lock").write_text("node7 1234\n")
        clear.click()
        expect(page.locator("#toasts .error")).to_contain_text("is in use by a run (pid 1234 on node7)")
        expect(clear).to_be_disabled()
        assert list(latents.glob("rank*"))
    page.reload()
    clear.click()
    expect(page.locator("#toasts .done")).to_contain_text("Latents Cache: 1 cache")
    assert not latents.exists()


def test_caches_outside_the_folders_stay(server: PageServer, folder: Path, config: Path):
    outside = folder.parent / "elsewhere"
    with ShardWriter(outside, 0) as writer:
        writer.write_broken("a.png", {"file": "1"}, "it is broken")
    config.write_text(f'{CONFIG}cache_dir_vae = "{outside}"\n')
    refused = server.post("/preferences/clear", {"kind": "latents", "file": "run.toml"})
    assert "is not in" in refused.text and list(outside.glob("rank*"))
    assert "which cache?" in server.post("/preferences/clear", {"kind": "all", "file": "run.toml"}).text
