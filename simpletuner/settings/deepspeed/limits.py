"""What DeepSpeed cannot do together, found before torch is imported."""

from __future__ import annotations

from collections.abc import Iterator

from simpletuner.settings.sections import Settings


def offloading_is_possible(settings: Settings) -> Iterator[str]:
    """Refuse offloading where ZeRO keeps nothing that could be offloaded, or does not know how."""
    parallel = settings.parallel
    places = {"offload_optimizer": parallel.offload_optimizer, "offload_param": parallel.offload_param}
    used = {name: place for name, place in places.items() if place != "none"}
    for name, place in used.items():
        if parallel.zero_stage is None:
            yield f"{name} = {place} needs DeepSpeed: set zero_stage, or {name}=none"
    if parallel.zero_stage in (1, 2):
        if "offload_param" in used:
            yield (
                f"offload_param = {used['offload_param']}, but zero_stage = {parallel.zero_stage}: below stage 3 every "
                "rank keeps all weights at hand; set zero_stage=3, or offload_param=none"
            )
        if parallel.offload_optimizer == "nvme":
            yield (
                f"offload_optimizer = nvme, but zero_stage = {parallel.zero_stage}: below stage 3 DeepSpeed keeps what "
                "is offloaded in memory; set zero_stage=3, or offload_optimizer=cpu"
            )
    if "nvme" in used.values() and parallel.offload_param_path is None:
        names = " and ".join(f"{name} = nvme" for name, place in used.items() if place == "nvme")
        yield f"{names}: where to? Set offload_param_path to a folder on a fast disk of each machine"


def zero_trains_whole_models(settings: Settings) -> Iterator[str]:
    """Refuse adapters under DeepSpeed."""
    if settings.model.model_type == "lora" and settings.parallel.zero_stage is not None:
        yield (
            "model_type=lora cannot run with DeepSpeed: it shares out the state of all weights, of which an adapter "
            "has few, and saves them whole; drop zero_stage and deepspeed_config"
        )
