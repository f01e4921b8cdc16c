"""Train tiny families for hundreds of steps in each state layout, and compare their losses with those of float32.

    .venv/bin/python tests/campaigns/state_layouts.py                      # about 10 minutes on 2 cores
    .venv/bin/python tests/campaigns/state_layouts.py --family=flux --steps=100

Each line has the mean of the last fifth of the losses beside that of float32, and the largest relative difference of
a mean over 20 steps. `bf16 alone` is `split` without what makes its weights float32: what one would get by holding
nothing but bf16. `tests/training/test_split_state.py` runs a sample.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]

from conftest import Starter, fork_server_context  # noqa: E402
from engines import opened, prepared_by, settings_of  # noqa: E402
from kills import fixtures  # noqa: E402

from simpletuner.parallel.precision.split_engine import SplitEngine  # noqa: E402
from simpletuner.parallel.world import joined_world  # noqa: E402
from simpletuner.training.trainer import Trainer  # noqa: E402

LAYOUTS = {
    "float32": ("whole", "no"),
    "fp32, computed in bf16": ("whole", "bf16"),
    "split": ("split whole", "bf16"),
    "bf16": ("bf16 whole", "bf16"),
    "bf16 alone": ("split whole", "bf16"),
}
LIMIT = 0.02


def write_losses(arguments: dict[str, Any], steps: int, report: str) -> None:
    """Write the losses of all steps, shape (steps,), by layout."""
    taken, prepared = {}, None
    with joined_world() as world:
        for layout, (engine, dtype) in LAYOUTS.items():
            folder = Path(arguments["folder"]) / layout.replace(" ", "-")
            settings = settings_of({**arguments, "mixed_precision": dtype}, engine, folder, world.size)
            prepared = prepared or prepared_by(world, settings)
            with opened(world, settings, prepared) as (trainer, _):
                taken[layout] = torch.stack([loss_of_step(trainer, layout) for _ in range(steps)])
    torch.save(taken, report)


def loss_of_step(trainer: Trainer, layout: str) -> torch.Tensor:
    if layout == "bf16 alone" and isinstance(trainer.engine, SplitEngine):
        for remainder in trainer.engine.remainders.values():
            remainder.zero_()
    loss = trainer.train_step(trainer.next_batch()[0]).loss
    trainer.step += 1
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", help="one of several families; default: sdxl and flux")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--learning_rate", type=float, action="append", help="default: 1e-4 and 1e-3")
    given = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        starter = Starter(fork_server_context(), Path(name))
        for family in given.family or ["sdxl", "flux"]:
            folder = Path(name) / family
            fixtures(folder, starter, family)
            place = {"base": folder / "base", "pictures": folder / "shapes", "folder": folder / "runs"}
            arguments = {"family": family, **{key: str(path) for key, path in place.items()}}
            for rate in given.learning_rate or [1e-4, 1e-3]:
                arguments["learning_rate"] = rate
                run = starter.start(write_losses, 1, arguments, given.steps, str(folder / "losses"))
                assert run.wait(3600) == [0], run.said
                taken = torch.load(folder / "losses")
                for layout, found in taken.items():
                    last, most = compare(found, taken["float32"])
                    failed |= layout in ("split", "bf16") and max(abs(last), most) > LIMIT
                    print(f"{family}, {rate:g}, {layout}: last fifth {last:+.2%}, at most {most:.2%}", flush=True)
    sys.exit(f"a layout differs from float32 by more than {LIMIT:.0%}" if failed else 0)


def compare(found: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Return the relative difference of the means of the last fifth, and the largest one of means over 20 steps."""
    last = found[-len(found) // 5 :].mean() / exact[-len(exact) // 5 :].mean() - 1
    windows = [each.unfold(0, 20, 20).mean(1) for each in (found, exact)]
    return last.item(), (windows[0] / windows[1] - 1).abs().max().item()


if __name__ == "__main__":
    main()
