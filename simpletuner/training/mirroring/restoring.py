"""Fetch from a bucket what output_dir lacks, before the run looks at that."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from simpletuner.checkpoints.layout import all_damaged_error, is_complete, list_checkpoints, parse_step
from simpletuner.report import Report
from simpletuner.run_log import LOG
from simpletuner.settings.declared.errors import shorten
from simpletuner.status_line import Progress
from simpletuner.training.mirroring.remote_run import RemoteRun
from simpletuner.training.mirroring.run_files import CHECKPOINTS, FolderDamaged, WholeFolder, is_single

NO_FILE_OF_A_RUN = frozenset({errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EILSEQ})
"""Why a file system does not take a name: an object beside others "below" it, or one of 300 letters."""


@dataclass(frozen=True)
class Restoring:
    """The part of a start that asks the bucket; `wish` is resume_from_checkpoint, `stop` raises to end the run."""

    remote: RemoteRun
    output: Path
    wish: str
    report: Report
    stop: Callable[[], None]

    def fetch_files(self) -> list[str]:
        """Fetch metrics, images and the like, where the folder is new or behind the bucket; return their names."""
        is_behind = bool(self._checkpoints({})) or not (self.output / LOG).exists()
        names = list(filter(is_single, sorted(self.remote.sizes))) if is_behind and self.wish != "none" else []
        for name in names:
            self.stop()
            try:
                self.remote.restore_file(name, self.output)
            except FileNotFoundError:  # it is not in the bucket any more
                pass
            except OSError as error:
                if error.errno not in NO_FILE_OF_A_RUN:
                    raise
                place = shorten(self.remote.storage.describe(name))
                self.report.warn(f"{place} is passed over: a file cannot have that name here ({error.strerror})")
        return names

    def fetch_checkpoint(self, damaged: Mapping[Path, str]) -> None:
        """Fetch the checkpoint to resume from, where the bucket has a newer one than this folder has undamaged.

        Raises EnvironmentNotReady where none in the bucket is whole, and there is none here.
        """
        problems: list[str] = []
        for whole in self._checkpoints(damaged):
            try:
                self._fetch(whole)
                self._fetch_exports()
                return
            except FolderDamaged as error:
                problems.append(error.message)
                self.report.warn(f"passed over: {error.message}")
        if problems and newest_step(self.output, damaged) < 0:
            raise all_damaged_error(self.remote.storage.describe(CHECKPOINTS), problems)

    def _fetch_exports(self) -> None:
        """Fetch the pipelines of a run that has finished, so that it need not export them again."""
        for whole in self.remote.whole():
            if whole.step < 0 and self.wish == "latest" and not (self.output / whole.name).exists():
                with suppress(FolderDamaged):
                    self._fetch(whole)

    def _checkpoints(self, damaged: Mapping[Path, str]) -> list[WholeFolder]:
        """Return the checkpoints of the bucket that go before those of this folder, best first."""
        found = [each for each in self.remote.whole() if each.step >= 0 and not (self.output / each.name).exists()]
        if self.wish != "latest":
            return [each for each in found if each.name == f"{CHECKPOINTS}/{self.wish}"]
        newest = newest_step(self.output, damaged)
        return [each for each in found if each.step > newest]

    def _fetch(self, whole: WholeFolder) -> None:
        place, sizes = self.remote.storage.describe(whole.name), self.remote.sizes
        total = sum(size for name, size in sizes.items() if name.startswith(f"{whole.name}/"))
        self.report.say(f"downloading {place}: {total / 1e6:,.1f} MB")
        with self.report.progress(f"downloading {whole.name}", total) as progress:
            self.remote.restore(whole, self.output, lambda size: self._advance(progress, size))

    def _advance(self, progress: Progress, size: int) -> None:
        self.stop()
        progress.update(min(progress.total, progress.done + size))


def newest_step(output: Path, damaged: Mapping[Path, str]) -> int:
    """Return the step of the newest whole checkpoint in a run's folder; -1 without one."""
    folders = list_checkpoints(output / CHECKPOINTS)
    return next((parse_step(each) for each in folders if each not in damaged and is_complete(each)), -1)
