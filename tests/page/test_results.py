"""What a run exported: listed, downloaded, and nothing else of the machine; exports in processes of their own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from page_server import PageServer
from patience import PATIENCE
from playwright.sync_api import Page, expect

from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.page.child_processes import AwaitedCommands
from simpletuner.page.rendering import as_code
from simpletuner.page.runs.results import Exporting, list_results
from simpletuner.runs.folder import Folders, RunFolder, read_log

SECRET = "what nobody may read"
LORA = "pipeline_lora_weights"
WEIGHTS = "pytorch_lora_weights.safetensors"
RUNS = 60


def write_export(folder: Path, *files: str) -> None:
    for file in (*files, "simpletuner.json"):
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{folder.name}: {file}")


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """A run with exports, and one in which every name of an export is a link or a trap."""
    (folder.parent / "secret").mkdir()
    write_export(folder.parent / "secret" / LORA, WEIGHTS)
    (folder.parent / "secret" / "key.safetensors").write_text(SECRET)
    run = folder / "out" / "run"
    write_export(run / LORA, WEIGHTS, "README.md", "samples/00.png", "odd\nname.txt", "héllo.txt")
    write_export(run / f"{LORA}-ema-000012", WEIGHTS)
    write_export(run / "pipeline-000004", "unet/diffusion_pytorch_model.safetensors", "model_index.json")
    (run / "pipeline.safetensors").write_text("one file")
    (run / "report.html").write_text("<script>alert(1)</script>")
    (run / "pipeline").mkdir()  # not written to its end: it has no marker
    write_export(run / "pipeline_mine", WEIGHTS)
    (run / ".lock").touch()
    secret, trap = folder.parent / "secret", folder / "out" / "trap"
    write_export(trap / "pipeline", "README.md")
    (trap / "pipeline" / "key.safetensors").symlink_to(secret / "key.safetensors")
    (trap / "pipeline" / "unet").symlink_to(secret / LORA)
    os.mkfifo(trap / "pipeline" / "pipe.safetensors")
    (trap / LORA).symlink_to(secret / LORA)
    (trap / f"{LORA}-000001").mkdir()
    (trap / f"{LORA}-000001" / "simpletuner.json").symlink_to(secret / LORA / "simpletuner.json")
    (trap / f"{LORA}-000001" / WEIGHTS).symlink_to(secret / "key.safetensors")
    (trap / "pipeline.safetensors").symlink_to(secret / "key.safetensors")
    os.mkfifo(trap / "report.html")
    (trap / ".lock").touch()
    for number in range(RUNS):
        old = folder / "old" / f"{'even' if number % 2 == 0 else 'odd'}-{number:02d}"
        old.mkdir(parents=True)
        state = "failed" if number % 3 == 0 else "finished"
        (old / "status.json").write_text(f'{{"state": "{state}", "step": 1, "loss": {1 - number / 100}}}')
        os.utime(old / "status.json", (1e9 - number, 1e9 - number))
    return folder


def test_exports_are_listed_with_their_files(folder: Path):
    folders = Folders.of([folder])
    found = {each.name: each for each in list_results(RunFolder(folder / "out" / "run", folders))}
    assert [*found][0] == "report.html"
    assert {name: (each.kind, each.step) for name, each in found.items()} == {
        "report.html": ("report", None),
        LORA: ("LoRA", None),
        f"{LORA}-ema-000012": ("LoRA, EMA", 12),
        "pipeline-000004": ("pipeline", 4),
        "pipeline.safetensors": ("pipeline, in one file", None),
    }
    assert [*found[LORA].files] == ["README.md", WEIGHTS, "simpletuner.json", "samples/00.png"], "plain names alone"
    assert found[LORA].first == [WEIGHTS] and found["pipeline-000004"].first == []
    [trapped] = list_results(RunFolder(folder / "out" / "trap", folders))
    assert [*trapped.files] == ["README.md", "simpletuner.json"], "no link and no FIFO"


def test_a_download_is_a_file_of_the_list_and_nothing_else(server: PageServer, folder: Path):
    def get(name: str, file: str, run: str = "out/run", **headers: str):
        query = {"run": run, "name": name, "file": file}
        return server.get("/runs/results/download", **query)

    sent = get(LORA, WEIGHTS)
    assert (sent.code, sent.text) == (200, f"{LORA}: {WEIGHTS}")
    headers = {name.lower(): value for name, value in sent.headers.items()}
    assert headers["content-disposition"] == f'attachment; filename="run-{WEIGHTS}"'
    assert get("pipeline-000004", "unet/diffusion_pytorch_model.safetensors").code == 200
    report = get("report.html", "report.html")
    headers = {name.lower(): value for name, value in report.headers.items()}
    assert headers["content-type"] == "application/octet-stream" and headers["x-content-type-options"] == "nosniff"
    assert headers["content-disposition"].startswith("attachment"), "what it holds is not run as this page"
    escapes = ("../../../secret/key.safetensors", str(folder.parent / "secret" / "key.safetensors"), "../.lock", "")
    escapes += ("samples", ".", "samples/../README.md", "./README.md", "README.md\0", "%2e%2e/.lock", "x" * 5000)
    escapes += ("odd\nname.txt", "README.md/", "unet/../../.lock", "/etc/passwd")
    for escape in escapes:
        for name, file in ((LORA, escape), (escape, WEIGHTS), (escape, escape), (f"{LORA}/{escape}", WEIGHTS)):
            refused = get(name, file)
            assert refused.code == 400 and SECRET not in refused.text, (name, file)
    for name in ("pipeline", LORA, f"{LORA}-000001", "pipeline.safetensors", "report.html", "."):
        for file in ("key.safetensors", f"unet/{WEIGHTS}", "pipe.safetensors", WEIGHTS, "simpletuner.json", name):
            refused = get(name, file, run="out/trap")
            assert (name, file) == ("pipeline", "simpletuner.json") or refused.code == 400, (name, file)
            assert SECRET not in refused.text and f"{LORA}: " not in refused.text
    for run in ("../secret", str(folder.parent / "secret"), "out", "out/trap/../../../secret", ""):
        assert get(LORA, WEIGHTS, run=run).code == 400, run


def test_a_download_needs_what_every_request_needs(server: PageServer):
    path = f"/runs/results/download?run=out/run&name={LORA}&file={WEIGHTS}"
    assert server.send("GET", path, {}).code == 401
    assert server.send("GET", path, server.cookie | {"Host": "evil.example"}).code == 421
    assert server.send("POST", path, server.script_headers()).code == 405
    head = server.send("HEAD", path, server.cookie)
    assert head.code == 200 and head.text == ""
    part = server.send("GET", path, server.cookie | {"Range": "bytes=0-3"})
    assert (part.code, part.text) == (206, LORA[:4]), "a large one that broke off is gone on with"
    for unmet in ("bytes=900-", "bytes=" + "0-1," * 900 + "0-1", "bytes=x"):
        assert server.send("GET", path, server.cookie | {"Range": unmet}).code < 500, unmet


def test_exports_run_one_after_the_other_and_say_why_they_failed(folder: Path):
    folders = Folders.of([folder])
    run, other = (RunFolder(folder / "out" / name, folders) for name in ("run", "trap"))
    commands = AwaitedCommands()
    exporting = Exporting(commands)
    with commands.heavy:  # as while blocks are detected
        exporting.begin(run, "checkpoint-000004", ["runs", "export", str(folder / "nothing")])
        job = exporting.jobs[run.path]
        assert job.is_running and job.doing == "waiting for another one"
        with pytest.raises(EnvironmentNotReady, match="checkpoint-000004 of .* is being exported"):
            exporting.begin(run, "checkpoint-000008", [])
        exporting.begin(other, "checkpoint-000001", ["runs", "export", str(folder / "nothing")])
    end = time.monotonic() + PATIENCE
    while any(each.is_running for each in exporting.jobs.values()):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert job.error is not None and job.error.message.startswith("there is no run in") and job.error.hint
    commands.close()
    exporting.begin(run, "checkpoint-000008", ["runs", "export"])
    while exporting.jobs[run.path].is_running:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert exporting.jobs[run.path].error is None, "a page that ends starts none"
    with pytest.raises(SettingsError, match="checkpoint-000008 of .*: NUL characters are no part of a name"):
        exporting.begin(run, "checkpoint-000008", ["runs", "export", "--pretrained_model_name_or_path=a\0b"])
    assert not exporting.jobs[run.path].is_running, "what no process can be given must not count as running for ever"


def test_problems_of_earlier_starts_are_apart(tmp_path: Path):
    lines = ("started: a", "error: no captions", "hint: write some", "started: b", "warning: slow", "training: 1/2")
    (tmp_path / "log.txt").write_text("".join(f"2026-01-01 10:00:0{at} {line}\n" for at, line in enumerate(lines)))
    log = read_log(RunFolder(tmp_path, Folders.of([tmp_path])))
    assert [each.text for each in log.problems] == ["warning: slow"]
    assert [(each.text, each.hint) for each in log.earlier_problems] == [("error: no captions", "write some")]


def test_messages_name_settings_and_commands_keep_their_flags():
    said = "leave out --model_family, or --model_type=lora; --folder, `train --seed=1`"
    assert as_code(said) == ("leave out model_family, or model_type=lora; --folder, <code>train --seed=1</code>")
    assert as_code("run: simpletuner train --seed=1") == "run: simpletuner train --seed=1"
    assert as_code("one ` and --seed=<b>") == "one ` and --seed=&lt;b&gt;"


def test_many_runs_are_searched_filtered_and_ordered(page: Page, server: PageServer):
    page.goto(server.origin + "/runs")
    names = page.locator("#live-rows tbody tr:not([hidden]) th a")
    expect(names).to_have_count(25)
    expect(page.get_by_text(f"{RUNS + 2} runs")).to_be_visible()
    page.get_by_role("button", name="Show more").click()
    expect(names).to_have_count(RUNS + 2)
    page.get_by_role("searchbox").fill("EVEN failed")
    expect(names).to_have_count(10)
    page.get_by_label("Order").select_option("lowest loss")
    assert names.first.inner_text() == "old/even-54" and names.last.inner_text() == "old/even-00"
    page.get_by_role("searchbox").fill("")
    page.get_by_label("State").select_option("ended well")
    expect(page.get_by_text(f"40 of {RUNS + 2}")).to_be_visible()
    page.get_by_label("Order").select_option("last written")
    assert names.first.inner_text() == "old/odd-01"
    # A poll brings all rows; what is chosen stays.
    (server.folder / "old" / "odd-01" / "status.json").write_text('{"state": "finished", "step": 7, "loss": 0.5}')
    expect(names.first.locator("xpath=ancestor::tr")).to_contain_text("0.5000")
    expect(names).to_have_count(25)
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_page_of_a_run_offers_its_files(page: Page, server: PageServer):
    page.goto(server.origin + "/runs/watch?run=out/run")
    rows = page.locator("#live-results tbody tr")
    expect(rows).to_have_count(5)
    with page.expect_download() as download:
        rows.filter(has_text=f"{LORA} ").first.get_by_role("link", name=WEIGHTS).first.click()
    assert download.value.suggested_filename == f"run-{WEIGHTS}"
    assert download.value.path().read_text().endswith(WEIGHTS)
