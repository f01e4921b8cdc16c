"""A run's folder in a bucket, object by object; a start fetches what output_dir lacks of it.

The manifest of a checkpoint or of a pipeline (sizes and checksums of its files) is uploaded last and removed
first, so what has one is whole. Checksums are those of the bytes that are sent, and of those that come back.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from simpletuner.checkpoints.layout import (
    SET_ASIDE,
    ChooseStep,
    all_damaged_error,
    file_sizes,
    is_complete,
    list_checkpoints,
    no_best,
    parse_step,
    steps_to_prune,
)
from simpletuner.data.storage.object_errors import StoreRefusal
from simpletuner.data.storage.storage import UnreadableFileError
from simpletuner.errors import EnvironmentNotReady
from simpletuner.report import Report
from simpletuner.run_log import LOG
from simpletuner.settings.declared.errors import shorten
from simpletuner.status_line import Progress
from simpletuner.system.files.atomic import remove, replace_folder, unfinished_path, write_file
from simpletuner.system.files.checksums import HashedParts, write_with_checksum
from simpletuner.system.files.lease import Lease
from simpletuner.system.files.mounts import rename_over
from simpletuner.system.files.regular_files import MAX_BYTES, open_regular
from simpletuner.training.mirroring.run_files import (
    CHECKPOINTS,
    FolderDamaged,
    WholeFolder,
    is_single,
    parse_manifest,
    whole_folders_among,
)

if TYPE_CHECKING:
    from simpletuner.data.storage.object_storage import ObjectStorage

# Each in parts, sent side by side; more would take memory and bandwidth from the run.
FILES_AT_ONCE = 2
SMALL_BYTES = 8 << 20
BLOCK_BYTES = 1 << 20


@dataclass(eq=False)
class RemoteRun:
    """The objects of a run; `sizes` are those of the last listing, and of what was written since."""

    storage: ObjectStorage
    sizes: dict[str, int] = field(default_factory=dict)
    lease: Lease = field(default_factory=Lease)
    """Checked before anything is removed, replaced or made visible."""

    def refresh(self) -> None:
        self.sizes = self.storage.all_sizes()

    def whole(self) -> list[WholeFolder]:
        """Folders of which all files are there, newest checkpoints first."""
        return whole_folders_among(name for name, size in self.sizes.items() if size)

    def manifest(self, whole: WholeFolder) -> bytes:
        """Return the manifest of what is whole; nothing where it is not."""
        if whole.manifest_name not in self.sizes:
            return b""
        try:
            return self.storage.read(whole.manifest_name, MAX_BYTES)
        except (FileNotFoundError, UnreadableFileError) as error:
            raise FolderDamaged(f"{self.storage.describe(whole.manifest_name)} cannot be read: {error}") from None

    def upload_file(self, path: Path, name: str) -> str:
        """Upload a file, as long as it is now; return the checksum of what was sent. Raises OSError."""
        with open_regular(path) as file:
            size = path.stat().st_size
            self.lease.check_recent()
            parts = HashedParts(self._checked(iter(lambda: file.read(BLOCK_BYTES), b"")))
            if size <= SMALL_BYTES:
                content = b"".join(parts)
                self.storage.write(name, content)
                self.sizes[name] = len(content)
            else:
                self.storage.write_parts(name, parts, size)
                self.sizes[name] = size
        return parts.checksum

    def upload(self, whole: WholeFolder, folder: Path, content: bytes) -> None:
        """Upload a checkpoint or a pipeline that is in a folder.

        Raises FolderDamaged, LeaseLost if another run writes there, and OSError for unreadable files.
        """
        manifest = parse_manifest(content, whole.manifest_name)
        here = file_sizes(folder)
        if problem := missing_in(here, "", manifest["files"]):
            raise FolderDamaged(f"{whole.name}/{problem}")
        self.hide(whole)
        rest = [name for name in here if name != whole.manifest]

        def send(name: str) -> None:
            wanted = manifest["checksums"].get(name)
            if self.upload_file(folder / name, f"{whole.name}/{name}") != wanted and wanted is not None:
                raise FolderDamaged(f"{whole.name}/{name} is damaged: its checksum does not match")

        self._for_each(send, rest)
        found = self.storage.all_sizes(whole.name)
        self.sizes |= found
        if problem := missing_in(found, f"{whole.name}/", manifest["files"]):
            raise EnvironmentNotReady(f"{self.storage.owner}: {problem}")
        with suppress(StoreRefusal):  # what the manifest does not name is no part of the folder
            self._remove(found.keys() - {f"{whole.name}/{name}" for name in rest})
        self.lease.check()
        self.storage.write(whole.manifest_name, content)
        self.sizes[whole.manifest_name] = len(content)

    def restore(self, whole: WholeFolder, output: Path, advance: Callable[[int], None]) -> None:
        """Download a checkpoint or a pipeline into its place; `advance` is told of bytes, and may raise.

        Raises FolderDamaged for what is not as its manifest says.
        """
        content = self.manifest(whole)
        manifest = parse_manifest(content, self.storage.describe(whole.manifest_name))
        if problem := missing_in(self.sizes, f"{whole.name}/", manifest["files"]):
            raise FolderDamaged(f"{self.storage.describe()}: {problem}")
        target, prefix = output / whole.name, f"{whole.name}/"
        hidden = unfinished_path(target)
        remove(hidden)

        def fetch(name: str) -> None:
            path = hidden / name.removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            found = write_with_checksum(path, counted(self.storage.read_parts(name), advance))
            if found != manifest["checksums"].get(name.removeprefix(prefix), found):
                raise FolderDamaged(f"{self.storage.describe(name)} is damaged: its checksum does not match")

        try:
            names = [name for name in self.sizes if name.startswith(prefix) and name != whole.manifest_name]
            self._for_each(fetch, [name for name in names if is_inside(name)])
            write_file(hidden / whole.manifest, content)
            replace_folder(hidden, target)
        except (FileNotFoundError, UnreadableFileError) as error:
            raise FolderDamaged(f"{self.storage.describe(whole.name)} cannot be read: {error}") from None
        finally:
            remove(hidden)

    def restore_file(self, name: str, output: Path) -> None:
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = unfinished_path(path)
        remove(hidden)
        write_with_checksum(hidden, self.storage.read_parts(name))
        rename_over(hidden, path)

    def move_aside(self, whole: WholeFolder) -> None:
        """Move a later checkpoint to the folder for set-aside ones, as on disk.

        Raises FolderDamaged where it cannot be read.
        """
        aside = f"{CHECKPOINTS}/{SET_ASIDE}/{PurePosixPath(whole.name).name}"
        names = [name for name in self.sizes if name.startswith(f"{whole.name}/") and name != whole.manifest_name]
        # Through this machine: a copy within S3 takes no more than 5 GB.
        try:
            for name in [*names, whole.manifest_name]:
                target = f"{aside}/{name.removeprefix(f'{whole.name}/')}"
                self.storage.write_parts(target, in_thread(self.storage.read_parts(name)), self.sizes[name])
                self.sizes[target] = self.sizes[name]
        except (FileNotFoundError, UnreadableFileError) as error:
            raise FolderDamaged(f"{self.storage.describe(whole.name)} cannot be read: {error}") from None
        self.hide(whole)
        with suppress(StoreRefusal):
            self._remove(names)

    def hide(self, whole: WholeFolder) -> None:
        """Take away what makes a folder whole: the manifest, or its content where nothing may be removed."""
        if whole.manifest_name in self.sizes:
            try:
                self._remove([whole.manifest_name])
            except StoreRefusal:
                self.storage.write(whole.manifest_name, b"")
                self.sizes[whole.manifest_name] = 0

    def prune(self, keep: int, choose_best: ChooseStep = no_best) -> None:
        """Remove all checkpoints but the newest and the best, and what incomplete uploads have left.

        Raises StoreRefusal.
        """
        checkpoints = {each.step: each for each in self.whole() if each.step >= 0}
        old = steps_to_prune([*checkpoints], keep, choose_best)
        self._remove(checkpoints[step].manifest_name for step in old)
        kept = {each.name for step, each in checkpoints.items() if step not in old}
        below = [name for name in self.sizes if name.startswith(f"{CHECKPOINTS}/checkpoint-")]
        self._remove(name for name in below if "/".join(name.split("/")[:2]) not in kept)

    def _remove(self, names: Iterable[str]) -> None:
        gone = list(names)
        if gone:
            self.lease.check()
        self.storage.remove(gone)
        for name in gone:
            self.sizes.pop(name, None)

    def _checked(self, parts: Iterable[bytes]) -> Iterator[bytes]:
        # An upload that stood still until another run took over stays incomplete.
        for part in parts:
            self.lease.check_recent()
            yield part

    def _for_each(self, work: Callable[[str], None], names: Iterable[str]) -> None:
        with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="mirror") as pool:
            try:
                list(pool.map(work, names))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def missing_in(found: Mapping[str, int], prefix: str, wanted: Mapping[str, int]) -> str:
    """Error for the first file that is missing or differs in size from its manifest; empty if none does."""
    for name, size in wanted.items():
        if (there := found.get(f"{prefix}{name}", 0)) != size:
            return f"{prefix}{name} is damaged: it has {there} of {size} bytes"
    return ""


def counted(parts: Iterable[memoryview], advance: Callable[[int], None]) -> Iterable[memoryview]:
    for part in parts:
        advance(len(part))
        yield part


def in_thread(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    # obstore cannot wait for a download in a thread that uploads.
    left = iter(parts)
    with ThreadPoolExecutor(1, thread_name_prefix="mirror") as pool:
        while (part := pool.submit(next, left, None).result()) is not None:
            yield part


def is_inside(name: str) -> bool:
    """False for a name that leads out of its folder, or is absolute."""
    return not {"..", ""} & {*name.split("/")}


# Why a file system does not take a name: an object beside others "below" it, or one of 300 letters.
NO_FILE_OF_A_RUN = frozenset({errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EILSEQ})


@dataclass(frozen=True)
class Restoring:
    """The bucket's part of a start; `wish` is resume_from_checkpoint, `stop` raises to end the run."""

    remote: RemoteRun
    output: Path
    wish: str
    report: Report
    stop: Callable[[], None]
    choose_best: ChooseStep = no_best
    """Names a checkpoint that is fetched beside the newest, to be exported at the end."""

    def fetch_files(self) -> list[str]:
        """Fetch metrics, images and the like, where the folder is behind the bucket; return names."""
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
        """Fetch the checkpoint to resume from, where the bucket has one newer than this folder's.

        Raises EnvironmentNotReady where none in the bucket is whole, and there is none here.
        """
        problems: list[str] = []
        for whole in self._checkpoints(damaged):
            try:
                self._fetch(whole)
                self._fetch_best(whole.step)
                self._fetch_exports()
                return
            except FolderDamaged as error:
                problems.append(error.message)
                self.report.warn(f"passed over: {error.message}")
        if problems and newest_step(self.output, damaged) < 0:
            raise all_damaged_error(self.remote.storage.describe(CHECKPOINTS), problems)

    def _fetch_best(self, newest: int) -> None:
        found = {each.step: each for each in self.remote.whole() if 0 <= each.step < newest}
        best = self.choose_best([*found])
        if best is not None and not (self.output / found[best].name).exists():
            try:
                self._fetch(found[best])
            except FolderDamaged as error:
                self.report.warn(f"the best step is passed over: {error.message}")

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
