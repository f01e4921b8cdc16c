"""`simpletuner dataset check`: what it finds, beside what a run trains on; exit codes, contact sheets, Ctrl-C."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch.distributed as dist
from conftest import PHOTOGRAPHS
from patience import PATIENCE
from PIL import Image

from simpletuner.app import main
from simpletuner.data.images.image_formats import register_plugin
from simpletuner.errors import DataError
from simpletuner.page.datasets.images import LEFT_OUT, ImageQuery, ListedDataset
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.world import joined_world
from simpletuner.preparation.plan import Plan
from simpletuner.preparation.prepare import plan_data
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import load
from simpletuner.system.processes.signals import StopRequest
from simpletuner.tools.dataset.contents import Content, content_of
from simpletuner.tools.dataset.duplicates import exact_duplicates, near_duplicates

SMALL = {"resolution": "64", "aspect_bucket_alignment": "16", "train_batch_size": "1"}


def add(folder: Path, name: str, size: tuple[int, int], caption: bytes | None = b"a red circle", **options) -> Path:
    """Write an image of coloured clouds, which no other one looks like."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).integers(0, 255, (5, 5, 3), dtype=np.uint8)
    path = folder / name
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(path, **options)
    if caption is not None:
        path.with_suffix(".txt").write_bytes(caption)
    return path


@pytest.fixture
def messy(tmp_path) -> Path:
    """A folder with one of everything that is worth a look."""
    register_plugin()
    folder = tmp_path / "messy"
    folder.mkdir()
    for number in range(4):
        add(folder, f"square{number}.png", (80, 80))
    add(folder, "wide.heic", (150, 72))
    add(folder, "small.png", (32, 32))
    add(folder, "line.png", (700, 70))
    add(folder, "first.png", (96, 96))
    shutil.copy(folder / "first.png", folder / "second.png")
    (folder / "second.txt").write_text("a red circle")
    with Image.open(folder / "first.png") as image:
        image.resize((88, 88)).save(folder / "third.jpg", quality=80)
    (folder / "third.txt").write_text("another caption")
    add(folder, "long.png", (84, 80), b"a red circle " * 40)
    add(folder, "bare.png", (90, 90), None)
    add(folder, "empty.png", (90, 91), b" \n")
    add(folder, "latin.png", (91, 91), "ein Bär".encode("latin-1"))
    add(folder, "text.png", (90, 90)).write_text("no image")
    cut = add(folder, "cut.png", (92, 92))
    cut.write_bytes(cut.read_bytes()[:-60])
    (folder / "x.psd").touch()
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str, **flags: str) -> tuple[int, str, str]:
    """Run the check; return exit code, stdout and stderr."""
    given = [f"--{name}={value}" for name, value in (SMALL | flags).items()]
    with pytest.raises(SystemExit) as ended:
        main(["dataset", "check", *given, *arguments])
    return int(ended.value.code or 0), *capsys.readouterr()


def found_by(checked: dict[str, Any]) -> dict[str, Any]:
    (dataset,) = checked["datasets"]
    return {each["kind"]: each["images"] for each in dataset["findings"]}


def planned(**flags: str) -> Plan:
    """Return what a run with these flags trains on."""
    try:
        with joined_world({}, use_cpu=True) as world:
            session = Session(load(SMALL | flags, complete=False), Mesh(world), Report(quiet=True), StopRequest())
            return plan_data(session)
    finally:
        if dist.is_initialized():  # a rank whose run fails ends, and leaves the group to that
            dist.destroy_process_group()


