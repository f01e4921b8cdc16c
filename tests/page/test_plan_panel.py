"""The plan beside the form, in a real Chromium, with real processes that count."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
from browser import expect_axe_finds_nothing
from conftest import Starter
from page_server import PageServer
from patience import PATIENCE
from playwright.sync_api import Page, expect

from simpletuner.errors import EnvironmentNotReady
from simpletuner.page.child_processes import AwaitedCommands
from simpletuner.page.editing.planning import Planning, PlanQuestion
from simpletuner.system.numbers import format_gib

CONFIG = """\
model_family = "flux"  # in miniature
model_flavour = "tiny"
resolution = 64
max_train_steps = 1000
fsdp_enable = false
state_layout = "fp32"
"""


@pytest.fixture
def config(folder: Path) -> Path:
    path = folder / "plan.toml"
    path.write_text(CONFIG)
    return path


def planned(starter: Starter, config: Path, *flags: str) -> dict[str, Any]:
    run = starter.start(ranks.command_line, 1, ["plan", f"--config={config}", "--gpu=H100", "--json", *flags])
    assert run.wait() == [0], run.said
    return json.loads(run.said[run.said.index("{") :])


@pytest.mark.long
def test_what_is_typed_is_planned_and_what_would_fit_is_taken_over(
    page: Page, server: PageServer, config: Path, starter: Starter
):
    address = f"{server.origin}/configurations/edit?file=plan.toml"
    page.goto(address)
    result, together = page.locator("#plan-result"), page.locator("#plan-result tr", has_text="together")
    page.get_by_label("GPU", exact=True).select_option("H100")
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(result).to_contain_text("Fits")
    assert "Predicted, not measured" in result.inner_text() and "1,000 steps" in result.inner_text()
    first = together.inner_text()

    # As somebody types, of what is not saved; the old plan stays until the new one is there, and says that it is old.
    page.get_by_label("Plan as I type").check()
    page.locator("#f-train_batch_size").fill("48")
    expect(page.locator("#plan-outdated")).to_be_visible()
    assert together.inner_text() == first
    expect(page.locator("#plan-outdated")).to_be_hidden()
    wanted = planned(starter, config, "--train_batch_size=48")
    assert together.inner_text().split(None, 1) == ["together", format_gib(wanted["gpu_bytes"])] != first.split(None, 1)
    bar = page.locator(".memory-bar rect").evaluate_all(
        "each => each.map(one => parseFloat(one.getAttribute('width')))"
    )
    assert sum(bar[1:]) == pytest.approx(100 * wanted["gpu_bytes"] / wanted["gpu_memory_bytes"], abs=0.1)
    expect_axe_finds_nothing(page)

    # A mistake needs no process, and what the command refuses is its own sentence.
    page.locator("#f-train_batch_size").fill("many")
    expect(result.locator(".error")).to_contain_text("train_batch_size")
    page.locator("#f-train_batch_size").fill("2")
    page.get_by_label("Memory", exact=True).fill("lots")
    expect(result.locator(".error")).to_contain_text("--gpu_memory")
    page.get_by_label("Memory", exact=True).fill("0.3GiB")
    expect(result).to_contain_text("Does not fit")
    page.get_by_label("Memory", exact=True).fill("")

    page.get_by_label("Plan as I type").uncheck()
    page.get_by_role("button", name="What would fit").click()
    page.get_by_role("button", name="Take over").click()
    expect(page.locator("#plan-outdated")).to_be_hidden()
    proposed = result.locator(".proposal code").all_inner_texts()
    assert proposed and config.read_text() == CONFIG, "nothing is saved yet"
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#toasts .toast")).to_contain_text("is saved")
    assert "What would fit" in result.inner_text(), "a plan survives that the form is made again"
    lines = config.read_text().splitlines()
    assert lines[0] == CONFIG.splitlines()[0] and "train_batch_size = 2" in lines
    for each in proposed:
        assert each.replace('"', "") in [line.replace('"', "") for line in lines]

    page.goto(address)
    expect(page.get_by_label("GPU", exact=True)).to_have_value("H100")
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_one_process_at_a_time_and_answers_are_kept(tmp_path: Path):
    commands, ended = AwaitedCommands(), []
    planning = Planning(commands)

    def ask(text: str, key: str, gpu: str = "H100", again: bool = False) -> Any:
        return planning.answer(PlanQuestion(Path("a.toml"), text, tmp_path, gpu), key, again)

    earlier = threading.Thread(target=lambda: ended.append(ask(CONFIG, "earlier")))
    earlier.start()
    end = time.monotonic() + PATIENCE
    while not commands.processes and time.monotonic() < end:
        time.sleep(0.01)
    [process] = commands.processes.values()
    with pytest.raises(EnvironmentNotReady, match="not in the table"):
        ask(CONFIG, "later", gpu="nonsense")
    earlier.join(PATIENCE)
    assert ended == [None] and process.returncode == -signal.SIGKILL and not commands.processes
    planning.kept["known"] = {"fits": True}
    assert ask(CONFIG, "known", gpu="nonsense") == {"fits": True}, "no process is needed"
    with pytest.raises(EnvironmentNotReady):
        ask(CONFIG, "known", gpu="nonsense", again=True)
    with pytest.raises(EnvironmentNotReady, match=r"a\.toml:1"):
        ask("sede = 1", "wrong")


def test_only_what_matters_is_another_question(tmp_path: Path):
    from simpletuner.settings import load

    question = PlanQuestion(tmp_path / "a.toml", "", tmp_path)

    def key(**flags: Any) -> str:
        return question.key(load({"model_family": "sdxl", **flags}, None, complete=False).settings)

    assert key() == key(seed=7) == key(notify_url="https://example.org", learning_rate=1e-3)
    assert (
        len({key(), key(train_batch_size=8), key(validation_prompt=["a"]), key(instance_data_dir=str(tmp_path))}) == 4
    )


def test_files_outside_are_not_planned_with(server: PageServer, folder: Path, config: Path):
    secret = folder.parent / "secret.json"
    secret.write_text('{"hidden": 1}')
    for name in ("deepspeed_config", "data_backend_config"):
        said = server.post("/plan", {"file": "plan.toml", name: str(secret)}).text
        assert "is not in" in said and "hidden" not in said
    assert server.post("/plan", {"file": "../plan.toml"}).text.count("is not in") == 1
