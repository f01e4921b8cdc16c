"""`simpletuner cache`: list and clear what runs keep for the next one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from simpletuner.commands.help import SettingsCommand
from simpletuner.commands.listing import AsJson, CommandGroup
from simpletuner.commands.options import UNKNOWN_FLAGS, with_settings
from simpletuner.errors import SettingsError
from simpletuner.report import Report
from simpletuner.settings import Loaded, Settings, load
from simpletuner.system.numbers import count_noun, format_bytes
from simpletuner.tools.cache.contents import CacheKind

if TYPE_CHECKING:
    from simpletuner.tools.cache.contents import CacheItem

KINDS = "blocks, deepspeed, latents, text or all"
NAMED_AT_MOST = 5
SHOWN = (
    *("model_family", "instance_data_dir", "data_backend_config", "cache_dir_vae", "cache_dir_text", "output_dir"),
    "offload_param_path",
)
"""The settings that say where caches are."""


def build_cache() -> typer.Typer:
    app = CommandGroup("List and clear what runs cache.")
    app.command("list", cls=SettingsCommand, context_settings=UNKNOWN_FLAGS)(with_settings(show, SHOWN))
    app.command("clear", cls=SettingsCommand)(with_settings(clear, SHOWN))
    return app


def show(flags: Mapping[str, object], config: Path | None, as_json: AsJson = False) -> None:
    """List caches: kind, where, entries, size, use by a run, datasets. Settings say where to look."""
    report = Report()
    items = find_items(load(flags, config, complete=False).settings, list(CacheKind), report)
    if as_json:
        report.json([item.as_json() for item in items])
    elif items:
        use = {True: "yes", False: "no", None: "unknown"}
        rows = [
            (
                item.kind.value,
                item.path,
                f"{item.entries:,}",
                decimal(item.bytes),
                use[item.in_use],
                ", ".join(item.datasets),
            )
            for item in items
        ]
        report.data_table("", rows, ("kind", "where", "entries", "size", "in use", "datasets"))
    report_buckets(report, items)
    report.say(format_total(items) if items else "there is nothing cached")


def clear(
    flags: Mapping[str, object],
    config: Path | None,
    kinds: Annotated[list[CacheKind] | None, typer.Argument(metavar="KIND...", help=f"Which caches: {KINDS}.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry_run", "--dry-run", help="Only say what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
    unused: Annotated[
        bool, typer.Option("--unused", help="Only latents and text that these settings do not use.")
    ] = False,
) -> None:
    """Remove caches. Never what a run uses, nor files that are not ours. Settings say where to look."""
    from simpletuner.tools.cache import clearing

    kinds = kinds or ([CacheKind.LATENTS, CacheKind.TEXT] if unused else [])
    if not kinds:
        raise SettingsError(f"which cache? Name {KINDS}", "`simpletuner cache list` shows what there is")
    # Detected blocks are computed again in seconds.
    must_ask = not (dry_run or yes) and set(kinds) != {CacheKind.BLOCKS}
    # Before anything is looked for: in a job nobody could answer the question that follows.
    if must_ask and not sys.stdin.isatty():
        raise SettingsError(
            "there is no terminal to confirm the removal", "--dry_run shows what would be removed, --yes removes it"
        )
    report = Report()
    if unused:
        clear_unused(load(flags, config), kinds, report, dry_run, must_ask, as_json)
        return
    items = find_items(load(flags, config, complete=False).settings, kinds, report)
    clearing.refuse_in_use(items)
    removable = [item for item in items if not item.kept]
    show_removable(report, removable, as_json)
    report_buckets(report, removable)
    report_skipped(report, items)
    if not removable:
        report.say("there is nothing to remove")
    elif dry_run:
        report.say(f"would remove {format_total(removable)}")
    elif must_ask and not report.confirm(f"remove {format_total(removable)}?"):
        report.say("nothing is removed")
    else:
        report.say(f"removed {format_bytes(clearing.clear(items, report.say))}")


def clear_unused(
    loaded: Loaded, kinds: Sequence[CacheKind], report: Report, dry_run: bool, must_ask: bool, as_json: bool
) -> None:
    """Remove the records that a run with these settings does not use. Raises SettingsError for others."""
    from simpletuner.tools.cache import clearing
    from simpletuner.tools.cache.unused import find_unused, needed_by, remove_unused

    if others := set(kinds) - {CacheKind.LATENTS, CacheKind.TEXT}:
        named = ", ".join(sorted(kind.value for kind in others))
        raise SettingsError(f"{named}: only latents and text can be named with --unused", "leave it out")
    all_items = find_items(loaded.settings, kinds, report)
    report_skipped(report, [replace(each, kept=f"{each.bucket} has it too") for each in all_items if each.bucket])
    # Records of a bucket may be another run's, whose settings are not known here.
    items = [each for each in all_items if not each.bucket]
    clearing.refuse_in_use(items)
    needed = needed_by(loaded) if items else {}
    found = [each for each in (find_unused(item, needed) for item in items) if each.bytes]
    if as_json:
        report.json([each.as_json() for each in found])
    elif found:
        rows = [(each.item.kind.value, each.item.path, f"{each.records:,}", decimal(each.bytes)) for each in found]
        report.data_table("", rows, ("kind", "where", "unused", "size"))
    records, freed = sum(each.records for each in found), sum(each.bytes for each in found)
    total = f"{count_noun(records, 'unused record')}, {format_bytes(freed)}"
    if not found:
        report.say("there is nothing to remove")
    elif dry_run:
        report.say(f"would remove {total}")
    elif must_ask and not report.confirm(f"remove {total}?"):
        report.say("nothing is removed")
    else:
        report.say(f"freed {format_bytes(remove_unused(found, report.say))}")


def find_items(settings: Settings, kinds: Sequence[CacheKind], report: Report) -> list[CacheItem]:
    """Find the caches of some kinds, and say which files that look like caches are not ours."""
    from simpletuner.tools.cache.clearing import find_caches

    items, foreign = find_caches(settings, kinds)
    report_foreign(report, foreign)
    return items


def show_removable(report: Report, items: Sequence[CacheItem], as_json: bool) -> None:
    if as_json:
        report.json([item.as_json() for item in items])
    elif items:
        rows = [(item.kind.value, item.path, f"{item.entries:,}", decimal(item.bytes)) for item in items]
        report.data_table("", rows, ("kind", "where", "entries", "size"))


def report_buckets(report: Report, items: Sequence[CacheItem]) -> None:
    for item in items:
        if item.bucket:
            report.say(f"{item.path} is the local copy of {item.bucket}; `cache clear` leaves what is in the bucket")


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
    return f"{count_noun(len(items), 'cache')}, {format_bytes(sum(item.bytes for item in items))}"
