"""Recognition of config files of other programs: kohya's sd-scripts, diffusion-pipe and the original SimpleTuner."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from simpletuner.settings.declared.sections import SECTION_OF
from simpletuner.settings.files.arguments import EXTRA_ARGS
from simpletuner.settings.foreign.key_table import Ignores, Maps, Refuses
from simpletuner.settings.foreign.original.names import TABLE

KOHYA, PIPE = "kohya's sd-scripts", "diffusion-pipe"
OF_KOHYA = frozenset(
    (
        *("network_module", "network_dim", "network_alpha", "network_args", "network_train_unet_only", "unet_lr"),
        *("dataset_config", "train_data_dir", "optimizer_type", "optimizer_args", "max_train_epochs", "output_name"),
        *("save_every_n_epochs", "save_every_n_steps", "save_model_as", "cache_latents"),
    )
)
"""Names that no other trainer's files have."""


GUI, MUSUBI, ONETRAINER, AITOOLKIT = "kohya_ss, the GUI", "musubi-tuner", "OneTrainer", "ai-toolkit"
OF_GUI = frozenset(("LoRA_type", "max_resolution", "lr_warmup", "adaptive_noise_scale"))
OF_MUSUBI = frozenset(("dit", "dit_high_noise", "timestep_sampling", "discrete_flow_shift", "text_encoder1", "t5"))
OF_MUSUBI_DATA = frozenset(("image_directory", "video_directory", "image_jsonl_file", "video_jsonl_file"))
OF_ONETRAINER = frozenset(
    (
        *("training_method", "base_model_name", "concept_file_name", "output_model_destination", "weight_dtype"),
        *("timestep_distribution", "output_dtype", "learning_rate_warmup_steps", "workspace_dir", "train_dtype"),
    )
)
"""Names of files that are recognised and not translated."""


def trainer_of(values: Mapping[str, Any]) -> str:
    """Return whose file this is, or nothing: only names and shapes that no file of settings has are looked at."""
    if other := untranslated(values):
        return other
    if is_dataset_file(values):
        return KOHYA if "datasets" in values else PIPE
    model = values.get("model")
    if isinstance(model, Mapping) and "type" in model and {"adapter", "optimizer", "dataset"} & values.keys():
        return PIPE
    return KOHYA if not OF_KOHYA.isdisjoint(flat(values)) else ""


def untranslated(values: Mapping[str, Any]) -> str:
    """Return the program whose files are recognised by what is in them, but have no translation; empty for others."""
    job, datasets = values.get("config"), values.get("datasets")
    if isinstance(job, Mapping) and isinstance(job.get("process"), list):
        return AITOOLKIT
    tables = [values.get("general"), *(datasets if isinstance(datasets, list) else ())]
    if any(isinstance(each, Mapping) and not OF_MUSUBI_DATA.isdisjoint(each) for each in tables):
        return MUSUBI
    if len(OF_ONETRAINER & values.keys()) >= 2 and "model_family" not in values:
        return ONETRAINER
    flattened = flat(values)
    if "dit" in flattened and len(OF_MUSUBI & flattened.keys()) >= 1 and not OF_KOHYA.isdisjoint(flattened):
        return MUSUBI
    return GUI if "LoRA_type" in values or len(OF_GUI & values.keys()) >= 2 else ""


def is_dataset_file(values: Mapping[str, Any]) -> bool:
    tables = [values.get("datasets"), values.get("directory")]
    return any(isinstance(table, list) and all(isinstance(each, Mapping) for each in table) for table in tables)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all sections side by side, as sd-scripts reads them."""
    inner = {name: each for value in values.values() if isinstance(value, Mapping) for name, each in value.items()}
    return {name: value for name, value in values.items() if not isinstance(value, Mapping)} | inner


def names_of_original(names: Iterable[str]) -> list[str]:
    """Return the names that only files of the original SimpleTuner have, each with what it is called here."""
    theirs = [name for name in names if name in EXTRA_ARGS or (name in TABLE.rules and name not in SECTION_OF)]
    return [
        f"{name} (here {rule.setting})" if isinstance(rule := TABLE.rules.get(name), Maps) else name for name in theirs
    ]


def is_value_of_original(setting: str, value: Any) -> bool:
    """Return whether a value is one that the original's files have for a setting and that means another one here."""
    rule = TABLE.rules.get(setting)
    if not isinstance(rule, Maps):
        return False
    try:
        return rule.read(value) != value
    except ValueError:  # the original's, and refused with a reason
        return True


def import_hint(file: str | Path, trainer: str = "", is_list: bool = False) -> str:
    """Return the hint that names the command which translates a file, or says that none does."""
    if trainer in (GUI, MUSUBI, ONETRAINER, AITOOLKIT):
        way = "; its command that prints the training configuration writes sd-scripts' TOML" if trainer == GUI else ""
        return (
            f"it is not translated{way}: `simpletuner config init` begins a file of ours, and `config import` reads "
            "those of sd-scripts, diffusion-pipe and the original SimpleTuner"
        )
    output = "--output=datasets.json" if is_list else "--output=run.toml"
    command = shlex.join(["simpletuner", "config", "import", str(file), output])
    return f"`{command}` translates it, or says what would be lost"


def answer_for(name: str) -> str:
    """Return what became of a name of the original's: our name, or why there is none; empty for any other name."""
    rule = TABLE.rules.get(name)
    if isinstance(rule, Maps):
        return f"it is called `{rule.setting}` here"
    return rule.reason if isinstance(rule, Ignores | Refuses) else ""
