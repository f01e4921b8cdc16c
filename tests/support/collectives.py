"""Which collectives a step of several passes calls, counted on real ranks."""

from __future__ import annotations

import json
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
                reductions(engine, 1)
            counts[name] = [reductions(engine, passes) for passes in (1, 3)]
        if world.is_first:
            Path(report).write_text(json.dumps(counts))


def reductions(engine, passes: int) -> int:
    latents, text, pooled = torch.randn(1, 4, 16, 16), torch.randn(1, 77, 96), torch.randn(1, 64)
    conditions = {"text_embeds": pooled, "time_ids": torch.ones(1, 6)}
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for number in range(passes):
            with engine.micro_batch(number == passes - 1):
                answer = engine.model(latents, torch.ones(1), text, added_cond_kwargs=conditions, return_dict=False)
                engine.backward(answer[0].square().mean())
    names = [event.name for event in profiled.events() or () if event.name.startswith("c10d::")]
    return sum("reduce_scatter" in name or "allreduce" in name for name in names)
