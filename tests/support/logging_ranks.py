"""Ranks that log steps, of which one is late."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path

import torch

from simpletuner.data.prefetch import Batch, StepBatch
from simpletuner.data.sampler.batch_sampler import SamplerState
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.world import joined_world
from simpletuner.system.processes.signals import StopRequest
from simpletuner.training.metrics.metrics import METRICS, Metrics
from simpletuner.training.step_logger import StepLogger, StepOutput, StopVote

LATE = 0.4


def log_beside_a_late_rank(folder: str, report: str) -> None:
    """Log three steps; rank 1 logs each of them only when rank 0 has gone on to the next one, and a while later.

    Something in the background has failed there: it alone wishes to stop.
    """
    empty = torch.zeros(0)
    batch = StepBatch([Batch(empty, empty, empty, {}, ("a",))], SamplerState(0, 0, 2, {}))
    with joined_world() as world:
        metrics = Metrics(Path(folder), 0) if world.is_first else None
        vote = StopVote(StopRequest(), lambda: world.rank == 1)
        logger = StepLogger(Mesh(world, dp_shard=world.size), vote, metrics, None, 2)
        began = time.perf_counter()
        for step in range(1, 4):
            if world.rank == 1:
                world.store.wait([f"logged {step}"], timedelta(seconds=20))
                time.sleep(LATE)
            loss = torch.tensor(float(step + world.rank))
            logger.log(step, StepOutput(loss, norm := torch.tensor(0.5), 1e-4), batch, 0.0)
            norm.fill_(7.0)  # an engine's next step may
            world.store.set(f"logged {step}", "")
        logger.flush()
        if metrics is not None:
            took = time.perf_counter() - began
            metrics.close()
            rows = [json.loads(line) for line in (Path(folder) / METRICS).read_text().splitlines()]
            Path(report).write_text(json.dumps({"rows": rows, "took": took, "stops": vote.passed}))
