"""Make class images by the base model, on all ranks, before anything is encoded.

Ranks take images from one queue, each with the whole denoiser on its device: no collective is held open. Where ranks
share the weights of the denoiser that they train, they share those of the base model too, and sample in step. An image
is written at once or not at all, so a run that is killed goes on with those that it lacks.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path

import torch

from simpletuner.caches.store.records import folder_fingerprint, short_hash
from simpletuner.data.config.validation_prompts import ValidationPrompt
from simpletuner.data.samples.samples import Samples
from simpletuner.data.storage.storage import stored_file
from simpletuner.errors import SettingsError
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.parallel.engine import compute_dtype
from simpletuner.parallel.gpu import return_memory
from simpletuner.preparation.class_images import ClassImages, class_images_of, with_versions
from simpletuner.preparation.plan import Plan
from simpletuner.preparation.same_data import verify_same_folders
from simpletuner.preparation.sampled_prompts import SampledPrompt
from simpletuner.report import Report
from simpletuner.runs.images import ImageInfo, read_info, write_sample
from simpletuner.session import Session
from simpletuner.system.files.atomic import remove, unfinished_path
from simpletuner.system.files.late_files import wait_for_files
from simpletuner.system.files.locks import removed_lock
from simpletuner.training.validation.requested_samples import check_references
from simpletuner.training.validation.validator import BASE, PlannedImage, group_by_denoiser_calls
from simpletuner.training.validation.whole_denoiser import (
    build_denoiser,
    build_sharded_denoiser,
    encode_pair,
    sample_pixels,
)

# Lock file of a folder while a run makes images there.
LOCK = ".class-images.lock"
# What a run that was killed while it wrote an image left there.
PARTS = unfinished_path(Path("*.png"), "*").name
PLACE = "class images"
LOOK_SECONDS = 0.2
LOOKING_THREADS = 8


@dataclass(frozen=True)
class ClassImage:
    path: Path
    planned: PlannedImage
    base: str
    """Fingerprint of the base model."""

    @property
    def info(self) -> ImageInfo:
        return replace(self.planned.info(BASE, 0), made_from=self.base)

    def why_missing(self) -> str:
        """Return why it has to be made; empty where the file is whole and of this base model."""
        if not os.path.lexists(self.path):
            return "missing"
        try:
            _, info = read_info(self.path)  # decodes it
        except OSError:
            return "damaged"
        return "" if info == self.info else "of another base model"


def with_class_images(session: Session, plan: Plan, family: ModelFamily) -> Plan:
    """Collective: make the class images that are missing, and return the plan with their versions.

    Raises SettingsError for a model that samples from references alone.
    """
    world, report, stop = session.world, session.report, session.stop.check
    wanted = class_images_of(session.settings, plan.samples.parts)
    try:
        check_references(family, 0)
    except ValueError as error:
        raise SettingsError(f"dataset `{wanted[0].dataset.id}`: {error}", "leave prior_images out") from None
    base = base_fingerprint(family)
    images = [image for each in wanted for image in images_of(each, base, family)]
    folders = sorted({each.folder for each in wanted})
    named = [("the folder of class images", folder) for folder in folders]
    verify_same_folders(named, world, stop, f"{PLACE}/folders")
    with ExitStack() as locks:
        world.activity.begin("looking for class images", watched=False)

        def look() -> str:
            if not any(whys := why_missing(images)):
                return "[]"
            for folder in folders:
                locks.enter_context(locked(folder, report, stop))
                for part in folder.glob(PARTS):
                    remove(part)
            whys = why_missing(images)  # what another run has made meanwhile
            report_missing(wanted, images, whys, report)
            return json.dumps([number for number, why in enumerate(whys) if why])

        # Another run, for which rank 0 may wait, takes hours.
        if world.is_first:
            world.store.set(f"{PLACE}/missing", look())
        world.store_barrier(f"{PLACE}/looked", stop, patience_seconds=math.inf)
        missing = [images[number] for number in json.loads(world.store.get(f"{PLACE}/missing"))]
        if missing:
            make_images(missing, session, family)
    versions = shared_versions(images, session)
    parts = [with_versions(part, versions) if part.dataset.prior_images else part for part in plan.samples.parts]
    return replace(plan, samples=Samples(parts))


def base_fingerprint(family: ModelFamily) -> str:
    """Return a fingerprint of the base model's components as published: without an assistant LoRA."""
    folders = sorted(family.folder / name for name in family.index if not name.startswith("_"))
    return short_hash([folder_fingerprint([each]) for each in folders])


