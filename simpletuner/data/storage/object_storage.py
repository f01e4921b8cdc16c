"""Image and caption files in a bucket, by obstore, which retries failed requests.

What is wrong with one object makes one broken image: it is gone, archived, or its body ends too early
although the store answers. All else (no such bucket, credentials, a network that fails) ends the run, since a
bad hour of the network would otherwise leave images out of training.
"""

from __future__ import annotations

import io
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import BinaryIO

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError

from simpletuner.data.config.places import BucketPlace, Service
from simpletuner.data.storage.object_errors import (
    BUCKET_GONE,
    DAMAGED_OBJECTS,
    FAILS,
    TAKES_NOTHING,
    StoreUnavailable,
    code_of,
    run_error,
)
from simpletuner.data.storage.object_stores import Store, open_store
from simpletuner.data.storage.storage import MAX_BYTES, Listing, StoredFile, UnreadableFileError, is_system_folder
from simpletuner.errors import DataError, EnvironmentNotReady
from simpletuner.report import Report
from simpletuner.system.files.regular_files import RangeReader

# First range read of an image; headers are longer only where cameras write large thumbnails into them.
HEADER_BYTES = 64 << 10
# Part size and number of a multipart upload: S3 allows 10,000 parts of at least 5 MiB.
PART_BYTES, MOST_PARTS = 8 << 20, 9_000
PARTS_AT_ONCE = 6
BELOW_SLASH = re.compile("[\0-.]")
# Text of obstore's error for a range answered with 200: `rclone serve s3`, some lakeFS and s3s versions.
NOT_PARTIAL = "non-partial response"


class Ranges:
    """Knowledge of whether a store answers ranges of objects; until one was answered otherwise, it does."""

    def __init__(self) -> None:
        self.are_missing, self._lock = False, threading.Lock()

    def miss(self, owner: str) -> None:
        """Say once that whole objects are read."""
        with self._lock:
            if not self.are_missing:
                Report(quiet=os.environ.get("RANK", "0") != "0").warn(
                    f"{owner}: it answers no ranges, so whole objects are read where a part would do"
                )
            self.are_missing = True


