"""`simpletuner status` and `simpletuner runs compare`, on folders as runs leave them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from simpletuner.app import main

NO_BEST = {"best_step": None, "best_eval_loss": None}


def run_folder(path: Path, state: str = "finished", rate: float = 1e-4, colour: str = "red", **status: object) -> Path:
    (images := path / "validation" / "step-000003").mkdir(parents=True)
    Image.new("RGB", (64, 64), colour).save(images / "trained-00.png")
    known = {"state": state, "step": 3, "max_steps": 4, "loss": 0.5, "host": "elsewhere", "pid": 7, "rank_pid": 7}
    known |= {"started": "2026-01-01T00:00:00+00:00", "time": "2026-01-01T00:01:00+00:00"}
    (path / "status.json").write_text(json.dumps(known | status))
    rows = [{"step": step, "loss": 1 / step, "learning_rate": rate} for step in (1, 2, 3)]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = {"learning_rate": rate, "seed": 1, "output_dir": str(path)}
    (path / "settings.json").write_text(json.dumps(settings))
    return path


@pytest.fixture
def answer(capsys):
    """Run a command and return its exit code, output and messages."""

    def ask(*words: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return ask


def test_the_status_of_a_run_is_a_table_json_and_an_exit_code(answer, tmp_path):
    code, out, _ = answer(
        "status",
        run_folder(tmp_path / "a", mirror="s3://b/a has checkpoint-000003", alarms=["steps take 2 times as long"]),
    )
    assert code == 0 and re.search(r"step +3 of 4 \(75%\)", out) and "process   7 on elsewhere" in out
    assert re.search(r"alarm +steps take 2 times as long", out)
    assert "finished" in out and "s3://b/a has checkpoint-000003" in out
    failed = run_folder(tmp_path / "b", "failed", reason="dataset `d`: no usable image is left", hint="look there")
    code, out, _ = answer("status", failed, "--json")
    found = json.loads(out)
    assert code == 5 and (found["state"], found["step"], found["loss"]) == ("failed", 3, 0.5)
    assert (found["reason"], found["hint"]) == ("dataset `d`: no usable image is left", "look there")
    code, out, _ = answer("status", run_folder(tmp_path / "c", "running"))
    assert code == 5 and "killed" in out and "disappeared after" in " ".join(out.split())
    code, out, _ = answer("status", run_folder(tmp_path / "e", "stopping"))
    assert code == 5 and "asked to stop, and killed before it had saved" in " ".join(out.split())
    (tmp_path / "none").mkdir()
    code, _, err = answer("status", tmp_path / "none")
    assert code == 2 and "there is no run in" in err
    code, _, err = answer("status", tmp_path / "gone")
    assert code == 2 and f"there is no run in {tmp_path / 'gone'}" in err and "hint: name the output folder" in err


def test_without_a_folder_the_status_is_that_of_all_runs_here(answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = answer("status")
    assert code == 2 and "there is no run in ." in err
    run_folder(tmp_path / "output" / "cat", "failed", reason="no room")
    code, out, _ = answer("status")
    assert code == 5 and "output/cat: failed" in out and "no room" in out, "new configurations write there"
    run_folder(tmp_path / "output")
    code, out, _ = answer("status")
    lines = [line.split() for line in out.splitlines() if "output" in line]
    assert code == 0 and [each[:2] for each in lines] == [["output", "finished"], ["output/cat", "failed"]]
    code, out, _ = answer("status", "--json")
    assert [each["output_dir"] for each in json.loads(out)] == [
        str(tmp_path / name) for name in ("output", "output/cat")
    ]
    code, out, _ = answer("status", "output")
    assert code == 0 and "output: finished" in out and "cat" not in out, "one that is named is that one"


def test_runs_are_compared_in_one_file_that_fetches_nothing(answer, tmp_path):
    one, two = run_folder(tmp_path / "one"), run_folder(tmp_path / "two", rate=1e-3, colour="blue")
    code, out, _ = answer("runs", "compare", one, two, "--json")
    facts = json.loads(out)
    assert code == 0 and facts["settings"] == {"learning_rate": {str(one): 1e-4, str(two): 1e-3}}
    assert facts["runs"][str(one)] == {
        "steps": 3,
        "loss": pytest.approx((1 + 1 / 2 + 1 / 3) / 3),
        "eval_loss": None,
        **NO_BEST,
    }
    code, _, err = answer("runs", "compare", one, two, "--output", tmp_path / "new" / "both.html")
    page = (tmp_path / "new" / "both.html").read_text()
    assert code == 0 and "compares" in err
    settings = re.findall(r"<tr><td>(\w+)</td><td>(.*?)</td><td>(.*?)</td></tr>", page)
    assert settings == [("learning_rate", "0.0001", "0.001")]
    assert page.count('src="data:image/webp') == 2 and 'href="../two/validation/step-000003/trained-00.png"' in page
    assert {"Loss", "Learning rate"} <= set(re.findall(r"<figcaption>([^<]+)</figcaption>", page))
    assert not re.findall(r'(?:src|href)="https?:', page) and "default-src 'none'" in page


@pytest.mark.parametrize(
    ("names", "said"), [(["one"], "1 of 2 to 6 runs are named"), (["one", "none"], "there is no run in")]
)
def test_what_cannot_be_compared_is_said(answer, tmp_path, monkeypatch, names, said):
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "one")
    (tmp_path / "none").mkdir()
    code, _, err = answer("runs", "compare", *names)
    assert code == 2 and said in err and not (tmp_path / "comparison.html").exists()
