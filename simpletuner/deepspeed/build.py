"""From a denoiser on the meta device to a DeepSpeed engine, without a whole float32 model on any rank.

Each rank reads its rows of the float32 weights, as with FSDP2. From them, parameter by parameter, the working weights
are gathered, in the compute dtype: whole at stages 1 and 2, which need that; at stage 3 DeepSpeed cuts each module's up
before the next one is made. DeepSpeed makes its masters from the working weights, so after bf16 the exact ones are put
back from the rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.deepspeed.engine import DeepSpeedEngine, trainable
from simpletuner.deepspeed.partitions import FlatGroups, Fragments, Partitions
from simpletuner.deepspeed.readiness import import_deepspeed
from simpletuner.deepspeed.row_shards import Rows
from simpletuner.deepspeed.swap_files import claimed
from simpletuner.errors import SettingsError
from simpletuner.parallel.torch_engine import MakeOptimizer
from simpletuner.parallel.world import World
from simpletuner.settings.deepspeed.config import deepspeed_config, deepspeed_options
from simpletuner.settings.sections import Settings

OURS = {
    "zero_allow_untested_optimizer": True,  # the optimizer is one that the other engines use, too
    "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW is as fast on the CPU, and needs no compiler
}
"""What DeepSpeed's JSON says beside settings, since the learning rate of a step and the optimizer are ours."""


def build_deepspeed_engine(
    model: nn.Module,
    settings: Settings,
    world: World,
    dtype: torch.dtype,
    load_weights: Callable[[dict[str, Tensor]], None],
    make_optimizer: MakeOptimizer,
) -> DeepSpeedEngine:
    """Return the engine of a model that is on the meta device."""
    refuse_scalars(model)
    asked = deepspeed_options(settings)
    assert asked is not None
    with ExitStack() as stack:
        config = engine_config(settings, world.size, max(parameter.numel() for parameter in model.parameters()))
        if asked.nvme_path is not None:
            swap_into(config, stack.enter_context(claimed(asked.nvme_path, settings.training.output_dir)))
        import_deepspeed(world)
        stack.enter_context(own_linear_kept())
        masters = world.device if asked.offload_optimizer == "none" else torch.device("cpu")
        rows = Rows({name: parameter.shape for name, parameter in model.named_parameters()})
        weights = {name: rows.empty(name, masters) for name in rows.shapes}
        buffers = persistent_buffers(model, world.device)
        load_weights({**weights, **buffers})
        trained = trainable(model).keys()
        spent = trained if dtype == torch.float32 else ()  # whose masters come out exact

        def working(name: str) -> Tensor:
            """Gather a whole weight in the dtype in which it computes."""
            return rows.whole(name, weights.pop(name) if name in spent else weights[name], world.device).to(dtype)

        theirs = initialized(model, working, config, make_optimizer)
        stack.callback(theirs.destroy)
        fragments = fragments_of(theirs, world)
        fixed = {name: weights.pop(name) for name in list(weights) if name not in trained} | buffers
        engine = DeepSpeedEngine(theirs, fragments, rows, fixed, masters, stack.pop_all().close)
        if weights:
            engine.take_over(weights)
            weights.clear()
        return_freed_memory()
        return engine


def refuse_scalars(model: nn.Module) -> None:
    """Raise SettingsError for parameters without dimensions, which DeepSpeed cannot send to other ranks."""
    names = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if names:
        raise SettingsError(
            f"{type(model).__name__} has parameters without dimensions ({', '.join(names[:3])}), which DeepSpeed "
            "cannot share out",
            "leave out zero_stage: train plain or data-parallel",
        )


def engine_config(settings: Settings, world_size: int, largest_tensor: int) -> dict[str, Any]:
    """Return DeepSpeed's JSON without what is ours."""
    config = deepspeed_config(settings, world_size, largest_tensor)
    return {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")} | OURS


def swap_into(config: dict[str, Any], folder: Path) -> None:
    """Offload to this process's own folder whatever goes to files."""
    block = config["zero_optimization"]
    for place in (block.get("offload_optimizer", {}), block.get("offload_param", {})):
        if place.get("device") == "nvme":
            place["nvme_path"] = str(folder)


def fragments_of(engine: Any, world: World) -> Fragments:
    """Return where an engine keeps this rank's slices."""
    names = trainable(engine.module)
    if engine.zero_optimization_stage() == 3:
        return Partitions(engine.optimizer, names, world.rank)
    return FlatGroups(engine.optimizer, names)


def initialized(
    model: nn.Module, working: Callable[[str], Tensor], config: dict[str, Any], make_optimizer: MakeOptimizer
) -> Any:
    """Give the model its working weights, and return DeepSpeed's engine around it."""
    import deepspeed

    given: dict[int, nn.Parameter] = {}
    partition = partitioner(config) if config["zero_optimization"]["stage"] == 3 else None
    for prefix, module in model.named_modules():
        give_weights(module, prefix, working, given)
        if partition is not None:
            partition(module)
    return_freed_memory()
    trained: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trained)
    return deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=trained, config=config)[0]


def give_weights(
    module: nn.Module, prefix: str, working: Callable[[str], Tensor], given: dict[int, nn.Parameter]
) -> None:
    """Put whole working weights in the place of a module's own parameters; those that it shares stay shared."""
    for name, meta in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if id(meta) not in given:
            whole = working(f"{prefix}.{name}" if prefix else name)
            given[id(meta)] = nn.Parameter(whole, requires_grad=meta.requires_grad)
        setattr(module, name, given[id(meta)])


def partitioner(config: dict[str, Any]) -> Callable[[nn.Module], None]:
    """Return what cuts up a module's own parameters and frees the whole ones."""
    import deepspeed

    first: list[Any] = []

    def partition(module: nn.Module) -> None:
        """Cut up a module's own parameters; those that are already are left alone."""
        own = list(module.parameters(recurse=False))
        if own and not first:
            deepspeed.zero.Init(module=nn.ParameterList(own), config_dict_or_path=config)
            first.extend(own[:1])
        elif own:
            first[0].convert_to_zero_parameters(param_list=own)

    return partition


def return_freed_memory() -> None:
    """Return to the system what was freed; the C library keeps all pieces below 32 MB, which here come to as much as
    is in use: 774 MiB, of which 344 were free, for a rank's quarter of a model of 463 MiB."""
    ctypes.CDLL(None).malloc_trim(0)


def persistent_buffers(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Move a model's buffers to the device, and return those that checkpoints hold."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(device)
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


@contextmanager
def own_linear_kept() -> Iterator[None]:
    """Put torch's linear back, where stage 3 leaves one for good that frees gathered weights sooner."""
    linear = nn.functional.linear
    try:
        yield
    finally:
        nn.functional.linear = linear
