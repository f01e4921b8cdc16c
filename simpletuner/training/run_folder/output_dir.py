"""The output folder of a run: locked, cleaned after killed runs, measured for room, filled with pipelines."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import prod
from pathlib import Path

import torch
from rich.filesize import decimal

from simpletuner import __version__
from simpletuner.checkpoints.disk_usage import estimate_disk_usage, room_of
from simpletuner.checkpoints.export import (
    check_targets,
    export_lora,
    export_pipeline,
    export_single_file,
    finished_steps,
    read_marker,
)
from simpletuner.checkpoints.layout import (
    BEST_SUFFIX,
    EXPORTS,
    FINISHED,
    STATE,
    Checkpoint,
    checkpoint_folder,
    clear_unfinished,
    is_complete,
    list_checkpoints,
    load_checkpoint,
    parse_step,
)
from simpletuner.checkpoints.tensors import plan_group, read_tensors
from simpletuner.checkpoints.verification import CheckpointDamaged, Verification
from simpletuner.data.config.places import default_folder
from simpletuner.data.prefetch import LATENTS, SOUND
from simpletuner.data.samples.samples import Samples
from simpletuner.errors import OtherRunsFolder, RemoteFailure, SettingsError, SimpleTunerError, explain_system_errors
from simpletuner.models.catalog.architecture import copied_bytes
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.opening.lora_config import files_of
from simpletuner.parallel.devices import FLOAT32_BYTES
from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.parallel.world import World
from simpletuner.preparation.plan import Plan, samples_by_shape
from simpletuner.preparation.prepare import HUB_RECORD, folders_of
from simpletuner.run_log import CONSOLE, LOG, START_CONSOLE, STARTED, withdraw_log, write_log_to
from simpletuner.session import Session
from simpletuner.settings import Settings
from simpletuner.settings.declared.errors import mask_arguments
from simpletuner.settings.values.shape import SampleShape
from simpletuner.system.files.atomic import refuse_special, remove, restore_replaced, write_file
from simpletuner.system.files.cache_files import SHARD_SUFFIX, entries_of
from simpletuner.system.files.lease_folder import held_folder
from simpletuner.system.files.mounts import MAY_SAY, missing_promises
from simpletuner.system.files.regular_files import read_file
from simpletuner.training.checkpointer import TrainingState
from simpletuner.training.hooks import RunHook, open_hooks
from simpletuner.training.run_folder.other_project import refuse_other_data

BEST_HINT = "give a dataset of type eval, or eval_split, and an eval_step_interval"


def open_output_dir(session: Session, stack: ExitStack) -> list[RunHook]:
    """Lock output_dir and clean it up, on rank 0, which gets the hooks of the run. Collective: all ranks
    raise what rank 0 raises."""
    output, hooks = session.settings.training.output_dir, list[RunHook]()

    def begin() -> None:
        stack.enter_context(held_folder(output, session.world.lease, session.stop.check, session.report.say))
        hooks.extend(open_hooks(session))
        for hook in hooks:
            hook.locked(stack)
        session.status.begin(output, config_alone(sys.argv[1:]), session.world.lease.record.token)
        open_log(output, create=True)
        for sentence in missing_promises(output):
            session.report.warn(sentence, MAY_SAY)
        remove_leftovers(output)
        check_targets(pipelines_of(session.settings))

    on_first_rank(session, begin)
    session.world.lease.follow(session.world.gather_texts(session.world.lease.record.id)[0])
    if not session.world.is_first:
        open_log(output, create=False)  # once it is known to be the folder of this run
        session.status.follow(output)
    return hooks


@contextmanager
def unless_refused(session: Session) -> Iterator[None]:
    """Restore status, log, commits of the hub and scans where the folder is another run's."""
    settings, is_first = session.settings, session.world.is_first
    record, scans = settings.training.output_dir / HUB_RECORD, default_folder(settings, "scan")
    commits = read_file(record) if is_first and record.is_file() else None
    known = {*entries_of(scans)}
    try:
        yield
    except OtherRunsFolder:
        session.status.withdraw()
        withdraw_log()
        if is_first:
            for path in {*entries_of(scans)} - known:
                remove(path)
            with suppress(OSError):  # what is not empty was there before
                scans.rmdir()
                scans.parent.rmdir()
            if commits is None:
                remove(record)
            elif read_file(record) != commits:
                write_file(record, commits)
        raise


