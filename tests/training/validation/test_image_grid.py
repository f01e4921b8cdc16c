"""Validation images as files: what a PNG says of itself, and grids in which whole prompts can be read."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from simpletuner.runs.images import OWN_CHUNK, ImageInfo, read_info, write_image, write_png
from simpletuner.training.validation.image_grid import Typesetter, fonts_for, grid

FONTS = (
    Path("/usr/share/fonts-droid-fallback/truetype/DroidSansFallback.ttf"),
    Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"),
)
LONG = "a lighthouse at dusk, seen from the sea, with waves that break on the rocks, in the style of an oil painting"


def info(prompt: str, width: int = 64, **more) -> ImageInfo:
    values = {"negative_prompt": "", "seed": 42, "num_inference_steps": 30, "guidance": 7.5, "height": 64, "step": 100}
    return ImageInfo(**{"prompt": prompt, "width": width, "weights": "trained", **values, **more})


def cell(folder: Path, about: ImageInfo) -> tuple[Path, ImageInfo]:
    path = folder / f"{len([*folder.iterdir()])}.png"
    write_image(path, Image.new("RGB", (about.width, about.height), "navy"), about)
    return path, about


def drawn(text: str, size: int = 24) -> np.ndarray:
    sheet, typesetter = Image.new("RGB", (400, 40), "white"), Typesetter([text], size)
    typesetter.draw_lines(sheet, 0, 0, [text], "black")
    return np.asarray(sheet)


def test_a_png_says_how_it_was_made_and_an_older_one_says_nothing(tmp_path):
    about = info("猫 \n and 'quotes' 🎨" + LONG * 20, negative_prompt="blurry", weights="ema")
    path, _ = cell(tmp_path, about)
    assert read_info(path) == ((64, 64), about)
    with Image.open(path) as image:
        said = image.text["parameters"]
    assert said.startswith("猫 \n and 'quotes'")
    assert said.endswith("\nNegative prompt: blurry\nSteps: 30, CFG scale: 7.5, Seed: 42, Size: 64x64")
    Image.new("RGB", (8, 8)).save(tmp_path / "old.png")
    (tmp_path / "torn.png").write_bytes(path.read_bytes()[:60])
    assert read_info(tmp_path / "old.png") == ((8, 8), None)
    with pytest.raises(OSError, match=r"torn\.png"):
        read_info(tmp_path / "torn.png")


@pytest.mark.parametrize("odd", [{"guidance": "y"}, {"prompt": ["a"]}, {"width": None}, {"seed": 1e999}], ids=str)
def test_a_png_whose_metadata_are_odd_says_nothing(odd, tmp_path):
    path, about = cell(tmp_path, info("a"))
    write_png(path, Image.new("RGB", (16, 8)), {OWN_CHUNK: json.dumps(asdict(about) | odd)})
    assert read_info(path) == ((16, 8), None)
    write_png(path, Image.new("RGB", (16, 8)), {OWN_CHUNK: "[" * 100_000})
    assert read_info(path) == ((16, 8), None)


def test_prompts_are_whole_and_images_of_other_sizes_have_room(tmp_path):
    columns = [[cell(tmp_path, info(LONG)), cell(tmp_path, info(LONG, weights="ema"))], [cell(tmp_path, info("", 256))]]
    sheet = np.asarray(grid(columns))
    assert sheet.shape[1] == 8 + 192 + 8 + 256 + 8
    navy = (sheet == (0, 0, 128)).all(-1)
    assert navy.sum() == 2 * 192 * 192 + 256 * 64
    typesetter = Typesetter([LONG], 13)
    lines = typesetter.wrapped(LONG, 192)
    assert "".join(lines) == LONG and all(typesetter.length(line.rstrip()) <= 192 for line in lines) and len(lines) > 3
    assert [len(line) for line in Typesetter(["w"], 13).wrapped("w" * 40, 60)][:2] == [5, 5]
    assert len(typesetter.wrapped(LONG * 200, 192)) == 101
    above = sheet[: navy.any(1).argmax(), :200]
    assert (above < 128).any((1, 2)).sum() > 8 * len(lines), "as many lines of letters are above the image"
    wide = grid([[cell(tmp_path, info("a", 1024))] for _ in range(9)])
    assert wide.width < 8192 and wide.height > 2 * 64, "nine prompts of 1024 px are in two bands"


def test_scripts_and_emoji_are_drawn_by_installed_fonts_and_boxes_stand_for_what_none_has():
    if missing := [path for path in FONTS if not path.exists()]:
        assert "CI" not in os.environ, f"{missing} are missing"
        pytest.skip(f"{missing[0].name} is not installed (`make tools`)")
    assert not np.array_equal(drawn("猫"), drawn("犬"))
    emoji = drawn("🎨").astype(int)
    assert (emoji.max(-1) - emoji.min(-1)).max() > 60, "it has colours"
    assert emoji[30:].min() == 255 and (emoji[:30] < 200).any(), "it stands on the line"
    assert np.array_equal(drawn("\U000f0000"), drawn("\U000f0001")), "no font has these"
    assert len(fonts_for(frozenset("plain"))) == 1
