"""Models that continue the first frame of clips, on every engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, base
from end_to_end.test_videos import FLAGS, dataset_file
from models.test_image_to_video import save_wan
from PIL import Image
from ranks import command_line
from s3_server import BUCKET, s3_server
from video_files import write_video

from simpletuner.runs.images import read_rgb

PAIR = ("--validation_pairs=1",)
VALIDATION = ("--validation_num_inference_steps=2", "--validation_step_interval=0", "--validation_guidance=1")


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    for number in range(5):
        write_video(folder / f"disc {number}.mp4", frames=11 + number)
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


def add_bucket_of_texts(path: Path, server: str) -> None:
    """Add a cache of text embeddings in a bucket to a dataset file."""
    keys = {"aws_access_key_id": "AKIA", "aws_secret_access_key": "hidden", "aws_endpoint_url": server}
    place = {"aws_bucket_name": BUCKET, "aws_data_prefix": "texts", **keys}
    texts = {"id": "texts", "type": "aws", "dataset_type": "text_embeds", "default": True, **place}
    path.write_text(json.dumps([*json.loads(path.read_text()), texts]))


def clips_file(path: Path, clips: Path, **video: object) -> str:
    block = {"num_frames": 9, **video}
    return dataset_file(path, {"dataset_type": "video", "instance_data_dir": str(clips), "video": block})


@pytest.mark.long
@pytest.mark.parametrize("case", ["2.1-14b", "2.2-5b"])
def test_clips_continue_their_first_frame_on_any_engine(case, clips, server, pipelines, train, starter, tmp_path):
    folder = save_wan(pipelines("wan"), tmp_path / "model", case)
    flags = (*base("wan", folder, Path("unused"))[:2], *FLAGS, "--max_train_steps=3", "--eval_split=0.2")
    asked = {"is_i2v": True} if case == "2.2-5b" else {}
    file = clips_file(tmp_path / "clips.json", clips, **asked)
    if case == "2.1-14b":  # whose texts are embedded with the first frame
        add_bucket_of_texts(tmp_path / "clips.json", server)
    alone = train(tmp_path / "alone", *flags, file, *VALIDATION, *PAIR, "--train_batch_size=2")
    files = {path.name for path in (tmp_path / "alone" / "validation" / "step-000003").iterdir()}
    assert files == {"reference-00.png", "trained-00.png", "trained-00.mp4", "trained-00.webp"}
    sharded = (*flags, file, "--train_batch_size=1", "--fsdp_enable")
    begun = train(tmp_path / "sharded", *sharded, "--max_train_steps=2", world=2)
    again = train(tmp_path / "sharded", *sharded, world=2)
    assert "encoding" not in again.said and again.losses == pytest.approx(alone.losses, rel=1e-5)
    uncached = train(tmp_path / "uncached", *flags, file, "--train_batch_size=2", "--vae_cache_disable")
    assert uncached.losses == pytest.approx(alone.losses, rel=1e-4)
    if case == "2.1-14b":  # first frames, and texts with their embedding, are used by the run
        assert "captions with references" in alone.said and "captions with references" not in begun.said, "in a bucket"
        same = (f"--output_dir={tmp_path / 'alone'}", *SMALL, *flags, file, *PAIR, "--train_batch_size=2")
        cleared = starter.start(command_line, 1, ["cache", "clear", "--unused", "--yes", *same])
        assert cleared.wait() == [0] and "there is nothing to remove" in cleared.said, cleared.said
        listed = starter.start(command_line, 1, ["cache", "list", "--json", *same])
        assert listed.wait() == [0]
        items, _ = json.JSONDecoder().raw_decode(listed.said[listed.said.index("[\n") :])
        found = {Path(each["path"]).parent.name: each for each in items}
        assert found["texts-with-references"]["datasets"] == ["set0"]
        assert found["texts-with-references"]["bucket"] == f"s3://{BUCKET}/texts/with-references/set0"
    split = ("--train_batch_size=2", "--fsdp_enable", "--context_parallel_size=2")
    assert train(tmp_path / "split", *flags, file, *split, world=2).losses == pytest.approx(alone.losses, rel=1e-5)
    if case == "2.2-5b":  # without a first frame it is another task
        plain = train(tmp_path / "plain", *flags, clips_file(tmp_path / "p.json", clips), "--train_batch_size=2")
        assert all(abs(one / two - 1) > 1e-3 for one, two in zip(plain.losses, alone.losses, strict=True))


def test_clips_and_images_in_one_run_of_ltx_video(clips, pipelines, train, tmp_path):
    """A sample without a first frame has one time for all tokens, one with it a time for each: never in one batch."""
    (tmp_path / "images").mkdir()
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 255, (48, 80, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"noise {number}.png")
    video = {"dataset_type": "video", "instance_data_dir": str(clips)}
    images = {"instance_data_dir": str(tmp_path / "images")}
    block, plain = {"num_frames": 9, "is_i2v": True}, {"num_frames": 9}
    given = dataset_file(tmp_path / "given.json", {**video, "video": block}, {**video, "video": plain}, images)
    flags = (*base("ltxvideo", pipelines("ltxvideo"), Path("unused"))[:2], *FLAGS, "--train_batch_size=2")
    flags += ("--max_train_steps=4", "--aspect_bucket_alignment=32")
    prompt = ("--validation_prompt=disc", f"--validation_images={tmp_path / 'images' / 'noise 0.png'}")
    size = ("--validation_resolution=96x64", "--validation_num_video_frames=9")
    alone = train(tmp_path / "alone", *flags, given, *VALIDATION, *prompt, *size)
    files = {path.name for path in (tmp_path / "alone" / "validation" / "step-000004").iterdir()}
    assert {"reference-00.png", "trained-00.mp4"} <= files
    split = train(tmp_path / "split", *flags, given, "--fsdp_enable", "--context_parallel_size=2", world=2)
    assert split.losses == pytest.approx(alone.losses, rel=1e-5)
    other = dataset_file(tmp_path / "plain.json", {**video, "video": plain}, images)
    without = train(tmp_path / "plain", *flags, other)
    assert max(abs(one / two - 1) for one, two in zip(without.losses, alone.losses, strict=True)) > 1e-3


def test_a_given_image_is_continued_and_what_cannot_be_is_refused(clips, pipelines, train, sampled, tmp_path):
    folder = save_wan(pipelines("wan"), tmp_path / "model", "2.2-14b")
    flags = (*base("wan", folder, Path("unused"))[:2], *FLAGS, "--max_train_steps=1", "--train_batch_size=1")
    Image.fromarray(np.full((48, 64, 3), 200, np.uint8)).save(tmp_path / "given.png")
    given = ("--validation_prompt=disc", f"--validation_images={tmp_path / 'given.png'}", *VALIDATION)
    size = ("--validation_resolution=64x48", "--validation_num_video_frames=5")
    train(tmp_path / "run", *flags, clips_file(tmp_path / "clips.json", clips), *given, *size)
    with Image.open(tmp_path / "run" / "validation" / "step-000001" / "reference-00.png") as image:
        assert image.size == (64, 48) and image.getpixel((5, 5)) == (200, 200, 200)
    asked = (tmp_path / "run", "--prompt=disc", f"--pretrained_model_name_or_path={folder}", "--size=64x48@5")
    [clip], _ = sampled(*asked, f"--image={tmp_path / 'given.png'}")
    assert read_rgb(clip).tobytes() == read_rgb(tmp_path / "run/validation/step-000001/trained-00.png").tobytes()
    assert "samples from an image, and none is given hint: name it with --image" in sampled(*asked, code=2)[1]

    off = clips_file(tmp_path / "off.json", clips, is_i2v=False)
    said = train(tmp_path / "off", *flags, off, code=2).said
    assert "WanImageToVideoPipeline continues the first frame of clips" in said
    plain = (*base("wan", pipelines("wan"), Path("unused"))[:2], *FLAGS, "--max_train_steps=1", "--train_batch_size=1")
    said = train(tmp_path / "t2v", *plain, clips_file(tmp_path / "on.json", clips, is_i2v=True), code=2).said
    assert "video.is_i2v, but WanPipeline is given no first frame" in said
