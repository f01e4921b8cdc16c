"""What detecting blocks costs, for each published architecture: cold, beside importing the class alone, and remembered.

Every time is that of a whole fresh process; name families to look at these only. The ratio is the median of those of
the rounds, since a machine's load drifts; beside it the ratio of processor time, which load hardly changes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from interleaved import print_table

from simpletuner.models.catalog.registry import flavours_of, presets

ROUNDS = 3
GOAL_RATIO, GOAL_SECONDS, GOAL_MB = 1.15, 0.5, 600


@dataclass(frozen=True)
class Ended:
    """What a process took."""

    seconds: float
    cpu_seconds: float
    peak_mb: float


def timed(*arguments: str, environment: Mapping[str, str]) -> Ended:
    """Run Python in a fresh process to its end."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return Ended(time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def architectures(families: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield family, flavour and class of each distinct architecture."""
    for family in families or presets():
        seen: list[object] = []
        for name, flavour in flavours_of(family).items():
            if flavour.architecture not in seen:
                seen.append(flavour.architecture)
                yield family, name, flavour.architecture.class_name


def row_of(family: str, flavour: str, class_name: str, environment: Mapping[str, str]) -> list[str]:
    """Measure one architecture; what is compared takes turns, after one round to warm up."""
    ask = ("-m", "simpletuner", "detect-blocks", f"--model_family={family}", f"--model_flavour={flavour}")
    contestants = {
        "bare": ("-c", f"from diffusers import {class_name}"),
        "cold": (*ask, "--refresh"),
        "cached": ask,
    }
    rounds = [
        {name: timed(*it, environment=environment) for name, it in contestants.items()} for _ in range(ROUNDS + 1)
    ][1:]
    numbers = [
        *(statistics.median(each[name].seconds for each in rounds) for name in contestants),
        statistics.median(each["cold"].seconds / each["bare"].seconds for each in rounds),
        statistics.median(each["cold"].cpu_seconds / each["bare"].cpu_seconds for each in rounds),
    ]
    peak = max(each["cold"].peak_mb for each in rounds)
    return [f"{family} {flavour}", *(f"{number:.2f}" for number in numbers), f"{peak:.0f}"]


def main() -> None:
    """Measure all, or the families named, and print the table."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "SIMPLETUNER_HOME": home, "HF_HOME": home}
        rows = [row_of(*architecture, environment) for architecture in architectures(sys.argv[1:])]
    goals = f"ratio <= {GOAL_RATIO}, cached < {GOAL_SECONDS} s, peak < {GOAL_MB} MB"
    title = f"simpletuner detect-blocks, fresh processes (medians of {ROUNDS}; goals: {goals})"
    print_table(title, ["model", "bare import s", "cold s", "cached s", "cold / bare", "in CPU s", "peak MB"], rows)


if __name__ == "__main__":
    main()
