"""Files of other trainers with values of odd kinds end with a sentence, never with a traceback."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trainer_files import put, vocabulary

from simpletuner.commands.config_import import TRAINERS, import_files
from simpletuner.errors import SettingsError
from simpletuner.settings.foreign.recognition import PROGRAMS

JUNK = st.recursive(
    st.sampled_from([None, True, -1, 0, 1.5, 1e300, "", "x", "1e-4", "C:\\a", "a b=c", "0", "1,2"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "path", "id"]), inner, max_size=2)
    ),
    max_leaves=4,
)
BASES: dict[str, dict[str, Any]] = {
    "sd_scripts": {"network_module": "networks.lora", "dataset_config": "data.json"},
    "diffusion_pipe": {"model": {"type": "flux"}, "adapter": {"type": "lora"}, "dataset": "folders.json"},
    "musubi": {"network_module": "networks.lora_wan", "optimizer_type": "adamw", "dataset_config": "clips.json"},
    "kohya_gui": {"LoRA_type": "LyCORIS/LoKr", "train_data_dir": "train"},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train/2_a").mkdir(parents=True)
    Path("train/2_a/a.png").touch()
    Path("folders.json").write_text('{"directory": [{"path": "train/2_a"}]}')
    Path("clips.json").write_text('{"datasets": [{"video_directory": "train"}]}')
    Path("data.json").write_text('{"datasets": [{"subsets": [{"image_dir": "train/2_a"}]}]}')


def end_with_a_sentence(file: str, values: object, output: str) -> None:
    Path(file).write_text(json.dumps(values))
    try:
        import_files(Path(file), Path(output), True, True)
    except SettingsError as error:
        assert error.message and "this is a bug" not in error.message


@pytest.mark.parametrize("program", BASES)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_values_of_any_kind_end_with_a_sentence(program, data):
    names = st.sampled_from([name for name, _, _ in vocabulary(program)])
    values = copy.deepcopy(BASES[program])
    for name, value in data.draw(st.dictionaries(names, JUNK, min_size=1, max_size=6)).items():
        put(values, name, value) if program == "diffusion_pipe" else values.update({name: value})
    end_with_a_sentence("run.json", values, "run.toml")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_datasets_of_any_kind_end_with_a_sentence(data):
    """`datasets` is a list, or the file is no file of datasets."""
    subset = st.dictionaries(st.sampled_from(["image_dir", "num_repeats", "resolution", "class_tokens"]), JUNK)
    dataset = st.dictionaries(st.sampled_from(["resolution", "batch_size", "enable_bucket", "control_directory"]), JUNK)
    clips = st.dictionaries(st.sampled_from(["video_directory", "target_frames", "source_fps"]), JUNK)
    entry = data.draw(dataset) | data.draw(
        st.fixed_dictionaries({"subsets": JUNK | st.lists(subset, max_size=2)}) | clips
    )
    folder = st.dictionaries(st.sampled_from(["path", "num_repeats", "mask_path", "cache_shuffle_num"]), JUNK)
    sizes = st.dictionaries(st.sampled_from(["resolutions", "frame_buckets", "enable_ar_bucket"]), JUNK)
    end_with_a_sentence("pipe.json", data.draw(sizes) | {"directory": [data.draw(folder)]}, "run.json")
    end_with_a_sentence("data.json", {"general": data.draw(JUNK | dataset), "datasets": [entry]}, "run.json")


def test_ten_thousand_names_end_with_a_sentence():
    values = {"LoRA_type": "Standard", **{f"name_{number}": number for number in range(1, 10_000)}}
    Path("run.json").write_text(json.dumps(values))
    with pytest.raises(SettingsError, match="at most 2,000 names"):
        import_files(Path("run.json"), Path("run.toml"), True)


@pytest.mark.parametrize(
    ("file", "text", "output", "said"),
    [
        (
            "deep.json",
            '{"training_method": "LORA", "a": ' + "[" * 50_000 + "]" * 50_000 + "}",
            "run.toml",
            "too deeply",
        ),
        ("deep.json", '[{"path": "train"}, ' + "[" * 50_000 + "]" * 50_000 + "]", "data.json", "too deeply"),
        (
            "run.toml",
            f'network_module = "networks.lora"\nv2 = false\nsample_prompts = "{"x" * 5_000}.txt"',
            "o.toml",
            "no images",
        ),
    ],
)
def test_what_python_gives_up_on_ends_with_a_sentence(file, text, output, said):
    Path(file).write_text(text)
    with pytest.raises(SettingsError, match=said):
        import_files(Path(file), Path(output), True)


@pytest.mark.parametrize("program", TRAINERS.values(), ids=lambda each: each.name)
@pytest.mark.parametrize("text", ['{"a": 1}', "{}", '{"config": {"process": 1}}', '{"model": 1, "datasets": 2}'])
def test_a_file_that_is_not_of_the_program_that_is_named_ends_with_a_sentence(program, text):
    Path("run.json").write_text(text)
    word = next(word for word, name in PROGRAMS.items() if name == program.name)
    with pytest.raises(SettingsError):
        import_files(Path("run.json"), Path("run.toml"), True, program=word)
