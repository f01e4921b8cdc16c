"""`config export --to` another trainer: what is written is read back by its import, and the rest is said."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from simpletuner.app import main
from simpletuner.errors import SettingsError
from simpletuner.importing.exporting import comparable, differing
from simpletuner.importing.trainers.musubi import LAYERS
from simpletuner.settings import load, settings_as_json

RUN = {
    "model_type": "lora",
    "learning_rate": 3e-4,
    "max_train_steps": 700,
    "train_batch_size": 2,
    "seed": 5,
    "lora_rank": 8,
    "adam_weight_decay": 0.05,
    "gradient_accumulation_steps": 2,
}
ALL_LAYERS = "transformer_blocks.*,single_transformer_blocks.*"
FILES = {
    "ai-toolkit": "job.yaml",
    "kohya": "train.toml",
    "musubi": "musubi.toml",
    "diffusion-pipe": "main.toml",
    "onetrainer": "run.json",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    Path("photos", "a.png").touch()


@pytest.fixture
def run(capsys):
    """Run the command line in this process; return exit code and stderr."""

    def run(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        return int(caught.value.code or 0), capsys.readouterr().err

    return run


def exported(run, to: str, **settings: object) -> tuple[list[str], dict[str, object], list[dict]]:
    """Export a run and import it again; return what was not said, the settings, and the datasets."""
    Path("given.json").write_text(json.dumps({"data_backend_config": "data.json", **settings}))
    if not Path("data.json").exists():
        entry = {"id": "photos", "instance_data_dir": "photos", "resolution": 512, "repeats": 3}
        Path("data.json").write_text(json.dumps([entry | {"caption_lines": "one"}]))
    code, err = run("config", "export", f"--to={to}", f"--output={FILES[to]}", "--config=given.json")
    assert code == 0, err
    code, said = run("config", "import", FILES[to], "--output=back.toml", "--force")
    assert code == 0, said
    unsaid = [line.partition("not said there: ")[2] for line in err.splitlines() if "not said there: " in line]
    made = settings_as_json(load({}, Path("back.toml"), environment={}))
    return unsaid, made, json.loads(Path("back.datasets.json").read_text())


@pytest.mark.parametrize(
    ("to", "settings", "unsaid"),
    [
        ("ai-toolkit", {"aspect_bucket_alignment": 32, "gradient_accumulation_steps": 1}, ["allow_dataset_over"]),
        ("kohya", {"max_grad_norm": 0.5}, ["dataset `photos`: buckets of any", "dataset `photos`: caption_lines"]),
        ("diffusion-pipe", {"aspect_bucket_alignment": 16, "seed": 42}, ["dataset `photos`: skip_uncaptioned"]),
    ],
)
def test_a_run_that_another_trainer_can_have_comes_back_as_it_was(run, to, settings, unsaid):
    given = {**RUN, "model_family": "flux", "lora_target_modules": ALL_LAYERS, "flow_schedule_shift": 1.0, **settings}
    found, made, [data] = exported(run, to, **given, caption_dropout_probability=0.0)
    assert [each[: len(start)] for each, start in zip(found, unsaid, strict=True)] == unsaid, found
    assert {name: made[name] for name in given} == given
    assert (data["instance_data_dir"], data["resolution"], data["repeats"]) == ("photos", 512, 3)


@pytest.mark.parametrize(
    ("family", "changes", "written"),
    [
        ("wan", {"model_flavour": "t2v-480p-1.3b-2.1", "optimizer": "lion", "adam_beta2": 0.98}, "lion_pytorch.Lion"),
        ("qwen_image", {"flow_schedule_auto_shift": True, "flow_schedule_shift": None}, "qwen_shift"),
        ("z_image", {"model_flavour": "base", "flow_use_uniform_schedule": True, "flow_schedule_shift": 1}, "uniform"),
        ("flux2", {"model_flavour": "klein-4b", "lr_scheduler": "cosine", "lr_warmup_steps": 0.1}, "klein-base-4b"),
        ("flux", {"model_flavour": "kontext"}, "networks.lora_flux"),
        ("wan", {"model_flavour": "i2v-14b-2.1", "lora_type": "lokr", "lokr_factor": 8}, "networks.lokr"),
    ],
)
def test_a_lora_comes_back_from_musubi_tuner_as_it_was(run, family, changes, written):
    layers = ",".join(LAYERS[family])
    given = {**RUN, "model_family": family, "lora_target_modules": layers, "aspect_bucket_alignment": 16, **changes}
    found, made, [data] = exported(run, "musubi", **given, caption_dropout_probability=0.0)
    assert {name: made[name] for name in given} == given and written in Path("musubi.toml").read_text()
    starts = ["the files of the base: name those of ", "its layout of LoRAs: export_format=kohya"]
    starts += ["dataset `photos`: buckets of any", "dataset `photos`: skip_uncaptioned"]
    assert [each[: len(start)] for each, start in zip(found, starts, strict=True)] == starts, found
    assert (data["instance_data_dir"], data["resolution"], data["repeats"]) == ("photos", 512, 3)


def test_what_musubi_tuner_does_not_train_is_refused(run):
    kontext = {"model_family": "flux", "model_flavour": "kontext", "lora_type": "lokr"}  # which its file would not say
    whole = {"model_family": "wan", "model_type": "full"}
    for settings in ({"model_family": "sdxl"}, {"model_family": "flux"}, whole, kontext):
        code, err = run(
            *("config", "export", "--to=musubi", "--instance_data_dir=photos"),
            *(f"--{name}={value}" for name, value in {"model_type": "lora", **settings}.items()),
        )
        assert code == 2 and "musubi-tuner has no word for" in err


@pytest.mark.parametrize(("length", "epochs"), [({"max_train_steps": 9}, 1_000_000), ({"num_train_epochs": 7}, 7)])
def test_diffusion_pipe_is_given_a_rate_and_epochs_whatever_they_are(run, length, epochs):
    """Silence would be an error there, or a rate of the optimizer's own."""
    exported(run, "diffusion-pipe", model_family="flux", model_type="lora", **length)
    written = tomllib.loads(Path("main.toml").read_text())
    assert (written["epochs"], written["optimizer"]["lr"], written.get("max_steps")) == (
        epochs,
        1e-5,
        length.get("max_train_steps"),
    )