def on_first_rank(session: Session, action: Callable[[], object]) -> None:
    """Call a function on rank 0, which alone holds the lock. Collective: all ranks raise what it raises."""
    error = None
    if session.world.is_first:
        try:
            with explain_system_errors():
                action()
        except SimpleTunerError as caught:
            error = caught
    is_refusal = isinstance(error, OtherRunsFolder)
    said = json.dumps([is_refusal, error.exit_code, error.message, error.hint]) if error is not None else ""
    failure = session.world.gather_texts(said)[0]
    if error is not None:
        raise error
    if failure:
        is_refusal, code, message, hint = json.loads(failure)
        raise OtherRunsFolder(message, hint) if is_refusal else RemoteFailure(code, message, hint)


def accept_start(session: Session, samples: Samples) -> None:
    """Let a start have the folder whose lock it holds. Collective.

    Raises OtherRunsFolder where that has a run on other images.
    """
    output = session.settings.training.output_dir
    on_first_rank(session, lambda: refuse_other_data(session, samples))
    if session.world.is_first:
        keep_console(output)


def keep_console(output: Path) -> None:
    """Let what this start prints be the console of its run, if a page has started it."""
    new = output / START_CONSOLE
    with suppress(OSError):
        if os.path.samestat(os.fstat(1), new.lstat()):
            new.replace(output / CONSOLE)


def restore_from_bucket(session: Session, hooks: Sequence[RunHook], damaged: Mapping[Path, str]) -> None:
    """Fetch the checkpoint to resume from, where a bucket has a newer one than output_dir. Collective."""
    if session.settings.checkpoints.mirror_output:
        session.world.activity.begin("looking for checkpoints in the bucket", watched=False)
        on_first_rank(session, lambda: [hook.resuming(damaged) for hook in hooks])


def config_alone(arguments: Sequence[str]) -> str:
    """Return the file of settings if the command line has nothing else, as the page starts runs.

    The checkpoint that this start goes back to may be named, too: the next start needs none.
    """
    match [part for argument in arguments for part in argument.split("=", 1)]:
        case ["train", "--config", name] | ["train", "--config", name, "--resume_from_checkpoint", _]:
            return str(Path(name).resolve())
    return ""


def open_log(output: Path, create: bool) -> None:
    """Keep this process's messages in a run's log. Raises EnvironmentNotReady where it cannot be written."""
    path = output / LOG
    refuse_special(path)
    command = shlex.join(["simpletuner", *mask_arguments(sys.argv[1:])])
    about = f"{STARTED}{command} (simpletuner {__version__}, {socket.gethostname()}, pid {os.getpid()})"
    write_log_to(path, create, about if create else "")


def remove_leftovers(output: Path) -> None:
    """Remove what a killed run left unfinished, and finish or undo its renames."""
    clear_unfinished(output / "checkpoints")
    for name in EXPORTS.values():
        for kind in ("", "-ema", BEST_SUFFIX):
            restore_replaced(output / f"{name}{kind}")
    for path in [*output.glob(".*.unfinished"), *output.glob("validation/**/.*.unfinished")]:
        remove(path)


def pipelines_of(settings: Settings) -> list[Path]:
    """Folders that a run exports to: for the trained weights; with EMA for the average, and with export_best
    for the best step, too."""
    name, is_wanted = EXPORTS[settings.model.model_type], (settings.ema.use_ema, settings.checkpoints.export_best)
    kinds = ["", *(kind for kind, wanted in zip(("-ema", BEST_SUFFIX), is_wanted, strict=True) if wanted)]
    return [settings.training.output_dir / f"{name}{kind}" for kind in kinds]


def exported_steps(settings: Settings, world: World) -> int:
    """Steps behind the exported pipeline that this run would continue; 0 where there is none. Collective.

    A run that goes back to an earlier checkpoint, or to the start, trains even though a pipeline is there.
    """
    if settings.checkpoints.resume_from_checkpoint != "latest":
        return 0
    pipelines = pipelines_of(settings)
    if settings.checkpoints.export_best and not is_best_exported(settings, world):
        return 0
    if settings.model.model_type == "lora" and not all(
        (each / name).exists() for each in pipelines if not is_of_best(each) for name in files_of(settings)
    ):
        return 0  # export_format names another program since: the last checkpoint is exported again
    written = [marker for each in pipelines if (marker := read_marker(each)) is not None]
    if any(each["precision"] != settings.checkpoints.export_precision for each in written):
        return 0  # in another precision
    return finished_steps(pipelines[0], world)


def is_of_best(pipeline: Path) -> bool:
    return pipeline.name.endswith(BEST_SUFFIX)


