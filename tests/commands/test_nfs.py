"""`simpletuner nfs check` as people and scripts start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE

from simpletuner.app import main
from simpletuner.commands.nfs import show, verdict
from simpletuner.report import Report
from simpletuner.tools.nfs.check import CheckOutcome
from simpletuner.tools.nfs.rendezvous import Node
from simpletuner.tools.nfs.results import CHECKS, failed, passed, warned

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "accelerate", "diffusers", "transformers", "deepspeed", "PIL", "safetensors")

PROGRAM = """
import sys
from simpletuner.app import main
try:
    main(sys.argv[2:])
finally:
    found = [name for name in sys.argv[1].split(",") if name in sys.modules]
    if found:
        print("heavy imports:", found, file=sys.stderr)
"""


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, ",".join(HEAVY), "nfs", "check", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    assert "heavy imports" not in err
    return process.returncode, out, err


def test_one_node_gets_a_table_on_stdout_and_0(tmp_path):
    code, out, err = ended(start(f"--path={tmp_path}/new", "--nodes=1"))
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == f"{tmp_path}/new  as node 0 of 1"
    rows = [line.split()[:2] for line in lines if line.startswith("  ") and line[2] != " "]
    assert [name for name, _ in rows] == list(CHECKS)
    assert dict(rows)["rename"] == "ok"
    assert dict(rows)["port"] == "-"
    assert lines[-1] == "all is well on 1 node"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model_flavour=tiny"], "6 x 25.4 MB of checkpoints, 1 x 8.5 MB exported (2,114,148 parameters"),
        (["--optimizer=adamw_schedulefree"], "6 x 41.1 GB of checkpoints, 1 x 10.3 GB exported"),
        ([], "needs about 195.1 GB: 6 x 30.8 GB of checkpoints"),
    ],
)
def test_the_model_that_is_named_says_how_much_is_needed_without_torch(flags, said, tmp_path):
    started = start(f"--path={tmp_path}", "--nodes=1", "--model_family=sdxl", *flags, "--json")
    (space,) = (each for each in json.loads(ended(started)[1])["checks"] if each["check"] == "space")
    assert said in space["seen"]


def test_a_model_that_cannot_be_opened_is_named(tmp_path, capsys):
    flags = ["--model_family=sdxl", "--optimizer=muon", "--pretrained_model_name_or_path=/nowhere/model"]
    with pytest.raises(SystemExit):
        main(["nfs", "check", f"--path={tmp_path}", "--nodes=1", *flags])
    assert "an unknown amount: /nowhere/model is no folder" in " ".join(capsys.readouterr().out.split())


def test_a_failure_ends_with_3_and_says_on_lines_of_their_own_what_to_type(tmp_path):
    code, out, _ = ended(start(f"--path={tmp_path}", "--nodes=2", "--timeout=1"))
    lines = out.splitlines()
    fixes = [line for line in lines if line.startswith("      fix: ")]
    assert code == 3
    assert f"      fix: on node 1: simpletuner nfs check --path={tmp_path} --nodes=2 --node-rank=1" in fixes
    recipe = next(number for number, fix in enumerate(fixes) if "sudo apt install nfs-kernel-server" in fix)
    assert "give a folder that all nodes share: --path here" in fixes[recipe - 1]  # pytest's folder is local
    assert any("sudo tee -a /etc/exports" in fix for fix in fixes)
    assert lines[-1].startswith("failed: mount (node 0), see (node 0)")


@pytest.mark.parametrize("columns", [80, 120])
def test_sentences_are_wrapped_to_the_terminal_and_what_is_to_be_typed_is_not(capsys, monkeypatch, columns):
    monkeypatch.setenv("TERM", "dumb")  # without colours
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    report, fix = Report(), "sudo " + "x" * 150
    report.data.width = columns
    show(CheckOutcome(Node(Path("/x")), (failed("rename", "a sentence of many words " * 9, fix),)), report)
    lines = capsys.readouterr().out.splitlines()
    assert f"      fix: {fix}" in lines
    assert 40 < max(len(line) for line in lines if fix not in line) <= columns
    assert len([line for line in lines if line.startswith(" " * 18)]) >= 2 - columns // 100


def test_who_waits_says_on_stderr_what_is_to_be_started(tmp_path):
    _, out, err = ended(start(f"--path={tmp_path}", "--nodes=2", "--timeout=2", "--json"))
    assert "waiting up to 2 s for node 1:" in err
    assert f"on node 1: simpletuner nfs check --path={tmp_path} --nodes=2 --node-rank=1" in err
    json.loads(out)


def test_two_nodes_get_the_same_result_as_json_with_the_exit_code(tmp_path):
    shared = tmp_path / "shared"
    flags = (f"--output_dir={shared}", "--num_machines=2", "--num_processes=2", "--main_process_ip=127.0.0.1", "--json")
    flags += ("--main-process-port=40123",)
    nodes = [start(*flags), start(*flags, "--node-rank", "1")]
    for rank, (code, out, _) in enumerate(map(ended, nodes)):
        told = json.loads(out)
        assert code == told["exit_code"] == 3  # a local folder cannot be shared
        assert (told["path"], told["status"], told["nodes"], told["node_rank"]) == (str(shared), "fail", 2, rank)
        assert [check["check"] for check in told["checks"]] == list(CHECKS)
        found = {check["check"]: check["status"] for check in told["checks"]}
        assert {name for name, status in found.items() if status == "fail"} == {"mount"}
        assert [other["node_rank"] for other in told["others"]] == [1 - rank]
        assert set(told["checks"][0]) == {"check", "status", "seen", "fix", "values"}
    assert list(tmp_path.iterdir()) == []


def test_two_different_addresses_are_a_failure_on_both_nodes(tmp_path):
    flags = (f"--path={tmp_path}", "--nodes=2")
    nodes = [
        start(*flags, "--main_process_ip=127.0.0.1"),
        start(*flags, "--node_rank=1", "--main_process_ip=127.0.0.2"),
    ]
    first, second = map(ended, nodes)
    assert "failed: mount (nodes 0, 1), port (nodes 0, 1)" in first[1]
    assert "node 1 found" not in first[1].split("port ")[0]
    assert second[1].splitlines()[0] == f"{tmp_path}  as node 1 of 2"


def test_what_only_another_node_found_is_shown_under_its_name(capsys):
    fine = passed("lock", "held")
    bad, same = failed("write", "no permission", "sudo chown"), warned("port", "not checked")
    outcome = CheckOutcome(Node(Path("/x"), 0, 3), (fine, same), {1: (bad, same), 2: (fine, same)})
    show(outcome, Report())
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines() == [
        "/x  as node 0 of 3",
        "  lock      ok    held",
        "  port      warn  not checked",
        "node 1 found",
        "  write     FAIL  no permission",
        "      fix: sudo chown",
        "failed: write (node 1); warnings: port (nodes 0, 1, 2)",
    ]


def test_a_node_that_gave_no_report_is_a_failure(capsys):
    outcome = CheckOutcome(Node(Path("/x"), 0, 3), (passed("lock", "held"),), {1: (passed("lock", "held"),)}, (2,))
    assert outcome.status == "fail"
    assert verdict(outcome) == "failed: no report from node 2"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes=2", "--node-rank=2"], "node rank 2, but nodes = 2: ranks go from 0 to 1"),
        (["--node-rank=1"], "node rank 1, but nodes = 1"),
        (["--nodes=0"], "--nodes"),
        (["--timeout=x"], "--timeout"),
        (["--nods=2"], "--nods"),
        (["--num_machines=0"], "num_machines"),
    ],
)
def test_a_wish_that_makes_no_sense_ends_with_2(tmp_path, arguments, words):
    code, out, err = ended(start(f"--path={tmp_path}", *arguments))
    assert (code, out) == (2, "")
    assert words in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_check_with_its_code_and_nothing_left(tmp_path, number, code):
    process = start(f"--path={tmp_path}", "--nodes=2")
    end = time.monotonic() + PATIENCE
    while not list(tmp_path.rglob("0-card.json")):
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(number)
    assert ended(process)[0] == code
    assert list(tmp_path.iterdir()) == []


def test_help_explains_every_option_of_the_check():
    code, out, _ = ended(start("--help", COLUMNS="100"))
    assert code == 0
    for option in ("--path", "--nodes", "--node-rank", "--timeout", "--json", "--config", "--output_dir"):
        assert f"  {option} " in out or f"  {option}," in out
