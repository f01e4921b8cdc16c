"""`simpletuner train`: resolve the settings, then run here or start the ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner.commands.options import as_arguments
from simpletuner.errors import SettingsError
from simpletuner.settings import load
from simpletuner.settings.rules import unsupported


def train(flags: Mapping[str, Any], config: Path | None) -> None:
    """Fine-tune a model. Run the same command again and it resumes."""
    from simpletuner.models.registry import check_model
    from simpletuner.ops.launch import is_rank, launch_ranks, settings_of_rank

    loaded = load(flags, config)
    check_model(loaded.settings.model)
    if missing := unsupported(loaded.settings):
        raise SettingsError("\n  ".join(missing), "leave it out, or wait for a later version")
    if loaded.settings.launch.num_processes > 1 and not is_rank(os.environ):
        launch_ranks(loaded.settings, ["train", *as_arguments(flags, config)])
        return
    from simpletuner.worker import run_rank

    run_rank(settings_of_rank(loaded, os.environ))
