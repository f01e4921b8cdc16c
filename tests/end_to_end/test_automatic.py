"""model_family=auto trains, shards, resumes, samples and exports as a class does, and refuses with one sentence."""

from __future__ import annotations

import inspect
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, base
from end_to_end.test_image_to_video import clips, clips_file  # noqa: F401 (a fixture)
from end_to_end.test_references import dataset_file as pairs_file
from end_to_end.test_references import folders as edited  # noqa: F401 (a fixture)
from end_to_end.test_references import kontext  # noqa: F401 (a fixture)
from end_to_end.test_videos import FLAGS as OF_CLIPS
from foreign import FOREIGN, build_foreign
from models.test_image_to_video import save_wan
from modular import TRAINED, build_modular
from PIL import Image
from safetensors.torch import load_file

from simpletuner.models.automatic.hooks import ALWAYS, FRAMES
from simpletuner.models.catalog.registry import presets

EDITS = ("--learning_rate=1e-3", "--aspect_bucket_alignment=64", "--flow_schedule_shift=3", "--max_train_steps=3")
DRAWN = ("--validation_num_inference_steps=2", "--validation_step_interval=0", "--validation_guidance=1")
REFUSED = ("AllegroPipeline", "JoyImageEditPipeline", "Cosmos2VideoToWorldPipeline")
"""tests/models/automatic has the reason of each."""


def check_same_grids(*folders: Path) -> None:
    check_same_images(*(folder / "grid-000003.png" for folder in folders))


def check_same_images(*paths: Path) -> None:
    first, second = (np.asarray(Image.open(path), int) for path in paths)
    off = abs(first - second)
    # On one of three CPUs 9 of 162,864 values were on the other side of a rounding.
    assert off.max() <= 1 and np.count_nonzero(off) < off.size / 1000


@pytest.mark.long
def test_auto_trains_shards_resumes_samples_and_exports_as_the_class_does(pipelines, few_shapes, train, tmp_path):
    steps = ("--train_batch_size=2", "--max_train_steps=3", "--flow_schedule_shift=3")
    caches = (f"--cache_dir_vae={tmp_path / 'latents'}", f"--cache_dir_text={tmp_path / 'text'}")
    drawn = ("--validation_prompt=a red circle", "--validation_num_inference_steps=2", "--validation_resolution=64")
    flags = (*base("auto", pipelines("sd3"), few_shapes), "--aspect_bucket_alignment=32", *caches, *steps)
    plain = train(tmp_path / "plain", *flags, *drawn)
    said = " ".join(plain.said.split())
    assert "StableDiffusion3Pipeline by its own call, proven with diffusers" in said
    assert "flow, one call for all samples, sampled with guidance" in said
    assert (plain.output / "pipeline" / "model_index.json").is_file()
    by_class = train(tmp_path / "class", *flags, *drawn, "--model_family=sd3", "--caption_dropout_probability=0.2")
    assert plain.losses == pytest.approx(by_class.losses, rel=1e-5)
    check_same_grids(plain.output / "validation", by_class.output / "validation")
    engines = (("--fsdp_enable", *drawn), ("--zero_stage=2",), ("--zero_stage=3", *drawn))
    for number, engine in enumerate(engines, 1):
        steps = ("--train_batch_size=1", f"--max_train_steps={number}")
        sharded = train(tmp_path / "sharded", *flags, *steps, *engine, world=2)
    assert "resuming from" in sharded.said and sharded.losses == pytest.approx(plain.losses, rel=1e-5)
    lora = train(tmp_path / "lora", *flags, "--model_type=lora", "--use_ema", world=2)
    state = json.loads((lora.output / "checkpoints" / "checkpoint-000003" / "state.json").read_text())
    assert "StableDiffusion3Pipeline" in state["proven"]["pipeline"]


