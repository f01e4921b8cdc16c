"""Base models that are malformed or lack something: one sentence that names the component, and nothing is encoded."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from safetensors.torch import load_file, save_file

from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.models.catalog.registry import presets
from simpletuner.models.folder.malformed import CHECK_COPY, translate_load_errors
from simpletuner.models.opening.completeness import warn_of_eight_bits, warn_of_unread
from simpletuner.models.opening.loading import has_quantized_part, load_family
from simpletuner.parallel.world import World
from simpletuner.settings.declared.sections import Data, Model, Settings

TEXT_WEIGHTS = "text_encoder/model.safetensors"
UNET_WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
INDEX = "model_index.json"


def opened(folder: Path, family: str = "sdxl", **model: Any):
    world = World(0, 1, 0, torch.device("cpu"), dist.HashStore(), 0)
    model |= {"model_family": family, "pretrained_model_name_or_path": str(folder)}
    return load_family(Settings(model=Model(**model), data=Data()), world, lambda: None)


def linked(source: Path, target: Path) -> Path:
    """Copy a folder without its bytes; whoever changes a file puts a new one in its place."""
    return Path(shutil.copytree(source, target, copy_function=os.link))


def write(path: Path, content: str | bytes) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def edited(name: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | values
        write(folder / name, json.dumps({key: value for key, value in content.items() if value is not ...}))

    return change


def replaced(name: str, content: str | bytes) -> Callable[[Path], None]:
    return lambda folder: write(folder / name, content)


def removed(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for path in (folder / name for name in names):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def cut(name: str, share: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        write(folder / name, content[: int(len(content) * share)])

    return change


def without_tensors(name: str, part: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        kept = {key: value for key, value in load_file(folder / name).items() if part not in key}
        (folder / name).unlink()
        save_file(kept, folder / name, metadata={"format": "pt"})

    return change


def with_byte_flipped(name: str, word: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        place = content.index(word)
        write(folder / name, content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])

    return change


def pickled(folder_name: str, index_name: str) -> Callable[[Path], None]:
    """Put a component's tensors into a pickle that its index names; a decoy lies beside it."""

    def change(folder: Path) -> None:
        component = folder / folder_name
        [weights] = component.glob("*.safetensors")
        tensors = load_file(weights)
        weights.unlink()
        torch.save(tensors, component / "weights.pickle")
        save_file({"nothing": torch.zeros(1)}, component / "decoy.safetensors")
        (component / index_name).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "weights.pickle")}))

    return change


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: [change(folder) for change in changes] and None


