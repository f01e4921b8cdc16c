"""Captions of several lines: which files are one text, and how the files of a dataset decide together."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import scanning
from PIL import Image

from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.samples.dataset_warnings import dataset_warnings
from simpletuner.data.samples.discovery import Discovery
from simpletuner.data.samples.json_captions import JsonCaptions
from simpletuner.data.scan.captions import form_of
from simpletuner.errors import DataError
from simpletuner.tools.dataset.findings import findings_of

PARAGRAPHS = """A heron stands in shallow water. Its neck is bent.

Behind it reeds move in the wind, and a boat lies at the bank.

The picture has soft light and a narrow depth of field."""
MARKDOWN = "**Subject**: a heron\n- Style: woodcut\n- Light: dawn\n\n---\n"
PROSE = (
    "The photograph shows a wooden fishing boat that has been pulled up onto a pebble beach. Its paint, once blue, "
    "is flaking off in large pieces, and a coil of rope lies beside the bow. In the distance a lighthouse rises "
    "from a rocky headland under a pale sky."
)
GERMAN = "Ein Reiher steht im Wasser. Er schaut nach links.\nDahinter liegt ein Boot. Nebel zieht auf."
CHINESE = "一只苍鹭站在浅水中，它的脖子弯曲着，\n身后的芦苇在风中摇动。"

ALTERNATIVES = (
    "a cat",
    "a red fox\nfox in snow\nphoto of a fox",
    "A cat sits on a mat.\nA tabby on a rug.\nA feline rests indoors.",
    "a photo of a big red cat on a mat in front of a house\na photo of a tiny red cat on a mat in front of a house",
    "A heron stands in shallow water.\n\nA heron is standing in water.",
    "A heron stands in the shallow water of a lake. Reeds grow behind it.\n"
    "A grey heron stands in a lake, in shallow water. Behind it are reeds.",
    "1girl, solo, long hair\na girl with long hair stands in the rain.",
    "1girl, solo,\n1girl, smiling,",
    '{"caption": "a fox"}\n{"caption": "a red fox"}',
    "<b>a fox</b>\n<b>a red fox</b>",
    "[ohwx] a man\n[ohwx] a man who smiles",
    "(masterpiece:1.2), a castle\n{red|blue} castle, --ar 3:2",
    "sks: a cat\nsks: a cat on a mat",
    "🦊\n🦊 in snow",
    "Ein Fuchs im Schnee\nRoter Fuchs, Winter\nFoto eines Fuchses",
)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        *((text, "") for text in ALTERNATIVES),
        (PARAGRAPHS, "paragraphs"),
        (PARAGRAPHS.replace("\n\n", "\r\n\r\n"), "paragraphs"),
        (GERMAN, "paragraphs"),
        (MARKDOWN, "Markdown"),
        ("# A heron\nIt stands in water", "Markdown"),
        ("A heron\n\n* grey\n* tall", "Markdown"),
        ("1. A heron in water\n2. Reeds behind it", "Markdown"),
        ("```json\n{}\n```", "Markdown"),
        (json.dumps({"a": {"b": [1, 2]}}, indent=2), "JSON"),
        (json.dumps([{"a": 1}], indent="\t"), "JSON"),
        ('{\n  "a": "cut off here",\n}', "JSON"),
        ('{\n  "a": "here",\n  "b": is no quotation mark\n  "c": "d" }', "JSON"),
        ("<caption>\n  <what>a fox</what>\n</caption>", "XML"),
        ("<what>a fox</what>\n<style>film</style>", "XML"),
        ('<?xml version="1.0"?>\n<a>fox</a>', "XML"),
        ("subject: a fox\nstyle:\n  medium: film\n  tone: warm", "YAML"),
        ("主题：狐狸\n风格：胶片", "YAML"),
        ("Subject: a heron\nLight: dawn\nCamera angle: low", "YAML"),
        *((textwrap.fill(PROSE, width), "wrapped lines") for width in (40, 60, 72, 80, 100)),
        (textwrap.fill(PROSE, 72).replace("\n", "\r"), "wrapped lines"),
        (f"A boat\n\n{textwrap.fill(PROSE, 72)}", "wrapped lines"),
        (textwrap.fill(PROSE.lower().rstrip("."), 60), "wrapped lines"),
        ("1girl, solo, long hair,\nblue eyes, rain, umbrella", "wrapped lines"),
        (CHINESE, "wrapped lines"),
    ],
)
def test_a_text_of_several_lines_is_told_from_alternatives(text, form):
    assert form_of(text) == form


def found_in(folder: Path, *texts: str, **values) -> Discovery:
    folder.mkdir()
    for number, text in enumerate(texts):
        Image.new("RGB", (64, 64)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(text, encoding="utf-8", newline="")
    return scanning.found([LocalImages(id="d", instance_data_dir=folder, resolution=64, **values)])


def captions(found: Discovery) -> list[tuple[str, ...]]:
    return [sample.captions for sample in found.samples]


def test_the_files_of_a_dataset_decide_together_and_the_decision_is_said_and_settable(tmp_path):
    two = "a fox\na red fox"
    whole = found_in(tmp_path / "a", MARKDOWN, MARKDOWN, PARAGRAPHS, "a cat", two)
    assert captions(whole)[0] == ("**Subject**: a heron\n- Style: woodcut\n- Light: dawn\n---",)
    assert all(len(each) == 1 for each in captions(whole)) and captions(whole)[4] == (two,)
    counted = (
        "dataset `d`: 3 of 4 caption files with several lines look like one text (Markdown, paragraphs; such as 0.txt)"
    )
    said = f"{counted}: each file is one caption; caption_lines=alternatives makes one of each line"
    assert list(dataset_warnings(whole, 64)) == [said]
    (finding,) = (each for each in findings_of(whole) if each.topic == "captions")
    assert finding.sentence == said and not finding.ends_run
    assert finding.images == {"0.png": "Markdown", "1.png": "Markdown", "2.png": "paragraphs"}

    split = found_in(tmp_path / "b", MARKDOWN, two, two)
    assert captions(split)[1] == ("a fox", "a red fox") and len(captions(split)[0]) == 4
    (said,) = dataset_warnings(split, 64)
    assert "1 of 3 caption files" in said and said.endswith("caption_lines=one reads files whole")

    quiet = found_in(tmp_path / "c", two, "a cat\n\ncat, photo\nsome cat", "x")
    assert captions(quiet) == [("a fox", "a red fox"), ("a cat", "cat, photo", "some cat"), ("x",)]
    assert not list(dataset_warnings(quiet, 64)) and not list(findings_of(quiet))

    for number, (value, expected) in enumerate(
        {"one": (two,), "first": ("a fox",), "alternatives": tuple(two.split("\n"))}.items()
    ):
        chosen = found_in(tmp_path / str(number), MARKDOWN, two, caption_lines=value)
        assert captions(chosen)[1] == expected and not list(dataset_warnings(chosen, 64))


def test_json_is_one_caption_as_it_is_written_and_its_mistakes_have_a_line_and_a_column(tmp_path):
    nested = json.dumps({"style": {"medium": "film"}, "elements": ["a fox"]}, indent=4)
    broken = nested.replace('film"', "film")
    found = found_in(tmp_path / "d", nested.replace("\n", "\r\n"), "a fox\na red fox", f"{broken}\n", '{"a": 1}')
    assert captions(found) == [(nested,), ("a fox", "a red fox"), (broken,), ('{"a": 1}',)]
    read = JsonCaptions.of(found.samples.parts[0])
    assert read.plain == {"1.png": "'a fox'"}
    error = read.error()
    assert error is not None and "1 caption in damaged JSON" in error.message
    assert "2.txt: line 3, column 24: Invalid control character at" in error.message


def test_only_what_editors_show_as_line_ends_ends_a_caption(tmp_path):
    odd = [f"left{letter}right" for letter in "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"]
    assert captions(found_in(tmp_path / "odd", *odd)) == [(text,) for text in odd]
    assert captions(found_in(tmp_path / "ends", "a\rb\r\nc\nd")) == [("a", "b", "c", "d")]
    assert captions(found_in(tmp_path / "blank", "\u200b\n a \n\ufeff\n")) == [("a",)]


@pytest.mark.parametrize(
    "text", ["", "\u200b", "\u2060\ufeff", "\u00ad", "\u3164 \u2800", "\n\x00".replace("\x00", "\x7f"), "\u202e\u202c"]
)
def test_a_file_of_which_nothing_shows_is_no_caption(tmp_path, text):
    with pytest.raises(DataError, match="1 image without a caption"):
        found_in(tmp_path / "d", "a cat", text)
