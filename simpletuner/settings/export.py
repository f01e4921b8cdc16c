"""Write settings in every format that a run can be replayed from; what is replayed gives the same settings."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.settings.accelerate import account
from simpletuner.settings.deepspeed.config import deepspeed_config
from simpletuner.settings.formats import Entry
from simpletuner.settings.loading import Loaded, knobs, settings_as_json
from simpletuner.settings.sections import SECTION_OF, Settings
from simpletuner.settings.shell import in_lines
from simpletuner.settings.sources import PREFIX
from simpletuner.settings.spelling import normalize_value

SAVE_SECONDS = 300
"""How long before the end of its time SLURM asks a run to save and stop."""


@dataclass(frozen=True)
class Exported:
    """A text to save, and the command that replays it from a file of this name."""

    text: str
    name: str
    command: list[str]

    def replay(self, path: str = "") -> str:
        """Return the command for a shell, with the path where the text was saved."""
        names = {
            prefix + self.name: prefix + (path or self.name) for prefix in ("", "--config=", "--deepspeed_config=")
        }
        return in_lines([names.get(word, word) for word in self.command])


def export(loaded: Loaded, to: str, everything: bool = False) -> Exported:
    """Return settings in a format of FORMATS: those that a source gave, or all of them.

    Raises SettingsError for a format that cannot say them.
    """
    return FORMATS[to](loaded.settings, written(loaded, everything))


def written(loaded: Loaded, everything: bool) -> dict[str, Any]:
    """Return the values to write: what a source said, even if it is the default, since weaker sources may say other."""
    values = settings_as_json(loaded)
    changed = {name for name, field in knobs().items() if field.default != field_value(loaded.settings, name)}
    return {name: value for name, value in values.items() if everything or name in loaded.origins or name in changed}


def field_value(settings: Settings, name: str) -> Any:
    """Return the value of a knob."""
    return getattr(getattr(settings, SECTION_OF[name]), name)


def as_text(value: Any) -> str:
    """Return a value as a flag or variable writes it; the settings layer reads it back."""
    if isinstance(value, list) and len(value) == 1 and value[0] and not value[0].lstrip().startswith("["):
        return value[0]
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False)
    return "none" if value is None else str(value)


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Return values as command-line flags; a list as one flag per item, an empty one as JSON."""
    return [
        f"--{name}={as_text(item)}"
        for name, value in values.items()
        for item in ((value or [[]]) if isinstance(value, list) else [value])
    ]


def to_cli(settings: Settings, values: dict[str, Any]) -> Exported:
    """Return a command line for a shell."""
    words = ["simpletuner", "train", *as_flags(values)]
    return Exported(in_lines(words), "", words)


def to_json(settings: Settings, values: dict[str, Any]) -> Exported:
    """Return a JSON file."""
    return config_file(json.dumps(values, indent=2, ensure_ascii=False) + "\n", "settings.json")


def to_toml(settings: Settings, values: dict[str, Any]) -> Exported:
    """Return a TOML file: tables last, since what follows a table belongs to it; `none` for what TOML cannot say."""
    import tomli_w

    ready = {name: toml_value(value) for name, value in values.items()}
    tables_last = dict(sorted(ready.items(), key=lambda item: isinstance(item[1], dict)))
    return config_file(tomli_w.dumps(tables_last), "settings.toml")


def toml_value(value: Any) -> Any:
    """Return a value that TOML has: `none` for nothing, JSON text for tables that hold nothing somewhere."""
    holds_nothing = isinstance(value, dict | list) and "null" in json.dumps(value)
    return as_text(value) if value is None or holds_nothing else value


def to_yaml(settings: Settings, values: dict[str, Any]) -> Exported:
    """Return a YAML file; ASCII only where PyYAML would lose a character that it takes for the end of a line."""
    import yaml

    as_it_is = not re.search("[\x85\u2028\u2029]", json.dumps(values, ensure_ascii=False))
    return config_file(yaml.safe_dump(values, sort_keys=False, allow_unicode=as_it_is), "settings.yaml")


def to_env(settings: Settings, values: dict[str, Any]) -> Exported:
    """Return variables, for `config/config.env` or for a shell to source."""
    lines = [f"{PREFIX}{name.upper()}={shlex.quote(as_text(value))}\n" for name, value in values.items()]
    return config_file("".join(lines), "config.env")


def to_accelerate(settings: Settings, values: dict[str, Any]) -> Exported:
    """Return a file for `accelerate launch`; what accelerate has no field for goes into the command, as flags."""
    import yaml

    fields = accelerate_fields(settings)
    told = [item for item in account([Entry(key, value) for key, value in fields.items()]) if item.knob]
    said = {item.knob: normalize_value(item.knob, knobs()[item.knob], item.value) for item in told}
    rest = {name: value for name, value in values.items() if name not in said or said[name] != value}
    rest |= {"use_cpu": True} if settings.launch.use_cpu else {}  # accelerate tells its ranks only without FSDP
    words = ["accelerate", "launch", "--config_file", "accelerate.yaml", "-m", "simpletuner", "train", *as_flags(rest)]
    command = "".join(f"#   {line}\n" for line in in_lines(words).splitlines())
    return Exported(f"# Replay with\n{command}{yaml.safe_dump(fields, sort_keys=False)}", "accelerate.yaml", words)


