"""A step of which `plan` runs one of equal blocks, beside the trace of all blocks: bytes, FLOPs, CPU s.

    python benchmarks/plan_blocks.py [FAMILY[:FLAVOUR]...]

Computed, not timed, but for the last two columns; of each family its first published flavour, a sample of 512 px in
bf16, without recomputation and with it. A sample of it, tiny, is tests/counting/test_equal_blocks.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from interleaved import print_table

from simpletuner.counting.block_replay import equal_blocks
from simpletuner.counting.flops import use_cuda_kernels
from simpletuner.counting.operator_results import RememberingMode
from simpletuner.counting.step_counter import Execution
from simpletuner.counting.step_trace import StepTrace, trace_step, with_fake_parameters
from simpletuner.models.catalog.registry import presets
from simpletuner.report import Report
from simpletuner.settings import load
from simpletuner.settings.values.shape import SampleShape, Shape
from simpletuner.tools.plan.estimate import opened_family

SHAPE = SampleShape(Shape(1, 512, 512))
COLUMNS = ("family", "recomputes", "kept", "peak", "FLOPs", "traffic", "CPU s", "of all")


def rows_of(name: str) -> Iterator[list[str]]:
    family_name, _, flavour = name.partition(":")
    flags = {"model_family": family_name} | ({"model_flavour": flavour} if flavour else {})
    settings = load(flags, complete=False).settings
    with opened_family(settings, Report(quiet=True)) as family:
        mode = RememberingMode()
        model: Any = with_fake_parameters(family.denoiser().train(), mode)
        shapes, execution = family.input_shapes(*SHAPE), Execution(torch.bfloat16, autocast=True, on_gpu=True)
        use_cuda_kernels(model)
        for recomputes in (False, True):
            model.enable_gradient_checkpointing() if recomputes else model.disable_gradient_checkpointing()
            found, seconds = {}, {}
            for replays in (True, False):
                began = time.process_time()
                equal = equal_blocks(model, family.unused_parameters()) if replays else None
                found[replays] = trace_step(family, model, mode, shapes, 1, execution, equal)
                seconds[replays] = f"{time.process_time() - began:.1f}"
            off = (f"{share:.3%}" for share in deviations(found[True], found[False]))
            yield [name, str(recomputes).lower(), *off, seconds[True], seconds[False]]


def deviations(found: StepTrace, whole: StepTrace) -> Iterator[float]:
    """Yield the deviations of kept bytes, of the peak, of FLOPs and of traffic."""
    for number in (
        lambda trace: trace.kept_bytes,
        lambda trace: trace.peak_bytes(0),
        lambda trace: trace.product_flops + trace.attention_flops,
        lambda trace: trace.other_bytes,
    ):
        yield number(found) / number(whole) - 1


def main(names: list[str]) -> None:
    chosen = names or [key for key, preset in presets().items() if preset.has_class]
    print_table("one of equal blocks beside all", COLUMNS, [row for name in chosen for row in rows_of(name)])


if __name__ == "__main__":
    main(sys.argv[1:])
