"""The sound of clips: in time with their frames, at any rate and layout, and what damaged tracks say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from video_files import damage_sound, tone, write_film, write_video

from simpletuner.data.images.images import DECODE_ERRORS
from simpletuner.data.images.sounds import SoundFormat, read_sound
from simpletuner.data.images.videos import Clip, read_video_header

WANTED = SoundFormat(16000, 2, 24)
HERTZ = 440.0


def sound(
    path: Path, start: int = 0, frames: int = 17, stride: float = 1.0, wanted: SoundFormat = WANTED
) -> np.ndarray:
    with path.open("rb") as file:
        return read_sound(file, Clip(start, stride), frames, wanted)


def expected(start_seconds: float, speed: float = 1.0, hertz: float = HERTZ) -> np.ndarray:
    seconds = start_seconds + speed * np.arange(WANTED.samples(17)) / WANTED.rate
    return np.sin(2 * np.pi * hertz * seconds)


def expect(found: np.ndarray, wave: np.ndarray, within: float = 0.06) -> None:
    """Compare all but the ends, where a filter has nothing to read; half a sample at 48 kHz is 0.03 of HERTZ."""
    assert found.shape == (2, len(wave)) and found.dtype == np.float32
    assert np.abs(found - wave)[:, 200:-200].max() < within


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"layout": "mono"},
        {"sound_rate": 44100},
        {"sound_rate": 16000},
        {"codec": "aac", "within": 0.2},
        {"sound_rate": 8000, "within": 0.18},
    ],
    ids=str,
)
def test_sound_is_in_time_with_the_frames(keys, start, tmp_path):
    film = {name: value for name, value in keys.items() if name != "within"}
    path = write_film(tmp_path / "a.mov", tone(HERTZ, 1, keys.get("sound_rate", 48000)), **film)
    found = sound(path, start)
    expect(found, expected(start / 24), keys.get("within", 0.06))
    assert np.abs(found).max() > 0.9  # mono, too, whose level FFmpeg would lower


def test_frames_that_are_shown_faster_or_slower_take_their_sound_with_them(tmp_path):
    path = write_film(tmp_path / "a.mov", tone(HERTZ, 2), frames=60, rate=30)
    expect(sound(path, 6), expected(6 / 30, 24 / 30))
    expect(sound(path, 0, stride=1.25), expected(0))  # 24 of 30 frames: in time
    expect(sound(path, 0, stride=2.5), expected(0, 2.0))


def test_sound_that_ends_before_the_frames_is_silent_then(tmp_path):
    path = write_film(tmp_path / "a.mov", tone(HERTZ, 0.5))
    found, wave = sound(path), expected(0)
    end = WANTED.samples(12)
    assert not found[:, end + 50 :].any()
    assert np.abs(found - wave)[:, 200 : end - 50].max() < 0.06
    assert not sound(write_film(tmp_path / "b.mov", tone(HERTZ, 0.2), frames=72), start=48).any()


def test_of_several_tracks_the_default_one_is_taken_and_of_many_channels_a_mix(tmp_path):
    two = write_film(tmp_path / "two.mov", tone(HERTZ, 1), tone(3 * HERTZ, 1))
    expect(sound(two), expected(0))
    many = sound(write_film(tmp_path / "many.mov", 0.2 * tone(HERTZ, 1), layout="5.1"))
    assert 0.2 < np.abs(many).max() < 0.6
    loud = sound(write_film(tmp_path / "loud.mov", tone(HERTZ, 1), layout="5.1"))
    assert np.abs(loud).max() == 1
    one = SoundFormat(16000, 1, 24)
    assert sound(two, wanted=one).shape == (1, one.samples(17))


def test_headers_say_whether_there_is_sound(tmp_path):
    paths = {write_film(tmp_path / "a.mov", tone(HERTZ, 1)): True, write_video(tmp_path / "b.mp4"): False}
    paths |= {write_video(tmp_path / "c.gif"): False, write_video(tmp_path / "d.webp"): False}
    for path, has_sound in paths.items():
        with path.open("rb") as file:
            assert read_video_header(file).has_sound == has_sound


def test_what_is_wrong_with_a_track_is_one_sentence(tmp_path):
    def why(path: Path) -> str:
        with pytest.raises(DECODE_ERRORS) as raised:
            sound(path)
        return str(raised.value)

    assert why(write_video(tmp_path / "a.mp4")) == "has no sound track that can be decoded"
    assert why(write_video(tmp_path / "a.webp")) == "has no sound track that can be decoded"
    assert (
        why(damage_sound(write_film(tmp_path / "noise.mp4", tone(HERTZ, 1), codec="aac")))
        == "has a damaged sound track"
    )
    film = write_film(tmp_path / "film.mov", tone(HERTZ, 1)).read_bytes()
    assert b"\xbb\x80\x00\x00" in film  # 48000 Hz
    (tmp_path / "rate.mov").write_bytes(film.replace(b"\xbb\x80\x00\x00", b"\x00\x05\x00\x00"))
    assert why(tmp_path / "rate.mov") == "has 5 samples of sound per second in its header, which is damaged"
