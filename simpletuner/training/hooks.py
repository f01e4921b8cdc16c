"""Hooks: all in a run beside training, switched on by settings, called at each point that it passes.

Rank 0 alone has them. The order in which each point is passed is in docs/start.md and docs/step.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from simpletuner.session import Session
from simpletuner.settings import Settings
from simpletuner.training.metrics.metrics import Tracker
from simpletuner.training.metrics.speed import Durations

if TYPE_CHECKING:
    from simpletuner.runs.facts import RunFacts
    from simpletuner.runs.report import HtmlReport


class RunHook:
    """A context within which a run takes place, told of its points; this one does nothing at any of them."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def locked(self, stack: ExitStack) -> None:
        """Begin: the folder is this run's, its content not yet read; `stack` is left when the rank ends."""

    def resuming(self, damaged: Mapping[Path, str]) -> None:
        """Fetch a checkpoint that the run may go on from, none of the `damaged` ones."""

    def skipped(self, step: int) -> None:
        """Catch up with a run that has finished at `step` in an earlier start: there is nothing to train."""

    def opened(self, facts: RunFacts, max_steps: int, stack: ExitStack) -> None:
        """Show the start, which is on record; `stack` is left after the pipelines, or when the run fails."""

    def trackers(self, step: int) -> Sequence[Tracker]:
        """Open other destinations of the metrics of a run that goes on after `step`."""
        return ()

    def started(self, step: int, durations: Durations) -> None:
        """Watch the training, which goes on after `step`."""

    def alarmed(self, sentence: str) -> None:
        """Tell of a fault that does not end the run."""

    def evaluated(self, step: int) -> None:
        """Show a round of evaluations; the next step waits for this to return."""

    def finished(self) -> None:
        """End with a run that has done all."""

    def failed(self, error: BaseException) -> None:
        """End with a run that was stopped by a signal, or failed."""

    def __enter__(self) -> RunHook:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.finished() if error is None else self.failed(error)


class ReportPage(RunHook):
    page: HtmlReport | None = None

    def opened(self, facts: RunFacts, max_steps: int, stack: ExitStack) -> None:
        from simpletuner.runs.report import open_html_report

        output = self.session.settings.training.output_dir
        self.page = stack.enter_context(open_html_report(output, facts, max_steps, self.session.report))

    def evaluated(self, step: int) -> None:
        if self.page is not None:
            self.page.renew(step)


# The first is told first how the run ended: a mirror uploads what those before it have left, and the notifier
# tells of an upload that failed.
# By the place of each hook below this package, the settings that switch it on: no other is imported.
HOOKS: Mapping[str, Callable[[Settings], bool | str]] = {
    "hooks.ReportPage": lambda settings: True,
    "metrics.trackers.Trackers": lambda settings: settings.logging.report_to != "none",
    "publishing.hub.HubUpload": lambda settings: settings.hub.push_to_hub,
    "mirroring.run_mirror.RunMirror": lambda settings: settings.checkpoints.mirror_output,
    "publishing.notifier.Notifier": lambda settings: bool(settings.logging.notify_url),
}


def open_hooks(session: Session) -> list[RunHook]:
    """The hooks of a run, for rank 0. Raises EnvironmentNotReady for a bucket that cannot be opened."""
    places = [place.rpartition(".") for place, is_on in HOOKS.items() if is_on(session.settings)]
    return [getattr(import_module(f"simpletuner.training.{module}"), name)(session) for module, _, name in places]


@dataclass(frozen=True)
class RoundEnd:
    """Calls functions with the step, after the other evaluations of a round; they must return at once."""

    actions: Sequence[Callable[[int], None]]
    """Empty on ranks above 0."""
    interval: int
    title: str = "reporting"

    def count(self, step: int) -> int:
        return 1

    def run(self, step: int, advance: Callable[[int], None]) -> None:
        for action in self.actions:
            action(step)
        advance(1)

    def is_complete(self, step: int) -> bool:
        return True


def at_round_ends(settings: Settings, actions: Sequence[Callable[[int], None]]) -> RoundEnd:
    """Return a callback that calls `actions` after each round of validation images; without prompts, after
    each checkpoint."""
    every = settings.validation.validation_step_interval if settings.validation.samples_images else 0
    return RoundEnd(actions, every or settings.checkpoints.checkpoint_step_interval)
