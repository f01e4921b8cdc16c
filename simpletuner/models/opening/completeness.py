"""Check a base model's folder before anything is encoded: libraries would replace missing parts at random.

transformers and diffusers initialize weights that a file does not hold, and a tokenizer without its
vocabulary maps every caption to the same ids. Models are loaded onto the meta device, so their own code
decides which names are missing (including renamed, tied and ignored weights), and only headers are read: 20
ms for a model.

A complete base model is noted in the user's home, so that later starts skip the check: it mostly imports the
classes of text encoders, which a start with warm caches does not need.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from simpletuner.errors import EnvironmentNotReady
from simpletuner.launch.node_info import versions
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.diffusers_io import ENCODING_PARTS, component_class, require_packages
from simpletuner.models.folder.malformed import CHECK_COPY, read_config, translate_load_errors
from simpletuner.models.folder.weights import any_weights_files, is_null, variant_of, weights_files
from simpletuner.system.files.atomic import write_json
from simpletuner.system.files.cache_files import user_home
from simpletuner.system.files.checksums import stream_checksum
from simpletuner.system.files.regular_files import open_regular, read_file
from simpletuner.system.numbers import count_noun

MAX_NAMES_SHOWN = 3

# Parts of names that tell how a pipeline was saved, where a copy of it would lack the same.
SAVED_OTHERWISE = {
    ".base_layer.": "it was saved with a LoRA loaded: save it again after fuse_lora() and unload_lora_weights()",
    "_weight_qdata": "it was saved quantized by torchao: take the one that is not",
}

DIFFERENT_CAPTIONS = ("a red circle", "two blue stars on a hill")
"""Captions that every tokenizer with a vocabulary encodes differently."""


def check_complete(family: ModelFamily) -> None:
    """Raise an EnvironmentNotReady that names the component and what is missing or damaged in it."""
    with translate_load_errors(family.folder / "scheduler"):
        family.objective()
    check_denoiser_weights(family)
    for name in filter(None, ("vae", family.other_denoiser)):
        with translate_load_errors(family.folder / name):
            check_model(family.folder / name, component_class(family.index, name, family.folder), None)
    for name in text_parts(family):
        with translate_load_errors(family.folder / name):
            check_text_part(family, name)


def check_denoiser_weights(family: ModelFamily) -> None:
    """Compare names and shapes in the denoiser's weight files with its config."""
    folder = family.folder / family.denoiser_name
    with translate_load_errors(folder):
        found = shapes_in(family)
        wanted = {name: tuple(tensor.shape) for name, tensor in family.meta_denoiser.state_dict().items()}
        refuse_missing(folder, wanted.keys() - found.keys(), found.keys() - wanted.keys())
        refuse_left_out(folder, family.meta_denoiser, found.keys() - wanted.keys())
        for name, shape in wanted.items():
            if found[name] != shape:
                raise EnvironmentNotReady(
                    f"{folder}: {name} is {shape} by the config and {found[name]} in the weights", CHECK_COPY
                )


def shapes_in(family: ModelFamily) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the denoiser's weights by name, from the headers of their files."""
    found: dict[str, tuple[int, ...]] = {}
    for path in weights_files(family.folder / family.denoiser_name, family.settings.model.variant):
        with translate_load_errors(path), safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


def warn_of_unread(family: ModelFamily) -> str:
    """Return a warning of the denoiser's weights that its class has no place for; empty if there are none.

    They are let pass, since published files often hold more than a class reads. But `guidance_embeds` that
    was turned off in FLUX.1-dev's config.json leaves its embedding of guidance out.
    """
    names = sorted(shapes_in(family).keys() - family.meta_denoiser.state_dict().keys())
    if not names:
        return ""
    shown, more = ", ".join(names[:MAX_NAMES_SHOWN]), len(names) - MAX_NAMES_SHOWN
    return (
        f"{family.folder / family.denoiser_name} holds what its config has no place for, which is neither trained nor "
        f"exported: {shown}{f' and {more} more' if more > 0 else ''}"
    )


FLOAT8 = "F8_"