def test_everything_is_found_and_what_training_refuses_ends_with_4(messy, sdxl, tmp_path, capsys):
    flags = {"instance_data_dir": str(messy), "output_dir": str(tmp_path / "out")}
    flags |= {"model_family": "sdxl", "pretrained_model_name_or_path": str(sdxl)}
    code, out, err = run(capsys, "--json", **flags)
    checked = json.loads(out)
    assert (code, checked["usable"]) == (4, False)
    images = found_by(checked)
    again = {kind: images.pop(kind) for kind in ("exact duplicates", "near duplicates")}
    assert again == {"exact duplicates": {"first.png": ["second.png"]}, "near duplicates": {"first.png": ["third.jpg"]}}
    assert {kind: list(names) for kind, names in images.items()} == {
        "not read": [".psd"],
        "broken": ["text.png"],
        "damaged": ["cut.png"],
        "enlarged": ["small.png"],
        "tiny": ["small.png"],
        "extreme aspect": ["line.png"],
        "missing": ["bare.png"],
        "empty": ["empty.png"],
        "encoding": ["latin.txt"],
        "too long for CLIP": ["long.png"],
    }
    assert images["enlarged"] == {"small.png": "32x32 to 64x64 px"}
    assert images["too long for CLIP"] == {"long.png": "122 tokens"}
    assert images["encoding"] == {"latin.txt": 'is not UTF-8: byte 5 is 0xe4 (as windows-1252: "ein Bär")'}
    assert "2 images without a caption" in err and "1 caption file cannot be read as text" in err
    assert not (tmp_path / "out").exists() and not checked["not_checked"]


def test_buckets_crops_and_samples_are_those_of_the_run(messy, sdxl, tmp_path, train, capsys):
    flags = {"instance_data_dir": str(messy), "skip_uncaptioned": "true", "caption_encoding": "latin-1"}
    flags |= {"repeats": "2", "eval_split": "0.2", "output_dir": str(tmp_path / "out")}
    sheets = tmp_path / "sheets"
    (messy / "cut.png").unlink()
    code, out, _ = run(capsys, "--json", f"--contact_sheets={sheets}", **flags)
    checked = json.loads(out)
    assert (code, checked["usable"]) == (0, True)
    assert checked["not_checked"] == {"captions": "not counted in tokens: no model_family is given"}
    plan, (dataset,) = planned(**flags), checked["datasets"]
    own = {bucket["name"]: bucket for bucket in dataset["buckets"]}
    held_out = set(plan.held_out.tolist())
    assert {name for name, bucket in own.items() if bucket["images"]} == plan.buckets.keys()
    for name, bucket in plan.buckets.items():
        assert (own[name]["images"], own[name]["samples"]) == (bucket.num_samples, len(bucket))
    for name, bucket in own.items():
        samples = {index: each for index, each in enumerate(plan.samples) if str(each.geometry.target) == name}
        cropped = [1 - each.geometry.target.area / each.geometry.resized.area for each in samples.values()]
        assert bucket["held_out"] == len(held_out & samples.keys())
        assert (bucket["mean_cropped"], bucket["most_cropped"]) == pytest.approx((np.mean(cropped), max(cropped)))
    assert {path.name for path in sheets.iterdir()} == {f"messy-{name}.png" for name in own}

    said = train(tmp_path / "out", *(f"--{name}={value}" for name, value in flags.items() if name != "output_dir"),
                 "--model_family=sdxl", f"--pretrained_model_name_or_path={sdxl}", "--train_batch_size=1",
                 "--max_train_steps=1").said  # fmt: skip
    total = f"messy {dataset['images']} {dataset['samples']:.0f} {dataset['held_out']} {len(own)} "
    assert total in re.sub(r" +", " ", said) and (tmp_path / "out" / "uncaptioned.txt").read_text().count("\n") == 2
    assert "2 images without a caption left out" in said


