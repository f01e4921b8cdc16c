"""Export settings in every format that a run can be replayed from; a replay gives the same settings.

What a format cannot hold (accelerate's YAML has no learning rate) goes into the command that replays it, as flags.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.settings.declared.secret_names import is_secret
from simpletuner.settings.declared.sections import SECTION_OF, Settings, setting_fields
from simpletuner.settings.files.config_files import PREFIX
from simpletuner.settings.files.file_entries import FileEntry
from simpletuner.settings.foreign.accelerate.fields import map_file, to_fields
from simpletuner.settings.foreign.deepspeed.config import deepspeed_config
from simpletuner.settings.resolving.loading import Loaded, settings_as_json
from simpletuner.settings.values.spelling import as_text, normalize_value
from simpletuner.system.files.paths import ENVIRONMENT

SAVE_SECONDS = 300
"""Time before the end of a SLURM job at which a run is asked to save and stop."""


@dataclass(frozen=True)
class Exported:
    """A text to save, and the command that replays it from a file of this name."""

    text: str
    name: str
    command: list[str]

    def replay(self, path: str = "") -> str:
        """The command for a shell, with the path where the text was saved."""
        names = {
            prefix + self.name: prefix + (path or self.name) for prefix in ("", "--config=", "--deepspeed_config=")
        }
        return format_command([names.get(word, word) for word in self.command])


def export(loaded: Loaded, to: str, everything: bool = False) -> Exported:
    """Return settings in a format of FORMATS: those that a source gave, or all of them.

    Raises SettingsError for a format that cannot say them.
    """
    return FORMATS[to](loaded.settings, values_to_write(loaded, everything))


def values_to_write(loaded: Loaded, everything: bool) -> dict[str, Any]:
    """Choose the values to write: also a default that a source gives, since weaker sources may say otherwise."""
    values = settings_as_json(loaded)
    changed = {name for name, field in setting_fields().items() if field.default != field_value(loaded.settings, name)}
    return {name: value for name, value in values.items() if everything or name in loaded.origins or name in changed}


def field_value(settings: Settings, name: str) -> Any:
    return getattr(getattr(settings, SECTION_OF[name]), name)


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """A list becomes one flag per item, an empty one JSON: no flag at all would leave its default."""
    return [
        f"--{name}={as_text(item)}"
        for name, value in values.items()
        for item in ((value or [[]]) if isinstance(value, list) else [value])
    ]


def to_cli(settings: Settings, values: dict[str, Any]) -> Exported:
    words = ["simpletuner", "train", *as_flags(values)]
    return Exported(format_command(words), "", words)


def to_json(settings: Settings, values: dict[str, Any]) -> Exported:
    return config_file(json.dumps(values, indent=2, ensure_ascii=False) + "\n", "settings.json")


def to_toml(settings: Settings, values: dict[str, Any]) -> Exported:
    """Tables come last, since what follows a table belongs to it."""
    import tomli_w

    ready = {name: toml_value(value) for name, value in values.items()}
    tables_last = dict(sorted(ready.items(), key=lambda item: isinstance(item[1], dict)))
    return config_file(tomli_w.dumps(tables_last), "settings.toml")


def toml_value(value: Any) -> Any:
    """TOML has no null: `none` stands for it, JSON text for tables and lists that hold one."""
    holds_nothing = isinstance(value, dict | list) and "null" in json.dumps(value)
    return as_text(value) if value is None or holds_nothing else value


def to_yaml(settings: Settings, values: dict[str, Any]) -> Exported:
    import yaml

    # PyYAML takes these characters for the end of a line and would lose them; escaped as ASCII they survive.
    as_it_is = not re.search("[\x85\u2028\u2029]", json.dumps(values, ensure_ascii=False))
    return config_file(yaml.safe_dump(values, sort_keys=False, allow_unicode=as_it_is), "settings.yaml")


def to_env(settings: Settings, values: dict[str, Any]) -> Exported:
    """Variables, for `config/config.env` or for a shell to source."""
    lines = [f"{PREFIX}{name.upper()}={variable_value(name, value)}\n" for name, value in values.items()]
    return config_file("".join(lines), "config.env")


def variable_value(name: str, value: Any) -> str:
    """Write a value for a shell. A secret in the environment is named as one does there: it may be this variable."""
    found = ENVIRONMENT.fullmatch(value) if is_secret(name) else None
    return f'"${found[1]}"' if found else shlex.quote(as_text(value))


def to_accelerate(settings: Settings, values: dict[str, Any]) -> Exported:
    """A file for `accelerate launch`; what accelerate has no field for goes into the command, as flags."""
    import yaml

    fields = to_fields(settings)
    mapped = [found for found in map_file([FileEntry(key, value) for key, value in fields.items()]) if found.setting]
    in_file = {
        found.setting: normalize_value(found.setting, setting_fields()[found.setting], found.value) for found in mapped
    }
    # accelerate's YAML has no learning rate and no paths: every format replays to equal settings because the
    # command carries what its file cannot.
    rest = {name: value for name, value in values.items() if name not in in_file or in_file[name] != value}
    if settings.launch.use_cpu:
        rest["use_cpu"] = True  # under FSDP accelerate does not pass it on to its ranks
    words = ["accelerate", "launch", "--config_file", "accelerate.yaml", "-m", "simpletuner", "train", *as_flags(rest)]
    command = "".join(f"#   {line}\n" for line in format_command(words).splitlines())
    return Exported(f"# Replay with\n{command}{yaml.safe_dump(fields, sort_keys=False)}", "accelerate.yaml", words)


def to_deepspeed(settings: Settings, values: dict[str, Any]) -> Exported:
    """DeepSpeed's complete JSON; the rest of the settings goes into the command, as flags."""
    if settings.parallel.zero_stage is None:
        raise SettingsError("DeepSpeed is off: there is no configuration to export", "set zero_stage")
    config = deepspeed_config(settings, settings.launch.num_processes)
    rest = {name: value for name, value in values.items() if name != "deepspeed_config"}
    words = ["simpletuner", "train", "--deepspeed_config=deepspeed.json", *as_flags(rest)]
    return Exported(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "deepspeed.json", words)


