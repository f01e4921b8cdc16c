"""Runs that wait for this machine's GPUs, in a real Chromium: offered, ordered, and started one after another."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import expect_axe_finds_nothing
from conftest import SMALL
from page_server import PageServer, page_server
from patience import PATIENCE
from playwright.sync_api import Browser, Page, expect

FLAGS = (
    *SMALL,
    *("--model_family=sdxl", "--model_flavour=tiny", "--instance_data_dir=shapes", "--train_batch_size=1"),
)
CONFIG = "".join(f"{name[2:]} = '{value}'\n" for name, _, value in (flag.partition("=") for flag in FLAGS))
LONG = 100_000
TWO_GPUS = {"CUDA_VISIBLE_DEVICES": "4,7"}
"""Names of GPUs that no process of a test uses: torch finds none and trains on the CPU, which is what it says."""


def write(folder: Path, name: str, steps: int = 2, **values: object) -> None:
    settings = {"max_train_steps": steps, "output_dir": f"out/{name}", **values}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    (folder / f"{name}.toml").write_text(CONFIG + lines)


@pytest.fixture
def work(tmp_path: Path, shapes: Path) -> Iterator[Path]:
    made = tmp_path / "work"
    made.mkdir()
    (made / "shapes").symlink_to(shapes)
    yield made
    for name in ("long", "one", "two", "both"):
        if (status := status_of(made, name)) and goes_on(made, name):  # where the test has failed
            os.kill(status["pid"], signal.SIGKILL)


def status_of(folder: Path, name: str) -> dict[str, Any]:
    try:
        return json.loads((folder / "out" / name / "status.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def is_running(folder: Path, name: str) -> bool:
    return status_of(folder, name).get("state") == "running"


def goes_on(folder: Path, name: str) -> bool:
    return status_of(folder, name).get("state", "starting") in ("starting", "running")


def is_finished(folder: Path, name: str) -> bool:
    return status_of(folder, name).get("state") == "finished"


def devices(folder: Path, name: str) -> str:
    """Return the GPUs that the process of a run was given."""
    return json.loads((folder.parent / f"{status_of(folder, name)['pid']}.json").read_text())["CUDA_VISIBLE_DEVICES"]


def entries(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder.parent / "home" / "queue" / f"{os.uname().nodename}.json").read_text())


def waiting(folder: Path) -> list[str]:
    return [Path(each["file"]).stem for each in entries(folder) if each["state"] == "waiting"]


def identifier(folder: Path, name: str) -> str:
    return next(each["id"] for each in entries(folder) if each["file"].endswith(f"/{name}.toml"))


def queue(server: PageServer, *names: str) -> None:
    for name in names:
        answer = server.post("/runs/queue/add", {"file": f"{name}.toml"})
        assert answer.code == 200 and "is in the queue" in answer.text, answer.text


def pause(folder: Path, name: str, number: signal.Signals = signal.SIGSTOP) -> None:
    """Have a run hold its GPUs without taking the CPU from those that are waited for."""
    os.kill(status_of(folder, name)["pid"], number)


def stop(server: PageServer, folder: Path, name: str) -> None:
    assert server.post("/runs/stop", {"run": f"out/{name}"}).code == 200
    wait_for(lambda: status_of(folder, name).get("state") == "stopped", f"{name} stops")


@pytest.fixture
def tab(browser: Browser) -> Iterator[Callable[[PageServer], Page]]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    said: list[str] = []

    def enter(server: PageServer) -> Page:
        page = context.new_page()
        page.set_default_timeout(PATIENCE * 1000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        server.enter(context)
        return page

    yield enter
    context.close()
    assert said == []


@pytest.mark.long
def test_a_busy_machine_offers_the_queue_which_goes_on_after_a_restart_and_past_what_fails(
    work: Path, tab: Callable[[PageServer], Page], fork_server: Any
):
    write(work, "long", LONG)
    for name in ("first", "second", "third"):
        write(work, name)
    with page_server(work, fork_server=fork_server) as server:
        page = tab(server)
        page.goto(server.origin + "/runs")
        expect(page.locator("#live-queue")).to_have_text("Nothing waits; the CPU is free.")
        page.get_by_label("Configuration").select_option("long.toml")
        page.get_by_role("button", name="Start", exact=True).click()
        page.wait_for_url("**/runs/watch?run=out%2Flong")

        # From the editor, with the keyboard: the offer has the focus, and Enter queues.
        page.goto(f"{server.origin}/configurations/edit?file=first.toml")
        page.get_by_role("button", name="Start", exact=True).press("Enter")
        offer = page.locator("#toasts .offer")
        expect(offer).to_contain_text("first.toml takes the CPU: another run has the CPU of this machine")
        expect(offer.get_by_role("button", name="Queue")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#toasts")).to_contain_text("first.toml is in the queue for the CPU")
        expect(offer).to_have_count(0)
        again = server.post("/runs/queue/add", {"file": "first.toml"})
        assert again.code == 400 and "first.toml is in the queue already" in again.text
        (work / "wrong.toml").write_text("learning_rate = 'fast'\n")
        (work / "lacks.toml").write_text("output_dir = 'out/lacks'\n")
        for name, sentence in (("wrong.toml", "learning_rate"), ("lacks.toml", "model_family"), ("../x", "is not in")):
            refused = server.post("/runs/queue/add", {"file": name})
            assert refused.code == 400 and sentence in refused.text
        queue(server, "second", "third")

        page.goto(server.origin + "/runs")
        rows = page.locator("#live-queue tbody tr")
        expect(rows).to_have_count(3)
        page.get_by_role("button", name="Up: third.toml").press("Enter")
        expect(rows.nth(1)).to_contain_text("third.toml")
        expect(page.get_by_role("button", name="Up: third.toml")).to_be_focused()
        page.get_by_role("button", name="Down: first.toml").click()
        expect(rows.nth(0)).to_contain_text("third.toml")
        page.get_by_role("button", name="Up: third.toml").click()
        assert waiting(work) == ["third", "first", "second"]
        page.get_by_role("button", name="Remove: second.toml").click()
        expect(rows).to_have_count(2)
        expect_axe_finds_nothing(page)
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        headers = {**server.script_headers(), "X-CSRF-Token": "no"}
        fields = f"entry={identifier(work, 'third')}"
        assert server.send("POST", "/runs/queue/remove", headers, fields).code == 403
        assert server.post("/runs/queue/remove", {"entry": "nothing"}).code == 400
        assert waiting(work) == ["third", "first"] and goes_on(work, "long")
        page.close()

    # No page runs: nothing is started. The next one goes on, and what is wrong by then does not stop the others.
    assert waiting(work) == ["third", "first"] and goes_on(work, "long")
    (work / "third.toml").write_text("learning_rate = 'fast'\n")
    with page_server(work, fork_server=fork_server) as server, page_server(work, fork_server=fork_server) as second:
        page = tab(server)
        page.goto(server.origin + "/runs")
        expect(page.locator("#live-queue")).to_contain_text("What waits is started by this page")
        assert "Another page of these folders starts what waits" in second.get("/runs").text
        wait_for(lambda: is_running(work, "long"), "it trains")
        stop(second, work, "long")
        wait_for(lambda: is_finished(work, "first"), "first is started and ends")
        expect(rows_of(page)).to_have_count(1)
        expect(rows_of(page)).to_contain_text(re.compile(r"third\.toml.*failed to start.*learning_rate", re.DOTALL))
        assert not (work / "out" / "third").exists() and not (work / "out" / "second").exists()
        page.get_by_role("button", name="Remove: third.toml").click()
        expect(rows_of(page)).to_have_count(0)
        wait_for(lambda: entries(work) == [], "runs that have ended are in the list of runs")
        page.close()


def rows_of(page: Page):
    return page.locator("#live-queue tbody tr")


@pytest.mark.long
def test_runs_share_the_gpus_of_a_machine_and_none_is_given_to_two(work: Path, fork_server):
    for name in ("one", "two", "outside"):
        write(work, name, LONG)
    write(work, "both", LONG, num_processes=2)
    write(work, "small")
    write(work, "bound", gpu_ids="1")
    write(work, "many", num_processes=3)
    write(work, "cpu", use_cpu=True)
    # A run from a terminal: it takes the first GPU that it may use.
    command = [sys.executable, "-m", "simpletuner", "train", "--config=outside.toml"]
    environment = {**os.environ, **TWO_GPUS, "SIMPLETUNER_HOME": str(work.parent / "home")}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    outside = subprocess.Popen(command, cwd=work, env=environment, start_new_session=True, **quiet)
    try:
        wait_for(lambda: is_running(work, "outside"), "it trains")
        pause(work, "outside")
        with page_server(work, environment=TWO_GPUS, fork_server=fork_server) as server:
            assert "1 of 2 GPUs of this machine is free" in server.get("/runs").text
            assert server.post("/runs/start", {"file": "one.toml"}).headers.get("hx-redirect"), "on the other GPU"
            wait_for(lambda: is_running(work, "one"), "one is started")
            assert devices(work, "one") == "7"
            pause(work, "one")
            for name, need in (("two", "1 GPU"), ("both", "2 GPUs"), ("bound", "GPU 7")):
                offered = server.post("/runs/start", {"file": f"{name}.toml"})
                assert offered.code == 200 and "hx-redirect" not in offered.headers
                assert f"{name}.toml takes {need}: 0 of 2 GPUs of this machine are free" in offered.text
            anyway = {"file": "two.toml", "anyway": "on"}
            assert server.post("/runs/start", anyway).headers.get("hx-redirect"), "for those who know"
            wait_for(lambda: is_running(work, "two"), "it shares a GPU")
            assert devices(work, "two") == "4,7"
            stop(server, work, "two")
            refused = server.post("/runs/queue/add", {"file": "many.toml"})
            assert refused.code == 400 and "takes 3 GPUs, and this machine has 2 GPUs" in refused.text
            queue(server, "both", "small", "bound", "cpu")
            wait_for(lambda: is_finished(work, "cpu"), "runs on the CPU wait for no GPU")
            outside.kill()
            outside.wait(PATIENCE)
            time.sleep(2 * 2.0)
            assert waiting(work) == ["both", "small", "bound"], "a free GPU is kept for the one that needs two"
            busy = server.post("/runs/start", {"file": "two.toml"})
            assert "two.toml takes 1 GPU: what is free is for runs in the queue" in busy.text
            assert server.post("/runs/queue/move", {"entry": identifier(work, "both"), "to": "down"}).code == 200
            wait_for(lambda: is_finished(work, "small"), "the small one overtakes once it is asked to")
            assert server.post("/runs/queue/remove", {"entry": identifier(work, "both")}).code == 200
            assert waiting(work) == ["bound"], "its GPU is taken by one.toml"
            pause(work, "one", signal.SIGCONT)
            stop(server, work, "one")
            wait_for(lambda: is_finished(work, "bound"), "the GPU that it is bound to is free")
    finally:
        outside.kill()
        outside.wait()
