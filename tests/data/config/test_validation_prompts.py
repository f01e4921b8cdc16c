"""Prompts of validation: the flags, and files of JSON lines."""

from __future__ import annotations

import pytest

from simpletuner.data.config.validation_prompts import ValidationPrompt, load_prompts
from simpletuner.errors import SettingsError
from simpletuner.settings.declared.sections import Validation

WRONG = """{"prompt": "fine"}

{"prompt": "a", "guidence": 3, "seed": -1}
{"seed": 3}
{"prompt": 3, "resolution": "big"}
"""


def test_prompts_of_flags_come_first_and_the_empty_one_is_a_prompt(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '\ufeff{"prompt": "猫 🎨", "seed": 7, "resolution": "96X64, 64", "guidance": 0}\r\n\r\n'
        '{"prompt": "", "negative_prompt": "", "num_inference_steps": 3}',
        encoding="utf-8",
    )
    assert load_prompts(Validation(validation_prompt=["", "a cat"], validation_prompt_file=path)) == [
        ValidationPrompt(prompt=""),
        ValidationPrompt(prompt="a cat"),
        ValidationPrompt(prompt="猫 🎨", seed=7, resolution="96x64,64", guidance=0),
        ValidationPrompt(prompt="", negative_prompt="", num_inference_steps=3),
    ]
    assert load_prompts(Validation()) == []


def test_all_mistakes_of_a_file_are_named_with_their_lines(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(WRONG)
    with pytest.raises(SettingsError) as caught:
        load_prompts(Validation(validation_prompt_file=path))
    assert [str(mistake).replace(f"{tmp_path}/", "") for mistake in caught.value.mistakes] == [
        "guidence (prompts.jsonl:3): unknown key; did you mean `guidance`?",
        "seed = -1 (prompts.jsonl:3): use a whole number of at least 0, or none",
        "prompt (prompts.jsonl:4): is missing",
        "prompt = 3 (prompts.jsonl:5): use text in quotes",
        "resolution = 'big' (prompts.jsonl:5): write an edge such as 1024, 1216x832, or several sizes, such as "
        "1024x1024,1280x768",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}\n{"prompt": "b",}', "prompts.jsonl:2 does not parse"),
        ('["a"]', "prompts.jsonl:1 does not parse: it is no object"),
        ("\n\n", "prompts.jsonl holds no prompts"),
        (None, "prompts.jsonl: No such file"),
    ],
)
def test_a_file_that_holds_no_prompts_is_one_sentence(text, said, tmp_path):
    path = tmp_path / "prompts.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match=said):
        load_prompts(Validation(validation_prompt_file=path))
