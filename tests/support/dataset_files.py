"""Dataset files, and what is said of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpletuner.data.config.datasets import load_datasets
from simpletuner.errors import SettingsError
from simpletuner.settings.declared.sections import Data


def data_of(folder: Path, *entries: dict, **globals_) -> Data:
    path = folder / "multidatabackend.json"
    path.write_text(json.dumps(list(entries)))
    return Data(data_backend_config=path, **globals_)


def image(**values) -> dict:
    return {"id": "one", "type": "local", "instance_data_dir": "pictures", **values}


def refusal(data: Data) -> str:
    with pytest.raises(SettingsError) as caught:
        load_datasets(data)
    return caught.value.message