def test_what_has_no_word_there_is_said(run):
    found, made, _ = exported(run, "diffusion-pipe", **RUN, model_family="flux", ema_decay=0.9, use_ema=True)
    names = {each.partition(" ")[0] for each in found if not each.startswith("dataset")}
    assert {"use_ema", "seed", "lora_target_modules", "aspect_bucket_alignment"} <= names
    assert all(made[name] != value for name, value in {"use_ema": True, "seed": 5}.items())


def test_text_encoders_of_sdxl_are_left_alone_in_diffusion_pipe(run):
    made = exported(run, "diffusion-pipe", **RUN, model_family="sdxl")[1]
    assert "text_encoder_1_lr = 0\ntext_encoder_2_lr = 0" in Path(FILES["diffusion-pipe"]).read_text()
    assert (made["model_family"], made["model_type"]) == ("sdxl", RUN["model_type"])


def test_a_run_of_onetrainer_counts_epochs(run):
    given = {**RUN, "model_family": "sdxl", "num_train_epochs": 7, "lr_scheduler": "cosine", "lr_end": 1.5e-4}
    given |= {"max_train_steps": None, "lr_warmup_steps": 10, "use_ema": True, "lora_alpha": 4.0, "seed": 42}
    found, made, [data] = exported(run, "onetrainer", **given, caption_dropout_probability=0.0)
    names = {each.partition(" =")[0] for each in found if "dataset" not in each}
    assert names == set() and data["repeats"] == 3, found
    written = json.loads(Path("run.json").read_text())
    # OneTrainer migrates a file without a version from the first one, and ends in a KeyError.
    assert (written["__version"], [each["__version"] for each in written["concepts"]]) == (11, [2])
    assert {name: made[name] for name in given} == given | {"lora_alpha": 4}


def test_layers_of_attention_are_named_for_ai_toolkit(run):
    found, made, _ = exported(run, "ai-toolkit", **RUN, model_family="flux", flow_use_uniform_schedule=True)
    [process] = yaml.safe_load(Path("job.yaml").read_text())["config"]["process"]
    assert process["network"]["network_kwargs"]["only_if_contains"][:3] == ["to_q", "to_k", "to_v"]
    assert "transformer_blocks.*to_q*" in str(made["lora_target_modules"])
    assert not [each for each in found if each.startswith("lora_target_modules")]
    assert made["flow_use_uniform_schedule"] is True


