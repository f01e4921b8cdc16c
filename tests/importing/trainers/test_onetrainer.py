"""`config import` of OneTrainer's configurations: what its code computes (23df3832) is written, named or refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import scanning
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy import array
from PIL import Image
from trainer_files import put, value_of, vocabulary

from simpletuner.commands.config_import import foreign_file, import_files
from simpletuner.data.config.dataset_file import DatasetEntry
from simpletuner.data.config.dataset_parsing import parse_datasets
from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.config.datasets import load_datasets
from simpletuner.data.images.geometry import bucket_sizes
from simpletuner.errors import SettingsError
from simpletuner.settings import load
from simpletuner.training.optimizers import LearningRate, Schedule

CONCEPT: dict[str, Any] = {"path": "img", "seed": 1, "balancing": 4.0, "include_subdirectories": True}
FLUX: dict[str, Any] = {
    "__version": 11,
    "training_method": "LORA",
    "model_type": "FLUX_DEV_1",
    "base_model_name": "black-forest-labs/FLUX.1-dev",
    "concepts": [CONCEPT],
    "transformer": {"weight_dtype": "BFLOAT_16"},
    "text_encoder": {"train": False},
    "text_encoder_2": {"train": False},
    "train_dtype": "BFLOAT_16",
    "timestep_distribution": "LOGIT_NORMAL",
    "dynamic_timestep_shifting": True,
}
SDXL: dict[str, Any] = {
    "model_type": "STABLE_DIFFUSION_XL_10_BASE",
    "base_model_name": "stabilityai/stable-diffusion-xl-base-1.0",
    "timestep_distribution": "UNIFORM",
    "dynamic_timestep_shifting": False,
}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def configuration(changes: dict[str, Any]) -> dict[str, Any]:
    values = copy.deepcopy(FLUX)
    for name, value in copy.deepcopy(changes).items():
        put(values, name, value)
    return values


def imported(changes: dict[str, Any], partial: bool = False):
    """Import a configuration; return its settings, its datasets and the written file's text."""
    Path("config.json").write_text(json.dumps(configuration(changes)))
    import_files(Path("config.json"), Path("run.toml"), force=True, partial=partial)
    return made()


def made():
    datasets = Path("run.datasets.json")
    own = load({}, Path("run.toml"), environment={}).settings
    return own, json.loads(datasets.read_text()) if datasets.exists() else [], Path("run.toml").read_text()


def test_a_configuration_is_a_run_with_onetrainers_defaults_where_it_is_silent():
    own, [data], text = imported({})
    assert (own.model.model_family, own.lora.lora_rank, own.lora.lora_alpha) == ("flux", 16, 1.0)
    assert own.lora.lora_target_modules == "*"  # every linear layer
    steps = own.optimizer
    assert (steps.learning_rate, steps.lr_warmup_steps, steps.lr_scheduler) == (3e-6, 200, "constant_with_warmup")
    assert (steps.adam_epsilon, steps.adam_weight_decay, steps.max_grad_norm) == (1e-8, 0.01, 1.0)
    assert (own.objective.flow_schedule_auto_shift, own.objective.flow_use_uniform_schedule) == (True, False)
    assert (own.training.num_train_epochs, own.training.train_batch_size) == (100, 1)
    assert (own.data.caption_dropout_probability, own.data.tokenizer_max_length) == (0.0, 77)
    assert (data["repeats"], data["resolution"], data["crop_style"]) == (3, 512, "random")
    assert "# lost" not in text


