"""Frames and headers of video files, each format as it is written by FFmpeg or Pillow."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from video_files import CODECS, SIZE, frame_of, numbers_of, write_video

from simpletuner.data.images.image_formats import VIDEO_SUFFIXES
from simpletuner.data.images.images import DECODE_ERRORS, ImageHeader, read_rgb
from simpletuner.data.images.videos import read_frames, read_video_header
from simpletuner.settings.values.shape import Shape

SHAPE = Shape(20, SIZE[1], SIZE[0])


def header(path: Path) -> ImageHeader:
    with path.open("rb") as file:
        return read_video_header(file)


def frames(path: Path, numbers: Sequence[int], shape: Shape = SHAPE) -> list[Image.Image]:
    with path.open("rb") as file:
        return list(read_frames(file, numbers, shape))


@pytest.mark.parametrize("suffix", sorted(VIDEO_SUFFIXES - {".m4v"}))
def test_header_and_frames_of_each_format(suffix, tmp_path):
    path = write_video(tmp_path / f"a{suffix}")
    found = header(path)
    assert (found.size, found.frames, found.animated) == (SIZE, 20, True)
    assert found.fps == pytest.approx(25, rel=1e-3)
    # From the start, behind a key frame, every second one, one twice, up to the last.
    for numbers in ([0, 1, 2], [7, 8, 9, 10, 11], [1, 3, 5, 7], [6, 6, 8], [18, 19]):
        assert numbers_of(frames(path, numbers)) == numbers
    with pytest.raises(ValueError, match="ends after 20 frames, and 22 are needed"):
        frames(path, [19, 21])


def test_only_a_part_of_the_file_is_read_for_frames_in_the_middle(tmp_path):
    path = write_video(tmp_path / "a.mov", frames=20, size=(320, 240), codec="rawvideo", pixel_format="uyvy422")
    with path.open("rb") as file:
        counted = Counting(file)
        found = list(read_frames(counted, [10, 11], Shape(20, 240, 320)))
    assert numbers_of(found) == [10, 11]
    assert counted.bytes < path.stat().st_size / 2


def test_titles_may_be_in_any_encoding(tmp_path):
    plain, path = write_video(tmp_path / "plain.mp4"), tmp_path / "titled.mp4"
    with av.open(str(plain)) as source, av.open(str(path), "w") as target:
        target.metadata["title"] = "caf#"
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    content = path.read_bytes()
    assert b"caf#" in content
    path.write_bytes(content.replace(b"caf#", b"caf\xe9"))
    assert header(path).frames == 20 and numbers_of(frames(path, [3, 8])) == [3, 8]


class Counting:
    """A file that counts the bytes that are read of it."""

    def __init__(self, file) -> None:
        self.file, self.bytes, self.seek, self.tell = file, 0, file.seek, file.tell

    def read(self, count: int) -> bytes:
        content = self.file.read(count)
        self.bytes += len(content)
        return content


@pytest.mark.parametrize("turn", [90, 180, -90])
def test_a_rotated_film_is_turned_upright(turn, tmp_path):
    plain, path = write_video(tmp_path / "plain.mp4"), tmp_path / "turned.mp4"
    with av.open(str(plain)) as source, av.open(str(path), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        stream.set_display_rotation(turn)
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    size = SIZE if turn == 180 else SIZE[::-1]
    assert header(path).size == size
    [image] = frames(path, [0], Shape(20, size[1], size[0]))
    expected = Image.fromarray(frame_of(0)).rotate(turn, expand=True)
    assert np.abs(np.asarray(image).astype(int) - np.asarray(expected)).mean() < 8
    with pytest.raises(ValueError, match="has frames of .* the table is wrong, or the file changed"):
        frames(path, [0], Shape(20, 40, 40))


def test_a_film_of_variable_rate_keeps_its_speed(tmp_path):
    # Ten frames of 20 ms, then ten of 60 ms: 25 per second on average, so one of 40 ms is two of the first half.
    times = [20 * number if number < 10 else 200 + 60 * (number - 10) for number in range(20)]
    path = write_video(tmp_path / "a.mkv", times_ms=times)
    found = header(path)
    assert (found.frames, found.fps) == (20, pytest.approx(25, rel=0.06))
    shown = numbers_of(frames(path, list(range(19))))
    assert shown == sorted(shown) and {shown[1], shown[2]} <= {2, 3, 4} and shown[-1] >= 18
    assert len({*shown[5:]}) < len(shown[5:])  # slow frames are shown more than once


def test_frames_that_are_not_square_pixels_are_shown_in_their_width(tmp_path):
    path = write_video(tmp_path / "a.mkv", sample_aspect_ratio=2)
    assert header(path).size == (128, 48)
    assert frames(path, [3], Shape(20, 48, 128))[0].size == (128, 48)


def test_transparency_is_laid_over_white(tmp_path):
    path = tmp_path / "a.mov"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("qtrle", rate=25)
        stream.width, stream.height = SIZE
        stream.pix_fmt = "argb"
        rgba = np.zeros((SIZE[1], SIZE[0], 4), np.uint8)
        rgba[:, :32, 3] = 255
        container.mux(stream.encode(av.VideoFrame.from_ndarray(rgba, format="rgba")))
        container.mux(stream.encode(None))
    [image] = frames(path, [0])
    assert image.mode == "RGB" and image.getpixel((8, 8)) == (0, 0, 0) and image.getpixel((50, 8)) == (255, 255, 255)


def test_a_film_of_one_frame_is_an_image(tmp_path):
    for suffix in (*CODECS, ".gif", ".webp"):
        path = write_video(tmp_path / f"a{suffix}", frames=1)
        found = header(path)
        assert (found.size, found.frames, found.animated) == (SIZE, 1, False), suffix
        assert numbers_of(frames(path, [0])) == [0], suffix
    with path.open("rb") as file:
        assert np.array_equal(frames(path, [0])[0], read_rgb(file, SIZE))


@pytest.mark.parametrize("content", [b"", b"RIFF\0\0\0\0AVI ", b"\0\0\0\x18ftypmp42", b"#EXTM3U\n/etc/passwd\n"])
def test_what_is_no_film_is_said_in_one_sentence(content, tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(content)
    for read in (header, lambda path: frames(path, [0])):
        with pytest.raises(DECODE_ERRORS, match="is empty|is not a video in a known format, or is damaged"):
            read(path)


@pytest.mark.parametrize("suffix", sorted({*CODECS, ".gif", ".webp"}))
def test_damaged_and_cut_files_end_in_a_sentence_or_in_the_frames(suffix, tmp_path):
    content = write_video(tmp_path / f"a{suffix}").read_bytes()
    path, said = tmp_path / f"b{suffix}", set()
    numbers = np.random.default_rng(0)
    for attempt in range(24):
        damaged = bytearray(content)
        if attempt % 2:
            del damaged[int(numbers.integers(1, len(content))) :]
        for place in numbers.integers(0, len(damaged), 8):
            damaged[place] = int(numbers.integers(256))
        path.write_bytes(damaged)
        try:
            header(path)
            assert len(frames(path, [10, 11])) == 2
        except DECODE_ERRORS as error:
            said.add(str(error))
    assert said and all(text and "<" not in text for text in said), said


def test_sound_alone_is_no_video(tmp_path):
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=48000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 48000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(ValueError, match="has no video track"):
        header(path)


def test_without_pyav_nothing_of_it_is_imported():
    code = "import sys; sys.modules['av'] = None; import simpletuner.data.images.videos; "
    code += (
        "from simpletuner.data.images import image_formats as f; f.find_spec = lambda name: None; f.check_av('films')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "dataset `films` has videos, and PyAV (av) is not installed" in ended.stderr


@pytest.mark.parametrize(
    ("aspect", "found"),
    [
        ((2_000_000_000, 1), "pixels of 2,000,000,000 : 1 in its header, which is damaged"),
        ((1, 20000), "pixels of 1 : 20,000"),
        ((1_000_000, 1), "pixels of 1,000,000 : 1"),
        ((4, 3), (85, 48)),
    ],
)
def test_pixels_that_no_film_has_are_one_sentence(aspect, found, tmp_path):
    content = bytearray(write_video(tmp_path / "a.mp4", sample_aspect_ratio=2).read_bytes())
    place = content.index(b"pasp") + 4
    content[place : place + 8] = b"".join(each.to_bytes(4) for each in aspect)
    path = tmp_path / "b.mp4"
    path.write_bytes(content)
    if isinstance(found, tuple):
        assert header(path).size == found and frames(path, [3], Shape(20, found[1], found[0]))[0].size == found
        return
    for read in (header, lambda path: frames(path, [0])):
        with pytest.raises(ValueError, match=found):
            read(path)


@pytest.mark.parametrize("count", [2**32 - 1, 2**31 - 1])
def test_frames_that_a_file_cannot_hold_are_counted(count, tmp_path):
    content = bytearray(write_video(tmp_path / "a.mp4").read_bytes())
    place = content.index(b"stts") + 12
    content[place : place + 4] = count.to_bytes(4)
    (tmp_path / "b.mp4").write_bytes(content)
    assert header(tmp_path / "b.mp4").frames == 20


@pytest.mark.parametrize(("suffix", "count"), [(".gif", 9), (".gif", 13), (".webp", 9)])
@pytest.mark.parametrize(("duration_ms", "fps"), [(0, 10), (10, 10), (40, 25), (500, 2)])
def test_frames_without_a_time_are_shown_ten_per_second(suffix, count, duration_ms, fps, tmp_path):
    images = [Image.fromarray(frame_of(number)) for number in range(count)]
    path = tmp_path / f"a{suffix}"
    images[0].save(path, save_all=True, append_images=images[1:], duration=duration_ms, lossless=True)
    found = header(path)
    assert (found.frames, found.fps) == (count, fps)
    assert numbers_of(frames(path, list(range(count)))) == list(range(count))
