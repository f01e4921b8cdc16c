"""The latents cache: images and clips decoded, resized, cropped and encoded once, by all ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from simpletuner.caches.encoders import Encoder
from simpletuner.caches.fill import GrowingCache, fill_cache, open_growing
from simpletuner.caches.store.mirror import Mirror
from simpletuner.caches.store.records import KeyParts, folder_fingerprint, latents_parts, short_hash
from simpletuner.caches.store.shards import ShardReader
from simpletuner.caches.workers import CacheJob, CacheRequest, Made
from simpletuner.data.images.geometry import Geometry
from simpletuner.data.images.images import ALL_BLACK, DECODE_ERRORS, DOUBT, resize_and_crop
from simpletuner.data.samples.conditioning_files import Mask
from simpletuner.data.samples.samples import DatasetSamples, References, Sample
from simpletuner.errors import DataError, SettingsError
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.vae import Vae
from simpletuner.parallel.world import World
from simpletuner.report import Report
from simpletuner.settings import Settings
from simpletuner.system.numbers import count_noun

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# More of them wait for one another: each holds the GIL for a part of its work, and an image in memory.
MOST_DECODING_THREADS = 16
CLIP_BYTES = 2 << 30
"""Memory of a rank for clips that wait for the VAE: one of 81 frames of 832x480 px is 0.4 GB of float32."""


class LatentsCache:
    """The latents of one dataset's samples, in one folder."""

    def __init__(
        self,
        folder: Path,
        samples: DatasetSamples | References,
        vae: Encoder[Vae],
        family: ModelFamily,
        world: World,
        writers: ExitStack,
        mirror: Mirror | None = None,
    ) -> None:
        self.folder, self.samples, self.vae, self.world, self.mirror = folder, samples, vae, world, mirror
        self.writers = writers
        # By content, not by path: a base model that was moved or downloaded again leaves the cache valid.
        self.fingerprint, self.dtype = folder_fingerprint([family.folder / "vae"]), latents_dtype(family.settings)
        self.facts = dict(family.cache_facts)
        self.encodes_first_frame = family.encodes_first_frame and samples.dataset.is_i2v
        if self.encodes_first_frame:
            self.facts["first frame"] = "encoded once more, before grey ones"
        self.stored_dtype = DTYPES[family.settings.data.vae_cache_dtype]
        self.reader: ShardReader | None = None
        self.doubtful: dict[str, str] = {}
        """Remarks on the colours of samples that this rank has decoded, by their names."""
        self.growing: GrowingCache[Sample, Tensor | str] | None = None

    def fill(self, chunk: int, report: Report, stop: Callable[[], None]) -> dict[str, str]:
        """Collective: encode what is missing, unless it is encoded while training.

        Return the samples that are known to be impossible to decode, with the reason.
        """
        job = CacheJob(
            title="references" if isinstance(self.samples, References) else f"{self.samples.dataset.noun}s",
            folder=self.folder,
            digest=short_hash(
                [self.samples.checksum("name", "version"), self.fingerprint, self.dtype, *self.facts.values()]
            ),
            # A clip is a batch by itself: the VAE takes as much memory for its frames as for so many images.
            chunk=1 if self.samples.dataset.clips else chunk,
            items=lambda: self.samples,
            request=self.request,
            load=partial(decode_image, doubtful=self.doubtful),
            make=self._encode,
            threads=decoding_threads(self.samples, self.world),
            compress=self.samples.dataset.compress_cache,
            mirror=self.mirror,
        )
        if self.samples.dataset.vae_cache_ondemand:
            self.growing, broken = open_growing(job, self.world, stop, self.writers, self.vae.load_early)
        else:
            self.reader, broken = fill_cache(job, self.world, report, stop)
            self.warn_about_doubtful(report)
        return broken

    def warn_about_doubtful(self, report: Report) -> None:
        """Collective: say of how many images the colours or the mask may be wrong, and name one."""
        found = [json.loads(text) for text in self.world.gather_texts(json.dumps(sorted(self.doubtful.items())[:1]))]
        counts = [int(text) for text in self.world.gather_texts(str(len(self.doubtful)))]
        if any(counts):
            name, why = min(item for items in found for item in items)
            report.warn(
                f"{count_noun(sum(counts), 'image')} may be meant otherwise, such as {name}: {why}",
                "change them, or see whether they look right: `simpletuner dataset check --output=FOLDER` names all",
            )

    def requests(self) -> Iterator[CacheRequest]:
        return map(self.request, self.samples)

    def request(self, sample: Sample) -> CacheRequest:
        """Request for a sample, grouped by target size: only images of one shape can share a batch."""
        return CacheRequest(sample.id, self._parts(sample), str(sample.geometry.target))

    def read(self, sample: Sample) -> Tensor:
        """Return a sample's latents (C, H, W), or (C, F, H, W) of a clip, float32.

        Raises DataError where the image turns out to be damaged.
        """
        return self._record(sample)["latents"].float()

    def read_mask(self, sample: Sample) -> Tensor | None:
        """Return a sample's mask of the loss (1, H, W), float32, if it has one."""
        return self._record(sample)["mask"].float() if sample.mask else None

    def read_first_frame(self, sample: Sample) -> Tensor:
        """Encoded first frame of a clip (C, F, H, W), float32, with one latent frame: F = 1."""
        record = self._record(sample)
        return (record["first_frame"] if self.encodes_first_frame else record["latents"][:, :1]).float()

    def _record(self, sample: Sample) -> Mapping[str, Tensor]:
        if self.growing is not None:
            # Missing records are encoded here, in a thread that prepares batches.
            made = self.growing.read(sample)
            if isinstance(made, str):
                raise undecodable(sample, made, "remove it, or run the same command again: it is left out then")
            return made
        assert self.reader is not None
        location = self.reader.find(sample.id, self._parts(sample))
        assert location is not None, f"{sample.id} is not in {self.folder} after filling it"
        return self.reader.read(location)

    def _parts(self, sample: Sample) -> KeyParts:
        return latents_parts(sample, self.fingerprint, self.dtype) | self.facts

    def _encode(self, decoded: Sequence[Tensor | str]) -> list[Made]:
        good = [pixels for pixels in decoded if isinstance(pixels, Tensor)]
        records: Iterator[Made] = iter(())
        if good:
            with self.vae.use() as vae:
                # All of one size: `request` groups the chunk by target.
                latents, masks = encode(vae, torch.stack(good))
                first = encode_first_frame(vae, torch.stack(good)) if self.encodes_first_frame else None
            found = {"latents": latents.to(self.stored_dtype)} | ({} if masks is None else {"mask": masks.cpu()})
            if first is not None:
                found["first_frame"] = first.to(self.stored_dtype)
            records = iter([{name: each[number] for name, each in found.items()} for number in range(len(good))])
        return [each if isinstance(each, str) else next(records) for each in decoded]


