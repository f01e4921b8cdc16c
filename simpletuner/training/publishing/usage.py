"""The code of a model card: diffusers opens the run's export, and samples the card's first image or clip."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from simpletuner.models.catalog.registry import revision_of
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.folder.diffusers_io import TEXT_PARTS
from simpletuner.models.folder.weights import MODULAR_INDEX, index_file, is_null
from simpletuner.models.opening.assistant_lora import assistant_files
from simpletuner.models.opening.lora_file import LORA_WEIGHTS, OF_PEFT
from simpletuner.runs.facts import hub_id
from simpletuner.runs.images import ImageInfo
from simpletuner.settings import Settings
from simpletuner.settings.values.shape import Shape
from simpletuner.training.publishing.hub import repository_of


def usage_code(family: ModelFamily, export: Path, sample: ImageInfo | None) -> str:
    """Return Python that samples an image or a clip with an exported folder.

    Where the run is uploaded it names the repository, and no path of this machine.
    """
    is_modular = index_file(family.folder).name == MODULAR_INDEX
    opener = "ModularPipeline" if is_modular else "DiffusionPipeline"
    source = loading(family, export)
    # diffusers loads no pipeline that was saved without one of these unless that is said again.
    absent = [f"{name}=None" for name, value in family.index.items() if is_null(value) and name.startswith(TEXT_PARTS)]
    plain = [f"pipeline = {opener}.from_pretrained({', '.join([*source, *absent])})"]
    lines = opening_blocks(family, source) if is_modular else plain
    if family.adapter is not None:
        lines += [*merging_assistants(family), loading_adapter(family, export)]
    call = ['prompt="a prompt"'] if sample is None else sampling_arguments(family, sample)
    if is_modular:
        lines += guiding(family, call)
    head = ["import torch", f"from diffusers import {opener}"]
    is_clip = sample is not None and sample.frames > 1
    if is_clip:
        head.append("from diffusers.utils import encode_video")
    if any("PeftModel" in line for line in lines):
        head.append("from peft import PeftModel")
    if any("snapshot_download" in line for line in lines):
        head.append("from huggingface_hub import snapshot_download")
    lines.append('pipeline.to("cuda" if torch.cuda.is_available() else "cpu")')
    called = ["pipeline(", *(f"    {argument}," for argument in call), ")"]
    if sample is not None and is_clip:
        called[-1] += ".frames[0]"
        saved = f'encode_video(frames, fps={sample.fps:g}, output_path="clip.mp4")'
        if family.stream_weights:  # the sound of the clip, whose rate the vocoder has
            called = ["made = pipeline(", *called[1:-1], ")"]
            rate = "audio_sample_rate=pipeline.vocoder.config.output_sampling_rate"
            sound = f'audio=made.audio[0].float().cpu(), {rate}, output_path="clip.mp4"'
            saved = f"encode_video(made.frames[0], fps={sample.fps:g}, {sound})"
    else:
        called[-1] += ".frames[0][0]" if any(each.startswith("num_frames") for each in call) else ".images[0]"
        saved = 'image.save("image.png")'
    if not called[0].startswith("made"):
        called[0] = f"{'frames' if is_clip else 'image'} = {called[0]}"
    lines += [*called, saved]
    return "\n".join([*head, "", *lines])


def opening_blocks(family: ModelFamily, source: list[str]) -> list[str]:
    """Code that opens a modular pipeline and loads its components, without blocks that rewrite prompts."""
    folder, *loaded = source
    lines = [f"blocks = ModularPipeline.from_pretrained({folder}).blocks"]
    lines += [f"blocks.sub_blocks.pop({quoted(name)})" for name in family.pipeline_class.left_out]
    return [*lines, f"pipeline = blocks.init_pipeline({folder})", f"pipeline.load_components({', '.join(loaded)})"]


def guiding(family: ModelFamily, call: list[str]) -> list[str]:
    """Code that sets the guider's scale, and take that of a pipeline's call out of its arguments."""
    known = inspect.signature(family.pipeline_class.__call__).parameters
    scale = next((each for each in call if each.startswith("guidance_scale=")), "")
    if not scale or ("guidance_scale" in known and "true_cfg_scale" not in known):
        return []
    call.remove(scale)
    return [f"pipeline.guider.{scale.replace('=', ' = ')}"] if "true_cfg_scale" in known else []


def loading(family: ModelFamily, export: Path) -> list[str]:
    """Return the arguments of `from_pretrained`."""
    settings = family.settings
    dtype = f"dtype=torch.{'float32' if settings.training.mixed_precision == 'no' else 'bfloat16'}"
    if family.adapter is None:
        return [full_source(settings, export), dtype]
    model = settings.model
    arguments = {"revision": revision_of(model) if hub_id(model) else None, "variant": model.variant}
    return [base_source(family), dtype, *as_python({name: value for name, value in arguments.items() if value})]


def base_source(family: ModelFamily) -> str:
    # Where others read it, no more than the folder's name.
    folder = family.folder.name if family.settings.hub.push_to_hub else str(family.folder)
    return quoted(hub_id(family.settings.model) or folder)


def full_source(settings: Settings, export: Path) -> str:
    if not settings.hub.push_to_hub:
        return quoted(str(export))
    if not export.name.endswith("-ema"):
        return quoted(shown_repository(settings))
    # `from_pretrained` of a whole pipeline has no argument `subfolder`.
    return f'snapshot_download({quoted(shown_repository(settings))}, allow_patterns="ema/*") + "/ema"'


def merging_assistants(family: ModelFamily) -> list[str]:
    """Return the lines that merge the assistants into the base, as in training and validation."""
    own, lines = family.settings.lora, []
    for path in assistant_files(family.settings):
        shown = path.name if family.settings.hub.push_to_hub else str(path)
        lines += [
            f"pipeline.load_lora_weights({quoted(shown)})",
            f"pipeline.fuse_lora(lora_scale={own.assistant_lora_strength:g})",
            "pipeline.unload_lora_weights()",
        ]
    return lines


def loading_adapter(family: ModelFamily, export: Path) -> str:
    """Line that loads an adapter: diffusers' pipelines do LoRA and DoRA, denoisers LoKr, peft the rest."""
    source, name = ", ".join(lora_source(family.settings, export)), family.denoiser_name
    kind = family.settings.lora.lora_type
    if kind in OF_PEFT:
        return f"pipeline.{name} = PeftModel.from_pretrained(pipeline.{name}, {source}).merge_and_unload()"
    if kind == "lokr":
        options = f"weight_name={quoted(LORA_WEIGHTS)}, prefix={quoted(family.lora_prefix)}"
        return f"pipeline.{name}.load_lora_adapter({source}, {options})"
    return f"pipeline.load_lora_weights({', '.join([source, *as_python(dict(family.lora_options))])})"


