"""Two machines, as two network namespaces with a cable between them: how they meet, train, and end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, SMALL
from machines import PORT, Command, Machine, say_lies, tear_down, wire
from patience import PATIENCE

from simpletuner.checkpoints.layout import list_checkpoints, load_checkpoint

LONG = "--max_train_steps=100000"


@pytest.fixture
def machines(tmp_path, fork_server):
    prefix, wired = f"st{os.getpid()}n", []
    try:
        wired = wire(tmp_path, prefix, fork_server)
        yield wired
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        pytest.skip(f"cannot make network namespaces here, which takes root and iproute2: {reason}")
    finally:
        tear_down(prefix)
        for machine in wired:
            for command in machine.commands:
                command.wait(PATIENCE)


def pair(
    machines: list[Machine],
    *flags: str,
    ranks: int = 2,
    first: tuple[str, ...] = (),
    other: tuple[str, ...] = (),
    cold: bool = False,
    **environment: str,
) -> tuple[Command, Command]:
    """Start the same command on both machines; `first` is only for machine 0, `other` and `environment` for 1.

    With `cold`, interpreters of machine 1 start instead of being forked.
    """
    meeting = (f"--main_process_ip={machines[0].address}", f"--main_process_port={PORT}", "--num_machines=2")
    common = (*SMALL, *meeting, f"--num_processes={ranks}", *flags)
    start = machines[1].train if cold else machines[1].train_forked
    return machines[0].train_forked(*common, *first), start(*common, "--machine_rank=1", *other, **environment)


def both_end(commands: tuple[Command, Command], code: int) -> None:
    end = time.monotonic() + 150  # node_join_timeout is 600 s: what ends within this has not waited for anybody
    codes = [command.wait(max(0.1, end - time.monotonic())) for command in commands]
    assert codes == [code, code], "\n---\n".join(command.said for command in commands)
    assert not any("Traceback" in command.said for command in commands)


def errors(command: Command) -> list[str]:
    return re.findall(r"^error: (.*)$", command.said, re.MULTILINE)


def wait_for_step(output: Path, command: Command, step: int) -> None:
    metrics, end = output / "metrics.jsonl", time.monotonic() + PATIENCE
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        assert command.process.poll() is None and time.monotonic() < end, command.said
        time.sleep(0.02)


def wait_for_words(command: Command, words: str) -> None:
    end = time.monotonic() + PATIENCE
    while words not in command.said:
        assert command.process.poll() is None and time.monotonic() < end, command.said
        time.sleep(0.02)


def wait_for_more_steps(output: Path, command: Command) -> None:
    wait_for_step(output, command, load_checkpoint(list_checkpoints(output / "checkpoints")[0]).step + 2)


def losses(output: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def last_step(output: Path) -> int:
    return json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])["step"]


def test_one_machine_listens_on_the_loopback_device_only(machines, sdxl_flags, tmp_path):
    """Also where its name leads to the address of a network card."""
    machine, output = machines[0], tmp_path / "run"
    hosts = Path("/etc/netns") / machine.name / "hosts"  # `ip netns exec` shows it as /etc/hosts
    hosts.parent.mkdir(parents=True)
    try:
        hosts.write_text(f"127.0.0.1 localhost\n{machine.address} {machine.name}\n")
        flags = ("--train_batch_size=2", "--num_processes=2", LONG)
        run = machine.train(*SMALL, *sdxl_flags, f"--output_dir={output}", *flags)
        wait_for_step(output, run, 2)
        pid = machine.ranks()[0]
        tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        fields = [line.split() for table in tables for line in table]
        listening = {field[1].partition(":")[0] for field in fields if field[3] == "0A"}
        assert listening == {"0100007F"}, "little-endian 127.0.0.1"
    finally:
        shutil.rmtree(hosts.parent)


@pytest.mark.long
def test_two_machines_train_as_one_and_end_together(machines, sdxl_flags, train, tmp_path):
    output, one = tmp_path / "run", tmp_path / "one"
    flags = (*sdxl_flags, "--train_batch_size=2", "--fsdp_enable")
    expected = train(one, *flags, "--max_train_steps=3", world=2).losses

    # SIGTERM to the launcher of one machine: both save together and leave; what a stranger says changes nothing
    secret = tmp_path / "secret"
    secret.write_text("correct horse battery")
    secret.chmod(0o600)
    run = pair(machines, f"--output_dir={output}", *flags, LONG, f"--run_secret_file={secret}")
    wait_for_step(output, run[0], 4)
    stranger = machines[1].fork(say_lies, machines[0].address, PORT)
    assert stranger.wait() == 0, stranger.said
    ignored = "warning: ignored an invalid message in the store of this run"
    for command in run:
        wait_for_words(command, ignored)
    wait_for_step(output, run[0], last_step(output) + 3)
    for rank, machine in enumerate(machines):
        variables = machine.variables_of(machine.ranks()[rank])
        assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == machine.cable
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == (machines[0].address, PORT)
        assert (variables["WORLD_SIZE"], variables["LOCAL_RANK"]) == ("2", "0")
    run[1].process.send_signal(signal.SIGTERM)
    both_end(run, 143)
    assert [command.said.count(ignored) for command in run] == [1, 1]
    assert losses(output)[:3] == pytest.approx(expected, rel=1e-5)
    assert load_checkpoint(list_checkpoints(output / "checkpoints")[0]).step >= 4
    for command in run:
        assert errors(command) == [] and command.said.count("stopped by SIGTERM at step") == 1
    assert ", then saving a checkpoint; signal again to leave without saving" in run[1].said
    assert f"machine 1 ({machines[1].name}) was asked to stop" in run[0].said
    assert f"progress is shown on machine 0 ({machines[0].name})" in run[1].said

    # a rank that is killed: both machines say which
    run = pair(machines, f"--output_dir={output}", *flags, LONG, cold=True)
    wait_for_more_steps(output, run[0])
    victim = machines[1].ranks()[1]
    os.kill(victim, signal.SIGKILL)
    both_end(run, 5)
    sentence = f"rank 1 (pid {victim}) was killed by SIGKILL"
    assert errors(run[1]) == [sentence]
    assert errors(run[0]) == [f"machine 1 ({machines[1].name}): {sentence}"]
    assert [machine.pids() for machine in machines] == [[], []]


@pytest.mark.long
def test_a_machine_that_dies_or_is_cut_off_ends_the_other(machines, sdxl_flags, tmp_path):
    output, (first, second) = tmp_path / "run", machines
    flags = (f"--output_dir={output}", *sdxl_flags, "--train_batch_size=2", LONG, "--node_timeout=150")
    run = pair(machines, *flags)
    wait_for_step(output, run[0], 2)
    second.kill()
    assert run[0].wait(120) == 5, "ranks lost contact, so there is no need to wait for the whole node_timeout"
    assert re.fullmatch(rf"machine 1 \({second.name}\) has been silent for \d+ s", *errors(run[0]))

    run = pair(machines, *flags, "--node_timeout=4")
    wait_for_step(output, run[0], 5)
    second.unplug()
    both_end(run, 5)
    assert re.fullmatch(rf"machine 1 \({second.name}\) has been silent for ([4-9]|\d\d) s", *errors(run[0]))
    assert re.fullmatch(rf"machine 0 \({first.name}\) has been silent for ([4-9]|\d\d) s", *errors(run[1]))
    assert [machine.pids() for machine in machines] == [[], []]


def test_two_ranks_on_each_machine_see_what_two_ranks_see(machines, sdxl_flags, train, tmp_path):
    output = tmp_path / "run"
    expected = train(tmp_path / "one", *sdxl_flags, "--train_batch_size=2", "--max_train_steps=2", world=2).losses
    flags = (*sdxl_flags, "--train_batch_size=1", "--max_train_steps=2")
    run = pair(machines, f"--output_dir={output}", *flags, ranks=4)
    both_end(run, 0)
    assert losses(output) == pytest.approx(expected, rel=1e-4)
    assert (output / "pipeline").is_dir()
    assert errors(run[0]) == errors(run[1]) == []


@pytest.mark.long
def test_machines_that_disagree_say_so_at_once_on_both(machines, sdxl_flags, tmp_path):
    first, second = machines
    flags = (f"--output_dir={tmp_path / 'run'}", *sdxl_flags, "--train_batch_size=2")

    run = pair(machines, *flags, other=("--train_batch_size=4", "--num_processes=4", "--gpu_ids=0,1"))
    both_end(run, 2)
    places = f"on machine 0 ({first.name}), {{}} on machine 1 ({second.name})"
    for command in run:
        assert f"train_batch_size differs: 2 {places.format(4)}" in command.said
        assert f"num_processes differs: 2 {places.format(4)}" in command.said
        assert "gpu_ids" not in command.said

    fake = tmp_path / "fake" / "diffusers-9.9.9.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: diffusers\nVersion: 9.9.9\n")
    run = pair(machines, *flags, cold=True, PYTHONPATH=f"{fake.parent}{os.pathsep}{ROOT}")
    both_end(run, 3)
    for command in run:
        assert re.search(
            rf"(?m)^error: diffusers differs: '.*' {re.escape(places.format(repr('9.9.9')))}", command.said
        )

    run = pair(machines, *flags, other=("--machine_rank=0",))
    both_end(run, 2)
    for command in run:
        assert re.search(r"machine_rank = 0 is used twice: by \S+ \(pid \d+\) and by \S+ \(pid \d+\)", command.said)
        assert first.name in command.said and second.name in command.said

    # as where /etc/hosts of machine 0 gives its own name the address 127.0.1.1
    run = pair(machines, *flags, first=("--main_process_ip=127.0.0.1",))
    both_end(run, 2)
    for command in run:
        assert "main_process_ip leads machine 0 to its loopback address 127.0.0.1" in command.said
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_machines_with_other_disks_say_so_on_both_before_anything_is_encoded(machines, sdxl_uncached, shapes, tmp_path):
    copy, output, elsewhere = tmp_path / "copy", tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(shapes, copy)
    (copy / "0003.png").unlink()
    output.mkdir()
    elsewhere.mkdir()
    first, second = (f"rank {number} (host {machine.name})" for number, machine in enumerate(machines))
    flags = (f"--output_dir={output}", *sdxl_uncached, "--train_batch_size=2")

    machines[1].disks[shapes] = copy
    run = pair(machines, *flags)
    both_end(run, 4)
    missing = f"{second} has 35 images, {first} has 36: {shapes.name}/0003.png is missing on {second}"
    for command in run:
        assert errors(command) == [missing]

    machines[1].disks = {output: elsewhere}
    run = pair(machines, *flags)
    both_end(run, 3)
    for command in run:
        assert len(errors(command)) == 1 and f"output_dir {output} is not the same folder on" in command.said
    assert not list(tmp_path.rglob("*.shard"))


def test_a_machine_that_does_not_come_is_named(machines, sdxl_flags, tmp_path):
    meeting = (f"--main_process_ip={machines[0].address}", f"--main_process_port={PORT}", "--node_join_timeout=2")
    flags = (*sdxl_flags, *meeting, "--num_machines=2", "--num_processes=2", f"--output_dir={tmp_path / 'run'}")
    alone = machines[0].train_forked(*flags)
    assert alone.wait(PATIENCE) == 3
    assert re.search(r"waited \d s: 1 of 2 machines came; missing: machine 1", alone.said)
    alone = machines[1].train_forked(*flags, "--machine_rank=1")
    assert alone.wait(PATIENCE) == 3
    assert re.search(rf"waited \d s for machine 0 at {machines[0].address}:{PORT} \(connection refused\)", alone.said)
    mistaken = machines[1].train_forked(*flags, "--machine_rank=0")
    assert mistaken.wait(PATIENCE) == 3
    assert f"this is machine 0, but main_process_ip = {machines[0].address} does not lead to it" in mistaken.said


def test_ranks_started_by_torchrun_compare_their_settings_too(machines, sdxl_flags, tmp_path):
    def started(node: int, *flags: str) -> Command:
        meeting = ("--nnodes=2", f"--node_rank={node}", f"--master_addr={machines[0].address}", f"--master_port={PORT}")
        program = (str(Path(sys.executable).with_name("torchrun")), *meeting, "-m", "simpletuner", "train")
        where = {"GLOO_SOCKET_IFNAME": machines[node].cable}
        return machines[node].start(*program, *SMALL, *sdxl_flags, f"--output_dir={tmp_path / 'run'}", *flags, **where)

    run = started(0), started(1, "--seed=5")
    assert all(command.wait() for command in run)
    for command in run:
        assert errors(command) == [f"seed differs: 42 on rank 0 ({machines[0].name}), 5 on rank 1 ({machines[1].name})"]
