"""The words of `simpletuner status`, and the file that a replay names."""

from __future__ import annotations

import pytest

from simpletuner.commands.runs import rows_of
from simpletuner.runs.condition import Condition
from simpletuner.settings.showing.clusters import Exported
from simpletuner.system.processes.run_status import RunState, RunStatus


@pytest.mark.parametrize(("state", "label"), [("failed", "reason"), ("stopped", "reason"), ("running", "doing")])
def test_why_a_run_has_ended_is_its_reason(state, label):
    rows = dict(rows_of(RunStatus(RunState(state)), Condition(RunState(state), "a sentence"), 1.0))
    assert rows[label] == "a sentence" and len({"doing", "reason"} & rows.keys()) == 1


def test_a_replay_names_the_file_that_was_written():
    exported = Exported("", "jobset.yaml", ["kubectl", "apply", "--filename=jobset.yaml"])
    assert exported.replay("exp/kubernetes.out").split()[-1] == "--filename=exp/kubernetes.out"
