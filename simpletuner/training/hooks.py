"""What else happens in a run, beside training: hooks, which settings switch on, told of the points that a run passes.

Rank 0 alone has them. The order in which each point is passed is in docs/start.md and docs/step.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from simpletuner.models.family.base import ModelFamily
from simpletuner.session import Session
from simpletuner.settings import Settings
from simpletuner.training.metrics.metrics import Tracker
from simpletuner.training.metrics.speed import Durations

if TYPE_CHECKING:
    from simpletuner.runs.facts import RunFacts
    from simpletuner.runs.report import HtmlReport


class RunHook:
    """Does nothing at any point of a run; a context within which the run takes place."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def locked(self, stack: ExitStack) -> None:
        """The folder is this run's, and nothing in it has been looked at; `stack` is left when the rank ends."""

    def resuming(self, damaged: Mapping[Path, str]) -> None:
        """A checkpoint is about to be looked for that is not `damaged`."""

    def skipped(self, step: int) -> None:
        """There is nothing to do: the run has finished at `step`, in an earlier start."""

    def opened(self, facts: RunFacts, max_steps: int, stack: ExitStack) -> None:
        """The engine holds its weights, and the start is on record; `stack` is left when pipelines are written."""

    def trackers(self, step: int) -> Sequence[Tracker]:
        """What metrics are to go to as well, for a run that goes on after `step`."""
        return ()

    def started(self, step: int, durations: Durations) -> None:
        """Training goes on after `step`."""

    def evaluated(self, step: int) -> None:
        """A round of evaluations is through, and the next step waits: return at once."""

    def exported(self, family: ModelFamily, facts: RunFacts, pipeline: Path, folder: Path) -> None:
        """`pipeline` is whole in a hidden `folder`, which takes its place next."""

    def finished(self) -> None:
        """All is done."""

    def failed(self, error: BaseException) -> None:
        """The run ends early: Stopped by a signal, or for an error."""

    def __enter__(self) -> RunHook:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.finished() if error is None else self.failed(error)


class ReportPage(RunHook):
    """`report.html`."""

    page: HtmlReport | None = None

    def opened(self, facts: RunFacts, max_steps: int, stack: ExitStack) -> None:
        from simpletuner.runs.report import open_html_report

        output = self.session.settings.training.output_dir
        self.page = stack.enter_context(open_html_report(output, facts, max_steps, self.session.report))

    def evaluated(self, step: int) -> None:
        if self.page is not None:
            self.page.renew(step)


class ModelCard(RunHook):
    """README.md of each exported folder."""

    def exported(self, family: ModelFamily, facts: RunFacts, pipeline: Path, folder: Path) -> None:
        # Imported at the end of a run: a start needs no template of cards.
        write_card = import_module("simpletuner.training.publishing.model_card").write_card
        write_card(self.session.settings, family, facts, pipeline, folder)


# The first is told first how the run ended: a mirror uploads what those before it have left, and the notifier tells
# of an upload that failed.
HOOKS: Mapping[str, Callable[[Settings], bool | str]] = {
    "hooks.ReportPage": lambda settings: True,
    "hooks.ModelCard": lambda settings: True,
    "metrics.trackers.Trackers": lambda settings: settings.logging.report_to != "none",
    "publishing.hub.HubUpload": lambda settings: settings.hub.push_to_hub,
    "mirroring.run_mirror.RunMirror": lambda settings: settings.checkpoints.mirror_output,
    "publishing.notifier.Notifier": lambda settings: bool(settings.logging.notify_url),
}
"""By the place of each hook below this package, the settings that switch it on: no other is imported."""


def open_hooks(session: Session) -> list[RunHook]:
    """The hooks of a run, for rank 0. Raises EnvironmentNotReady for a bucket that cannot be opened."""
    places = [place.rpartition(".") for place, is_on in HOOKS.items() if is_on(session.settings)]
    return [getattr(import_module(f"simpletuner.training.{module}"), name)(session) for module, _, name in places]
