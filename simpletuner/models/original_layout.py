"""The original layout of Stable Diffusion XL as one file: names of its tensors for those of a diffusers pipeline.

Other tools for Stable Diffusion read and write it; diffusers reads it (`from_single_file`), but does not write it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from simpletuner.models.malformed import read_config
from simpletuner.models.weights import any_weights_files

Reads = dict[str, Callable[[], Tensor]]
"""What reads each tensor, by name: a whole model in memory is not needed to write it."""

RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
"""Inside a residual block of the U-Net."""
UNET = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "mid_block.attentions.0": "middle_block.1",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
OPEN_CLIP = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
    "embeddings.token_embedding": "token_embedding",
    "embeddings.position_embedding": "positional_embedding",
    "final_layer_norm": "ln_final",
}
"""Of the second text encoder and inside its layers."""


def original_reads(pipeline: Path) -> Reads:
    """Return what reads the tensors of a Stable Diffusion XL pipeline, by their original names."""
    config, vae_config = (read_config(pipeline / name / "config.json") for name in ("unet", "vae"))
    vae = {vae_name(name, len(vae_config["up_block_types"])): read for name, read in reads_of(pipeline / "vae").items()}
    first = {name.removeprefix("text_model."): read for name, read in reads_of(pipeline / "text_encoder").items()}
    second = {name.removeprefix("text_model."): read for name, read in reads_of(pipeline / "text_encoder_2").items()}
    components: dict[str, Reads] = {
        "model.diffusion_model.": {unet_name(name, config): read for name, read in reads_of(pipeline / "unet").items()},
        "first_stage_model.": {
            name: partial(as_convolution, read) if ".attn_1." in name else read for name, read in vae.items()
        },
        "conditioner.embedders.0.transformer.text_model.": first,
        "conditioner.embedders.1.model.": open_clip_reads(second),
    }
    return {f"{start}{name}": read for start, reads in components.items() for name, read in reads.items()}


def reads_of(folder: Path) -> Reads:
    """Return what reads the tensors of a component, by the names in its files."""
    files = [safe_open(path, framework="pt") for path in any_weights_files(folder)]
    return {name: partial(file.get_tensor, name) for file in files for name in file.keys()}  # noqa: SIM118


def as_convolution(read: Callable[[], Tensor]) -> Tensor:
    """Return the weight of a linear layer as that of a 1x1 convolution; a bias and the weight of a norm as they are."""
    tensor = read()
    return tensor[:, :, None, None] if tensor.ndim == 2 else tensor


def unet_name(name: str, config: Mapping[str, Any]) -> str:
    """Return the original name of a U-Net's tensor: blocks are numbered through all levels."""
    depth = config["layers_per_block"] + 1
    found = re.fullmatch(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)", name)
    if found is None:
        name = re.sub(r"^mid_block\.resnets\.([01])", lambda part: f"middle_block.{2 * int(part[1])}", name)
        name = replace_start(name, UNET)
        return replace_in_resnet(name) if name.startswith(("middle_block.0", "middle_block.2")) else name
    side, level, kind, number, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
    if kind == "downsamplers":
        return f"input_blocks.{(level + 1) * depth}.0.{rest.replace('conv', 'op')}"
    if kind == "upsamplers":
        has_attention = config["up_block_types"][level] != "UpBlock2D"
        return f"output_blocks.{(level + 1) * depth - 1}.{2 if has_attention else 1}.{rest}"
    block = (
        f"input_blocks.{1 + level * depth + number}" if side == "down" else f"output_blocks.{level * depth + number}"
    )
    return f"{block}.1.{rest}" if kind == "attentions" else replace_in_resnet(f"{block}.0.{rest}")


def replace_in_resnet(name: str) -> str:
    """Replace the part of a residual block: `middle_block.0.norm1.weight` -> `middle_block.0.in_layers.0.weight`."""
    return re.sub("|".join(RESNET), lambda part: RESNET[part[0]], name, count=1)


def replace_start(name: str, table: Mapping[str, str]) -> str:
    start = next((start for start in table if name.startswith(f"{start}.")), "")
    return table[start] + name.removeprefix(start) if start else name


def vae_name(name: str, ups: int) -> str:
    """Return the original name of a VAE's tensor, whose decoder counts its levels from the image."""
    name = re.sub(r"down_blocks\.(\d+)\.resnets\.(\d+)", r"down.\1.block.\2", name)
    name = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", name)
    name = re.sub(r"up_blocks\.(\d+)\.resnets", lambda part: f"up.{ups - 1 - int(part[1])}.block", name)
    name = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0", lambda part: f"up.{ups - 1 - int(part[1])}.upsample", name)
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda part: f"mid.block_{int(part[1]) + 1}", name)
    if "mid_block.attentions.0." in name:
        start, _, rest = name.partition("mid_block.attentions.0.")
        name = f"{start}mid.attn_1.{replace_start(rest, VAE_ATTENTION)}"
    return name.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")


def open_clip_reads(reads: Reads) -> Reads:
    """Return the tensors of the second text encoder: query, key and value as one, and the projection transposed."""
    named: Reads = {}
    for name, read in reads.items():
        layer = re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)", name)
        if layer is None:
            named[replace_start(name, OPEN_CLIP)] = partial(transposed, read) if "projection" in name else read
        elif ".q_proj." in name:
            parts = [reads[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            named[f"transformer.resblocks.{layer[1]}.attn.in_proj_{name.rpartition('.')[2]}"] = partial(joined, parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            named[f"transformer.resblocks.{layer[1]}.{replace_start(layer[2], OPEN_CLIP)}"] = read
    for name in ("text_projection", "positional_embedding"):  # parameters of the model itself, no layers
        named[name] = named.pop(f"{name}.weight")
    return named


def transposed(read: Callable[[], Tensor]) -> Tensor:
    return read().T.contiguous()


def joined(reads: Sequence[Callable[[], Tensor]]) -> Tensor:
    return torch.cat([read() for read in reads])
