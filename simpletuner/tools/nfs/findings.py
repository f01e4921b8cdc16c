"""What a check found: a status, one sentence with the numbers, and what to type when something is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

CHECKS = (
    "mount",
    "write",
    "see",
    "rename",
    "exclusive",
    "lock",
    "delete",
    "identity",
    "clock",
    "space",
    "speed",
    "port",
)
"""Every check, in the order of the table."""


class Status(StrEnum):
    """How a check ended; `skip` is for what was not asked, or could not be."""

    SKIP = "skip"
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


SEVERITY = tuple(Status)


@dataclass(frozen=True)
class Finding:
    """One check's result; `values` are the numbers of the sentence for scripts, `fix` what to type or to change."""

    check: str
    status: Status
    seen: str
    fix: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return plain values, as they are posted and printed."""
        return {**asdict(self), "status": str(self.status), "fix": list(self.fix), "values": dict(self.values)}


def finding_from(value: Mapping[str, Any]) -> Finding:
    """Return the finding that another node posted."""
    return Finding(value["check"], Status(value["status"]), value["seen"], tuple(value["fix"]), value["values"])


def worst(findings: Iterable[Finding]) -> Status:
    """Return the most severe status; `pass` when all were skipped."""
    return max((finding.status for finding in findings), key=SEVERITY.index, default=Status.PASS)


def passed(check: str, seen: str, **values: Any) -> Finding:
    """Return that all is well."""
    return Finding(check, Status.PASS, seen, (), values)


def warned(check: str, seen: str, *fix: str, **values: Any) -> Finding:
    """Return something that a run can live with, and what mends it."""
    return Finding(check, Status.WARN, seen, fix, values)


def failed(check: str, seen: str, *fix: str, **values: Any) -> Finding:
    """Return something that will stop or spoil a run, and what mends it."""
    return Finding(check, Status.FAIL, seen, fix, values)


def skipped(check: str, why: str) -> Finding:
    """Return that a check was not made."""
    return Finding(check, Status.SKIP, why)


def plural(count: int, thing: str) -> str:
    """Return a count with its noun."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a short time as people say it."""
    if seconds < 0.001:
        return "under 1 ms"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return `node 1`, or `nodes 1, 2`."""
    listed = sorted(ranks)
    return f"node{'' if len(listed) == 1 else 's'} {', '.join(map(str, listed))}"
