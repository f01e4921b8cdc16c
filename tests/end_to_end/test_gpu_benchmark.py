"""`benchmarks/gpu` in miniature, on the CPU: parts run, a check that was killed goes on, tables say what is there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import redirect_stdout, suppress
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path.append(str(BENCHMARK.parent))

from gpu import records, steps, tiny_runs  # noqa: E402
from gpu.driver import WHOLE, Driver  # noqa: E402
from gpu.parts import all_parts  # noqa: E402
from gpu.tables import PUBLISHED, print_tables  # noqa: E402

CHECK = (sys.executable, str(BENCHMARK), "check", "--tiny", "--seconds=500")


def environment_of(folder: Path) -> dict[str, str]:
    return os.environ | {"OUT": str(folder), "OMP_NUM_THREADS": "1"}


def trains(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "train" in process.cmdline()
    return False


@pytest.mark.long
def test_a_check_that_is_killed_leaves_no_process_and_goes_on_where_it_was(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    command = [*CHECK, "layouts", "matrix"]
    with subprocess.Popen(command, env=environment_of(first), stdout=subprocess.DEVNULL) as check:
        end = time.monotonic() + PATIENCE
        while not any(map(trains, psutil.Process(check.pid).children(recursive=True))):
            assert check.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        below = psutil.Process(check.pid).children(recursive=True)
        check.kill()
    assert not psutil.wait_procs(below, timeout=PATIENCE)[1], "a part and its runs would be measured beside"
    with (first / "results.jsonl").open("a") as file:  # as if its first run had ended, and it was killed while it wrote
        file.write('{"part": "matrix", "run": "flux, cpu fp32", "rc": 0, "losses": [1.0]}\n{"part": "matrix", "ru')
    done = subprocess.run(
        [*command, f"--done={first / 'results.jsonl'}"], env=environment_of(second), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = list(records.read_records([second / "results.jsonl"]))
    assert {record["part"] for record in found} == {"matrix"}, "the part before was whole"
    assert [record["ended"] for record in found if "ended" in record] == [WHOLE]
    runs = {record["run"]: record for record in found if "run" in record}
    split = runs["flux, split"]
    assert (split["phase"], split["rc"], split["ok"]) == ("resumed", 0, True) and len(split["losses"]) >= 9
    assert 0 < split["off"] <= 0.03 and split["after SIGKILL, off"] == 0
    assert "as expected: " in done.stdout and "attention of slices, within a run" in done.stdout


def test_a_part_is_ended_at_its_limit_and_what_it_has_told_is_kept(tmp_path):
    driver = Driver(tmp_path / "results.jsonl", tmp_path / "log", tiny=True)
    script = """echo '{"what": "a rate", "here": 7}'; echo words; trap 'echo {\\"run\\": \\"ended\\"}; exit 143' TERM
    sleep 100 & wait"""
    with driver.log.open("ab") as log, subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE) as part:
        assert driver.follow("rates", part, 2, log) == "ended after 2 s"
    found = list(records.read_records([driver.results]))
    assert found == [{"part": "rates", "what": "a rate", "here": 7}, {"part": "rates", "run": "ended"}]
    assert driver.log.read_text() == "words\n"
    driver.drive(5, ["smoke"], [])
    assert [*records.read_records([driver.results])][2:] == [{"part": "smoke", "ended": "not begun: 5 s are left"}]


def measure_step(log: str) -> None:
    with Path(log).open("w") as file, redirect_stdout(file):
        steps.measure("flux lora", tiny=True)


def test_a_step_is_measured_traced_and_taken_as_diffusers_script_takes_it(fork_server, tmp_path):
    process = fork_server.Process(target=measure_step, args=(str(tmp_path / "log"),))
    process.start()
    process.join()
    found = list(records.read_records([tmp_path / "log"]))
    assert process.exitcode == 0
    measured = {each["step"]: each for each in found if each.get("kind") == "measured"}
    assert set(measured) == {"flux lora", "flux lora, as diffusers' script"}
    assert all(each["s/step"] > 0 and len(each["seconds"]) == 5 for each in measured.values())
    traces = {each["step"]: each for each in found if each.get("kind") == "trace"}
    assert traces.keys() == measured.keys()
    assert all(trace["launches"] > 100 and trace["top"] for trace in traces.values())


def test_settings_of_all_steps_and_runs_are_valid_and_parts_have_functions():
    for step in steps.STEPS.values():
        for tiny in (False, True):
            assert steps.settings_of(step.flags_here(tiny))
    assert all(steps.settings_of(tiny_runs.TINY | flags) for flags, _ in tiny_runs.FLUX.values())
    assert {name for name, part in all_parts().items() if part.module == "steps"} == set(steps.STEPS)
    in_full = [step for name, step in steps.STEPS.items() if name.startswith("flux full")]
    assert {steps.settings_of(step.flags).effective_batch_size for step in in_full} == {8}
    assert all(len(record["source"]) > 20 for record in records.read_records([PUBLISHED]))


def test_tables_put_measured_steps_beside_plans_and_published_figures(capsys):
    (published, *_) = records.read_records([PUBLISHED])
    name = published["step"]
    found = [
        {"part": name, **published, "s/step": 0.2, "nvidia-smi, MiB": 14000},
        {"run": "flux, bf16", "rc": 0, "off": 0.2, "ok": False},
        {"run": "flux, split", "rc": 0, "ok": True, "after SIGKILL, off": 0.01},
        {"run": "flux, fsdp2", "rc": 0, "ok": True, "after SIGKILL, off": 0},
    ]
    print_tables(found, {f"{name} @ 1024": {"H100": {"s/step": 0.15, "MiB": 14027, "flops": 2e13}}})
    said = capsys.readouterr().out
    assert "sdxl lokr @ 1024: 0.2, 10.1%, , 14,000 | 0.15, 14,027 | 0.606 s, 13,343 MiB on H100" in said
    assert "flux, bf16: rc 0, off 0.2" in said and "flux, split: rc 0" in said
    assert "as expected: flux, fsdp2" in said


def test_what_is_typed_wrongly_and_a_damaged_file_of_plans_are_one_sentence(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"part": "link", "what": "link", "error": "one GPU"}\n')
    (tmp_path / "plans.json").write_text("{")

    def answered(*typed: str) -> tuple[int, str, str]:
        command = [sys.executable, str(BENCHMARK), *typed]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr.splitlines()[-1]

    assert answered("check")[0] == 3, "there is no GPU here"
    code, _, said = answered("check", "kernels")
    assert code == 2 and "unknown: kernels; parts are environment; layouts; smoke; " in said
    for typed in (("table", "none.jsonl"), ("check", "--tiny", "--done=none.jsonl")):
        assert answered(*typed)[::2] == (2, "gpu: error: there is no file none.jsonl")
    assert answered("part")[::2] == (2, "gpu: error: part takes one part")
    code, table, said = answered("table", "results.jsonl", "--plans=plans.json")
    assert code == 0 and "one GPU" in table and said.startswith("plans.json is left out: ")
