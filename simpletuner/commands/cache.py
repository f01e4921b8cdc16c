"""`simpletuner cache`: list and clear what runs keep for the next one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simpletuner.commands.options import UNKNOWN_FLAGS, with_settings
from simpletuner.errors import SettingsError
from simpletuner.report import Report
from simpletuner.settings import Settings, load
from simpletuner.tools.cache.contents import CacheKind

if TYPE_CHECKING:
    from simpletuner.tools.cache.contents import CacheItem

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
KINDS = "blocks, deepspeed, latents, text or all"
NAMED_AT_MOST = 5


def build_cache() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List and clear what runs cache.")
    app.command("list", context_settings=UNKNOWN_FLAGS)(with_settings(show))
    app.command("clear")(with_settings(clear))
    return app


def show(flags: Mapping[str, Any], config: Path | None, as_json: AsJson = False) -> None:
    """List caches: kind, where, entries, bytes, and whether a run uses them. Settings say where to look."""
    report = Report()
    items = find_items(load(flags, config, complete=False).settings, list(CacheKind), report)
    if as_json:
        report.json([item.as_json() for item in items])
    elif items:
        use = {True: "yes", False: "no", None: "unknown"}
        rows = [(item.kind.value, item.path, item.entries, item.bytes, use[item.in_use]) for item in items]
        report.data_table("", rows, ("kind", "where", "entries", "bytes", "in use"))
    report.say(format_total(items) if items else "there is nothing cached")


def clear(
    flags: Mapping[str, Any],
    config: Path | None,
    kinds: Annotated[list[CacheKind] | None, typer.Argument(metavar="KIND...", help=f"Which caches: {KINDS}.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry_run", "--dry-run", help="Only say what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove caches. Never what a run uses, nor files that are not ours. Settings say where to look."""
    from simpletuner.tools.cache import clearing

    if not kinds:
        raise SettingsError(f"which cache? Name {KINDS}", "`simpletuner cache list` shows what there is")
    must_ask = not (dry_run or yes) and set(kinds) != {CacheKind.BLOCKS}
    if must_ask and not sys.stdin.isatty():
        raise SettingsError(
            "there is no terminal to confirm the removal", "--dry_run shows what would be removed, --yes removes it"
        )
    report = Report()
    items = find_items(load(flags, config, complete=False).settings, kinds, report)
    clearing.refuse_in_use(items)
    removable = [item for item in items if not item.kept]
    show_removable(report, removable, as_json)
    report_skipped(report, items)
    if not removable:
        report.say("there is nothing to remove")
    elif dry_run:
        report.say(f"would remove {format_total(removable)}")
    elif must_ask and not report.confirm(f"remove {format_total(removable)}?"):
        report.say("nothing is removed")
    else:
        report.say(f"removed {format_bytes(clearing.clear(items))}")


def find_items(settings: Settings, kinds: Sequence[CacheKind], report: Report) -> list[CacheItem]:
    """Find the caches of some kinds. Raises SettingsError for a folder that holds more than what was asked for."""
    from simpletuner.tools.cache.contents import find_blocks, find_run_shards, find_swap

    wanted = set(CacheKind) if CacheKind.ALL in kinds else set(kinds)
    items = find_blocks() if CacheKind.BLOCKS in wanted else []
    if CacheKind.DEEPSPEED in wanted:
        swapped, foreign = find_swap(settings.parallel.offload_param_path)
        items += swapped
        report_foreign(report, foreign)
    if wanted & {CacheKind.LATENTS, CacheKind.TEXT}:
        items += select_shards(*find_run_shards(settings), wanted)
    return items


def select_shards(latents: Sequence[CacheItem], text: Sequence[CacheItem], wanted: set[CacheKind]) -> list[CacheItem]:
    """Return the items of the wanted kinds. A folder that holds both is one item, and needs both to be wanted."""
    paths = {item.path.resolve() for item in latents}
    shared = [item for item in text if item.path.resolve() in paths]
    if shared and not {CacheKind.LATENTS, CacheKind.TEXT} <= wanted:
        raise SettingsError(
            f"{shared[0].path} caches latents and text in the same files: they can only be cleared together",
            "name both: `simpletuner cache clear latents text`",
        )
    return [item for item in [*latents, *text] if item.kind in wanted and item not in shared]


def show_removable(report: Report, items: Sequence[CacheItem], as_json: bool) -> None:
    if as_json:
        report.json([item.as_json() for item in items])
    elif items:
        rows = [(item.kind.value, item.path, item.entries, item.bytes) for item in items]
        report.data_table("", rows, ("kind", "where", "entries", "bytes"))


def report_skipped(report: Report, items: Sequence[CacheItem]) -> None:
    for item in items:
        if item.kept:
            report.say(f"left: {item.path}: {item.kept}")
    report_foreign(report, [path for item in items for path in item.others])


def report_foreign(report: Report, paths: Sequence[Path]) -> None:
    if paths:
        more = f" and {len(paths) - NAMED_AT_MOST} more" if len(paths) > NAMED_AT_MOST else ""
        report.say(f"not written by simpletuner, left: {', '.join(map(str, paths[:NAMED_AT_MOST]))}{more}")


def format_total(items: Sequence[CacheItem]) -> str:
    return f"{len(items)} cache{'s' * (len(items) != 1)}, {format_bytes(sum(item.bytes for item in items))}"


def format_bytes(count: int) -> str:
    """Return a readable size with the exact number of bytes."""
    from rich.filesize import decimal

    return f"{count:,} bytes" if count < 1000 else f"{decimal(count)} ({count:,} bytes)"
