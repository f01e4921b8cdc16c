"""Download the images of a list of URLs once, into a folder that is then read like any other.

By urllib: it follows redirects, knows proxies, and needs no package; obstore wants one store per host. A file is named
by a hash of its URL, so what an earlier start has downloaded is found without being asked for again.
"""

from __future__ import annotations

import http.client
import io
import json
import random
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import xxhash

from simpletuner.data.config.dataset_types import LocalImages, UrlImages
from simpletuner.data.config.tables import TableSettings
from simpletuner.data.images.image_formats import BY_PILLOW, BY_PLUGIN, suffix_of_content
from simpletuner.data.images.images import DECODE_ERRORS, read_header
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.data.tables.table_files import TableFile
from simpletuner.system.files.atomic import replace_file
from simpletuner.system.http_requests import http_request
from simpletuner.system.processes.threads import run_bounded

MAX_BYTES = 256 << 20
"""The largest image that is downloaded."""
THREADS = 16
ATTEMPTS = 5
# Before the second attempt; doubled before each further one.
WAIT_SECONDS = 0.5
TIMEOUT_SECONDS = 30
PASSING = frozenset({408, 425, 429})
"""HTTP statuses below 500 that may be others next time."""
SUFFIXES = BY_PILLOW | BY_PLUGIN
INDEX = "images.jsonl"
# With %, so that an address that is quoted already stays as it is.
SAFE = ":/?#[]@!$&'()*+,;=%~"
KEYS = {"path": "csv_file", "filename_column": "csv_url_column", "caption_column": "csv_caption_column"}


class LostImageError(ValueError):
    """Why an image cannot be downloaded, now or later."""


@dataclass
class Downloads:
    """The number of downloaded images, and the URLs of the others, with the reason."""

    count: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    """Their servers say so, or what they send is no image."""
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
    folder, captions, found = dataset.csv_cache_dir, read_urls(dataset), Downloads()
    folder.mkdir(parents=True, exist_ok=True)
    names = {path.stem: path.name for path in folder.iterdir() if path.suffix in SUFFIXES}
    missing = [url for url in captions if name_of(url) not in names]
    fetched = run_bounded(lambda url: fetch(url, folder), missing, THREADS, stop)
    for done, (url, future) in enumerate(fetched, start=1):
        result = result_of(future)
        if isinstance(result, str):
            names[name_of(url)] = result
        elif isinstance(result, LostImageError):
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
    except (LostImageError, *PASSING_ERRORS) as error:
        return error


PASSING_ERRORS = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError)


def fetch(url: str, folder: Path) -> str:
    """Download an image, and return its file's name. Raises LostImageError, or one of PASSING_ERRORS in the end."""
    content = read_with_retries(url)
    name = name_of(url) + checked_suffix(content)
    replace_file(folder / name, content)
    return name


def read_with_retries(url: str) -> bytes:
    for attempt in range(ATTEMPTS - 1):
        try:
            return read_body(url)
        except PASSING_ERRORS as error:
            raise_if_final(error)
        # At random, so that threads that a server has refused together do not come back together.
        time.sleep(WAIT_SECONDS * 2**attempt * random.uniform(0.5, 1))
    return read_body(url)


def raise_if_final(error: Exception) -> None:
    """Raise LostImageError for an error that another attempt cannot change."""
    if isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code not in PASSING:
        raise LostImageError(f"HTTP {error.code}") from None
    reason = getattr(error, "reason", None)
    if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME:
        raise LostImageError("there is no such host") from None


def read_body(url: str) -> bytes:
    """Ask once. Raises LostImageError, or one of PASSING_ERRORS."""
    try:
        request = http_request(quote(url, safe=SAFE), headers={"User-Agent": "simpletuner"})
        if request.type not in ("http", "https"):  # urllib would open files
            raise LostImageError("is no http:// or https:// address")
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            expected, content = answer.headers.get("Content-Length", ""), answer.read(MAX_BYTES + 1)
    except LostImageError:
        raise
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise
    except (ValueError, http.client.InvalidURL):  # whose text may quote a password
        raise LostImageError("is no address") from None
    if len(content) > MAX_BYTES:
        raise LostImageError(f"has more than {MAX_BYTES:,} bytes")
    # A read with a limit raises nothing where the connection ends too early.
    if expected.isdigit() and len(content) < int(expected):
        raise http.client.IncompleteRead(content, int(expected) - len(content))
    return content


def checked_suffix(content: bytes) -> str:
    """Return the suffix of an image that is read. Raises LostImageError for any other content."""
    suffix = suffix_of_content(content)
    try:
        if not suffix:
            raise LostImageError("is no image in a format that is read")
        read_header(io.BytesIO(content))
    except DECODE_ERRORS as error:
        raise LostImageError(str(error)) from None
    return suffix
