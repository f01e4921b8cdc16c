"""What becomes of the JSON files of DeepSpeed's documentation and of others who use it; samples.txt shows all of it.

They are the samples of its reference and its ZeRO tutorials, transformers' and those that SimpleTuner documents.
Regenerate samples.txt with `python tests/settings/foreign/deepspeed/test_samples.py`, and read the difference as a user
would.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from simpletuner.errors import SettingsError
from simpletuner.settings import load
from simpletuner.settings.resolving.loading import settings_as_json

SAMPLES = Path(__file__).with_name("samples")
GOLDEN = SAMPLES / "samples.txt"
NOWHERE = {"SIMPLETUNER_ACCELERATE_CONFIG": "none"}


def render(path: Path) -> str:
    """Return what one sample becomes: settings with their places, warnings, or mistakes."""
    try:
        loaded = load({"deepspeed_config": path.name}, complete=False, environment=NOWHERE)
    except SettingsError as error:
        return f"# {path.name}\n  error: {error.message}\n"
    values = settings_as_json(loaded)
    settings = [f"  {name} = {json.dumps(values[name])}  ({origin})" for name, origin in loaded.origins.items()]
    return "\n".join([f"# {path.name}", *settings, *(f"  warning: {text}" for text in loaded.warnings), ""])


def render_all() -> str:
    with contextlib.chdir(SAMPLES):
        return "\n".join(render(path) for path in sorted(SAMPLES.glob("*.json")))


def test_each_sample_becomes_the_reviewed_settings_or_mistakes():
    assert render_all() == GOLDEN.read_text(encoding="utf-8")


if __name__ == "__main__":
    GOLDEN.write_text(render_all(), encoding="utf-8")