def warn_of_eight_bits(family: ModelFamily) -> str:
    """Warning of weights that are stored in float8, from which training starts as they are; empty if none."""
    kinds: Counter[str] = Counter()
    for path in weights_files(family.folder / family.denoiser_name, family.settings.model.variant):
        with translate_load_errors(path), safe_open(path, framework="pt") as file:
            kinds.update(file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118
    if not (small := {kind: count for kind, count in kinds.items() if kind.startswith(FLOAT8)}):
        return ""
    count, kind = sum(small.values()), max(small, key=lambda each: small[each])
    return (
        f"{family.folder / family.denoiser_name} holds {count_noun(count, 'weight')} in 8 bits ({kind}): training "
        "starts from values that are rounded to 2 or 3 bits; take the model of 16 bits where there is one"
    )


def text_parts(family: ModelFamily) -> list[str]:
    """Names of the tokenizers and text encoders of the pipeline.

    Raises EnvironmentNotReady where one half of a pair is missing, or an encoder without which the pipeline
    samples no image.
    """
    # Not Krea 2's text_encoder_select_layers, which are numbers.
    named = [name for name, value in family.index.items() if name.startswith(ENCODING_PARTS) and not has_numbers(value)]
    present = [name for name in named if not is_null(family.index[name])]
    encoders = [name for name in present if name.startswith("text_encoder")]
    for encoder in encoders:
        if (other := encoder.replace("text_encoder", "tokenizer")) not in present and "processor" not in present:
            raise EnvironmentNotReady(f"{family.folder} has a {encoder} and no {other}", CHECK_COPY)
    if not encoders:
        raise EnvironmentNotReady(f"{family.folder} has no text_encoder", CHECK_COPY)
    optional = tuple(each.replace("text_encoder", kind) for each in family.optional_encoders() for kind in PAIR)
    if lacking := next((name for name in named if name not in (*present, *optional) and name.startswith(PAIR)), ""):
        needs = f"which {family.pipeline_class.__name__} needs for each caption"
        hint = f"save the pipeline again with its {lacking}"
        raise EnvironmentNotReady(f"{family.folder} was saved without its {lacking}, {needs}", hint)
    return present


PAIR = ("text_encoder", "tokenizer")


def has_numbers(value: object) -> bool:
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
    """Load a model onto meta. Raises EnvironmentNotReady for weights that its class would initialize."""
    from diffusers import ModelMixin
    from transformers import PreTrainedModel

    models: Any = (ModelMixin, PreTrainedModel)
    if not (isinstance(cls, type) and issubclass(cls, models)):
        raise EnvironmentNotReady(f"{folder}: {cls.__name__} is no model", "check model_index.json")
    config = read_config(folder / "config.json")
    variant = variant or variant_of(any_weights_files(folder)[0])
    loading: Mapping[str, Any]
    model, loading = cls.from_pretrained(
        folder, use_safetensors=True, variant=variant, device_map="meta", output_loading_info=True
    )
    refuse_missing(folder, loading["missing_keys"], loading["unexpected_keys"])
    if wrong := [*loading["mismatched_keys"], *loading["error_msgs"]]:
        raise EnvironmentNotReady(f"{folder}: its weights do not fit its config: {min(map(str, wrong))}", CHECK_COPY)
    unknown = config.keys() - inspect.signature(cls).parameters.keys() if issubclass(cls, ModelMixin) else set()
    strange = sorted(name for name in unknown if not name.startswith("_"))
    # Either alone is harmless, and published. Both: a misspelt `down_block_types` builds one default block.
    if strange and (extra := sorted(loading["unexpected_keys"])):
        raise EnvironmentNotReady(
            f"{folder}: its weights do not fit its config: {cls.__name__} does not know {strange[0]}, and has no place "
            f"for {extra[0]}",
            CHECK_COPY,
        )
    refuse_left_out(folder, model, loading["unexpected_keys"])


def refuse_missing(folder: Path, missing: Iterable[str], unknown: Iterable[str]) -> None:
    """Raise EnvironmentNotReady with the first missing tensors, and an unknown one if there is any."""
    if names := sorted(missing):
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        others = sorted(unknown)
        strange = next((f"; what it holds as {name} is not known" for name in others), "")
        hint = next(
            (hint for part, hint in SAVED_OTHERWISE.items() if any(part in name for name in others)), CHECK_COPY
        )
        raise EnvironmentNotReady(
            f"{folder} lacks {', '.join(names[:MAX_NAMES_SHOWN])}{more}{strange}: nothing is made up for it", hint
        )


def refuse_left_out(folder: Path, model: nn.Module, unknown: Iterable[str]) -> None:
    """Raise EnvironmentNotReady for blocks in the weights that the config leaves out (`num_layers`)."""
    left: dict[str, set[int]] = {}
    for name in unknown:
        parts, module = name.split("."), model
        for depth, part in enumerate(parts):
            if isinstance(module, nn.ModuleList) and part.isdigit() and int(part) >= len(module):
                left.setdefault(".".join(parts[:depth]), set()).add(int(part))
                break
            if not isinstance(module := getattr(module, part, None), nn.Module):
                break
    for blocks, numbers in sorted(left.items()):
        shown = f"{min(numbers)} to {max(numbers)}" if len(numbers) > 1 else f"{min(numbers)}"
        count = len([*model.get_submodule(blocks).children()])
        raise EnvironmentNotReady(
            f"{folder}: its config.json has {count_noun(count, 'block')} in {blocks}, and its weights hold "
            f"{blocks}.{shown}, too: a part of the model would be left out",
            f"correct the number of blocks in {folder.name}/config.json, or copy the model again",
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


NOTES = "base_models"
HEADER_LENGTH_BYTES = 8
"""Bytes of the header length at the start of a safetensors file."""
# The largest header that safetensors reads; the largest published tokenizers have 33 MB.
MOST_READ_BYTES = 100 << 20

# Version of the checks, raised with each that is added: earlier notes do not say that it was passed.
CHECKS = 2


def is_checked(family: ModelFamily) -> bool:
    """True if an earlier start found the same files complete, with the same settings and versions."""
    return read_note(note_of(family)) == checked_facts(family)


def note_checked(family: ModelFamily) -> None:
    """Note that a base model is complete, once a start has been found right in all else, too."""
    with suppress(OSError):  # no reason to end a run
        note_of(family).parent.mkdir(parents=True, exist_ok=True)
        write_json(note_of(family), checked_facts(family))


def note_of(family: ModelFamily) -> Path:
    """Return the file for a base model with these settings, in the home rather than the run's folder: its
    next run has another folder, and a bucket or another machine does not have this one's files."""
    named = json.dumps([str(family.folder.absolute()), family.settings.model.model_dump(mode="json")])
    return user_home(os.environ) / NOTES / f"{hashlib.sha256(named.encode()).hexdigest()[:16]}.json"


def checked_facts(family: ModelFamily) -> dict[str, object]:
    """Return, as JSON has it, what the verdict depends on: settings of the model, versions, and what is
    read of each file."""
    paths = (path for path in sorted(family.folder.rglob("*")) if path.is_file())
    files = {path.relative_to(family.folder).as_posix(): identity_of(path) for path in paths}
    model = family.settings.model.model_dump(mode="json")
    return {"checks": CHECKS, "folder": str(family.folder), "model": model, "versions": versions(), "files": files}


def identity_of(path: Path) -> list[object]:
    """Return a file's size and the checksum of what the check reads: the header of weights, other files
    whole.

    Times would not do: a disk that loses a bit changes none. What is larger than any config or tokenizer has
    its time.
    """
    import xxhash

    size = path.stat().st_size
    with open_regular(path) as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
            return [size, length, xxhash.xxh3_64_hexdigest(file.read(min(length, MOST_READ_BYTES)))]
        if size > MOST_READ_BYTES:
            return [size, path.stat().st_mtime_ns]
        return [size, stream_checksum(file)]


def read_note(path: Path) -> object:
    """Content of a note; None if it is missing or damaged."""
    try:
        return json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
