"""Engines taking turns in one process group, on the real data pipeline: what a launch costs is paid once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import ranks
import torch
from flags import tokens_of
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from simpletuner.checkpoints.layout import Checkpoint, load_checkpoint
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.parallel.mesh import build_mesh
from simpletuner.parallel.precision.quantized import QuantizedLinear
from simpletuner.parallel.torch_engine import local_tensor
from simpletuner.parallel.world import World, joined_world
from simpletuner.preparation.prepare import Prepared, fit_to_model, plan_data, prepare
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import Loaded
from simpletuner.settings.declared.sections import (
    Compile,
    Data,
    Ema,
    Launch,
    Lora,
    Model,
    Optimizer,
    Parallel,
    Settings,
    Training,
    Validation,
)
from simpletuner.system.processes.signals import StopRequest
from simpletuner.training.build import build_trainer, open_engine, open_state
from simpletuner.training.checkpointer import TrainingState
from simpletuner.training.optimizers import Schedule
from simpletuner.training.run_folder.resuming import resume_point
from simpletuner.training.trainer import Trainer

GLOBAL_BATCH, SAVED = 4, 2
HELD = "held.safetensors"
"""What an engine held as it saved, beside its checkpoints: read in a quarter of the time that torch.load takes."""


def zero(stage: int, optimizer: str = "none", param: str = "none") -> dict[str, Any]:
    """Return what switches ZeRO on; sub-groups and buffers fit tiny models, so that several of each are in use."""
    block: dict[str, Any] = {"sub_group_size": 200_000}
    if optimizer != "none":
        block["offload_optimizer"] = {"buffer_count": 5}
    if param != "none":
        block["offload_param"] = {"buffer_count": 8, "buffer_size": 200_000, "max_in_cpu": 0}
    config = {"zero_optimization": block}
    return {"zero_stage": stage, "offload_optimizer": optimizer, "offload_param": param, "deepspeed_config": config}


ENGINES: dict[str, dict[str, Any]] = {
    "whole": {},
    "fsdp2": {"fsdp_enable": True},
    "fsdp2-kept": {"fsdp_enable": True, "fsdp_reshard_after_forward": False},
    "fsdp2-sync": {"fsdp_enable": True, "fsdp_sync_each_batch": True},
    "fsdp2-cpu": {"fsdp_enable": True, "fsdp_offload_params": True},
    "hybrid": {"fsdp_enable": True, "dp_replicate_size": 2},
    "hybrid-sync": {"fsdp_enable": True, "dp_replicate_size": 2, "fsdp_sync_each_batch": True},
    "hybrid-cp2": {"fsdp_enable": True, "dp_replicate_size": 2, "context_parallel_size": 2},
    "cp2": {"fsdp_enable": True, "context_parallel_size": 2},
    "cp4": {"fsdp_enable": True, "context_parallel_size": 4},
    "cp2-cpu": {"fsdp_enable": True, "context_parallel_size": 2, "fsdp_offload_params": True},
    "cp2-alltoall": {"fsdp_enable": True, "context_parallel_size": 2, "context_parallel_comm_strategy": "alltoall"},
    "hybrid-cp2-alltoall": {
        "fsdp_enable": True,
        "dp_replicate_size": 2,
        "context_parallel_size": 2,
        "context_parallel_comm_strategy": "alltoall",
    },
    "cp4-alltoall": {"fsdp_enable": True, "context_parallel_size": 4, "context_parallel_comm_strategy": "alltoall"},
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
    "zero2-cpu": zero(2, "cpu"),
    "zero3-cpu": zero(3, "cpu", "cpu"),
    "zero3-disk": zero(3, "nvme", "nvme"),
}
"""Settings of parallelism by name; `whole` is plain on one rank and data-parallel on several."""

BASES = ("int8", "float8", "nf4")
"""Precisions of a LoRA's base, as words before an engine's name."""

KINDS = ("dora", "loha", "lokr", "oft")
"""Values of lora_type, as words before `lora`."""

LABELS = {"dora": "DoRA", "loha": "LoHa", "lokr": "LoKr", "oft": "OFT"}
"""Their names in a summary."""

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "split": {"state_layout": "split"},
    "bf16": {"state_layout": "bf16"},
    "released": {"optimizer_release_gradients": True},
    **{
        name: {"optimizer": name}
        for name in ("adam", "adagrad", "lion", "adafactor", "muon", "adamw_schedulefree", "prodigy")
    },
    "ema": {},
    "lora": {},
    **{name: {} for name in (*BASES, *KINDS, "products")},
}
"""Settings of the optimizer by the words that may stand before an engine's name, as in `split fsdp2`."""


