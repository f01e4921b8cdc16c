"""Datasets on the page: what a check finds as pictures, and captions edited in place, in a real Chromium."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from browser import expect_axe_finds_nothing
from holders import holder
from page_server import Answer, PageServer, page_server
from patience import PATIENCE
from PIL import Image, ImageDraw
from playwright.sync_api import Page, expect

from simpletuner.data.scan.scan import open_table, write_table
from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.page.datasets import captions
from simpletuner.page.datasets.captions import Caption
from simpletuner.page.datasets.images import ListedDataset, small_webp

CONFIG = 'model_family = "sdxl"\nmodel_flavour = "tiny"\ndata_backend_config = "{}"\n'
EVIL = '"><img src=x onerror=alert(1)>'


def draw(path: Path, size: tuple[int, int], number: int, caption: str | None = None, **options: object) -> Path:
    """Draw stripes that no other image looks like."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", size, (20 * (number % 12), 250 - 20 * (number % 11), 128))
    for line in range(number % 5 + 1):
        ImageDraw.Draw(image).rectangle((line * 40 + number, 0, line * 40 + number + 17, size[1] // 2), "white")
    image.save(path, **options)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption)
    return path


def write_photos(photos: Path) -> None:
    for number in range(66):
        draw(photos / "many" / f"{number:03d}.png", (128, 96), number, f"stripes number {number}\n")
    draw(photos / "wide.png", (800, 100), 3, f"a wide one {EVIL}\n")
    draw(photos / "tiny.png", (40, 40), 4, "a tiny one\n")
    draw(photos / "bare.png", (128, 128), 5)
    turned = Image.Exif()
    turned[0x0112] = 6
    draw(photos / "turned.jpg", (160, 96), 6, "turned\n", exif=turned)
    again = draw(photos / "first.png", (120, 120), 20, "first\n")
    (photos / "second.png").write_bytes(again.read_bytes())
    (photos / "second.txt").write_text("second\n")
    cut = draw(photos / "cut.png", (128, 128), 9, "cut\n")
    cut.write_bytes(cut.read_bytes()[:-60])
    (photos / "no.png").write_text("no image")
    draw(photos / "linked.png", (128, 128), 11).with_suffix(".txt").symlink_to("../../elsewhere/secret.txt")


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    write_photos(folder / "photos")
    draw(folder / "named" / "a_red_shape.png", (64, 64), 1)
    draw(folder.parent / "elsewhere" / "secret.png", (64, 64), 2, "what nobody may read")
    keys = {"resolution": 64, "resolution_type": "pixel", "crop": True, "crop_aspect": "square"}
    datasets = [
        {"id": "photos", "instance_data_dir": "photos", **keys},
        {"id": "named", "instance_data_dir": "named", "caption_strategy": "filename", **keys},
        {"id": "elsewhere", "instance_data_dir": "../elsewhere", **keys},
    ]
    (folder / "datasets.json").write_text(json.dumps(datasets))
    (folder / "run.toml").write_text(CONFIG.format("datasets.json"))
    (folder / "missing.toml").write_text('model_family = "sdxl"\ninstance_data_dir = "nowhere"\n')
    return folder


def check(server: PageServer, file: str = "run.toml", decode: str = "", shows: str = "") -> Answer:
    """Check the datasets of a file, and return the last word about it."""
    answer = server.post("/datasets/check", {"file": file, "decode": decode, "shows": shows})
    end = time.monotonic() + PATIENCE
    while "/datasets/progress" in answer.text:
        assert time.monotonic() < end, answer.text
        time.sleep(0.1)
        answer = server.get("/datasets/progress", file=file, shows=shows)
    return answer


@pytest.fixture(scope="module")
def checked(server: PageServer) -> PageServer:
    times = []
    for decode in ("", "on"):  # at once one after the other, while the first process still exits
        done = check(server, decode=decode, shows="on")
        assert "The check is done" in done.text, done.text
        times += re.findall(r"As of <time datetime=.([^\"]*)", server.get("/datasets", file="run.toml").text)
    assert len(set(times)) == 2
    return server


def edit(server: PageServer, name: str, text: str, dataset: str = "photos") -> Answer:
    """Open the form of a caption, and send it with another text."""
    place = {"file": "run.toml", "dataset": dataset, "name": name, "row": "3"}
    form = server.get("/datasets/caption", **place)
    (checksum,) = re.findall(r"checksum&#34;: &#34;([^&]*)&#34;", form.text)
    return server.post("/datasets/caption", {**place, "checksum": checksum, "text": text})


def last_edit(answer: Answer) -> str:
    return re.findall(r"edit&#34;: &#34;(\w+)", answer.text)[0]


def undo(server: PageServer, edit_id: str) -> Answer:
    return server.post("/datasets/undo", {"file": "run.toml", "dataset": "photos", "edit": edit_id})


def loaded(page: Page, address: str = "**") -> None:
    """Wait for the page and its scripts, which send a form as soon as something in it is chosen."""
    page.wait_for_url(address, wait_until="load")


def settled(page: Page) -> None:
    """Wait until htmx listens to what it has put into the page: it is seen, and focused, 20 ms before."""
    expect(page.locator(".htmx-added, .htmx-settling, .htmx-swapping, .htmx-request")).to_have_count(0)


MOST_TOASTS = """() => {
  window.most = 0;
  const saved = "#toasts > [data-once=saved]";
  const count = () => { window.most = Math.max(window.most, document.querySelectorAll(saved).length); };
  new MutationObserver(count).observe(document.getElementById("toasts"), { childList: true });
}"""


def test_from_headers_to_duplicates_filters_and_a_caption(page: Page, server: PageServer, folder: Path):
    """All that a person does on the page, by mouse and by keyboard, without a word in the console."""
    page.goto(server.origin)
    page.get_by_role("link", name="Datasets").click()
    loaded(page, "**/datasets")
    page.get_by_label("Configuration").select_option("run.toml")
    # Headers are read without being asked for, and the page shows them once they are.
    expect(page.get_by_text("by headers alone")).to_be_visible()
    expect(page.locator(".cell")).to_have_count(60)
    assert page.locator(".badge", has_text="duplicates").count() == 0
    loaded(page)
    page.get_by_role("button", name="Find duplicates and damage").click()
    page.get_by_role("link", name="show what it has found").click()
    expect(page.get_by_text("by headers alone")).to_have_count(0)

    page.get_by_role("link", name="same bytes as another").click()
    group = page.locator(".images.group")
    expect(group.locator(".name")).to_have_text(["first.png", "second.png"])
    first = group.locator("img").first
    first.scroll_into_view_if_needed()
    expect(first).to_have_js_property("naturalWidth", 120)
    loaded(page)
    page.get_by_label("Finding", exact=True).select_option(label="tiny (1)")
    expect(page.locator(".name")).to_have_text(["tiny.png"])
    expect(page.locator(".cell")).to_contain_text("40x40 → 64x64")
    page.get_by_role("link", name="Show all").click()
    expect(page.locator(".cell")).to_have_count(60)
    loaded(page)
    page.get_by_label("Order").select_option("most cropped first")
    expect(page.locator(".name").first).to_have_text("wide.png")
    loaded(page)
    assert page.locator(".cell").first.locator("svg rect").get_attribute("width") == "64"
    page.get_by_label("Name or caption").fill("NUMBER 6")
    page.keyboard.press("Enter")
    expect(page.locator(".cell")).to_have_count(12)  # each word in the name or the caption
    loaded(page)
    page.get_by_label("Name or caption").fill("nothing like this")
    page.keyboard.press("Enter")
    expect(page.get_by_text("No image has all of this.")).to_be_visible()
    page.get_by_role("link", name="Show all").click()
    page.get_by_role("link", name="Next").click()
    expect(page.locator(".cell")).to_have_count(15)
    page.get_by_role("link", name="64x64", exact=True).click()
    expect(page.locator("tr.chosen")).to_contain_text("64x64")

    page.goto(f"{server.origin}/datasets?file=run.toml&q=wide.png")
    text = folder / "photos" / "wide.txt"
    # What is swapped in has the focus before the browser draws, when `autofocus` would be blocked and say so.
    page.evaluate("htmx.config.defaultSettleDelay = 0")
    page.locator("button.caption").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Caption of wide.png")).to_be_focused()
    settled(page)
    page.keyboard.press("Escape")
    expect(page.locator("button.caption")).to_be_focused()
    settled(page)
    page.keyboard.press("Enter")
    area = page.get_by_label("Caption of wide.png")
    expect(area).to_be_focused()
    settled(page)
    expect(area).to_have_value(f"a wide one {EVIL}")
    area.fill("a banner\nanother caption")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#toasts .done")).to_contain_text("the caption of wide.png is saved")
    expect(page.locator("button.caption")).to_be_focused()
    assert text.read_text() == "a banner\nanother caption\n"
    settled(page)
    page.locator("#toasts").get_by_role("button", name="Undo").click()
    expect(page.locator("button.caption")).to_contain_text("a wide one")
    assert text.read_text() == f"a wide one {EVIL}\n"
    # Somebody else writes while the form is open.
    settled(page)
    page.locator("button.caption").click()
    page.get_by_label("Caption of wide.png").fill("mine")
    settled(page)
    text.write_text("theirs\n")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("alert")).to_contain_text("nothing is saved")
    expect(page.get_by_role("alert")).to_contain_text("theirs")
    expect(page.get_by_label("Caption of wide.png")).to_have_value("mine")
    assert text.read_text() == "theirs\n"
    settled(page)
    page.evaluate(MOST_TOASTS)
    page.get_by_role("button", name="Save mine").click()
    expect(page.locator("#edits li")).to_have_count(3)
    assert text.read_text() == "mine\n"
    settled(page)
    page.locator("button.caption").click()
    page.get_by_label("Caption of wide.png").fill("mine at last")
    settled(page)
    page.keyboard.press("Control+Enter")
    expect(page.locator("#edits li")).to_have_count(4)
    assert page.evaluate("most") == 1, "several would lie over what is edited next"

    # What the check has said of a caption goes with the edit, and comes back with an undo; also after a reload.
    page.goto(f"{server.origin}/datasets?file=run.toml&q=bare.png")
    badges, stale = page.locator(".cell .badge", has_text="caption"), page.locator("#stale .notice")
    expect(badges).to_have_text(["caption missing"])
    expect(stale).to_contain_text("1 caption edited since the check")
    page.locator("button.caption").click()
    page.get_by_label("Caption of bare.png").fill("a bare one")
    settled(page)
    page.get_by_role("button", name="Save").click()
    expect(badges).to_have_text(["caption edited"])
    expect(stale).to_contain_text("2 captions edited since the check")
    page.reload()
    expect(badges).to_have_text(["caption edited"])
    page.get_by_role("button", name="Undo the edit of bare.png").click()
    expect(badges).to_have_text(["caption missing"])
    expect(stale).to_contain_text("1 caption edited")

    page.get_by_role("link", name="named").click()
    expect(page.get_by_text("they are the names of the files")).to_be_visible()
    expect(page.locator("p.caption")).to_have_text(["a red shape"])
    page.get_by_role("link", name="elsewhere").click()
    expect(page.get_by_text("is not in the folders of the page")).to_be_visible()
    assert page.locator(".cell").count() == 0