def is_best_exported(settings: Settings, world: World) -> bool:
    """True if nothing is left to do for export_best: the best step that has a checkpoint is exported, or none
    has. Collective."""
    best = best_checkpoint(settings, world, ())
    if best is None:
        return True
    marker, state = pipelines_of(settings)[-1] / FINISHED, best.folder / STATE
    steps = finished_steps(marker.parent, world)
    # A run may have gone back since, as times tell: rank 0's, since network file systems cache.
    is_newer = steps == best.step and marker.stat().st_mtime_ns >= state.stat().st_mtime_ns
    return world.gather_texts("1" if is_newer else "")[0] == "1"


def best_checkpoint(settings: Settings, world: World, damaged: Collection[int]) -> Checkpoint | None:
    """Return the checkpoint of the best step that has a whole one; None without any. Collective."""
    from simpletuner.runs.health.best_step import best_saved_of

    output, found = settings.training.output_dir, None
    if world.is_first:
        folders = list_checkpoints(output / "checkpoints")
        found = best_saved_of(output, {parse_step(each) for each in folders if is_complete(each)} - {*damaged})
    answer = world.gather_texts("" if found is None else str(found))[0]
    return load_checkpoint(checkpoint_folder(output / "checkpoints", int(answer))) if answer else None


def has_stopped_early(settings: Settings, world: World, steps: int) -> bool:
    """True if early_stopping_patience has ended a run after `steps`. Collective."""
    patience = settings.validation.early_stopping_patience
    if not (patience and steps):
        return False
    from simpletuner.runs.health.best_step import find_best_of

    found = find_best_of(settings.training.output_dir) if world.is_first else None
    has_ended = found is not None and found.above >= patience and found.since[-1].step == steps
    return world.gather_texts("1" if has_ended else "")[0] == "1"


def export_single_files(session: Session) -> None:
    """Write each exported pipeline as one file, too, if it is wanted and not there yet; on rank 0."""
    if not (session.settings.checkpoints.export_single_file and session.world.is_first):
        return
    session.world.activity.begin("writing one file in the original layout", watched=False)
    for pipeline in pipelines_of(session.settings):
        if not (pipeline / FINISHED).exists():  # no step was measured, of which one would be the best
            continue
        path, written = single_file_of(pipeline), (pipeline / FINISHED).stat().st_mtime_ns
        if not path.exists() or path.stat().st_mtime_ns < written:
            session.report.say(f"writing {path}")
            export_single_file(pipeline, path, session.settings.model.model_family, session.world.lease.check)


def single_file_of(pipeline: Path) -> Path:
    return pipeline.with_name(f"{pipeline.name}.safetensors")


WriteCard = Callable[[Path, Path], None]


def export(session: Session, family: ModelFamily, state: TrainingState, steps: int, write_card: WriteCard) -> None:
    """Write the pipelines, or LoRAs, as trained after `steps`. Collective.

    `write_card` is called on rank 0 with each of `pipelines_of` and the folder in which it is written. The
    weights of the engine may be those of the best step afterwards.
    """
    session.world.activity.begin("writing the pipeline", watched=False)
    write = partial(write_export, session, family, state, write_card)
    weights = [state.weights, *([state.ema.tensors] if state.ema is not None else [])]
    targets = pipelines_of(session.settings)
    # The trained weights last, since `exported_steps` takes them as the sign that all is done.
    changed = [write(target, steps, tensors) for target, tensors in reversed([*zip(targets, weights, strict=False)])]
    if session.settings.checkpoints.export_best:
        changed.append(export_best(session, state, targets[-1], write))
    if any(changed):
        names = ", ".join(sorted(set().union(*changed)))
        session.report.warn(
            f"{family.folder} changed since the run began, and the pipeline has it as it is now: {names}",
            "compare it with another copy of the base model",
        )


def write_export(
    session: Session,
    family: ModelFamily,
    state: TrainingState,
    write_card: WriteCard,
    target: Path,
    steps: int,
    tensors: Callable[[], NamedTensors],
) -> set[str]:
    """Write one pipeline or LoRA, and return the files of the base model that have changed. Collective."""
    session.report.say(f"writing {target}")
    card = partial(write_card, target)
    if family.adapter is not None:
        export_lora(family, family.adapter, target, tensors(), session.world, steps, card)
        return set()
    weights = plan_group(tensors())
    sums = export_pipeline(family, target, state.config, weights, session.world, steps, card)
    return {file for file, value in state.base_checksums.items() if sums.get(file, value) != value}


