"""A prompt that is tried on a run from its page: form, images beside one another, and no other file of the disk."""

from __future__ import annotations

import base64
import json
import os
import random
import struct
import zlib
from pathlib import Path
from urllib.parse import parse_qs

import pytest
import torch
from page_server import PageServer
from PIL import Image
from playwright.sync_api import Page, expect

from simpletuner.page.guard import BODY_BYTES_AT
from simpletuner.page.runs.results import images_on_disk
from simpletuner.page.runs.samples import MOST_IMAGE_BYTES, tried_images
from simpletuner.runs.folder import Folders, RunFolder
from simpletuner.runs.images import ImageInfo, write_image, write_sample

SECRET = "what nobody may read"
BASE, TRAINED = "step-000000-base-7.png", "step-000004-trained-7.png"
ASKED = f"{'0a' * 12}-trained.png"
CLIP = f"{'0b' * 12}-trained.png"


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """A run whose samples are two of one prompt, one of another, and traps."""
    samples = folder / "out" / "samples"
    samples.mkdir(parents=True)
    for name, prompt, weights, step in (
        (BASE, "a <b>circle</b>", "base", 0),
        (TRAINED, "a <b>circle</b>", "trained", 4),
        (ASKED, "a square", "trained", 9),
    ):
        write_image(samples / name, Image.new("RGB", (64, 64)), ImageInfo(prompt, "", 7, 2, 1.0, 64, 64, step, weights))
    clip = ImageInfo("a clip", "", 7, 2, 1.0, 64, 64, 9, "trained", 3, 2.0)
    write_sample(samples / CLIP, torch.zeros(1, 3, 3, 64, 64), clip)
    (folder / "edits").mkdir()
    (folder / "edits" / ".lock").touch()
    (folder / "edits" / "settings_history.jsonl").write_text(json.dumps({"images_of_sample": [1, 2]}) + "\n")
    (folder.parent / "secret.png").write_text(SECRET)
    (samples / "step-000001-trained-1.png").symlink_to(folder.parent / "secret.png")
    os.mkfifo(samples / "step-000002-trained-1.png")
    (samples / "step-000003-trained-1.png").write_bytes(b"no image")
    (samples / "other.png").write_bytes((samples / BASE).read_bytes())
    (folder / "out" / ".lock").touch()
    (folder / "out" / "settings.json").write_text(
        '{"model_type": "lora", "pretrained_model_name_or_path": "models/mine"}'
    )
    return folder


def test_images_of_one_prompt_are_beside_one_another(folder: Path):
    groups = tried_images(RunFolder(folder / "out", Folders.of([folder])))
    assert sorted([each.name for each in group] for group in groups) == [[ASKED], [CLIP], [BASE, TRAINED]]
    assert [each.label for each in next(group for group in groups if len(group) == 2)] == ["base", "trained, step 4"]


def test_an_image_is_one_of_the_list_and_a_prompt_is_one_word_of_a_command(server: PageServer, folder: Path):
    def get(name: str, **changes: str):
        return server.get("/runs/sample/image", **{"run": "out", "name": name, "edge": "160", **changes})

    shown = get(BASE)
    assert shown.code == 200 and shown.headers["content-type"] == "image/webp"
    traps = (*(f"step-00000{number}-trained-1.png" for number in (1, 2, 3)), "other.png", f"../samples/{BASE}")
    for name in (*traps, "../settings.json", "../../secret.png", f"{BASE}\0", "/etc/passwd", "", "x" * 5000):
        refused = get(name)
        assert refused.code == 400 and SECRET not in refused.text, name
    assert get(BASE, edge="9999").code == get(BASE, run="../..").code == 400
    for fields in ({"prompt": ""}, {"prompt": "x" * 3000}, {"prompt": "a", "size": "9" * 3000}, {"prompt": "a\0b"}):
        assert server.post("/runs/sample", {"run": "out", **fields}).code == 400, fields
    assert server.post("/runs/sample", {"run": "../..", "prompt": "a"}).code == 400
    assert server.send("POST", "/runs/sample", server.cookie).code == 403
    for name in (*traps, BASE, f"../samples/{CLIP}", CLIP.replace("png", "mp4"), "/etc/passwd", ""):
        assert server.get("/runs/sample/clip", run="out", name=name).code == 400, name