def test_axe_finds_nothing_and_a_phone_scrolls_only_down(page: Page, checked: PageServer):
    for query in ("", "&finding=0", "&q=wide"):
        page.goto(f"{checked.origin}/datasets?file=run.toml{query}")
        if query == "&q=wide":
            page.locator("button.caption").click()
            page.locator("textarea").wait_for()
        expect_axe_finds_nothing(page)
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(f"{checked.origin}/datasets?file=run.toml")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_only_files_of_the_dataset_are_shown_and_written(checked: PageServer, folder: Path):
    """Names from requests, links in a dataset, and datasets outside of the page's folders."""
    photos, outside = folder / "photos", folder.parent / "elsewhere"
    (outside / "fifo-free.txt").write_text("what nobody may read")
    for name in (
        "../run.toml",
        "/etc/passwd",
        "../../elsewhere/secret.png",
        "",
        "\0",
        "wide.txt",
        "\ud83d",
        "{env:HOME}",
    ):
        for path, dataset in (
            ("/datasets/picture", "photos"),
            ("/datasets/caption", "photos"),
            ("/datasets/picture", "x"),
        ):
            refused = checked.send(
                "GET",
                f"{path}?file=run.toml&dataset={dataset}&name="
                + "".join(f"%{byte:02x}" for byte in name.encode("utf-8", "surrogatepass")),
                checked.cookie,
            )
            assert refused.code == 400 and "there is no such" in refused.text, (name, refused.text)
    place = {"file": "run.toml", "dataset": "elsewhere", "name": "secret.png"}
    shown = checked.get("/datasets", file="run.toml", dataset="elsewhere").text
    assert "what nobody may read" not in shown and "start it with --folder" in shown
    for answer in (
        checked.get("/datasets/picture", **place),
        checked.get("/datasets/caption", **place),
        checked.post("/datasets/caption", {**place, "text": "mine", "checksum": captions.NO_FILE}),
        checked.get("/datasets", file="../elsewhere/x.toml"),
    ):
        assert answer.code == 400 and "is not in" in answer.text
    # A check reads as training does, wherever a link leads; that text is neither shown nor found.
    assert "its caption file is a link" in checked.get("/datasets", file="run.toml", q="linked").text
    assert "No image has all of this" in checked.get("/datasets", file="run.toml", q="nobody").text
    # A link is neither followed nor replaced, wherever it leads.
    caption, image = photos / "tiny.txt", photos / "tiny.png"
    for target in (outside / "secret.txt", photos / "first.txt"):
        caption.unlink()
        caption.symlink_to(target)
        refused = checked.get("/datasets/caption", file="run.toml", dataset="photos", name="tiny.png")
        assert refused.code == 400 and "what nobody may read" not in refused.text
        assert "what nobody may read" not in checked.get("/datasets", file="run.toml", q="tiny.png").text
    caption.unlink()
    caption.write_text("a tiny one\n")
    content = image.read_bytes()
    image.unlink()
    image.symlink_to(outside / "secret.png")
    assert checked.get("/datasets/picture", file="run.toml", dataset="photos", name="tiny.png").code == 400
    image.unlink()
    os.mkfifo(image)  # opening it would wait for a writer
    assert checked.get("/datasets/picture", file="run.toml", dataset="photos", name="tiny.png").code == 303
    image.unlink()
    image.write_bytes(content)
    for method, path in (("POST", "/datasets/caption"), ("POST", "/datasets/check"), ("POST", "/datasets/undo")):
        assert checked.send(method, path, checked.cookie, "file=run.toml").code == 403
    assert (outside / "secret.txt").read_text() == "what nobody may read"
    named = checked.get("/datasets/caption", file="run.toml", dataset="named", name="a_red_shape.png")
    assert named.code == 400 and "cannot be edited here" in named.text
    shown = checked.get("/datasets", file="run.toml", q="wide.png", page="99", finding="7777", order="x")
    assert shown.code == 200 and "wide.png" in shown.text and "<img src=x" not in shown.text