def export_best(session: Session, state: TrainingState, target: Path, write: Callable[..., set[str]]) -> set[str]:
    """Write the weights of the best step with a healthy checkpoint, as `write` does.

    Collective.
    """
    damaged: list[int] = []
    while (checkpoint := best_checkpoint(session.settings, session.world, damaged)) is not None:
        try:
            Verification(checkpoint, session.world).wait()
            return write(target, checkpoint.step, partial(read_best, session, state, checkpoint))
        except CheckpointDamaged as error:
            damaged.append(checkpoint.step)
            session.report.warn(f"the best step cannot be exported: {error.message}", "the best of the others is")
    session.report.warn(f"no checkpoint has a held-out loss, so {target} is not written", BEST_HINT)
    return set()


def read_best(session: Session, state: TrainingState, checkpoint: Checkpoint) -> NamedTensors:
    """Read the weights of the best step, those or the average, as the held-out loss says. Collective.

    Into the tensors of the last step, which nothing needs any more: this takes no more memory.
    """
    from simpletuner.runs.health.best_step import best_saved, read_measured

    world, step = session.world, checkpoint.step
    best = best_saved(read_measured(session.settings.training.output_dir), [step]) if world.is_first else None
    is_average = world.gather_texts("1" if best is not None and best.weights == "ema" else "")[0] == "1"
    ema = state.ema if is_average and checkpoint.state["ema_updates"] is not None else None
    session.report.say(f"the best step that has a checkpoint is {step:,}" + ", of the EMA" * (ema is not None))
    tensors = ema.tensors() if ema is not None else state.weights()
    with torch.no_grad():
        read_tensors(checkpoint.files("ema" if ema is not None else "model"), tensors, str(checkpoint.folder))
    return tensors


def check_room(session: Session, plan: Plan, family: ModelFamily, step: int, steps: int) -> None:
    """Raise EnvironmentNotReady where checkpoints and pipelines do not fit; warn where caches may not.

    For one process.
    """
    settings = session.settings
    usage = estimate_disk_usage(settings, family.trained_weights, "counted", copied_bytes(family.folder), steps)
    room = room_of(settings, usage, step, steps)
    if room.problem is not None:
        raise room.problem
    if room.free_bytes is None:
        return
    left, channels = room.free_bytes - room.need_bytes, family.exported_config().get("in_channels", 0)
    # A latent cell covers a pixel or more. How many is asked for only where one for each would not fit: the
    # classes of VAEs take 0.2 CPU s to import, and a start with warm caches needs none.
    most = bytes_to_encode(session, plan, family, room.output, lambda shape: channels * shape.pixels)
    if channels and most <= left:
        return
    caches = bytes_to_encode(session, plan, family, room.output, lambda shape: latent_values(family, shape))
    if caches > left:
        session.report.warn(
            f"{room.output} has {decimal(room.free_bytes)} free: caches of up to {decimal(caches)} may not fit beside "
            f"{decimal(room.need_bytes)} of checkpoints and pipelines",
            "make room, or name other folders with cache_dir_vae and cache_dir_text",
        )


def bytes_to_encode(
    session: Session, plan: Plan, family: ModelFamily, output: Path, values_of: Callable[[SampleShape], int]
) -> int:
    """Return at most how many bytes caches of latents and captions have yet to take on the disk of `output`.

    `values_of` returns the numbers in the latents of a sample.
    """
    data, folders = session.settings.data, folders_of(session.settings, plan)
    own = [folder for folder in folders if device_of(folder) == device_of(output)]
    value = {"fp32": FLOAT32_BYTES, "bf16": 2}[data.vae_cache_dtype]
    latents = texts = 0
    with suppress(SettingsError):  # a family of one's own need not know how wide its captions are
        conditioning = sum(map(prod, family.conditioning_shapes().values()))
        for shape, count in samples_by_shape(plan).items():
            latents += count * values_of(shape) * value * (not data.vae_cache_disable)
            texts += count * conditioning * FLOAT32_BYTES * (not data.text_cache_disable)
    present = sum(path.stat().st_size for folder in own for path in folder.rglob(f"*{SHARD_SUFFIX}"))
    return max(0, latents + texts - present) if own else 0


def latent_values(family: ModelFamily, shape: SampleShape) -> int:
    shapes = family.input_shapes(shape.target, shape.references, shape.has_first_frame, shape.has_sound)
    return sum(prod(shapes[name]) for name in (LATENTS, SOUND) if name in shapes)


def device_of(folder: Path) -> int:
    folder = folder.absolute()
    return next(path.stat().st_dev for path in (folder, *folder.parents) if path.exists())
