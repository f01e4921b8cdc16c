"""DeepSpeed ZeRO as an `Engine`, built from a model on the meta device.

No rank ever holds a whole float32 model. Each rank reads its row shards of the float32 weights, as with
FSDP2. The compute-dtype weights are gathered from them parameter by parameter: at stages 1 and 2 they stay
whole, as those stages require; at stage 3 DeepSpeed partitions each module before the next one is gathered.
DeepSpeed then creates its float32 master weights from the compute-dtype ones, which in bf16 has rounded them,
so the exact values are copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simpletuner.deepspeed.materialize import (
    materialize_model,
    move_buffers,
    return_freed_memory,
    torch_linear_restored,
)
from simpletuner.deepspeed.partitioned_muon import PartitionedMuon
from simpletuner.deepspeed.partitions import (
    ElementRange,
    FlatBufferPartitions,
    OptimizerPartitions,
    RowShards,
    SubGroupPartitions,
    count_steps,
    create_moments,
    moment_names,
)
from simpletuner.deepspeed.startup import import_deepspeed
from simpletuner.deepspeed.swap_files import create_swap_folder
from simpletuner.errors import SettingsError
from simpletuner.parallel.engine import compute_dtype
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.optimizer_state import NamedTensors, OptimizerState, new_moments
from simpletuner.parallel.optimizers.muon import Muon
from simpletuner.parallel.torch_engine import MakeOptimizer, ShardUpdate, local_tensor, sharded_parameters
from simpletuner.parallel.world import World
from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.foreign.deepspeed_config import deepspeed_config, deepspeed_options

OWN_CONFIG = {
    "zero_allow_untested_optimizer": True,  # torch's optimizers, the same as with every other engine
    "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW is as fast on the CPU, and needs no compiler
}
"""DeepSpeed keys that follow from passing our own optimizer to `deepspeed.initialize`."""


class DeepSpeedEngine:
    """Trains a denoiser with ZeRO at any stage.

    `fixed` holds what no optimizer has: frozen parameters (row shards of their float32 values) and buffers.
    `master_device` is where the float32 master weights are.
    """

    saves_views = False

    def __init__(
        self,
        deepspeed_engine: Any,
        partitions: OptimizerPartitions,
        row_shards: RowShards,
        fixed: Mapping[str, Tensor],
        master_device: torch.device,
        close: Callable[[], None],
    ) -> None:
        self.model, self.module, self.optimizer = deepspeed_engine, deepspeed_engine.module, deepspeed_engine.optimizer
        self.partitions, self.row_shards, self.fixed = partitions, row_shards, fixed
        self.master_device, self.close = master_device, close
        self.before_update: list[Callable[[], None]] = []
        self.ranges = gather_ranges(partitions, [name for name, _ in partitions.local_shards()])
        inner, parameters = self.optimizer.optimizer, trainable_parameters(self.module)
        self.moments_of = {name: {*new_moments(inner, each)} for name, each in parameters.items()}
        if isinstance(inner, PartitionedMuon):
            inner.find_matrices(partitions, self.ranges, parameters)
        self.num_parameters = sum(shape.numel() for shape in row_shards.shapes.values())

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        # By default DeepSpeed counts micro-batches by its JSON; here the trainer knows the last one.
        self.model.set_gradient_accumulation_boundary(is_last)
        yield

    def inference(self) -> AbstractContextManager[None]:
        # At stage 3 DeepSpeed's hooks gather each module's weights and free them, outside training too.
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        # The loss is divided by the number of micro-batches already; by default DeepSpeed divides it, too.
        self.model.backward(loss, scale_wrt_gas=False)

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def step(self, max_grad_norm: float) -> Tensor:
        for finish in self.before_update:
            finish()
        self.optimizer.clip_grad = max_grad_norm  # what `gradient_clipping` in the JSON sets at start
        self.model.step()
        norm = self.model.get_global_grad_norm()  # before clipping
        return torch.as_tensor(norm, dtype=torch.float32, device=self.model.device)

    def local_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's 1-D float32 partitions of trainable parameters, then `fixed` rows and buffers."""
        yield from self.partitions.local_shards()
        for name, tensor in self.fixed.items():
            yield name, local_tensor(tensor)

    def update_shards(self, change: ShardUpdate) -> None:
        """Collective: call `change(name, shard)` on all `local_shards`, then refresh compute weights."""
        self.partitions.update_shards(change)
        for name, tensor in self.fixed.items():
            change(name, local_tensor(tensor))

    def to_checkpoint(self, name: str, part: Tensor) -> Tensor:
        """Collective: convert a partition (1-D) to row shards in new memory; `fixed` is not copied."""
        if name in self.fixed:
            is_parameter = isinstance(self.fixed[name], DTensor)
            return self.row_shards.as_dtensor(name, part.flatten()) if is_parameter else part
        # All-to-all in new memory: a caller may write to it while the next step changes the partition.
        return self.row_shards.from_partition(name, part, self.ranges[name])

    def from_checkpoint(self, name: str, tensor: Tensor) -> Tensor:
        """Collective: convert row shards to this rank's partition (1-D)."""
        if name in self.fixed:
            return local_tensor(tensor)
        assert isinstance(tensor, DTensor)
        return self.row_shards.to_partition(name, tensor, self.ranges[name])

    def averaged(self) -> AbstractContextManager[None]:
        return nullcontext()

    def moments(self) -> list[str]:
        return sorted({moment for moments in self.moments_of.values() for moment in moments})

    def with_moment(self, moment: str) -> list[str]:
        return [name for name, moments in self.moments_of.items() if moment in moments]

    def optimizer_state(self) -> OptimizerState:
        make_moments = {moment: partial(self._moment, moment) for moment in moment_names(self.optimizer)}
        return OptimizerState(count_steps(self.optimizer), make_moments)

    def _moment(self, moment: str) -> NamedTensors:
        shards = self.partitions.local_shards(moment, self.with_moment(moment))
        return {name: self.to_checkpoint(name, shard) for name, shard in shards}

    def load_optimizer_state(
        self, steps: int, moments: Iterable[str], read: Callable[[str, NamedTensors], None]
    ) -> None:
        """Collective: restore the optimizer's state. `read` fills the row shards of one moment at a time."""
        # DeepSpeed's optimizers have no state before their first step, and neither has the checkpoint.
        if not steps:
            return
        create_moments(self.optimizer, self.partitions, steps)
        for moment in moments:
            rows = {name: self.row_shards.empty(name, self.master_device) for name in self.with_moment(moment)}
            read(moment, rows)
            self.copy_rows(rows, moment)

    def copy_rows(self, rows: NamedTensors, moment: str | None = None) -> None:
        """Collective: copy row shards into the partitions of the master weights, or of a moment."""

        def copy(name: str, shard: Tensor) -> None:
            shard.copy_(self.from_checkpoint(name, rows[name]))

        self.partitions.update_shards(copy, moment, rows if moment is not None else None)


