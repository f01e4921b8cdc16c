from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import presets
from simpletuner.models.catalog.support import SCOPES, check_runnable
from simpletuner.models.families.flux import Flux
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.family.objectives import diffusion, flow_matching
from simpletuner.settings.declared.sections import Model, Settings
from simpletuner.settings.foreign.original_names import NO_PIPELINE, UNTRAINED
from simpletuner.settings.resolving.loading import load
from simpletuner.training.build import check_sequence_plan

BY_CLASS = [name for name, preset in presets().items() if preset.has_class]


def checked(family: str, **flags: str):
    return check_runnable(load({"model_family": family, "instance_data_dir": "x", **flags}, environment={}))


@pytest.mark.parametrize("family", BY_CLASS)
def test_a_preset_says_what_its_class_says(family):
    preset, cls = presets()[family], family_class(Model(model_family=family))
    assert (cls.objective is diffusion) == SCOPES["snr_gamma"].includes(preset)
    assert (cls.objective is flow_matching) == SCOPES["flow_schedule_shift"].includes(preset)
    variable = cls.default_max_length is not ModelFamily.default_max_length
    assert variable == SCOPES["tokenizer_max_length"].includes(preset)
    assert (cls.sequence_plan is not None) == bool(preset.heads) == (not preset.unsplittable)
    source = Path(str(__import__(preset.family_class.partition(":")[0], fromlist=["x"]).__file__)).read_text()
    assert ("guidance_scale(" in source) == SCOPES["flux_guidance_value"].includes(preset)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by Kolors
def test_what_is_said_of_the_original_s_families_is_so_of_diffusers():
    import diffusers

    assert not UNTRAINED.keys() & {name for name, preset in presets().items() if preset.family_class}
    for name in ("OmniGenPipeline", "Cosmos3OmniPipeline"):
        assert not hasattr(getattr(diffusers, name), "encode_prompt")
    known = {name.removesuffix("Pipeline").lower() for name in dir(diffusers) if name.endswith("Pipeline")}
    for family in (name for name, reason in UNTRAINED.items() if reason == NO_PIPELINE):
        assert not any(name.startswith(family.replace("_", "")) for name in known), family


@pytest.mark.parametrize(
    ("family", "flag", "value", "what"),
    [
        ("flux", "snr_gamma", "5", "diffusion"),
        ("sdxl", "flow_schedule_shift", "2", "flow matching"),
        ("sdxl", "flow_use_uniform_schedule", "true", "flow matching"),
        ("sdxl", "flux_guidance_value", "3.5", "models that embed the guidance scale"),
        ("sdxl", "tokenizer_max_length", "154", "text encoders of variable length"),
    ],
)
def test_a_setting_without_effect_is_a_warning_and_its_default_is_none(family, flag, value, what):
    [warning] = checked(family, **{flag: value}).warnings
    assert warning.startswith(f"{flag} = ") and warning.endswith(f"model_family={family}: it is for {what}")
    assert checked(family).warnings == ()
    assert checked("sdxl", flow_sigmoid_scale="1.0").warnings == ()


GROUP = {"fsdp_enable": "true", "context_parallel_size": "5", "num_processes": "10"}
ULYSSES = {**GROUP, "context_parallel_comm_strategy": "alltoall"}


def test_a_denoiser_that_cannot_be_split_is_refused_with_the_reason():
    settings = checked("flux", **GROUP).settings
    assert settings.effective_batch_size == 2 * settings.training.train_batch_size
    for family, reason in (("sdxl", "convolutions of its U-Net"), ("sana", "linear attention")):
        with pytest.raises(SettingsError, match=f"{family} cannot be split by context_parallel_size: .*{reason}"):
            checked(family, **GROUP)


def test_sound_by_auto_is_refused_before_anything_is_opened(tmp_path):
    with pytest.raises(SettingsError, match="model_family=auto trains the video of clips alone") as refused:
        checked("auto", sound_loss_weight="1", pretrained_model_name_or_path=str(tmp_path))
    assert "or set model_family=ltxvideo2" in refused.value.mistakes[0].hint


def test_heads_that_alltoall_cannot_share_out_are_refused_with_the_sizes_that_would_do(pipelines, tmp_path):
    assert checked("wan", model_flavour="t2v-480p-14b-2.1", **ULYSSES)  # 40 heads
    with pytest.raises(SettingsError) as refused:
        checked("flux", **ULYSSES)
    assert "the 24 of flux cannot be divided by context_parallel_size = 5" in refused.value.message
    assert "2, 3, 4, 6, 8, 12, 24; " in (refused.value.hint or "")
    with pytest.raises(SettingsError, match="the 4 of flux cannot be divided"):  # what the folder says
        checked("flux", pretrained_model_name_or_path=str(pipelines("flux")), **ULYSSES)
    settings = load({"model_family": "flux", "model_flavour": "tiny", "instance_data_dir": "x", **ULYSSES}).settings
    with pytest.raises(SettingsError, match="the 4 of Flux cannot be divided"):  # known once the model is opened
        check_sequence_plan(Flux.open(pipelines("flux"), settings))


