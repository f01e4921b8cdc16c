"""Runs on the page, in a real Chromium: started, watched and stopped; stuck and killed; what is wrong said in full."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from browser import expect_axe_finds_nothing
from conftest import SMALL
from forked_launcher import ForkedProcess, run_elsewhere
from page_server import PageServer, page_server
from patience import PATIENCE
from playwright.sync_api import Page, expect
from run_pages import EVIL, write_round, write_rows

from simpletuner.data.images.sounds import Sound
from simpletuner.runs.images import ImageInfo, write_sample
from simpletuner.runs.metrics import METRICS

FLAGS = (
    *SMALL,
    *("--model_family=sdxl", "--model_flavour=tiny", "--instance_data_dir=shapes", "--max_train_steps=20000"),
    *("--train_batch_size=1", "--validation_prompt=a circle", "--validation_num_inference_steps=1"),
    *("--validation_step_interval=10", "--output_dir=out/live"),
)
CONFIG = "".join(f"{name[2:]} = '{value}'\n" for name, _, value in (flag.partition("=") for flag in FLAGS))
NAME = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(folder: Path, shapes: Path) -> Path:
    (folder / "shapes").symlink_to(shapes)
    (folder / "live.toml").write_text(CONFIG)
    (folder / "wrong.toml").write_text(CONFIG.replace("out/live", "out/wrong").replace("'shapes'", "'nowhere'"))
    for name in ("done", NAME):
        write_run(folder / "out" / name)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[PageServer]:
    """A page that starts cold, as does what it starts."""
    with page_server(folder) as started:
        yield started


def write_run(output: Path) -> None:
    """Write what a run with awkward texts leaves that has failed."""
    output.mkdir(parents=True)
    (output / ".lock").write_text("elsewhere 1\n")
    (output / "settings.json").write_text('{"model_family": "sdxl", "max_train_steps": 500}')
    write_status(output, state="failed", reason=EVIL, hint=EVIL, doing=EVIL, alarms=[EVIL], step=400, max_steps=500)
    lines = ("started: simpletuner train", f"warning: {EVIL}", f"hint: {EVIL}", f"error: {EVIL}")
    (output / "log.txt").write_text(
        "".join(f"2026-01-01 10:00:0{number} {line}\n" for number, line in enumerate(lines))
    )
    write_rows(output, 400)
    for step in (10, 20, 30):
        write_round(output, step, [EVIL, "猫 `code`"], seed=step)


def write_status(output: Path, **values: object) -> None:
    status = {"host": os.uname().nodename, "pid": 0, "started": "2026-01-01T10:00:00.000+00:00", **values}
    (output / "status.json").write_text(json.dumps(status))


@pytest.fixture
def elsewhere(folder: Path, fork_server: Any) -> Iterator[Callable[[], ForkedProcess]]:
    """Start a run that the page has not started, and that is gone after the test."""
    log, enter, command = (
        str(folder.parent / "elsewhere.log"),
        partial(os.chdir, folder),
        ["train", "--config=live.toml"],
    )
    process = fork_server.Process(target=run_elsewhere, args=(enter, log, ranks.command_line, command))

    def start() -> ForkedProcess:
        process.start()
        return ForkedProcess(process)

    yield start
    if process.pid is not None:
        process.kill()
        process.join()


def state_of(page: Page) -> str:
    return page.locator("#live-status .state").inner_text()


@pytest.mark.long
def test_a_run_is_started_watched_and_stopped_and_goes_on_elsewhere_until_it_is_stuck_and_killed(
    page: Page, server: PageServer, folder: Path, elsewhere: Callable[[], ForkedProcess]
):
    page.goto(server.origin + "/runs")
    page.get_by_label("Configuration").select_option("live.toml")
    page.get_by_role("button", name="Start").click()
    page.wait_for_url("**/runs/watch?run=out%2Flive")
    state = page.locator("#live-status .state")
    assert state.inner_text() in ("starting", "running")
    status = page.locator("#live-status")
    expect(status).to_contain_text(re.compile(r"\d+ of 20,000"))
    expect(page.locator("#live-curves figcaption").first).to_have_text("Loss")
    assert state.inner_text() == "running"
    expect(status.locator("time")).to_have_text(re.compile(r"\d+ s ago"))

    # Polls change what is new and nothing else.
    page.locator("summary", has_text="Compare with").click()
    page.locator("summary", has_text="The end of the log").click()
    page.locator("#live-images .round:not([hidden]) img").first.wait_for()
    # In the document: a row that comes in above what is looked at scrolls the page along with it.
    placed = "each => [each.offsetLeft, each.offsetTop, each.offsetWidth, each.offsetHeight]"
    place, step = page.locator("#curves").evaluate(placed), page.locator("#live-status dd").first.inner_text()
    expect(page.locator("#live-status dd").first).not_to_have_text(step)
    assert page.locator("#curves").evaluate(placed) == place, "no layout jump"
    assert page.locator("#log-details").get_attribute("open") is not None
    assert page.evaluate("[...document.images].filter((each) => each.complete).every((each) => each.naturalWidth > 0)")

    again = server.post("/runs/start", {"file": "live.toml"})
    assert again.code == 400 and "a run is using out/live already" in again.text
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Stop").click()
    page.locator("#toasts .toast", has_text="is asked to stop").wait_for()
    expect(state).to_have_text("stopped")
    assert "stopped by SIGTERM" in status.inner_text() and "its checkpoint is saved" in status.inner_text()
    expect(page.locator("#live-checkpoints")).to_contain_text("checkpoint-")
    assert page.get_by_role("button", name="Stop").is_disabled()
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()

    rows = (folder / "out" / "live" / METRICS).read_text().count("\n")
    process = elsewhere()
    expect(state).to_have_text("running")
    end = time.monotonic() + PATIENCE
    while (folder / "out" / "live" / METRICS).read_text().count("\n") <= rows and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGSTOP)
    expect(state).to_have_text("stuck")
    assert f"kill -CONT {process.pid}" in status.inner_text()
    process.send_signal(signal.SIGCONT)
    expect(state).to_have_text("running")
    process.kill()
    process.wait()
    expect(state).to_have_text("killed")
    page.goto(server.origin + "/runs")
    assert "killed" in page.locator("tr", has_text="out/live").inner_text()
    refused = server.post("/runs/stop", {"run": "out/live"})
    assert refused.code == 400 and "no run is using out/live" in refused.text


@pytest.mark.long
def test_a_second_click_on_stop_is_no_second_signal_and_leaving_is_another_button(
    page: Page, folder: Path, fork_server: Any
):
    with page_server(folder, fork_server=fork_server) as server:
        server.enter(page.context)
        expect_stopping_and_leaving_apart(page, server, folder)
        page.goto("about:blank")  # which asks nothing of a server that has ended


def expect_stopping_and_leaving_apart(page: Page, server: PageServer, folder: Path) -> None:
    # A step of 20,000 micro-batches: it does not end while this test looks at it.
    long = "gradient_accumulation_steps = 20000\nrepeats = 100000\nvalidation_step_interval = 0\n"
    config = "".join(line for line in CONFIG.splitlines(True) if "validation" not in line)
    (folder / "long.toml").write_text(config.replace("out/live", "out/long") + long)
    assert server.post("/runs/start", {"file": "long.toml"}).code == 200
    page.goto(f"{server.origin}/runs/watch?run=out/long")
    state, status = page.locator("#live-status .state"), page.locator("#live-status")
    expect(state).to_have_text("running")
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
    page.get_by_role("button", name="Stop").click()
    page.locator("#toasts .toast", has_text="is asked to stop").wait_for()
    again = server.post("/runs/stop", {"run": "out/long"})
    assert again.code == 400 and "out/long is stopping already" in again.text
    expect(state).to_have_text("stopping")
    assert "finishing step 1, then saving a checkpoint" in status.inner_text()
    assert page.get_by_role("button", name="Stop").is_disabled()
    log = (folder / "out" / "long" / "log.txt").read_text()
    assert log.count("stopping: ") == 1 and "without saving\n" not in log.partition("stopping: ")[2].partition("\n")[2]

    page.get_by_role("button", name="Leave without saving").click()
    expect(state).to_have_text("stopped")
    assert "stopped without saving, by a second SIGTERM" in status.inner_text()
    assert [each.partition("?")[0] for each in asked] == ["Stop out/long", "Leave out/long without saving"]
    assert server.post("/runs/leave", {"run": "out/long"}).code == 400
    with (folder / "out" / "long" / ".lock").open("r+b") as held:  # of the process that still ends
        fcntl.flock(held, fcntl.LOCK_EX)
    page.get_by_role("button", name=re.compile("Start .* again")).click()
    expect(status.locator(".doing")).to_have_text("training")  # a stop before that ends it
    # At once: the second signal must not count as the first one's repetition, or the run would go on.
    assert server.post("/runs/stop", {"run": "out/long"}).code == 200
    assert server.post("/runs/leave", {"run": "out/long"}).code == 200
    expect(state).to_have_text("stopped")


HOLDS = """
import signal, sys, time
from pathlib import Path
from simpletuner.system.files.lease import Lease
from simpletuner.system.files.lease_folder import FolderPlace
signal.signal(signal.SIGTERM, lambda *_: Path("asked").open("a").write("once "))
lease = Lease()
lease.acquire(FolderPlace(Path.cwd()))
Path("holds").touch()
time.sleep(1000)
"""


@pytest.mark.parametrize("before", ["nothing", "an earlier run"])
def test_a_run_that_has_not_said_yet_what_it_does_is_asked_to_stop_once(
    server: PageServer, folder: Path, starter: Any, before: str
):
    output = folder / "out" / f"after {before}"
    if before == "nothing":
        output.mkdir()
    else:
        write_run(output)
    holder = starter.start(ranks.run_python, 1, HOLDS, str(output))
    while not (output / "holds").exists():
        assert holder.processes[0].is_alive(), holder.said
        time.sleep(0.01)
    run = {"run": f"out/{output.name}"}
    assert server.post("/runs/stop", run).code == 200
    again = server.post("/runs/stop", run)
    assert again.code == 400 and "is stopping already" in again.text
    while not (output / "asked").exists():
        assert holder.processes[0].is_alive(), holder.said
        time.sleep(0.01)
    assert (output / "asked").read_text() == "once "


def test_a_start_that_fails_says_so_with_the_sentence_of_the_command(page: Page, server: PageServer, folder: Path):
    command = [sys.executable, "-m", "simpletuner", "train", "--config=wrong.toml"]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True).stderr
    sentence = re.findall(r"^error: (.*)", said, re.MULTILINE)[0]
    page.goto(server.origin + "/runs")
    page.get_by_label("Configuration").select_option("wrong.toml")
    page.get_by_role("button", name="Start").click()
    page.wait_for_url("**/runs/watch*")
    expect(page.locator("#live-status .state")).to_have_text("failed")
    assert sentence.replace("`", "") in page.locator("#live-status").inner_text()
    links = page.locator("#live-status").get_by_role("link")
    assert [(link.inner_text(), link.get_attribute("href")) for link in links.all()] == [
        ("wrong.toml", "/configurations/edit?file=wrong.toml"),
        ("Its datasets and captions", "/datasets?file=wrong.toml"),
    ]
    (folder / "broken.toml").write_text("learning_rate = 'fast'\n")
    page.goto(server.origin + "/runs")
    page.get_by_label("Configuration").select_option("broken.toml")
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#toasts .toast.error")).to_contain_text("learning_rate")


def test_only_the_process_that_holds_the_lock_is_stopped(server: PageServer, folder: Path):
    output = folder / "out" / "held"
    output.mkdir()
    held = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'r+'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True)"
    )
    (output / ".lock").touch()
    command = [sys.executable, "-c", held + "; time.sleep(60)", str(output / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        stranger = subprocess.Popen(["sleep", "60"])
        host = os.uname().nodename
        try:
            for named, sentence in (
                (f"{host} {stranger.pid}", "does not hold its lock"),
                (f"{host} 1", "does not hold its lock"),
                ("node7 12", "(pid 12 on node7)"),
                ("", "is run"),
            ):
                (output / ".lock").write_text(named)
                refused = server.post("/runs/stop", {"run": "out/held"})
                assert refused.code == 400 and sentence in refused.text, (named, refused.text)
            assert stranger.poll() is None and holder.poll() is None
            (output / ".lock").write_text(f"{host} {holder.pid}\n")
            assert server.post("/runs/stop", {"run": "out/held"}).code == 200
            assert holder.wait(PATIENCE) == -signal.SIGTERM
        finally:
            stranger.kill()
            stranger.wait()
            holder.kill()


def test_markup_is_escaped_and_nothing_outside_is_shown(page: Page, server: PageServer, folder: Path):
    alerts: list[str] = []
    page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    page.goto(server.origin + "/runs")
    page.get_by_role("link", name=NAME).click()
    page.locator("#live-images .prompt").first.wait_for()
    assert EVIL in page.locator(".prompt h3").first.inner_text() and EVIL in page.locator("#live-status").inner_text()
    assert page.locator(".problems li").count() == 2 and alerts == []
    image = {"run": "out/done", "step": "10", "name": "trained-00.png", "edge": "160"}
    query = "&".join(f"{name}={value}" for name, value in image.items())
    fetched = page.request.get(f"{server.origin}/runs/image?{query}")
    assert fetched.headers["content-type"] == "image/webp" and fetched.body()[:4] == b"RIFF"
    (folder.parent / "secret").mkdir()
    write_run(folder.parent / "secret" / "run")
    outside, inside = folder.parent / "secret" / "run", folder / "out" / "links"
    inside.mkdir()
    (inside / ".lock").touch()
    for name in ("validation", "log.txt", METRICS, "settings.json", "console.txt", "checkpoints"):
        (inside / name).symlink_to(outside / name)
    (folder / "out" / "linked").symlink_to(outside)
    for path, fields in (
        ("/runs/watch", {"run": "../secret/run"}),
        ("/runs/watch", {"run": "out/linked"}),
        ("/runs/watch", {"run": "out/done", "with": str(outside)}),
        ("/runs/watch", {"run": "out"}),
        ("/runs/image", image | {"run": "../secret/run"}),
        ("/runs/image", image | {"run": "out/links"}),
        ("/runs/image", image | {"name": "../step-000010/trained-00.png"}),
        ("/runs/image", image | {"step": "../10"}),
        ("/runs/image", image | {"step": "9" * 5000}),
        ("/runs/image", image | {"edge": "100000"}),
    ):
        assert server.get(path, **fields).code == 400, (path, fields)
    assert server.get("/runs/watch/news", run="out/gone").code == 286, "said once, not every two seconds"
    assert server.post("/runs/start", {"file": "../secret/run/settings.json"}).code == 400
    (folder / "leads-out.toml").write_text(CONFIG.replace("out/live", "../secret/new"))
    assert server.post("/runs/start", {"file": "leads-out.toml"}).code == 400
    shown = server.get("/runs/watch", run="out/links").text
    assert "alert(2)" not in shown and "2026-01-01" not in shown and "of 500" not in shown
    assert not (folder.parent / "secret" / "new").exists()


def test_a_clip_moves_and_a_click_plays_its_mp4_with_the_sound(page: Page, server: PageServer, folder: Path):
    output = folder / "out" / "clips"
    write_run(output)
    for number, frames in enumerate((4, 3)):
        info = ImageInfo(f"clip {number}", "", number, 2, 1.0, 32, 32, 40, "trained", frames, fps=2.0)
        pixels = torch.linspace(-1, 1, frames).view(1, 1, frames, 1, 1).expand(1, 3, frames, 32, 32)
        path = output / "validation" / "step-000040" / f"trained-0{number + 2}.png"
        path.parent.mkdir(exist_ok=True)
        write_sample(path, pixels, info, Sound(np.zeros((2, 32_000), np.float32), 16_000) if frames == 4 else None)
    page.goto(server.origin + "/runs/watch?run=out/clips")
    link = page.get_by_role("link", name="trained, step 40: clip 0").first
    expect(link.locator("img")).to_have_js_property("naturalWidth", 32)
    address = server.origin + link.get_attribute("href")
    whole = page.request.get(address)
    mp4 = (output / "validation" / "step-000040" / "trained-02.mp4").read_bytes()
    assert whole.headers["content-type"] == "video/mp4" and whole.body() == mp4 and b"mp4a" in mp4
    part = page.request.get(address, headers={"Range": "bytes=4-11"})
    assert (part.status, part.body()) == (206, mp4[4:12]), "players ask for parts"
    assert "media-src 'self'" in whole.headers["content-security-policy"]
    (output / "validation" / "step-000040" / "trained-02.mp4").unlink()
    clip = {"run": "out/clips", "step": "40", "name": "trained-02.png"}
    mp4_of_links = output / "validation" / "step-000040" / "trained-03.mp4"
    mp4_of_links.unlink()
    mp4_of_links.symlink_to(folder.parent / "outside.mp4")
    (folder.parent / "outside.mp4").write_bytes(mp4)
    for wrong in ({}, {"name": "trained-03.png"}, {"name": "trained-02.mp4"}, {"step": "../40"}, {"run": "out"}):
        assert server.get("/runs/clip", **clip | wrong).code == 400, wrong


def test_curves_over_one_another_the_slider_and_the_log_axis(page: Page, server: PageServer):
    page.goto(server.origin + "/runs/watch?run=out/done")
    expect(page.locator("#live-status .numbers")).to_contain_text("step 400: 0.4000 of the EMA")
    expect(page.locator("#live-status .notice.warning")).to_have_text(EVIL)
    first = page.locator(".chart").first
    assert first.locator(".plot.linear").is_visible() and not first.locator(".plot.log").is_visible()
    page.get_by_label("Logarithmic scale").check()
    assert first.locator(".plot.log").is_visible() and not first.locator(".plot.linear").is_visible()
    first.locator(".area").hover()
    assert re.match(r"step (199|200|201), each step: 0\.\d+", first.locator("output").inner_text())
    slider = page.get_by_role("slider").first
    slider.focus()
    page.keyboard.press("ArrowLeft")
    prompt = page.locator(".prompt").first
    expect(prompt.locator(".round:visible")).to_have_attribute("data-step", "20")
    assert slider.get_attribute("aria-valuetext") == "step 20"
    assert [each.inner_text() for each in prompt.locator(".round:visible figcaption").all()] == [
        "trained, step 20",
        "ema, step 20",
    ]
    page.locator("summary", has_text="Compare with").click()
    page.get_by_role("checkbox", name=NAME).check()  # curves that come next have the name in their label as well
    page.wait_for_url("**with=*")
    expect(page.locator(".legend").first).to_contain_text(NAME)
    assert page.locator(".chart").first.locator("path.run-1, path.run-2").count() >= 2
    page.get_by_label("Smoothing").select_option("none")
    page.wait_for_url("**smoothing=none*")
    page.go_back()
    expect(page.get_by_label("Smoothing")).to_have_value("medium")


@pytest.mark.parametrize("path", ["/runs", "/runs/watch?run=out/done", f"/runs/watch?run=out/done&with=out/{NAME}"])
def test_axe_finds_nothing_and_a_phone_shows_it(page: Page, server: PageServer, path: str):
    page.goto(server.origin + path)
    for details in page.locator("main details").all():
        details.evaluate("(each) => { each.open = true; }")
    expect_axe_finds_nothing(page)
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_poll_brings_only_what_has_changed(server: PageServer, folder: Path):
    output = folder / "out" / "polled"
    write_run(output)
    parts = dict(re.findall(r'name="(seen-\w+)" value="([^"]+)"', server.get("/runs/watch", run="out/polled").text))
    names = ("status", "curves", "images", "tried", "checkpoints", "results", "messages")
    assert {*parts} == {f"seen-{name}" for name in names}
    assert server.get("/runs/watch/news", run="out/polled", **parts).code == 204
    with (output / METRICS).open("a") as file:
        file.write('{"step": 401, "loss": 0.25}\n')
    write_status(output, state="running", step=401, max_steps=500, loss=0.25)
    news = server.get("/runs/watch/news", run="out/polled", **parts)
    assert set(re.findall(r'id="live-(\w+)"', news.text)) == {"status", "curves"}
    assert "0.2500" in news.text and "step 401" in news.text
