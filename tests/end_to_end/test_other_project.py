"""A run's folder is one project's: what is of another is refused, and leaves all that the folder says as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from conftest import base
from PIL import Image


def draw_cats(folder: Path) -> Path:
    folder.mkdir()
    for number in range(12):
        Image.new("RGB", (64, 64), (20 * number, 0, 99)).save(folder / f"a cat {number}.png")
    return folder


def contents(output: Path) -> dict[str, bytes]:
    """Return all that a folder has, but for the lock that names its last process."""
    files = (path for path in output.rglob("*") if path.name != ".lock")
    return {str(path.relative_to(output)): path.read_bytes() if path.is_file() else b"" for path in files}


def test_another_project_is_refused_in_the_folder_of_one_that_has_finished(sdxl, shapes, train, tmp_path):
    output, cats = tmp_path / "run", tmp_path / "cats"
    flags = (*base("sdxl", sdxl, shapes), "--train_batch_size=4", "--max_train_steps=1")
    others = (*flags, f"--instance_data_dir={draw_cats(cats)}", "--caption_strategy=filename")
    train(output, *flags)
    (output / "hub_datasets.json").write_text("{}")
    before = contents(output)
    assert json.loads(before["status.json"])["state"] == "finished"
    for more, world in (((), 2), (("--max_train_steps=3",), 1), (("--resume_from_checkpoint=none",), 1)):
        refused = " ".join(train(output, *others, *more, world=world, code=2).said.split())
        assert f"{output} has a run on {shapes} (36 images), of which none is among the 12 of {cats}" in refused
        assert "another output_dir, or `--continue_with_other_data`" in refused and "making" not in refused
        assert contents(output) == before
    shutil.rmtree(output / "checkpoints")
    before = contents(output)
    lora = train(output, *flags, "--model_type=lora", code=2).said
    assert f"{output} holds all weights, but model_type = lora" in " ".join(lora.split())
    assert contents(output) == before
    tuned = tmp_path / "tuned"
    tuned.symlink_to(shutil.copytree(sdxl, tmp_path / "renamed"))
    other = train(output, *flags, f"--pretrained_model_name_or_path={tuned}", world=2, code=2).said
    assert f"was trained from {sdxl}, and has finished, but pretrained_model_name_or_path = {tuned}" in " ".join(
        other.split()
    )
    assert contents(output) == before
    (tmp_path / "elsewhere").mkdir()
    same = shutil.copytree(sdxl, tmp_path / "elsewhere" / sdxl.name)
    assert "finished already" in train(output, *flags, f"--pretrained_model_name_or_path={same}").said
    moved = shutil.copytree(shapes, tmp_path / "moved")
    assert "finished already" in train(output, *flags, f"--instance_data_dir={moved}").said
    with_flag = train(output, *others, "--continue_with_other_data", "--max_train_steps=2").said
    assert f"(36 images), of which none is among the 12 of {cats}: that run goes on" in " ".join(with_flag.split())
    assert json.loads((output / "status.json").read_text())["step"] == 2
    assert train(output, *flags, "--max_train_steps=2", code=2), "it is the other project's folder now"