def test_an_edit_is_undone_after_a_restart_and_never_over_another_one(folder: Path):
    """The journal is on the disk before the file is, so nothing that was replaced is ever lost."""
    with page_server(folder) as server:
        assert "The check is done" in check(server, decode="on", shows="on").text
        assert "same bytes as another" in server.get("/datasets", file="run.toml").text
        shown = server.get("/datasets/picture", file="run.toml", dataset="photos", name="wide.png")
        assert shown.code == 200 and "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
        text = folder / "photos" / "bare.txt"
        text.unlink(missing_ok=True)
        saved = edit(server, "bare.png", "a new caption")
        assert text.read_text() == "a new caption\n" and "bare.png is saved" in saved.text
        first = last_edit(saved)
        second = last_edit(edit(server, "bare.png", "a better caption"))
        assert "nothing has changed" in edit(server, "bare.png", "a better caption").text
        refused = undo(server, first)
        assert refused.code == 400 and "has changed since" in refused.text and text.read_text() == "a better caption\n"
        server.process.kill()
        server.process.wait()
    with journal_of(folder).open("a") as file:
        file.write('\n{"cut short')
    with page_server(folder) as server:
        assert "a better caption" in server.get("/datasets", file="run.toml", q="bare.png").text
        assert undo(server, second).code == 200 and text.read_text() == "a new caption\n"
        assert undo(server, "nothing").code == 400
        undone = undo(server, first)
        assert "caption-of-" in undone.headers["hx-trigger"] and not text.exists(), "there was none"
        assert undo(server, last_edit(undone)).code == 200 and text.read_text() == "a new caption\n"
        text.unlink()
        empty = edit(server, "many/000.png", "  ")
        assert "it is empty now" in empty.text
        assert edit(server, "many/001.png", "x" * (1 << 20)).code == 400
    assert [path.name for path in (folder / "photos").iterdir() if path.name.startswith(".")] == []


