"""Count the validation clips of the demo in which the shape moves as the caption says, in the colour that it says."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

import av
import numpy

LEAST_PX = 6  # a quarter of the way that drawn shapes go
LEAST_CHROMA = 60  # of 255, between the strongest and the weakest part of a colour; the background is grey
HUES = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0)}


def read_frames(path: Path) -> numpy.ndarray:
    """Return a clip as frames x height x width x 3, in 0..255."""
    with av.open(path) as container:
        return numpy.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(float)


def find_shape(frame: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray] | None:
    """Return the centroid of what is coloured, x and y in px, and its mean colour; None where nothing is."""
    mask = numpy.ptp(frame, axis=-1) > LEAST_CHROMA
    if not mask.any():
        return None
    rows, columns = numpy.nonzero(mask)
    return numpy.array([columns.mean(), rows.mean()]), frame[mask].mean(axis=0)


def nearest_colour(mean: numpy.ndarray) -> str:
    """Name the colour whose hue is nearest, by the angle to it."""
    chroma = mean - mean.min()
    return max(HUES, key=lambda name: chroma @ numpy.array(HUES[name]) / numpy.linalg.norm(HUES[name]))


def direction_of(way: numpy.ndarray) -> str:
    """Name the direction of a displacement in px; `nowhere` where it is short."""
    axis = int(numpy.abs(way).argmax())
    if abs(way[axis]) < LEAST_PX:
        return "nowhere"
    return (("left", "right"), ("up", "down"))[axis][int(way[axis] > 0)]


def judge(path: Path) -> tuple[str, str, numpy.ndarray]:
    """Return colour, direction and displacement in px of a clip's shape."""
    frames = read_frames(path)
    first, last = find_shape(frames[0]), find_shape(frames[-1])
    if first is None or last is None:
        return "nothing", "nowhere", numpy.zeros(2)
    way = last[0] - first[0]
    return nearest_colour(last[1]), direction_of(way), way


def main() -> None:
    """Judge the clips of the last validation, or of a step, and print each with the two counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="output_dir of the run")
    parser.add_argument("--step", type=int, help="that of the validation (default: the last)")
    options = parser.parse_args()
    captions = tomllib.loads(Path(__file__).with_name("demo.toml").read_text())["validation_prompt"]
    steps = sorted(
        (options.output / "validation").glob("step-*" if options.step is None else f"step-{options.step:06d}")
    )
    moved, coloured = 0, 0
    for caption, path in zip(captions, sorted(steps[-1].glob("*.mp4")), strict=True):
        colour, direction, way = judge(path)
        moved += caption.endswith(direction)
        coloured += colour in caption.split()
        print(f"{caption:28}  {colour} moves {direction}: {way[0]:+.0f}, {way[1]:+.0f} px")
    print(f"{steps[-1].name}: {moved} of {len(captions)} move as the caption says, {coloured} have its colour")


if __name__ == "__main__":
    main()