def settings_of(arguments: dict[str, Any], name: str, folder: Path, ranks: int) -> Settings:
    """Return the settings of a small run on one of the engines."""
    shared, passes = Path(arguments["folder"]), arguments.get("passes", 1)
    caches = Path(arguments.get("caches", shared))
    *words, engine = name.split()
    dtype, parallel = arguments.get("mixed_precision", "no"), Parallel(**ENGINES[engine])
    optimizer = {"optimizer": arguments.get("optimizer", "adamw")}
    for word in words:
        optimizer |= OPTIMIZERS[word]
    return Settings(
        model=Model(
            model_family=arguments["family"],
            model_type="lora" if "lora" in words else "full",
            pretrained_model_name_or_path=arguments["base"],
        ),
        lora=Lora(
            lora_rank=16 if set(words) & {*KINDS} else 64,
            lora_type=next((word for word in words if word in KINDS), "lora"),
            lora_init=arguments.get("lora_init"),
            base_model_precision=next((word for word in words if word in BASES), "no_change"),
            base_model_compute="int8" if "products" in words else "no_change",
        ),
        data=Data(
            instance_data_dir=arguments["pictures"],
            resolution=arguments.get("resolution", 64),
            crop=arguments.get("crop", False),
            aspect_bucket_alignment=arguments.get("alignment", 16),
            tokenizer_max_length=arguments.get("tokenizer_max_length", tokens_of(arguments["family"])),
            caption_dropout_probability=arguments.get("caption_dropout", 0.0),
            cache_dir_vae=caches / "latents",
            cache_dir_text=caches / "text",
        ),
        training=Training(
            output_dir=folder,
            train_batch_size=GLOBAL_BATCH // (ranks // parallel.context_parallel_size) // passes,
            gradient_accumulation_steps=passes,
            mixed_precision=dtype,
            gradient_checkpointing=arguments.get("gradient_checkpointing", False),
            **arguments.get("training", {}),
        ),
        optimizer=Optimizer(
            **optimizer,
            learning_rate=arguments.get("learning_rate", 1e-3),
            max_grad_norm=arguments.get("max_grad_norm", 2.0),
        ),
        ema=Ema(use_ema="ema" in words or arguments.get("ema", False), ema_decay=0.9),
        validation=Validation(
            validation_prompt=arguments.get("validation_prompt", []), validation_num_inference_steps=2
        ),
        launch=Launch(num_processes=ranks),
        compile=Compile(**arguments.get("compile", {})),
        parallel=parallel.model_copy(update={"offload_param_path": shared / "offload"}),
    )


def prepared_by(world: World, settings: Settings) -> Prepared:
    """Encode the pictures, or find them encoded."""
    session, family = session_of(world, settings)
    plan, sampled = fit_to_model(session, plan_data(session), family)
    return prepare(session, plan, family, ExitStack(), sampled)


def session_of(world: World, settings: Settings) -> tuple[Session, ModelFamily]:
    session = Session(Loaded(settings, {}), build_mesh(settings, world), Report(quiet=True), StopRequest())
    return session, family_class(settings.model).open(Path(settings.model.pretrained_model_name_or_path), settings)


@contextmanager
def opened(
    world: World, settings: Settings, prepared: Prepared, checkpoint: Checkpoint | None = None
) -> Iterator[tuple[Trainer, TrainingState]]:
    """Yield what trains on an engine, from the start or from a checkpoint."""
    session, family = session_of(world, settings)
    with closing(open_engine(session.settings, session.mesh, family, checkpoint)) as engine:
        point = resume_point(settings, prepared.plan, checkpoint)
        state = open_state(session, family, engine, prepared.plan, checkpoint, point)
        state.schedule = Schedule(100)
        yield build_trainer(session, family, prepared, state, None), state