def journal_of(folder: Path) -> Path:
    return folder.parent / "home" / "caption_edits.jsonl"


def test_a_check_that_fails_says_why_and_one_can_be_stopped(checked: PageServer, folder: Path):
    failed = check(checked, "missing.toml")
    assert "there is no folder" in failed.text and "Check again" in failed.text
    assert "there is no folder" in checked.get("/datasets", file="missing.toml").text
    (folder / "broken.toml").write_text('model_family = "sdxl"\nlearning_rate = "fast"\n')
    refused = checked.post("/datasets/check", {"file": "broken.toml"})
    assert "learning_rate" in refused.text and "is running" not in refused.text
    (folder / "empty.toml").write_text('model_family = "sdxl"\n')
    assert "no dataset is given" in check(checked, "empty.toml").text
    begun = checked.post("/datasets/check", {"file": "run.toml", "decode": "on", "shows": "on"})
    assert "starting" in begun.text
    end = time.monotonic() + PATIENCE
    while "Stop" in (stopped := checked.post("/datasets/stop", {"file": "run.toml", "shows": "on"})).text:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert "ended before it was done" in stopped.text or "stopped" in stopped.text, stopped.text
    assert "cell" in checked.get("/datasets", file="run.toml").text, "what was found before is still there"
    for name in ("missing.toml", "broken.toml", "empty.toml"):
        (folder / name).unlink()
    assert "A run with this configuration" not in checked.get("/datasets", file="run.toml").text
    with holder("file", folder / "output" / ".lock"):
        assert "A run with this configuration is going on" in checked.get("/datasets", file="run.toml").text
    changed = folder / "run.toml"
    changed.write_text(changed.read_text())
    assert "has been saved since" in checked.get("/datasets", file="run.toml").text


