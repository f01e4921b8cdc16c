"""The latents cache: images and clips decoded, resized, cropped and encoded once, by all ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from simpletuner.caches.encoders import Encoder
from simpletuner.caches.fill import RecordSource, cache_mode
from simpletuner.caches.store.records import folder_fingerprint, latents_parts, short_hash
from simpletuner.caches.workers import CacheJob, CacheRequest, Made
from simpletuner.data.images.geometry import Geometry
from simpletuner.data.images.images import ALL_BLACK, DECODE_ERRORS, DOUBT, resize_and_crop
from simpletuner.data.prefetch import SOUND
from simpletuner.data.samples.conditioning_files import Mask
from simpletuner.data.samples.samples import DatasetSamples, References, Sample
from simpletuner.errors import SettingsError
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.vae import Vae, encode_first_frame
from simpletuner.parallel.world import World
from simpletuner.report import Report
from simpletuner.settings import Settings
from simpletuner.system.numbers import count_noun

if TYPE_CHECKING:
    from simpletuner.caches.store.mirror import Mirror
    from simpletuner.data.images.sounds import SoundFormat
    from simpletuner.models.family.sound import SoundVae

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# More of them wait for one another: each holds the GIL for a part of its work, and an image in memory.
MOST_DECODING_THREADS = 16
# Memory of a rank for clips that wait for the VAE: one of 81 frames of 832x480 px is 0.4 GB of float32.
CLIP_BYTES = 2 << 30


class Decoded(NamedTuple):
    """A sample's pixels as `decode_image` returns them, and any sound (channels, samples) of a clip."""

    pixels: Tensor
    sound: Tensor | None


class LatentsSource(RecordSource[Sample, Decoded | str]):
    """The latents of one dataset's samples, and of their sound."""

    def __init__(
        self,
        folder: Path,
        samples: DatasetSamples | References,
        vae: Encoder[Vae],
        sound_vae: Encoder[SoundVae],
        family: ModelFamily,
        world: World,
        writers: ExitStack,
        mirror: Mirror | None = None,
    ) -> None:
        dataset, self.vae, self.sound_vae, self.family = samples.dataset, vae, sound_vae, family
        # By content, not by path: a base model that was moved or downloaded again leaves the cache valid.
        fingerprint, dtype = folder_fingerprint([family.folder / "vae"]), latents_dtype(family.settings)
        facts = dict(family.cache_facts)
        self.encodes_first_frame = family.encodes_first_frame and dataset.is_i2v
        self.is_alone = family.encodes_frame_alone if self.encodes_first_frame else False
        if self.encodes_first_frame:
            facts["first frame"] = "encoded once more, " + ("alone" if self.is_alone else "before grey ones")
        has_sound = dataset.clips is not None and bool(dataset.clips.sound)
        of_sound = {"sound": folder_fingerprint([family.folder / "audio_vae"])} if has_sound else {}
        self.stored_dtype = DTYPES[family.settings.data.vae_cache_dtype]
        self.doubtful: dict[str, str] = {}
        """Remarks on the colours of samples that this rank has decoded, by their names."""

        def request(sample: Sample) -> CacheRequest:
            # Grouped by target size, since only images of one shape can share a batch.
            parts = latents_parts(sample, fingerprint, dtype) | facts | (of_sound if sample.has_sound else {})
            return CacheRequest(sample.id, parts, str(sample.geometry.target))

        job = CacheJob(
            title="references" if isinstance(samples, References) else f"{dataset.noun}s",
            folder=folder,
            digest=lambda: short_hash(
                [samples.checksum("name", "version"), fingerprint, dtype, *facts.values(), *of_sound.values()]
            ),
            # A clip is a batch by itself: the VAE takes as much memory for its frames as for so many images.
            chunk=1 if dataset.clips else dataset.vae_batch_size,
            items=lambda: samples,
            request=request,
            load=self._decode,
            make=self._encode,
            threads=decoding_threads(samples, world),
            compress=dataset.compress_cache,
            mirror=mirror,
        )
        super().__init__(job, cache_mode(dataset.vae_cache_disable, dataset.vae_cache_ondemand), vae, world, writers)

    def fill(self, report: Report, stop: Callable[[], None]) -> dict[str, str]:
        broken = super().fill(report, stop)
        if self.mode == "precomputed":
            self.warn_about_doubtful(report)
        return broken

    def warn_about_doubtful(self, report: Report) -> None:
        """Collective: say of how many images the colours or the mask may be wrong, and name one."""
        found = [json.loads(text) for text in self.world.gather_texts(json.dumps(sorted(self.doubtful.items())[:1]))]
        counts = [int(text) for text in self.world.gather_texts(str(len(self.doubtful)))]
        if any(counts):
            name, why = min(item for items in found for item in items)
            report.warn(
                f"{count_noun(sum(counts), 'image')} may be read with wrong brightness or mask, such as {name}: {why}",
                "change them, or see whether they look right: `simpletuner dataset check --output=FOLDER` names all",
            )

    def read(self, sample: Sample) -> Tensor:
        """Return a sample's latents (C, H, W), or (C, F, H, W) of a clip, float32."""
        return self.record(sample)["latents"].float()

    def read_streams(self, sample: Sample) -> dict[str, Tensor]:
        """Return the latents of a sample's further streams, float32: the tokens of its sound, if any."""
        return {SOUND: self.record(sample)[SOUND].float()} if sample.has_sound else {}

    def read_mask(self, sample: Sample) -> Tensor | None:
        """Return a sample's mask of the loss (1, H, W), float32, if it has one."""
        return self.record(sample)["mask"].float() if sample.mask else None

    def read_first_frame(self, sample: Sample) -> Tensor:
        """Encoded first frame of a clip (C, F, H, W), float32, with one latent frame: F = 1."""
        record = self.record(sample)
        if self.encodes_first_frame:
            return record["first_frame"].float()
        return self.family.first_latent_frame(record["latents"]).float()

    def _decode(self, sample: Sample) -> Decoded | str:
        pixels = decode_image(sample, self.doubtful)
        sound = decode_sound(sample, self.family.sound_format) if sample.has_sound else None
        if isinstance(pixels, str) or isinstance(sound, str):
            return pixels if isinstance(pixels, str) else str(sound)
        return Decoded(pixels, sound)

    def _encode(self, decoded: Sequence[Decoded | str]) -> list[Made]:
        good = [each for each in decoded if isinstance(each, Decoded)]
        records: Iterator[Made] = iter(())
        if good:
            # All of one size: a request names its target as the group.
            pixels = torch.stack([each.pixels for each in good])
            with self.vae.use() as vae:
                latents, masks = encode(vae, pixels)
                again = self.encodes_first_frame
                first = encode_first_frame(vae, pixels, self.is_alone) if again else None
            found = {"latents": latents.to(self.stored_dtype)} | ({} if masks is None else {"mask": masks.cpu()})
            if first is not None:
                found["first_frame"] = first.to(self.stored_dtype)
            tensors = [{name: each[number] for name, each in found.items()} for number in range(len(good))]
            records = iter([own | self._encode_sound(each) for own, each in zip(tensors, good, strict=True)])
        return [each if isinstance(each, str) else next(records) for each in decoded]

    def _encode_sound(self, decoded: Decoded) -> dict[str, Tensor]:
        if decoded.sound is None:
            return {}
        frames = decoded.pixels.shape[1]
        with self.sound_vae.use() as vae:
            tokens = vae.encode(decoded.sound[None], self.family.sound_shape(frames)[0])
        return {SOUND: tokens[0].to(self.stored_dtype)}