def as_sent(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def test_an_image_is_given_where_the_model_takes_one_and_nothing_else_is(server: PageServer, folder: Path):
    image, noise = (folder / "out" / "samples" / BASE).read_bytes(), random.Random(1).randbytes
    header = image[12:16] + struct.pack(">II", 60_000, 60_000) + image[24:29]
    bomb = image[:12] + header + struct.pack(">I", zlib.crc32(header)) + image[33:]
    attacks: dict[str, list[str]] = {
        "0 images given, and the model of edits takes 1 to 2": [],
        "3 images given": [as_sent(image)] * 3,
        "image 1 cannot be read: Only base64 data is allowed": ["../../etc/passwd"],
        "image 2 cannot be read: is not an image": [as_sent(image), as_sent(noise(3000))],
        "image 1 cannot be read": [as_sent(image[:20])],
        "image 1 cannot be read: is not": [""],
        "image 1 cannot be read: Only base64": ["\0" * 40],
        "image 1 cannot be read:": ["data:image/png;base64," + as_sent(image)],
        "megapixels": [as_sent(bomb)],
        "more than 32 MiB of images": [as_sent(image), "A" * (MOST_IMAGE_BYTES * 4 // 3)],
    }
    for sentence, texts in attacks.items():
        answer = server.post("/runs/sample", {"run": "edits", "prompt": "a", "image": texts})
        assert answer.code == 400 and sentence in answer.text, (sentence, answer.text)
    assert "takes none" in server.post("/runs/sample", {"run": "out", "prompt": "a", "image": as_sent(image)}).text
    assert (
        server.send("POST", "/runs/sample", server.script_headers(), b"a" * (BODY_BYTES_AT["/runs/sample"] + 1)).code
        == 413
    )
    with images_on_disk([image, b""]) as flags:
        paths = [Path(flag.removeprefix("--image=")) for flag in flags]
        assert [path.read_bytes() for path in paths] == [image, b""] and paths[0].parent.stat().st_mode & 0o77 == 0
    assert not paths[0].parent.exists()


def test_a_prompt_is_sampled_from_the_page_and_its_error_is_said_there(page: Page, server: PageServer, folder: Path):
    page.goto(server.origin + "/runs/watch?run=out")
    tried = page.locator("#live-tried")
    expect(tried.locator("article")).to_have_count(3)
    clip = page.get_by_role("link", name="trained, step 9: a clip")
    expect(clip.locator("img")).to_have_js_property("naturalWidth", 64)
    mp4 = page.request.get(server.origin + clip.get_attribute("href"))
    assert mp4.headers["content-type"] == "video/mp4"
    assert mp4.body() == (folder / "out" / "samples" / CLIP).with_suffix(".mp4").read_bytes()
    expect(page.get_by_label("Image", exact=True)).to_have_count(0)
    expect(tried.get_by_role("heading", name="a <b>circle</b>")).to_be_visible()
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
    page.get_by_label("Prompt", exact=True).fill("--use_cpu a lighthouse")
    page.get_by_label("Seed").fill("7")
    page.get_by_role("button", name="Sample").click()
    expect(tried.get_by_role("alert")).to_contain_text("'--use_cpu a lighthouse' was not sampled: ")
    assert asked == [
        "Sample with the base model models/mine? The folder of the run names it; a name of the hub is downloaded."
    ]
    expect(page.get_by_label("Seed")).to_have_value("7")


def test_images_are_sent_with_the_prompt(page: Page, server: PageServer, folder: Path):
    page.goto(server.origin + "/runs/watch?run=edits")
    chooser = page.get_by_label("Images", exact=True)
    page.get_by_label("Prompt", exact=True).fill("edit it")
    chooser.set_input_files([folder / "out" / "samples" / name for name in (BASE, TRAINED)])
    expect(page.locator("input[name=image]")).to_have_count(2)
    chooser.set_input_files([folder / "out" / "samples" / ASKED])
    expect(page.locator("input[name=image]")).to_have_count(1)
    with page.expect_request("**/runs/sample") as sent:
        page.get_by_role("button", name="Sample").click()
    fields = parse_qs(sent.value.post_data, max_num_fields=20)
    assert fields["image"] == [as_sent((folder / "out" / "samples" / ASKED).read_bytes())]
    expect(page.locator("#live-tried").get_by_role("alert")).to_contain_text("'edit it' was not sampled: ")
