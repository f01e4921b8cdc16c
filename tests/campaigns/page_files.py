"""Damage the page's own files, one at a time, below a running page, and use it: `python tests/campaigns/page_files.py`.

In SIMPLETUNER_HOME are the queue, the journal of edited captions, templates, what checks of datasets found, and the
block cache; beside images are captions. No request may hang or find a bug, and what somebody has typed (all but results
of checks and the cache) must still be there afterwards: in its place, or moved aside.
`tests/end_to_end/test_campaigns.py` runs a sample.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "support"), str(TESTS)]

from damage import DAMAGES  # noqa: E402
from page import write_dataset  # noqa: E402
from page_server import Answer, PageServer, page_server  # noqa: E402
from results import add_result, read_results  # noqa: E402

from simpletuner.counting.block_detection import put  # noqa: E402
from simpletuner.page.queue.entries import (  # noqa: E402
    EntryState,
    Need,
    QueueEntry,
    QueueFile,
)
from simpletuner.system.files.checksums import value_checksum  # noqa: E402
from simpletuner.system.files.regular_files import ASIDE  # noqa: E402

HANG_SECONDS = 60
FILE = "pictures.toml"
MADE_AGAIN = ("home/datasets/", "home/fsdp_block_cache.json", "home/deepspeed/another.toml")
"""Names of what the page or a command makes again, and of the template that each case saves."""
SHOWN: tuple[tuple[str, dict[str, str]], ...] = (
    ("/runs", {}),
    ("/runs/rows", {}),
    ("/datasets", {"file": FILE}),
    ("/datasets/progress", {"file": FILE}),
    ("/configurations", {}),
    ("/deepspeed", {"file": FILE, "template": "mine"}),
    ("/blocks", {"file": FILE}),
    ("/preferences", {"file": FILE}),
)


@dataclass
class PageFiles:
    """Cases of damage to one folder with its home; `problems` is empty if all promises held."""

    server: PageServer
    whole: Path
    seed: int = 0
    problems: list[str] = field(default_factory=list)
    codes: Counter[int] = field(default_factory=Counter)

    @property
    def parent(self) -> Path:
        return self.server.folder.parent

    def run(self, cases: Iterable[int]) -> Iterator[dict[str, object]]:
        names = sorted(path.relative_to(self.whole).as_posix() for path in self.whole.rglob("*") if path.is_file())
        for number in cases:
            draw, told = random.Random(f"{self.seed} {number}"), len(self.problems)
            name, damage = draw.choice(names), draw.choice(list(DAMAGES))
            self.restore()
            DAMAGES[damage](self.parent / name, draw)
            before, what = content_of(self.parent / name), f"{number}: {name} {damage}"
            self.use(what)
            if before and not name.startswith(MADE_AGAIN) and not self.is_kept(name, before):
                self.problems.append(f"{what}: LOST")
            yield {"case": number, "file": name, "damage": damage, "problems": self.problems[told:]}

    def restore(self) -> None:
        """Bring back all files in their places; the page goes on."""
        for name in ("home", "work"):
            for path in (self.parent / name).iterdir():  # the folder itself is the page's
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            shutil.copytree(self.whole / name, self.parent / name, symlinks=True, dirs_exist_ok=True)

    def use(self, what: str) -> None:
        """Look at all that is shown, edit a caption and undo it, remove a run from the queue, and keep a template."""
        for path, query in SHOWN:
            self.note(f"{what}: {path}", lambda path=path, query=query: self.server.get(path, **query))
        place = {"file": FILE, "dataset": "pictures", "name": "a.png", "row": "0"}
        form = self.note(f"{what}: caption", lambda: self.server.get("/datasets/caption", **place))
        checksum = re.search(r"checksum&#34;: &#34;([^&]*)&#34;", form.text if form else "")
        sent = {**place, "checksum": checksum[1] if checksum else "", "text": "another caption"}
        saved = self.note(f"{what}: save", lambda: self.server.post("/datasets/caption", sent))
        edit = re.search(r"edit&#34;: &#34;(\w+)", saved.text if saved else "")
        undo = {**place, "edit": edit[1] if edit else ""}
        self.note(f"{what}: undo", lambda: self.server.post("/datasets/undo", undo))
        self.note(f"{what}: queue", lambda: self.server.post("/runs/queue/remove", {"entry": "first"}))
        template = {"file": FILE, "template_name": "another", "replace": "on"}
        self.note(f"{what}: template", lambda: self.server.post("/deepspeed/template", template))

    def note(self, what: str, ask) -> Answer | None:
        """Ask, and note an answer that must not be."""
        try:
            answer = ask()
        except (OSError, AssertionError) as error:
            self.problems.append(f"{what}: HANG ({type(error).__name__}: {error})")
            return None
        self.codes[answer.code] += 1
        if answer.code >= 500 or "this is a bug" in answer.text:
            self.problems.append(f"{what}: BUG {answer.code}\n{answer.text[-1500:]}")
        return answer

    def is_kept(self, name: str, before: bytes) -> bool:
        """Return whether the content of a damaged file is in its place still, or aside: journals are appended to."""
        path = self.parent / name
        kept = [path, *path.parent.glob(f"{path.name}.*{ASIDE}")]
        if any((content_of(each) or b"").startswith(before) for each in kept):
            return True
        if path == queue_file(self.parent):  # one entry was removed, in JSON that can be read
            return {row["id"] for row in json.loads(before)} - {"first"} == {each.id for each in QueueFile(path).read()}
        # The caption that was edited, and whose edit was undone: the page has shown its text, and the journal holds it.
        return name.endswith("/a.txt") and before in (content_of(self.parent / "home" / "caption_edits.jsonl") or b"")


def queue_file(parent: Path) -> Path:
    return parent / "home" / "queue" / f"{os.uname().nodename}.json"


def content_of(path: Path) -> bytes | None:
    """Return what is in a regular file, and None for anything else."""
    try:
        return path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else None
    except OSError:
        return None


@contextmanager
def page_with_files(parent: Path) -> Iterator[PageFiles]:
    """Start a page over a dataset that was checked and edited, a queue, templates and a block cache."""
    (folder := parent / "work").mkdir()
    write_dataset(folder, parent)
    home = parent / "home"
    (home / "deepspeed").mkdir()
    (home / "deepspeed" / "mine.toml").write_text('description = "mine"\n[zero_optimization]\nstage = 3\n')
    put("a model", {"fingerprint": "1", "blocks": ["Block"]}, print, {"SIMPLETUNER_HOME": str(home)})
    queue = queue_file(parent)
    queue.parent.mkdir()
    place = value_checksum({"folders": [str(folder)], "current": str(folder)}).rpartition(":")[2]
    failed = {"state": EntryState.FAILED, "sentence": "it failed", "place": place, "need": Need(1)}
    with QueueFile(queue).edited() as entries:
        for name in ("first", "last"):
            entries.append(QueueEntry(file=f"/{name}.toml", output=f"/{name}", id=name, **failed))
    kept = queue.read_bytes()
    with page_server(folder) as server:
        server.wait_seconds = HANG_SECONDS
        files = PageFiles(server, parent / "whole")
        files.use("undisturbed")
        assert not files.problems and set(files.codes) == {200}, (files.problems, files.codes)
        queue.write_bytes(kept)
        for name in ("home", "work"):
            shutil.copytree(parent / name, files.whole / name, symlinks=True)
        yield files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="one case alone")
    parser.add_argument("--results", type=Path, help="a file of JSON lines to append to, and to go on from")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, page_with_files(Path(name)) as files:
        results, files.seed = given.results or Path(name) / "results.jsonl", given.seed
        done = {row["case"] for row in read_results(results)}
        cases = range(given.count) if given.case is None else [given.case]
        for row in files.run(case for case in cases if case not in done):
            add_result(results, row)
            for problem in row["problems"]:
                print(problem, flush=True)
        rows = read_results(results)
    bad = sum(bool(row["problems"]) for row in rows)
    print(f"{len(rows)} cases, {bad} with problems; answers {dict(files.codes)}")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
