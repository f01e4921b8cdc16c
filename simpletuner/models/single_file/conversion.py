"""Models in one file of the original layout: read by diffusers and kept as a pipeline folder, or written.

The original layout of Stable Diffusion is what other tools read and write; diffusers reads it
(`from_single_file`), but does not write it. OpenCLIP's names are used for CLIP text encoders: SDXL's second
one, and Stable Diffusion 2's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.folder.diffusers_io import choose_accelerator, component_class, diffusers_class
from simpletuner.models.folder.malformed import read_config, reason
from simpletuner.models.folder.safetensors_dtypes import DTYPES
from simpletuner.models.folder.weights import COMPONENT_SUFFIXES, any_weights_files, read_index
from simpletuner.models.single_file.source import MARKER, read_header, source_of

VAE_STARTS = ("first_stage_model.", "vae.")
TEXT_STARTS = ("cond_stage_model.", "conditioner.", "text_encoders.")
"""Prefixes of text encoder and VAE tensors in such a file."""
SAME_ARCHITECTURE = "set single_file_config to a folder of the same architecture"


def convert(path: Path, config: Path, folder: Path, denoiser: str) -> None:
    """Read a file by diffusers and save it as a pipeline. Downloads nothing; weights keep the file's dtype.

    `denoiser` is the name of that component. Raises EnvironmentNotReady for a component that neither the file
    nor the folder of configs has.
    """
    choose_accelerator()
    names, dtype = read_header(path)
    if any(name.startswith((*VAE_STARTS, *TEXT_STARTS)) for name in names):
        convert_pipeline(path, config, folder, names, DTYPES[dtype])
    else:
        convert_denoiser(path, config, folder, denoiser, DTYPES[dtype])
    (folder / MARKER).write_text(json.dumps(source_of(path, config), indent=2), encoding="utf-8")


def convert_pipeline(path: Path, config: Path, folder: Path, names: Sequence[str], dtype: torch.dtype) -> None:
    """Convert a file with text encoders or a VAE; what it lacks of these is read from the folder."""
    from diffusers.loaders.single_file_utils import SingleFileComponentError

    index = read_index(config)
    given: dict[str, object] = {}
    if not any(name.startswith(VAE_STARTS) for name in names) and any((config / "vae").glob("*.safetensors")):
        given["vae"] = component_class(index, "vae", config).from_pretrained(config / "vae", torch_dtype=dtype)
    cls = single_file_class(diffusers_class(str(index.get("_class_name"))))
    try:
        with explaining_missing_weights(path, config):
            pipeline = cls.from_single_file(
                str(path), config=str(config), local_files_only=True, torch_dtype=dtype, **given
            )
    except SingleFileComponentError as error:
        raise EnvironmentNotReady(
            f"{path} and {config} together are no whole {cls.__name__}: {reason(error)}",
            "set single_file_config to a folder that holds the weights of the components which the file does not have",
        ) from None
    for name, component in pipeline.components.items():
        refuse_missing_weights(component, name, path, config)
    pipeline.save_pretrained(folder, safe_serialization=True)


def convert_denoiser(path: Path, config: Path, folder: Path, name: str, dtype: torch.dtype) -> None:
    """Convert a file with the denoiser alone; other components are linked or copied from the folder."""
    components = [part for part in config.iterdir() if part.is_dir() and part.name != name]
    missing = [part.name for part in components if (part / "config.json").exists() and not has_weights(part)]
    if missing:
        raise EnvironmentNotReady(
            f"{path} holds a {name} alone, and {config} has no weights of {', '.join(sorted(missing))}",
            "set single_file_config to a folder that holds the weights of all other components",
        )
    cls = single_file_class(component_class(read_index(config), name, config))
    with explaining_missing_weights(path, config):
        denoiser = cls.from_single_file(
            str(path), config=str(config), subfolder=name, local_files_only=True, torch_dtype=dtype
        )
    refuse_missing_weights(denoiser, name, path, config)
    denoiser.save_pretrained(folder / name, safe_serialization=True)
    shutil.copyfile(config / "model_index.json", folder / "model_index.json")
    for part in components:
        (folder / part.name).mkdir()
        for file in part.iterdir():
            if file.suffix in COMPONENT_SUFFIXES:
                link_or_copy(file, folder / part.name / file.name)


def single_file_class(cls: Any) -> Any:
    """Raises EnvironmentNotReady for a class that diffusers cannot read from one file."""
    if not hasattr(cls, "from_single_file"):
        raise EnvironmentNotReady(
            f"diffusers cannot read a {cls.__name__} from one file", "give a folder in diffusers format"
        )
    return cls


def has_weights(component: Path) -> bool:
    return any(component.glob("*.safetensors"))


@contextmanager
def explaining_missing_weights(path: Path, config: Path) -> Iterator[None]:
    """Raise EnvironmentNotReady where diffusers looks for a name that the file does not have."""
    try:
        yield
    except (LookupError, NotImplementedError):  # the latter: torch cannot copy what is still on the meta device
        raise EnvironmentNotReady(
            f"{path} lacks weights that {config} asks for: it is not whole, or of another architecture",
            SAME_ARCHITECTURE,
        ) from None


def refuse_missing_weights(component: object, name: str, path: Path, config: Path) -> None:
    """Raise EnvironmentNotReady for a weight that was not read and is still on the meta device."""
    tensors = component.state_dict() if isinstance(component, torch.nn.Module) else {}
    if missing := next((weight for weight, tensor in tensors.items() if tensor.is_meta), None):
        raise EnvironmentNotReady(
            f"{path} lacks {missing} of {name}: it is of another architecture than {config}", SAME_ARCHITECTURE
        )


def link_or_copy(source: Path, target: Path) -> None:
    # There may be no second name, such as on another file system.
    try:
        os.link(source.resolve(), target)  # what links to the hub's cache may be removed from there
    except OSError:
        shutil.copyfile(source, target)


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
    """Readers of tensors by OpenCLIP's names; query, key and value are one tensor there."""
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
    """Reader of a layer's tensor; none for key and value, which are read with the query."""
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
    """Readers of a Stable Diffusion pipeline's tensors, by their original names."""
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
    # A bias and the weight of a norm stay as they are.
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
    """Rename in a residual block: `middle_block.0.norm1.weight` -> `middle_block.0.in_layers.0.weight`."""
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
