"""What the environment says about this process, and what the settings say about its GPUs."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from simpletuner.errors import SettingsError
from simpletuner.settings import Loaded
from simpletuner.settings.sections import Launch


def is_rank(environment: Mapping[str, str]) -> bool:
    """Return whether this process is already a rank, started by us, by torchrun or by `accelerate launch`."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def check_world_size(loaded: Loaded, environment: Mapping[str, str]) -> None:
    """Raise SettingsError when other than `num_processes` ranks were started; it is theirs unless the user says one."""
    world_size = int(environment["WORLD_SIZE"]) if is_rank(environment) else 1
    wanted = loaded.settings.launch.num_processes
    if world_size != wanted:
        raise SettingsError(
            f"num_processes = {wanted} ({loaded.origins['num_processes']}), but {world_size} ranks run",
            "leave num_processes out, or start as many ranks as it says",
        )


def ranks_per_machine(launch: Launch) -> int:
    """Return how many ranks each machine starts; the settings layer has refused unequal shares."""
    return launch.num_processes // launch.num_machines


def visible_gpus(launch: Launch) -> dict[str, str]:
    """Return the variable that hides all other GPUs; none where all may be used.

    Raises SettingsError when gpu_ids names the same GPU twice, or fewer than there are ranks on a machine.
    """
    if launch.use_cpu or launch.gpu_ids.strip().lower() == "all":
        return {}
    ids = [part.strip() for part in launch.gpu_ids.split(",") if part.strip()]
    ranks = ranks_per_machine(launch)
    if len(set(ids)) < len(ids):
        raise SettingsError(f"gpu_ids = {launch.gpu_ids!r} names a GPU twice", "list every GPU once, such as 0,1,3")
    if len(ids) < ranks:
        raise SettingsError(
            f"gpu_ids = {launch.gpu_ids!r} names {len(ids)} GPUs, but every machine runs {ranks} ranks",
            f"name {ranks} GPUs, or lower num_processes to {len(ids) * launch.num_machines}",
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids)}


def choose_gpus(launch: Launch, environment: MutableMapping[str, str]) -> None:
    """Hide the GPUs that gpu_ids leaves out; CUDA looks at the environment once, so before torch is imported."""
    environment.update(visible_gpus(launch))