@pytest.mark.parametrize(
    ("content", "encoding", "text", "written"),
    [
        (None, "", "new", b"new\n"),
        (b"old\r\nlines\r\n", "", "new\nlines", b"new\r\nlines\r\n"),
        ("alt".encode("utf-16"), "", "bär", "bär\n".encode("utf-16")),
        ("Bär".encode("latin-1"), "latin-1", "Bär!", "Bär!\n".encode("latin-1")),
        ("Bär".encode("latin-1"), "latin-1", "猫", "猫\n".encode()),
        (b"x", "latin-1", "Ã¤", "Ã¤\n".encode()),
        (b"old", "", "", b""),
    ],
)
def test_a_text_is_saved_so_that_training_reads_the_same(tmp_path, content, encoding, text, written):
    caption = Caption("a.png", tmp_path / "a.txt", content, encoding)
    assert caption.encode(text) == written
    assert Caption("a.png", tmp_path / "a.txt", written, encoding).text == text


def test_what_is_no_text_is_not_edited(tmp_path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingsError, match="is not UTF-8"):
        _ = Caption("a.png", tmp_path / "a.txt", "Bär".encode("latin-1"), "").text
    monkeypatch.setenv("SIMPLETUNER_HOME", str(tmp_path / "home"))
    odd = b"\xff\x00odd"
    edit = captions.write(Caption("a.png", tmp_path / "a.txt", odd, ""), b"new")
    assert captions.undo(Caption("a.png", tmp_path / "a.txt", b"new", ""), edit).after == edit.before
    assert (tmp_path / "a.txt").read_bytes() == odd, "any bytes come back"
    assert [each.image for each in captions.edits_below(tmp_path)] == ["a.png", "a.png"]
    assert list(captions.edits_below(tmp_path / "other")) == []


@pytest.mark.parametrize("make", [lambda: Image.new("1", (20_000, 20_000)), lambda: Image.new("L", (9000, 9000))])
def test_bombs_and_special_files_are_not_decoded(tmp_path, make: Callable[[], Image.Image]):
    path = tmp_path / "bomb.png"
    make().save(path)
    assert small_webp(path, 320) is None
    upright = Image.Exif()
    upright[0x0112] = 6
    Image.new("RGB", (12_000, 6_000)).save(tmp_path / "large.jpg", exif=upright)
    small = small_webp(tmp_path / "large.jpg", 320)
    assert small is not None
    (tmp_path / "small.webp").write_bytes(small)
    with Image.open(tmp_path / "small.webp") as image:
        assert image.size == (160, 320), "it is turned upright"


def test_a_result_whose_files_are_damaged_is_not_opened(tmp_path: Path):
    """Each page reads it: a FIFO stopped the page, and Arrow takes offsets beyond the end as they stand."""
    tables = {name: write_table(tmp_path, name, pa.table({"name": ["a.png"]})) for name in ("images", "found")}
    facts = {"id": "photos", "tables": tables}
    assert len(ListedDataset.open(tmp_path, facts, {"checked": 0.0, "decoded": True}).images) == 1
    path = tmp_path / tables["found"]
    whole = path.read_bytes()
    flipped = bytes([*whole[:-40], whole[-40] ^ 1, *whole[-39:]])
    for damage in (lambda: path.write_bytes(flipped), path.unlink, lambda: os.mkfifo(path)):
        damage()
        with pytest.raises(EnvironmentNotReady, match="what was found in photos cannot be read"):
            ListedDataset.open(tmp_path, facts, {"checked": 0.0, "decoded": True})
    with pytest.raises(OSError, match="not a regular file"):
        open_table(path)
