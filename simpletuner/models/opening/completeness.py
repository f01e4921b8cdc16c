"""Check a base model's folder before anything is encoded: what it lacks, libraries would replace at random.

transformers and diffusers initialize weights that a file does not hold, and a tokenizer without its vocabulary maps
every caption to the same ids. Models are loaded onto the meta device, so their own code decides which names are missing
(renamed, tied and ignored weights included) while only the headers of the weights are read: 20 ms for a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.diffusers_io import ENCODING_PARTS, component_class, require_packages
from simpletuner.models.folder.malformed import CHECK_COPY, opening, read_config
from simpletuner.models.folder.weights import any_weights_files, variant_of, weights_files

MAX_NAMES_SHOWN = 3

DIFFERENT_CAPTIONS = ("a red circle", "two blue stars on a hill")
"""Captions that every tokenizer with a vocabulary encodes differently."""


def check_complete(family: ModelFamily) -> None:
    """Raise an EnvironmentNotReady that names the component and what is missing or damaged in it."""
    with opening(family.folder / "scheduler"):
        family.objective()
    check_denoiser_weights(family)
    for name in filter(None, ("vae", family.other_denoiser)):
        with opening(family.folder / name):
            check_model(family.folder / name, component_class(family.index, name, family.folder), None)
    for name in text_parts(family):
        with opening(family.folder / name):
            check_text_part(family, name)


def check_denoiser_weights(family: ModelFamily) -> None:
    """Compare the names and shapes in the headers of the denoiser's weights with those of its config."""
    folder = family.folder / family.denoiser_name
    with opening(folder):
        found: dict[str, tuple[int, ...]] = {}
        for path in weights_files(folder, family.settings.model.variant):
            with opening(path), safe_open(path, framework="pt") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        wanted = {name: tuple(tensor.shape) for name, tensor in family.meta_denoiser.state_dict().items()}
        refuse_missing(folder, wanted.keys() - found.keys(), found.keys() - wanted.keys())
        for name, shape in wanted.items():
            if found[name] != shape:
                raise EnvironmentNotReady(
                    f"{folder}: {name} is {shape} by the config and {found[name]} in the weights", CHECK_COPY
                )


def text_parts(family: ModelFamily) -> list[str]:
    """Names of the tokenizers and text encoders of the pipeline.

    Raises EnvironmentNotReady where one half of a pair is missing, or all are.
    """
    # Not Krea 2's text_encoder_select_layers, which are numbers.
    named = [name for name, value in family.index.items() if name.startswith(ENCODING_PARTS) and not has_numbers(value)]
    present = [name for name in named if family.index[name] != [None, None]]
    encoders = [name for name in present if name.startswith("text_encoder")]
    for encoder in encoders:
        if (other := encoder.replace("text_encoder", "tokenizer")) not in present and "processor" not in present:
            raise EnvironmentNotReady(f"{family.folder} has a {encoder} and no {other}", CHECK_COPY)
    if not encoders:
        raise EnvironmentNotReady(f"{family.folder} has no text_encoder", CHECK_COPY)
    return present


def has_numbers(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, int) for each in value)


def check_text_part(family: ModelFamily, name: str) -> None:
    cls, folder = component_class(family.index, name, family.folder), family.folder / name
    require_packages([family.index[name]])
    if name.startswith("image_processor"):
        cls.from_pretrained(folder)
    elif not name.startswith(("text_", "connectors", "image_encoder")):
        check_tokenizer(folder, cls)
    else:
        # A variant is often published of some components only.
        wanted = family.settings.model.variant
        present = {variant_of(path) for path in any_weights_files(folder)}
        check_model(folder, cls, wanted if wanted in present else None)


def check_model(folder: Path, cls: Any, variant: str | None) -> None:
    """Load a model onto the meta device; raise EnvironmentNotReady for weights that its class would initialize."""
    from diffusers import ModelMixin
    from transformers import PreTrainedModel

    models: Any = (ModelMixin, PreTrainedModel)
    if not (isinstance(cls, type) and issubclass(cls, models)):
        raise EnvironmentNotReady(f"{folder}: {cls.__name__} is no model", "check model_index.json")
    config = read_config(folder / "config.json")
    variant = variant or variant_of(any_weights_files(folder)[0])
    loading: Mapping[str, Any]
    _, loading = cls.from_pretrained(
        folder, use_safetensors=True, variant=variant, device_map="meta", output_loading_info=True
    )
    refuse_missing(folder, loading["missing_keys"], loading["unexpected_keys"])
    if wrong := [*loading["mismatched_keys"], *loading["error_msgs"]]:
        raise EnvironmentNotReady(f"{folder}: its weights do not fit its config: {min(map(str, wrong))}", CHECK_COPY)
    unknown = config.keys() - inspect.signature(cls).parameters.keys() if issubclass(cls, ModelMixin) else set()
    strange = sorted(name for name in unknown if not name.startswith("_"))
    # Either alone is harmless, and published. Together: a misspelt `down_block_types` builds the default's one block.
    if strange and (extra := sorted(loading["unexpected_keys"])):
        raise EnvironmentNotReady(
            f"{folder}: its weights do not fit its config: {cls.__name__} does not know {strange[0]}, and has no place "
            f"for {extra[0]}",
            CHECK_COPY,
        )


def refuse_missing(folder: Path, missing: Iterable[str], unknown: Iterable[str]) -> None:
    """Raise an EnvironmentNotReady that names the first missing tensors, and an unknown one, if there is any."""
    # Unknown weights alone are accepted: published files often hold more than their class reads.
    if names := sorted(missing):
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        strange = next((f"; what it holds as {name} is not known" for name in sorted(unknown)), "")
        raise EnvironmentNotReady(
            f"{folder} lacks {', '.join(names[:MAX_NAMES_SHOWN])}{more}{strange}: nothing is made up for it", CHECK_COPY
        )


def check_tokenizer(folder: Path, cls: Any) -> None:
    """Raise EnvironmentNotReady for a tokenizer without a vocabulary, or that encodes two captions alike."""
    from transformers import ProcessorMixin

    loaded = cls.from_pretrained(folder)
    tokenizer = loaded.tokenizer if isinstance(loaded, ProcessorMixin) else loaded
    words = tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens) - set(tokenizer.get_added_vocab())
    one, other = (tokenizer(caption)["input_ids"] for caption in DIFFERENT_CAPTIONS)
    if not words or one == other:
        raise EnvironmentNotReady(
            f"{folder} has no vocabulary: {type(tokenizer).__name__} knows {len(words)} words, and every caption would "
            "mean the same",
            CHECK_COPY,
        )
