"""Lose and gain a machine under torchrun, in network namespaces, and compare the losses with an undisturbed run.

    python tests/campaigns/elastic.py FOLDER

`torchrun --nnodes=1:2` runs one rank on each of two machines. The second is killed as by a power cut, the run goes on
with one rank; the second comes back, and it goes on with two. `global_batch_size` keeps the effective batch. Root only;
three minutes on two idle cores.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from conftest import SMALL  # noqa: E402
from machines import Command, Machine, tear_down, wire  # noqa: E402

SECONDS = 240
NEW_ADDRESS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Otherwise who joins later waits for an address that torch 2.13 has written in the first round alone."""
MORE = 4
"""Steps that are waited for after each change."""


def losses(output: Path) -> dict[int, float]:
    """Return the last loss that was written of each step."""
    path = output / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def wait(what: str, happened: Callable[[], bool], agents: list[Command]) -> None:
    print(f"waiting for {what}", flush=True)
    end = time.monotonic() + SECONDS
    while not happened():
        if time.monotonic() > end or agents[0].process.poll() is not None:
            raise SystemExit(f"{what} did not happen:\n" + "\n---\n".join(each.said[-3000:] for each in agents))
        time.sleep(0.1)


def start(machine: Machine, address: str, flags: list[str]) -> Command:
    """Start torchrun's agent on a machine."""
    meeting = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=run"]
    # A namespace has no name service, in which torchrun looks for itself and gloo for its card.
    serves = int(machine.address == address)
    meeting += [f"--rdzv-endpoint={address}:29400", f"--rdzv-conf=is_host={serves},last_call_timeout=1"]
    meeting += [f"--local-addr={machine.address}"]
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    return machine.start(
        torchrun, *meeting, "-m", "simpletuner", "train", *flags, GLOO_SOCKET_IFNAME=machine.cable, **NEW_ADDRESS
    )


def started_on(output: Path) -> list[str]:
    """Return the engines of all starts, with their numbers of ranks."""
    log = output / "log.txt"
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.split("engine", 1)[1].strip() for line in lines if " engine " in f" {line} " and "rank" in line]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pictures, output, prefix = folder / "pictures", folder / "run", f"st{os.getpid()}e"
    subprocess.run([sys.executable, ROOT / "examples/shapes/draw.py", pictures, "--count", "16"], check=True)
    flags = [
        *SMALL,
        "--model_family=sdxl",
        "--model_flavour=tiny",
        f"--instance_data_dir={pictures}",
        "--resolution=64",
    ]
    flags += ["--use_cpu", "--mixed_precision=no", "--train_batch_size=1", "--global_batch_size=4"]
    flags += ["--fsdp_enable", "--checkpoint_step_interval=2", "--max_train_steps=100000"]
    machines, agents = wire(folder, prefix), list[Command]()
    try:
        first, second = machines
        agents = [start(each, first.address, [*flags, f"--output_dir={output}"]) for each in machines]
        wait("two ranks", lambda: len(losses(output)) >= MORE, agents)
        second.kill()
        at = max(losses(output))
        wait("one rank", lambda: max(losses(output)) >= at + MORE and not second.pids(), agents)
        agents.append(start(second, first.address, [*flags, f"--output_dir={output}"]))
        wait("a second rank", lambda: bool(second.ranks()), agents)
        at = max(losses(output))
        wait("two ranks again", lambda: max(losses(output)) >= at + MORE, agents)
        agents[0].process.send_signal(signal.SIGTERM)
        for each in agents:
            each.process.wait(SECONDS)
    finally:
        tear_down(prefix)
    found = losses(output)
    alone = folder / "alone"
    steps = f"--max_train_steps={max(found)}"
    command = [sys.executable, "-m", "simpletuner", "train", *flags, f"--output_dir={alone}", steps]
    subprocess.run(command, check=True, capture_output=True)
    expected = losses(alone)
    worst = max(abs(found[step] / expected[step] - 1) for step in expected)
    print(f"{len(expected)} steps; starts: {started_on(output)}; largest relative difference of a loss: {worst:.2g}")
    if sorted(found) != sorted(expected) or worst > 1e-4:
        raise SystemExit("the losses differ")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