GENERATED = st.fixed_dictionaries(
    {"model_family": st.sampled_from(["sdxl", "flux"])},
    optional={
        "learning_rate": st.sampled_from([1e-5, 3e-4, 1.0]),
        "optimizer": st.sampled_from(["adamw", "lion", "prodigy", "adamw_schedulefree"]),
        "lr_scheduler": st.sampled_from(["constant", "cosine", "linear", "polynomial"]),
        "lr_warmup_steps": st.sampled_from([0, 7, 0.25]),
        "lr_end": st.sampled_from([0.0, 1e-7]),
        "adam_weight_decay": st.sampled_from([0.0, 0.1]),
        "adam_beta2": st.sampled_from([0.95, 0.99]),
        "adam_epsilon": st.sampled_from([1e-8, 1e-6]),
        "max_grad_norm": st.sampled_from([0.0, 0.3, 2.0]),
        "train_batch_size": st.integers(1, 5),
        "gradient_accumulation_steps": st.integers(1, 3),
        "num_train_epochs": st.integers(1, 9),
        "mixed_precision": st.sampled_from(["bf16", "no"]),
        "lora_rank": st.sampled_from([1, 16]),
        "lora_alpha": st.sampled_from([1.0, 4.0]),
        "lora_type": st.sampled_from(["lora", "dora", "lokr"]),
        "lora_dropout": st.sampled_from([0.0, 0.1]),
        "lora_target_modules": st.sampled_from(["", "*", "to_q,to_k", "*attn*"]),
        "caption_dropout_probability": st.sampled_from([0.0, 0.2]),
        "aspect_bucket_alignment": st.sampled_from([32, 64]),
        "use_ema": st.booleans(),
        "ema_decay": st.sampled_from([0.9, 0.999]),
        "snr_gamma": st.sampled_from([1.0, 5.0]),
        "flow_schedule_shift": st.sampled_from([1.0, 3.0]),
        "flow_use_uniform_schedule": st.booleans(),
        "base_model_precision": st.sampled_from(["int8", "nf4"]),
        "seed": st.integers(0, 9),
    },
)
"""Settings of which another program may have a word, in any company."""


