"""Hooks: what settings switch on, and the order in which it is told how a run ended."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from simpletuner.errors import TrainingError
from simpletuner.settings import Settings
from simpletuner.settings.declared.sections import Checkpoints, Hub, Logging
from simpletuner.system.processes.signals import StopRequest
from simpletuner.training.hooks import HOOKS, RunHook, open_hooks

ALWAYS = ["ReportPage"]
SWITCHED: dict[str, dict[str, Any]] = {
    "Trackers": {"logging": Logging(report_to="tensorboard")},
    "HubUpload": {"hub": Hub(push_to_hub=True)},
    "RunMirror": {"checkpoints": Checkpoints(mirror_output="s3://bucket/run")},
    "Notifier": {"logging": Logging(notify_url=SecretStr("http://127.0.0.1:9/hook"))},
}


def names(**sections: Any) -> list[str]:
    session: Any = SimpleNamespace(settings=Settings(**sections), report=None, status=None, stop=StopRequest())
    return [type(hook).__name__ for hook in open_hooks(session)]


def test_each_hook_is_switched_on_by_its_setting_alone():
    assert [place.rpartition(".")[2] for place in HOOKS] == [*ALWAYS, *SWITCHED]
    assert names() == ALWAYS
    for name, sections in SWITCHED.items():
        assert names(**sections) == [*ALWAYS, name]


@pytest.mark.parametrize("fails", [None, TrainingError("loss is nan"), KeyboardInterrupt()])
def test_the_first_is_told_first_and_the_next_of_what_went_wrong_with_it(fails):
    said: list[tuple[str, object]] = []

    class Told(RunHook):
        def __init__(self, name: str, raises: BaseException | None = None) -> None:
            self.name, self.raises = name, raises

        def finished(self) -> None:
            said.append((self.name, None))
            if self.raises is not None:
                raise self.raises

        def failed(self, error: BaseException) -> None:
            said.append((self.name, error))

    broken = TrainingError("the upload failed")
    with suppress(TrainingError, KeyboardInterrupt), ExitStack() as stack:
        for hook in reversed([Told("upload"), Told("mirror", broken), Told("notifier")]):
            stack.enter_context(hook)
        if fails is not None:
            raise fails
    after = fails or broken
    assert said == [("upload", fails), ("mirror", fails), ("notifier", after)]
