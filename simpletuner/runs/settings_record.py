"""`settings.json` and `settings_history.jsonl`: settings of a run, its starts, and changes between them.

The folder may be somebody else's: what an export takes from it is only data.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletuner import __version__
from simpletuner.checkpoints.layout import Checkpoint
from simpletuner.errors import SettingsError, naming
from simpletuner.run_log import APPEND
from simpletuner.settings import Settings, settings_as_json
from simpletuner.settings.files.raw_values import RawValue, Source
from simpletuner.settings.resolving.loading import resolve
from simpletuner.system.files.atomic import refuse_special, write_json
from simpletuner.system.files.regular_files import Warn, read_end, read_file, read_state

if TYPE_CHECKING:
    from simpletuner.parallel.world import World
    from simpletuner.session import Session

SETTINGS, HISTORY = "settings.json", "settings_history.jsonl"
# Fewest and most images that a sample is made from, in a line of history.
IMAGES = "images_of_sample"

Changes = dict[str, list[object]]
"""Setting -> [before, now]."""


def report_changes(session: Session, checkpoint: Checkpoint | None) -> Changes:
    """Print and return the settings that changed since the last start, with their effect on its state."""
    output = session.settings.training.output_dir
    before = read_settings(output / SETTINGS) if session.world.is_first else None
    changes = changed(before, settings_as_json(session.loaded)) if before is not None else {}
    if not changes:
        return changes
    effects = effects_on(checkpoint.state, session.settings, changes) if checkpoint is not None else {}
    rows = [(name, shown(old), shown(new), effects.get(name, "")) for name, (old, new) in changes.items()]
    columns = ("setting", "before", "now", "what happens")
    width = len(columns) if any(row[-1] for row in rows) else len(columns) - 1
    title = f"settings changed since the last start{last_start(output / HISTORY)}"
    session.report.table(title, [row[:width] for row in rows], columns[:width])
    return changes


def effects_on(state: Mapping[str, Any], settings: Settings, changes: Changes) -> dict[str, str]:
    """Return the parts of a checkpoint's state that are lost by changed settings, as `TrainingState.restore`
    loses them."""
    effects: dict[str, str] = {}
    if state["optimizer"]["steps"] and {*changes.get("optimizer", ())} != {"adam", "adamw"}:  # which have equal moments
        effects["optimizer"] = "starts without state; weights, EMA and data go on"
    if settings.ema.use_ema and state["ema_updates"] is None:
        effects["use_ema"] = f"the EMA starts from the weights of step {state['step']}"
    elif not settings.ema.use_ema and state["ema_updates"] is not None:
        effects["use_ema"] = "the EMA is not continued in later checkpoints; those that have it keep it"
    if "pretrained_model_name_or_path" in changes:
        is_lora = settings.model.model_type == "lora"
        effects["pretrained_model_name_or_path"] = (
            "the LoRA goes on over this model"
            if is_lora
            else "the denoiser goes on from the checkpoint, all else is new"
        )
    return effects


def record_settings(
    session: Session, step: int, facts: Mapping[str, str], images: tuple[int, int], data: str = ""
) -> None:
    """Write the settings of a run that starts to train at `step`, and a line of history, with what was proven
    of its pipeline, how many images a sample is made from, and the listing of its data. Only rank 0 writes.

    A start that ends before training leaves the files as they are.
    """
    if not session.world.is_first:
        return
    output, settings = session.settings.training.output_dir, settings_as_json(session.loaded)
    changes = write_settings(output / SETTINGS, settings, session.report.warn)
    time = datetime.now(UTC).isoformat(timespec="seconds")
    start = {"time": time, "step": step, "simpletuner": __version__, "host": socket.gethostname(), **facts}
    append(output / HISTORY, {**start, IMAGES: images, **gpus_of(session.world), "data": data, "changed": changes})


def write_settings(path: Path, settings: Mapping[str, object], warn: Warn) -> Changes:
    """Write the settings of a start, and return what differs from those of the start before."""
    before = read_state(path, parse_settings, warn)
    changes = changed(before, settings) if before is not None else {}
    if before is None or changes:
        write_json(path, settings)
    return changes


def gpus_of(world: World) -> dict[str, float]:
    # Rank 0's GPU stands for all.
    if world.device.type != "cuda":
        return {}
    from simpletuner.parallel.gpu import power_limit_watts

    return {"gpus": world.size, "gpu_watts": power_limit_watts(world.device)}


def images_of_sample(path: Path) -> tuple[int, int]:
    """Return the fewest and most images that a sample of a run is made from, by its history; none where it is
    damaged or of an earlier version."""
    try:
        least, most = json.loads(read_file(path).splitlines()[-1])[IMAGES]
        return int(least), int(most)
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return 0, 0


def last_start(path: Path) -> str:
    """Return time and step of a run's last start, in brackets; empty if unknown."""
    try:
        row = json.loads(read_file(path).splitlines()[-1])
        time = datetime.fromisoformat(row["time"]).astimezone()
        return f" ({time:%Y-%m-%d %H:%M}, at step {row['step']})"
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return ""


