"""Runs that wait for this machine's GPUs: added, removed, reordered, and started as devices become free."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from simpletuner.errors import EnvironmentNotReady, SettingsError, SimpleTunerError, explain_os_error
from simpletuner.launch.plan import GPUS
from simpletuner.page.queue.entries import (
    CPU,
    EntryState,
    Need,
    QueueEntry,
    QueueFile,
    devices_of,
    list_gpus,
    need_of_start,
)
from simpletuner.page.rendering import field, folders_of, toast
from simpletuner.page.runs.fragments import Fragment, made
from simpletuner.page.runs.processes import PreparedStart, Processes, is_in_use, prepare_start, start_prepared
from simpletuner.runs.checkpoints import named_checkpoint
from simpletuner.runs.condition import find_refusal
from simpletuner.runs.folder import Folders, RunFolder
from simpletuner.runs.listing import RunList, Summary, read_status_of
from simpletuner.system.files.checksums import value_checksum
from simpletuner.system.files.lease import Holding
from simpletuner.system.files.locks import lock_file
from simpletuner.system.numbers import count_noun
from simpletuner.system.processes.run_status import RunState

# Between two looks at the queue. Idle GPUs cost more than looking, which reads one small file.
SECONDS = 2.0
MAX_ENTRIES = 100
EXIT_SECONDS = 5.0


class MachineBusy(EnvironmentNotReady):
    """Raised where a run would have to share its GPUs with another one."""


class RunQueue:
    """The queue as this page sees it: entries of its folders, and devices that all runs take."""

    def __init__(self, folders: Folders, processes: Processes, runs: RunList, saving: threading.Lock) -> None:
        self.folders, self.processes, self.runs, self.saving = folders, processes, runs, saving
        self.machine = (CPU, *list_gpus(os.environ))
        self.file = QueueFile.of_machine()
        places = {"folders": [*map(str, folders.roots)], "current": str(Path.cwd())}
        self.place = value_checksum(places).rpartition(":")[2]
        self.held: int | None = None
        """The descriptor of the lock that lets this page start what waits."""
        self.problem: SimpleTunerError | None = None
        self.has_ended, self.woken = False, threading.Event()
        self.thread = threading.Thread(target=self._run, name="queue", daemon=True)

    def stop(self) -> None:
        """End the thread with the page. What waits stays in the file; runs go on."""
        self.has_ended = True
        self.woken.set()
        self.thread.join(EXIT_SECONDS)
        if self.held is not None:
            os.close(self.held)

    def shown(self) -> list[QueueEntry]:
        """Entries that wait or did not start; a run that holds its folder is in the list of runs."""
        return [each for each in self.file.read() if self._is_shown(each)]

    def free(self, entries: Sequence[QueueEntry]) -> list[str]:
        """Devices without a run of this machine, among runs in the page's folders or started by a page."""
        started = [each for each in entries if each.is_started and each.is_alive]
        taken = {device for each in started for device in each.devices}
        outputs = {each.output for each in started}
        for summary in self.runs.summaries():
            if str(summary.run.path) not in outputs and (pid := pid_here(summary)):
                taken.update(devices_of(summary.run, pid))
        return [each for each in self.machine if each not in taken]

    def start(self, name: str, checkpoint: str, anyway: bool) -> RunFolder:
        """Start a run at once.

        Raises MachineBusy where its devices are taken, or waited for, unless `anyway`; else as
        `prepare_start` and `start_prepared` do.
        """
        prepared = prepare_start(self.folders, name)
        if is_in_use(self.processes, prepared.run):
            raise EnvironmentNotReady(f"a run is using {prepared.run.name} already", "watch it, or stop it first")
        entry = self._entry(prepared, checkpoint, is_queued=False)
        with self.file.edited() as entries:
            free = self.free(entries)
            devices = dict(self._startable([*entries, entry], free)).get(entry, ())
            if not devices and not anyway:
                is_awaited = bool(entry.need.choose(free))
                why = "what is free is for runs in the queue" if is_awaited else self.describe(free)
                raise MachineBusy(f"{name} takes {entry.need}: {why}", "queue it, to start it when its turn comes")
            entries.append(self._start(entry, prepared, devices))
        return prepared.run

    def add(self, name: str, checkpoint: str) -> QueueEntry:
        """Raises SettingsError for mistakes in the file, one that waits already, or a missing checkpoint."""
        prepared = prepare_start(self.folders, name, complete=True)
        if checkpoint:
            named_checkpoint(prepared.run, checkpoint)
        entry = self._entry(prepared, checkpoint)
        self._check_possible(entry.need)
        with self.file.edited() as entries:
            own = [each for each in entries if self._is_shown(each)]
            same = [each for each in own if (each.file, each.checkpoint) == (entry.file, checkpoint)]
            if any(each.state is EntryState.WAITING for each in same):
                raise SettingsError(f"{name} is in the queue already", "it starts when its turn comes")
            if len(own) >= MAX_ENTRIES:
                raise SettingsError(f"the queue holds {MAX_ENTRIES} runs", "remove some first")
            for each in same:  # its failure is answered by queuing it again
                if each.state is EntryState.FAILED:
                    entries.remove(each)
            entries.append(entry)
        self.woken.set()
        return entry

    def remove(self, identifier: str) -> QueueEntry:
        """Raises SettingsError for an entry that is missing, or was started: only *Stop* ends a run."""
        with self.file.edited() as entries:
            entry = self._find(entries, identifier)
            entries.remove(entry)
        return entry

    def move(self, identifier: str, by: int) -> QueueEntry:
        """Let an entry change places with the one before (-1) or after it (1); the first and last stay."""
        with self.file.edited() as entries:
            entry = self._find(entries, identifier)
            own = [each for each in entries if self._is_shown(each) and not each.is_started]
            place = own.index(entry) + by
            if 0 <= place < len(own):
                one, other = entries.index(entry), entries.index(own[place])
                entries[one], entries[other] = entries[other], entries[one]
        return entry

    def describe(self, free: Sequence[str]) -> str:
        """Return a sentence on what is free, without its capital."""
        if len(self.machine) == 1:
            return "the CPU is free" if free else "another run has the CPU of this machine"
        count, gpus = len([each for each in free if each != CPU]), count_noun(len(self.machine) - 1, "GPU")
        return f"{count} of {gpus} of this machine {'is' if count == 1 else 'are'} free"

    def _run(self) -> None:
        while not self.has_ended:
            try:
                self._start_next()
                self.problem = None
            except SimpleTunerError as error:
                self.problem = error
            except OSError as error:
                self.problem = explain_os_error(error)
            self.woken.wait(SECONDS)
            self.woken.clear()

    def _start_next(self) -> None:
        """Settle what was started, and start what can be. Does nothing while another page does."""
        if self.held is None:
            self.file.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(BlockingIOError):
                self.held = lock_file(self.file.lock_of_place(self.place), exclusive=True, needed=False)
        if self.held is None or not any(each.place == self.place for each in self.file.read()):
            return
        with self.file.edited() as entries:
            entries[:] = [now for each in entries if (now := self._settled(each)) is not None]
            if any(each.state is EntryState.WAITING for each in entries):
                for entry, devices in [*self._startable(entries, self.free(entries))]:
                    entries[entries.index(entry)] = self._try_start(entry, devices)

    def _settled(self, entry: QueueEntry) -> QueueEntry | None:
        """Entry as it is now; None for one whose run has ended, or failed as the list of runs shows."""
        if entry.place != self.place or entry.state is EntryState.FAILED:
            return entry
        if not entry.is_started:
            try:
                self._check_possible(entry.need)
            except SettingsError as error:  # the page has fewer GPUs than it had
                return failed(entry, error)
            return entry
        run = RunFolder(Path(entry.output), self.folders)
        self.processes.is_started(run.path)  # reaps it
        is_alive, status = entry.is_alive, read_status_of(run)  # in this order: its status is written first
        has_reached = status is not None and (status.host, status.pid) == (socket.gethostname(), entry.pid)
        if is_alive:
            return replace(entry, state=EntryState.RUNNING) if has_reached else entry
        if has_reached or not entry.is_queued:
            return None
        refused = find_refusal(run)
        known = (refused.sentence, refused.hint) if refused else ("it ended before it had its output folder", "")
        return failed(entry, SimpleTunerError(*known))

    def _startable(
        self, entries: Sequence[QueueEntry], free: Sequence[str]
    ) -> Iterator[tuple[QueueEntry, tuple[str, ...]]]:
        """Yield the entries that can start now, in order, with their devices. None gets a device that an
        earlier one waits for."""
        left = list(free)
        used = {each.output for each in entries if each.is_started and each.is_alive}
        for entry in entries:
            if entry.state is not EntryState.WAITING or entry.place != self.place:
                continue
            # The run that has its folder may go on for days, and nobody else waits for that.
            if entry.output in used or is_in_use(self.processes, RunFolder(Path(entry.output), self.folders)):
                continue
            devices = entry.need.choose(left)
            if devices:
                used.add(entry.output)
                yield entry, devices
            left = [each for each in left if each not in (devices or entry.need.wanted(left))]

    def _try_start(self, entry: QueueEntry, devices: tuple[str, ...]) -> QueueEntry:
        """Start an entry; where its file is wrong by now, or says something else, that is its state."""
        try:
            prepared = prepare_start(self.folders, entry.file, complete=True)
            now = replace(entry, need=need_of_start(prepared.loaded), output=str(prepared.run.path))
            # It has changed since it was added: looked at again with what it takes now.
            return now if now != entry else self._start(entry, prepared, devices)
        except SimpleTunerError as error:
            return failed(entry, error)
        except OSError as error:
            return failed(entry, explain_os_error(error))

    def _start(self, entry: QueueEntry, prepared: PreparedStart, devices: tuple[str, ...]) -> QueueEntry:
        is_chosen = bool(devices) and not entry.need.bound
        variables = {GPUS: ",".join(devices)} if is_chosen else {}
        with self.saving:
            process = start_prepared(self.processes, prepared, entry.checkpoint, variables)
        # Without devices of its own, as with *Start anyway*, CUDA takes the first.
        taken = devices or tuple(entry.need.wanted(self.machine)[: entry.need.count])
        created = 0.0
        with suppress(psutil.Error):
            created = psutil.Process(process.pid).create_time()
        return replace(entry, state=EntryState.STARTING, pid=process.pid, created=created, devices=taken)

    def _entry(self, prepared: PreparedStart, checkpoint: str, is_queued: bool = True) -> QueueEntry:
        path, output, need = prepared.document.path.absolute(), prepared.run.path, need_of_start(prepared.loaded)
        return QueueEntry(str(path), str(output), self.place, need, checkpoint, is_queued=is_queued)

    def _check_possible(self, need: Need) -> None:
        """Raise SettingsError for what this machine never has."""
        if not need.choose(self.machine):
            has = count_noun(len(self.machine) - 1, "GPU")
            raise SettingsError(f"this run takes {need}, and this machine has {has}", "change num_processes or gpu_ids")

    def _is_shown(self, entry: QueueEntry) -> bool:
        return entry.place == self.place and entry.is_queued and entry.state is not EntryState.RUNNING

    def _find(self, entries: Sequence[QueueEntry], identifier: str) -> QueueEntry:
        entry = next((each for each in entries if each.id == identifier and self._is_shown(each)), None)
        if entry is None or entry.is_started:
            raise SettingsError("this run is not waiting any more", "the list of runs shows what was started")
        return entry


