"""From video files to clips: lengths, places, buckets, keys of caches, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scanning
from dataset_files import data_of, image, refusal
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tabled import scan_table
from video_files import SIZE, numbers_of, write_video

from simpletuner.caches.latents import decode_image
from simpletuner.caches.store.records import latents_parts
from simpletuner.data.config.dataset_parts import VideoSettings
from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.config.datasets import load_datasets
from simpletuner.data.images.videos import are_long_enough, clip_frames, clip_of, strides_of
from simpletuner.data.samples.buckets import make_buckets
from simpletuner.data.samples.dataset_warnings import dataset_warnings, remark_on_rates
from simpletuner.data.samples.discovery import Discovery
from simpletuner.errors import DataError
from simpletuner.importing.trainers.diffusion_pipe import clip_lengths
from simpletuner.models.catalog.support import clip_fps
from simpletuner.models.families.ltxvideo import LTXVideo
from simpletuner.models.families.ltxvideo2 import LTXVideo2
from simpletuner.models.families.wan import Wan
from simpletuner.settings.declared.sections import Data, Model
from simpletuner.tools.dataset.contact_sheets import thumbnail_of


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for name, frames in {"long.mp4": 20, "middle.mkv": 13, "short.webm": 6}.items():
        write_video(folder / name, frames=frames)
    (folder / "broken.mp4").write_bytes(b"no film")
    (folder / "cover.jpg").write_bytes(b"")
    return folder


def clips(folder: Path, step: int = 4, **video) -> Discovery:
    values = {"caption_strategy": "filename", "resolution": 64, "video": VideoSettings.model_validate(video)}
    dataset = LocalImages(id="films", dataset_type="video", instance_data_dir=folder, **values)
    return scanning.found([dataset], alignment_px=16, frame_step=step)


def test_lengths_follow_the_family_and_short_videos_are_left_out(videos):
    found = clips(videos, num_frames=14, min_frames=7)
    assert {each.name: each.geometry.target.frames for each in found.samples} == {"long.mp4": 13, "middle.mkv": 13}
    assert found.other_lengths == 1 and found.broken.keys() == {"films/broken.mp4"}
    assert list(make_buckets(found.samples)) == ["80x48@13"]
    assert {each.geometry.target.frames for each in clips(videos, step=8, num_frames=14).samples} == {9}
    [warning] = [each for each in dataset_warnings(found, 16) if "not read" in each]
    assert "1 .jpg" in warning and "what is read is MP4, MOV" in warning


def test_each_clip_has_the_longest_of_frame_buckets_that_its_video_fills(videos):
    found = clips(videos, frame_buckets=[17, 8, 33])
    assert {each.name: each.geometry.target.frames for each in found.samples} == {
        "long.mp4": 17,
        "middle.mkv": 5,  # 8 is 5 to a family that takes 4n + 1
        "short.webm": 5,
    }
    assert found.other_lengths == 0
    found = clips(videos, step=8, frame_buckets=[17, 9], max_frames=13)
    assert {each.name: each.geometry.target.frames for each in found.samples} == {"middle.mkv": 9}
    assert found.other_lengths == 2, "one is too short for 9 frames, one longer than asked for"
    halved = clips(videos, frame_buckets=[9, 5], fps=12.5).samples  # of 25
    assert {each.name: each.geometry.target.frames for each in halved} == {"long.mp4": 9, "middle.mkv": 5}


@pytest.mark.parametrize(
    ("video", "limits"),
    [
        ({"frame_buckets": [81, 49, 1 << 62]}, r"frame_buckets = \[49, 81, 4611686018427387904\]"),
        ({}, "num_frames = 125"),
        ({"num_frames": 81, "fps": 12.5}, "num_frames = 81, fps = 12.5"),
        ({"min_frames": 30, "max_frames": 40}, "min_frames = 30, max_frames = 40"),
    ],
)
def test_what_leaves_out_all_videos_is_named(videos, tmp_path, video, limits):
    with pytest.raises(DataError, match=rf"\(1 broken, 3 shorter or longer than {limits} allow, 1 not read\)"):
        clips(videos, **video)
    write_video(tmp_path / "long.mp4")
    with pytest.raises(DataError, match=rf"\(1 shorter or longer than {limits} allow\)") as error:
        clips(tmp_path, **video)
    assert error.value.hint.startswith("change that to what the videos have")
    (tmp_path / "long.mp4").unlink()
    with pytest.raises(DataError, match="no usable video in [^(]*$") as error:
        clips(tmp_path, **video)
    assert "MP4, MOV" in error.value.hint, "nothing is there at all"


def test_each_video_may_keep_its_own_length(videos):
    found = clips(videos, bucket_strategy="resolution_frames", frame_interval=3, max_frames=19)
    assert {each.name: each.geometry.target.frames for each in found.samples} == {"middle.mkv": 9, "short.webm": 5}
    assert sorted(make_buckets(found.samples)) == ["80x48@5", "80x48@9"]


@pytest.mark.parametrize(("position", "first"), [("start", 0), ("middle", 5), ("random", None)])
def test_the_clip_is_decoded_from_its_place(videos, position, first):
    sample = clips(videos, num_frames=9, clip_position=position).samples[0]
    assert sample.name == "long.mp4" and sample.geometry.clip
    start = sample.geometry.clip.start if first is None else first
    assert numbers_of(list(sample.images(SIZE))) == list(range(start, start + 9))
    pixels = decode_image(sample)
    assert not isinstance(pixels, str) and pixels.shape == (3, 9, 48, 80) and pixels.is_contiguous()
    grey = (pixels[:, :, -4:, -4:].mean(dim=(0, 2, 3)) + 1) * 127.5 / 12
    assert np.allclose(grey, range(start, start + 9), atol=0.5)


def test_a_slower_rate_leaves_frames_out(videos):
    sample = clips(videos, num_frames=9, fps=12.5).samples[0]
    assert sample.geometry.clip and sample.geometry.clip.stride == 2
    assert numbers_of(list(sample.images(SIZE))) == list(range(0, 18, 2))


def test_the_key_of_a_clip_names_it_and_that_of_an_image_does_not(videos, tmp_path):
    first, second = (clips(videos, num_frames=9, clip_position=place).samples[0] for place in ("start", "middle"))
    parts = [latents_parts(each, "vae", "fp32") for each in (first, second)]
    assert {name for name in parts[0] if parts[0][name] != parts[1][name]} == {"clip"}
    write_video(tmp_path / "a.gif", frames=1)
    dataset = LocalImages(id="d", instance_data_dir=tmp_path, caption_strategy="filename")
    [still] = scanning.found([dataset]).samples
    assert "clip" not in latents_parts(still, "vae", "fp32")


def test_sheets_show_the_first_the_middle_and_the_last_frame(videos):
    sample = clips(videos, num_frames=9).samples[0]
    shown = thumbnail_of(sample)
    assert not isinstance(shown, str)
    levels = [shown.getpixel((shown.width // 2 + 4, round(shown.height * place)))[0] for place in (0.25, 0.6, 0.93)]
    assert levels[0] < levels[1] < levels[2]


def test_a_table_replaces_headers_of_videos(videos, tmp_path):
    rows = [
        {"filename": "long.mp4", "caption": "a", "width": 64, "height": 48, "num_frames": 20, "fps": 25},
        {"filename": "middle.mkv", "caption": "b", "width": 64, "height": 48, "num_frames": 0, "fps": 25},
        {"filename": "short.webm", "caption": "c", "width": 64, "height": 48, "num_frames": 60, "fps": 25},
    ]
    table = tmp_path / "table.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    block = {"dataset_type": "video", "metadata_backend": "parquet", "caption_strategy": "parquet"}
    scanned = scan_table(videos, table, {"filename_column": "filename"}, **block, video={"num_frames": 9})
    found = scanned.found
    assert scanned.opened == ["middle.mkv"]  # whose row has no length; what has no row is not opened
    lengths = {each.name: each.geometry.original.frames for each in found.samples}
    assert lengths == {"long.mp4": 20, "middle.mkv": 13, "short.webm": 60}
    said = {each.name: decode_image(each) for each in found.samples}
    assert isinstance(said["short.webm"], str) and "ends after 6 frames, and 9 are needed" in said["short.webm"]
    assert not isinstance(said["middle.mkv"], str)


@given(
    length=st.integers(1, 500),
    rate=st.sampled_from([0.0, 12.0, 23.976, 25.0, 29.97, 60.0]),
    step=st.sampled_from([1, 4, 8]),
    fps=st.sampled_from([None, 8.0, 16.0, 24.0]),
    frames=st.integers(1, 200),
    place=st.sampled_from(["start", "middle", "random"]),
)
def test_a_clip_lies_in_its_video_and_has_a_length_that_the_family_takes(length, rate, step, fps, frames, place):
    video = VideoSettings.model_validate({"num_frames": frames, "fps": fps, "clip_position": place})
    lengths, rates = np.array([length]), np.array([rate])
    [count], [stride] = clip_frames(video, lengths, rates, step).tolist(), strides_of(video, rates).tolist()
    assert 1 <= count <= frames and (count - 1) % step == 0
    clip = clip_of(video, "a/b", length, count, stride, seed=3)
    numbers = clip.frame_numbers(count)
    assert numbers[0] >= 0 and numbers[-1] < length and numbers == sorted({*numbers})
    assert are_long_enough(video, lengths, rates, step)[0] == (count == (frames - 1) // step * step + 1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"video": {"num_frames": 9}}, "it is for dataset_type video, or eval"),
        (
            {"dataset_type": "video", "video": {"num_frame": 9}},
            "unknown key; did you mean `video.num_frames`?",
        ),
        ({"dataset_type": "video", "video": {"num_frames": 0}}, "video.num_frames = 0"),
        (
            {"dataset_type": "video", "video": {"num_frames": 9, "max_frames": 5}},
            "is below what min_frames, num_frames or frame_buckets asks for",
        ),
        ({"dataset_type": "video", "video": {"frame_interval": 4}}, "bucket_strategy resolution_frames"),
        ({"dataset_type": "video", "video": {"frame_buckets": [9], "num_frames": 9}}, "leave num_frames"),
        ({"dataset_type": "video", "video": {"frame_buckets": [9, 0]}}, "use a list of lengths in frames"),
        ({"dataset_type": "video", "video": {"frame_buckets": [9, 1 << 64]}}, "use a list of lengths in frames"),
        ({"dataset_type": "video", "video": {"frame_buckets": []}}, "use a list of lengths in frames"),
        ({"dataset_type": "video", "video": {"frame_buckets": [9, 17], "max_frames": 8}}, "or frame_buckets asks for"),
        ({"dataset_type": "video", "video": {"clip_position": "end"}}, "video.clip_position = 'end'"),
        ({"dataset_type": "video", "is_i2v": True}, "it belongs into the block `video`"),
    ],
)
def test_mistakes_in_the_block_name_their_key(tmp_path, values, said):
    assert said in refusal(data_of(tmp_path, image(**values)))


def test_held_out_videos_and_defaults(tmp_path):
    data: Data = data_of(
        tmp_path, image(dataset_type="video"), image(id="two", dataset_type="eval", video={"num_frames": 9})
    )
    (first, second), _ = load_datasets(data)
    assert first.clips and first.clips.wanted_frames == 125 and second.clips and second.dataset_type == "eval"


def test_clips_of_another_rate_than_the_model_are_counted_with_their_rates(tmp_path):
    for name, rate in {"a.mp4": 16, "b.mp4": 24, "c.mkv": 30, "d.mp4": 12}.items():
        write_video(tmp_path / name, frames=13, rate=rate)
    [scan] = clips(tmp_path, num_frames=5).scans
    count, sentence = remark_on_rates(scan, clip_fps(Model(model_family="wan", model_flavour="t2v-14b-2.2-high")))
    assert count == 3 and "3 videos with other frames per second than the 16 of the model" in sentence
    assert all(part in sentence for part in ("1 of 24", "1 of 30", "1 of 12", '`"fps": 16`', "slower ones"))
    [slowed] = clips(tmp_path, num_frames=5, fps=16).scans
    count, sentence = remark_on_rates(slowed, 16)
    assert count == 1 and "1 of 12" in sentence and "fewer frames" not in sentence
    rates = {name: clip_fps(Model(model_family=name)) for name in ("ltxvideo", "ltxvideo2", "wan", "sanavideo", "sdxl")}
    assert rates == {"ltxvideo": 25, "ltxvideo2": 24, "wan": 16, "sanavideo": 16, "sdxl": 0}
    assert clip_fps(Model(model_family="wan", model_flavour="ti2v-5b-2.2")) == 24
    assert remark_on_rates(scan, 0) == (0, "")
    for family in (Wan, LTXVideo, LTXVideo2):
        assert clip_fps(Model(model_family=family.__name__.lower())) == family.frame_rate


def test_lengths_of_another_kind_in_a_file_of_diffusion_pipe_are_left_to_the_dataset_to_refuse():
    assert clip_lengths({"frame_buckets": [33, 1, 17]}) == [17, 33] and clip_lengths({}) == []
    for wrong in ([17, "33"], "17", [True], {"a": 1}):
        with pytest.raises(ValidationError, match="use a list of lengths in frames"):
            VideoSettings.model_validate({"frame_buckets": clip_lengths({"frame_buckets": wrong})})
