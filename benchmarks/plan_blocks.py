"""A step that `plan` extrapolates from a few blocks of each kind, beside the trace of all blocks: bytes, FLOPs, CPU s.

    python benchmarks/plan_blocks.py [FAMILY[:FLAVOUR]...]

Computed, not timed, but for the last two columns; of each family its first published flavour, a sample of 512 px in
bf16, without recomputation and with it. A sample of it, tiny, is tests/counting/test_equal_blocks.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch
from interleaved import print_table

from simpletuner.counting.step_memory import Workload
from simpletuner.counting.step_trace import Execution, StepTrace, equal_blocks
from simpletuner.models.catalog.registry import presets
from simpletuner.report import Report
from simpletuner.settings import load
from simpletuner.settings.values.shape import SampleShape, Shape
from simpletuner.tools.plan.estimate import opened_family

SHAPE = SampleShape(Shape(1, 512, 512))
COLUMNS = ("family", "blocks", "recomputes", "kept", "peak", "FLOPs", "traffic", "CPU s", "of all")


def rows_of(name: str) -> Iterator[list[str]]:
    family_name, _, flavour = name.partition(":")
    flags = {"model_family": family_name} | ({"model_flavour": flavour} if flavour else {})
    settings = load(flags, complete=False).settings
    with opened_family(settings, Report(quiet=True)) as family:
        counts = equal_blocks(family.denoiser())
        for recomputes in (False, True) if counts else ():
            workload, found, seconds = Workload(family, SHAPE), {}, {}
            for is_short in (True, False):
                type(family).has_equal_blocks = is_short
                began = time.process_time()
                execution = Execution(torch.bfloat16, autocast=True, on_gpu=True)
                found[is_short] = workload.count_step(settings, 1, execution, recomputes)
                seconds[is_short] = f"{time.process_time() - began:.1f}"
            off = (f"{share:.3%}" for share in deviations(found[True], found[False]))
            yield [name, str(sum(counts.values())), str(recomputes).lower(), *off, seconds[True], seconds[False]]
        if not counts:
            yield [name, "all traced", *[""] * (len(COLUMNS) - 2)]


def deviations(short: StepTrace, whole: StepTrace) -> Iterator[float]:
    """Yield the deviations of kept bytes, of the peak, of FLOPs and of traffic."""
    for number in (
        lambda trace: trace.kept_bytes,
        lambda trace: trace.peak_bytes(0),
        lambda trace: trace.product_flops + trace.attention_flops,
        lambda trace: trace.other_bytes,
    ):
        yield number(short) / number(whole) - 1


def main(names: list[str]) -> None:
    chosen = names or [key for key, preset in presets().items() if preset.has_class]
    print_table("a few blocks beside all", COLUMNS, [row for name in chosen for row in rows_of(name)])


if __name__ == "__main__":
    main(sys.argv[1:])
