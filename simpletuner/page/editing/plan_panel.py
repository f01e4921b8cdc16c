"""The plan beside the form: memory of each GPU against the card, time and disk, and what would fit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from simpletuner.errors import SimpleTunerError
from simpletuner.page.editing.documents import Document, find_outside, shown_value
from simpletuner.page.editing.editor import read_document
from simpletuner.page.editing.planning import Planning, PlanQuestion
from simpletuner.page.rendering import field, folders_of, render
from simpletuner.settings import Settings
from simpletuner.settings.resolving.loading import resolve


@dataclass(frozen=True)
class MemoryPart:
    """A part of a memory bar; `start` and `share` are percents of its width."""

    name: str
    gpu_bytes: float
    formula: str
    start: float
    share: float


@dataclass(frozen=True)
class ShownPlan:
    """A plan as the panel shows it."""

    found: Mapping[str, Any]
    parts: list[MemoryPart]
    limit: float | None
    """End of the card's memory, in percents of the bar; None where the bar itself is the card, or unknown."""
    processes: int
    proposed: Mapping[str, str]
    """Settings of `--auto`, as they are typed."""

    @property
    def run_time(self) -> str:
        steps, seconds = self.found["steps"], self.found["step_seconds"]
        return str(timedelta(seconds=round(steps * seconds))) if steps and seconds else ""


def plan(request: Request) -> Response:
    """Answer with the plan of the form as it is typed; 204 where a later question has replaced this one."""
    auto = field(request, "plan_auto") == "1"
    try:
        document = read_document(request)
        settings = checked_settings(request, document)
        place = folders_of(request).roots[0]
        asked = (field(request, "plan_gpu").strip(), field(request, "plan_memory").strip(), auto)
        question = PlanQuestion(document.path, document.changed_text(), place, *asked)
        found = planning_of(request).answer(question, question.key(settings), field(request, "plan_again") == "1")
    except SimpleTunerError as error:
        return HTMLResponse(render("plan_result", error=error, shown=None, auto=auto))
    if found is None:
        return Response(status_code=204)
    shown = shown_plan(found, settings.launch.num_processes)
    return HTMLResponse(render("plan_result", error=None, shown=shown, auto=auto))


def planning_of(request: Request) -> Planning:
    return request.app.state.planning


def checked_settings(request: Request, document: Document) -> Settings:
    """Return the settings as they are typed. Raises SettingsError for mistakes, which need no process to be found."""
    for error in find_outside(document, folders_of(request)).values():
        raise error
    return resolve(document.sources(os.environ), complete=False).settings


def shown_plan(found: Mapping[str, Any], processes: int) -> ShownPlan:
    rows = [row for row in found["memory"] if row["gpu"]]
    card, used = found["gpu_memory_bytes"], sum(row["gpu"] for row in rows)
    width, parts, start = max(card or 0, used), [], 0.0
    for row in rows:
        share = 100 * row["gpu"] / width
        parts.append(MemoryPart(row["name"], row["gpu"], row["formula"], start, share))
        start += share
    proposed = {name: shown_value(value) for name, value in found["settings"].items()}
    return ShownPlan(found, parts, 100 * card / width if card and card < width else None, processes, proposed)


ROUTES = [Route("/plan", plan, methods=["POST"])]
