"""Mirror output_dir in a bucket: a thread uploads what is finished during training, the rest at its end.

Nothing tells the thread what to upload: it looks at the folder, as a resuming run does. A bucket that does not answer
delays nothing but the upload, which is tried again until the run ends, and once more at the next start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from simpletuner.checkpoints.layout import no_best
from simpletuner.data.config.places import mirror_place
from simpletuner.data.storage.object_errors import StoreRefusal, StoreUnavailable
from simpletuner.data.storage.storage import check_obstore
from simpletuner.errors import EnvironmentNotReady, SimpleTunerError, Stopped, without_errno
from simpletuner.run_log import LOG
from simpletuner.session import Session
from simpletuner.system.files.atomic import remove
from simpletuner.system.files.lease import Lease, nothing
from simpletuner.system.files.lease_record import LeaseLost
from simpletuner.system.files.regular_files import read_file
from simpletuner.system.numbers import count_noun
from simpletuner.system.processes.run_status import STATUS, RunState
from simpletuner.training.hooks import RunHook
from simpletuner.training.metrics.speed import UPLOADING, Durations
from simpletuner.training.mirroring.bucket_records import BucketRecords
from simpletuner.training.mirroring.remote_run import RemoteRun, Restoring, newest_step
from simpletuner.training.mirroring.run_files import (
    LINKS,
    FolderDamaged,
    Stamp,
    WholeFolder,
    linked,
    single_files,
    stamp_of,
    whole_folders,
)

POLL_SECONDS = 1.0
# Time between uploads of metrics and other files that change all the time; a checkpoint takes them along.
FILES_SECONDS = 30.0
# Waits after an upload that failed: obstore has tried it for 30 s by then.
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 2.0, 60.0
PRUNE_RETRY_SECONDS = 600.0
"""Time until old checkpoints are removed again after the bucket refused it."""
# Longest wait of the end of a run for a bucket that does not answer. Uploads that go on may take longer.
PATIENCE_SECONDS = 60.0
# Stands for what concerns no single file: listing, the lease, pruning.
LISTING = ""
# The same where the run has failed: its launcher kills the ranks 15 s later.
FAILED_SECONDS = 10.0
HINT = "check mirror_output, and its credentials in the environment (docs/many-machines.md)"
DOWN = "training goes on; what is missing there is uploaded when the bucket answers"


class RunMirror(RunHook):
    def __init__(self, session: Session) -> None:
        """Ask nothing of the bucket yet. Raises EnvironmentNotReady."""
        place, wanted = mirror_place(session.settings.checkpoints.mirror_output), session.settings.checkpoints
        check_obstore(place)
        from simpletuner.data.storage.object_storage import open_bucket

        storage = open_bucket(place)
        super().__init__(session)
        self.report, self.status = session.report, session.status
        self.output, self.keep = session.settings.training.output_dir, wanted.checkpoints_total_limit
        self.address, self.remote, self.lease = place.address, RemoteRun(storage), Lease()
        self.place, self.remote.lease = BucketRecords(storage), self.lease
        self.restoring = Restoring(
            self.remote,
            self.output,
            wanted.resume_from_checkpoint,
            session.report,
            session.stop.check,
            self._choose_best if wanted.export_best else no_best,
        )
        self.chosen: tuple[list[int], int | None] = [], None
        """Steps of the bucket's checkpoints, and the best of them."""
        self.durations: Durations | None = None
        self.known: dict[str | WholeFolder, Stamp] = {}
        """Stamps on disk of what the bucket has."""
        self.went_back_to: int | None = None
        """The step that the run goes on from, until later checkpoints of the bucket are moved aside."""
        self.is_listed, self.is_done, self.files_at = False, False, 0.0
        self.prune_from = 0.0
        """Time until which old checkpoints are not removed, since the bucket refused it."""
        self.problem: SimpleTunerError | None = None
        """Error of the last upload, if it failed."""
        self.patience_seconds = PATIENCE_SECONDS
        self.trying: str | WholeFolder = LISTING
        self.failing: dict[str | WholeFolder, float] = {}
        """The times since which uploads fail. The oldest counts: a log that grows each minute may well be
        uploaded to a bucket that refuses checkpoints."""
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def locked(self, stack: ExitStack) -> None:
        stack.callback(self.lease.release)
        self.begin()

    def begin(self) -> None:
        """Take the lease, and fetch the small files that this folder lacks.

        Raises what is wrong with the bucket, unless there are checkpoints here to go on from.
        """
        try:
            self._acquire(self.session.stop.check)
            self._list()
            fetched = set(self.restoring.fetch_files())
            self.known |= {name: stamp for name, stamp in single_files(self.output).items() if self._has(name, fetched)}
        except (Stopped, LeaseLost):
            raise
        except SimpleTunerError as error:
            if newest_step(self.output, {}) < 0:
                error.hint = HINT
                raise
            self._fail(error)

    def _acquire(self, stop: Callable[[], None] = nothing) -> None:
        if not self.lease.is_held:
            self.lease.acquire(self.place, stop, self.report.say, "give this one another mirror_output")

    def _has(self, name: str, fetched: set[str]) -> bool:
        """True if this file is in the bucket: fetched from there, or, for an image, of equal size."""
        is_image = name.startswith("validation/")
        return name in fetched or (is_image and self.remote.sizes.get(name) == (self.output / name).stat().st_size)

    def resuming(self, damaged: Mapping[Path, str]) -> None:
        """Fetch the checkpoint to resume from, if the bucket's is newer. Raises EnvironmentNotReady."""
        if self.is_listed and self.restoring.wish != "none":
            self.restoring.fetch_checkpoint(damaged)

    def started(self, step: int, durations: Durations) -> None:
        """Begin to upload, for a run that goes on after a step."""
        self.went_back_to, self.durations = step, durations
        self.thread.start()

    def finished(self) -> None:
        self.finish(None)

    def failed(self, error: BaseException) -> None:
        self.finish(error)

    def finish(self, error: BaseException | None) -> None:
        """Upload what is left, until all is there or the bucket has not answered for some time.

        Raises EnvironmentNotReady where something is left, and Stopped where a signal came meanwhile, unless
        `error` is raised anyway.
        """
        if error is not None and not isinstance(error, Stopped):
            self.patience_seconds = min(self.patience_seconds, FAILED_SECONDS)
        self.session.world.activity.begin(f"uploading to {self.address}", watched=False)
        self.failing.clear()
        self.closing.set()
        if self.thread.ident is None:
            self.thread.start()
        while self.thread.is_alive() and not (error is None and self._is_called_away()):
            self.thread.join(0.1)
        if self.is_done:
            self.report.say(f"all of {self.output} is in {self.address}")
            self._upload_end(error)
        self.lease.release()
        if self.is_done:
            return
        reason = self.problem.message if self.problem is not None else "the upload was interrupted"
        said = f"{self._left()} could not be uploaded to {self.address}: {reason}"
        hint = f"nothing is lost: it is in {self.output}, and the same command uploads it"
        if error is None and not self._is_called_away():
            raise EnvironmentNotReady(said, hint)
        self.report.warn(said, hint)
        if error is None:
            raise self.session.stop.stopped("while it uploaded its results")

    def _is_called_away(self) -> bool:
        # The machine may be gone soon.
        stop, grace = self.session.stop, self.session.settings.launch.preemption_grace_seconds
        return bool(stop.signal_number) and time.monotonic() - stop.requested_at > grace

    def _left(self) -> str:
        """Name the files that the bucket may lack, as a phrase."""
        names = [each.name for each, stamp in whole_folders(self.output).items() if self.known.get(each) != stamp]
        files = [name for name, stamp in single_files(self.output).items() if self.known.get(name) != stamp]
        return " and ".join([*names, *([count_noun(len(files), "file")] if files else [])]) or "the end"

    def _upload_end(self, error: BaseException | None) -> None:
        if error is None:
            self.status.end(RunState.FINISHED)
        elif isinstance(error, SimpleTunerError):
            self.status.fail(error)
        with suppress(SimpleTunerError, OSError):
            self.lease.check()
            for name in (STATUS, LOG):
                self.remote.upload_file(self.output / name, name)

    def _run(self) -> None:
        """Upload until the run ends and all is there, or the bucket has not answered for too long."""
        wait, retry = POLL_SECONDS, RETRY_SECONDS
        while not isinstance(self.problem, LeaseLost):
            closing = self.closing.wait(wait)
            try:
                self._synchronize(closing)
            except (SimpleTunerError, OSError) as error:
                is_known = isinstance(error, SimpleTunerError)
                self._fail(error if is_known else EnvironmentNotReady(f"{self.output}: {without_errno(error)}"))
                if closing:
                    if time.monotonic() - min(self.failing.values()) > self.patience_seconds:
                        return
                    time.sleep(min(RETRY_SECONDS, self.patience_seconds / 4))
                wait, retry = retry, min(2 * retry, LONGEST_RETRY_SECONDS)
            else:
                self._succeed()
                if closing:
                    self.is_done = True
                    return
                wait, retry = POLL_SECONDS, RETRY_SECONDS

    def _synchronize(self, all_files: bool) -> None:
        """Upload what is new. Raises the bucket's errors, and OSError for the folder's."""
        self.trying = LISTING
        self._acquire()
        self._list()
        self._move_aside()
        self._prune()  # what a run that was killed has left
        self._know(LISTING, None)
        while new := self._new_folders():
            # Before the manifest: who resumes from a checkpoint needs the metrics up to it.
            self._upload_files()
            self._upload(new[0])
        if all_files or time.monotonic() - self.files_at > FILES_SECONDS:
            self._upload_files()

    def _list(self) -> None:
        if not self.is_listed:
            self.remote.refresh()
            self.is_listed = True

    def _move_aside(self) -> None:
        """Move checkpoints aside that are later than the step that the run goes on from."""
        for whole in self.remote.whole() if self.went_back_to is not None else ():
            if whole.step > (self.went_back_to or 0):
                try:
                    self.remote.move_aside(whole)
                    self.report.warn(f"later checkpoints are set aside in {self.address}: {whole.name}")
                except FolderDamaged as error:
                    self.report.warn(error.message)
                    self.remote.hide(whole)
        self.went_back_to = None

    def _prune(self) -> None:
        """Remove old checkpoints; a bucket that refuses it, or fails at it, takes new ones nevertheless."""
        if time.monotonic() < self.prune_from:
            return
        try:
            self.remote.prune(self.keep, self._choose_best)
        except (StoreRefusal, StoreUnavailable) as error:
            if not self.prune_from:
                self.report.warn(error.message, f"{error.hint}; until then old checkpoints stay in {self.address}")
            self.prune_from = time.monotonic() + PRUNE_RETRY_SECONDS

    def _choose_best(self, steps: Collection[int]) -> int | None:
        # Asked each second: the metrics are read again only for other checkpoints.
        if self.chosen[0] != [*steps]:
            from simpletuner.runs.health.best_step import best_saved_of

            self.chosen = [*steps], best_saved_of(self.output, steps)
        return self.chosen[1]

    def _new_folders(self) -> list[WholeFolder]:
        """Return the checkpoints and pipelines that the bucket lacks, newest first."""
        found = whole_folders(self.output)
        for whole in [each for each in found if each not in self.known]:
            with suppress(OSError, FolderDamaged):
                if read_file(self.output / whole.manifest_name) == self.remote.manifest(whole):
                    self.known[whole] = found[whole]
        return [whole for whole, stamp in found.items() if self.known.get(whole) != stamp]

    def _upload(self, whole: WholeFolder) -> None:
        self.trying = whole
        began, stamp = time.monotonic(), stamp_of(self.output / whole.manifest_name)
        try:
            folder, manifest = linked(self.output, whole)
            self.remote.upload(whole, folder, manifest)
        except FolderDamaged as error:
            self.report.warn(f"{error.message}; it is not uploaded to {self.address}")
        except FileNotFoundError:
            return  # removed meanwhile, as the oldest of too many
        finally:
            remove(self.output / LINKS)
        self._know(whole, stamp)
        if whole.step >= 0:
            self._prune()
            if self.durations is not None:
                self.durations.measured[UPLOADING].append(time.monotonic() - began)
        self.status.mirrored(f"{self.address} has {whole.name}")

    def _upload_files(self) -> None:
        self.trying = LISTING
        self.lease.check()
        for name, stamp in single_files(self.output).items():
            if self.known.get(name) != stamp:
                self.trying = name
                with suppress(FileNotFoundError):  # removed meanwhile
                    self.remote.upload_file(self.output / name, name)
                    self._know(name, stamp)
        self.files_at = time.monotonic()

    def _know(self, what: str | WholeFolder, stamp: Stamp | None) -> None:
        if stamp is not None:
            self.known[what] = stamp
        self.failing.pop(what, None)

    def _fail(self, error: SimpleTunerError) -> None:
        is_lost = isinstance(error, LeaseLost)
        if self.problem is None or is_lost:
            self.report.warn(error.message, "this run uploads nothing any more" if is_lost else f"{DOWN}; {HINT}")
        self.problem = error
        self.failing.setdefault(self.trying, time.monotonic())
        self.status.mirrored(error.message)

    def _succeed(self) -> None:
        self.failing.clear()
        if self.problem is not None:
            self.report.say(f"{self.address} answers again, and has what was missing")
            self.status.mirrored(f"{self.address} answers again")
        self.problem = None
