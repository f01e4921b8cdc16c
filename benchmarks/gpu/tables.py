"""Tables of what was measured: steps beside `plan` and beside published figures, runs that went wrong, the machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from gpu.records import Record, read_records, show

from simpletuner.parallel.devices import DEVICES

PUBLISHED = Path(__file__).parents[1] / "figures" / "published.jsonl"
"""Steps that others have measured, in the form of ours: flags, seconds and memory, with the source."""


def print_tables(found: Sequence[Record], plans: Mapping[str, Record]) -> None:
    sections = (
        ("steps: s/step, MFU, peak MiB, nvidia-smi MiB | plan: s/step, MiB | published", steps_of(found, plans)),
        ("traces", traces_of(found)),
        ("tiny runs", runs_of(found)),
        ("machine", machine_of(found)),
        ("parts", parts_of(found)),
    )
    for title, lines in sections:
        if rows := list(lines):
            print(title, *(f"  {row}" for row in rows), sep="\n", flush=True)


def steps_of(found: Iterable[Record], plans: Mapping[str, Record]) -> Iterator[str]:
    published = {record["step"]: record for record in read_records([PUBLISHED])}
    for record in found:
        if record.get("kind") != "measured":
            continue
        name, seconds, card = record["step"], record["s/step"], record["card"]
        plan = plans.get(f"{name.partition(', as')[0]} @ {record['resolution']}", {}).get(card, {})
        mfu = f"{plan['flops'] / seconds / DEVICES[card].peak_tflops / 1e12:.1%}" if plan else ""
        ours = [show(seconds), mfu, show(record.get("peak, MiB")), show(record.get("nvidia-smi, MiB"))]
        theirs = [show(plan.get("s/step")), show(plan.get("MiB"))]
        other = published.get(name, {}) if card else {}
        said = f"{show(other.get('s/step'))} s, {show(other.get('MiB'))} MiB on {other.get('card')}" if other else ""
        yield f"{name} @ {record['resolution']}: {', '.join(ours)} | {', '.join(theirs)} | {said}"


def traces_of(found: Iterable[Record]) -> Iterator[str]:
    for record in found:
        if record.get("kind") == "trace":
            times = f"{show(record['seconds'])} s, busy {show(record['busy'])} s"
            yield f"{record['step']}: {times}, {record['launches']} launches"
            yield from (f"  {show(spent)} s {count} x {name[:70]}" for name, count, spent in record["top"][:10])


def runs_of(found: Iterable[Record]) -> Iterator[str]:
    """Yield the runs that failed or are off, and the names of the others."""
    good = []
    for record in found:
        if "run" not in record:
            continue
        after = record.get("after SIGKILL, off", 0)
        if record["rc"] == 0 and record.get("ok", True) and after <= 1e-4:
            good.append(record["run"])
        else:
            off = f"off {show(record.get('off'))}, after SIGKILL {show(after)}"
            yield f"{record['run']}: rc {record['rc']}, {off} {record.get('error', '')[:220]}"
    if good:
        yield f"as expected: {'; '.join(good)}"


def machine_of(found: Iterable[Record]) -> Iterator[str]:
    for record in found:
        if "what" in record:
            rest = {name: show(each) for name, each in record.items() if name not in ("part", "what", "step", "norm")}
            yield f"{record.get('step', '')} {record['what']}: {rest}"[:260].strip()


def parts_of(found: Iterable[Record]) -> Iterator[str]:
    for record in found:
        if "ended" in record:
            last = " / ".join(line for line in record.get("said", "").splitlines()[-4:] if line.strip())
            yield f"{record['part']}: {record['ended']}, {show(record.get('seconds'))} s {last[-330:]}".strip()
