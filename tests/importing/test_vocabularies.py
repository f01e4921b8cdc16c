"""Every key that another trainer has is answered: by a setting, or by a reason; defaults lose nothing.

`vocabulary/PROGRAM.txt` has a key per line with its default and kind, taken from the program's own argument
parsers and configuration classes.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from trainer_files import answers, put, vocabulary

from simpletuner.errors import SettingsError
from simpletuner.importing.original import UnmappedValue
from simpletuner.importing.trainers.ai_toolkit import AI_TOOLKIT

OTHER: dict[str, list[Any]] = {
    "flag": [True, False],
    "int": [7],
    "float": [7.5],
    "str": ["other"],
    "list": [["other"]],
    "table": [{"other": 1}],
    "any": [7, "other", True],
}
"""Values by kind, of which one at least is not the default."""


PROCESS = {
    "type": "sd_trainer",
    "training_folder": "output",
    "network": {"type": "lora", "linear": 4},
    "datasets": [{"folder_path": "pictures", "caption_ext": "txt"}],
    "model": {"name_or_path": "some/model", "arch": "sdxl"},
    "sample": {"samples": [{"prompt": "a cat"}]},
}


def ai_toolkit(name: str, value: Any) -> list[UnmappedValue]:
    process = copy.deepcopy(PROCESS)
    put(process, name, value)
    return answers(AI_TOOLKIT, {"job": "extension", "config": {"name": "mine", "process": [process]}})


PROGRAMS = {"ai_toolkit": ai_toolkit}
MODEL = ("model.arch", "model.is_", "network", "model.name_or_path")
"""Keys whose defaults are another model than the file's."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_key_of_a_program_is_answered(program):
    unknown, lost = [], []
    for name, default, kind in vocabulary(program):
        for value in OTHER[kind]:
            try:
                said = PROGRAMS[program](name, value)
            except SettingsError:
                continue  # a sentence
            unknown += [item.given for item in said if item.reason.startswith("not a key of")]
        if not name.startswith(MODEL):
            lost += [item.given for item in PROGRAMS[program](name, default) if item.effect == "lost"]
    assert (unknown, lost) == ([], [])
