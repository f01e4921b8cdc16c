"""`simpletuner cache`: list what runs left to find again, and clear it."""

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
from simpletuner.tools.cache.contents import Kind

if TYPE_CHECKING:
    from simpletuner.tools.cache.contents import Item

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
KINDS = "blocks, deepspeed, latents, text or all"
NAMED_AT_MOST = 5


def build_cache() -> typer.Typer:
    """Return the commands of `simpletuner cache`."""
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List and clear what runs cache.")
    app.command("list", context_settings=UNKNOWN_FLAGS)(with_settings(show))
    app.command("clear")(with_settings(clear))
    return app


def show(flags: Mapping[str, Any], config: Path | None, as_json: AsJson = False) -> None:
    """List caches: kind, where, entries, bytes, and whether a run uses them. Settings say where to look."""
    report = Report()
    items = found(load(flags, config, complete=False).settings, list(Kind), report)
    if as_json:
        report.json([item.as_json() for item in items])
    elif items:
        use = {True: "yes", False: "no", None: "unknown"}
        rows = [(item.kind.value, item.path, item.entries, item.bytes, use[item.in_use]) for item in items]
        report.data_table("", rows, ("kind", "where", "entries", "bytes", "in use"))
    report.say(total(items) if items else "there is nothing cached")


def clear(
    flags: Mapping[str, Any],
    config: Path | None,
    kinds: Annotated[list[Kind] | None, typer.Argument(metavar="KIND...", help=f"Which caches: {KINDS}.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry_run", "--dry-run", help="Only say what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove caches. Never what a run uses, nor files that are not ours. Settings say where to look."""
    from simpletuner.tools.cache import clearing

    if not kinds:
        raise SettingsError(f"which cache? Name {KINDS}", "`simpletuner cache list` shows what there is")
    must_ask = not (dry_run or yes) and set(kinds) != {Kind.BLOCKS}
    if must_ask and not sys.stdin.isatty():
        raise SettingsError("nobody is here to confirm what is removed", "say --dry_run to see it, --yes to do it")
    report = Report()
    items = found(load(flags, config, complete=False).settings, kinds, report)
    clearing.refuse_in_use(items)
    doomed = [item for item in items if not item.kept]
    show_doomed(report, doomed, as_json)
    tell_left(report, items)
    if not doomed:
        report.say("there is nothing to remove")
    elif dry_run:
        report.say(f"would remove {total(doomed)}")
    elif must_ask and not report.confirm(f"remove {total(doomed)}?"):
        report.say("nothing is removed")
    else:
        report.say(f"removed {in_bytes(clearing.clear(items))}")


def found(settings: Settings, kinds: Sequence[Kind], report: Report) -> list[Item]:
    """Return the caches of some kinds. Raises SettingsError for a folder that holds more than what was asked for."""
    from simpletuner.data.folders import cache_folders
    from simpletuner.tools.cache.contents import find_blocks, find_shards, find_swap

    wanted = set(Kind) if Kind.ALL in kinds else set(kinds)
    items = find_blocks() if Kind.BLOCKS in wanted else []
    if Kind.DEEPSPEED in wanted:
        swapped, strangers = find_swap(settings.parallel.offload_param_path)
        items += swapped
        tell_strangers(report, strangers)
    if wanted & {Kind.LATENTS, Kind.TEXT}:
        folders = cache_folders(settings)
        latents = find_shards(Kind.LATENTS, folders.latents, folders.latents_roots, not_in=folders.text)
        text = find_shards(Kind.TEXT, [folders.text])
        items += apart(latents, text, wanted)
    return items


def apart(latents: Sequence[Item], text: Sequence[Item], wanted: set[Kind]) -> list[Item]:
    """Return the items of the wanted kinds; a folder that is both is one item, and only for who wants both."""
    places = {item.path.resolve() for item in latents}
    shared = [item for item in text if item.path.resolve() in places]
    if shared and not {Kind.LATENTS, Kind.TEXT} <= wanted:
        raise SettingsError(
            f"{shared[0].path} caches latents and text in the same files: they can only be cleared together",
            "name both: `simpletuner cache clear latents text`",
        )
    return [item for item in [*latents, *text] if item.kind in wanted and item not in shared]


def show_doomed(report: Report, items: Sequence[Item], as_json: bool) -> None:
    """Print what is removed, or would be, as data."""
    if as_json:
        report.json([item.as_json() for item in items])
    elif items:
        rows = [(item.kind.value, item.path, item.entries, item.bytes) for item in items]
        report.data_table("", rows, ("kind", "where", "entries", "bytes"))


def tell_left(report: Report, items: Sequence[Item]) -> None:
    """Name what is passed over, and why."""
    for item in items:
        if item.kept:
            report.say(f"left: {item.path}: {item.kept}")
    tell_strangers(report, [path for item in items for path in item.others])


def tell_strangers(report: Report, paths: Sequence[Path]) -> None:
    """Name files that are not ours and stay."""
    if paths:
        more = f" and {len(paths) - NAMED_AT_MOST} more" if len(paths) > NAMED_AT_MOST else ""
        report.say(f"not ours, left: {', '.join(map(str, paths[:NAMED_AT_MOST]))}{more}")


def total(items: Sequence[Item]) -> str:
    """Return the number of caches and their size."""
    return f"{len(items)} cache{'s' * (len(items) != 1)}, {in_bytes(sum(item.bytes for item in items))}"


def in_bytes(count: int) -> str:
    """Return a size for people, with the exact number of bytes."""
    from rich.filesize import decimal

    return f"{count:,} bytes" if count < 1000 else f"{decimal(count)} ({count:,} bytes)"
