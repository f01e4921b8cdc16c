"""The original single-file layout of Stable Diffusion: its names for the tensors of a diffusers pipeline.

Other tools for Stable Diffusion read and write it; diffusers reads it (`from_single_file`), but does not write it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from simpletuner.models.folder.malformed import read_config
from simpletuner.models.folder.weights import any_weights_files
from simpletuner.models.single_file.open_clip_layout import Reads, open_clip_reads, replace_start

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
VAE_ATTENTION = {
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
    # as diffusers called them when it published Stable Diffusion 1 and 2
    "query": "q",
    "key": "k",
    "value": "v",
    "proj_attn": "proj_out",
}
# By family and component: with what original names begin, and what changes the rest of them; CLIP's stay.
TEXT_ENCODERS: dict[str, dict[str, tuple[str, Callable[[Reads], Reads]]]] = {
    "sd1x": {"text_encoder": ("cond_stage_model.transformer.text_model.", dict)},
    "sd2x": {"text_encoder": ("cond_stage_model.model.", open_clip_reads)},
    "sdxl": {
        "text_encoder": ("conditioner.embedders.0.transformer.text_model.", dict),
        "text_encoder_2": ("conditioner.embedders.1.model.", open_clip_reads),
    },
}


def original_reads(pipeline: Path, family: str) -> Reads:
    """Return what reads the tensors of a Stable Diffusion pipeline, by their original names."""
    config, vae_config = (read_config(pipeline / name / "config.json") for name in ("unet", "vae"))
    ups = len(vae_config["up_block_types"])
    reads = {f"model.diffusion_model.{unet_name(name, config)}": read for name, read in reads_of(pipeline / "unet")}
    for name, read in reads_of(pipeline / "vae"):
        named = vae_name(name, ups)
        # The original's attention has 1x1 convolutions where diffusers has linear layers.
        reads[f"first_stage_model.{named}"] = partial(as_convolution, read) if ".attn_1." in named else read
    for component, (start, renamed) in TEXT_ENCODERS[family].items():
        text = {name.removeprefix("text_model."): read for name, read in reads_of(pipeline / component)}
        reads |= {f"{start}{name}": read for name, read in renamed(text).items()}
    return reads


def reads_of(folder: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the names of a component's tensors, and what reads each."""
    for path in any_weights_files(folder):
        # Open as long as a `get_tensor` is referred to: tensors are read when they are written, one by one.
        file = safe_open(path, framework="pt")
        yield from ((name, partial(file.get_tensor, name)) for name in file.keys())  # noqa: SIM118


def as_convolution(read: Callable[[], Tensor]) -> Tensor:
    """Return the weight of a linear layer as that of a 1x1 convolution; a bias and the weight of a norm as they are."""
    tensor = read()
    return tensor[:, :, None, None] if tensor.ndim == 2 else tensor


def unet_name(name: str, config: Mapping[str, Any]) -> str:
    """Return the original name of a U-Net's tensor: blocks are numbered through all levels."""
    # Down, a level has its blocks and a downsampler; up, one block more, whose number the upsampler shares.
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
