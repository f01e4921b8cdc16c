"""Configs of a model that name code: they are refused by name, before a library reads them.

transformers before 5.3 ran a repository that `_attn_implementation_internal` named (CVE-2026-4372), diffusers
before 0.38 one that `custom_pipeline` named (CVE-2026-44513); each without trust_remote_code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.folder.malformed import read_json
from simpletuner.models.folder.weights import index_file

CODE_KEYS = frozenset({"auto_map", "custom_pipeline", "custom_pipelines", "trust_remote_code"})
IMPLEMENTATION = re.compile(r".*_implementation(_internal|_autoset)?")
WORD = re.compile(r"[A-Za-z_]\w*")
# Config files that may name code; not tokenizer.json and the like, megabytes without any.
CONFIGS = ("config.json", "*_config.json")
HINT = "code of a model is never run: choose one of diffusers and transformers alone, or remove that from your copy"


def refuse_code(folder: Path) -> None:
    """Raise EnvironmentNotReady if a config in the folder names code, or a class of an unknown library."""
    index = index_file(folder)
    content = read_json(index)
    refuse_keys(content, index)
    components = {name: value for name, value in content.items() if isinstance(value, list)}
    for name, value in components.items():
        refuse_entry(index, name, value)
    for name, value in components.items():
        for path in sorted(each for pattern in CONFIGS for each in (folder / name).glob(pattern)):
            config = read_json(path)
            hint = HINT
            # Asked only then: a class of transformers takes 0.3 CPU s to import, and few starts need it.
            if config.get("auto_map"):
                if not looks_for_code(value):
                    del config["auto_map"]
                elif cls := own_class(config):
                    hint = f"code of a model is never run: name the class {cls} as {name} in {index.name} of your copy"
            refuse_keys(config, path, hint)


def refuse_entry(index: Path, name: str, value: Sequence[object]) -> None:
    """Raise EnvironmentNotReady for an index entry that is not a class of a known library."""
    named = [part for part in value[:2] if part is not None]
    if name != "_class_name" and not (len(named) == 2 and all(isinstance(part, str) for part in named)):
        return  # a component that the pipeline does without, or a list of its own config
    library, cls = (*named, "")[:2]
    if name == "_class_name" or not (WORD.fullmatch(library) and WORD.fullmatch(cls)):
        raise EnvironmentNotReady(f"{index} names code as {name}: {value!r:.80}", HINT)
    if library not in ("diffusers", "transformers") and library not in pipeline_packages():
        raise EnvironmentNotReady(f"{index} takes {name} from {library!r:.60}, which is not read", HINT)
    if library == "diffusers" and cls.startswith("AutoModel"):
        raise EnvironmentNotReady(f"{index} names no class of {name}: {cls} stands for any", HINT)


def looks_for_code(entry: Sequence[object]) -> bool:
    """True if a component's class reads `auto_map`: Auto classes, and processors, which load their parts by
    them.

    Kolors' text encoder and models that were saved after a load with trust_remote_code are published with
    that key; a class that transformers or diffusers has does not look at it, and nothing here says
    trust_remote_code.
    """
    library, cls = (*entry, "", "")[:2]
    if not isinstance(cls, str) or cls.startswith("Auto") or cls.endswith("Processor"):
        return True
    if library == "transformers":
        import transformers

        return not hasattr(transformers, cls)
    return library != "diffusers" and library not in pipeline_packages()


def own_class(config: Mapping[str, Any]) -> str:
    """Return the class of transformers that a config names beside its code; empty where there is none.

    An Auto class in the index leaves it to transformers, and to the version of it, which of the two is taken.
    """
    import transformers

    named = [config.get(key) for key in ("tokenizer_class", "image_processor_type", "feature_extractor_type")]
    named += config.get("architectures") or []
    return next((name for name in named if isinstance(name, str) and hasattr(transformers, name)), "")


def refuse_keys(config: Mapping[str, object], path: Path, hint: str = HINT) -> None:
    """Raise EnvironmentNotReady for a key, at any depth, that makes a library load code."""
    for key, value in keys_in(config):
        is_word = value is None or isinstance(value, bool) or (isinstance(value, str) and bool(WORD.fullmatch(value)))
        if (key in CODE_KEYS and value) or (
            IMPLEMENTATION.fullmatch(key) and isinstance(value, str) and value and not is_word
        ):
            raise EnvironmentNotReady(f"{path} names code: {key} = {value!r:.80}", hint)
        if key == "_class_name" and isinstance(value, list | str) and not is_word:
            raise EnvironmentNotReady(f"{path} names code: {key} = {value!r:.80}", hint)


def keys_in(value: object) -> Iterator[tuple[str, object]]:
    """Yield every key of a config at any depth with its value."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key), item
            yield from keys_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from keys_in(item)


def pipeline_packages() -> frozenset[str]:
    """Packages of diffusers' pipelines; some have components of their own."""
    from diffusers import pipelines

    return frozenset(each.name for each in iter_modules(pipelines.__path__))
