"""Class images that the base model makes: shared by ranks, found again, killed in between, damaged, on a full disk."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import base
from PIL import Image

from simpletuner.runs.images import read_info

LORA = ("--model_type=lora", "--lora_rank=2", "--train_batch_size=4", "--allow_dataset_oversubscription")


@pytest.fixture
def class_flags(sdxl, few_shapes, tmp_path) -> Callable[..., tuple[str, ...]]:
    """Return flags of a run on a few shapes and images of their class, after writing the dataset file with changes."""

    def flags(folder: Path, pipeline: Path = sdxl, **changes: Any) -> tuple[str, ...]:
        made = {"id": "class", "instance_data_dir": str(folder), "resolution": 64, "is_regularisation_data": True}
        made |= {"prior_images": 5, "prior_captions_of": "own", "prior_num_inference_steps": 1, "prior_guidance": 2}
        made |= {"class_words": {"circle": "shape", "Square": "shape"}, **changes}
        own = {"id": "own", "instance_data_dir": str(few_shapes), "resolution": 64}
        file = tmp_path / f"{folder.name}.json"
        file.write_text(json.dumps([own, {key: value for key, value in made.items() if value is not None}]))
        model = base("sdxl", pipeline, few_shapes)
        kept = [each for each in model if "instance_data_dir" not in each]
        return (*kept, *LORA, f"--data_backend_config={file}", "--max_train_steps=1", "--checkpoint_step_interval=100")

    return flags


def pixels(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for path in sorted(folder.glob("*.png")):
        with Image.open(path) as image:
            found[path.name] = np.asarray(image)
    return found


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.png")}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_ranks_share_them_and_only_what_changed_is_made_again(class_flags, train, sdxl, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    alone = train(tmp_path / "alone", *class_flags(one))
    shared = train(tmp_path / "shared", *class_flags(two), world=2)
    assert "making 5 of 5 images by the base model of" in shared.said
    assert len(pixels(one)) == 5 and same(pixels(one), pixels(two))
    infos = [read_info(path)[1] for path in sorted(one.glob("*.png"))]
    assert [info.seed for info in infos] == [42, 43, 44, 45, 46]
    prompts = [info.prompt for info in infos]
    assert "a red shape" in prompts and not [each for each in prompts if "circle" in each or "square" in each]
    assert (
        "class images" in alone.said and "5 images by the base model of" in (alone.output / "report.html").read_text()
    )

    before = times(one)
    resumed = train(alone.output, *class_flags(one), "--max_train_steps=2")
    assert "class images of" not in resumed.said and "resuming from" in resumed.said and times(one) == before
    damaged = sorted(one.glob("*.png"))[:2]
    damaged[0].write_bytes(damaged[0].read_bytes()[:-40])
    damaged[1].unlink()
    mended = train(tmp_path / "mended", *class_flags(one, prior_images=6))
    assert "making 3 of 6 images" in mended.said and "(1 damaged)" in mended.said
    made = pixels(one)
    assert len(made) == 6 and same({name: made[name] for name in before}, pixels(two)), "the same bits again"
    assert sorted(name for name, time in times(one).items() if time == before.get(name)) == sorted(before)[2:]

    words = {"circle": "form", "square": "shape"}
    changed = " ".join(train(tmp_path / "words", *class_flags(two, class_words=words)).said.split())
    assert "prompt was 'a red shape', is 'a red form'; those before stay in" in changed
    assert before.keys() < times(two).keys()
    other = shutil.copytree(sdxl, tmp_path / "other")
    config = other / "scheduler/scheduler_config.json"
    config.write_text(config.read_text().replace("{", '{"of_another_revision": 1,', 1))
    rebased = train(tmp_path / "rebased", *class_flags(two, pipeline=other)).said
    assert "making 5 of 5" in rebased and "5 of another base model" in rebased


def test_a_killed_run_goes_on_with_those_that_it_lacks_also_where_ranks_share_the_base(
    class_flags, starter, train, tmp_path
):
    folder, output, count = tmp_path / "class", tmp_path / "run", 25  # no multiple of the ranks
    flags = class_flags(folder, prior_images=count)
    small = ("--resolution=64", "--aspect_bucket_alignment=16", "--mixed_precision=no")
    started = starter.train(2, f"--output_dir={output}", *small, *flags, "--fsdp_enable")
    while len(times(folder)) < 3 and started.processes[0].is_alive():
        time.sleep(0.01)
    started.kill()
    started.wait()
    kept = times(folder)
    assert 3 <= len(kept) < count
    (folder / ".000001-0123456789ab.png.01234567.unfinished").touch()  # as a kill within a write leaves it
    of_all_weights = [
        flag for flag in class_flags(folder, prior_images=count, is_regularisation_data=None) if "lora" not in flag
    ]
    said = train(output, *of_all_weights, *small, "--zero_stage=3", world=2).said
    assert f"making {count - len(kept)} of {count} images" in said and "damaged" not in said
    assert kept.items() <= times(folder).items() and len(pixels(folder)) == count
    alone = tmp_path / "alone"
    train(tmp_path / "one", *class_flags(alone, prior_images=count), *small)
    assert same(pixels(folder), pixels(alone)), "those of a whole denoiser on one rank"
    assert not [*folder.glob(".*")], "neither a lock nor a part of a file is left"


def test_two_runs_at_once_make_each_image_once(class_flags, starter, tmp_path):
    folder = tmp_path / "class"
    flags = ("--resolution=64", "--aspect_bucket_alignment=16", *class_flags(folder, prior_images=25))
    runs = [starter.train(1, f"--output_dir={tmp_path / name}", *flags) for name in ("a", "b")]
    assert [run.wait() for run in runs] == [[0], [0]], [run.said for run in runs]
    assert len(times(folder)) == 25
    made = [run.said.count("making 25 of 25 images") for run in runs]
    assert sum(made) == 1, "the other waits for them, or comes later"


def test_a_full_disk_and_what_cannot_be_made(class_flags, train, tmpfs, tmp_path):
    small = tmpfs("size=48k") / "class"
    said = " ".join(train(tmp_path / "full", *class_flags(small), code=3).said.split())
    assert "No space left on device" in said or "is full" in said
    kept = times(small)
    assert len(kept) < 5 and all(image.size for image in pixels(small).values())
    assert not [path for path in small.iterdir() if path.name not in kept]
    file = tmp_path / "class"
    file.write_text("")
    assert f"cannot use {file}" in train(tmp_path / "file", *class_flags(file), code=3).said
    for changes, code, sentence in (
        ({"class_words": {"sks": "x"}}, 4, "of `own` has 'sks', such as 'a red circle'"),
        ({"prior_guidance": -1}, 2, "prior_guidance"),
    ):
        said = " ".join(
            train(tmp_path / "wrong", *class_flags(tmp_path / "wrong class", **changes), code=code).said.split()
        )
        assert sentence in said, (changes, said)
        shutil.rmtree(tmp_path / "wrong", ignore_errors=True)
