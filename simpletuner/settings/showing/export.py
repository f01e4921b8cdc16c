"""Export settings in every replayable format, and explain each value: origin and reason.

A replay gives the same settings. Settings that a format cannot hold (accelerate's YAML has no learning rate)
become flags of the replay command.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.settings.declared.errors import is_secret
from simpletuner.settings.declared.knob import own_defaults
from simpletuner.settings.declared.sections import SECTION_OF, Settings, setting_fields
from simpletuner.settings.files.config_files import PREFIX, FileEntry
from simpletuner.settings.files.formats import toml_line
from simpletuner.settings.files.raw_values import Origin
from simpletuner.settings.resolving.loading import NO_ORIGIN, Loaded, settings_as_json
from simpletuner.settings.showing.clusters import CLUSTERS, Exported, as_flags, format_command
from simpletuner.settings.values.spelling import as_text, normalize_name, normalize_value
from simpletuner.system.files.paths import ENVIRONMENT


def export(loaded: Loaded, to: str, everything: bool = False) -> Exported:
    """Return settings in a format of FORMATS: those that a source gave, or all of them.

    Raises SettingsError for a format that cannot say them.
    """
    return FORMATS[to](loaded.settings, values_to_write(loaded, everything))


def values_to_write(loaded: Loaded, everything: bool) -> dict[str, object]:
    # Defaults given by a source, too, since weaker sources may differ.
    values = settings_as_json(loaded)
    changed = {name for name, field in setting_fields().items() if field.default != field_value(loaded.settings, name)}
    return {name: value for name, value in values.items() if everything or name in loaded.origins or name in changed}


def field_value(settings: Settings, name: str) -> object:
    return getattr(getattr(settings, SECTION_OF[name]), name)


def to_cli(settings: Settings, values: Mapping[str, object]) -> Exported:
    words = ["simpletuner", "train", *as_flags(values)]
    return Exported(format_command(words), "", words)


def to_json(settings: Settings, values: Mapping[str, object]) -> Exported:
    return config_file(json.dumps(values, indent=2, ensure_ascii=False) + "\n", "settings.json")


def to_toml(settings: Settings, values: Mapping[str, object]) -> Exported:
    return config_file("".join(f"{toml_line(name, value)}\n" for name, value in values.items()), "settings.toml")


def to_yaml(settings: Settings, values: Mapping[str, object]) -> Exported:
    import yaml

    # PyYAML takes these characters for the end of a line and would lose them; escaped as ASCII they survive.
    as_it_is = not re.search("[\x85\u2028\u2029]", json.dumps(values, ensure_ascii=False))
    return config_file(yaml.safe_dump(values, sort_keys=False, allow_unicode=as_it_is), "settings.yaml")


def to_env(settings: Settings, values: Mapping[str, object]) -> Exported:
    """Variables, for `config/config.env` or for a shell to source."""
    lines = [f"{PREFIX}{name.upper()}={variable_value(name, value)}\n" for name, value in values.items()]
    return config_file("".join(lines), "config.env")


def variable_value(name: str, value: Any) -> str:
    """Quote a value for a shell. A secret in the environment keeps its variable's name."""
    found = ENVIRONMENT.fullmatch(value) if is_secret(name) else None
    return f'"${found[1]}"' if found else shlex.quote(as_text(value))


def to_accelerate(settings: Settings, values: Mapping[str, object]) -> Exported:
    """A file for `accelerate launch`; what accelerate has no field for goes into the command, as flags."""
    import yaml

    from simpletuner.settings.foreign.accelerate_fields import map_file, to_fields

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


def to_deepspeed(settings: Settings, values: Mapping[str, object]) -> Exported:
    """DeepSpeed's complete JSON; the rest of the settings goes into the command, as flags."""
    if settings.parallel.zero_stage is None:
        raise SettingsError("DeepSpeed is off: there is no configuration to export", "set zero_stage")
    from simpletuner.settings.foreign.deepspeed_config import deepspeed_config

    config = deepspeed_config(settings, settings.launch.num_processes)
    rest = {name: value for name, value in values.items() if name != "deepspeed_config"}
    words = ["simpletuner", "train", "--deepspeed_config=deepspeed.json", *as_flags(rest)]
    return Exported(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "deepspeed.json", words)


FORMATS: dict[str, Callable[[Settings, dict[str, object]], Exported]] = {
    "cli": to_cli,
    "json": to_json,
    "toml": to_toml,
    "yaml": to_yaml,
    "env": to_env,
    "accelerate": to_accelerate,
    "deepspeed": to_deepspeed,
    **CLUSTERS,
}


def config_file(text: str, name: str) -> Exported:
    return Exported(text, name, ["simpletuner", "train", f"--config={name}"])


@dataclass(frozen=True)
class ExplainedSetting:
    name: str
    value: Any
    default: Any
    origin: str
    because: str

    @property
    def is_set(self) -> bool:
        """True if a source gives the value, or it differs from the default."""
        return self.origin != str(NO_ORIGIN) or self.value != self.default

    def cells(self) -> tuple[str, str, str, str]:
        """The row of a table."""
        is_auto = self.value is None and setting_fields()[self.name].annotation == bool | None
        return self.name, "auto" if is_auto else as_text(self.value), self.origin, self.because

    def as_json(self) -> dict[str, object]:
        return {"value": self.value, "default": self.default, "from": self.origin, "because": self.because}


def explain_settings(loaded: Loaded) -> Iterator[ExplainedSetting]:
    """Explain every setting, in the order of the sections."""
    defaults = settings_as_json(Loaded(Settings(), {}))
    optimizer = loaded.settings.optimizer.optimizer
    own = own_defaults(optimizer)
    own_origin = Origin("default", None, reason=f"{optimizer}'s own")
    for name, value in settings_as_json(loaded).items():
        origin = loaded.origins.get(name, own_origin if name in own else NO_ORIGIN)
        default = own.get(name, defaults[name])
        yield ExplainedSetting(name, value, default, str(origin), because(value, origin))


def because(value: object, origin: Origin) -> str:
    """Reason of a value: another spelling, a rule, weaker sources."""
    reasons = [origin.reason] if origin.reason else []
    respelled = isinstance(origin.given, str) and isinstance(value, str) and origin.given != value
    if not reasons and respelled and normalize_name(origin.given) != normalize_name(value):
        reasons.append(f"written `{origin.given}`")
    reasons += [f"outranks {weaker} (= {as_text(weaker.given)})" for weaker in origin.outranks]
    return "; ".join(reasons)
