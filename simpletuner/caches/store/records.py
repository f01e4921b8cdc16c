"""Cached records: location, and key in named parts, so that a cache miss can name the difference."""

# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simpletuner.data.samples.samples import Sample
from simpletuner.system.files.checksums import value_checksum

# pyarrow comes without types.


KeyParts = dict[str, str]

PROBES, PROBE_BYTES = 64, 4096


def short_hash(value: object) -> str:
    """Return 16 hex digits for anything that JSON can hold."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def latents_parts(sample: Sample, vae: str, dtype: str) -> KeyParts:
    g = sample.geometry
    return {
        # Size and change time, as in `make`: hashing the content would read the whole dataset at each start.
        "file": sample.version,
        "resolution and crop": short_hash([g.original.size, g.resized.size, g.crop_left_top, g.target.size]),
        "VAE": vae,
        "dtype": dtype,
        # Only of videos, so that images keep the keys that they had before there were any.
        **({"clip": f"{g.target.frames} frames from {g.clip.start} by {g.clip.stride}"} if g.clip else {}),
        **({"mask": f"{sample.mask.name} {sample.mask.version}"} if sample.mask else {}),
    }


def reference_parts(sample: Sample) -> KeyParts:
    """Key parts of an embedding whose text encoder reads the references."""
    return {
        f"reference {number}": f"{each.name} {each.version} {each.geometry.resized} {each.geometry.crop_left_top} "
        f"{each.geometry.target}" + (f" from {each.geometry.clip.start}" if each.geometry.clip else "")
        for number, each in enumerate(sample.conditioning_samples)
    }


def text_parts(encoders: str, dtype: str, max_length: int | None) -> KeyParts:
    """Key parts of a caption's embedding, besides the caption, which is the record's name."""
    return {"text encoders": encoders, "dtype": dtype, "maximum length": str(max_length)}


def folder_fingerprint(folders: list[Path]) -> str:
    """Return the identity of model components: their small files whole, their weights by probes."""
    files = sorted(path for folder in folders if folder.is_dir() for path in folder.rglob("*") if path.is_file())
    return short_hash([[path.name, file_fingerprint(path)] for path in files])


def file_fingerprint(path: Path) -> str:
    """Return a hash over a file's size and evenly spaced blocks of it (the whole of a file up to 256 KiB).

    Training changes every part of a weights file, so 64 blocks tell any two trainings of a model apart
    without reading gigabytes at every start.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with path.open("rb") as file:
        for offset in range(0, size, max(PROBE_BYTES, size // PROBES)):
            file.seek(offset)
            digest.update(file.read(PROBE_BYTES))
    return digest.hexdigest()


def changed_parts(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [name for name in new if old.get(name) != new[name]]


# At multiples of it records begin: torch.frombuffer needs aligned numbers.
ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """A record's place and key; `broken` says why a record could not be made.

    `row` is its number in a reader's merged index, or -1 where it was written since.
    """

    shard: Path
    offset: int
    length: int
    name: str
    parts: KeyParts
    broken: str = ""
    checksum: str = ""
    row: int = -1

    def checksum_with(self, record: bytes | memoryview) -> str:
        """Return the checksum that this location would have if `record` is what was written here."""
        return value_checksum({"name": self.name, "parts": self.parts, "broken": self.broken}, record)


def record_keys(records: Iterable[tuple[str, KeyParts]]) -> NDArray[np.uint64]:
    """Return the 128-bit hashes of names and parts, (n, 2)."""
    import xxhash

    # File names have no NUL, and captions are named by hash, so no two records join to the same text.
    texts = ("\0".join([name, *(text for part in sorted(parts.items()) for text in part)]) for name, parts in records)
    digests = b"".join(xxhash.xxh3_128_digest(text.encode(errors="surrogatepass")) for text in texts)
    return np.frombuffer(digests, "<u8").reshape(-1, 2)