@pytest.mark.long
def test_auto_edits_images_as_the_class_does(edited, kontext, train, starter, sampled, tmp_path):  # noqa: F811
    from diffusers import FluxKontextPipeline

    def flags(key: str, model: Path = kontext) -> tuple[str, ...]:
        return (*base(key, model, Path("unused"))[:2], "--tokenizer_max_length=16", *EDITS, pairs)

    pairs = pairs_file(tmp_path / "pairs.json", edited["images"], (edited["alike"], "reference_strict"))
    whole = (*DRAWN, "--validation_pairs=1", "--train_batch_size=4", "--eval_split=0.1")
    by_class, auto = (train(tmp_path / key, *flags(key), *whole) for key in ("flux", "auto"))
    assert auto.losses == pytest.approx(by_class.losses, rel=1e-6)
    said = " ".join(auto.said.split())
    assert "references by hidden_states" in said and "one call for all samples" in said
    shown = [run.output / "validation" for run in (by_class, auto)]
    check_same_grids(*shown)
    given = (
        f"--image={edited['alike'] / 'edit 1.webp'}",
        "--prompt=edit it",
        f"--pretrained_model_name_or_path={kontext}",
    )
    [[by_hand], [own]] = (sampled(run.output, *given)[0] for run in (by_class, auto))
    check_same_images(by_hand, own)
    # A run that trains samples what its start proved. Its weights stay as they are, to be compared with.
    asked = tmp_path / "asked"
    endless = ("--max_train_steps=100000", "--checkpoint_step_interval=1", "--learning_rate=1e-30")
    started = starter.train(1, f"--output_dir={asked}", *SMALL, *flags("auto"), *whole, *endless)
    while started.processes[0].is_alive() and not (asked / "checkpoints" / "checkpoint-000001").is_dir():
        time.sleep(0.1)
    [answered], said = sampled(asked, *given)
    assert "sampled at step" in said
    assert "32x64 px from 1 image was not proven" in sampled(asked, *given, "--size=32x64", code=2)[1]
    started.kill()
    started.wait()
    [here], _ = sampled(asked, *given)
    check_same_images(answered, here)
    sharded = (*flags("auto"), "--train_batch_size=2", "--eval_split=0.1", "--fsdp_enable")
    train(tmp_path / "sharded", *sharded, "--max_train_steps=2", world=2)
    again = train(tmp_path / "sharded", *sharded, world=2)
    assert "encoding" not in again.said and again.losses == pytest.approx(auto.losses, rel=1e-5)
    split = ("--train_batch_size=4", "--eval_split=0.1", "--fsdp_enable", "--context_parallel_size=2")
    assert train(tmp_path / "split", *flags("auto"), *split, world=2).losses == pytest.approx(auto.losses, rel=1e-5)
    assert isinstance(FluxKontextPipeline.from_pretrained(auto.output / "pipeline"), FluxKontextPipeline)
    more = train(tmp_path / "more", *flags("auto", auto.output / "pipeline"), "--train_batch_size=4")
    assert more.losses[0] < auto.losses[0]


