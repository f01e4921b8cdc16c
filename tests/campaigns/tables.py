"""Damage tables of images and the dataset files that name them, and see that each is answered as we promise.

    .venv/bin/python tests/campaigns/tables.py --cases 2000    # about a minute on one core
    .venv/bin/python tests/campaigns/tables.py --case 123      # one of them, with its files and the answer

Promised: samples with a caption and a size, the same ones from the kept scan, or one sentence with a hint and exit code
2, 3 or 4; no traceback, no hang. `tests/end_to_end/test_campaigns.py` runs a small sample.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fuzz import HANG_SECONDS, MOST_SECONDS, SHOWN, interrupt, run_campaign  # noqa: E402
from mutations import OF_BYTES, OF_VALUES, containers  # noqa: E402
from tabled import add_images, write_rows  # noqa: E402

from simpletuner.data.config.datasets import load_datasets  # noqa: E402
from simpletuner.data.samples.dataset_warnings import dataset_warnings  # noqa: E402
from simpletuner.data.samples.discovery import discover  # noqa: E402
from simpletuner.errors import SimpleTunerError  # noqa: E402
from simpletuner.parallel.world import World, joined_world  # noqa: E402
from simpletuner.preparation.shared_scan import scan_datasets  # noqa: E402
from simpletuner.report import Report  # noqa: E402
from simpletuner.settings.declared.sections import Data  # noqa: E402
from simpletuner.settings.values.shape import Shape  # noqa: E402

NAMES = ("a.png", "b.png", "in/c.png")
SUFFIXES = (".parquet", ".csv", ".jsonl")
COMPRESSIONS = ("none", "snappy", "zstd", "gzip")
CODES = (2, 3, 4)


@dataclass
class TableCase:
    """A table and a dataset file, and what was done to them."""

    table: str
    content: bytes
    datasets: bytes
    done: list[str] = field(default_factory=list)


def draw_case(draw: random.Random) -> TableCase:
    """Draw a table and a dataset file; up to three mutations of values, and of bytes."""
    done: list[str] = []
    suffix = draw.choice(SUFFIXES)
    rows = [{"file": name, "caption": f'a "caption", {name}', "w": 64, "h": 64, "tags": ["x", ""]} for name in NAMES]
    rows = mutated_values(rows, draw, done, draw.choice((0, 0, 0, 1, 2)))
    content = table_bytes(rows, suffix, draw)
    columns = {"width_column": "w", "height_column": "h"} if draw.random() < 0.5 else {}
    captions = draw.choice(("caption", "tags", ["tags", "caption"])) if suffix != ".csv" else "caption"
    block = {"path": f"t{suffix}", "filename_column": "file", "caption_column": captions, **columns}
    entry: dict[str, Any] = {"id": "d", "instance_data_dir": "images", "resolution": 64, "parquet": block}
    block["identifier_includes_extension"] = draw.random() < 0.9
    entry["caption_strategy"] = draw.choice(("parquet", "parquet", "csv", "filename", "textfile"))
    entry["metadata_backend"] = draw.choice(("discovery", "parquet"))
    content = mutated_bytes(content, draw, done, draw.choice((0, 1, 1, 1, 2)))
    entries = mutated_values([entry], draw, done, draw.choice((0, 0, 0, 0, 1)))
    datasets = json.dumps(entries, indent=1).encode("utf-8", "surrogatepass")
    return TableCase(f"t{suffix}", content, mutated_bytes(datasets, draw, done, int(draw.random() < 0.05)), done)


def mutated_values(value: Any, draw: random.Random, done: list[str], times: int) -> Any:
    value = copy.deepcopy(value)
    for _ in range(times):
        mutation = draw.choice(OF_VALUES)
        if places := list(containers(value)):
            mutation(draw.choice(places), draw)
            done.append(mutation.__name__)
    return value


def mutated_bytes(content: bytes, draw: random.Random, done: list[str], times: int) -> bytes:
    for _ in range(times):
        mutation = draw.choice(OF_BYTES)
        content = mutation(content, draw)
        done.append(mutation.__name__)
    return content


def table_bytes(rows: Any, suffix: str, draw: random.Random) -> bytes:
    """Write rows in a format, or as JSON lines where that format cannot say them."""
    if suffix == ".parquet":
        with io.BytesIO() as file:
            try:
                table = pa.Table.from_pylist(rows)
                pq.write_table(table, file, compression=draw.choice(COMPRESSIONS), row_group_size=draw.choice((1, 9)))
            except (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError):
                table = pa.table({"file": NAMES, "caption": NAMES})
                pq.write_table(table, file, compression=draw.choice(COMPRESSIONS))
            return file.getvalue()
    if suffix == ".csv" and rows and all(isinstance(row, dict) for row in rows):
        try:
            with tempfile.TemporaryDirectory() as folder:
                return write_rows(Path(folder) / "t.csv", rows).read_bytes()
        except (ValueError, OverflowError):  # rows with other keys than the first one, or what is not UTF-8
            pass
    rows = rows if isinstance(rows, list) else [rows]
    return "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8", "surrogatepass")


@dataclass
class TableFuzz:
    """Cases drawn from a seed; `problems` is empty if all promises held."""

    seed: int
    problems: list[str] = field(default_factory=list)
    codes: Counter[tuple[str, int]] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    verbose: bool = False

    def remarks(self) -> list[str]:
        return []

    def run(self, cases: range) -> None:
        with joined_world({}, use_cpu=True) as world, tempfile.TemporaryDirectory() as folder, alarmed():
            add_images(Path(folder) / "images", *NAMES)
            for name in NAMES:
                (Path(folder) / "images" / name).with_suffix(".txt").write_text("a caption")
            for number in cases:
                own = replace(world, store=dist.PrefixStore(str(number), world.store))
                self.run_case(number, Path(folder), own)

    def run_case(self, number: int, folder: Path, world: World) -> None:
        case = draw_case(random.Random(f"{self.seed}-{number}"))
        (folder / case.table).write_bytes(case.content)
        (folder / "d.json").write_bytes(case.datasets)
        began = time.process_time()
        signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
        code, said, problems = answer(folder, world)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if (seconds := time.process_time() - began) > MOST_SECONDS:
            problems.append(f"SLOW: {seconds:.0f} s")
        if self.verbose:
            print(
                case.done, case.content, case.datasets.decode("utf-8", "replace"), f"exit code {code}: {said}", sep="\n"
            )
        self.codes[Path(case.table).suffix, code] += 1
        for path in (folder / case.table, folder / "scans"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for problem in problems:
            self.note(f"case {number}: {case.table} ({', '.join(case.done)}): {problem}")

    def note(self, problem: str) -> None:
        """Keep a problem, and print it: what is found must survive a campaign that is stopped."""
        self.problems.append(problem)
        sort = re.sub(r"^case.*?\): |\d+", "", problem)[-100:]
        self.seen[sort] += 1
        if self.seen[sort] <= SHOWN:
            print(problem, flush=True)


@contextlib.contextmanager
def alarmed() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def answer(folder: Path, world: World) -> tuple[int, str, list[str]]:
    """Return exit code and text of a case, and which promises they break."""
    try:
        first = samples_of(folder, replace(world, store=dist.PrefixStore("first", world.store)))
        again = samples_of(folder, replace(world, store=dist.PrefixStore("again", world.store)))
    except SimpleTunerError as error:
        said = f"{error.message}\n{error.hint}"
        return int(error.exit_code), said, list(wrong_with_error(error, said))
    except KeyboardInterrupt:
        return 130, "", ["HANG"]
    except Exception:  # noqa: BLE001  what is not ours is what is looked for
        return 1, traceback.format_exc(), [f"BUG\n{traceback.format_exc()}"]
    problems = ["ANOTHER ANSWER from the kept scan"] if first != again else []
    problems += [f"NO CAPTION: {sample}" for sample in first[0] if not all(sample[2]) or not sample[2]]
    return 0, "\n".join(first[1]), problems


def wrong_with_error(error: SimpleTunerError, said: str) -> Iterator[str]:
    if error.exit_code not in CODES:
        yield f"EXIT CODE {error.exit_code}: {said}"
    if not error.message or not error.hint:
        yield f"NO SENTENCE AND HINT: {said}"
    if "bug" in said or not re.search(r"d\.json|dataset `", said):
        yield f"NO PLACE: {said}"


def samples_of(folder: Path, world: World) -> tuple[list[tuple], list[str]]:
    """Return what a run would train on, and its warnings."""
    with contextlib.chdir(folder):
        datasets, _ = load_datasets(Data(data_backend_config=Path("d.json")))
        scans = scan_datasets(datasets, [], Path("scans"), world, Report(quiet=True), lambda: None)
        found = discover(scans, Shape(1, 16, 16), 0)
        found.check()
        return [(each.id, each.geometry, each.captions) for each in found.samples], list(dataset_warnings(found, 16))


if __name__ == "__main__":
    run_campaign(TableFuzz, 2000, __doc__)
