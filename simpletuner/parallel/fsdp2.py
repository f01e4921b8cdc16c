"""FSDP2: parameters, gradients and optimizer state as DTensors sharded on dim 0, one unit per block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from simpletuner.errors import SettingsError
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.model.blocks import blocks_of, count_parameters, recommended_blocks
from simpletuner.parallel.torch_engine import MakeOptimizer, TorchEngine, autocast
from simpletuner.settings.declared.errors import nearest
from simpletuner.settings.declared.sections import Parallel
from simpletuner.system.importing import import_named

# Parameter count above which whole gradients (4 bytes each per rank) cost more than communication.
SYNC_EACH_BATCH_ABOVE = 2_000_000_000


def shard(model: nn.Module, blocks: tuple[str, ...], parallel: Parallel, dtype: torch.dtype, mesh: Mesh) -> None:
    """Turn a model's parameters into DTensors sharded on dim 0: each unit, then what is left as the root.

    They are gathered in `dtype`; as they are, if that is float32.
    """
    # 0.4 CPU s, with DTensor and sympy, which a run without shards does without.
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # cast_forward_inputs would round rotary tables, timesteps and SDXL's time ids to bf16, where 999 becomes
    # 1000. Gradients are reduced in float32: in bf16 a sum over many ranks loses what each of them adds.
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    device = mesh.world.device.type
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if parallel.fsdp_offload_params else OffloadPolicy()
    for unit in [*units_of(model, blocks, parallel), model]:
        fully_shard(
            unit,
            mesh=mesh.shard_mesh(device),
            mp_policy=policy,
            reshard_after_forward=parallel.fsdp_reshard_after_forward,
            offload_policy=offload,
        )


def units_of(model: nn.Module, blocks: tuple[str, ...], parallel: Parallel) -> list[nn.Module]:
    """Return the modules that are gathered and freed as one, innermost first, by the wrap policy."""
    policy = parallel.fsdp_auto_wrap_policy
    if policy == "NO_WRAP":
        return []
    if policy == "SIZE_BASED_WRAP":
        return units_by_size(model, parallel.fsdp_min_num_params)
    if policy == "TRANSFORMER_BASED_WRAP":
        asked = [name.strip() for name in parallel.fsdp_transformer_layer_cls_to_wrap.split(",") if name.strip()]
        return units_by_class(model, tuple(asked) or blocks)
    return units_by_callable(model, policy)


def units_by_callable(model: nn.Module, path: str) -> list[nn.Module]:
    """Modules that a user's callable names. Raises SettingsError, whatever it raises or returns."""
    policy = imported(path)
    hint = (
        "it is called as policy(model) and returns the modules to shard as units; in place of torch's own for FSDP1, "
        "which are asked about one module at a time, set SIZE_BASED_WRAP or TRANSFORMER_BASED_WRAP"
    )
    try:
        units = list(policy(model))
    except Exception as error:  # it is the user's code
        raise SettingsError(f"fsdp_auto_wrap_policy = {path}: {type(error).__name__}: {error}", hint) from error
    known = {id(module) for module in model.modules()}
    strange = [type(unit).__name__ for unit in units if id(unit) not in known]
    if strange:
        message = f"fsdp_auto_wrap_policy = {path} returns a {strange[0]} that is no module of the denoiser"
        raise SettingsError(message, hint)
    return units


def units_by_class(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """Return all modules of these classes. Raises SettingsError for a class that the model does not have."""
    classes = {type(module).__name__ for module in model.modules()}
    for name in names:
        if name not in classes:
            raise SettingsError(
                f"fsdp_transformer_layer_cls_to_wrap: {type(model).__name__} has no `{name}`{nearest(name, classes)}",
                f"its blocks are: {', '.join(blocks_of(model))}; `simpletuner detect-blocks` shows which to take",
            )
    # Reversed: modules() has parents first, and fully_shard must see children first.
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in names]


def format_units(model: nn.Module, parallel: Parallel) -> str:
    """Describe the sharding units of a model that is not sharded yet, and who chose them."""
    units = units_of(model, recommended_blocks(model), parallel)
    counts = Counter(type(unit).__name__ for unit in units)
    sizes = {parameter: parameter.numel() for unit in units for parameter in unit.parameters()}
    named = ", ".join(f"{name} x {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    by_class = parallel.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
    recommended = by_class and not parallel.fsdp_transformer_layer_cls_to_wrap
    who = "recommended" if recommended else "as set" if by_class else parallel.fsdp_auto_wrap_policy
    share = sum(sizes.values()) / max(1, count_parameters(model))
    return f"{named or 'the model as one'}: {share if named else 1:.1%} of the weights, {who}"


def units_by_size(model: nn.Module, min_parameters: int) -> list[nn.Module]:
    """Return the smallest modules that hold at least so many parameters outside the units within them."""
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        free = sum(p.numel() for p in module.parameters(recurse=False)) + sum(map(visit, module.children()))
        if free < min_parameters or module is model or isinstance(module, nn.ModuleList | nn.ModuleDict):
            return free
        units.append(module)
        return 0

    visit(model)
    return units


def imported(path: str):
    """Return the callable at a dotted path. Raises SettingsError when it is not there."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_named(module), name)
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"fsdp_auto_wrap_policy = {path}: {error}", "it must be importable, as (model) -> modules"
        ) from None


def is_synced_each_batch(parallel: Parallel, parameters: int) -> bool:
    """True if gradients are reduced after each micro-batch: as set, or by default for large models."""
    asked = parallel.fsdp_sync_each_batch
    return parameters > SYNC_EACH_BATCH_ABOVE if asked is None else asked


def fsdp2_engine(
    model: nn.Module,
    parallel: Parallel,
    mesh: Mesh,
    make_optimizer: MakeOptimizer,
    dtype: torch.dtype,
    adapter: Mapping[str, nn.Parameter] | None = None,
    make_engine: Callable[..., TorchEngine] = TorchEngine,
) -> TorchEngine:
    """Return the engine of a sharded model: weights are gathered block by block.

    They are gathered in the compute dtype; with an `adapter` as they are, and autocast computes in `dtype`.
    """
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(model, FSDPModule)
    trained = model.parameters() if adapter is None else adapter.values()
    sync_each_batch = is_synced_each_batch(parallel, sum(map(Tensor.numel, trained)))

    def precision() -> torch.autocast:
        return autocast(mesh, torch.float32 if adapter is None else dtype)

    @contextmanager
    def micro_batch(is_last: bool) -> Iterator[None]:
        # Without a sync, whole gradients stay here until the last micro-batch: one reduce-scatter per step.
        model.set_requires_gradient_sync(is_last or sync_each_batch)
        model.set_requires_all_reduce(is_last)  # over copies, once per step in any case
        with precision():
            yield

    @contextmanager
    def inference() -> Iterator[None]:
        with precision():
            yield
        # FSDP2 reshards the root in backward; without a backward its gathered weights would stay in memory.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    return make_engine(model, model, mesh, make_optimizer, micro_batch, inference, adapter)
