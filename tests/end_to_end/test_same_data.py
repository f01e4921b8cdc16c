"""Ranks agree on pictures, captions and folders before anything is encoded."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import comparing
import ranks
from conftest import SMALL
from PIL import Image

HOST = socket.gethostname()
FIRST, SECOND = f"rank 0 (host {HOST})", f"rank 1 (host {HOST})"


def case(root: Path, name: str, first: dict | None = None, second: dict | None = None) -> Path:
    """Make a case of two equal folders; what differs is up to the caller. Return the folder of rank 1."""
    folder = root / name / "rank0"
    folder.mkdir(parents=True)
    for number in range(6):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"caption {number}")
    shutil.copytree(folder, root / name / "rank1")  # with the files' times, as rsync -a does
    for rank, values in enumerate((first, second)):
        (root / name / f"rank{rank}.json").write_text(json.dumps(values or {}))
    return root / name / "rank1"


def test_the_first_difference_is_named_and_copies_with_other_times_agree(starter, tmp_path):
    root = tmp_path / "cases"
    case(root, "equal")
    os.utime(case(root, "touched") / "3.png", (1, 1))
    (case(root, "missing") / "2.png").unlink()
    Image.new("RGB", (64, 64), "blue").save(case(root, "more") / "9.png")
    (root / "more" / "rank1" / "9.txt").write_text("nine")
    (case(root, "broken") / "4.png").write_bytes(b"cut")
    other = case(root, "bytes") / "1.png"
    other.write_bytes(other.read_bytes() + bytes(7))
    other = case(root, "content") / "1.png"
    other.write_bytes(other.read_bytes()[:-1] + b"x")
    (case(root, "caption") / "5.txt").write_text("caption 5 {0}\nand more")
    case(root, "repeats", {"repeats": 1}, {"repeats": 3})
    tables = []
    for rank, caption in enumerate(("a circle", "a square")):
        path = tmp_path / f"table{rank}.csv"
        path.write_text("file,text\n" + "".join(f"{number},{caption}\n" for number in range(6)))
        block = {"path": str(path), "filename_column": "file", "caption_column": ["text"]}
        tables.append({"caption_strategy": "parquet", "parquet": block})
    case(root, "tables", *tables)
    (case(root, "apart").parent / "apart").touch()
    (root / "equal" / "out").mkdir()
    (root / "equal" / "out" / ".probe-left-by-a-kill").touch()

    run = starter.start(comparing.compare, 2, str(root), str(tmp_path / "report.json"))
    assert run.wait() == [0, 0], run.said
    said = json.loads((tmp_path / "report.json").read_text())
    where = [f"3: output_dir {root}/apart/out{rank} is not the same folder on" for rank in (0, 1)]
    assert said.pop("apart, folders") == [f"{start} {SECOND} as on {FIRST}" for start in where]
    assert all(one == two for one, two in said.values()), "both ranks say the same"
    assert all(one == "" for name, (one, _) in said.items() if name.endswith(", folders"))
    plain = {name: one for name, (one, _) in said.items() if not name.endswith(", folders")}
    versions = " ".join(
        f"d/{n}.png={(s := (root / 'touched' / 'rank0' / f'{n}.png').stat()).st_size}-{s.st_mtime_ns}" for n in range(6)
    )
    assert plain.pop("touched") == versions, "caches are keyed by the times of rank 0"
    assert plain.pop("equal").count("d/") == plain.pop("apart").count("d/") == 6
    size = (root / "broken" / "rank0" / "4.png").stat().st_size
    assert plain.pop("broken") == f"4: d/4.png has 3 bytes on {SECOND}, {size} on {FIRST}"
    size = (root / "bytes" / "rank0" / "1.png").stat().st_size
    assert plain == {
        "missing": f"4: {SECOND} has 5 images, {FIRST} has 6: d/2.png is missing on {SECOND}",
        "more": f"4: {SECOND} has 7 images, {FIRST} has 6: d/9.png is missing on {FIRST}",
        "bytes": f"4: d/1.png has {size + 7} bytes on {SECOND}, {size} on {FIRST}",
        "content": f"4: d/1.png has other content on {SECOND} than on {FIRST}",
        "caption": f"4: d/5.png has another caption on {SECOND} than on {FIRST}: "
        "'caption 5 {0}' instead of 'caption 5'",
        "tables": f"4: the table of dataset `d` has other content on {SECOND} than on {FIRST}",
        "repeats": f"2: repeats of dataset `d` is 3 on {SECOND}, 1 on {FIRST}",
    }
    assert not list(root.rglob(".probe-*"))


def test_a_run_on_machines_that_share_too_little_ends_before_anything_is_encoded(sdxl, shapes, starter, tmp_path):
    folders = [tmp_path / f"machine{rank}" for rank in range(2)]
    for folder in folders:
        shutil.copytree(shapes, folder / "pictures")
    here = "/proc/self/cwd"  # one path, which leads elsewhere on each machine
    flags = ("--model_family=sdxl", f"--pretrained_model_name_or_path={sdxl}", "--train_batch_size=2", *SMALL)
    flags = ("train", *flags, f"--instance_data_dir={here}/pictures", "--max_train_steps=1")

    def both(output: str, *more: str) -> tuple[list[int], str]:
        run = starter.start(
            ranks.command_line_at, 2, list(map(str, folders)), [*flags, f"--output_dir={output}", *more]
        )
        return run.wait(), run.said

    codes, said = both(f"{here}/run")
    assert codes == [3, 3] and "Traceback" not in said
    assert f"error: output_dir {here}/run is not the same folder on {SECOND} as on {FIRST}" in said
    assert "simpletuner nfs check" in said and said.count("error: ") == 1
    codes, said = both(str(tmp_path / "run"), f"--cache_dir_vae={here}/latents")
    assert codes == [3, 3]
    assert f"error: the cache {here}/latents is not the same folder on {SECOND} as on {FIRST}" in said
    (folders[1] / "pictures" / "0003.png").unlink()
    codes, said = both(str(tmp_path / "run"))
    assert codes == [4, 4] and said.count("error: ") == 1
    assert f"pictures/0003.png is missing on {SECOND}" in said
    for folder in tmp_path.rglob("*"):
        assert not folder.name.startswith(".probe-") and folder.suffix != ".shard"
    shutil.copyfile(shapes / "0003.png", folders[1] / "pictures" / "0003.png")  # with a time of its own
    codes, said = both(str(tmp_path / "run"))
    assert codes == [0, 0], said
