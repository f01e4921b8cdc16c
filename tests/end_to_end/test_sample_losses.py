"""Records of a run: losses of its samples on any ranks and over starts, and its data, which a later start changes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from simpletuner.app import main


def rows_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "sample_losses.jsonl").read_text().splitlines()]


def ask(capsys, *words: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    return said.out


def test_losses_of_samples_are_those_of_one_rank_and_go_on_after_a_kill(sdxl_flags, shapes, train, tmp_path, capsys):
    flags = (*sdxl_flags, "--log_sample_losses", "--gradient_accumulation_steps=2")
    one = train(tmp_path / "one", *flags, "--train_batch_size=4", "--max_train_steps=4")
    two = train(tmp_path / "two", *flags, "--train_batch_size=2", "--max_train_steps=2", world=2)
    with (two.output / "sample_losses.jsonl").open("a") as file:  # a step that was killed before its checkpoint
        file.write(json.dumps(rows_of(one.output)[2] | {"losses": [9.0] * 8}) + "\n" + '{"step": 4, "buck')
    again = train(two.output, *flags, "--train_batch_size=2", "--max_train_steps=4", world=2)
    straight, resumed = rows_of(one.output), rows_of(again.output)
    for name in ("step", "bucket", "ids", "timesteps"):
        assert [row[name] for row in resumed] == [row[name] for row in straight]
    for row, other, loss in zip(straight, resumed, one.losses, strict=True):
        assert len(row["ids"]) == 8 and other["losses"] == pytest.approx(row["losses"], rel=1e-3)
        assert sum(row["losses"]) / 8 == pytest.approx(loss, rel=1e-6)
    shown = json.loads(ask(capsys, "runs", "losses", one.output, "--json", f"--contact_sheet={tmp_path / 'sheet.png'}"))
    assert {each["id"] for each in shown} == {name for row in straight[1:] for name in row["ids"]}
    assert Image.open(tmp_path / "sheet.png").getextrema() != ((255, 255),) * 3
    train(tmp_path / "one", *sdxl_flags, "--train_batch_size=4", "--max_train_steps=5")
    assert rows_of(one.output) == straight, "what was recorded stays where nothing is recorded any more"


def test_a_start_with_other_data_says_what_changed(sdxl_flags, shapes, train, tmp_path, capsys):
    pictures, output = tmp_path / "pictures", tmp_path / "run"
    shutil.copytree(shapes, pictures)
    flags = (*sdxl_flags, f"--instance_data_dir={pictures}", "--train_batch_size=2")
    train(output, *flags, "--max_train_steps=1")
    train(output, *flags, "--max_train_steps=2")
    assert "all starts of this run had the same data" in ask(capsys, "dataset", "diff", output)
    listings = list((output / "data_listings").iterdir())
    names = sorted(path.name for path in pictures.glob("*.png"))
    (pictures / names[0]).unlink()
    shutil.copy(pictures / names[1], pictures / "new.png")
    shutil.copy((pictures / names[1]).with_suffix(".txt"), pictures / "new.txt")
    (pictures / names[2]).with_suffix(".txt").write_text("another caption")
    whole = Image.open(pictures / names[3])
    whole.resize(whole.size[::-1] if whole.width != whole.height else (96, 64)).save(pictures / names[3])
    train(output, *flags, "--max_train_steps=3")
    assert len(list((output / "data_listings").iterdir())) == len(listings) + 1 == 2
    found = json.loads(ask(capsys, "dataset", "diff", output, "--json"))
    assert found["removed"] == [f"pictures/{names[0]}"] and found["added"] == ["pictures/new.png"]
    assert found["changed"] == [f"pictures/{names[3]}"] and sum(found["moved"].values()) == 1
    [(name, before, after)] = found["recaptioned"]
    assert (name, after) == (f"pictures/{names[2]}", "another caption") and before.startswith("a ")
    text = ask(capsys, "dataset", "diff", output)
    assert "added: 1 image\n  pictures/new.png" in text and "in another bucket: 1 image" in text
    card = (output / "pipeline" / "README.md").read_text()
    digest = re.search(r"data digest \| ([0-9a-f]{32}) \(XXH3 of names", card)
    assert digest is not None and "| trained for | 0:00:0" in card and "| started | 2" in card
    assert "energy | not estimated" in card, "of a CPU no power limit is known"
    shutil.copytree(pictures, tmp_path / "elsewhere" / "pictures", copy_function=shutil.copyfile)
    other = tmp_path / "other"
    train(other, *sdxl_flags, f"--instance_data_dir={tmp_path / 'elsewhere/pictures'}", "--max_train_steps=1")
    assert digest[1] in (other / "pipeline" / "README.md").read_text(), "copies have other times"
    between = json.loads(ask(capsys, "dataset", "diff", output, other, "--json"))
    assert between["added"] == between["removed"] == between["recaptioned"] == []