def undecodable(sample: Sample, reason: str, hint: str) -> DataError:
    """Error that ends training: replacing the image would make batches depend on the moment it failed."""
    return DataError(f"{sample.id} cannot be decoded: {reason}", hint)


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
    """Return a sample's pixels (3, H, W) in [-1, 1], (3, F, H, W) of a clip, or why its file cannot be decoded.

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
        # Returned, not raised: the record says why it is broken, so the next start need not try the file
        # again.
        return str(error) or type(error).__name__
    if doubtful is not None and (doubt := doubt or doubt_of_mask):
        doubtful[sample.id] = doubt
    whole = pixels.view(3, *g.target.axes)
    return whole if mask is None else torch.cat([whole, mask])


def decode_mask(mask: Mask, geometry: Geometry) -> tuple[Tensor, str]:
    """Return a mask (1, H, W) as its image is cropped, and what may be wrong about it. Raises one of DECODE_ERRORS."""
    (left, top), target = geometry.crop_left_top, geometry.target
    whole = mask.image(geometry.resized.size)
    part = np.asarray(whole.crop((left, top, left + target.width, top + target.height)), np.float32)
    return torch.from_numpy(part / 255)[None], whole.info[DOUBT] if part.any() else ALL_BLACK


def encode_first_frame(vae: Vae, pixels_BCFHW: Tensor) -> Tensor:
    """Latents of clips with their first frame, and grey in place of the others."""
    alone = torch.zeros_like(pixels_BCFHW[:, :3])
    alone[:, :, 0] = pixels_BCFHW[:, :3, 0]
    return vae.encode(alone)


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
