"""The plan beside the form: `simpletuner plan` in one process at a time, which ends when it is outdated."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from simpletuner import __version__
from simpletuner.errors import EnvironmentNotReady, ExitCode, SimpleTunerError
from simpletuner.page.child_processes import AwaitedCommands
from simpletuner.page.editing.documents import Document, find_outside, shown_value
from simpletuner.page.editing.editor import read_document
from simpletuner.page.rendering import field, folders_of, render
from simpletuner.settings import Settings
from simpletuner.settings.resolving.loading import resolve
from simpletuner.system.files.checksums import value_checksum

SECONDS = 1800
"""`--auto` of the largest models counts for minutes, on a busy machine for some more."""
MAX_KEPT = 40
# Exit codes with which a plan may be there: all is well, it does not fit, the images are wrong.
ANSWERED = (ExitCode.OK, ExitCode.ENVIRONMENT, ExitCode.DATA)
UNRELATED_SECTIONS = ("logging", "hub")
# Settings that change nothing in a plan: typing a prompt must not start one.
UNRELATED = ("seed", "learning_rate", "lr_scheduler", "lr_warmup_steps", "output_dir", "validation_prompt")


@dataclass(frozen=True)
class PlanQuestion:
    """Arguments of the command: a config file's text with the typed changes, and the GPU to plan for."""

    path: Path
    """The name that messages have for the file."""
    text: str
    place: Path
    """The folder in which the run would be started."""
    gpu: str = ""
    gpu_memory: str = ""
    auto: bool = False

    def key(self, settings: Settings) -> str:
        """Return a checksum of what the answer depends on, of images when their folder changed."""
        values = {
            name: section
            for section_name, section in settings.model_dump(mode="json").items()
            if section_name not in UNRELATED_SECTIONS
            for name, section in section.items()
            if name not in UNRELATED
        }
        folder = settings.data.instance_data_dir
        data = folder.stat().st_mtime_ns if folder and folder.is_dir() else 0
        own = {name: value for name, value in asdict(self).items() if name in ("gpu", "gpu_memory", "auto")}
        facts = {"validates": settings.validation.samples_images, "data": data, "version": __version__}
        return value_checksum({"settings": values, **own, **facts})

    def command(self, config: Path) -> list[str]:
        flags = [f"--gpu={self.gpu}" if self.gpu else "", f"--gpu_memory={self.gpu_memory}" if self.gpu_memory else ""]
        auto = ["--auto"] if self.auto else []
        return ["plan", f"--config={config}", "--json", *filter(None, flags), *auto]


class Planning:
    """The plans of this page, and the answers to earlier questions."""

    def __init__(self, commands: AwaitedCommands) -> None:
        self.commands = commands
        self.kept: OrderedDict[str, Mapping[str, Any]] = OrderedDict()

    def answer(self, question: PlanQuestion, key: str, again: bool) -> Mapping[str, object] | None:
        """Return the output of `plan --json`; None if a later question replaced this one.

        Raises EnvironmentNotReady with the sentence of the command where it has no plan.
        """
        self.commands.kill("plan")
        if not again and (known := self.kept.get(key)) is not None:
            return known
        with TemporaryDirectory(prefix="simpletuner-plan-") as folder:
            config = Path(folder) / question.path.name
            config.write_text(question.text, encoding="utf-8")
            found = self.run(question, config)
        if found is not None:
            self.kept[key] = found
            while len(self.kept) > MAX_KEPT:
                self.kept.popitem(last=False)
        return found

    def run(self, question: PlanQuestion, config: Path) -> Mapping[str, Any] | None:
        # What the command keeps while it counts goes with our folder, also where it is killed.
        own = {"TMPDIR": str(config.parent)}
        try:
            printed = self.commands.run(
                question.command(config), SECONDS, place=question.place, variables=own, answered=ANSWERED
            )
        except EnvironmentNotReady as error:
            said = (each.replace(str(config), str(question.path)) for each in (error.message, error.hint))
            raise EnvironmentNotReady(*said) from None
        return json.loads(printed) if printed else None


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
    """Settings as they are typed. Raises SettingsError for mistakes, which need no process to be found."""
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