def lora_source(settings: Settings, export: Path) -> list[str]:
    if not settings.hub.push_to_hub:
        return [quoted(str(export))]
    return [quoted(shown_repository(settings)), *(['subfolder="ema"'] if export.name.endswith("-ema") else [])]


def shown_repository(settings: Settings) -> str:
    """Return OWNER/NAME. A name alone is uploaded to the account of the token, which only the hub knows."""
    name = repository_of(settings)
    return name if "/" in name else f"OWNER/{name}"


def sampling_arguments(family: ModelFamily, sample: ImageInfo) -> list[str]:
    shape = Shape(sample.frames, sample.height, sample.width)
    params = SamplingParams(shape, sample.num_inference_steps, sample.guidance, sample.seed, sample.fps)
    numbers = {
        name: value
        for name, value in family.pipeline_kwargs({}, {}, params).items()
        if isinstance(value, bool | int | float)
    }
    texts = {"prompt": sample.prompt}
    # Qwen-Image's pipeline guides only where it is given a negative prompt.
    if sample.negative_prompt or numbers.get("true_cfg_scale", 0) > 1:
        texts["negative_prompt"] = sample.negative_prompt
    video = {"output_type": "pil"} if "num_frames" in numbers else {}
    # A generator on the CPU gives the same noise on every device.
    return [*as_python(texts | numbers | video), f"generator=torch.Generator().manual_seed({sample.seed})"]


def as_python(arguments: dict[str, Any]) -> list[str]:
    return [f"{name}={quoted(value) if isinstance(value, str) else value}" for name, value in arguments.items()]


def quoted(text: str) -> str:
    # ruff quotes as JSON does.
    return json.dumps(text, ensure_ascii=False)