def read_settings(path: Path) -> dict[str, Any] | None:
    """Return the settings of the last start; None if there are none or they are damaged."""
    try:
        return parse_settings(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None


def parse_settings(content: bytes) -> dict[str, object]:
    """Raises ValueError or RecursionError for what is no JSON object."""
    settings = json.loads(content)
    if not isinstance(settings, dict):
        raise ValueError("no JSON object")
    return settings


def changed(before: Mapping[str, object], now: Mapping[str, object]) -> Changes:
    # One that a version did not have yet counts as unchanged.
    return {name: [before[name], now[name]] for name in now if name in before and before[name] != now[name]}


def shown(value: object) -> str:
    """Format a value for the table; texts without quotes."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def append(path: Path, row: Mapping[str, object]) -> None:
    """Append one line; a link of that name is not followed. Raises EnvironmentNotReady for one."""
    refuse_special(path)
    torn = "" if read_end(path, 1) in (b"", b"\n") else "\n"  # by a full disk: the new row must be read
    descriptor = os.open(path, APPEND, 0o666)
    with naming(path), os.fdopen(descriptor, "a", encoding="utf-8") as file:
        file.write(f"{torn}{json.dumps(row)}\n")


# Facts of a run that an export needs; none can run code, reach the network or name a file.
TAKEN = frozenset(
    {
        *("model_family", "model_flavour", "model_type", "prediction_type", "variant", "tokenizer_max_length"),
        *("lora_type", "lora_rank", "lora_alpha", "lora_dropout", "lokr_factor", "lora_target_modules"),
        *("assistant_lora_strength", "export_format", "flux_guidance_value", "export_precision"),
    }
)
SAMPLED = frozenset(
    {
        *("resolution", "resolution_type", "seed", "mixed_precision", "aspect_bucket_alignment", "framerate"),
        *("validation_num_inference_steps", "validation_guidance", "validation_negative_prompt", "validation_seed"),
        *("validation_resolution", "validation_num_video_frames"),
    }
)
"""Facts of a run by which an image is sampled as in its validation."""
# Modules to import, folders to read and repositories to download: the user names them, not the run's folder.
NAMED: tuple[str, ...] = ("pretrained_model_name_or_path", "single_file_config", "revision", "model_families")
LONGEST_SHOWN = 300


def recorded_settings(
    output: Path, named: Mapping[str, str], command: str = "runs export", more: Collection[str] = ()
) -> Settings:
    """Return the settings that an export of a run needs, with its folder as it is called now.

    `more` are further facts that a `command` needs. `named` has the user's values of `NAMED`, and of settings
    that the command has options for: these count, not the run's. Raises SettingsError where settings.json
    cannot be read, or has a value of `NAMED` that the user has not given.
    """
    recorded = read_settings(output / SETTINGS)
    if recorded is None:
        raise SettingsError(f"{output} has no readable {SETTINGS}", "name the output folder of a run that has trained")
    if missing := {name: value for name in NAMED if (value := recorded.get(name)) and not named.get(name)}:
        flags = [f"--{name}={as_flag_value(value)}" for name, value in missing.items()]
        raise SettingsError(
            f"{output / SETTINGS} names {' and '.join(missing)}, which an export does not take from there: the folder "
            "may be somebody else's",
            f"where you know what it names: {shlex.join(['simpletuner', *command.split(), str(output), *flags])}",
        )
    given = {name: value for name, value in named.items() if value}
    taken = sorted((TAKEN.union(more) & recorded.keys()) - given.keys())
    values = [RawValue(name, recorded[name], f"{output / SETTINGS}") for name in taken]
    assistants = recorded.get("assistant_lora")
    if isinstance(assistants, list):  # a checkpoint is compared with their names; no such file is read
        values.append(RawValue("assistant_lora", [Path(str(each)).name for each in assistants], f"{output / SETTINGS}"))
    values += [RawValue(name, value, "command line") for name, value in given.items()]
    values.append(RawValue("output_dir", str(output), "command line"))
    return resolve([Source(SETTINGS, values)], complete=False).settings


def base_of(settings: Mapping[str, object]) -> str:
    """Return the base model that a run's settings name, to be shown; empty for the flavour's own."""
    return as_flag_value(base) if (base := settings.get("pretrained_model_name_or_path")) else ""


def as_flag_value(value: object) -> str:
    """Format a recorded value for a command line; `...` for one that no such line can hold."""
    if isinstance(value, dict) and len(value) == 1:
        value = "=".join(map(str, *value.items()))
    return value if isinstance(value, str) and value.isprintable() and len(value) <= LONGEST_SHOWN else "..."
