"""`simpletuner dataset diff`: what changed in the data between two starts of a run, or between two runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simpletuner.commands.paths import path_argument
from simpletuner.report import Report
from simpletuner.system.numbers import count_noun

if TYPE_CHECKING:
    from simpletuner.tools.dataset.listing_diff import DataDifference

NAMES_SHOWN = 10


def dataset_diff(
    folder: Annotated[Path, path_argument("Output folder of the run.")],
    other: Annotated[
        Path | None, path_argument("Output folder of another run, to compare the last starts of both.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts, with all names.")] = False,
) -> None:
    """Show what changed in the data of a run when it last changed between two starts, or how that of two runs differs.

    Images that were added, removed or changed (size and time of change), captions, buckets. Opens no image.
    """
    from simpletuner.page.runs.folder import check_run
    from simpletuner.tools.dataset.listing_diff import compare_data, last_change, last_data

    report = Report()
    for each in (folder, *([other] if other else [])):
        check_run(each)
    pair = (last_data(folder), last_data(other)) if other is not None else last_change(folder)
    found = compare_data(*pair) if pair is not None else None
    if as_json:
        report.json(asdict(found) if found is not None else {})
    elif found is None or found.is_empty:
        report.line("the data is the same" if found is not None else "all starts of this run had the same data")
    else:
        show(found, report)


def show(found: DataDifference, report: Report) -> None:
    report.line(f"from {found.before}\nto   {found.after}", style="bold")
    for title, names in (
        ("added", found.added),
        ("removed", found.removed),
        ("changed", found.changed),
        ("held out now, or no longer", found.held_out),
        ("recaptioned", [f"{name}: {old!r} -> {new!r}" for name, old, new in found.recaptioned]),
        ("in another bucket", [f"{move}: {count:,}" for move, count in found.moved.items()]),
    ):
        for line in lines_of(
            title, names, sum(found.moved.values()) if names and title == "in another bucket" else None
        ):
            report.line(line)
    rows = [
        (name, f"{one:,}", f"{two:,}", f"{two - one:+,}") for name, (one, two) in found.buckets.items() if one != two
    ]
    if rows:
        report.data_table("", rows, ("bucket", "before", "after", ""))


def lines_of(title: str, names: list[str], count: int | None = None) -> Iterator[str]:
    """Yield a heading and the first names; nothing where there are none."""
    if not names:
        return
    yield f"{title}: {count_noun(len(names) if count is None else count, 'image')}"
    yield from (f"  {name}" for name in names[:NAMES_SHOWN])
    if (more := len(names) - NAMES_SHOWN) > 0:
        yield f"  and {more:,} more; --json has all"