def steps_of(trainer: Trainer, world: World, count: int, saves: bool = False) -> list[list[float]]:
    """Take some steps, and return each one's mean loss and gradient norm; with `saves`, save after the last one."""
    taken = []
    for number in range(count):
        batch, _ = trainer.next_batch()
        output = trainer.train_step(batch)
        trainer.step += 1
        if trainer.ema is not None:
            trainer.ema.update(trainer.step)
        taken.append([world.all_mean(output.loss.clone()).item(), output.grad_norm.item()])
        if saves and number == count - 1:
            trainer.checkpointer.save(trainer.step, batch.next_state)
    trainer.checkpointer.close()
    return taken


def losses_in_turn(arguments: dict[str, Any], names: list[str], steps: int, report: str) -> None:
    """Write the losses and norms of some steps from the start, by engine."""
    measure_in_turn(arguments, names, lambda trainer, world: steps_of(trainer, world, steps), report)


def broken_in_turn(arguments: dict[str, Any], names: list[str], report: str) -> None:
    """Write the loss and norm of a step whose gradients are infinite, by engine."""

    def broken_step(trainer: Trainer, world: World) -> list[list[float]]:
        backward = trainer.engine.backward
        trainer.engine.backward = lambda loss: backward(loss * torch.inf)
        return steps_of(trainer, world, 1)

    measure_in_turn(arguments, names, broken_step, report)


def bases_in_turn(arguments: dict[str, Any], names: list[str], report: str) -> None:
    """Write the losses and norms of two steps, and the bytes of quantized weights per weight, by engine."""
    measure_in_turn(
        arguments,
        names,
        lambda trainer, world: [steps_of(trainer, world, 2), bytes_per_quantized_weight(trainer.engine.module)],
        report,
    )


def bytes_per_quantized_weight(model: nn.Module) -> float | None:
    """Return the bytes that this rank holds for each quantized weight of the whole model, None where there is none."""
    layers = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    held = sum(local_tensor(part.detach()).nbytes for layer in layers for part in layer.parts())
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    return held / weights if weights else None


def measure_in_turn(
    arguments: dict[str, Any], names: list[str], measure: Callable[[Trainer, World], Any], report: str
) -> None:
    """Write what is measured of a run that is at its start, by engine."""
    with joined_world() as world:
        taken, prepared = {}, None
        for name in names:
            settings = settings_of(arguments, name, Path(arguments["folder"]) / f"{name}-x{world.size}", world.size)
            prepared = prepared or prepared_by(world, settings)
            with opened(world, settings, prepared) as (trainer, _):
                taken[name] = measure(trainer, world)
        write(taken, report, world)


def dropout_in_turn(arguments: dict[str, Any], cases: dict[str, tuple[str, int]], report: str) -> None:
    """Write the first numbers that dropout draws in the denoiser, by case (engine, seed), step and rank."""
    with joined_world() as world:
        taken, prepared = {}, None
        for name, (engine, seed) in cases.items():
            folder = Path(arguments["folder"]) / name
            settings = settings_of({**arguments, "training": {"seed": seed}}, engine, folder, world.size)
            prepared = prepared or prepared_by(world, settings)
            with opened(world, settings, prepared) as (trainer, _):
                taken[name] = [drawn_in_step(trainer, world) for _ in range(2)]
        write(taken, report, world)


def drawn_in_step(trainer: Trainer, world: World) -> list[list[float]]:
    drawn: list[float] = []
    hook = trainer.engine.module.register_forward_pre_hook(lambda *_: drawn.extend(torch.rand(3).tolist()))
    trainer.train_step(trainer.next_batch()[0])
    trainer.step += 1
    hook.remove()
    return [json.loads(text) for text in world.gather_texts(json.dumps(drawn))]


