"""A run's folder that somebody sent: each file names modules, commands, addresses and files outside, all in vain."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from page_server import PageServer, page_server
from patience import PATIENCE

from simpletuner.app import main
from simpletuner.page.application import PAGES
from simpletuner.runs.checkpoints import checkpoint_rows
from simpletuner.system.files.atomic import write_json

FIXTURE = ROOT / "tests" / "fixtures" / "from_31ae910" / "before" / "run"
HUB_ID = "somebody/their-model"
NAMED = {
    "model_families": {"x": "theirs:Evil"},
    "pretrained_model_name_or_path": HUB_ID,
    "single_file_config": "{outside}",
    "revision": "refs/pr/1",
}
ALSO = {
    "fsdp_auto_wrap_policy": "theirs.evil",
    "attention_kernel": f"somebody/kernel@{'0' * 40}",
    "attention_backend": "flash3",
    "preemption_check": "touch {ran}",
    "notify_url": "http://127.0.0.1:9/told",
    "push_to_hub": True,
    "hub_model_id": "somebody/stolen",
    "report_to": "wandb",
    "mirror_output": "s3://somebody/stolen",
    "output_dir": "{outside}",
    "lora_init": "{outside}/secret.safetensors",
    "assistant_lora": ["{outside}/secret.safetensors"],
    "data_backend_config": "{outside}/secret.json",
    "instance_data_dir": "{outside}",
    "validation_prompt_file": "{outside}/secret.jsonl",
    "run_secret_file": "{outside}/secret.txt",
    "resume_from_checkpoint": "{outside}",
    "cache_dir_vae": "{outside}",
    "deepspeed_config": {"curriculum": "{outside}"},
    "num_processes": 1000000,
    "num_machines": 1000000,
    "zero_stage": 3,
    "base_model_precision": "nf4",
}
"""What an export needs nothing of."""


class Hostile:
    """A recorded run, `theirs`, with such files, the user's own folder beside, and what processes did to them."""

    def __init__(self, place: Path) -> None:
        self.work, self.outside = place / "work", place / "outside"
        self.run, self.ran, self.audited = self.work / "theirs", place / "ran", place / "audited"
        self.outside.mkdir(parents=True)
        shutil.copytree(FIXTURE, self.run)
        for name in ("secret.safetensors", "secret.json", "secret.jsonl", "secret.txt"):
            (self.outside / name).write_text("secret")
        code = f"open({str(self.ran)!r}, 'a').write(__name__)\nclass Evil: pass\n"
        names = ("__init__", "evil", "torch", "sitecustomize", "conftest", "pipeline", "modeling", "modular_blocks")
        for folder in (self.run, next((self.run / "checkpoints").iterdir()), self.run / "base-sd1x-tiny"):
            folder.mkdir(exist_ok=True)
            for name in names:
                (folder / f"{name}.py").write_text(code)
        self.write_settings({**NAMED, **ALSO, "model_family": "x"})
        self.write_texts()

    def filled(self, value: object) -> object:
        text = json.dumps(value).replace("{outside}", str(self.outside)).replace("{ran}", str(self.ran))
        return json.loads(text)

    def write_settings(self, changes: dict[str, object]) -> None:
        settings = json.loads((FIXTURE / "settings.json").read_text())
        write_json(self.run / "settings.json", {**settings, **self.filled(changes)})

    def write_texts(self) -> None:
        """The files that a page and a report are made of, with paths that lead outside in every place."""
        path, run = str(self.outside / "secret.txt"), self.run
        config = self.run / "evil.toml"
        config.write_text(
            "model_family = 'x'\nmodel_flavour = 'tiny'\nmodel_families = { x = 'theirs:Evil' }\n"
            "instance_data_dir = 'theirs'\noutput_dir = 'theirs'\n"
        )
        status = {"state": "failed", "step": 1, "max_steps": 4, "loss": 1.0, "host": os.uname().nodename}
        status |= {"pid": os.getpid(), "rank_pid": os.getpid(), "config": str(config), "reason": path, "hint": path}
        status |= {"started": "2026-01-01T00:00:00+00:00", "time": "2026-01-01T00:01:00+00:00", "mirror": path}
        write_json(run / "status.json", status)
        (run / ".lock").write_text(f"{os.uname().nodename} {os.getpid()}\n")
        rows = [{"step": 1, "sample": path, "id": path, "loss": 1.0, "timestep": 5, "file": path, "dataset": path}] * 9
        (run / "sample_losses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        history = {"time": "2026-01-01", "step": 1, "data": path, "pipeline": path, "changed": {path: [path, path]}}
        (run / "settings_history.jsonl").write_text(json.dumps(history) + "\n" + json.dumps(history) + "\n")
        for name in ("console.txt", "log.txt"):
            (run / name).write_text(f"WARNING {path}\n")
        (images := run / "validation" / "step-000002").mkdir(parents=True)
        (images / "trained-00.png").symlink_to(path)
        for name in ("report.html", "comparison.html", "durations.json", "wandb.json"):
            (run / name).write_text(json.dumps({"id": path, "url": "http://127.0.0.1:9/", "file": path}))

    @property
    def environment(self) -> dict[str, str]:
        own = {"PYTHONPATH": str(ROOT / "tests" / "support" / "audit"), "AUDITED": str(self.audited)}
        own |= {"SIMPLETUNER_HOME": str(self.work.parent / "home"), "HF_ENDPOINT": "http://127.0.0.1:9"}
        return {**os.environ, **own, "HF_HUB_OFFLINE": "0"}

    def check(self) -> None:
        """Nothing of the folder ran, nothing outside was opened, no other program started, no host reached."""
        assert not self.ran.exists(), self.ran.read_text()
        rows = [json.loads(line) for line in self.audited.read_text().splitlines()]
        assert any(how == "read" and path.startswith(str(self.run)) for how, path in rows), "it was read"
        for how, name in rows:
            if how in ("read", "write"):
                assert not name.startswith(str(self.outside)), name
                assert not (name.startswith(str(self.run)) and name.endswith((".py", ".pyc"))), name
            assert how != "connect" or name.startswith(("('127.0.0.1'", "('::1'", "/")), name
            assert how != "start" or "touch" not in name, name
        assert sorted(each.name for each in self.outside.iterdir()) == sorted(
            ["secret.safetensors", "secret.json", "secret.jsonl", "secret.txt"]
        )


@pytest.fixture
def hostile(tmp_path: Path) -> Hostile:
    return Hostile(tmp_path)


COMMANDS = (
    ("status", "theirs"),
    ("runs", "losses", "theirs"),
    ("runs", "compare", "theirs", "mine", "--output=out.html"),
    ("runs", "compare", "theirs", "mine", "--json"),
    ("dataset", "diff", "theirs"),
    ("dataset", "diff", "theirs", "mine"),
)


def test_commands_read_a_run_and_run_nothing_of_it(hostile: Hostile):
    shutil.copytree(hostile.run, hostile.work / "mine", symlinks=True)
    program = str(Path(sys.executable).with_name("simpletuner"))
    lines = "\n".join(f"{program} {' '.join(words)}" for words in COMMANDS)
    done = subprocess.run(
        ["sh", "-c", lines], cwd=hostile.work, env=hostile.environment, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr and "bug" not in done.stderr, done.stderr
    hostile.check()


def test_an_export_takes_no_name_from_the_folder(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Each of them alone, and then what is left has no effect."""
    monkeypatch.chdir(hostile.work)
    for name, value in NAMED.items():
        hostile.write_settings({"pretrained_model_name_or_path": "", **ALSO, name: value})
        with pytest.raises(SystemExit) as ended:
            main(["runs", "export", "theirs"])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and f"theirs/settings.json names {name}, which an export" in said
        assert f"simpletuner runs export theirs --{name}=" in " ".join(said.split())
    for content in ("", "[]", "{", "[" * 100_000):
        (hostile.run / "settings.json").write_text(content)
        with pytest.raises(SystemExit) as ended:
            main(["runs", "export", "theirs"])
        said = " ".join(capsys.readouterr().err.split())
        assert ended.value.code == 2 and "theirs has no readable settings.json hint: name the output folder" in said
    assert not hostile.ran.exists() and "theirs" not in sys.modules


def test_an_export_with_a_base_that_the_user_names(hostile: Hostile):
    shutil.copytree(ROOT / "tests" / "fixtures" / "run_inputs" / "base", hostile.work / "base")
    hostile.write_settings({**ALSO, "pretrained_model_name_or_path": HUB_ID})
    program = str(Path(sys.executable).with_name("simpletuner"))
    command = [program, "runs", "export", "theirs", "--pretrained_model_name_or_path=base"]
    done = subprocess.run(command, cwd=hostile.work, env=hostile.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "theirs/pipeline-000002\n"
    assert (hostile.run / "pipeline-000002" / "simpletuner.json").is_file()
    hostile.check()


def test_every_route_of_the_page_reads_a_run_and_runs_nothing_of_it(hostile: Hostile):
    checkpoint = next(iter(checkpoint_rows(hostile.run))).name
    asked = {"run": "theirs", "file": "theirs/evil.toml", "name": checkpoint, "one": checkpoint, "two": checkpoint}
    asked |= {"with": "theirs", "step": "2", "target": "theirs/new.toml", "checkpoint": checkpoint, "edge": "160"}
    routes = [route for module in PAGES for route in module.ROUTES]
    routes.sort(key=lambda route: route.path.endswith("delete"))
    with page_server(hostile.work, environment=hostile.environment) as server:
        for family in ("x", "sd1x"):
            hostile.write_settings({**NAMED, **ALSO, "model_family": family})
            for route in routes:
                if "POST" in (route.methods or ()):
                    answer = server.post(route.path, asked)
                    await_export(server, checkpoint)
                else:
                    answer = server.get(route.path, **asked)
                assert answer.code < 500, (route.path, answer.text)
        shown = server.get("/runs/watch", run="theirs").text
        assert "Start again" not in shown and "was not exported" in shown
    hostile.check()


def await_export(server: PageServer, checkpoint: str) -> None:
    """Wait for a process that exports, which goes on after the answer to who has begun it."""
    end = time.monotonic() + PATIENCE
    while f"Exporting {checkpoint}" in server.get("/runs/watch", run="theirs").text:
        assert time.monotonic() < end
        time.sleep(0.1)
