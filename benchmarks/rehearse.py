"""Rehearse a training step of any settings on GPUs that are not there: waits, launches, communication, memory.

    python benchmarks/rehearse.py [--json] [--world=N] [--no-order] SETTING=VALUE...

The real engine and trainer take a step on fake tensors (tests/support/fake_gpu), as the first of N ranks, in half a
gigabyte of memory; a C++ compiler is needed once. Nothing is computed, so neither seconds nor numbers are measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from fake_gpu.rehearsal import rehearsed  # pyright: ignore[reportMissingImports]

MIB = 2**20


def rehearse(settings: dict[str, str], world_size: int, checks_order: bool) -> dict[str, Any]:
    """Return what the second step did: the first one makes what later ones keep."""
    with rehearsed(settings, world_size, checks_order=checks_order) as run:
        for _ in range(2):
            run.step()
        return run.report()


def rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and values of what was found, in the units that people read."""
    for name in ("waits", "mixed_devices", "races"):
        if found[name] is None:
            yield name, "not looked for"
            continue
        yield name, str(sum(found[name].values()))
        for what, count in found[name].items():
            yield "", f"{count} x {what}"
    yield "launches", f"{found['launches']:,}"
    yield "moved_bytes", f"{found['moved_bytes'] / 1e9:,.1f} GB"
    yield "flops", f"{found['flops'] / 1e12:,.1f} TFLOP"
    for kind, num_bytes in found["collective_bytes"].items():
        yield "collective_bytes", f"{found['collectives'][kind]:,} x {kind}, {num_bytes / MIB:,.0f} MiB"
    peak, planned = found["peak_bytes"], found["planned_bytes"]
    yield "peak_bytes", f"{peak / MIB:,.0f} MiB"
    yield "planned_bytes", f"{planned / MIB:,.0f} MiB, {planned / peak - 1:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE")
    parser.add_argument("--world", type=int, default=1, metavar="N", help="number of ranks, 8 to a machine")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--no-order", action="store_true", help="do not check the order of streams, which takes longest"
    )
    arguments = parser.parse_args()
    if wrong := [each for each in arguments.settings if "=" not in each]:
        parser.error(f"{wrong[0]}: settings are written as name=value")
    settings = dict(each.removeprefix("--").split("=", 1) for each in arguments.settings)
    found = rehearse(settings, arguments.world, not arguments.no_order)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in rows(found):
        print(f"{name:18} {value}")


if __name__ == "__main__":
    main()
