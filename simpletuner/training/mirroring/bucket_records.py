"""The lease of a folder in a bucket: an object that its only writer renews."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from simpletuner.data.storage.storage import UnreadableFileError
from simpletuner.errors import SimpleTunerError
from simpletuner.system.files.lease import Place
from simpletuner.system.files.mounts import FileSystem

if TYPE_CHECKING:
    from simpletuner.data.storage.object_storage import ObjectStorage

LEASE = ".lease.json"
MAX_BYTES = 1 << 16


class BucketRecords(Place):
    """Objects as records. Content is read at once; some stores create what exists, and none says so."""

    name = LEASE

    def __init__(self, storage: ObjectStorage) -> None:
        self.storage, self.known_system = storage, FileSystem("bucket", late_seconds=0.0)

    @property
    def system(self) -> FileSystem:
        return self.known_system

    def describe(self) -> str:
        return self.storage.describe()

    def read(self, name: str) -> bytes | None:
        try:
            return self.storage.read(name, MAX_BYTES)
        except FileNotFoundError:
            return None
        except UnreadableFileError:
            return b"?"

    def create(self, name: str, content: bytes) -> bool:
        if self.read(name) is not None or not self.storage.create(name, content):
            return False
        # s3rver 3.7.1, rclone 1.75.2 and JuiceFS' gateway 1.4.2 take it again, and let all of 16 writers win.
        refuses = not self.storage.create(name, content)
        self.known_system = FileSystem("bucket", creates_exclusively=refuses, late_seconds=0.0)
        return True

    def write(self, name: str, content: bytes) -> None:
        self.storage.write(name, content)

    def remove(self, name: str) -> None:
        with suppress(SimpleTunerError):  # a claim that stays does no harm
            self.storage.remove([name])