def to_slurm(settings: Settings, values: dict[str, Any]) -> Exported:
    """An sbatch script: one launcher per node, which starts that node's ranks.

    Without main_process_ip, such as that of an accelerate file: a job gets other nodes each time.
    """
    launch = settings.launch
    flags = as_flags({name: value for name, value in values.items() if name not in OF_A_JOB})
    # srun's default lets the other nodes run on when one has failed (KillOnBadExit=0 in slurm.conf).
    start = ["srun", "--kill-on-bad-exit=1", "bash", "-c", START_ON_NODE, "simpletuner", *flags]
    ranks = launch.num_processes // launch.num_machines
    gpus = "" if launch.use_cpu else f"#SBATCH --gpus-per-node={ranks}\n"
    master = "" if launch.num_machines == 1 else MASTER_OF_JOB
    cpus = ranks * CPUS_PER_RANK
    head = SBATCH_HEAD.format(nodes=launch.num_machines, gpus=gpus, seconds=SAVE_SECONDS, cpus=cpus)
    return Exported(head + master + format_command(start), "simpletuner.sbatch", ["sbatch", "simpletuner.sbatch"])


OF_A_JOB = ("machine_rank", "main_process_ip")
"""Settings that each job decides anew."""
CPUS_PER_RANK = 8
"""Cores per rank that the script proposes: threads decode images during training."""
START_ON_NODE = 'exec simpletuner train --machine_rank="$SLURM_NODEID" "$@"'
MASTER_OF_JOB = f"""\
# The first node of this job, by the name that SLURM gives it: others reach it there.
{PREFIX}MAIN_PROCESS_IP=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export {PREFIX}MAIN_PROCESS_IP
"""
SBATCH_HEAD = """\
#!/bin/bash
#SBATCH --job-name=simpletuner
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --signal=TERM@{seconds}
#SBATCH --output=%x-%j.log
# What clusters ask for beside: fill a line in, and take its first # away.
##SBATCH --time=24:00:00
##SBATCH --partition=PARTITION
##SBATCH --account=ACCOUNT
##SBATCH --cpus-per-task={cpus}
##SBATCH --mem=0
# Before its time is over the run is asked to save and stop; submit the same script again and it goes on.
set -euo pipefail
# srun does not take it from the job.
[ -z "${{SLURM_CPUS_PER_TASK:-}}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
"""

FORMATS: dict[str, Callable[[Settings, dict[str, Any]], Exported]] = {
    "cli": to_cli,
    "json": to_json,
    "toml": to_toml,
    "yaml": to_yaml,
    "env": to_env,
    "accelerate": to_accelerate,
    "deepspeed": to_deepspeed,
    "slurm": to_slurm,
}


def config_file(text: str, name: str) -> Exported:
    return Exported(text, name, ["simpletuner", "train", f"--config={name}"])


def format_command(words: list[str]) -> str:
    """Format a command for bash; several flags get a line each."""
    first = next((index + 1 for index in reversed(range(len(words))) if not words[index].startswith("--")), 0)
    parts = (word.partition("=") for word in words[first:])
    flags = [name + equals + quoted(value) for name, equals, value in parts]
    return (" \\\n  " if len(flags) > 1 else " ").join([" ".join(map(quoted, words[:first])), *flags]) + "\n"


def quoted(word: str) -> str:
    """Quote a word on one line for bash: what is not printable is written as escaped bytes, in any locale."""
    if word.isprintable():
        return shlex.quote(word)
    shown = (
        character if character.isprintable() and character not in "\\'" else escaped(character) for character in word
    )
    return f"$'{''.join(shown)}'"


def escaped(character: str) -> str:
    """Escape one character for `$'...'`."""
    if character in "\\'":
        return "\\" + character
    return "\\n" if character == "\n" else "".join(f"\\x{byte:02x}" for byte in character.encode())