def save_in_turn(arguments: dict[str, Any], names: list[str], report: str) -> None:
    """Take two steps and save, and write the losses of the two that follow, by engine."""
    with joined_world() as world:
        taken, prepared = {}, None
        for name in names:
            folder = Path(arguments["folder"]) / f"{name}-x{world.size}"
            settings = settings_of(arguments, name, folder, world.size)
            prepared = prepared or prepared_by(world, settings)
            with opened(world, settings, prepared) as (trainer, state):
                steps_of(trainer, world, SAVED, saves=True)
                held = held_by(state)
                if world.is_first:
                    save_file(held, folder / HELD)
                taken[folder.name] = steps_of(trainer, world, 2)
        write(taken, report, world)


def resume_in_turn(arguments: dict[str, Any], sources: dict[str, list[str]], report: str) -> None:
    """Resume each engine from its sources; write what differs from who saved it, and the losses that follow."""
    with joined_world() as world:
        taken, prepared = {}, None
        for name, saved in sources.items():
            for source in saved:
                root = Path(arguments["folder"])
                folder = root / f"{name}-x{world.size}-from-{source}"
                checkpoint = load_checkpoint(root / source / "checkpoints" / f"checkpoint-{SAVED:06d}")
                settings = settings_of(arguments, name, folder, world.size)
                prepared = prepared or prepared_by(world, settings)
                with opened(world, settings, prepared, checkpoint) as (trainer, state):
                    different = differences(state, load_file(root / source / HELD), world)
                    taken[f"{name}-x{world.size} from {source}"] = [different, steps_of(trainer, world, 2)]
        write(taken, report, world)


def write(taken: dict[str, Any], report: str, world: World) -> None:
    if world.is_first:
        Path(report).write_text(json.dumps(taken))


def held_by(state: TrainingState) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, whole, from an engine's memory, as `group: name`."""
    return {
        f"{group}: {name}": whole(tensor).clone(memory_format=torch.contiguous_format)
        for group, held in groups_of(state)
        for name, tensor in held
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def groups_of(state: TrainingState) -> Iterator[tuple[str, Iterable[tuple[str, torch.Tensor]]]]:
    for group, make in state.groups(state.engine.optimizer_state()).items():
        yield group, make().items()


def differences(state: TrainingState, held: dict[str, torch.Tensor], world: World) -> list[str]:
    """Return the tensors that are not the same on some rank, bit for bit; each looks at its own rows."""
    different = []
    for group, tensors in groups_of(state):
        for name, tensor in tensors:
            expected = held.pop(f"{group}: {name}", torch.empty(0))
            if not torch.equal(local_tensor(tensor), rows_of(expected, tensor)):
                different.append(f"{group}: {name}")
    different += [f"{name} is missing" for name in held]
    return sorted({name for text in world.gather_texts(json.dumps(different)) for name in json.loads(text)})


def rows_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the rows of a whole tensor that this rank has of a sharded one."""
    if not isinstance(like, DTensor):
        return whole
    chunks, rank = whole.chunk(like.device_mesh.size(-1)), like.device_mesh.get_local_rank(-1)
    return chunks[rank] if rank < len(chunks) else whole[:0]


def dump_in_turn(arguments: dict[str, Any], names: list[str], report: str) -> None:
    """Take two steps and let DeepSpeed write a checkpoint of its own."""
    with joined_world() as world:
        prepared = None
        for name in names:
            folder = Path(arguments["folder"]) / name
            settings = settings_of(arguments, name, folder, world.size)
            prepared = prepared or prepared_by(world, settings)
            with opened(world, settings, prepared) as (trainer, state):
                steps_of(trainer, world, SAVED, saves=True)
                held = held_by(state)
                if world.is_first:
                    save_file(held, folder / HELD)
                model: Any = state.engine.model
                model.save_checkpoint(str(folder / "dump"))
        write({}, report, world)


def command_line_without(package: str, arguments: list[str]) -> None:
    """Run the real command line in a process that cannot import a package."""
    sys.modules[package] = None  # pyright: ignore[reportArgumentType]
    ranks.command_line(arguments)


def command_line_with_path(path: str, arguments: list[str]) -> None:
    """Run the real command line in a process that finds programs there alone."""
    os.environ["PATH"] = path
    ranks.command_line(arguments)
