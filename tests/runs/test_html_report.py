"""report.html as text: what it shows, what it escapes, how large it may become."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from run_pages import EVIL, FACTS, write_round, write_rows

from simpletuner.checkpoints.layout import PAGE
from simpletuner.errors import Stopped, TrainingError
from simpletuner.report import Report
from simpletuner.runs import gallery
from simpletuner.runs.gallery import Gallery, images_of
from simpletuner.runs.images import ImageInfo, write_image
from simpletuner.runs.report import HtmlReport, open_html_report


class Elements(HTMLParser):
    """What a browser makes of the page: tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]


def rendered(folder: Path) -> tuple[str, Elements]:
    page = HtmlReport(folder, FACTS, 100, Report()).render(f"failed: {EVIL}")
    return page, Elements(page)


def test_nothing_that_a_run_brings_becomes_markup_and_nothing_is_fetched(tmp_path):
    write_rows(tmp_path, 40)
    for step in (0, 10, 20):
        write_round(tmp_path, step, [EVIL, ""])
    page, elements = rendered(tmp_path)
    assert len(elements.of("script")) == 1 and not any("onerror" in attributes for _, attributes in elements.tags)
    assert all(each["src"].startswith("data:image/webp;base64,") for each in elements.of("img"))
    assert not elements.of("link") and "http:" not in page and "https:" not in page
    assert "default-src 'none'" in page
    assert elements.text.count(EVIL) >= 6 and "(empty prompt)" in elements.text
    hrefs = [each["href"] for each in elements.of("a") if "href" in each]
    assert len(hrefs) == 2 * (1 + 2 * 2), "of each prompt the image before training and two rounds of two"
    assert all((tmp_path / href).is_file() for href in hrefs)
    assert "seed 1 · guidance 3 · 4 denoising steps · 32×32" in elements.text
    assert "step 10" in elements.text and "mean of 3 steps around each" in elements.text
    assert "2 images are held out" in elements.text and "None yet." in elements.text


def test_an_odd_file_among_the_images_is_left_out_and_the_others_are_shown(tmp_path):
    write_rows(tmp_path, 2)
    write_round(tmp_path, 0, ["whole"])
    folder = tmp_path / "validation" / "step-000000"
    whole = (folder / "trained-00.png").read_bytes()
    os.mkfifo(folder / "trained-01.png")
    (folder / "trained-02.png").mkdir()
    (folder / "trained-03.png").touch()
    (folder / "trained-04.png").write_bytes(whole[: len(whole) // 2])  # its header and metadata are whole
    (folder / "trained-05.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage")
    Image.new("1", (9_000, 9_000)).save(folder / "trained-06.png")  # below the limit of Pillow
    Image.new("1", (20_000, 20_000)).save(folder / "trained-07.png")
    with (folder / "trained-08.png").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "validation" / "step-000001").touch()
    gallery = Gallery(tmp_path)
    shown = [image for prompt in gallery.collect()[0] for image in images_of(prompt)]
    assert [image.path.name for image in shown] == ["trained-00.png"], "of which the average is a copy"
    for name in ("trained-01.png", "trained-04.png", "trained-06.png", "trained-07.png"):
        with pytest.raises(OSError, match=name):
            gallery.thumbnail(folder / name, 96)


def test_a_lora_s_first_round_is_shown_where_it_differs_from_its_base_model(tmp_path):
    for step, shades in ((0, {"base": 50, "trained": 50, "ema": 50}), (5, {"base": 51, "trained": 90, "ema": 50})):
        write_round(tmp_path, step, ["new", "goes on"], size=32)
        for weights, shade in shades.items():
            for number, prompt in enumerate(("new", "goes on")):
                path = tmp_path / "validation" / f"step-{step:06d}" / f"{weights}-{number:02d}.png"
                image = Image.new("L", (32, 32), shade + 20 * number * (weights == "trained"))
                write_image(path, image, ImageInfo(prompt, "", number, 4, 3.0, 32, 32, step, weights))
    new, goes_on = Gallery(tmp_path).collect()[0]
    rounds = [
        [(step, [each.info.weights for each in shown]) for step, shown in prompt.rounds] for prompt in (new, goes_on)
    ]
    assert rounds == [[(5, ["trained", "ema"])], [(0, ["trained"]), (5, ["trained", "ema"])]]
    assert new.before is not None and new.before.info.step == 5, "sampled by the ranks that sampled the last round"


def test_a_page_of_a_long_run_stays_small_and_an_empty_one_is_a_page(tmp_path):
    _, elements = rendered(tmp_path)
    assert not elements.of("svg") and not elements.of("img") and "failed" in elements.text
    write_rows(tmp_path, 20_000)
    page, elements = rendered(tmp_path)
    assert len(page) < 400_000
    paths = [each["d"] for each in elements.of("path") if each["class"] == "raw"]
    assert len(paths) == 4 and all(900 < len(path.split()) <= 2400 for path in paths), "loss and norm, on both scales"
    assert "nan" not in " ".join(each["d"] for each in elements.of("path"))


def test_many_images_are_thinned_out_and_made_smaller_until_the_page_is_small(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "MAX_IMAGES", 24)
    monkeypatch.setattr(gallery, "MAX_BYTES", 24 * 5_000)
    for step in range(12):
        write_round(tmp_path, step * 10, ["one", "two", "three", "four"], 160, step)
    page, elements = rendered(tmp_path)
    assert "Shown are 3 of 11 rounds and the first 3 of 4 prompts" in elements.text
    steps = [each["title"] for each in elements.of("th") if each.get("scope") == "row" and "title" in each]
    assert steps == ["before", "step 10", "step 90", "step 110"]
    assert {each["width"] for each in elements.of("img")} == {"96"} and len(page) < 250_000


def test_a_page_that_cannot_be_written_is_one_warning_and_images_without_metadata_are_shown(tmp_path, capsys):
    folder = tmp_path / "validation" / "step-000005"
    folder.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "trained-00.png")
    (folder / "notes.txt").touch()
    page = HtmlReport(tmp_path, FACTS, 100, Report())
    page.renew(5)
    page.finish("finished")
    written = (tmp_path / PAGE).read_text()
    assert "<h3>prompt 0</h3>" in written and re.search(r'<strong class="status">finished<', written)
    broken = HtmlReport(tmp_path, FACTS, 100, Report())
    (folder / "trained-00.png").write_bytes(b"torn")
    (folder / "trained-01.png").symlink_to(folder / "notes.txt")
    assert Gallery(tmp_path).choose() == ([], ""), "damaged images and links are left out"
    (tmp_path / PAGE).unlink()
    (tmp_path / PAGE).mkdir()
    broken.renew(6)
    broken.finish("finished")
    assert capsys.readouterr().err.count("report.html could not be written") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, "finished"),
        (Stopped(15, "stopped at step 3"), "stopped; the same command goes on"),
        (TrainingError("step 3: loss is <nan>"), "failed: step 3: loss is &lt;nan&gt;"),
        (ZeroDivisionError(), "failed"),
    ],
)
def test_the_page_says_how_its_run_ended(error, said, tmp_path):
    with suppress(Stopped, TrainingError, ZeroDivisionError), open_html_report(tmp_path, FACTS, 100, Report()) as page:
        page.renew(3)
        if error is not None:
            raise error
    assert f'<strong class="status">{said}</strong>' in (tmp_path / PAGE).read_text()