def test_the_check_ends_as_training_would_after_it_has_left_out_damaged_images_and_says_all_at_once(tmp_path, capsys):
    for number in range(6):
        path = add(tmp_path, f"{number}.png", (80, 80))
        if number < 2:
            path.write_bytes(path.read_bytes()[:-60])
    flags = {"instance_data_dir": str(tmp_path), "train_batch_size": "6"}
    code, out, err = run(capsys, "--json", **flags)
    checked = json.loads(out)
    assert (code, checked["usable"], checked["datasets"][0]["images"]) == (4, False, 4)
    assert list(found_by(checked)["damaged"]) == ["0.png", "1.png"] and "64x64: has 4, needs 6" in err
    assert run(capsys, "--json", "--headers_only", **flags)[0] == 0
    assert run(capsys, "--json", **(flags | {"train_batch_size": "4"}))[0] == 0
    for number in range(2, 6):
        (tmp_path / f"{number}.png").write_bytes((tmp_path / "0.png").read_bytes())
    code, out, err = run(capsys, "--json", **flags)
    assert code == 4 and "no image is left to train on" in err
    (tmp_path / "3.txt").unlink()
    (tmp_path / "4.txt").write_bytes(b"\xff")
    given = SMALL | {"instance_data_dir": str(tmp_path), "train_batch_size": "7", "output_dir": str(tmp_path / "out")}
    with joined_world({}, use_cpu=True) as world:
        session = Session(load(given, complete=False), Mesh(world), Report(quiet=True), StopRequest())
        with pytest.raises(DataError) as caught:
            plan_data(session)
    wrong = ("has 6, needs 7", "1 image without a caption", "1 caption file cannot be read as text")
    assert all(said in caught.value.message for said in wrong)
    assert "--skip_uncaptioned" in caught.value.hint and "--caption_encoding" in caught.value.hint


def test_a_listing_has_the_crops_of_the_run_and_every_image_of_a_finding(messy, tmp_path, capsys):
    flags = {"instance_data_dir": str(messy), "skip_uncaptioned": "true", "caption_encoding": "latin-1"}
    flags |= {"output_dir": str(tmp_path / "out"), "crop": "true", "crop_style": "random", "crop_aspect": "square"}
    listing = tmp_path / "listing"
    listing.mkdir()
    (listing / "images-0.arrow").write_text("of an earlier check")
    assert run(capsys, f"--listing={listing}", **flags)[0] == 0
    facts = json.loads((listing / "datasets.json").read_text())["datasets"][0]
    assert sorted(path.name for path in listing.glob("*.arrow")) == sorted(facts["tables"].values())
    assert json.loads((listing / "status.json").read_text())["state"] == "finished"
    dataset = ListedDataset.open(listing, facts, {"checked": 0.0, "decoded": True})
    rows = {each.name: each for each in dataset.rows(np.arange(len(dataset.images)))}
    assert len(rows) == len(list(messy.glob("*.png"))) + 2, "those that are left out, too"
    samples = planned(**flags).samples
    for sample in samples:
        row, g = rows.pop(sample.name), sample.geometry
        assert (row.resized_width, row.resized_height) == g.resized.size and row.bucket == str(sample.shape)
        assert (row.target_width, row.target_height, row.left, row.top) == (*g.target.size, *g.crop_left_top)
        assert row.caption.split("\n") == list(sample.captions)
    assert {name: row.bucket for name, row in rows.items()} == dict.fromkeys(("bare.png", "empty.png", "text.png"), "")
    found = {each["kind"]: number for number, each in enumerate(facts["findings"])}
    assert [each["count"] for each in facts["findings"] if each["kind"] == "tiny"] == [1]

    def names(**query: Any) -> list[list[str]]:
        return [[each.name for each in images] for images, _ in dataset.choose(ImageQuery(**query)).groups]

    assert names(finding=found["exact duplicates"]) == [["first.png", "second.png"]]
    assert names(finding=found["damaged"]) == [["cut.png"]] and names(bucket=LEFT_OUT)[0] == list(rows)
    assert names(order="cropped")[0][0] == names(order="largest")[0][0] == "line.png"
    assert names(order="longest")[0][0] == "long.png" and names(order="smallest")[0][:2] == ["text.png", "small.png"]
    assert names(text="BARE png") == [["bare.png"]] and names(text="another caption") == [["third.jpg"]]
    assert names(text="none of them", page=9) == [[]]


