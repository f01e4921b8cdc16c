"""Which collectives a step of several passes calls, counted on real ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from memory import sharded, whole
from torch.profiler import ProfilerActivity, profile

from simpletuner.parallel.world import joined_world


def count_reductions(folder: str, report: str) -> None:
    """Write how often gradients are reduced in one pass, and in three that make one step, for both engines."""
    counts = {}
    with joined_world() as world:
        for name, build in (("sharded", sharded), ("whole", whole)):
            engine = build("sdxl", folder, world)
            for _ in range(2):  # DDP groups gradients anew after its first step
                run_passes(engine, 1)
            counts[name] = [reductions(engine, passes, f"{report}.{world.rank}") for passes in (1, 3)]
        if world.is_first:
            Path(report).write_text(json.dumps(counts))


def reductions(engine, passes: int, trace: str) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run_passes(engine, passes)
    profiled.export_chrome_trace(trace)  # a tree of events takes 5 CPU seconds of this test's 6
    return len(re.findall(r'"c10d::\w*(?:reduce_scatter|allreduce)', Path(trace).read_text()))


def run_passes(engine, passes: int) -> None:
    latents, text, pooled = torch.randn(1, 4, 16, 16), torch.randn(1, 77, 96), torch.randn(1, 64)
    conditions = {"text_embeds": pooled, "time_ids": torch.ones(1, 6)}
    for number in range(passes):
        with engine.micro_batch(number == passes - 1):
            answer = engine.model(latents, torch.ones(1), text, added_cond_kwargs=conditions, return_dict=False)
            engine.backward(answer[0].square().mean())
