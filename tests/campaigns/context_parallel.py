"""Train every family that can be split in every layout of ranks, and compare it with the run of whole sequences.

    .venv/bin/python tests/campaigns/context_parallel.py                      # about 10 minutes on 2 cores
    .venv/bin/python tests/campaigns/context_parallel.py --family=flux --steps=3

Each line has the largest relative differences of the losses of all steps, of all gradients of the first one, and of
latents sampled after it, in float32. Sequences do not divide by the number of ranks. `tests/parallel/` runs a sample.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]

from conftest import Starter, fork_server_context  # noqa: E402
from kills import fixtures  # noqa: E402
from splitting import LIMITS, case, compare_in_turn  # noqa: E402

from simpletuner.models.catalog.registry import presets  # noqa: E402

LAYOUTS = {
    2: {"cp2": "dp1 cp2, allgather", "cp2-alltoall": "dp1 cp2, alltoall"},
    4: {
        "cp2": "dp2 cp2, allgather",
        "cp2-alltoall": "dp2 cp2, alltoall",
        "cp4": "dp1 cp4, allgather",
        "cp4-alltoall": "dp1 cp4, alltoall",
        "hybrid-cp2": "replicate2 x cp2, allgather",
        "hybrid-cp2-alltoall": "replicate2 x cp2, alltoall",
        "hybrid": "replicate2 x shard2",
    },
}
"""What to print, by number of ranks and by engine in tests/support/engines.py."""


def compare(starter: Starter, folder: Path, family: str, world: int, steps: int) -> dict[str, dict[str, Any]]:
    """Return by label how far each layout is from data-parallel ranks with whole sequences."""
    place = {"base": folder / "base", "pictures": folder / "shapes", "folder": folder / "runs"}
    named = {name: str(path) for name, path in place.items()}
    cases = [case(family, engine, steps, **named) for engine in ("whole", *LAYOUTS[world])]
    report = folder / f"{world}.json"
    run = starter.start(compare_in_turn, world, cases, str(report))
    codes = run.wait(1800)
    if any(codes):
        raise SystemExit(f"{family} on {world} ranks: exit codes {codes}\n{run.said}")
    return json.loads(report.read_text())


def main() -> None:
    families = [name for name, preset in presets().items() if preset.heads]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=families, action="append", help="one of several families; default: all")
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        starter = Starter(fork_server_context(), Path(name))
        for family in given.family or families:
            fixtures(Path(name) / family, starter, family)
            for world, layouts in LAYOUTS.items():
                taken = compare(starter, Path(name) / family, family, world, given.steps)
                for engine, layout in layouts.items():
                    found = {what: taken[f"{family} {engine}"][what] for what in LIMITS}
                    is_equal = all(found[what] <= limit for what, limit in LIMITS.items())
                    failed += not is_equal
                    numbers = "  ".join(f"{what} {value:.1e}" for what, value in found.items())
                    print(f"{family:13} {layout:28} {numbers}{'' if is_equal else '  FAILED'}", flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
