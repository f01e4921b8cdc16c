"""What `plan` says of the steps, made where no GPU waits for it: 95 CPU seconds for all."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from gpu.records import Record, show
from gpu.steps import STEPS, Step, settings_of, shape_of
from interleaved import print_table

CARDS = ("H200", "H100")


def plan_of(flags: Record, frames: int, cards: Iterable[str]) -> Record:
    """Return seconds and memory of a step on cards, its FLOPs without recomputation, and a micro-batch's operators."""
    from simpletuner.counting.step_memory import Workload
    from simpletuner.parallel.devices import DEVICES
    from simpletuner.report import Report
    from simpletuner.run_log import silence_torchao
    from simpletuner.tools.plan.estimate import SampleShapes, estimate_run, opened_family
    from simpletuner.tools.plan.planner import flops_per_sample

    silence_torchao()
    settings = settings_of(flags)
    found: Record = {"flags": flags}
    with opened_family(settings, Report(quiet=True)) as family:
        shape = shape_of(Step(flags, frames=frames), flags["resolution"], flags["model_flavour"] == "tiny")
        workload, flops = Workload(family, shape), flops_per_sample(family, shape)
        found["operators"] = workload.trace(settings, settings.training.train_batch_size, on_gpu=True).launches
        for card in cards:
            plan = estimate_run(settings, workload, SampleShapes({shape: 1}), DEVICES[card], flops)
            bytes_of = {"MiB": plan.memory.gpu_bytes / 2**20, "host MiB": plan.memory.host_bytes / 2**20}
            found[card] = {"s/step": plan.step_seconds, **bytes_of, "flops": flops * settings.effective_batch_size}
    return found


def plan_steps(file: Path, tiny: bool, cards: Iterable[str] = CARDS) -> None:
    """Add to a file what it lacks: a plan of each step, by name and resolution."""
    found = read_plans(file)
    for name, step in STEPS.items():
        for resolution in step.resolutions(tiny):
            flags, key, began = (
                step.flags_here(tiny) | {"resolution": resolution},
                f"{name} @ {resolution}",
                time.monotonic(),
            )
            if found.get(key, {}).get("flags") == flags:
                continue
            found[key] = plan_of(flags, step.frames, cards)
            print(f"{key}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            part = file.with_suffix(".part")
            part.write_text(json.dumps(found, indent=1))
            part.replace(file)


def print_errors(records: Iterable[Record]) -> None:
    """Print how far `plan` is from measured steps in seconds and memory: each, and the medians.

    Steps with a `source` are of another program, whose seconds say nothing of ours.
    """
    rows = []
    errors: dict[str, list[float]] = {}
    for record in records:
        if not record.get("card") or "as diffusers" in record["step"]:
            continue
        plan = plan_of(record["flags"], record["frames"], [card := record["card"]])[card]
        measured = {"s/step": record["s/step"], "MiB": record.get("MiB") or record.get("nvidia-smi, MiB")}
        off = [f"{plan[name] / here - 1:+.0%}" if here else "" for name, here in measured.items()]
        for name, here in measured.items():
            if here and (name == "MiB" or "source" not in record):
                errors.setdefault(name, []).append(abs(plan[name] / here - 1))
        cells = zip(map(show, measured.values()), (show(plan[name]) for name in measured), off, strict=True)
        rows.append([f"{record['step']} @ {record['resolution']}, {card}", *(cell for each in cells for cell in each)])
    print_table("plan beside measured steps", ["", "s/step", "plan", "off", "MiB", "plan", "off"], rows)
    for name, found in errors.items():
        print(f"{name}: off by {median(found):.1%} in the middle and {max(found):.1%} at most, of {len(found)} steps")


def read_plans(file: Path | None) -> dict[str, Any]:
    """Return the plans of a file; none where it is missing or damaged, since only a column is missing then."""
    try:
        return json.loads(file.read_text()) if file and file.exists() else {}
    except ValueError as error:
        print(f"{file} is left out: {error}; `python benchmarks/gpu plan` makes it again", file=sys.stderr)
        return {}