def test_a_family_without_a_plan_is_refused_when_it_is_opened(pipelines):
    class Own(Flux):
        sequence_plan = None

    with pytest.raises(SettingsError, match="Own cannot be split"):
        check_sequence_plan(Own.open(pipelines("flux"), Settings()))


def test_a_prediction_type_of_a_flow_is_refused_whoever_made_the_family(pipelines):
    with pytest.raises(SettingsError, match="prediction_type = epsilon has no effect with model_family=sana"):
        checked("sana", prediction_type="epsilon")
    assert checked("sdxl", prediction_type="v_prediction").warnings == ()
    model = Model(model_family="flux", prediction_type="epsilon")
    with pytest.raises(SettingsError, match="prediction_type=epsilon has no meaning for the flow"):
        Flux.open(pipelines("flux"), Settings(model=model)).objective()


@pytest.mark.parametrize(("family", "refused", "instead"), [("sana", 48, 64), ("ltxvideo", 8, 32), ("sdxl", 12, 16)])
def test_an_alignment_that_a_family_cannot_train_is_refused(family, refused, instead):
    model = {"model_flavour": "tiny", "aspect_bucket_alignment": str(refused)}
    with pytest.raises(SettingsError, match="both sides of an image must be multiples of") as caught:
        checked(family, **model)
    assert caught.value.hint == f"set aspect_bucket_alignment={instead}"
    assert checked(family, **model | {"aspect_bucket_alignment": str(instead)})


def test_a_single_file_and_a_path_to_nothing_are_called_what_they_are(tmp_path):
    single = tmp_path / "single.safetensors"
    save_file({"model.weight": torch.ones(1)}, single)
    with pytest.raises(SettingsError) as caught:
        checked("sdxl", pretrained_model_name_or_path=str(single))
    assert "is a model in one file" in caught.value.message
    assert "single_file_config" in caught.value.hint
    for path in (tmp_path / "nothing", tmp_path / "notes.md"):
        (tmp_path / "notes.md").touch()
        with pytest.raises(SettingsError, match="is no folder"):
            checked("sdxl", pretrained_model_name_or_path=str(path))
    # N17: a missing file was looked for at the hub, and the hint was to train random weights.
    other = ("models\\sdxl", "C:\\models\\sdxl", "owner/name@main", "owner/ name", "größe", "hf://owner/name", "-x/y")
    for name in ("sdxl.safetensors", "models/sdxl.ckpt", "owner/x.gguf", *other):
        with pytest.raises(SettingsError, match="is no folder and no file: there is nothing of that name"):
            checked("sdxl", pretrained_model_name_or_path=name)
    for name in ("owner/name", "sdxl-base.1_0"):
        assert checked("sdxl", pretrained_model_name_or_path=name)


def test_what_is_given_as_the_base_model_is_called_what_it_is(sdxl, tmp_path):
    pair = {f"unet.to_q.{end}": torch.ones(2, 2) for end in ("lora_A.weight", "lora_B.weight")}
    lora, peft, run, checkpoint = (tmp_path / name for name in ("lora", "peft", "run", "checkpoint-000004"))
    for folder in (lora, peft, checkpoint, run / "pipeline"):
        folder.mkdir(parents=True)
    save_file(pair, lora / "pytorch_lora_weights.safetensors")
    (peft / "adapter_config.json").write_text("{}")
    (checkpoint / "state.json").write_text("{}")
    (run / "pipeline/model_index.json").write_text("{}")
    for path, said, hint in (
        (lora / "pytorch_lora_weights.safetensors", "is a LoRA, not a model", "--lora_init"),
        (lora, "is the folder of a LoRA, not of a model", "--lora_init"),
        (peft, "is the folder of a LoRA, not of a model", "--lora_init"),
        (sdxl / "unet", "is a UNet2DConditionModel alone, which is one part of a pipeline", f"name {sdxl}"),
        (checkpoint, "is a checkpoint, not a pipeline", "runs export"),
        (run, "is the folder of a run, not of a model", f"name {run / 'pipeline'}"),
    ):
        with pytest.raises(SettingsError, match=said) as caught:
            checked("sdxl", pretrained_model_name_or_path=str(path))
        assert hint in caught.value.hint and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "size", "nearest"),
    [
        ("sdxl", "100", "96"),
        ("sdxl", "854x480", "856x480"),
        ("sdxl", "1024,854x480", "1024,856x480"),
        ("sd3", "1032", "1024"),
        ("sana", "1040x4", "1024x32"),
        ("mine", "100", "96"),
    ],
)
def test_a_validation_size_that_no_pipeline_samples_is_refused_with_the_nearest(family, size, nearest):
    own = {"model_families": "mine=package.module:Family"} if family == "mine" else {}
    own["pretrained_model_name_or_path"] = "hub/id"
    with pytest.raises(SettingsError, match="all sides must be multiples of") as caught:
        checked(family, validation_resolution=size, **own)
    assert caught.value.hint == f"the nearest is {nearest}"
    checked(family, validation_resolution=nearest, **own)
