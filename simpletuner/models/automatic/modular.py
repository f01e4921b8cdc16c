"""Modular pipelines of diffusers with the interface of a DiffusionPipeline, so that the same hooks fit.

Blocks that need a tokenizer or a text encoder, and all before them, are `encode_prompt`; `__call__` runs the
others. Blocks that are given an image are another list of them, for calls with one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusers.modular_pipelines.modular_pipeline import (
    LoopSequentialPipelineBlocks,
    ModularPipeline,
    PipelineState,
    SequentialPipelineBlocks,
)
from diffusers.utils.torch_utils import randn_tensor
from torch import nn

from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.automatic.components import Copies
from simpletuner.models.automatic.hooks import IMAGE
from simpletuner.models.automatic.pipeline_run import refused
from simpletuner.models.folder.diffusers_io import TEXT_PARTS, component_class
from simpletuner.models.folder.malformed import read_json
from simpletuner.models.folder.weights import MODULAR_INDEX, any_weights_files, read_index, source_of, variant_of

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

PROMPTS = ("prompt", "negative_prompt")
# Argument for the scale of a pipeline's guider: `guidance_scale` may be an input of its denoiser.
SCALE = "true_cfg_scale"

GUIDED = 2.0
"""Guidance scale with paired text encoding."""

GIVEN_IMAGES = {"image_conditioned", "image2video"}
"""Workflows of blocks to which an image is a reference or a first frame, not one to begin from."""


def modular_class(cls: Any, index: Mapping[str, object]) -> Any:
    """Subclass of a modular pipeline whose call takes its blocks' arguments for text, or text and image."""
    if not (isinstance(cls, type) and issubclass(cls, ModularPipeline)):
        raise refused(str(index.get("_class_name")), "it is no DiffusionPipeline")
    found = blocks_of(cls, index)
    kinds = [blocks_for(cls, found, image) for image in (None, True)[: 1 + takes_images(found)]]
    blocks, left_out = kinds[-1]
    defaults = {each.name: each.default for each in blocks.inputs if each.name}
    if any(spec.name == "guider" for spec in blocks.expected_components):
        defaults[SCALE] = None

    def call(pipeline: DiffusionPipeline, **inputs: object) -> tuple[Any, ...]:
        return pipeline.run_blocks(inputs)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, default=default) for name, default in defaults.items()]
    own = inspect.Parameter("pipeline", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__signature__ = inspect.Signature([own, *parameters])
    members = {"__module__": cls.__module__, "kinds": [each for each, _ in kinds], "left_out": left_out}
    return type(cls.__name__, (CalledBlocks, cls), {**members, "run_by": blocks, "__call__": call})


def blocks_of(cls: Any, index: Mapping[str, object]) -> Any:
    """Return all blocks of a pipeline. Raises SettingsError for those that are not of diffusers."""
    import diffusers

    # For blocks assembled by hand the index has the base class alone: diffusers takes the default.
    named = index.get("_blocks_class_name")
    named = cls.default_blocks_name if named in (None, SequentialPipelineBlocks.__name__) else named
    found = getattr(diffusers, str(named), None)
    if not (isinstance(found, type) and issubclass(found, SequentialPipelineBlocks)):
        raise refused(cls.__name__, f"its blocks are {named}, no class of diffusers: code of its folder is never run")
    return found()


def takes_images(blocks: Any) -> bool:
    try:
        return not GIVEN_IMAGES.isdisjoint(blocks.available_workflows)
    except NotImplementedError:  # blocks with one way to run
        return False


def blocks_for(cls: Any, found: Any, image: object) -> tuple[Any, list[str]]:
    """Return the blocks that run where a prompt is given, with an image or alone, and the names of those that
    would rewrite it.

    Raises SettingsError where none encodes text.
    """
    blocks = found.get_execution_blocks(prompt=True, image=image)
    # A language model would rewrite each caption (FLUX.3).
    left_out = [name for name, block in blocks.sub_blocks.items() if "prompt" in block.intermediate_output_names]
    for name in left_out:
        del blocks.sub_blocks[name]
    if not any(encodes_text(block) for block in blocks.sub_blocks.values()):
        raise refused(cls.__name__, "none of its blocks encodes text, whose embeddings could be cached")
    return blocks, left_out


def encodes_text(block: Any) -> bool:
    return any(spec.name.startswith(TEXT_PARTS) for spec in block.expected_components)


class SplitBlocks:
    """Blocks split after the last text encoder, and before the first decoder of the loop's result."""

    def __init__(self, blocks: Any, copies: Copies) -> None:
        self.inputs = blocks.inputs
        own = [copies.block(each) for each in blocks.sub_blocks.values()]
        numbered = list(enumerate(own))
        first = 1 + max(number for number, each in numbered if encodes_text(each))
        loop = max((number for number, each in numbered if isinstance(each, LoopSequentialPipelineBlocks)), default=0)
        decoding = (number for number, each in numbered if number > loop and "vae" in each.component_names)
        end = next(decoding, len(own))
        self.texts, self.images, self.decoders = own[:first], own[first:end], own[end:]
        self.encoded = {each.name: each.kwargs_type for block in self.texts for each in block.intermediate_outputs}

    def new_state(self, inputs: Mapping[str, Any]) -> Any:
        """Return a state with the inputs, and defaults for those that are not given."""
        state = PipelineState()
        for each in self.inputs:
            if each.name:
                value = inputs.get(each.name, each.default)
                # FLUX.3 takes no list, and all others take the one prompt of a list as well.
                alone = each.name in PROMPTS and isinstance(value, list) and len(value) == 1
                state.set(each.name, value[0] if alone else value, each.kwargs_type)
        return state


class CalledBlocks:
    kinds: list[object]
    """Blocks for a prompt alone, and for one with an image if there are some."""
    split: list[SplitBlocks]
    """Copies of them."""
    run_by: Any
    """The last of these. Blocks of the pipeline's class stay as they are."""
    left_out: list[str]
    """Names of its blocks that rewrite prompts."""

    @classmethod
    def from_pretrained(
        cls: Any, folder: Path, dtype: object, use_safetensors: bool, variant: object, **given: Any
    ) -> Any:
        """Open a folder with the components that are given, be they None, and load the others."""
        index = read_index(folder)
        pipeline = cls(blocks=cls.run_by, modular_config_dict=index)
        for name in pipeline.component_names:
            if name in given:
                setattr(pipeline, name, given[name])
            elif any(index.get(name) or ()):
                setattr(pipeline, name, load_component(index, name, folder, dtype, variant))
        copies = Copies(pipeline.draw)
        pipeline.split = [SplitBlocks(each, copies) for each in cls.kinds]
        return pipeline

    @classmethod
    def check_folder(cls, folder: Path) -> None:
        """Raise SettingsError for a folder with its own code, EnvironmentNotReady for a missing component."""
        if (folder / "modular_config.json").is_file():
            raise refused(cls.__name__, "its blocks are in its folder, whose code is never run")
        index, sources = read_index(folder), read_json(folder / MODULAR_INDEX)
        for name in [spec.name for spec in cls.run_by.expected_components if any(index.get(spec.name) or ())]:
            if not (folder / name).is_dir():
                place = source_of(sources[name]).get("pretrained_model_name_or_path")
                raise EnvironmentNotReady(
                    f"{folder} has no {name}: {MODULAR_INDEX} takes it from {place}",
                    f"put all components of the pipeline into one folder: here {name} is missing",
                )

    @classmethod
    def default_scheduler(cls) -> object:
        """Return the scheduler that the blocks make where an index names none (FLUX.3), if they do."""
        specs = [each for each in cls.run_by.expected_components if each.name == "scheduler"]
        return next((each.create() for each in specs if each.default_creation_method == "from_config"), None)

    def blocks_given(self, inputs: Mapping[str, object]) -> SplitBlocks:
        return self.split[-1 if inputs.get(IMAGE) is not None else 0]

    def encode_prompt(self, **inputs: object) -> dict[str, Any]:
        """Return all that the blocks up to the last that encodes text hand on."""
        blocks = self.blocks_given(inputs)
        state = self.run_all(blocks.texts, blocks.new_state(inputs))
        return {name: state.get(name) for name in blocks.encoded}

    def run_blocks(self, inputs: Mapping[str, object]) -> tuple[Any, ...]:
        scale = inputs.pop(SCALE, None)
        # Blocks of Wan and LTX-Video encode nothing but pairs, of which the loop is given one.
        self.guide(GUIDED if scale is None else scale)
        blocks = self.blocks_given(inputs)
        encoded, state = self.encode_prompt(**inputs), blocks.new_state(inputs)
        self.guide(scale or 1.0)
        for name, value in encoded.items():
            state.set(name, value, blocks.encoded[name])
        decoders = [] if inputs.get("output_type") == "latent" else blocks.decoders
        self.run_all([*blocks.images, *decoders], state)
        return (state.get(decoders[-1].intermediate_output_names[0] if decoders else "latents"),)

    def run_all(self, blocks: Sequence[object], state: object) -> Any:
        for block in blocks:
            _, state = block(self, state)
        return state

    def guide(self, scale: float) -> None:
        """Set the guidance scale; 1 or less is off."""
        guider = getattr(self, "guider", None)
        if guider is not None:
            # By both, since SDXL's blocks turn the guider on.
            (guider.enable if scale > 1 else guider.disable)()
            guider.guidance_scale = max(scale, 1.0) - getattr(guider, "use_original_formulation", False)

    def set_progress_bar_config(self, **config: object) -> None:
        for blocks in self.split:
            for each in (*blocks.texts, *blocks.images, *blocks.decoders):
                if isinstance(each, LoopSequentialPipelineBlocks):
                    each.set_progress_bar_config(**config)

    def draw(self, *args: object, **kwargs: object) -> object:
        return randn_tensor(*args, **kwargs)


def load_component(index: Mapping[str, object], name: str, folder: Path, dtype: object, variant: Any) -> Any:
    cls = component_class(index, name, folder)
    if not issubclass(cls, nn.Module):
        return cls.from_pretrained(folder / name)
    # A variant is often published of some components only.
    own = variant if variant in map(variant_of, any_weights_files(folder / name)) else None
    return cls.from_pretrained(folder / name, torch_dtype=dtype, use_safetensors=True, variant=own)
