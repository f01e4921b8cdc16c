"""`global_batch_size` as a source of gradient_accumulation_steps: a run keeps its batch on any number of ranks."""

from __future__ import annotations

from simpletuner.errors import BrokenRule
from simpletuner.settings.files.raw_values import RawValue
from simpletuner.settings.resolving.sources import RANKS, MergedValues
from simpletuner.system.numbers import count_noun

NAME, BATCH, CONTEXT = "global_batch_size", "train_batch_size", "context_parallel_size"
SIZES_SHOWN, LARGEST_SHOWN = 6, 10_000


def apply_global_batch_size(merged: MergedValues) -> None:
    """Set gradient_accumulation_steps to what the ranks leave of the global batch; another value of it is a mistake."""
    wanted, batch, ranks, shared = (merged.value(name) for name in (NAME, BATCH, RANKS, CONTEXT))
    if wanted is None or not all(type(each) is int and each > 0 for each in (wanted, batch, ranks, shared)):
        return  # validation says so
    # A context_parallel_size above the number of ranks is a mistake that its own rule tells.
    data_ranks = max(1, ranks // shared)
    origin = merged.origins[NAME]
    if wanted % (batch * data_ranks):
        message = f"{NAME} = {wanted} ({origin}) is no multiple of {BATCH} {batch} x {count_noun(data_ranks, 'rank')}"
        fix = suggest(wanted, batch, data_ranks)
        merged.mistakes.append(BrokenRule(NAME, f"{message}: {fix}", others=(BATCH, RANKS)))
        return
    steps = RawValue("gradient_accumulation_steps", wanted // (batch * data_ranks), f"{NAME} = {wanted} ({origin})")
    merged.require_equal(steps, origin.source, f"{wanted} / ({BATCH} {batch} x {count_noun(data_ranks, 'rank')})")


def suggest(wanted: int, batch: int, data_ranks: int) -> str:
    """Return what divides: other sizes of a rank's batch, else the nearest global batches."""
    product = batch * data_ranks
    nearest = " or ".join(str(each) for each in (wanted // product * product, -(-wanted // product) * product) if each)
    if wanted % data_ranks:
        return f"set {NAME} to {nearest}, or start a number of ranks that divides {wanted}"
    own = wanted // data_ranks
    # What is typed may have any number of digits, and is tried one by one.
    sizes = [size for size in range(min(own, batch, LARGEST_SHOWN), 0, -1) if own % size == 0][:SIZES_SHOWN]
    return f"set {BATCH} to {', '.join(map(str, sizes))}, or {NAME} to {nearest}"