@dataclass(frozen=True)
class ObjectStorage:
    """Objects of a bucket below a prefix; `owner` is dataset, bucket and endpoint, for messages."""

    store: Store = field(repr=False, compare=False)
    address: str
    service: Service
    owner: str
    concurrent_reads: int
    ranges: Ranges = field(default_factory=Ranges, repr=False, compare=False)

    def list_files(self, suffixes: Collection[str]) -> Listing:
        """List objects; those with a part that begins with a dot are left out."""
        listing = Listing()
        listing.files = sort_by_parts(without_system_folders(self._list(suffixes), listing))
        return listing

    def list_folder(self, name: str, suffixes: Collection[str]) -> list[str]:
        with self._explained():
            objects = obstore.list_with_delimiter(self.store, name)["objects"]
        names = sorted(each["path"] for each in objects)
        return [each for each in names if StoredFile(each).suffix in suffixes and not f"/{each}".count("/.")]

    def open(self, name: str) -> BinaryIO:
        return io.BytesIO(self._get(name, MAX_BYTES))

    def open_header(self, name: str) -> BinaryIO:
        # A header is a small part of an image, and requests wait for the network: ranges, many at a time.
        whole: list[bytes] = []

        def fetch(start: int, length: int) -> tuple[bytes, int]:
            part = None if whole else self._range(name, start, length)
            if part is None and not whole:
                whole.append(self._whole(name, length))
            return part or (whole[0][start : start + length], len(whole[0]))

        return io.BufferedReader(RangeReader(fetch), HEADER_BYTES)

    def read(self, name: str, limit_bytes: int) -> bytes:
        return self._get(name, limit_bytes)

    def read_range(
        self, name: str, offset: int, length: int, keep: Callable[[bytes], object] = lambda whole: None
    ) -> memoryview:
        """Return a part of an object, in memory that may be written to. Raises as `read` does.

        `keep` gets the whole object where the store gives no part of it.
        """
        part = self._range(name, offset, length)
        if part is None:
            whole = self._whole(name, length)
            keep(whole)
            part = (whole[offset : offset + length], len(whole))
        return memoryview(bytearray(part[0]))

    def _range(self, name: str, start: int, length: int) -> tuple[bytes, int] | None:
        """Part of an object and the size of the whole; None where the store gives whole objects alone."""
        if self.ranges.are_missing:
            return None
        with self._explained(name):
            try:
                result = obstore.get(self.store, name, options={"range": (start, start + length)})
                return bytes(result.bytes()), result.meta["size"]
            except BaseError as error:
                if NOT_PARTIAL not in str(error):
                    raise
        return None

    def _whole(self, name: str, length: int) -> bytes:
        """Read an object whole to return a part of it."""
        content = self._get(name, MAX_BYTES)
        # A store may well answer with the whole of what is not longer than the part.
        if len(content) > length:
            self.ranges.miss(self.owner)
        return content

    def upload(self, name: str, path: Path) -> None:
        """Store a file as an object, in parts if it is large. An interrupted upload changes nothing."""
        with self._writing():
            obstore.put(self.store, name, path)

    def write(self, name: str, content: bytes) -> None:
        """Store an object in one request."""
        with self._writing():
            obstore.put(self.store, name, content, use_multipart=False)

    def create(self, name: str, content: bytes) -> bool:
        """Store an object unless it exists; True if stored. Some stores overwrite, and say so."""
        with self._explained():
            try:
                obstore.put(self.store, name, content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def write_parts(self, name: str, parts: Iterable[bytes | memoryview], size: int) -> None:
        # An error of `parts` leaves the old object.
        chunk = max(PART_BYTES, -(-size // MOST_PARTS))
        with self._writing():
            obstore.put(self.store, name, parts, chunk_size=chunk, max_concurrency=PARTS_AT_ONCE)

    def read_parts(self, name: str) -> Iterator[memoryview]:
        """Yield the content of an object as it comes. Raises as `read` does."""
        with self._explained(name):
            for part in obstore.get(self.store, name):
                yield memoryview(part)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that are gone already are no error. Raises StoreRefusal."""
        # One by one: stores that are like S3 do not all have its request for many.
        for name in names:
            with suppress(FileNotFoundError), self._explained(name, removing=True):
                obstore.delete(self.store, name)

    def sizes(self) -> dict[str, int]:
        with self._explained():
            objects = obstore.list_with_delimiter(self.store)["objects"]
            return {each["path"]: each["size"] for each in objects}

    def all_sizes(self, folder: str = "") -> dict[str, int]:
        """Sizes in bytes of all objects below a folder, without keys that are no paths, such as a//b."""
        with self._explained():
            try:
                listed = obstore.list(self.store, folder or None, chunk_size=1000)
                return {each["path"]: each["size"] for chunk in listed for each in chunk}
            except InvalidPathError:  # which obstore raises for the page of a listing that has one
                return self._walked(folder)

    def _walked(self, folder: str) -> dict[str, int]:
        """List folder by folder, so that a key that cannot be read hides nothing outside of its own."""
        found = obstore.list_with_delimiter(self.store, folder or None)
        sizes = {each["path"]: each["size"] for each in found["objects"]}
        for below in found["common_prefixes"]:
            with suppress(InvalidPathError):
                sizes |= self._walked(below)
        return sizes

    def describe(self, name: str = "") -> str:
        return f"{self.address}/{name}".rstrip("/")

    def _get(self, name: str, limit_bytes: int) -> bytes:
        with self._explained(name):
            result = obstore.get(self.store, name)
            if (size := result.meta["size"]) > limit_bytes:
                raise UnreadableFileError(f"has {size:,} bytes; at most {limit_bytes:,} are read")
            return bytes(result.bytes())

    def _list(self, suffixes: Collection[str]) -> Iterator[StoredFile]:
        with self._explained():
            # S3 returns at most 1,000 keys for one request.
            for chunk in obstore.list(self.store, chunk_size=1000):
                for found in chunk:
                    # The ETag changes with the content; not every store has one.
                    version = f"{found['size']}-{found['e_tag'] or found['last_modified'].isoformat()}"
                    file = StoredFile(found["path"], found["size"], version)
                    if file.suffix in suffixes and not f"/{file.name}".count("/."):
                        yield file

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Tell a store that fails only on writing, such as a full one, from one that fails altogether."""
        try:
            with self._explained():
                yield
        except StoreUnavailable as error:
            with suppress(StopIteration), self._explained():
                next(iter(obstore.list(self.store, chunk_size=1)))
            raise EnvironmentNotReady(error.message.replace(FAILS[0], TAKES_NOTHING), error.hint) from None

    @contextmanager
    def _explained(self, name: str = "", removing: bool = False) -> Iterator[None]:
        """Map obstore's errors for one object to FileNotFoundError or UnreadableFileError; others end the
        run."""
        try:
            yield
        except InvalidPathError as error:
            reason = str(error).partition("\n")[0]
            raise DataError(f"{self.owner} has a key that cannot be read: {reason}", "rename that object") from None
        except (FileNotFoundError, BaseError) as error:
            # Nothing of obstore's text goes into a message: answers of a server may quote what was signed.
            text = str(error)
            if name and isinstance(error, FileNotFoundError) and code_of(text) not in BUCKET_GONE:
                raise FileNotFoundError("is not in the bucket any more") from None
            if name and (reason := DAMAGED_OBJECTS.get(code_of(text))):
                raise UnreadableFileError(reason) from None
            if name and "kind: Interrupted" in text:
                # A broken connection looks like an object that is cut short. If the store does not answer
                # either, the run ends: a failing network must not change what is trained on.
                self._check_answers(name)
                raise UnreadableFileError("its content ends too early") from None
            raise run_error(text, self.owner, self.service, removing) from None

    def _check_answers(self, name: str) -> None:
        # If the store does not answer, it is not this object that is damaged.
        with self._explained():
            obstore.head(self.store, name)


def without_system_folders(files: Iterable[StoredFile], listing: Listing) -> Iterator[StoredFile]:
    """Yield files that are in no folder of another program, and count such folders in `listing`."""
    left_out: set[str] = set()
    for file in files:
        parts = file.name.split("/")[:-1]
        place = next((place for place, part in enumerate(parts) if is_system_folder(part)), None)
        if place is None:
            yield file
        elif (folder := "/".join(parts[: place + 1])) not in left_out:
            left_out.add(folder)
            listing.system_folders[parts[place]] = listing.system_folders.get(parts[place], 0) + 1


def sort_by_parts(files: Iterable[StoredFile]) -> Iterator[StoredFile]:
    """Sort what a bucket lists by whole key, in which "a-b/c" and "a.png" come before "a/z", by the parts of
    names.

    A file is held back only while a folder may follow that comes before it: "a.png" until the listing has
    passed "a/".
    """
    held: list[tuple[list[str], str, StoredFile]] = []
    for file in files:
        while held and held[0][1] <= file.name:
            yield heappop(held)[2]
        passed = BELOW_SLASH.split(file.name, maxsplit=1)[0] + "0"  # the letter after the slash
        heappush(held, (file.name.split("/"), passed, file))
    while held:
        yield heappop(held)[2]


def open_bucket(place: BucketPlace) -> ObjectStorage:
    """Store of a dataset or of a cache; nothing is asked of the server yet. Raises EnvironmentNotReady."""
    store, host = open_store(place)
    owner = f"{place.owner}: {place.service.bucket} `{place.bucket}` at {host}"
    return ObjectStorage(store, place.address, place.service, owner, place.concurrent_reads)
