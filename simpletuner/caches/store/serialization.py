"""Tensors to the bytes of a record and back: safetensors without the rows of zeros that pad a text.

Rows of zeros at the end of a matrix are not stored; the metadata has the number of rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import safetensors.torch
import torch
from torch import Tensor
from torch.nn.functional import pad

from simpletuner.models.folder.safetensors_dtypes import DTYPES


def serialize(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors of DTYPES as a record."""
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
    """Return the tensors of a record without a copy, but for those that are padded; they keep the memory alive.

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
