"""Download the images or videos of a list of URLs once, into a folder that is then read like any other.

By urllib: it follows redirects, knows proxies, and needs no package; obstore wants one store per host. A file
is named by a hash of its URL, so what an earlier start has downloaded is found without being asked for again.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import quote

import xxhash

from simpletuner.data.config.dataset_parts import TableSettings
from simpletuner.data.config.dataset_types import LocalImages, UrlImages
from simpletuner.data.images.image_formats import (
    BY_PILLOW,
    BY_PLUGIN,
    VIDEO_SUFFIXES,
    suffix_of_content,
    suffix_of_video,
)
from simpletuner.data.images.images import DECODE_ERRORS, read_header
from simpletuner.data.images.videos import read_video_header
from simpletuner.data.storage.storage import MAX_BYTES as LARGEST_READ
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.data.tables.table_files import TableFile
from simpletuner.system.files.atomic import create_new, flush_to_disk, replace_file, unfinished_path
from simpletuner.system.files.locks import removed_lock
from simpletuner.system.files.mounts import rename_over
from simpletuner.system.network import http_request
from simpletuner.system.processes.threads import run_bounded

# The largest image that is downloaded; of videos, it is what is read of a dataset.
MAX_BYTES = 256 << 20
BLOCK_BYTES = 1 << 20
THREADS = 16
ATTEMPTS = 5
# Before the second attempt; doubled before each further one.
WAIT_SECONDS = 0.5
TIMEOUT_SECONDS = 30
# HTTP statuses below 500 that may be others next time.
PASSING = frozenset({408, 425, 429})
INDEX = "images.jsonl"
LOCK = ".downloading.lock"
LOOK_SECONDS = 0.5
# With %, so that an address that is quoted already stays as it is.
SAFE = ":/?#[]@!$&'()*+,;=%~"
KEYS = {"path": "csv_file", "filename_column": "csv_url_column", "caption_column": "csv_caption_column"}


class LostFileError(ValueError):
    """Why an image or a video cannot be downloaded, now or later."""


@dataclass
class Downloads:
    """The number of downloaded files, and the URLs of the others, with the reason."""

    count: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    """URLs that are gone, by the server's answer, or are no image or video."""
    unreachable: dict[str, str] = field(default_factory=dict)


def as_folder(dataset: UrlImages) -> LocalImages:
    """Return the dataset that a download makes: a folder, and a table of captions in it."""
    table = TableSettings(
        path=dataset.csv_cache_dir / INDEX,
        filename_column="file",
        caption_column=["captions"],
        identifier_includes_extension=True,
    )
    shared = (LocalImages.model_fields.keys() & UrlImages.model_fields) - {"type", "parquet", "metadata_backend"}
    values = {name: getattr(dataset, name) for name in shared}  # validated already
    return LocalImages.model_construct(
        **values, metadata_backend="parquet", parquet=table, instance_data_dir=dataset.csv_cache_dir
    )


def read_urls(dataset: UrlImages) -> dict[str, list[str]]:
    """Return the captions of each URL; of rows with the same one, the first counts. Raises DataError."""
    asked = [dataset.csv_caption_column] if dataset.csv_caption_column else []
    settings = TableSettings(path=dataset.csv_file, filename_column=dataset.csv_url_column, caption_column=asked)
    table = TableFile(dataset, LocalStorage(dataset.csv_cache_dir), settings, KEYS)
    captions: dict[str, list[str]] = {}
    for row in table.rows().select(["identifier", "captions"]).to_pylist():
        captions.setdefault(row["identifier"].strip(), row["captions"])
    captions.pop("", None)
    return captions


def download(dataset: UrlImages, stop: Callable[[], None], show: Callable[[int], object]) -> Downloads:
    """Download what the folder does not hold yet, and write its table of captions.

    Raises DataError for a list that cannot be read, EnvironmentNotReady where servers do not answer.
    """
    with removed_lock(dataset.csv_cache_dir / LOCK, partial(wait_for_another, stop)):  # which finds all of it done
        return download_missing(dataset, stop, show)


def wait_for_another(stop: Callable[[], None]) -> None:
    stop()
    time.sleep(LOOK_SECONDS)