def failed(entry: QueueEntry, error: SimpleTunerError) -> QueueEntry:
    return replace(entry, state=EntryState.FAILED, sentence=error.message, hint=error.hint)


def pid_here(summary: Summary) -> int:
    """Return the pid of a run that has not ended and is run on this machine; 0 for others."""
    if summary.condition.has_ended or summary.condition.state is RunState.UNKNOWN:
        return 0
    # Again: the summary may be a second old, and the run of a page that is started again has ended just now.
    holder, holding = summary.run.lease
    return holder.pid if holding is not Holding.FREE and holder.is_here else 0


UNCHANGED = {"HX-Reswap": "none"}


def queue_of(request: Request) -> RunQueue:
    return request.app.state.queue


def queue_fragment(request: Request) -> Fragment:
    queue, folders = queue_of(request), folders_of(request)
    entries = queue.shown()
    names = {each.id: folders.shown(Path(each.file)) for each in entries}
    return made(
        "queue",
        queue=queue,
        warning=queue.file.warning(),
        entries=entries,
        names=names,
        free=queue.free(queue.file.read()),
    )


def add(request: Request) -> Response:
    name = field(request, "file")
    if not name:
        raise SettingsError("which configuration?", "choose a file")
    entry = queue_of(request).add(name, field(request, "checkpoint"))
    return HTMLResponse(
        toast(f"{name} is in the queue for {entry.need}", "the page of runs shows it"), headers=UNCHANGED
    )


def remove(request: Request) -> Response:
    entry = queue_of(request).remove(field(request, "entry"))
    said = toast(f"{entry.file.rpartition('/')[2]} is no longer in the queue")
    return HTMLResponse(said + queue_fragment(request).html(), headers=UNCHANGED)


def move(request: Request) -> Response:
    queue_of(request).move(field(request, "entry"), -1 if field(request, "to") == "up" else 1)
    return HTMLResponse(queue_fragment(request).html(), headers=UNCHANGED)


ROUTES = [
    Route("/runs/queue/add", add, methods=["POST"]),
    Route("/runs/queue/remove", remove, methods=["POST"]),
    Route("/runs/queue/move", move, methods=["POST"]),
]
