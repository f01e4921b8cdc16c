"""Upload of a run's exports by the hub's own command line: a failed command can be repeated as printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator

from simpletuner.checkpoints.layout import BEST_SUFFIX
from simpletuner.session import Session
from simpletuner.settings import Settings
from simpletuner.system.processes.python_process import module_command
from simpletuner.training.hooks import RunHook
from simpletuner.training.run_folder.output_dir import pipelines_of

# The module behind the command `hf`, which need not be in PATH.
HF = "huggingface_hub.cli.hf"


class HubUpload(RunHook):
    def finished(self) -> None:
        push_to_hub(self.session)


def push_to_hub(session: Session) -> None:
    """Upload the exported folders. A failure is a warning: all that was trained is in output_dir."""
    repository = repository_of(session.settings)
    for words in uploads(session.settings):
        session.world.activity.begin(f"uploading to {repository}", watched=False)
        session.report.say(f"uploading {words[3]} to {repository}")
        # By the command that a warning can print for a user to repeat.
        done = subprocess.run(
            module_command(HF, *words[1:]),
            # No terminal: a question for a token would be waited for.
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=os.environ | {"NO_COLOR": "1"},
        )
        if done.returncode:
            session.report.warn(
                f"{words[3]} was not uploaded to {repository}: {reason_in(done.stderr)}",
                f"nothing is lost; upload it with: {shlex.join(words)}",
            )


def reason_in(output: bytes) -> str:
    """Return the error's line of a command's output, or its last line that is no hint."""
    lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("Error")]
    return next((line for line in [*errors, *reversed(lines)] if not line.startswith("Hint")), "it does not say why")


def repository_of(settings: Settings) -> str:
    return settings.hub.hub_model_id or settings.training.output_dir.absolute().name


def uploads(settings: Settings) -> Iterator[list[str]]:
    """Yield a command per exported folder; the average goes below `ema/`, the best step below `best/`."""
    private = ["--private"] if settings.hub.model_card_private else []
    for folder in pipelines_of(settings):
        if not folder.is_dir():  # no step was measured, of which one would be the best
            continue
        kind = re.search(f"(-ema|{BEST_SUFFIX})$", folder.name)
        place = kind[1].removeprefix("-") if kind else "."
        yield ["hf", "upload", repository_of(settings), str(folder), place, *private]
