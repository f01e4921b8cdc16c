"""`train --dry_run` and `config validate` find what `train` finds before it imports torch, and print the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpletuner.app import main
from simpletuner.page.editing.fields import check, mistakes_of
from simpletuner.settings.files.raw_values import RawValue, Source

GOOD = {"model_family": "sdxl", "model_flavour": "tiny", "instance_data_dir": "pictures"}
DATASETS = {"model_family": "sdxl", "model_flavour": "tiny", "data_backend_config": "d.json"}
CASES = {
    "no such family": (GOOD | {"model_family": "sdx\nl"}, None),
    "no such split": (GOOD | {"fsdp_enable": True, "context_parallel_size": 2, "num_processes": 2}, None),
    "a long name": (GOOD | {"instance_data_dir": "x" * 5000}, None),
    "no folder": (GOOD | {"instance_data_dir": "gone"}, None),
    "no dataset file": (DATASETS, None),
    "dataset file is a folder": (DATASETS | {"data_backend_config": "pictures"}, None),
    "empty dataset file": (DATASETS, ""),
    "unknown key of a dataset": (
        DATASETS,
        [{"id": "a", "type": "local", "instance_data_dir": "pictures", "repeat": 1}],
    ),
    "no folder of a dataset": (DATASETS, [{"id": "a", "type": "local", "instance_data_dir": "gone"}]),
    "no secret": (GOOD | {"run_secret_file": "gone"}, None),
    "no checkpoint": (GOOD | {"resume_from_checkpoint": "gone"}, None),
    "a GPU twice": (GOOD | {"gpu_ids": "0,0"}, None),
    "a size that cannot be sampled": (GOOD | {"validation_resolution": "100"}, None),
    "a folder of another family": (GOOD | {"model_flavour": "", "pretrained_model_name_or_path": "sd3"}, None),
    "a folder of no model": (GOOD | {"model_flavour": "", "pretrained_model_name_or_path": "pictures"}, None),
    "offloading to a file": (GOOD | {"zero_stage": 3, "offload_param": "nvme", "offload_param_path": "file"}, None),
}
WARNED = GOOD | {"flow_schedule_shift": 1, "fsdp_enable": True, "fsdp_version": 1, "accelerate_config": "a.yaml"}


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """Run a command and return its exit code and the lines of stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SIMPLETUNER_ACCELERATE_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("pictures").mkdir()
    Path("pictures", "a.png").touch()
    Path("file").touch()
    Path("sd3").mkdir()
    Path("sd3/model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    Path("a.yaml").write_text("distributed_type: 'NO'\ntpu_name: x\n")

    def command(*arguments: str) -> tuple[int, list[str]]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return int(ended.value.code or 0), capsys.readouterr().err.splitlines()

    return command


@pytest.mark.parametrize("case", CASES)
def test_the_same_is_found_by_a_dry_run_by_validate_and_by_train(said, case):
    settings, datasets = CASES[case]
    Path("c.json").write_text(json.dumps(settings))
    if datasets is not None:
        Path("d.json").write_text(datasets if isinstance(datasets, str) else json.dumps(datasets))
    code, lines = said("config", "validate", "c.json")
    assert code in (2, 3, 4) and lines[0].startswith("error: ")
    assert said("train", "--dry_run", "--config=c.json") == (code, lines)
    assert said("train", "--config=c.json", "--resolution_type=pixel") == (code, lines)
    assert not Path("output").exists()


@pytest.mark.parametrize("case", CASES)
def test_each_answer_is_a_line_with_a_place_and_a_hint(said, case):
    settings, datasets = CASES[case]
    Path("c.json").write_text(json.dumps(settings, indent=0))
    if datasets is not None:
        Path("d.json").write_text(datasets if isinstance(datasets, str) else json.dumps(datasets))
    _, (*mistakes, hint) = said("config", "validate", "c.json")
    lines = {name: line for line, name in enumerate(settings, start=2) if settings[name] != GOOD.get(name)}
    places = [settings.get("data_backend_config"), *(f"{name}: c.json:{line}" for name, line in lines.items())]
    assert all(any(place and place in mistake for place in places) for mistake in mistakes)
    assert hint.startswith("hint: ")


def test_model_settings_and_datasets_are_judged_together_the_model_first(said):
    Path("d.json").write_text('[{"id": "a", "repeat": 1}]')
    mistaken = {"model_family": "sdlx", "data_backend_config": "d.json", "sed": 1, "crop": "x", "machine_rank": 3}
    Path("c.json").write_text(json.dumps(mistaken))
    code, lines = said("config", "validate", "c.json")
    assert (code, len(lines)) == (2, 7)
    assert lines[0] == "error: Unknown model_family 'sdlx'; did you mean `sdxl`? [model_family: c.json:1]"
    assert "sed (c.json:1)" in lines[1] and "crop = 'x'" in lines[2] and "machine_rank = 3" in lines[3]
    assert "repeat" in lines[4] and lines[6].startswith("hint: `simpletuner models`")
    Path("c.json").write_text(json.dumps(DATASETS | {"model_family": "sdlx"}))
    assert len(said("config", "validate", "c.json")[1]) == 4, "settings that are valid, a family and a dataset"


def test_all_mistakes_about_model_files_and_data_are_said_at_one_start(said):
    lora = {"model_type": "lora", "assistant_lora": "/nope", "lora_init": "/nope2"}
    wrong = lora | {"aspect_bucket_alignment": 12, "validation_resolution": "100", "run_secret_file": "gone"}
    wrong |= {"gpu_ids": "0,0", "instance_data_dir": "gone", "resume_from_checkpoint": "checkpoint-000009"}
    Path("c.json").write_text(json.dumps(GOOD | wrong))
    code, lines = said("train", "--dry_run", "--config=c.json")
    assert code == 2 and len(lines) == 9, lines
    for name in (*(wrong.keys() - {"model_type", "instance_data_dir"}), "dataset `gone`"):
        assert sum(f"{name} = " in line or name in line.partition(":")[0] for line in lines[:-1]) == 1, name
    code, more = said("train", "--dry_run", "--config=c.json", "--export_format=foo,diffusers", "--model_family=wan")
    assert code == 2 and sum("foo is not known" in line or "/nope" in line for line in more) == 3, more
    Path("c.json").write_text(json.dumps(GOOD | {"instance_data_dir": "gone", "push_to_hub": True}))
    assert said("train", "--dry_run", "--config=c.json")[0] == 4, "no settings are wrong"
    Path("prompts.jsonl").write_text('{"prompt": "x", "resolution": "99x99"}')
    unknown = GOOD | {"model_family": "sdlx", "validation_prompt_file": "prompts.jsonl"}
    Path("c.json").write_text(json.dumps(unknown))
    assert len(said("train", "--dry_run", "--config=c.json")[1]) == 2, "sizes are of a family that is known"


def test_all_folders_and_tables_that_are_missing_are_said_at_one_start(said):
    entries = [{"id": f"d{each}", "type": "local", "instance_data_dir": f"gone{each}"} for each in range(120)]
    table = {"caption_strategy": "csv", "parquet": {"path": "gone.csv"}}
    entries[1] |= {"instance_data_dir": "pictures", **table}
    Path("d.json").write_text(json.dumps(entries))
    Path("c.json").write_text(json.dumps(DATASETS))
    code, lines = said("train", "--dry_run", "--config=c.json")
    assert code == 4 and len(lines) == 102, lines
    assert "dataset `d0`: there is no folder 'gone0'" in lines[0] and "no table 'gone.csv'" in lines[1]
    assert lines[100].strip() == "and 20 more [data_backend_config: c.json:1]"
    assert lines[101] == "hint: set instance_data_dir to your images; then: set parquet.path to it"


def test_the_page_shows_each_of_several_mistakes_beside_its_setting_with_its_hint(said):
    wrong = {"lora_init": "gone", "pretrained_model_name_or_path": "/gone", "aspect_bucket_alignment": 12, "seed": "x"}
    values = [RawValue(name, value, "c.toml:1") for name, value in (GOOD | wrong).items()]
    for given in (values, values[:-1]):
        found = [each for error in check([Source("c.toml", given)])[1] for each in mistakes_of(error)]
        assert len(found) == len(set(found)) == len(wrong) - (given is not values)
        assert {name for name, _ in found} == {each.name for each in given} & {*wrong}
        sentences = dict(found)
        assert sentences["pretrained_model_name_or_path"].endswith("is a folder, a .safetensors file or a hub id")
        assert "; name a pytorch_lora_weights.safetensors" in sentences["lora_init"]


def test_a_dry_run_prints_the_warnings_of_validate(said):
    Path("c.json").write_text(json.dumps(WARNED))
    code, lines = said("config", "validate", "c.json")
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert (code, len(warnings)) == (0, 3), lines
    assert said("train", "--dry_run", "--config=c.json") == (0, [line for line in lines if "all valid" not in line])


def test_checkpoints_that_are_there_are_accepted(said):
    Path("output/checkpoints/checkpoint-000001").mkdir(parents=True)
    Path("c.json").write_text(json.dumps(GOOD | {"resume_from_checkpoint": "checkpoint-000001"}))
    assert said("train", "--dry_run", "--config=c.json") == (0, [])
