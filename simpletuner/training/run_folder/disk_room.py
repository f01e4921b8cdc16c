"""Space of output_dir against what a run writes there, before anything is encoded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path

from rich.filesize import decimal

from simpletuner.checkpoints.disk_usage import estimate_disk_usage, room_of
from simpletuner.errors import SettingsError
from simpletuner.models.catalog.parameter_count import copied_bytes
from simpletuner.models.family.base import ModelFamily
from simpletuner.parallel.devices.memory import FLOAT32_BYTES
from simpletuner.preparation.plan import Plan, samples_by_shape
from simpletuner.preparation.prepare import folders_of
from simpletuner.session import Session
from simpletuner.settings.values.shape import SampleShape
from simpletuner.system.files.cache_files import SHARD_SUFFIX
from simpletuner.training.optimizers import trained_weights


def check_room(session: Session, plan: Plan, family: ModelFamily, step: int, steps: int) -> None:
    """Raise EnvironmentNotReady where checkpoints and pipelines do not fit; warn where caches may not fit beside them.

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
    # A latent cell covers a pixel or more. How many is asked for only where one for each would not fit: the classes of
    # VAEs take 0.2 CPU s to import, and a start with warm caches needs none.
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
