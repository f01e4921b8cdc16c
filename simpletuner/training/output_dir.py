"""The output folder of a run: locked while it trains, cleaned of what a killed run left, and the exported pipelines."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from simpletuner.checkpoints.export import check_targets, export_pipeline, finished_steps
from simpletuner.checkpoints.layout import clear_unfinished
from simpletuner.errors import RemoteFailure, SimpleTunerError, explain_system_errors
from simpletuner.models.family import ModelFamily
from simpletuner.session import Session
from simpletuner.settings import Settings
from simpletuner.system.files import remove, restore_replaced
from simpletuner.system.locks import lock_output_dir
from simpletuner.training.state import TrainingState

PIPELINE, PIPELINE_EMA = "pipeline", "pipeline-ema"


def open_output_dir(session: Session, stack: ExitStack) -> None:
    """Lock output_dir and clean it up, on rank 0. Collective: all ranks raise what rank 0 raises."""
    output, error = session.settings.training.output_dir, None
    if session.world.is_first:
        try:
            with explain_system_errors():
                stack.enter_context(lock_output_dir(output, session.stop.check, session.report.say))
                remove_leftovers(output)
                check_targets(pipelines_of(session.settings))
        except SimpleTunerError as caught:
            error = caught
    failure = session.world.gather_texts(json.dumps([error.exit_code, error.message, error.hint]) if error else "")[0]
    if error is not None:
        raise error
    if failure:
        raise RemoteFailure(*json.loads(failure))


def remove_leftovers(output: Path) -> None:
    """Remove what a killed run left unfinished, and finish or undo its renames."""
    clear_unfinished(output / "checkpoints")
    for name in (PIPELINE, PIPELINE_EMA):
        restore_replaced(output / name)
    for path in [*output.glob(".*.unfinished"), *output.glob("validation/**/.*.unfinished")]:
        remove(path)


def pipelines_of(settings: Settings) -> list[Path]:
    """Return the folders that a run exports to: with EMA one for the average, too."""
    names = (PIPELINE, PIPELINE_EMA) if settings.ema.use_ema else (PIPELINE,)
    return [settings.training.output_dir / name for name in names]


def exported_steps(session: Session) -> int:
    """Return the steps behind the exported pipeline that this run would continue; 0 where there is none. Collective.

    A run that goes back to an earlier checkpoint, or to the start, trains even though a pipeline is there.
    """
    if session.settings.checkpoints.resume_from_checkpoint != "latest":
        return 0
    return finished_steps(session.settings.training.output_dir / PIPELINE, session.world)


def export(session: Session, family: ModelFamily, state: TrainingState) -> None:
    """Write the trained pipelines. Collective."""
    session.world.activity.begin("writing the pipeline", watched=False)
    output = session.settings.training.output_dir
    weights = {PIPELINE_EMA: state.ema.tensors} if state.ema is not None else {}
    weights[PIPELINE] = state.weights  # last, since `exported_steps` takes it as the sign that all is done
    changed: set[str] = set()
    for name, tensors in weights.items():
        session.report.say(f"writing {output / name}")
        sums = export_pipeline(family, output / name, state.config, tensors(), session.world, state.schedule.max_steps)
        changed |= {file for file, value in state.base_checksums.items() if sums.get(file, value) != value}
    if changed:
        names = ", ".join(sorted(changed))
        session.report.warn(
            f"{family.folder} changed since the run began, and the pipeline has it as it is now: {names}",
            "compare it with another copy of the base model",
        )
