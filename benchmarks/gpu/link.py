"""Rate at which GPUs of one machine gather and reduce; `machine.py` starts it by torchrun, a rank for each GPU.

    torchrun --standalone --nproc_per_node=8 benchmarks/gpu/link.py [BYTES]

Rank 0 prints GB/s of each collective as JSON: the bytes that a rank sends in a ring, over the median of ten calls.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

ROUNDS = 10


def rate(collective: Callable[[], object], num_bytes: int, device: torch.device) -> float:
    """Return GB/s of a collective whose result, or input, has so many bytes on each rank."""
    taken = []
    for _ in range(2 + ROUNDS):  # the first calls connect the ranks
        dist.barrier()
        began = time.perf_counter()
        collective()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return num_bytes * (1 - 1 / dist.get_world_size()) / median(taken[2:]) / 1e9


def main() -> None:
    num_bytes, on_gpu = int(sys.argv[1]) if len(sys.argv) > 1 else 2**30, torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    whole = torch.zeros(num_bytes // 4 // dist.get_world_size() * dist.get_world_size(), device=device)
    part = torch.zeros(len(whole) // dist.get_world_size(), device=device)
    found = {
        "all_gather": rate(lambda: dist.all_gather_into_tensor(whole, part), whole.nbytes, device),
        "reduce_scatter": rate(lambda: dist.reduce_scatter_tensor(part, whole), whole.nbytes, device),
    }
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
