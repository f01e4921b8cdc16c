"""The output folder of a run: locked, cleaned after killed runs, measured for room, filled with pipelines."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import prod
from pathlib import Path

from rich.filesize import decimal

from simpletuner import __version__
from simpletuner.checkpoints.disk_usage import estimate_disk_usage, room_of
from simpletuner.checkpoints.export import (
    check_targets,
    export_lora,
    export_pipeline,
    export_single_file,
    finished_steps,
)
from simpletuner.checkpoints.layout import EXPORTS, FINISHED, clear_unfinished
from simpletuner.checkpoints.tensors import plan_group
from simpletuner.counting.trained_weights import trained_weights
from simpletuner.data.config.places import default_folder
from simpletuner.data.samples.samples import Samples
from simpletuner.errors import OtherRunsFolder, RemoteFailure, SettingsError, SimpleTunerError, explain_system_errors
from simpletuner.models.catalog.architecture import copied_bytes
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.opening.lora_config import files_of
from simpletuner.parallel.devices import FLOAT32_BYTES
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
        restore_replaced(output / name)
        restore_replaced(output / f"{name}-ema")
    for path in [*output.glob(".*.unfinished"), *output.glob("validation/**/.*.unfinished")]:
        remove(path)


def pipelines_of(settings: Settings) -> list[Path]:
    """Folders that a run exports to: for the trained weights, and with EMA for the average, too."""
    name = EXPORTS[settings.model.model_type]
    names = (name, f"{name}-ema") if settings.ema.use_ema else (name,)
    return [settings.training.output_dir / name for name in names]


def exported_steps(settings: Settings, world: World) -> int:
    """Steps behind the exported pipeline that this run would continue; 0 where there is none. Collective.

    A run that goes back to an earlier checkpoint, or to the start, trains even though a pipeline is there.
    """
    if settings.checkpoints.resume_from_checkpoint != "latest":
        return 0
    pipelines = pipelines_of(settings)
    if settings.model.model_type == "lora" and not all(
        (each / name).exists() for each in pipelines for name in files_of(settings)
    ):
        return 0  # export_format names another program since: the last checkpoint is exported again
    return finished_steps(pipelines[0], world)


def export_single_files(session: Session) -> None:
    """Write each exported pipeline as one file, too, if it is wanted and not there yet; on rank 0."""
    if not (session.settings.checkpoints.export_single_file and session.world.is_first):
        return
    session.world.activity.begin("writing one file in the original layout", watched=False)
    for pipeline in pipelines_of(session.settings):
        path, written = single_file_of(pipeline), (pipeline / FINISHED).stat().st_mtime_ns
        if not path.exists() or path.stat().st_mtime_ns < written:
            session.report.say(f"writing {path}")
            export_single_file(pipeline, path, session.settings.model.model_family, session.world.lease.check)


def single_file_of(pipeline: Path) -> Path:
    return pipeline.with_name(f"{pipeline.name}.safetensors")


def export(
    session: Session, family: ModelFamily, state: TrainingState, write_card: Callable[[Path, Path], None]
) -> None:
    """Write the trained pipelines, or LoRAs. Collective.

    `write_card` is called on rank 0 with each of `pipelines_of` and the folder in which it is written.
    """
    session.world.activity.begin("writing the pipeline", watched=False)
    steps, world = state.schedule.max_steps, session.world
    weights = [state.weights, *([state.ema.tensors] if state.ema is not None else [])]
    changed: set[str] = set()
    # The trained weights last, since `exported_steps` takes them as the sign that all is done.
    for target, tensors in reversed([*zip(pipelines_of(session.settings), weights, strict=True)]):
        session.report.say(f"writing {target}")
        card = partial(write_card, target)
        if family.adapter is not None:
            export_lora(family, family.adapter, target, tensors(), world, steps, card)
            continue
        sums = export_pipeline(family, target, state.config, plan_group(tensors()), world, steps, card)
        changed |= {file for file, value in state.base_checksums.items() if sums.get(file, value) != value}
    if changed:
        names = ", ".join(sorted(changed))
        session.report.warn(
            f"{family.folder} changed since the run began, and the pipeline has it as it is now: {names}",
            "compare it with another copy of the base model",
        )


def check_room(session: Session, plan: Plan, family: ModelFamily, step: int, steps: int) -> None:
    """Raise EnvironmentNotReady where checkpoints and pipelines do not fit; warn where caches may not.

    For one process.
    """
    settings = session.settings
    usage = estimate_disk_usage(settings, trained_weights(family), "counted", copied_bytes(family.folder), steps)
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
    return prod(family.input_shapes(shape.target, shape.references, shape.has_first_frame)["latents"])


def device_of(folder: Path) -> int:
    folder = folder.absolute()
    return next(path.stat().st_dev for path in (folder, *folder.parents) if path.exists())