def latents_dtype(settings: Settings) -> str:
    """Key part with the precision of computing and storing latents."""
    stored = settings.data.vae_cache_dtype
    tiled = ", tiled" * settings.model.vae_enable_tiling
    return settings.model.vae_dtype + (f", stored in {stored}" if stored != "fp32" else "") + tiled


def decoding_threads(samples: DatasetSamples | References, world: World) -> int:
    """Decoding threads per rank: its share of the cores, or more to hide a store's latency."""
    cores = min((os.cpu_count() or 1) // world.local_size, MOST_DECODING_THREADS)
    wanted = samples.dataset.max_workers or max(2, cores, samples.storage.concurrent_reads)
    if isinstance(samples, References) or not samples.dataset.clips:
        return wanted
    sizes = samples.sizes
    largest = int((sizes.frames * np.multiply(*sizes.targets.T, dtype=np.int64)).max(initial=1)) * 3 * 4
    return max(1, min(wanted, CLIP_BYTES // largest))


def decode_image(sample: Sample, doubtful: dict[str, str] | None = None) -> Tensor | str:
    """Return a sample's pixels (3, H, W) in [-1, 1], (3, F, H, W) of a clip, or why its file cannot be
    decoded.

    Of one with a mask that is a fourth channel, in [0, 1].

    Adds to `doubtful`, by the sample's name, what may be wrong about its colours or its mask.
    """
    g = sample.geometry
    pixels, doubt = torch.empty(3, *g.target), ""
    try:
        # Frame by frame: only what is trained on is in memory, in the size in which it is.
        for number, image in enumerate(sample.images(g.resized.size)):
            frame = resize_and_crop(image, g.resized.size, g.crop_left_top, g.target.size)
            pixels[:, number] = torch.from_numpy(frame).permute(2, 0, 1)
            doubt = image.info[DOUBT]
        mask, doubt_of_mask = decode_mask(sample.mask, g) if sample.mask else (None, "")
    except DECODE_ERRORS as error:
        # Returned, not raised: the record keeps the reason, so the next start need not try the file again.
        return str(error) or type(error).__name__
    if doubtful is not None and (doubt := doubt or doubt_of_mask):
        doubtful[sample.id] = doubt
    whole = pixels.view(3, *g.target.axes)
    return whole if mask is None else torch.cat([whole, mask])


def decode_sound(sample: Sample, wanted: SoundFormat) -> Tensor | str:
    """Return the sound of a clip's frames (channels, samples), or why it cannot be decoded."""
    g = sample.geometry
    assert g.clip is not None
    from simpletuner.data.images.sounds import read_sound  # a run without sound does not need it

    try:
        with sample.open() as file:
            return torch.from_numpy(read_sound(file, g.clip, g.target.frames, wanted))
    except DECODE_ERRORS as error:
        return str(error) or type(error).__name__


def decode_mask(mask: Mask, geometry: Geometry) -> tuple[Tensor, str]:
    """Mask (1, H, W) as its image is cropped, and what may be wrong about it. Raises one of DECODE_ERRORS."""
    (left, top), target = geometry.crop_left_top, geometry.target
    whole = mask.image(geometry.resized.size)
    part = np.asarray(whole.crop((left, top, left + target.width, top + target.height)), np.float32)
    return torch.from_numpy(part / 255)[None], whole.info[DOUBT] if part.any() else ALL_BLACK


def encode(vae: Vae, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the latents of decoded samples, and their masks (B, 1, H, W) as shares of latent cells."""
    latents = vae.encode(pixels[:, :3])
    if pixels.shape[1] == 3:
        return latents, None
    if latents.ndim != 4:
        raise SettingsError(
            f"a mask needs latents with the axes of an image, and those of this model are {tuple(latents.shape[1:])}",
            "leave out conditioning_data",
        )
    return latents, F.adaptive_avg_pool2d(pixels[:, 3:], (latents.shape[-2], latents.shape[-1]))