def test_damaged_json_ends_the_run_of_a_model_that_reads_it_and_plain_texts_are_counted(tmp_path, capsys):
    for name, caption in {"a": b'{"a":\n "fox",}', "b": b'{"a": "fox"}', "c": b"a fox"}.items():
        add(tmp_path, f"{name}.png", (80, 80), caption)
    flags = {"instance_data_dir": str(tmp_path), "output_dir": str(tmp_path / "out")}
    code, out, _ = run(capsys, "--json", **flags, model_family="ideogram4")
    other, said, _ = run(capsys, "--json", **flags, model_family="sdxl")
    assert other == 0 and not {"damaged JSON", "plain text"} & found_by(json.loads(said)).keys()
    (found,) = json.loads(out)["datasets"]
    assert code == 4 and found_by(json.loads(out))["plain text"] == {"c.png": "'a fox'"}
    assert [each["kind"] for each in found["findings"] if each["ends_run"]] == ["damaged JSON"]
    with pytest.raises(DataError, match=r"1 caption in damaged JSON:\n  a.txt: line 2, column \d: ") as refused:
        planned(**flags, model_family="ideogram4")
    assert refused.value.message == json.loads(out)["errors"][0]["message"]


def test_of_a_folder_without_images_nothing_is_fine(tmp_path, capsys):
    (tmp_path / "notes.psd").touch()
    code, out, err = run(capsys, instance_data_dir=str(tmp_path), caption_strategy="filename")
    assert code == 4 and "no usable image" in err
    assert "1 file not read: 1 .psd" in out and "ok" not in out.split() and "bucket" not in out


@pytest.mark.parametrize("style", ["corner", "center"])
def test_a_contact_sheet_shows_the_crop(tmp_path, capsys, style):
    Image.new("RGB", (160, 80), "white").save(tmp_path / "a_white_one.png")
    sheets = tmp_path / "sheets"
    flags = {"instance_data_dir": str(tmp_path), "caption_strategy": "filename", "crop": "true", "crop_style": style}
    code, out, _ = run(capsys, f"--contact_sheets={sheets}", "--headers_only", **flags)
    assert code == 0 and "50.0%" in out and "damaged ones and duplicates stay unknown" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["captions", "ok", "none", "is", "missing"] in rows, "lengths were not counted: no model is named"
    assert ["images", "ok", "every", "header", "can", "be", "read"] in rows, "none was decoded"
    (sheet,) = sheets.iterdir()
    with Image.open(sheet) as image:
        pixels = np.asarray(image.convert("L"))[40 : 40 + 88, 10 : 10 + 176]  # where the image is
    bright = pixels[44] > 200
    left = {"corner": 0, "center": 44}[style]
    assert bright[left + 2 : left + 86].all() and bright.sum() < 90


