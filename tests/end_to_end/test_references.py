"""Pairs: each image has a reference under the same name, and the model learns to make one from the other."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, base
from PIL import Image

from simpletuner.caches.store.shards import ShardReader
from simpletuner.runs.images import read_rgb

COUNT = 8
FLAGS = ("--learning_rate=1e-3", "--aspect_bucket_alignment=64", "--max_train_steps=3")
VALIDATION = ("--validation_num_inference_steps=2", "--validation_step_interval=0", "--validation_guidance=1")


def dataset_file(path: Path, images: Path, *references: tuple[Path, str], **keys: object) -> str:
    place = {"type": "local", "resolution": 64, "caption_strategy": "filename"}
    entries = [{**place, "id": "images", "instance_data_dir": str(images), **keys}]
    entries[0]["conditioning_data"] = [f"references {number}" for number in range(len(references))]
    for number, (folder, kind) in enumerate(references):
        own = {"id": f"references {number}", "instance_data_dir": str(folder), "conditioning_type": kind}
        resolution = 91 if kind == "reference_loose" else 64  # of the area of 128 x 64 px
        entries.append({**place, **own, "dataset_type": "conditioning", "resolution": resolution})
    path.write_text(json.dumps(entries))
    return f"--data_backend_config={path}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Images of 64x64 px; references of the same shape, and others of two shapes of their own."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("images", "alike", "wide", "other")}
    drawn = np.random.default_rng(0)
    for number in range(COUNT):
        name = f"edit {number}"
        for folder, size in (("images", (64, 64)), ("alike", (96, 96)), ("other", (64, 64))):
            pixels = drawn.integers(0, 255, (*size, 3), np.uint8)
            Image.fromarray(pixels).save(made[folder] / f"{name}.{'png' if folder == 'images' else 'webp'}")
        wide = drawn.integers(0, 255, (64, 128, 3) if number % 2 else (128, 64, 3), np.uint8)
        Image.fromarray(wide).save(made["wide"] / f"{name}.png")
    return made


@pytest.fixture(scope="module")
def kontext(pipelines, tmp_path_factory) -> Path:
    folder = shutil.copytree(pipelines("flux"), tmp_path_factory.mktemp("kontext") / "model")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxKontextPipeline"}))
    return folder


def test_a_prompt_with_an_image_is_tried_on_a_run_that_trains_and_on_one_that_ended(
    folders, kontext, train, starter, sampled, tmp_path
):
    given, model = folders["wide"] / "edit 1.png", f"--pretrained_model_name_or_path={kontext}"
    flags = (
        *base("flux", kontext, Path("unused"))[:2],
        *FLAGS,
        "--model_type=lora",
        *VALIDATION,
        "--train_batch_size=2",
    )
    flags = (*flags, dataset_file(tmp_path / "pairs.json", folders["images"], (folders["alike"], "reference_strict")))
    drawn = ("--validation_prompt=edit it", f"--validation_images={given}", "--validation_resolution=64")
    output = train(tmp_path / "ended", *flags, *drawn).output
    [image], _ = sampled(output, "--prompt=edit it", model, f"--image={given}")
    assert read_rgb(image).tobytes() == read_rgb(output / "validation/step-000003/trained-00.png").tobytes()
    larger = (output, "--prompt=edit it", model, f"--image={given}", "--size=128")
    [strict], [loose] = sampled(*larger)[0], sampled(*larger, "--keep_aspect")[0]  # cropped, and of 192 x 64
    assert read_rgb(loose).size == read_rgb(strict).size and read_rgb(loose).tobytes() != read_rgb(strict).tobytes()
    (tmp_path / "torn.png").write_bytes(given.read_bytes()[:100])
    for words, sentence in (
        ((f"--image={given}", f"--image={given}"), "2 reference images, and FluxKontextPipeline takes at most 1"),
        ((f"--image={tmp_path / 'torn.png'}",), "torn.png cannot be decoded"),
        ((f"--image={tmp_path / 'none.png'}",), "none.png"),
        ((f"--image={tmp_path}",), "cannot be decoded"),
    ):
        said = sampled(output, "--prompt=x", model, *words, code=2)[1]
        assert sentence in said and "bug" not in said, said

    running = (f"--output_dir={tmp_path / 'runs'}", *SMALL, *flags, "--fsdp_enable", "--max_train_steps=100000")
    started = starter.train(2, *running)
    status = tmp_path / "runs" / "metrics.jsonl"
    while started.processes[0].is_alive() and not status.exists():
        time.sleep(0.1)
    [of_base, trained], said = sampled(tmp_path / "runs", "--prompt=edit it", model, f"--image={given}", "--with_base")
    started.kill()
    started.wait()
    assert "sampled at step" in said and trained.exists()
    [here], _ = sampled(output, "--prompt=edit it", model, f"--image={given}", "--base")
    differences = np.asarray(read_rgb(here)).astype(int) - np.asarray(read_rgb(of_base))
    assert abs(differences).max() <= 1


@pytest.mark.long
def test_references_count_alike_on_any_engine_after_a_resume_and_uncached(folders, kontext, train, tmp_path):
    flags = (*base("flux", kontext, Path("unused"))[:2], *FLAGS, "--eval_split=0.1")
    pairs = dataset_file(tmp_path / "pairs.json", folders["images"], (folders["alike"], "reference_strict"))
    others = dataset_file(tmp_path / "others.json", folders["images"], (folders["other"], "reference_strict"))
    plain = dataset_file(tmp_path / "plain.json", folders["images"])
    validation = (*VALIDATION, "--validation_pairs=1", f"--validation_prompt=edit it, {'x' * 40}")
    alone = train(tmp_path / "alone", *flags, pairs, *validation, "--train_batch_size=4")
    other, without = (
        train(tmp_path / name, *flags, file, "--train_batch_size=4").losses
        for name, file in (("other", others), ("plain", plain))
    )
    for one, two in zip(alone.losses * 2, [*other, *without], strict=True):
        assert abs(one / two - 1) > 1e-4, "the reference is not seen"
    files = {path.name for path in (tmp_path / "alone" / "validation" / "step-000003").iterdir()}
    assert files == {f"{weights}-0{number}.png" for weights in ("reference", "trained") for number in (0, 1)}
    with Image.open(tmp_path / "alone" / "validation" / "grid-000003.png") as grid:
        assert grid.height > 2 * 192, "the reference is above the result"

    sharded = (*flags, pairs, "--train_batch_size=2", "--fsdp_enable")
    train(tmp_path / "sharded", *sharded, "--max_train_steps=2", world=2)
    again = train(tmp_path / "sharded", *sharded, world=2)
    assert "encoding" not in again.said and again.losses == pytest.approx(alone.losses, rel=1e-5)
    split = train(
        tmp_path / "cp", *flags, pairs, "--train_batch_size=4", "--context_parallel_size=2", "--fsdp_enable", world=2
    )
    assert split.losses == pytest.approx(alone.losses, rel=1e-5)
    beside = dataset_file(tmp_path / "beside.json", folders["images"], (folders["alike"], "reference_strict"))
    uncached = train(tmp_path / "uncached", *flags, beside, "--vae_cache_disable", "--train_batch_size=4")
    assert uncached.losses == pytest.approx(alone.losses, rel=1e-4)


def test_references_of_their_own_shape_have_buckets_of_their_own(folders, pipelines, train, tmp_path):
    two = ((folders["alike"], "reference_strict"), (folders["wide"], "reference_loose"))
    file = dataset_file(tmp_path / "data.json", folders["images"], *two)
    flags = (*base("flux2", pipelines("flux2"), Path("unused"))[:2], *FLAGS, file, "--validation_prompt=edit 1")
    run = train(tmp_path / "run", *flags, *VALIDATION, "--train_batch_size=4", "--max_train_steps=2")
    assert "8 in 2 buckets (64x64+64x64+128x64: 4, 64x64+64x64+64x128: 4)" in " ".join(run.said.split())
    names = {path.name for path in (tmp_path / "run" / "validation" / "step-000002").iterdir()}
    assert names == {"reference-00-0.png", "reference-00-1.png", "trained-00.png"}


def test_missing_broken_and_unwanted_references_are_named(folders, kontext, pipelines, train, tmp_path):
    references = tmp_path / "references"
    shutil.copytree(folders["alike"], references)
    (references / "edit 5.webp").unlink()
    file = dataset_file(tmp_path / "data.json", folders["images"], (references, "reference_strict"))
    flags = (*base("flux", kontext, Path("unused"))[:2], *FLAGS, file, "--train_batch_size=1")
    said = train(tmp_path / "run", *flags, code=4).said
    assert "dataset `images`: 1 image without a reference in `references 0`:\n  edit 5.png" in said

    Image.new("RGB", (64, 96)).save(references / "edit 5.webp")
    (references / "edit 2.webp").write_bytes(b"RIFF\0")
    whole = (references / "edit 3.webp").read_bytes()
    (references / "edit 3.webp").write_bytes(whole[: len(whole) // 2])
    said = train(tmp_path / "run", *flags, "--max_train_steps=1").said
    assert "its reference edit 5.webp has 64x96 px, which is another shape (reference_loose takes it)" in said
    assert "images/edit 2.png: its reference edit 2.webp" in said
    assert "images/edit 3.png: its reference edit 3.webp" in said and "encoding" in said

    flags = (*base("flux", pipelines("flux"), Path("unused"))[:2], *FLAGS, file, "--train_batch_size=1")
    said = train(tmp_path / "plain", *flags, code=2).said
    assert "dataset `images`: 1 reference image, and FluxPipeline takes none" in said


def test_two_runs_by_auto_over_the_same_caches_lose_nothing_where_one_is_killed_as_it_writes(
    folders, kontext, starter, train, tmp_path
):
    data = dataset_file(tmp_path / "pairs.json", folders["images"], (folders["alike"], "reference_strict"))
    flags = ("--model_family=auto", f"--pretrained_model_name_or_path={kontext}", *FLAGS, data)
    own, shared = (
        {kind: tmp_path / name / kind for kind in ("vae", "text")} for name in ("own caches", "shared caches")
    )
    apart, together = (
        (*flags, *(f"--cache_dir_{kind}={place}" for kind, place in each.items())) for each in (own, shared)
    )
    wanted = train(tmp_path / "alone", *apart).losses
    killed, other = (starter.train(1, f"--output_dir={tmp_path / name}", *SMALL, *together) for name in ("a", "b"))
    while not [*shared["vae"].rglob("*.shard")] and killed.processes[0].is_alive():
        time.sleep(0.001)
    killed.kill()
    assert killed.wait() != [0] and other.wait() == [0], other.said
    assert train(tmp_path / "b", *together).losses == train(tmp_path / "a", *together).losses == wanted
    for kind, place in shared.items():
        found, expected = records(place), records(own[kind])
        assert found.keys() == expected.keys()
        for name, record in expected.items():
            assert all(torch.equal(record[each], found[name][each]) for each in record), name


def records(cache: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return all records of a cache, each of which its checksum was compared with."""
    readers = [ShardReader(folder) for folder in {path.parent for path in cache.rglob("*.shard")}]
    return {place.name: reader.read(place) for reader in readers for place in reader.records()}