def test_an_older_configuration_is_what_its_migrations_make_of_it():
    old = {
        "__version": 3,
        "concepts.balancing": None,
        "concepts.repeats": 2,
        "concepts.validation_concept": False,
        **SDXL,
        "timestep_distribution": "LOGIT_NORMAL",
        "unet": {"weight_dtype": "NONE"},
        "weight_dtype": "NFLOAT_4",
        "lora_layers": "attentions",
        "lora_layer_preset": "attn-mlp",
        "save_after": 5,
        "save_after_unit": "STEP",
    }
    own, [data], _ = imported(old)
    assert (own.lora.lora_target_modules, own.lora.base_model_precision) == ("*attentions*", "nf4")
    assert (data["repeats"], own.checkpoints.checkpoint_step_interval) == (1, 5)
    oldest = {"__version": 0, **SDXL, "train_text_encoder": False, "train_text_encoder_2": False}
    oldest |= {"unet_learning_rate": 2e-4}
    oldest |= {"optimizer": "LION", "optimizer_beta2": 0.98, "min_snr_gamma": 5, "unet_weight_dtype": "INT_8"}
    oldest |= {"text_encoder": {}, "text_encoder_2": {}, "timestep_distribution": "UNIFORM"}
    own, _, _ = imported(oldest)
    assert (own.optimizer.optimizer, own.optimizer.adam_beta2, own.optimizer.learning_rate) == ("lion", 0.98, 2e-4)
    assert (own.objective.snr_gamma, own.lora.base_model_precision) == (5.0, "int8")
    drawn = {"__version": 3, "noising_weight": 1.0, "timestep_distribution": "UNIFORM"}
    with pytest.raises(SettingsError, match="does not draw noise levels so"):
        imported(drawn)
    own, _, text = imported({"__version": 3})
    assert own.objective.flow_use_uniform_schedule and "are migrated to UNIFORM there" in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 4, "lr_warmup_steps": 50}),
        ({"learning_rate_warmup_steps": 0.1}, {"lr_warmup_steps": 0.1}),
        ({"learning_rate_warmup_steps": 1}, {"lr_warmup_steps": 0.999999}),
        ({"learning_rate_scheduler": "COSINE"}, {"lr_scheduler": "cosine", "lr_end": 0.0}),
        (
            {"learning_rate_scheduler": "LINEAR", "learning_rate": 1e-4, "learning_rate_min_factor": 0.1},
            {"lr_scheduler": "linear", "lr_end": 1e-5},
        ),
        ({"learning_rate_scheduler": "COSINE_WITH_HARD_RESTARTS"}, {"lr_scheduler": "cosine"}),
        (
            {"learning_rate": 1e-4, "learning_rate_scaler": "BOTH", "batch_size": 4, "gradient_accumulation_steps": 4},
            {"learning_rate": 4e-4, "train_batch_size": 4},
        ),
        ({"loss_scaler": "BATCH", "batch_size": 4}, {"max_grad_norm": 0.25, "adam_epsilon": 2.5e-9}),
        ({"clip_grad_norm": None}, {"max_grad_norm": 0}),
        ({"lora_alpha": "", "learning_rate": "0.0003", "epochs": "7"}, {"lora_alpha": 1.0, "learning_rate": 3e-4}),
        ({"transformer": {"learning_rate": 5e-4}}, {"learning_rate": 5e-4}),
        ({"timestep_distribution": "LOGIT_NORMAL", "noising_weight": 0.5}, {"flow_sigmoid_scale": 1.5}),
        (
            {"timestep_distribution": "UNIFORM", "dynamic_timestep_shifting": False, "timestep_shift": 3.0},
            {"flow_use_uniform_schedule": True, "flow_schedule_shift": 3.0, "flow_schedule_auto_shift": False},
        ),
        (
            {
                "model_type": "STABLE_DIFFUSION_35",
                "text_encoder_3": {"train": False},
                "dynamic_timestep_shifting": False,
            },
            {"model_family": "sd3", "flow_schedule_shift": 1.0},
        ),
        ({"model_type": "FLUX_2", "resolution": "512"}, {"model_family": "flux2", "flow_schedule_shift": 1.8776}),
        ({"model_type": "FLUX_2", "resolution": "1024"}, {"flow_schedule_shift": 3.1582}),
        ({"ema": "GPU"}, {"use_ema": True, "ema_decay": 0.999, "ema_update_interval": 5, "ema_device": "accelerator"}),
        ({"layer_filter": "attn, ff.net"}, {"lora_target_modules": "*attn*,*ff.net*"}),
        ({"peft_type": "LOHA"}, {"lora_type": "loha"}),
        ({"peft_type": "OFT_2"}, {"lora_type": "oft", "lora_rank": 32}),
        (
            {"peft_type": "LOKR", "lokr_full_matrix": True, "lokr_decompose_factor": 8},
            {"lora_type": "lokr", "lora_rank": 65536, "lora_alpha": 65536.0, "lokr_factor": 8},
        ),
        ({"lora_decompose": True, "lora_decompose_output_axis": True}, {"lora_type": "dora"}),
        ({"dropout_probability": 0.1}, {"lora_dropout": 0.1}),
        ({"transformer": {"weight_dtype": "INT_W8A8"}}, {"base_model_precision": "int8", "base_model_compute": "int8"}),
        ({"transformer": {"weight_dtype": "NFLOAT_4"}}, {"base_model_precision": "nf4"}),
        ({"transformer": {"guidance_scale": 3.5}}, {"flux_guidance_value": 3.5}),
        ({"text_encoder_2_sequence_length": 256}, {"tokenizer_max_length": 256}),
        ({**SDXL, "loss_weight_fn": "MIN_SNR_GAMMA"}, {"snr_gamma": 5.0, "aspect_bucket_alignment": 64}),
        ({**SDXL, "force_v_prediction": True}, {"prediction_type": "v_prediction"}),
        ({**SDXL, "train_dtype": "FLOAT_16"}, {"mixed_precision": "bf16"}),
        ({**SDXL, "training_method": "FINE_TUNE"}, {"model_type": "full"}),
        (
            {"model_type": "CHROMA_1", "dynamic_timestep_shifting": False, "text_encoder.dropout_probability": 0.2},
            {"model_family": "chroma", "caption_dropout_probability": 0.2},
        ),
        ({"optimizer": {"optimizer": "ADAM"}}, {"optimizer": "adam", "adam_weight_decay": 0.0}),
        ({"optimizer": {"optimizer": "LION_8BIT"}}, {"optimizer": "lion", "adam_beta2": 0.999}),
        ({"optimizer": {"optimizer": "PRODIGY", "d_coef": 1.0, "decouple": True}}, {"optimizer": "prodigy"}),
        (
            {"optimizer": {"optimizer": "SCHEDULE_FREE_ADAMW"}, "learning_rate_scheduler": "COSINE"},
            {"optimizer": "adamw_schedulefree", "lr_scheduler": "constant_with_warmup"},
        ),
        ({"save_every": 100, "save_every_unit": "STEP"}, {"checkpoint_step_interval": 100}),
        ({"rolling_backup": True, "rolling_backup_count": 2}, {"checkpoints_total_limit": 2}),
        ({"tensorboard": True}, {"report_to": "tensorboard"}),
    ],
)
def test_what_a_key_means_there_is_what_is_written(changes, expected):
    own, _, _ = imported(changes)
    found = {name: value_of(own, name) for name in expected}
    assert found == {name: pytest.approx(value) if type(value) is float else value for name, value in expected.items()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text_encoder": {}}, "text encoders are not trained"),
        ({"transformer.train": False}, "the denoiser is always trained"),
        ({"transformer.model_name": "https://host/file.safetensors"}, "one pipeline folder"),
        ({"transformer.weight_dtype": "GGUF"}, "weights of this format"),
        ({"transformer": {"stop_training_after": 5, "stop_training_after_unit": "EPOCH"}}, "trained for 5 epochs"),
        ({"transformer.attention_mask": True}, "padded text is not masked"),
        ({"text_encoder.dropout_probability": 0.1}, "drops captions by itself"),
        ({"learning_rate_scheduler": "COSINE_WITH_RESTARTS"}, "it ends at the full rate"),
        ({"learning_rate_scheduler": "REX"}, "does not have this schedule"),
        ({"optimizer": {"optimizer": "ADAFACTOR"}}, "steps scale with the weights"),
        ({"optimizer": {"optimizer": "CAME"}}, "it is not in this version"),
        ({"optimizer": {"optimizer": "ADAMW", "amsgrad": True}}, "optimizer.amsgrad = true"),
        ({"optimizer": {"optimizer": "PRODIGY", "d_coef": 2.0}}, "optimizer.d_coef = 2.0"),
        ({"optimizer": {"optimizer": "PRODIGY", "weight_decay": 0.1, "decouple": False}}, "a part of the gradient"),
        ({"optimizer": {"optimizer": "SCHEDULE_FREE_ADAMW", "weight_lr_power": 1.0}}, "optimizer.weight_lr_power"),
        ({"optimizer": {"optimizer": "ADAMW_8BIT", "percentile_clipping": 5}}, "optimizer.percentile_clipping = 5"),
        ({"peft_type": "VERA"}, "this kind of adapter"),
        ({"train_dtype": "INT_8"}, "it would be bf16"),
        ({"timestep_distribution": "INVERTED_PARABOLA", "noising_weight": 7.7}, "does not draw noise levels so"),
        ({"noising_bias": 0.5}, "its mean at one half"),
        ({"max_noising_strength": 0.8}, "max_noising_strength = 0.8"),
        ({"loss_weight_fn": "P2"}, "Min-SNR or not at all"),
        ({"mae_strength": 0.5, "mse_strength": 0.5}, "the mean squared error"),
        ({"offset_noise_weight": 0.05}, "offset_noise_weight = 0.05"),
        ({"masked_training": True}, "outside of a mask counts 0.1 there"),
        ({"lora_decompose": True}, "lengths of columns"),
        ({"layer_filter": "attn[0-9]", "layer_filter_regex": True}, "regular expressions"),
        ({"training_method": "FINE_TUNE", "layer_filter": "attn"}, "all weights are trained"),
        ({"additional_embeddings": [{"placeholder": "x"}]}, "additional_embeddings"),
        ({"resolution": "512,768"}, "one of these sizes is drawn"),
        ({"resolution": "512x768"}, "cropped to this size"),
        ({"concepts.balancing": 1.5}, "passes are whole"),
        ({"concepts.balancing": 0.5}, "taken in turn"),
        ({"concepts.balancing_strategy": "SAMPLES"}, "taken in turn in each epoch"),
        ({"concepts.loss_weight": 0.5}, "loss_weight = 0.5"),
        ({"concepts.image": {"enable_random_flip": True}}, "never mirrored"),
        ({"concepts.text": {"tag_dropout_enable": True}}, "text.tag_dropout_enable"),
        ({"concepts.text": {"prompt_source": "concept", "prompt_path": "p.txt"}}, "the file is not here"),
        ({"unheard_of": 1}, "not a key of OneTrainer"),
    ],
)
def test_what_has_no_place_here_ends_the_import(changes, said):
    with pytest.raises(SettingsError) as caught:
        imported(changes)
    assert said in caught.value.message and "this version does not do" in caught.value.message
    imported(changes, partial=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "HI_DREAM_FULL"}, "config.json trains HI_DREAM_FULL"),
        ({"training_method": "EMBEDDING"}, "config.json trains by EMBEDDING"),
        ({"concepts": []}, "has no dataset of images"),
    ],
)
def test_a_configuration_that_trains_nothing_of_ours_is_one_sentence(changes, said):
    with pytest.raises(SettingsError, match=said):
        imported(changes)


