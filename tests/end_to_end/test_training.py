"""What a run leaves behind, on real ranks: caches, checkpoints, pictures, a pipeline; and nothing that is a pickle."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import PHOTOGRAPHS, base
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from simpletuner.caches.store.shard_index import load
from simpletuner.caches.store.shards import ShardReader
from simpletuner.checkpoints.layout import load_checkpoint
from simpletuner.data.scan.scan import open_table
from simpletuner.system.files.cache_files import MERGED_INDEX

SHARDED = ("--fsdp_enable", "--train_batch_size=2")


def merged(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_a_rich_run_leaves_a_pipeline_that_diffusers_opens_and_no_pickle(family, request, shapes, train, tmp_path):
    from diffusers import DiffusionPipeline

    flags = (
        *base(family, request.getfixturevalue(family), shapes),
        *SHARDED,
        "--mixed_precision=bf16",
        "--gradient_accumulation_steps=2",
        "--gradient_checkpointing",
        "--use_ema",
        "--fsdp_state_dict_type=full",
        "--report_to=tensorboard",
        "--validation_prompt=a red circle",
        "--validation_step_interval=2",
        "--validation_num_inference_steps=2",
        "--validation_guidance=3",
        "--checkpoint_step_interval=1",
        "--checkpoints_total_limit=2",
    )
    run = train(tmp_path / "run", *flags, "--max_train_steps=4", world=2)
    output = run.output

    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    wanted = {"step", "epoch", "loss", "grad_norm", "learning_rate", "samples_per_second", "seconds", "data_seconds"}
    assert all(wanted <= row.keys() for row in run.rows)
    assert [path.name for path in sorted((output / "checkpoints").iterdir())] == [
        "checkpoint-000003",
        "checkpoint-000004",
    ]
    assert [path.name for path in sorted((output / "validation").glob("*.png"))] == [
        f"grid-{step:06d}.png" for step in (0, 2, 4)
    ]
    settings = json.loads((output / "settings.json").read_text())
    assert settings["gradient_accumulation_steps"] == 2 and settings["fsdp_state_dict_type"] == "FULL_STATE_DICT"

    checkpoint = load_checkpoint(output / "checkpoints" / "checkpoint-000004").folder
    for name, group in (("pipeline", "model"), ("pipeline-ema", "ema")):
        pipeline = DiffusionPipeline.from_pretrained(output / name)
        denoiser = pipeline.unet if family == "sdxl" else pipeline.transformer
        saved = merged(checkpoint / group)
        assert denoiser.state_dict().keys() == saved.keys()
        assert all(torch.equal(value, saved[key]) for key, value in denoiser.state_dict().items())
        assert all(value.dtype == torch.float32 for value in saved.values())
    pipeline.set_progress_bar_config(disable=True)
    drawn = pipeline("a red circle", width=64, height=64, num_inference_steps=1, output_type="np").images
    assert np.isfinite(drawn).all()
    for path in output.rglob("*"):
        if path.is_file():
            assert_no_pickle(path)


def assert_no_pickle(path: Path) -> None:
    """Open a file with the reader that its name promises."""
    suffix = path.suffix
    if suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            assert file.keys()
    elif suffix == ".json":
        json.loads(path.read_text())
    elif suffix == ".jsonl":
        assert [json.loads(line) for line in path.read_text().splitlines()]
    elif suffix == ".png":
        Image.open(path).verify()
    elif suffix == ".shard":
        reader = ShardReader(path.parent)
        assert all(reader.read(place) for place in reader.records())
    elif path.name == MERGED_INDEX:
        assert len(load(path).rows)
    elif suffix == ".arrow":
        assert len(open_table(path)[0])
    elif suffix == ".parquet":
        assert pq.read_table(path).num_rows
    elif path.name.startswith("events.out.tfevents"):
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        assert any(event.HasField("summary") for event in EventFileLoader(str(path)).Load())
    else:
        assert path.name in (".lock", ".in-use", "README.md", "report.html") or suffix == ".txt", f"what is {path}?"
        assert b"\x80" not in path.read_bytes()[:2]


def test_pictures_are_drawn_by_the_sharded_model_as_by_a_whole_one(sdxl_flags, train, tmp_path):
    prompts = [f"--validation_prompt={prompt}" for prompt in ("a red circle", "a blue square", "a green triangle")]
    flags = (*sdxl_flags, *prompts, "--validation_num_inference_steps=1", "--validation_resolution=96x64,64")
    flags = (*flags, "--max_train_steps=2", "--validation_step_interval=2", "--validation_negative_prompt=grey")
    runs = [train(tmp_path / "whole", *flags, "--train_batch_size=4")]
    for reshard in ("true", "false"):
        engine = (*SHARDED, f"--fsdp_reshard_after_forward={reshard}")
        runs.append(train(tmp_path / f"sharded-{reshard}", *flags, *engine, world=2))
    runs.append(train(tmp_path / "four", *flags, "--train_batch_size=1", "--fsdp_enable", world=4))
    for step in (0, 2):
        drawn = [
            [
                np.asarray(Image.open(run.output / "validation" / f"step-{step:06d}" / f"trained-{n:02d}-{size}.png"))
                for n in range(3)
                for size in ("64x64", "96x64")
            ]
            for run in runs
        ]
        assert [picture.shape for picture in drawn[0]] == [(64, 64, 3), (64, 96, 3)] * 3
        with Image.open(runs[0].output / "validation" / f"grid-{step:06d}.png") as grid:
            assert grid.size == (8 + 3 * (192 + 8), 33 + (128 + 28 + 8) + (192 + 28 + 8))
        for pictures in drawn[1:]:
            for one, other in zip(drawn[0], pictures, strict=True):
                assert np.abs(one.astype(int) - other.astype(int)).max() <= 2
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)
    assert runs[2].losses == pytest.approx(runs[0].losses, rel=1e-5)


def test_caches_are_filled_by_all_ranks_and_only_what_changed_is_made_again(sdxl, shapes, train, tmp_path):
    pictures, pipeline = tmp_path / "pictures", tmp_path / "base"
    shutil.copytree(shapes, pictures)
    shutil.copytree(sdxl, pipeline)
    output = tmp_path / "run"
    flags = (*base("sdxl", pipeline, pictures), "--train_batch_size=2", "--resume_from_checkpoint=none")
    flags = (*flags, "--vae_batch_size=2", "--allow_dataset_oversubscription")

    def again(*more: str, world: int = 1) -> str:
        return train(output, *flags, "--max_train_steps=1", *more, world=world).said

    first = again(world=2)
    assert "encoding 36 images" in first
    shards = {path.name[:7] for path in (output / "cache" / "latents").rglob("*.shard")}
    assert shards == {"rank000", "rank001"}
    assert "making" not in again(world=2)
    Image.new("RGB", (64, 64), "orange").save(pictures / "0000.png")
    assert "encoding 1 of 36 images (file changed for 1)" in again()
    (pictures / "0001.txt").write_text("a caption never seen before")
    assert re.search(r"encoding 1 of \d+ captions\n", again())
    assert "encoding 36 images (resolution and crop changed for 36)" in again("--resolution=32")
    assert "making" not in again()  # the older resolution is still there
    weights = pipeline / "vae" / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "encoding 36 images (VAE changed for 36)" in again()
    encoder = pipeline / "text_encoder" / "model.safetensors"
    content = bytearray(encoder.read_bytes())
    content[-1] ^= 1
    encoder.write_bytes(content)
    assert re.search(r"encoding (\d+) captions \(text encoders changed for \1\)", again())


@pytest.fixture
def photographs(tmp_path) -> Path:
    """Cut photographs into a few dozen, of several aspects, modes and formats."""
    folder = tmp_path / "photographs"
    (folder / "nested" / "deeper").mkdir(parents=True)
    names = ("astronaut", "coffee", "chelsea", "rocket", "camera")
    windows = [(192, 192), (256, 160), (160, 256)]
    for name in names:
        whole = Image.open(PHOTOGRAPHS / f"{name}.jpg")
        for number in range(6):
            width, height = windows[number % 3]
            left, top = (number * 37) % (whole.width - width), (number * 23) % (whole.height - height)
            part = whole.crop((left, top, left + width, top + height))
            place = folder / ("nested/deeper" if number % 2 else "nested") / f"a_photo_of_{name}_{number}"
            if number == 0:
                part.convert("CMYK").save(place.with_suffix(".jpg"))
            elif number == 1:
                part.convert("RGBA").save(place.with_suffix(".png"))
            elif number == 2:
                exif = Image.Exif()
                exif[0x0112] = 6
                part.convert("RGB").transpose(Image.Transpose.ROTATE_90).save(place.with_suffix(".jpeg"), exif=exif)
            else:
                part.save(place.with_suffix(".webp"))
    whole = next(folder.rglob("*rocket_3.webp")).with_name("cut_short.jpg")
    Image.open(PHOTOGRAPHS / "rocket.jpg").crop((0, 0, 192, 192)).save(whole)
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    (folder / "no_picture.png").write_bytes(b"this is no picture")
    return folder


def test_photographs_of_many_kinds_train_end_to_end_from_a_dataset_file(sdxl, photographs, train, tmp_path):
    config = tmp_path / "multidatabackend.json"
    entry = {"type": "local", "resolution": 64, "caption_strategy": "filename"}
    squares = {"instance_data_dir": str(photographs / "nested"), "crop": True, "crop_style": "random", "repeats": 1}
    texts = {"dataset_type": "text_embeds", "type": "local", "cache_dir": str(tmp_path / "text"), "default": True}
    photos = {"id": "photos", "instance_data_dir": str(photographs), **entry}
    config.write_text(json.dumps([photos, {"id": "squares", **squares, **entry}, {"id": "text", **texts}]))
    flags = ("--model_family=sdxl", f"--pretrained_model_name_or_path={sdxl}", f"--data_backend_config={config}")
    before = {path: path.read_bytes() for path in photographs.rglob("*") if path.is_file()}
    run = train(tmp_path / "run", *flags, "--train_batch_size=2", "--num_train_epochs=1", world=2)
    assert "photos/no_picture.png" in run.said
    assert "photos/nested/deeper/cut_short.jpg" in run.said and "squares/deeper/cut_short.jpg" in run.said
    # 30 photographs once, and twice more in the square crops: 90 draws an epoch, over three buckets
    assert "60 in 3 buckets" in run.said
    assert len(run.rows) == 21, "what does not fill a batch of its bucket goes into the next epoch"
    assert list((tmp_path / "text").glob("*.shard"))
    assert before == {path: path.read_bytes() for path in photographs.rglob("*") if path.is_file()}
    again = train(tmp_path / "run", *flags, "--train_batch_size=2", "--num_train_epochs=2", world=2)
    assert "making" not in again.said and len(again.rows) == 2 * 90 // 4


def test_buckets_that_cannot_fill_the_batch_say_what_would(sdxl_flags, train, tmp_path):
    flags = (*sdxl_flags, "--train_batch_size=20", "--max_train_steps=1")
    refused = train(tmp_path / "run", *flags, code=4)
    assert "3 of 3 aspect buckets cannot fill the effective batch of 20" in refused.said
    assert "has 12, needs 20; smallest sufficient repeats: 1" in refused.said
    assert len(train(tmp_path / "run", *flags, "--repeats=1").rows) == 1
    assert len(train(tmp_path / "other", *flags, "--allow_dataset_oversubscription").rows) == 1


def test_a_pickle_is_refused_with_a_sentence(sdxl, shapes, train, tmp_path):
    for component, name in (("unet", "diffusion_pytorch_model.bin"), ("text_encoder", "pytorch_model.bin")):
        pipeline = tmp_path / component
        shutil.copytree(sdxl, pipeline)
        for weights in (pipeline / component).glob("*.safetensors"):
            weights.rename(weights.with_name(name))
        refused = train(tmp_path / "run", *base("sdxl", pipeline, shapes), "--max_train_steps=1", code=3)
        assert "a pickle: loading it can run any code, so it is refused" in refused.said


def test_v_prediction_is_read_from_the_scheduler_and_a_variant_is_loaded(sdxl, shapes, train, tmp_path):
    pipeline = tmp_path / "base"
    shutil.copytree(sdxl, pipeline)
    scheduler = pipeline / "scheduler" / "scheduler_config.json"
    losses = {}
    for prediction in ("epsilon", "v_prediction"):
        scheduler.write_text(json.dumps({**json.loads(scheduler.read_text()), "prediction_type": prediction}))
        run = train(tmp_path / prediction, *base("sdxl", pipeline, shapes), "--max_train_steps=1")
        said_so = (*base("sdxl", sdxl, shapes), f"--prediction_type={prediction}", "--max_train_steps=1")
        forced = train(tmp_path / f"{prediction}-forced", *said_so)
        assert run.losses == pytest.approx(forced.losses)
        losses[prediction] = run.losses
    assert losses["epsilon"] != losses["v_prediction"]
    from safetensors.torch import save_file

    weights = pipeline / "unet" / "diffusion_pytorch_model.safetensors"
    halves = {name: value.to(torch.float16) for name, value in load_file(weights).items()}
    save_file(halves, weights.with_name("diffusion_pytorch_model.fp16.safetensors"), metadata={"format": "pt"})
    flags = (*base("sdxl", pipeline, shapes), "--max_train_steps=1")
    assert train(tmp_path / "both", *flags).losses == losses["v_prediction"]
    variant = train(tmp_path / "fp16", *flags, "--variant=fp16")
    assert variant.losses != losses["v_prediction"]
    assert variant.losses == pytest.approx(losses["v_prediction"], rel=1e-2)


def test_a_run_inside_its_own_pictures_never_trains_on_what_it_draws_and_draws_the_empty_prompt(
    sdxl, shapes, train, tmp_path
):
    pictures = tmp_path / "pictures"
    shutil.copytree(shapes, pictures)
    (pictures / "phone.jxl").touch()
    output = pictures / "out"
    flags = (*base("sdxl", sdxl, pictures), "--train_batch_size=4", "--caption_strategy=instanceprompt")
    flags = (*flags, "--instance_prompt=a shape", "--validation_prompt=", "--validation_num_inference_steps=1")
    flags = (*flags, f"--cache_dir_vae={pictures / 'latents'}")
    first = train(output, *flags, "--max_train_steps=1")
    assert "warning: 1 file not read: 1 .jxl" in first.said
    assert "36 in 3 buckets (" in first.said
    assert (output / "validation" / "step-000001" / "trained-00.png").is_file() and (output / "loss.png").is_file()
    second = train(output, *flags, "--validation_prompt=a shape", "--max_train_steps=2")
    assert f"{output} is left out of the images: this run writes there" in second.said
    assert "36 in 3 buckets (" in second.said and "changed since the checkpoint" not in second.said
    names = [path.name for path in sorted((output / "validation" / "step-000002").iterdir())]
    assert names == ["trained-00.png", "trained-01.png"]


def test_compressed_caches_and_latents_in_bf16_train_as_plain_ones(flux, shapes, train, tmp_path):
    flags = (*base("flux", flux, shapes), "--max_train_steps=2")
    plain = train(tmp_path / "plain", *flags)
    small = train(tmp_path / "small", *flags, "--compress_disk_cache")
    assert small.losses == plain.losses
    for kind in ("latents/shapes0", "text"):
        folders = [run.output / "cache" / kind for run in (plain, small)]
        sizes = [sum(path.stat().st_size for path in folder.rglob("*.shard")) for folder in folders]
        assert sizes[1] < sizes[0]
    mixed = train(tmp_path / "plain", *flags, "--compress_disk_cache", "--max_train_steps=3")
    assert "making" not in mixed.said, "what is compressed or not is no part of a record's key"
    halved = train(tmp_path / "small", *flags, "--vae_cache_dtype=bf16", "--max_train_steps=4")
    assert "encoding 36 images (dtype changed for 36)" in halved.said
    assert len(halved.rows) == 4


def test_what_is_encoded_while_training_is_what_a_cache_would_hold_on_one_rank_and_on_two(
    flux, shapes, train, tmp_path
):
    flags = (*base("flux", flux, shapes), "--max_train_steps=3", "--validation_prompt=a red circle")
    one_by_one = ("--vae_batch_size=1", "--text_encoder_batch_size=1")
    cached = train(tmp_path / "cached", *flags, *one_by_one)
    on_demand = ("--vae_cache_disable", "--text_cache_disable")
    for world in (1, 2):
        sizes = (f"--train_batch_size={4 // world}",)
        beside = train(tmp_path / f"beside{world}", *flags, *sizes, *on_demand, world=world)
        same = cached if world == 1 else train(tmp_path / "two", *flags, *sizes, *one_by_one, world=world)
        assert beside.losses == same.losses and len(beside.losses) == 3
        assert "making" not in beside.said
        assert not [*beside.output.rglob("*.shard")]
    images = [next(run.glob("validation/grid-000003.png")).read_bytes() for run in (cached.output, beside.output)]
    assert images[0] == images[1]


def test_what_is_encoded_at_its_first_use_is_stored_and_no_run_encodes_it_again(flux, shapes, train, tmp_path):
    flags = (*base("flux", flux, shapes), "--dataloader_prefetch_qlen=1")
    flags = (*flags, "--vae_batch_size=1", "--text_encoder_batch_size=1")
    losses = {}
    for name, kind in (("filled", ()), ("grown", ("--vae_cache_ondemand", "--text_cache_ondemand"))):
        train(tmp_path / name, *flags, *kind, "--max_train_steps=3", "--train_batch_size=2", world=2)
        if kind:
            first = stored_names(tmp_path / name)
            images = {name for names in first.values() for name in names if name.endswith(".png")}
            assert 12 <= len(images) < 36, "what is not needed yet is not encoded"
            assert all(len(names) == len({*names}) for names in first.values()), "no rank has encoded anything twice"
        losses[name] = train(tmp_path / name, *flags, *kind, "--max_train_steps=12", "--train_batch_size=4").losses
    assert losses["grown"] == losses["filled"] and len(losses["grown"]) == 12
    second = stored_names(tmp_path / "grown")
    again = [name for name in second["rank000"] if name in {*first["rank000"], *first["rank001"]}]
    assert sorted(again) == sorted(first["rank000"]), "the resumed run encodes nothing that either rank has stored"
    assert len({name for names in second.values() for name in names if name.endswith(".png")}) == 36


def stored_names(output: Path) -> dict[str, list[str]]:
    """Return the names of all cached records by the rank that has written them, repeated ones too."""
    names: dict[str, list[str]] = {"rank000": [], "rank001": []}
    for index in (output / "cache").rglob("*.index.jsonl"):
        names[index.name[:7]] += [json.loads(line)["name"] for line in index.read_text().splitlines()]
    return names


def test_only_some_datasets_are_cached_each_where_it_says_and_a_damaged_image_ends_the_others_by_name(
    flux, shapes, train, tmp_path
):
    shutil.copytree(shapes, tmp_path / "more")
    entry = {"type": "local", "instance_data_dir": str(tmp_path / "more")}
    entries = [
        {"id": "kept", "type": "local", "instance_data_dir": str(shapes), "image_embeds": "all", "text_embeds": "own"},
        {"id": "beside", **entry, "vae_cache_disable": True, "compress_cache": True},
        {"id": "all", "dataset_type": "image_embeds", "cache_dir": str(tmp_path / "vae")},
        {"id": "rest", "dataset_type": "text_embeds", "cache_dir": str(tmp_path / "rest"), "default": True},
        {"id": "own", "dataset_type": "text_embeds", "cache_dir": str(tmp_path / "own")},
    ]
    (tmp_path / "d.json").write_text(json.dumps(entries))
    flags = ("--model_family=flux", f"--pretrained_model_name_or_path={flux}")
    flags = (*flags, f"--data_backend_config={tmp_path / 'd.json'}", "--train_batch_size=4")
    run = train(tmp_path / "run", *flags, "--max_train_steps=4", world=2)
    assert "encoding 36 images" in run.said
    assert all([*(tmp_path / name).glob("*.shard")] for name in ("vae", "rest", "own"))
    assert not [*(run.output / "cache").rglob("*.shard")]
    for path in (tmp_path / "more").glob("*.png"):
        path.write_bytes(path.read_bytes()[:-200])
    ended = train(tmp_path / "run", *flags, "--max_train_steps=20", world=1, code=4)
    assert re.search(r"beside/\S+\.png cannot be decoded: .*", ended.said)
    assert "leave out vae_cache_disable" in ended.said
