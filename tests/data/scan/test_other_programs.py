"""What other programs put among the images: left out and counted, or named with what would say the same here."""

from __future__ import annotations

import re
import subprocess
import unicodedata
from pathlib import Path

import pytest
import scanning
from PIL import Image

from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.samples.dataset_warnings import dataset_warnings
from simpletuner.data.samples.discovery import Discovery
from simpletuner.data.storage.object_storage import without_system_folders
from simpletuner.data.storage.storage import Listing, StoredFile
from simpletuner.errors import DataError
from simpletuner.tools.dataset.findings import findings_of

FILENAME = {"caption_strategy": "filename"}


def found_in(folder: Path, *names: str, **values) -> Discovery:
    """Find images, and texts that are captions of their own names."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() in (".png", ".jpg"):
            Image.new("RGB", (64, 64)).save(path)
        else:
            path.write_text(path.name)
    return scanning.found([LocalImages(id="d", instance_data_dir=folder, resolution=64, **values)])


def remarks(found: Discovery) -> dict[str, str]:
    """Return what `dataset check` says by the kind of finding, after comparing that a run says the same."""
    said = {each.kind: each.sentence for each in findings_of(found)}
    assert set(dataset_warnings(found, 64)) <= set(said.values())
    return said


SYSTEM = (
    *("@eaDir/a.png/SYNOPHOTO_THUMB_M.jpg", "sub/@eaDir/b.png", "#recycle/old.png", "$RECYCLE.BIN/S-1/x.png"),
    *("__MACOSX/a.png", "lost+found/1.png", "#snapshot/daily/a.png", "~snapshot/w/a.png", "@Recycle/a.png"),
    *("System Volume Information/a.png", "@GMT-2026.01.01-00.00.00/a.png", "@Recently-Snapshot/a.png"),
    *("_controls/a.pose.jpg", "sub/_controls/b.depth.jpg"),
)


def test_folders_of_systems_and_drives_are_left_out_and_counted_and_no_others(tmp_path):
    kept = ("a.png", "eaDir/a.png", "recycle/a.png", "snapshots/a.png", "sub/lost and found/a.png")
    found = found_in(tmp_path, *SYSTEM, *kept, **FILENAME)
    assert [sample.name for sample in found.samples] == sorted(kept)
    said = remarks(found)["system folders"]
    assert "14 folders of other programs left out" in said and "2 @eaDir" in said and "~snapshot" in said
    listing = Listing()
    files = list(without_system_folders(map(StoredFile, sorted((*SYSTEM, *kept, "@eaDir/c.png"))), listing))
    assert [file.name for file in files] == sorted(kept)
    assert listing.system_folders == found.others[0].system_folders
    assert set(listing.system_folders.values()) == {1, 2}


def test_what_means_something_to_other_trainers_is_named_with_the_datasets_that_say_it(tmp_path):
    found = found_in(
        tmp_path / "root",
        *(f"img/20_ohwx dog/{n}.png" for n in range(3)),
        *("img/3_ohwx dog outdoors/a.png", "reg/1_dog/c.png", "model/sample/pet_e000001_00_20260801.png"),
        *("x.png", "x-masklabel.png", "y.png", "y_mask.png", "masks/x.png", "gas_mask.png", "out/thumbnails/x.png"),
        *("out/validation/step-000010/base-00.png", "runs/1700000000000__000000500_0.jpg"),
        **FILENAME,
    )
    assert len(found.samples) == 15  # nothing is left out: the names may mean nothing
    said, root = remarks(found), tmp_path / "root"
    assert said.keys() == {"samples", "class images", "repeats", "masks", "thumbnails", "near duplicates"} - {
        "near duplicates"
    }
    assert said["samples"].startswith("dataset `d`: 3 images that training has generated")
    assert "out/validation/step-000010" in said["samples"] and "model/sample" in said["samples"]
    entry = f'{{"id": "20_ohwx dog", "instance_data_dir": "{root}/img/20_ohwx dog", "repeats": 19, "caption_strategy": '
    assert (
        entry + '"instanceprompt", "instance_prompt": "ohwx dog"}' in said["repeats"] and "4 images" in said["repeats"]
    )
    assert '"repeats": 2' in said["repeats"]
    assert f'"{root}/reg/1_dog"' in said["class images"] and '"is_regularisation_data": true' in said["class images"]
    assert '"repeats"' not in said["class images"]
    assert "3 images that are masks" in said["masks"] and '"conditioning_type": "mask"' in said["masks"]

    with pytest.raises(DataError, match="img/20_ohwx dog has repeats and a phrase in its name"):
        found_in(tmp_path / "root")

    own = found_in(tmp_path / "10_sks cat", "a.png", **FILENAME)
    assert "10 repeats and the phrase `sks cat`" in remarks(own)["repeats"]
    assert not remarks(found_in(tmp_path / "10_sks cat", repeats=9, **FILENAME))
    quiet = (
        "2024_holiday/a.png",
        "01_portraits/b.png",
        "regatta/c.png",
        "classic/d.png",
        "samples/e.png",
        "unmask/f.png",
    )
    assert not remarks(found_in(tmp_path / "quiet", *quiet, **FILENAME))


def test_captions_that_images_share_are_counted(tmp_path):
    found = found_in(
        tmp_path, "a.png", "a.jpg", "a.txt", "b.png", "b.jpg", "b.txt", "c.png", "c.txt", "ab.png", "ab.txt"
    )
    said = remarks(found)
    assert said.keys() == {"shared captions"}
    assert (
        "2 caption files shared by 4 images" in said["shared captions"] and "(a.jpg, a.png)" in said["shared captions"]
    )


BESIDE = (
    *("A1.jpg", "A1.TXT", "A2.jpg", "A2.jpg.txt", "A3.jpg", "A3.caption", "A4.jpg", "a4.txt", "A5.jpg", "A5.json"),
    *(f"{unicodedata.normalize('NFC', 'café')}.jpg", f"{unicodedata.normalize('NFD', 'café')}.txt"),
)


def test_captions_under_other_names_are_read_after_the_commands_that_are_named(tmp_path):
    names = ("A1.jpg", "A1.TXT", "a.b.jpg", "a.b.jpg.txt", "A3.jpg", "A3.caption", "c.d.png", "c.d.txt")
    with pytest.raises(DataError, match="3 images without a caption") as caught:
        found_in(tmp_path, *names)
    commands = re.findall("`(for .*?)`", caught.value.message)
    assert len(commands) == 3
    for command in commands:
        subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, check=False)
    assert len(found_in(tmp_path).samples) == 4, "a.b.txt is that of a.b.jpg, and c.d.txt stays"


def test_captions_under_other_names_are_named_with_what_reads_them(tmp_path):
    with pytest.raises(DataError, match="6 images without a caption") as caught:
        found_in(tmp_path, *BESIDE, "good.png", "good.txt")
    named = ("A1.TXT for A1.jpg, a4.txt for A4.jpg", "A2.jpg.txt", "A3.caption", "A5.json", "NFC and NFD", BESIDE[-1])
    assert all(name in caught.value.message for name in named)
    found = found_in(tmp_path, skip_uncaptioned=True)
    assert len(found.samples) == 1 and len(found.others[0].beside) == 5
    warned = "\n".join(dataset_warnings(found, 64))
    checked = "\n".join(each.sentence for each in findings_of(found))
    assert all(name in warned and name in checked for name in named)
    complete = found_in(tmp_path / "ok", "a.png", "a.txt", "a.json", "b.jpg", "b.txt", "B.caption", "metadata.jsonl")
    assert not remarks(complete)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "metadata.jsonl",
            '{"file_name": "a.png", "prompt": "a fox"}\n',
            '"filename_column": "file_name", "caption_column": "prompt"}',
        ),
        ("metadata.csv", "file_name,text\na.png,a fox\n", '"filename_column": "file_name", "caption_column": "text"}'),
        (
            "captions.json",
            '{\n"a.png": ["a fox"]}',
            "captions.json may hold captions: a table with a line for each image",
        ),
        ("meta_cap.json", '{"a.png": {"caption": "a fox"}}', "this form is not"),
    ],
)
def test_tables_of_captions_are_named_with_the_keys_that_read_them(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        found_in(tmp_path, "a.png")
    assert said in caught.value.message
    with pytest.raises(DataError, match="no usable image.*1 without a caption") as caught:
        found_in(tmp_path, skip_uncaptioned=True)
    assert said in (caught.value.hint or "") and "are read" not in (caught.value.hint or "")