def test_photographs_are_found_again_after_compression_and_no_two_are_taken_for_one():
    contents = {}
    for number, file in enumerate(sorted(PHOTOGRAPHS.glob("*.jpg"))):
        image = Image.open(file).convert("RGB")
        small = io.BytesIO()
        image.resize((image.width // 2, image.height // 2)).save(small, "JPEG", quality=60)
        contents[number] = content_of(bytes([number]), image)
        contents[number + 10] = content_of(bytes([number + 10]), Image.open(small).convert("RGB"))
        contents[number + 20] = contents[number]
    assert exact_duplicates(contents) == [[number, number + 20] for number in range(7)]
    assert near_duplicates(contents) == [[number, number + 10] for number in range(7)]


def test_ctrl_c_is_answered_at_once(tmp_path, starter):
    image = add(tmp_path, "0.png", (1200, 1200), None)
    for number in range(1, 1000):
        (tmp_path / f"{number}.png").hardlink_to(image)
    started = starter.start(
        ranks.command_line, 1,
        ["dataset", "check", f"--instance_data_dir={tmp_path}", "--caption_strategy=filename", "--resolution=64"],
    )  # fmt: skip
    while "reading images" not in started.said:
        time.sleep(0.05)
    started.kill(signal.SIGINT)
    assert started.wait(PATIENCE) == [130]
    assert "stopped by SIGINT" in started.said and "Traceback" not in started.said


def test_greys_whose_scale_is_a_guess_are_named_by_the_check_and_by_a_run(sdxl, tmp_path, train, capsys):
    folder = tmp_path / "greys"
    folder.mkdir()
    ramp = np.linspace(0, 1, 80 * 80).reshape(80, 80)
    for number, (name, top) in enumerate({"faint.png": 4095, "bright.png": 65535, "eight.tif": 255}.items()):
        kind = np.int32 if name.endswith("tif") else np.uint16
        Image.fromarray(np.rot90((ramp * top).astype(kind), number)).save(folder / name)
        (folder / name).with_suffix(".txt").write_text("a ramp")
    code, out, _ = run(capsys, "--json", instance_data_dir=str(folder))
    why = "its largest grey value is {}, and white is taken to be 65,535"
    expected = {"eight.tif": why.format(255), "faint.png": why.format("4,095")}
    assert (code, found_by(json.loads(out))["doubtful scale"]) == (0, expected)
    flags = ("--model_family=sdxl", f"--pretrained_model_name_or_path={sdxl}", f"--instance_data_dir={folder}")
    small = [f"--{name}={value}" for name, value in SMALL.items()]
    said = " ".join(train(tmp_path / "out", *flags, *small, "--max_train_steps=1").said.split())
    assert "2 images may be read with wrong brightness or mask, such as " in said and why.format(255) in said


def test_comparing_many_plain_images_takes_no_more_memory_than_the_images():
    rng = np.random.default_rng(0)
    plain = rng.integers(0, 256, (8000, 1, 1, 3), np.uint8)
    noise = rng.integers(0, 40, (8000, 16, 16, 3), np.uint8)
    colours = np.clip(plain.astype(int) + noise, 0, 255).astype(np.uint8)
    colours[7999] = np.clip(colours[7].astype(int) + 1, 0, 255)
    images = {index: Content(index.to_bytes(16, "big"), 0, each) for index, each in enumerate(colours)}
    tracemalloc.start()
    try:
        assert [7, 7999] in near_duplicates(images)
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < 3 * colours.nbytes, f"{peak:,} bytes"
    finally:
        tracemalloc.stop()


def test_class_images_that_a_run_would_make_are_counted_and_not_decoded(few_shapes, tmp_path, capsys):
    folder = tmp_path / "class"
    made = {"id": "class", "instance_data_dir": str(folder), "resolution": 64, "prior_images": 6, "prior_guidance": 1}
    made |= {"prior_captions_of": "own", "class_words": {"circle": "shape"}, "prior_num_inference_steps": 9}
    own = {"id": "own", "instance_data_dir": str(few_shapes), "resolution": 64}
    file = tmp_path / "datasets.json"
    file.write_text(json.dumps([made, own]))
    flags = {"data_backend_config": str(file), "output_dir": str(tmp_path / "out")}
    code, out, _ = run(capsys, "--json", "--listing", str(tmp_path / "listing"), **flags)
    first, second = json.loads(out)["datasets"]
    (found,) = first["findings"]
    assert (code, first["images"], second["findings"], folder.exists()) == (0, 6, [], False)
    assert (found["topic"], found["count"]) == ("images", 6)
    assert "a run makes 6 of them first, as much work as training on about 18 samples of this size" in found["sentence"]
    listed = json.loads((tmp_path / "listing/datasets.json").read_text())["datasets"][0]
    assert listed["not_editable"] == "they are the prompts by which the base model makes the images"
    assert len(planned(**flags).samples.parts[0]) == 6
    given = [f"--{name}={value}" for name, value in (SMALL | flags).items()]
    tiny = ("--model_family=sdxl", "--model_flavour=tiny", "--use_cpu", "--num_processes=1", "--max_train_steps=2")
    with pytest.raises(SystemExit):
        main(["plan", *given, *tiny, "--gpu=H100", "--json", "--aspect_bucket_alignment=16"])
    (counted,) = json.loads(capsys.readouterr().out)["class_images"]
    assert (counted["dataset"], counted["missing"], counted["seconds"] > 0) == ("class", 6, True)