def test_auto_continues_first_frames_as_the_class_does(clips, pipelines, train, sampled, tmp_path):  # noqa: F811
    folder = save_wan(pipelines("wan"), tmp_path / "model", "2.1-14b")

    def flags(key: str) -> tuple[str, ...]:
        return (*base(key, folder, Path("unused"))[:2], *OF_CLIPS, "--tokenizer_max_length=16", *EDITS[1:], file)

    file = clips_file(tmp_path / "clips.json", clips)
    whole = (*DRAWN, "--validation_pairs=1", "--train_batch_size=2")
    by_class, auto = (train(tmp_path / key, *flags(key), *whole) for key in ("wan", "auto"))
    assert auto.losses == pytest.approx(by_class.losses, rel=1e-6)
    assert "first frame by hidden_states, encoder_hidden_states_image" in " ".join(auto.said.split())
    names = {path.name for path in (auto.output / "validation" / "step-000003").iterdir()}
    assert names == {"reference-00.png", "trained-00.png", "trained-00.mp4", "trained-00.webp"}
    first_frame = auto.output / "validation" / "step-000003" / "reference-00.png"
    given = (f"--image={first_frame}", "--prompt=it moves", f"--pretrained_model_name_or_path={folder}", "--size=64@5")
    [[by_hand], [own]] = (sampled(run.output, *given)[0] for run in (by_class, auto))
    check_same_images(by_hand, own)
    sharded = train(tmp_path / "sharded", *flags("auto"), "--train_batch_size=1", "--fsdp_enable", world=2)
    assert sharded.losses == pytest.approx(auto.losses, rel=1e-5)
    split = ("--train_batch_size=2", "--fsdp_enable", "--context_parallel_size=2")
    assert train(tmp_path / "split", *flags("auto"), *split, world=2).losses == pytest.approx(auto.losses, rel=1e-5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # Mochi's pipeline asks for it
@pytest.mark.parametrize("name", [name for name in FOREIGN if name not in REFUSED])
def test_a_pipeline_without_a_class_trains_resumes_exports_and_is_opened_by_diffusers(
    name, few_shapes, train, tmp_path
):
    from diffusers import DiffusionPipeline

    folder = build_foreign(name, tmp_path / "base")
    flags = (*base("auto", folder, few_shapes), "--aspect_bucket_alignment=32", "--validation_prompt=a red circle")
    flags += ("--validation_num_inference_steps=2", "--validation_resolution=64", "--train_batch_size=2")
    for steps in (1, 2):
        run = train(tmp_path / "run", *flags, f"--max_train_steps={steps}")
    assert "resuming from" in run.said and f"{name} by its own call" in " ".join(run.said.split())
    pipeline = DiffusionPipeline.from_pretrained(run.output / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    known = inspect.signature(type(pipeline).__call__).parameters
    more = {each: value for each, value in (dict.fromkeys(FRAMES, 1) | ALWAYS).items() if each in known}
    image = pipeline(prompt="a red circle", width=64, height=64, num_inference_steps=2, output_type="pt", **more)[0]
    assert image.shape[-2:] == (64, 64) and image.isfinite().all()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")
@pytest.mark.parametrize(
    "key",
    [key for key, each in presets().items() if each.is_automatic and each.tiny and each.pipelines[0] not in TRAINED],
)
def test_a_family_without_a_class_is_proven_trains_and_is_opened_by_diffusers(
    key, pipelines, few_shapes, train, tmp_path
):
    from diffusers import DiffusionPipeline

    preset = presets()[key]
    flags = (*base(key, pipelines(key), few_shapes), "--aspect_bucket_alignment=32", "--max_train_steps=1")
    run = train(tmp_path / "run", *flags)
    assert f"{preset.pipelines[0]} by its own call" in " ".join(run.said.split())
    assert len(run.losses) == 1 and math.isfinite(run.losses[0])
    pipeline = DiffusionPipeline.from_pretrained(run.output / "pipeline")
    assert type(pipeline).__name__ == preset.pipelines[0]
    assert getattr(pipeline, preset.denoiser).num_parameters() == preset.tiny.parameters


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINED)
def test_a_modular_pipeline_trains_resumes_exports_and_is_opened_by_diffusers(name, few_shapes, train, tmp_path):
    from diffusers import ModularPipeline

    folder = build_modular(name, tmp_path / "base")
    flags = (*base("auto", folder, few_shapes), "--aspect_bucket_alignment=32", "--validation_prompt=a red circle")
    flags += ("--validation_num_inference_steps=2", "--validation_resolution=64", "--train_batch_size=2")
    for steps in (1, 2):
        run = train(tmp_path / "run", *flags, f"--max_train_steps={steps}")
    assert "resuming from" in run.said and f"{name} by its own call" in " ".join(run.said.split())
    whole = train(tmp_path / "whole", *flags, "--max_train_steps=2")
    assert run.losses == whole.losses
    own, other, before = (
        denoiser_weights(each) for each in (run.output / "pipeline", whole.output / "pipeline", folder)
    )
    assert own.keys() == before.keys() and all(torch.equal(own[each], other[each]) for each in own)
    assert not all(torch.equal(own[each], before[each]) for each in own)

    # A copy beside which there is no base model, as another machine has it.
    (run.output / "pipeline").rename(tmp_path / "exported")
    folder.rename(tmp_path / "gone")
    blocks = ModularPipeline.from_pretrained(tmp_path / "exported").blocks
    blocks.sub_blocks.pop("prompt_upsampler", None)
    pipeline = blocks.init_pipeline(tmp_path / "exported")
    pipeline.load_components()
    [tiny] = (preset.tiny for preset in presets().values() if name in preset.pipelines)
    assert type(pipeline).__name__ == name and None not in map(pipeline.components.get, tiny.components)
    opened = pipeline.transformer.state_dict()
    assert all(torch.equal(opened[each], own[each]) for each in own)
    pipeline.set_progress_bar_config(disable=True)
    given = {"width": 64, "height": 64, "num_inference_steps": 2, "output_type": "pt"}
    image = pipeline(prompt="a red circle", **given, output="images")
    assert image.shape[-2:] == (64, 64) and image.isfinite().all()


def denoiser_weights(pipeline: Path) -> dict[str, torch.Tensor]:
    return {
        name: each
        for file in (pipeline / "transformer").glob("*.safetensors")
        for name, each in load_file(file).items()
    }


def test_auto_refuses_before_anything_is_encoded(few_shapes, train, tmp_path):
    folder = build_foreign("PixArtAlphaPipeline", tmp_path / "base", scheduler={"class_name": "DDIMScheduler"})
    run = train(tmp_path / "run", *base("auto", folder, few_shapes), "--max_train_steps=1", code=2)
    said = " ".join(run.said.split())
    assert "PixArtAlphaPipeline cannot be trained by its own call: exact predictions do not lead its own loop" in said
    assert "docs/families.md" in said and "encoding" not in said and "Traceback" not in said