@pytest.mark.parametrize("to", FILES)
@settings_of_hypothesis(
    max_examples=int(os.environ.get("ROUND_TRIPS", "4")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(generated=GENERATED)
def test_every_difference_that_is_not_said_is_none(run, to, generated):
    """What the import makes of the file equals the run, but for what was said and for what trains nothing else."""
    family = {"model_family": "z_image"} if to == "musubi" else {}
    given = {"instance_data_dir": "photos", "model_type": "lora", **generated, **family}
    Path("given.json").write_text(json.dumps(given))
    try:
        loaded = load({}, Path("given.json"), environment={})
    except SettingsError:
        return  # contradict each other
    code, err = run("config", "export", f"--to={to}", f"--output={FILES[to]}", "--config=given.json")
    if code:
        assert code == 2 and "has no word for" in err and "this is a bug" not in err, err
        return
    code, imported = run("config", "import", FILES[to], "--output=back.toml", "--force")
    assert code == 0, (imported, Path(FILES[to]).read_text())
    made = load({}, Path("back.toml"), environment={})
    said = {line.partition("not said there: ")[2].partition(" ")[0] for line in err.splitlines()}
    assert {*differing(comparable(loaded), comparable(made))} <= said | WRITTEN_AS_LAYERS


WRITTEN_AS_LAYERS = {"lora_target_modules"}
"""The same layers by other patterns: test_layers_of_attention_are_named_for_ai_toolkit."""


@pytest.mark.parametrize("to", FILES)
def test_what_is_no_folder_of_images_is_not_trained_there(run, to):
    entries = [
        {"id": "first", "instance_data_dir": "photos", "resolution": 1, "resolution_type": "area"},
        {"id": "second", "instance_data_dir": "photos", "resolution": 512, "repeats": 2, "conditioning_data": "masks"},
        {"id": "masks", "dataset_type": "conditioning", "conditioning_type": "mask", "instance_data_dir": "photos"},
        {"id": "held", "dataset_type": "eval", "instance_data_dir": "photos"},
        {"id": "off", "instance_data_dir": "photos", "disabled": True},
        {"id": "bucket", "type": "aws", "aws_bucket_name": "b", "aws_secret_access_key": "unseen7"},
    ]
    Path("data.json").write_text(json.dumps(entries))
    family = "z_image" if to == "musubi" else "flux"
    run_of = (f"--model_family={family}", "--model_type=lora", "--data_backend_config=data.json")
    code, err = run("config", "export", f"--to={to}", f"--output={FILES[to]}", *run_of)
    assert code == 0, err
    for name, kind in (("masks", "conditioning"), ("held", "eval"), ("bucket", "no folder")):
        assert f"dataset `{name}` ({kind}): folders of images alone are written" in err
    assert "`off`" not in err and "repeats" not in err, "the second one's are its own"
    assert not [path for path in Path().glob("*.*") if "unseen7" in path.read_text() and path.name != "data.json"]
    code, err = run("config", "import", FILES[to], "--output=back.toml")
    assert code == 0, err
    made = json.loads(Path("back.datasets.json").read_text())
    assert [(each["resolution"], each.get("repeats", 0)) for each in made] == [(1000, 0), (512, 2)]
    Path("data.json").write_text(json.dumps(entries[-1:]))
    code, err = run("config", "export", f"--to={to}", f"--output={FILES[to]}", *run_of)
    assert code == 2 and "no dataset of this run is a folder of images" in err


@pytest.mark.parametrize(
    ("to", "settings", "said"),
    [
        ("kohya", {"model_family": "wan", "model_type": "lora"}, "written for LoRAs, and not for wan"),
        ("kohya", {"model_family": "sdxl"}, "whole models"),
        ("diffusion-pipe", {"model_family": "pixart_sigma"}, "diffusion-pipe does not train pixart_sigma"),
        ("ai-toolkit", {"model_family": "sana"}, "ai-toolkit does not train sana"),
    ],
)
def test_a_run_that_another_trainer_cannot_have_is_refused(run, to, settings, said):
    flags = [f"--{name}={value}" for name, value in settings.items()]
    code, err = run("config", "export", f"--to={to}", f"--output={FILES[to]}", "--instance_data_dir=photos", *flags)
    assert code == 2 and said in err and "this is a bug" not in err, err
    assert not Path(FILES[to]).exists()


def test_a_file_of_sd_scripts_names_the_folder_that_it_cannot_save_without(run):
    given = {**RUN, "model_family": "sdxl", "output_dir": "out/mine"}
    _, made, _ = exported(run, "kohya", **given)
    assert made["output_dir"] == "out/mine"


def test_files_are_of_the_trainers_format(run):
    flux = ("--model_family=flux", "--model_type=lora", "--instance_data_dir=photos")
    code, err = run("config", "export", "--to=kohya", "--output=run.json", *flux)
    assert code == 2 and "name it run.toml" in err
    code, err = run("config", "export", "--to=kohya", *flux)
    assert code == 2 and "give --output=run.toml" in err


@pytest.mark.parametrize(
    ("to", "zeros"),
    [
        ("ai-toolkit", {"adam_weight_decay": 0, "max_grad_norm": 0}),
        ("kohya", {"adam_weight_decay": 0, "max_grad_norm": 0}),
        ("diffusion-pipe", {"adam_weight_decay": 0, "max_grad_norm": 0}),
        ("onetrainer", {"adam_weight_decay": 0, "max_grad_norm": 0}),
    ],
)
def test_zero_is_said_and_so_is_the_shift_of_the_family(run, to, zeros):
    given = {**RUN, "model_family": "flux", "lora_target_modules": ALL_LAYERS, "gradient_accumulation_steps": 1}
    found, made, _ = exported(run, to, **{**given, **zeros})
    assert {name: made[name] for name in zeros} == zeros
    assert not [each for each in found if each.partition(" ")[0] in zeros], found
    shift = [each for each in found if each.startswith("flow_schedule_shift")]
    # ai-toolkit draws without a shift where levels are not uniform.
    assert shift == (["flow_schedule_shift = 3.158: it would be 1"] if to == "ai-toolkit" else []), found
    assert made["flow_schedule_shift"] == (1 if to == "ai-toolkit" else 3.158)
    code, err = run("train", "--dry_run", "--config=back.toml")
    assert code == 0 and "has no effect" not in err, err