MALFORMED: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipeline's class under a damaged key": (
        with_byte_flipped("model_index.json", b"_class_name"),
        r"does not name the pipeline.s class \(_class_name\)",
    ),
    "VAE config with a key damaged": (
        with_byte_flipped("vae/config.json", b"wn_block_types"),
        "does not know dovn_block_",
    ),
    "text encoder without layers": (without_tensors(TEXT_WEIGHTS, "encoder.layers"), "text_encoder lacks .*layers.0"),
    "text encoder with a name damaged": (with_byte_flipped(TEXT_WEIGHTS, b"encoder.layers.1.mlp"), "is not known"),
    "text encoder without weights": (removed(TEXT_WEIGHTS), "text_encoder holds no safetensors"),
    "text encoder cut short": (cut(TEXT_WEIGHTS, 0.7), "text_encoder cannot be opened"),
    "text encoder of another width": (edited("text_encoder/config.json", hidden_size=48), "text_encoder"),
    "text encoder null": (edited(INDEX, text_encoder=None), "was saved without its text_encoder, which Stable"),
    "second text encoder left out": (
        edited(INDEX, text_encoder_2=[None] * 2, tokenizer_2=[None] * 2),
        "was saved without its text_encoder_2, which StableDiffusionXLPipeline needs",
    ),
    "no text encoders": (edited(INDEX, text_encoder=[None] * 2, text_encoder_2=[None] * 2), "has no text_encoder"),
    "text encoder of no class": (edited(INDEX, text_encoder=["transformers", "CLIPTextModell"]), "CLIPTextModell"),
    "text encoder of another library": (edited(INDEX, text_encoder=["subprocess", "Popen"]), "takes text_encoder from"),
    "text encoder that is no model": (edited(INDEX, text_encoder=["transformers", "CLIPConfig"]), "is no model"),
    "text encoder with endless layers": (edited("text_encoder/config.json", num_hidden_layers=10**9), "more than any"),
    "text config of a list": (replaced("text_encoder/config.json", "[]"), "text_encoder/config.json: it holds no"),
    "text config of wrong types": (edited("text_encoder/config.json", num_attention_heads="x"), "text_encoder"),
    "tokenizers without files": (removed("tokenizer/tokenizer.json", "tokenizer_2/tokenizer.json"), "no vocabulary"),
    "second tokenizer without its file": (removed("tokenizer_2/tokenizer.json"), "tokenizer_2 has no vocabulary"),
    "tokenizer cut short": (cut("tokenizer/tokenizer.json", 0.5), "tokenizer cannot be opened"),
    "tokenizer of a list": (replaced("tokenizer/tokenizer.json", "[]"), "tokenizer cannot be opened"),
    "tokenizer gone": (removed("tokenizer"), "tokenizer"),
    "tokenizer not named": (edited(INDEX, tokenizer=...), "has a text_encoder and no tokenizer"),
    "vae without a tensor": (without_tensors("vae/diffusion_pytorch_model.safetensors", "mid_block"), "vae lacks "),
    "vae cut short": (cut("vae/diffusion_pytorch_model.safetensors", 0.9), "vae cannot be opened"),
    "vae of no class": (edited(INDEX, vae=["diffusers", "AutoencoderKLL"]), "has no AutoencoderKLL"),
    "vae not named": (edited(INDEX, vae=...), "names no vae"),
    "vae with endless layers": (edited("vae/config.json", layers_per_block=10**9), "layers_per_block = 1e\\+09"),
    "denoiser cut short": (cut(UNET_WEIGHTS, 0.7), "diffusion_pytorch_model.safetensors cannot be opened"),
    "denoiser without a tensor": (without_tensors(UNET_WEIGHTS, "conv_in"), "unet lacks conv_in.bias, conv_in.weight"),
    "denoiser of an endless header": (replaced(UNET_WEIGHTS, b"\xff" * 64), "cannot be opened"),
    "denoiser of another width": (edited("unet/config.json", cross_attention_dim=32), "by the config and"),
    "denoiser without a class": (edited("unet/config.json", _class_name=...), "there is no `_class_name`"),
    "denoiser of a pipeline's class": (edited("unet/config.json", _class_name="FluxPipeline"), "is no model"),
    "denoiser of a number": (edited("unet/config.json", _class_name=5), "cannot be opened"),
    "denoiser of text": (edited("unet/config.json", block_out_channels="wide"), "unet cannot be opened"),
    "denoiser with endless layers": (edited("unet/config.json", layers_per_block=10**6), "more than any model has"),
    "denoiser gone": (removed("unet"), "has no unet: model_index.json says that it is a Other"),
    "scheduler gone": (removed("scheduler"), "scheduler_config.json"),
    "scheduler not named": (edited(INDEX, scheduler=...), "names no scheduler"),
    "scheduler with text for betas": (edited("scheduler/scheduler_config.json", beta_end="x"), "scheduler cannot be"),
    "index of a list": (replaced(INDEX, "[1]"), "model_index.json: it holds no JSON object"),
    "index nested without end": (replaced(INDEX, "[" * 100_000), "model_index.json"),
    "index cut short": (cut(INDEX, 0.5), "cannot read .*model_index.json"),
    "index not in UTF-8": (replaced(INDEX, b"\xff\xfe{}"), "cannot read .*model_index.json"),
    "pickle in an index": (pickled("text_encoder", "model.safetensors.index.json"), "names 'weights.pickle' for"),
    "pickle in the vae's": (pickled("vae", "diffusion_pytorch_model.safetensors.index.json"), "names 'weights.pickle'"),
    "pickle named by a config": (edited("text_encoder/config.json", transformers_weights="adapter_model.bin"), "names"),
    "pickle of capitals": (lambda folder: (folder / TEXT_WEIGHTS).rename(folder / "text_encoder/model.BIN"), "pickle"),
    "weights of a parent": (
        replaced("vae/a.safetensors.index.json", '{"weight_map": {"x": "../unet/x.safetensors"}}'),
        "read only from safetensors files in its folder",
    ),
    "code by auto_map": (
        both(
            edited("text_encoder/config.json", auto_map={"AutoModel": "evil.Evil"}),
            edited(INDEX, text_encoder=["transformers", "AutoModel"]),
        ),
        "code: auto_map = ",
    ),
    "code by a tokenizer's": (
        both(
            edited("tokenizer/tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]}),
            edited(INDEX, tokenizer=["transformers", "AutoTokenizer"]),
        ),
        "tokenizer_config.json names code: auto_map",
    ),
    "a class by auto_map alone": (
        both(
            edited("text_encoder/config.json", auto_map={"AutoModel": "evil.Evil"}),
            edited(INDEX, text_encoder=["transformers", "Evil"]),
        ),
        "code: auto_map = ",
    ),
    "code by an attention": (
        edited("text_encoder/config.json", text_config={"_attn_implementation_internal": "somebody/kernel"}),
        "names code: _attn_implementation_internal = 'somebody/kernel'",
    ),
    "code by a pipeline": (edited(INDEX, custom_pipeline="somebody/pipeline"), "names code: custom_pipeline"),
    "code by a pipeline's class": (edited(INDEX, _class_name=["pipeline", "Evil"]), "names code"),
    "code by a denoiser's class": (edited("unet/config.json", _class_name=["evil", "Evil"]), "names code: _class_name"),
    "code by a path": (edited(INDEX, scheduler=["diffusers", "os.system"]), "names code as scheduler"),
    "code by a library": (edited(INDEX, unet=["my", "Evil"]), "takes unet from 'my', which is not read"),
    "denoiser of any class": (edited(INDEX, unet=["diffusers", "AutoModel"]), "no class of unet: AutoModel"),
    "denoiser with endless axes": (edited("unet/config.json", axes_dims_rope=[10**9] * 3), "axes_dims_rope = 1e"),
    "adapter": (replaced("text_encoder/adapter_config.json", "{}"), "holds an adapter"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_folder_is_one_sentence_that_names_the_component(case, sdxl, tmp_path):
    change, sentence = MALFORMED[case]
    folder = linked(sdxl, tmp_path / "model")
    if case == "denoiser gone":  # of a class that no family has
        edited(INDEX, _class_name="Other")(folder)
    change(folder)
    with pytest.raises(EnvironmentNotReady, match=sentence) as caught:
        opened(folder)
    assert caught.value.hint
    assert "\n" not in caught.value.message and len(caught.value.message) < 500


def test_auto_map_beside_a_class_that_the_library_has_is_not_looked_at(sdxl, tmp_path):
    """As published models have it that were saved after a load with trust_remote_code."""
    folder, ran = linked(sdxl, tmp_path / "model"), tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')\nclass Evil: pass\n"
    for name in ("text_encoder/config.json", "tokenizer/tokenizer_config.json", "unet/config.json"):
        edited(name, auto_map=dict.fromkeys(("AutoConfig", "AutoModel", "AutoTokenizer"), "evil.Evil"))(folder)
        replaced(f"{name.partition('/')[0]}/evil.py", code)(folder)
    first, second = (opened(each).text_encoder(torch.device("cpu"), torch.float32) for each in (folder, sdxl))
    pairs = zip(first.encode(["a cat"]).items(), second.encode(["a cat"]).items(), strict=True)
    assert all(name == other and torch.equal(value, wanted) for (name, value), (other, wanted) in pairs)
    assert not ran.exists()


def test_an_auto_class_with_auto_map_is_refused_by_file_key_and_code_and_trains_by_its_own_class(sdxl, tmp_path):
    """Which code an Auto class takes is decided by transformers; the index can name the class that it has."""
    folder, ran = linked(sdxl, tmp_path / "model"), tmp_path / "ran"
    for name, config, auto in (
        ("text_encoder", "config.json", "AutoModel"),
        ("tokenizer", "tokenizer_config.json", "AutoTokenizer"),
    ):
        library, cls = json.loads((folder / INDEX).read_text())[name]
        code = {auto: "evil.Evil"}
        edited(f"{name}/{config}", auto_map=code)(folder)
        edited(INDEX, **{name: [library, auto]})(folder)
        replaced(f"{name}/evil.py", f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")(folder)
        with pytest.raises(EnvironmentNotReady) as caught:
            opened(folder)
        assert caught.value.message == f"{folder / name / config} names code: auto_map = {code!r}"
        wanted = f"name the class {cls} as {name} in model_index.json of your copy"
        assert caught.value.hint == f"code of a model is never run: {wanted}"
        edited(INDEX, **{name: [library, cls]})(folder)
        assert opened(folder).text_encoder(torch.device("cpu"), torch.float32).encode(["a cat"])
    edited("tokenizer/tokenizer_config.json", tokenizer_class="EvilTokenizer")(folder)
    edited(INDEX, tokenizer=["transformers", "AutoTokenizer"])(folder)
    with pytest.raises(EnvironmentNotReady, match="tokenizer_config.json names code: auto_map") as caught:
        opened(folder)
    assert caught.value.hint and "or remove that from your copy" in caught.value.hint
    assert not ran.exists()


@pytest.mark.parametrize(
    ("family", "file", "changed", "said"),
    [
        (
            "flux",
            "transformer/config.json",
            {"num_layers": 1},
            "has 1 block in transformer_blocks, .* hold transformer_blocks.1,",
        ),
        ("flux", "transformer/config.json", {"num_layers": 0}, "has 0 blocks in transformer_blocks, .*_blocks.0 to 1,"),
        ("flux", "transformer/config.json", {"num_layers": -1}, "has 0 blocks in transformer_blocks"),
        ("flux", "transformer/config.json", {"num_single_layers": 0}, "in single_transformer_blocks"),
        ("sdxl", "text_encoder/config.json", {"num_hidden_layers": 1}, "has 1 block in .*layers, .*layers.1"),
        ("flux", "vae/config.json", {"layers_per_block": 0}, r"resnets"),
    ],
)
def test_blocks_that_a_config_leaves_out_are_refused_by_name_and_number(
    family, file, changed, said, pipelines, tmp_path
):
    """R106: the rest alone was trained, by the class and by auto, and exported with one block less."""
    folder = linked(pipelines(family), tmp_path / "model")
    edited(file, **changed)(folder)
    for opener in {family, "auto"}:
        with pytest.raises(EnvironmentNotReady, match=said) as caught:
            opened(folder, opener)
        assert "config.json" in caught.value.hint and str(folder) in caught.value.message


def test_weights_of_the_denoiser_that_its_config_has_no_place_for_are_warned_of(flux, tmp_path):
    folder = linked(flux, tmp_path / "model")
    assert warn_of_unread(opened(folder, "flux")) == ""
    edited("transformer/config.json", guidance_embeds=False)(folder)
    found = warn_of_unread(opened(folder, "flux"))
    assert "transformer holds what its config has no place for" in found and "guidance_embedder.linear_1.bias" in found
    assert "and 1 more" in found


def test_a_denoiser_that_was_saved_in_float8_is_warned_of(flux, tmp_path):
    """As `enable_layerwise_casting` leaves it."""
    from diffusers import FluxTransformer2DModel

    folder = linked(flux, tmp_path / "model")
    assert warn_of_eight_bits(opened(folder, "flux")) == ""
    model = FluxTransformer2DModel.from_pretrained(flux / "transformer")
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    shutil.rmtree(folder / "transformer")
    model.save_pretrained(folder / "transformer")
    assert re.search(
        r"holds \d+ weights in 8 bits \(F8_E4M3\): training starts", warn_of_eight_bits(opened(folder, "flux"))
    )


def test_a_pipeline_that_was_saved_with_a_lora_loaded_is_not_a_damaged_copy(sdxl, tmp_path):
    folder = linked(sdxl, tmp_path / "model")
    renamed = {
        name.replace(".to_k.", ".to_k.base_layer."): each for name, each in load_file(folder / UNET_WEIGHTS).items()
    }
    (folder / UNET_WEIGHTS).unlink()
    save_file(renamed, folder / UNET_WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(EnvironmentNotReady, match="unet lacks .*to_k") as caught:
        opened(folder)
    assert "unload_lora_weights()" in caught.value.hint


def test_a_package_that_a_component_needs_is_not_a_damaged_copy(tmp_path):
    with (
        pytest.raises(EnvironmentNotReady, match="cannot be opened: it requires x") as caught,
        translate_load_errors(tmp_path),
    ):
        raise ImportError("it requires x")
    assert caught.value.hint == "install the package that it needs"


@pytest.mark.parametrize("family", [key for key, preset in presets().items() if preset.has_class])
def test_every_family_s_whole_pipeline_is_accepted(family, pipelines):
    assert opened(pipelines(family), family).objective()


EDM = {"_class_name": "EDMDPMSolverMultistepScheduler"}
EULER = {"_class_name": "EulerDiscreteScheduler"}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
SOLVER = {"_class_name": "DPMSolverMultistepScheduler"}


@pytest.mark.parametrize(
    ("family", "scheduler", "sentence"),
    [
        ("sdxl", EDM, "samples with EDMDPMSolverMultistepScheduler .*wrong target"),
        ("sdxl", FLOW, "samples with FlowMatchEulerDiscreteScheduler, but model_family=sdxl trains only epsilon or"),
        ("sdxl", SOLVER | {"prediction_type": "flow_prediction"}, "prediction_type flow_prediction"),
        ("sdxl", EULER | {"prediction_type": "sample"}, "prediction_type sample"),
        ("flux", EULER | {"prediction_type": "epsilon"}, "samples with EulerDiscreteScheduler .*trains flow matching"),
        ("flux", EDM, "trains flow matching"),
    ],
)
def test_a_scheduler_of_another_objective_is_refused(family, scheduler, sentence, pipelines, tmp_path):
    folder = linked(pipelines(family), tmp_path / "model")
    edited(INDEX, scheduler=["diffusers", scheduler["_class_name"]])(folder)
    write(folder / "scheduler" / "scheduler_config.json", json.dumps(scheduler))
    with pytest.raises(EnvironmentNotReady, match=sentence):
        opened(folder, family)


@pytest.mark.parametrize(
    ("family", "scheduler"),
    [
        ("sdxl", {"_class_name": "DDIMScheduler", "prediction_type": "v_prediction"}),
        ("sdxl", SOLVER | {"prediction_type": "epsilon"}),
        ("flux", SOLVER | {"prediction_type": "flow_prediction", "use_flow_sigmas": True}),
    ],
)
def test_schedulers_of_the_same_objective_are_taken(family, scheduler, pipelines, tmp_path):
    folder = linked(pipelines(family), tmp_path / "model")
    edited(INDEX, scheduler=["diffusers", scheduler["_class_name"]])(folder)
    write(folder / "scheduler" / "scheduler_config.json", json.dumps(scheduler))
    assert opened(folder, family).objective()


def test_a_folder_of_another_family_says_which_to_set(sdxl):
    with pytest.raises(SettingsError) as caught:
        opened(sdxl, "flux")
    assert "is a StableDiffusionXLPipeline, which is not of model_family=flux" in caught.value.message
    assert caught.value.hint == "set model_family=sdxl"


def test_weights_that_a_class_does_not_read_are_let_pass(sdxl, tmp_path):
    folder = linked(sdxl, tmp_path / "model")
    tensors = load_file(folder / TEXT_WEIGHTS)
    (folder / TEXT_WEIGHTS).unlink()
    save_file(tensors | {"logit_scale": torch.zeros(1)}, folder / TEXT_WEIGHTS, metadata={"format": "pt"})
    opened(folder)


def test_a_refused_folder_ends_the_run_before_anything_is_encoded(sdxl, shapes, train, tmp_path):
    folder = linked(sdxl, tmp_path / "model")
    without_tensors("vae/diffusion_pytorch_model.safetensors", "mid_block")(folder)
    flags = (f"--pretrained_model_name_or_path={folder}", f"--instance_data_dir={shapes}", "--max_train_steps=1")
    run = train(tmp_path / "run", "--model_family=sdxl", *flags, "--train_batch_size=2", world=2, code=3)
    assert "vae lacks " in run.said and "Traceback" not in run.said
    assert not list(tmp_path.rglob("*.index.jsonl"))


def test_a_config_that_is_a_fifo_keeps_no_start_waiting(sdxl, tmp_path):
    folder = linked(sdxl, tmp_path / "model")
    assert not has_quantized_part(folder)
    (config := folder / "text_encoder/config.json").unlink()
    os.mkfifo(config)
    found: list[bool] = []
    thread = Thread(target=lambda: found.append(has_quantized_part(folder)), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert found == [True]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (edited("tokenizer/tokenizer_config.json", model_max_length=57), "cannot encode: Sizes of tensors must match"),
        (edited("tokenizer/tokenizer_config.json", model_max_length=577), "cannot encode: Sequence length"),
        (edited("text_encoder/config.json", hidden_size=48), "cannot be opened"),
    ],
)
def test_text_encoders_that_changed_since_they_were_found_complete_are_named(change, sentence, sdxl, tmp_path):
    folder = linked(sdxl, tmp_path / "model")
    family = opened(folder)
    change(folder)
    with pytest.raises(EnvironmentNotReady, match=sentence) as caught:
        family.text_encoder(torch.device("cpu"), torch.float32).encode(["a red circle"])
    assert caught.value.hint == CHECK_COPY