def gather_ranges(partitions: OptimizerPartitions, names: list[str]) -> dict[str, list[ElementRange]]:
    """Collective: return the element range of every rank, by parameter."""
    own = [partitions.element_range(name) for name in names]
    gathered: list[list[ElementRange]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    return {name: [ranges[number] for ranges in gathered] for number, name in enumerate(names)}


def build_deepspeed_engine(
    model: nn.Module,
    _: tuple[str, ...],
    settings: Settings,
    mesh: Mesh,
    load_weights: Callable[[dict[str, Tensor]], None],
    make_optimizer: MakeOptimizer,
) -> DeepSpeedEngine:
    """Collective: build the engine of a meta model. `load_weights` fills row shards and buffers by name.

    Raises SettingsError for parameters that DeepSpeed cannot train.
    """
    refuse_scalar_parameters(model)
    options, world, dtype = deepspeed_options(settings), mesh.world, compute_dtype(settings)
    assert options is not None
    # Closed in reverse, also after an error: DeepSpeed comes first, the folder that it swaps to last.
    with ExitStack() as stack:
        config = engine_config(settings, world.size, max(parameter.numel() for parameter in model.parameters()))
        if options.nvme_path is not None:
            swap_folder = create_swap_folder(options.nvme_path, settings.training.output_dir)
            set_swap_folder(config, stack.enter_context(swap_folder))
        import_deepspeed(world)
        stack.enter_context(torch_linear_restored())
        master_device = world.device if options.offload_optimizer == "none" else torch.device("cpu")
        row_shards = RowShards({name: parameter.shape for name, parameter in model.named_parameters()}, mesh)
        weights = {name: row_shards.empty(name, master_device) for name in row_shards.shapes}
        buffers = move_buffers(model, world.device)
        load_weights({**weights, **buffers})
        trained = trainable_parameters(model).keys()
        # In float32 DeepSpeed's masters come out exact, so these rows are freed once they are gathered.
        read_once = trained if dtype == torch.float32 else ()

        def compute_weight(name: str) -> Tensor:
            """Collective: gather a whole weight in the compute dtype."""
            rows = weights.pop(name) if name in read_once else weights[name]
            return row_shards.gather(name, rows, world.device).to(dtype)

        materialize_model(model, compute_weight, config)
        deepspeed_engine = initialize(model, config, make_optimizer)
        stack.callback(deepspeed_engine.destroy)
        partitions = find_partitions(deepspeed_engine, world)
        fixed = {name: weights.pop(name) for name in list(weights) if name not in trained} | buffers
        close = stack.pop_all().close
        engine = DeepSpeedEngine(deepspeed_engine, partitions, row_shards, fixed, master_device, close)
        if weights:  # the float32 values that the compute dtype has rounded
            engine.copy_rows(weights)
            weights.clear()
        return_freed_memory()
        return engine


def refuse_scalar_parameters(model: nn.Module) -> None:
    # 0.19.8: `DeepSpeedEngine._broadcast_model` views parameters as uint8, which torch refuses for 0-D ones.
    names = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if names:
        raise SettingsError(
            f"{type(model).__name__} has parameters without dimensions ({', '.join(names[:3])}), which DeepSpeed "
            "cannot partition",
            "leave out zero_stage: train on one GPU or data-parallel",
        )


def engine_config(settings: Settings, world_size: int, largest_tensor: int) -> dict[str, Any]:
    # Our own optimizer and schedule stay outside.
    config = deepspeed_config(settings, world_size, largest_tensor)
    return {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")} | OWN_CONFIG


def set_swap_folder(config: dict[str, Any], folder: Path) -> None:
    """Make everything that is offloaded to NVMe use this process's own folder."""
    block = config["zero_optimization"]
    for offload in (block.get("offload_optimizer", {}), block.get("offload_param", {})):
        if offload.get("device") == "nvme":
            offload["nvme_path"] = str(folder)


def find_partitions(deepspeed_engine: Any, world: World) -> OptimizerPartitions:
    parameters = trainable_parameters(deepspeed_engine.module)
    if deepspeed_engine.zero_optimization_stage() == 3:
        return SubGroupPartitions(deepspeed_engine.optimizer, parameters, world.rank)
    return FlatBufferPartitions(deepspeed_engine.optimizer, parameters)


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def initialize(model: nn.Module, config: dict[str, Any], make_optimizer: MakeOptimizer) -> Any:
    """Collective: return DeepSpeed's own engine around a model that has its weights."""
    import deepspeed

    trained = trainable_parameters(model)
    optimizer: Any = make_optimizer(sharded_parameters(trained.items()))
    if isinstance(optimizer, Muon):
        optimizer = PartitionedMuon(optimizer)
    parameters: Any = list(trained.values())
    return deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=parameters, config=config)[0]