def accelerate_fields(settings: Settings) -> dict[str, Any]:
    """Return what accelerate's own configuration can say of the settings."""
    launch, parallel, compiled = settings.launch, settings.parallel, settings.compile
    many = {"machine_rank": launch.machine_rank, "main_process_ip": launch.main_process_ip or None}
    fields: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": engine_name(settings),
        "num_processes": launch.num_processes,
        "num_machines": launch.num_machines,
        **(many if launch.num_machines > 1 else {}),
        "main_process_port": launch.main_process_port,
        "mixed_precision": settings.training.mixed_precision,
        "use_cpu": launch.use_cpu,
        "gpu_ids": launch.gpu_ids,
    }
    if compiled.dynamo_backend != "no":
        fields["dynamo_config"] = {
            "dynamo_backend": compiled.dynamo_backend.upper(),
            "dynamo_mode": compiled.dynamo_mode,
            "dynamo_use_dynamic": compiled.dynamo_dynamic,
            "dynamo_use_fullgraph": compiled.dynamo_fullgraph,
            "dynamo_use_regional_compilation": compiled.dynamo_use_regional_compilation,
        }
    if parallel.fsdp_enable:
        fields["fsdp_config"] = fsdp_fields(settings)
    if parallel.zero_stage is not None:
        fields["deepspeed_config"] = {
            "zero_stage": parallel.zero_stage,
            "offload_optimizer_device": parallel.offload_optimizer,
            "offload_param_device": parallel.offload_param,
        }  # accelerate hands no nvme_path on: that is a flag
    if parallel.context_parallel_size > 1:
        fields["parallelism_config"] = {
            "parallelism_config_cp_size": parallel.context_parallel_size,
            "parallelism_config_cp_comm_strategy": parallel.context_parallel_comm_strategy,
        }
    return fields


def engine_name(settings: Settings) -> str:
    """Return accelerate's distributed_type."""
    if settings.parallel.fsdp_enable:
        return "FSDP"
    if settings.parallel.zero_stage is not None:
        return "DEEPSPEED"
    many = settings.launch.num_processes > 1
    return ("MULTI_CPU" if settings.launch.use_cpu else "MULTI_GPU") if many else "NO"


def fsdp_fields(settings: Settings) -> dict[str, Any]:
    """Return accelerate's fsdp_config."""
    parallel = settings.parallel
    fields: dict[str, Any] = {
        "fsdp_version": parallel.fsdp_version,
        "fsdp_reshard_after_forward": parallel.fsdp_reshard_after_forward,
        "fsdp_state_dict_type": parallel.fsdp_state_dict_type,
        "fsdp_cpu_ram_efficient_loading": parallel.fsdp_cpu_ram_efficient_loading,
    }
    if "." not in parallel.fsdp_auto_wrap_policy:
        fields["fsdp_auto_wrap_policy"] = parallel.fsdp_auto_wrap_policy
    if parallel.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP":
        fields["fsdp_min_num_params"] = parallel.fsdp_min_num_params
    if parallel.fsdp_transformer_layer_cls_to_wrap:
        fields["fsdp_transformer_layer_cls_to_wrap"] = parallel.fsdp_transformer_layer_cls_to_wrap
    return fields


def to_deepspeed(settings: Settings, values: dict[str, Any]) -> Exported:
    """Return DeepSpeed's complete JSON; the rest of the settings goes into the command, as flags."""
    if settings.parallel.zero_stage is None:
        raise SettingsError("DeepSpeed is off: there is no configuration to export", "set zero_stage")
    config = deepspeed_config(settings, settings.launch.num_processes)
    rest = {name: value for name, value in values.items() if name != "deepspeed_config"}
    words = ["simpletuner", "train", "--deepspeed_config=deepspeed.json", *as_flags(rest)]
    return Exported(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "deepspeed.json", words)


def to_slurm(settings: Settings, values: dict[str, Any]) -> Exported:
    """Return an sbatch script: one launcher per node, which starts that node's ranks."""
    launch = settings.launch
    own = {"machine_rank"} | (set() if launch.main_process_ip else {"main_process_ip"})
    flags = as_flags({name: value for name, value in values.items() if name not in own})
    start = ["srun", "--kill-on-bad-exit=1", "bash", "-c", START_ON_NODE, "simpletuner", *flags]
    ranks = launch.num_processes // launch.num_machines
    gpus = "" if launch.use_cpu else f"#SBATCH --gpus-per-node={ranks}\n"
    master = "" if launch.main_process_ip or launch.num_machines == 1 else MASTER_OF_JOB
    head = SBATCH_HEAD.format(nodes=launch.num_machines, gpus=gpus, seconds=SAVE_SECONDS)
    return Exported(head + master + in_lines(start), "simpletuner.sbatch", ["sbatch", "simpletuner.sbatch"])


START_ON_NODE = 'exec simpletuner train --machine_rank="$SLURM_NODEID" "$@"'
MASTER_OF_JOB = f"""\
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
# Before its time is over the run is asked to save and stop; submit the same script again and it goes on.
set -euo pipefail
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
    """Return a text that `--config` reads."""
    return Exported(text, name, ["simpletuner", "train", f"--config={name}"])