def test_the_schedule_is_onetrainers():
    """As its lr_lambda_linear gives it, to a tenth of the rate."""
    given = {"learning_rate_scheduler": "LINEAR", "learning_rate": 1e-4, "learning_rate_min_factor": 0.1}
    own, _, _ = imported({**given, "learning_rate_warmup_steps": 0})
    ours = LearningRate(Schedule(20), own.optimizer)
    assert [ours.at(step) for step in range(20)] == pytest.approx([1e-4 * (1 - 0.9 * step / 20) for step in range(20)])


def test_buckets_are_those_of_onetrainer():
    """As its AspectBucketing gives them at 768 and a step of 64."""
    buckets = {(1024, 1024): (768, 768), (1600, 900): (1024, 576), (800, 1200): (640, 960)}
    buckets |= {(300, 300): (768, 768), (2000, 500): (1536, 384), (641, 479): (960, 640)}
    Path("img").mkdir()
    for number, size in enumerate(buckets):
        Image.new("RGB", size, (number, 0, 0)).save(f"img/{number}.png")
        Path(f"img/{number}.txt").write_text("a caption")
    own, [data], _ = imported({"resolution": "768"})
    [dataset] = parse_datasets([DatasetEntry.of(data, Path("x"))], Path("x"), own.data).of_kind(ImageDataset)
    sizes = bucket_sizes(dataset, array(list(buckets)), 64)
    assert list(map(tuple, sizes.tolist())) == list(buckets.values())