def images_of(wanted: ClassImages, base: str, family: ModelFamily) -> Iterator[ClassImage]:
    for name, prompt in wanted.prompts.items():
        params = wanted.sampling.params(int(name.partition("-")[0]))
        negative = wanted.sampling.negative_prompt
        sampled = SampledPrompt(0, name, ValidationPrompt(prompt=prompt), negative, params.shape)
        yield ClassImage(wanted.folder / name, PlannedImage(sampled, replace(params, fps=family.frame_rate)), base)


def why_missing(images: Sequence[ClassImage]) -> list[str]:
    with ThreadPoolExecutor(LOOKING_THREADS, thread_name_prefix="class-images") as pool:
        return list(pool.map(ClassImage.why_missing, images))


@contextmanager
def locked(folder: Path, report: Report, stop: Callable[[], None]) -> Iterator[None]:
    """Hold a folder's lock, waiting for a run that makes images there."""
    say_once = cache(lambda: report.say(f"another run makes class images in {folder}: waiting for it"))

    def wait() -> None:
        say_once()
        stop()
        time.sleep(LOOK_SECONDS)

    with removed_lock(folder / LOCK, wait):
        yield


def report_missing(
    wanted: Sequence[ClassImages], images: Sequence[ClassImage], whys: Sequence[str], report: Report
) -> None:
    """Say what is made for each dataset, and why what is there does not count."""
    for each in wanted:
        own = [(image, why) for image, why in zip(images, whys, strict=True) if image.path.parent == each.folder]
        counts = Counter(why for image, why in own if why and image.path.name in each.prompts)
        if not counts:
            continue
        first = next(image for image, why in own if why == "missing") if counts["missing"] else None
        changed = what_changed(first) if first else ""
        reasons = [f"{count:,} {why}" for why, count in counts.items() if why != "missing"]
        reasons += [f"{changed}; those before stay in {each.folder}"] if changed else []
        why = f" ({'; '.join(reasons)})" * bool(reasons)
        report.say(f"class images of `{each.dataset.id}`: making {counts.total():,} of {each.describe()}{why}")


NAMES = {"num_inference_steps": "steps", "negative_prompt": "negative prompt"}
COMPARED = ("prompt", "negative_prompt", "seed", "num_inference_steps", "guidance", "size")


def what_changed(image: ClassImage) -> str:
    """Return how an image of the same number was made otherwise; empty where there is none."""
    number = image.path.name.partition("-")[0]
    found = sorted(image.path.parent.glob(f"{number}-*.png"), key=lambda path: path.stat().st_mtime_ns)
    for path in reversed(found):
        try:
            _, info = read_info(path)
        except OSError:
            continue
        if info is not None:
            pairs = [(name, getattr(info, name), getattr(image.info, name)) for name in COMPARED]
            differing = [f"{NAMES.get(name, name)} was {old!r}, is {new!r}" for name, old, new in pairs if old != new]
            return ", ".join(differing)
    return ""


def make_images(images: Sequence[ClassImage], session: Session, family: ModelFamily) -> None:
    """Make images, those of all ranks from one queue, or in step where they share the weights. Collective."""
    world, report, stop = session.world, session.report, session.stop.check
    parallel = session.settings.parallel
    is_sharded = parallel.fsdp_enable or parallel.zero_stage == 3
    with report.progress("making class images", len(images)) as progress, torch.no_grad():
        own = in_step(images, session) if is_sharded else from_queue(len(images), session)
        if (first := next(own, None)) is not None:  # else there are fewer than ranks
            make_share(images, chain([first], own), session, family, is_sharded, progress.update)
        world.activity.begin("making class images")
        world.wait_for_count(PLACE, len(images), stop, progress.update)
    return_memory(world.device)


