"""The GPU that each rank computes on: of those that it sees, one that no other rank takes.

Slurm, wrappers and containers show a task one GPU, some, or all of its machine, under numbers that begin at 0 in each.
So numbers decide nothing: ranks tell one another the UUIDs of what they see.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from simpletuner.errors import EnvironmentNotReady

DEVICES = Path("/dev")
OWN_CARD = (
    "start as many ranks on a machine as it has GPUs (num_processes), or let each task see one of its own: "
    "`srun --gpus-per-task=1`, or CUDA_VISIBLE_DEVICES=$SLURM_LOCALID in a wrapper"
)
MIG = "; CUDA shows one MIG slice to a process, so that several ranks need several GPUs without MIG"


@dataclass(frozen=True)
class View:
    """The GPUs that a rank sees; `cards` are UUIDs in CUDA's order, none for a rank on the CPU."""

    host: str
    local_rank: int
    visible: str
    """CUDA_VISIBLE_DEVICES."""
    cards: tuple[str, ...]


def view_of_rank(local_rank: int, use_cpu: bool = False, devices: Path = DEVICES) -> View:
    """Return what this rank sees. Raises EnvironmentNotReady for a GPU that torch cannot use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    cards: list[str] = []
    if not use_cpu and torch.cuda.is_available():
        # Properties, unlike set_device, take no memory of a GPU that another rank will use.
        cards = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    elif not use_cpu and visible not in ("", "-1"):  # both are ways to hide all GPUs
        check_no_gpu_is_lost(devices)
    return View(socket.gethostname(), local_rank, visible, tuple(cards))


def check_no_gpu_is_lost(devices: Path) -> None:
    """Raise EnvironmentNotReady on a machine with a GPU that torch cannot use: it would train for days on the CPU."""
    # Not nvidia0 alone: a container that is given the fourth GPU has nvidia3.
    for device_file in sorted(devices.glob("nvidia[0-9]*"))[:1]:
        build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise EnvironmentNotReady(
            f"this machine has a GPU ({device_file}), but torch {torch.__version__}, which {build}, cannot use it",
            "`nvidia-smi` shows whether the driver works and which CUDA it supports; --use_cpu trains on the CPU",
        )


def agree_on_devices(store: dist.Store, rank: int, size: int, view: View) -> torch.device:
    """Return this rank's device. Collective; raises EnvironmentNotReady on all ranks where one has no GPU of its own.

    Rank 0 decides: a thousand ranks that read each other's views are a million requests.
    """
    store.set(f"cards/{rank}", json.dumps(asdict(view)))
    if rank == 0:
        views = [json.loads(text) for text in store.multi_get([f"cards/{number}" for number in range(size)])]
        answer = decide([View(**each | {"cards": tuple(each["cards"])}) for each in views])
        store.set("cards/decided", json.dumps(answer))
    answer = json.loads(store.get("cards/decided"))
    if "error" in answer:
        raise EnvironmentNotReady(answer["error"], answer["hint"])
    return torch.device("cuda", int(answer["indices"][rank])) if view.cards else torch.device("cpu")


def decide(views: Sequence[View]) -> dict[str, object]:
    """Return the index of each rank's card among those that it sees, or an error, as JSON."""
    try:
        return {"indices": assign_cards(views)}
    except EnvironmentNotReady as error:
        return {"error": error.message, "hint": error.hint}


def assign_cards(views: Sequence[View]) -> list[int]:
    """Give each rank a card that no other has: that of its local rank where ranks see the same list, else its first.

    Raises EnvironmentNotReady, which names both ranks and the card, where that cannot be.
    """
    check_all_see_some(views)
    alike, lists = Counter(view.cards for view in views), defaultdict[str, set[tuple[str, ...]]](set)
    for view in views:
        for card in view.cards:
            lists[card].add(view.cards)
    users: dict[str, int] = {}
    indices = [0] * len(views)
    # Those with the least choice first.
    for rank in sorted(range(len(views)), key=lambda number: (len(views[number].cards), number)):
        view = views[rank]
        is_one_list = alike[view.cards] > 1 or len(views) == 1
        is_one_list = is_one_list and all(lists[card] == {view.cards} for card in view.cards)
        first = view.local_rank if is_one_list and view.local_rank < len(view.cards) else 0
        order = [*range(first, len(view.cards)), *range(first)]
        index = next((number for number in order if view.cards[number] not in users), None)
        if index is None and view.cards:
            raise shared_card(views, rank, users[view.cards[0]])
        if index is not None:
            users[view.cards[index]], indices[rank] = rank, index
    return indices


def check_all_see_some(views: Sequence[View]) -> None:
    """Raise EnvironmentNotReady where some ranks have a GPU and others have none."""
    some = next((rank for rank, view in enumerate(views) if view.cards), None)
    none = next((rank for rank, view in enumerate(views) if not view.cards), None)
    if some is not None and none is not None:
        raise EnvironmentNotReady(
            f"rank {none} on {views[none].host} sees no GPU (CUDA_VISIBLE_DEVICES = {views[none].visible}), "
            f"and rank {some} on {views[some].host} sees {len(views[some].cards)}",
            "give each rank a GPU; `nvidia-smi` shows what a task sees; --use_cpu trains on the CPU",
        )


def shared_card(views: Sequence[View], rank: int, other: int) -> EnvironmentNotReady:
    view = views[rank]
    names = ", ".join(f"GPU-{card}" for card in view.cards)
    return EnvironmentNotReady(
        f"rank {rank} has no GPU of its own on {view.host}: it sees {len(view.cards)} ({names}), "
        f"the first of which is that of rank {other}",
        OWN_CARD + (MIG if "MIG" in view.visible else ""),
    )