def test_concepts_have_their_kinds_captions_and_orders():
    Path("img/sub").mkdir(parents=True)
    for name in ("a.jpg", "b.jpg", "a-masklabel.png"):
        Path(f"img/{name}").touch()
    Path("prior").mkdir()
    Path("prior/my_dog.png").touch()
    Path("img/a.txt").write_text("a beach\n\na sunny beach\n")
    Path("one.txt").write_text("a photo of sks\n")
    others = [
        {"path": "val", "type": "VALIDATION"},
        {"path": "prior", "type": "PRIOR_PREDICTION", "text": {"prompt_source": "filename"}},
        {"path": "off", "enabled": False},
        {"path": "phrase", "text": {"prompt_source": "concept", "prompt_path": "one.txt"}},
    ]
    _, data, text = imported({"concepts": [CONCEPT, *others], "validation": True}, partial=True)
    first, held_out, prior, phrase = data
    assert held_out["dataset_type"] == "eval" and prior["is_regularisation_data"] is True
    assert "such as my_dog.png, stay there" in text
    assert (prior["caption_strategy"], phrase["instance_prompt"]) == ("filename", "a photo of sks")
    assert "one line of a caption file is drawn" in text and "img/b.jpg: trained with an empty one" in text
    assert "masks beside images, such as img/a-masklabel.png" in text and first["caption_lines"] == "alternatives"
    assert [each["id"] for each in imported({"concepts": [others[0], CONCEPT]}, partial=True)[1]] == ["img"]
    tags = {"enable_tag_shuffling": True, "keep_tags_count": 2}
    _, [data], _ = imported({"concepts.text": tags, "concepts.path": "x", "concepts.text_variations": 3})
    assert data["caption_shuffle"] == {
        "enable": True,
        "count": 3,
        "include_original": False,
        "split_on": "comma",
        "position_start": 2,
    }
    Path("img/sub/c.jpg").touch()
    with pytest.raises(SettingsError, match="images in subfolders"):
        imported({"concepts.include_subdirectories": False})


