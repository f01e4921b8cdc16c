"""OpenCLIP's names for the tensors of a CLIP text encoder: the second one of SDXL, and that of Stable Diffusion 2."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

Reads = dict[str, Callable[[], Tensor]]
"""Functions that read each tensor, by name: writing a model does not need all of it in memory."""

IN_A_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
# Of the model itself, which for transformers are those of a layer.
PARAMETERS = {
    "embeddings.position_embedding.weight": "positional_embedding",
    "text_projection.weight": "text_projection",
}
OTHERS = {"embeddings.token_embedding": "token_embedding", "final_layer_norm": "ln_final"}


def open_clip_reads(reads: Reads) -> Reads:
    """Return what reads the tensors by OpenCLIP's names; query, key and value are one tensor there."""
    named: Reads = {}
    for name, read in reads.items():
        layer = re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)", name)
        if layer is not None:
            named |= layer_reads(f"transformer.resblocks.{layer[1]}.", layer[2], name, reads)
        elif name in PARAMETERS:
            # OpenCLIP multiplies by the matrix, transformers by its transpose in a linear layer.
            named[PARAMETERS[name]] = partial(transposed, read) if "projection" in name else read
        elif not name.endswith("position_ids"):  # a buffer that older versions of transformers saved
            named[replace_start(name, OTHERS)] = read
    return named


def layer_reads(start: str, inner: str, name: str, reads: Reads) -> Reads:
    """Return what reads a tensor of a layer; nothing for key and value, which are read with the query."""
    if ".k_proj." in name or ".v_proj." in name:
        return {}
    if ".q_proj." in name:
        parts = [reads[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
        return {f"{start}attn.in_proj_{inner.rpartition('.')[2]}": partial(joined, parts)}
    return {f"{start}{replace_start(inner, IN_A_LAYER)}": reads[name]}


def replace_start(name: str, table: Mapping[str, str]) -> str:
    start = next((start for start in table if name.startswith(f"{start}.")), "")
    return table[start] + name.removeprefix(start) if start else name


def transposed(read: Callable[[], Tensor]) -> Tensor:
    return read().T.contiguous()


def joined(reads: Sequence[Callable[[], Tensor]]) -> Tensor:
    return torch.cat([read() for read in reads])
