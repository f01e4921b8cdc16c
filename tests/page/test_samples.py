"""A prompt that is tried on a run from its page: form, images beside one another, and no other file of the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from page_server import PageServer
from PIL import Image
from playwright.sync_api import Page, expect

from simpletuner.page.runs.samples import tried_images
from simpletuner.runs.folder import Folders, RunFolder
from simpletuner.runs.images import ImageInfo, write_image

SECRET = "what nobody may read"
BASE, TRAINED = "step-000000-base-7.png", "step-000004-trained-7.png"
ASKED = f"{'0a' * 12}-trained.png"


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
    assert sorted([each.name for each in group] for group in groups) == [[ASKED], [BASE, TRAINED]]
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


def test_a_prompt_is_sampled_from_the_page_and_its_error_is_said_there(page: Page, server: PageServer, folder: Path):
    page.goto(server.origin + "/runs/watch?run=out")
    tried = page.locator("#live-tried")
    expect(tried.locator("article")).to_have_count(2)
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