def test_concepts_and_samples_are_files_or_inside():
    Path("concepts.json").write_text("\ufeff" + json.dumps([CONCEPT, {**CONCEPT, "path": "C:\\Users\\me\\img"}]))
    sample = {"prompt": "a cat", "seed": 7, "width": 832, "diffusion_steps": 12, "negative_prompt": "ugly"}
    listed = [sample, {"prompt": "off", "enabled": False}, {"prompt": "x", "random_seed": True}]
    Path("samples.json").write_text(json.dumps(listed))
    names = {"concept_file_name": "concepts.json", "sample_definition_file_name": "samples.json"}
    own, data, text = imported({"concepts": None, **names})
    assert [each["id"] for each in data] == ["img", "img-2"] and "a path of Windows" in text
    assert (own.validation.validation_num_inference_steps, own.validation.validation_guidance) == (30, 3.5)
    first, second = map(json.loads, Path("run.prompts.jsonl").read_text().splitlines())
    assert first == {
        "prompt": "a cat",
        "resolution": "832x1024",
        "seed": 7,
        "num_inference_steps": 12,
        "negative_prompt": "ugly",
    }
    assert second == {"prompt": "x", "resolution": "1024x1024"}
    own, _, _ = imported({"samples": [sample]})
    assert json.loads(Path("run.prompts.jsonl").read_text()) == first
    import_files(Path("concepts.json"), Path("alone.json"), force=False)
    assert "resolution" not in json.loads(Path("alone.json").read_text())[0]
    with pytest.raises(SettingsError, match="names datasets in gone.json"):
        imported({"concepts": None, "concept_file_name": "gone.json"})


