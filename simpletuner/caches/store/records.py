"""Cached records: location, bytes, and key in named parts, so that a cache miss can name the difference.

The bytes are safetensors without the zero rows of padding, compressed with zstd: rows of zeros at the end of a matrix
are not stored, and the metadata has the number of rows. A compressed record begins with a number that no safetensors
record begins with.
"""

# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from simpletuner.data.samples.samples import Sample
from simpletuner.models.folder.safetensors_dtypes import DTYPES
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


def serialize(tensors: Mapping[str, Tensor]) -> bytes:
    assert {tensor.dtype for tensor in tensors.values()} <= {*DTYPES.values()}, "a record that could not be read"
    stored = {name: without_padding(tensor.contiguous()) for name, tensor in tensors.items()}
    rows = {name: str(len(tensors[name])) for name, tensor in stored.items() if tensor.shape != tensors[name].shape}
    return safetensors.torch.save(stored, rows or None)


def without_padding(tensor: Tensor) -> Tensor:
    """Return a matrix without the rows of zeros at its end, and other tensors as they are."""
    if tensor.ndim != 2 or not tensor.numel():
        return tensor
    used = tensor.view(torch.uint8).any(dim=1).nonzero()
    return tensor[: int(used[-1]) + 1 if len(used) else 0]


def parse_tensors(record: memoryview) -> dict[str, Tensor]:
    """Return the tensors of a record without a copy, but for those that are padded; they keep the memory
    alive.

    `safetensors.torch.load` would copy the bytes: it takes `bytes` only.
    """
    start = 8 + int.from_bytes(record[:8], "little")
    header = json.loads(bytes(record[8:start]))
    rows = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        dtype, values = DTYPES[entry["dtype"]], record[start + first : start + last]
        flat = torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
        tensor = flat.view(entry["shape"])
        tensors[name] = pad(tensor, (0, 0, 0, int(rows[name]) - len(tensor))) if name in rows else tensor
    return tensors


# Added to the size of the record in the first 8 bytes, where safetensors has the size of its header.
COMPRESSED = 1 << 63


# Higher levels take longer to write and to read, and save nothing on the mantissas of latents and embeddings.
LEVEL = 1


def compress_record(record: bytes) -> bytes:
    """Return the size of a record and its bytes as a zstd frame; the record itself where that is no smaller.

    Even and odd bytes are apart: of bf16 numbers the one half is sign and exponent, which zstd shrinks, and
    the other one mantissa, which it stores as it is. Together a Flux sample takes 11 % more, and a third
    longer to read.
    """
    numbers = np.frombuffer(record + b"\0" * (len(record) % 2), "<u2")
    halves = np.concatenate([numbers.astype(np.uint8), (numbers >> 8).astype(np.uint8)])
    frame = codec().compress(halves, asbytes=True)
    return min(record, (COMPRESSED | len(record)).to_bytes(8, "little") + frame, key=len)


def decompress_record(stored: memoryview) -> memoryview:
    """Decompressed copy of a record, or the record itself if it is not compressed. Raises ValueError."""
    size = int.from_bytes(stored[:8], "little") - COMPRESSED
    if size < 0:
        return stored
    try:
        halves = codec().decompress(stored[8:], decompressed_size=size + size % 2)
    except (OSError, MemoryError) as error:
        raise ValueError(f"it cannot be decompressed: {error}") from None
    even, odd = np.frombuffer(halves, np.uint8).reshape(2, -1)
    record = odd.astype("<u2")
    record <<= 8
    record |= even
    return record.view(np.uint8).data[:size]


def codec() -> pa.Codec:
    return pa.Codec("zstd", compression_level=LEVEL)