def download_missing(dataset: UrlImages, stop: Callable[[], None], show: Callable[[int], object]) -> Downloads:
    folder, captions, found = dataset.csv_cache_dir, read_urls(dataset), Downloads()
    suffixes = VIDEO_SUFFIXES if dataset.clips else BY_PILLOW | BY_PLUGIN
    names = {path.stem: path.name for path in folder.iterdir() if path.suffix in suffixes}
    missing = [url for url in captions if name_of(url) not in names]
    is_stopping = threading.Event()

    def check() -> None:
        try:
            stop()
        except BaseException:
            is_stopping.set()
            raise

    fetched = run_bounded(lambda url: fetch(dataset, url, is_stopping), missing, THREADS, check)
    for done, (url, future) in enumerate(fetched, start=1):
        result = result_of(future)
        if isinstance(result, str):
            names[name_of(url)] = result
        elif isinstance(result, LostFileError):
            found.lost[url] = str(result)
        else:
            found.unreachable[url] = str(result) or type(result).__name__
        show(done)
    found.count = sum(name_of(url) in names for url in captions)
    if not found.unreachable:  # else the run ends, and the next start goes on
        rows = [
            {"file": names[name_of(url)], "captions": own} for url, own in captions.items() if name_of(url) in names
        ]
        replace_file(folder / INDEX, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return found


def name_of(url: str) -> str:
    return xxhash.xxh3_128(url.encode()).hexdigest()


def result_of(future: Future[str]) -> str | Exception:
    try:
        return future.result()
    except (LostFileError, *PASSING_ERRORS) as error:
        return error


PASSING_ERRORS = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError)


def fetch(dataset: UrlImages, url: str, is_stopping: threading.Event) -> str:
    """Download a file, and return its name. Raises LostFileError, or one of PASSING_ERRORS in the end."""
    folder = dataset.csv_cache_dir
    part = unfinished_path(folder / name_of(url))
    try:
        write_with_retries(dataset, url, part, is_stopping)
        name = name_of(url) + checked_suffix(dataset, part)
        flush_to_disk(part)
        rename_over(part, folder / name)
    finally:
        part.unlink(missing_ok=True)
    flush_to_disk(folder)
    return name


def write_with_retries(dataset: UrlImages, url: str, part: Path, is_stopping: threading.Event) -> None:
    for attempt in range(ATTEMPTS - 1):
        try:
            write_body(dataset, url, part, is_stopping)
            return
        except PASSING_ERRORS as error:
            raise_if_final(error)
        # At random, so that threads that a server has refused together do not come back together.
        time.sleep(WAIT_SECONDS * 2**attempt * random.uniform(0.5, 1))
    write_body(dataset, url, part, is_stopping)


def raise_if_final(error: Exception) -> None:
    """Raise LostFileError for an error that another attempt cannot change."""
    if isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code not in PASSING:
        raise LostFileError(f"HTTP {error.code}") from None
    reason = getattr(error, "reason", None)
    if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME:
        raise LostFileError("there is no such host") from None


def write_body(dataset: UrlImages, url: str, part: Path, is_stopping: threading.Event) -> None:
    """Ask once, and write what comes. Raises LostFileError, or one of PASSING_ERRORS."""
    try:
        request = http_request(quote(url, safe=SAFE), headers={"User-Agent": "simpletuner"})
        if request.type not in ("http", "https"):  # urllib would open files
            raise LostFileError("is no http:// or https:// address")
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer, create_new(part) as file:
            expected, size = answer.headers.get("Content-Length", ""), 0
            while block := answer.read(BLOCK_BYTES):
                if size and is_stopping.is_set():  # a video may take minutes
                    raise InterruptedError
                file.write(block)
                if (size := size + len(block)) > largest_bytes(dataset):
                    raise LostFileError(f"has more than {largest_bytes(dataset):,} bytes")
    except LostFileError:
        raise
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise
    except (ValueError, http.client.InvalidURL):  # whose text may quote a password
        raise LostFileError("is no address") from None
    # A read with a limit raises nothing where the connection ends too early.
    if expected.isdigit() and size < int(expected):
        raise http.client.IncompleteRead(b"", int(expected) - size)


def largest_bytes(dataset: UrlImages) -> int:
    return LARGEST_READ if dataset.clips else MAX_BYTES


def checked_suffix(dataset: UrlImages, part: Path) -> str:
    """Return the suffix of a file that is read. Raises LostFileError for any other content."""
    suffix_of, read = (suffix_of_video, read_video_header) if dataset.clips else (suffix_of_content, read_header)
    with part.open("rb") as file:
        suffix = suffix_of(file.read(32))
        file.seek(0)
        try:
            if not suffix:
                raise LostFileError(f"is no {dataset.noun} in a format that is read")
            read(file)
        except DECODE_ERRORS as error:
            raise LostFileError(str(error)) from None
    return suffix