def from_queue(count: int, session: Session) -> Iterator[tuple[int, bool]]:
    """Yield the numbers of images that this rank makes, and True."""
    while (number := session.world.next_chunk(PLACE)) < count:
        session.stop.check()
        yield number, True


def in_step(images: Sequence[ClassImage], session: Session) -> Iterator[tuple[int, bool]]:
    """Yield the numbers of images that this rank samples, and whether it writes them. Collective.

    All ranks call the denoiser equally often, since each gathers its shards from the others; one without an
    image left samples the last one as well.
    """
    world, numbers = session.world, {id(each.planned): number for number, each in enumerate(images)}
    for group in group_by_denoiser_calls([each.planned for each in images]):
        for first in range(0, len(group), world.size):
            if any(world.gather_texts("stop" * bool(session.stop.signal_number))):  # ranks are asked one by one
                raise session.stop.stopped("before training; the class images that are made are kept")
            index = first + world.rank
            yield numbers[id(group[min(index, len(group) - 1)])], index < len(group)


def make_share(
    images: Sequence[ClassImage],
    numbers: Iterable[tuple[int, bool]],
    session: Session,
    family: ModelFamily,
    is_sharded: bool,
    show: Callable[[int], object],
) -> None:
    """Make this rank's images. Collective where the denoiser is sharded."""
    world, device, dtype = session.world, session.world.device, compute_dtype(session.settings)
    world.activity.begin("loading the base model", watched=False)
    encoded = encode_prompts(images, family, device, dtype)
    if is_sharded:
        model = build_sharded_denoiser(family, session.settings, session.mesh)
    else:
        model = build_denoiser(family, None, device, dtype)
    vae = family.vae(device)
    world.activity.begin("making class images")
    for number, is_own in numbers:
        image = images[number]
        prompt = image.planned.prompt
        planned = replace(image.planned, prompt=prompt.encoded(**encoded[prompt.prompt.prompt, prompt.negative_prompt]))
        pixels, _ = sample_pixels(family, model, vae, planned, device, dtype)
        if is_own:
            write_sample(image.path, pixels, image.info)
            show(world.add_progress(PLACE, 1))


def encode_prompts(
    images: Sequence[ClassImage], family: ModelFamily, device: torch.device, dtype: torch.dtype
) -> Mapping[tuple[str, str], Mapping[str, Conditioning]]:
    """Encode each pair of prompts once, into the machine's memory; the text encoders are freed."""
    pairs = dict.fromkeys((each.planned.prompt.prompt.prompt, each.planned.prompt.negative_prompt) for each in images)
    encoder, encoded = family.text_encoder(device, dtype), {}
    for pair in pairs:
        found = encode_pair(family, encoder, *pair)
        encoded[pair] = {sign: {name: each.cpu() for name, each in own.items()} for sign, own in found.items()}
    del encoder
    return_memory(device)
    return encoded


def shared_versions(images: Sequence[ClassImage], session: Session) -> dict[str, str]:
    """Collective: return the versions of files that rank 0 sees, by path, once all ranks see the files."""
    world, stop = session.world, session.stop.check

    def look() -> str:
        files = [(each.path.parent, stored_file(each.path.name, each.path.stat)) for each in images]
        return json.dumps([(str(folder), file.name, file.size_bytes, file.version) for folder, file in files])

    found = json.loads(world.from_first(f"{PLACE}/versions", look, stop))
    sizes: dict[str, dict[str, int]] = {}
    for folder, name, size, _ in found:
        sizes.setdefault(folder, {})[name] = size
    for folder, files in sizes.items():
        wait_for_files(Path(folder), files, stop)
    return {f"{folder}/{name}": version for folder, name, _, version in found}