def test_masks_beside_images_are_a_dataset_of_their_own():
    Path("img").mkdir()
    for name in ("a", "a-masklabel", "b"):
        Image.new("L", (64, 64)).save(f"img/{name}.png")
        Path(f"img/{name}.txt").write_text("a caption")
    given = {"masked_training": True, "unmasked_weight": 0}
    made, [images, masks], text = imported(given)
    assert (masks["conditioning_type"], masks["name_ending"], masks["instance_data_dir"]) == (
        "mask",
        "-masklabel",
        "img",
    )
    assert images["conditioning_data"] == [masks["id"]] and "such as img/b.png, is trained whole there" in text
    assert "the loss is over the mask alone here" in text
    Path("img/b.png").unlink()
    assert "img/b.png" not in imported({**given, "normalize_masked_area_loss": True})[2]
    [dataset] = load_datasets(made.data)[0]
    assert [sample.name for sample in scanning.found([dataset]).samples] == ["a.png"]
    Path("img/a-condlabel.png").touch()
    with pytest.raises(SettingsError, match="a-condlabel.png is no image there"):
        imported(given)


def test_caches_are_made_again():
    Path("old").mkdir()
    assert "# latents and text embeddings are encoded again" in imported({"cache_dir": "old"})[2]
    Path("old/image.pt").touch()
    assert "# cache_dir = 'old' (config.json:" in imported({"cache_dir": "old"})[2]


def test_a_preset_names_no_concepts():
    values = {name: value for name, value in FLUX.items() if name not in ("__version", "concepts")}
    Path("#flux LoRA.json").write_text(json.dumps(values | {"resolution": "768", "layer_filter_preset": "attn-mlp"}))
    import_files(Path("#flux LoRA.json"), Path("run.toml"), force=False)
    own, _, text = made()
    assert own.data.instance_data_dir == Path("images") and own.data.resolution == 768
    assert "set instance_data_dir to your images" in text and "it fills layer_filter in the window alone" in text
    Path("training_concepts").mkdir()
    Path("training_concepts/concepts.json").write_text(json.dumps([CONCEPT]))
    import_files(Path("#flux LoRA.json"), Path("run.toml"), force=True)
    assert made()[1][0]["instance_data_dir"] == "img"


@pytest.mark.parametrize(("text", "said"), [('{"a": 1, // x\n}', "line"), ('{"training_method": "LORA",}', "line")])
def test_comments_and_trailing_commas_are_named_with_their_line(text, said):
    Path("config.json").write_text(text)
    with pytest.raises(SettingsError) as caught:
        import_files(Path("config.json"), Path("run.toml"), force=False)
    assert "config.json:1" in caught.value.message or said in caught.value.message


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "1e-4", "x", float("inf")]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["path", "x"]), inner, max_size=2),
    max_leaves=4,
)
SECTIONS = ("concepts", "samples", "optimizer", "transformer", "__version")
KEYS = [*(name for name, _, _ in vocabulary("onetrainer")), *SECTIONS]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=4))
def test_garbage_ends_in_a_sentence(changes):
    values = copy.deepcopy(FLUX)
    for name, value in changes.items():
        try:
            put(values, name, value)
        except (AttributeError, IndexError, TypeError):
            continue  # its section is junk already
    Path("config.json").write_text(json.dumps(values))
    if foreign_file(Path("config.json")) is None:
        return
    try:
        import_files(Path("config.json"), Path("run.toml"), force=True, partial=True)
    except SettingsError as error:
        assert error.message
