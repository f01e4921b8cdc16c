"""Requests for an image that a running run answers between two steps: files in its folder. No torch.

`sample-requests/ID.request` is a safetensors file with the encoded prompts, and what to sample as JSON in its
metadata. The run renames it to `ID.taken` before it looks into it, writes `ID.answer` and removes it: a file
that ends a run is not taken again. A file of another user, a link, one that is too large and names that
nobody here writes are not read.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from simpletuner.checkpoints.layout import MOST_LISTED, REQUEST, REQUEST_NAME, REQUESTS, TAKEN_REQUEST
from simpletuner.errors import EnvironmentNotReady, SettingsError, reason_of_os
from simpletuner.system.files.atomic import atomic_file, remove, write_json
from simpletuner.system.files.regular_files import open_regular, read_file

SAMPLES, ANSWER = "samples", ".answer"
"""Folder of images in a run's folder, and the end of an answer's name beside its request."""
MOST_WAITING = 8
# Embeddings of two prompts of 512 tokens take FLUX.1 8 MiB, in float32 16.
MOST_BYTES = 64 << 20
MOST_ANSWER_BYTES = 64 << 10
IN_METADATA = "simpletuner_sample"

Weights = Literal["base", "trained", "ema"]


class SampleRequest(BaseModel):
    """Parameters of an image or clip, and the sets of weights to sample it with."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt: str = Field(max_length=20_000)
    negative_prompt: str = Field(max_length=20_000)
    seed: int = Field(ge=0, lt=2**63)
    steps: int = Field(ge=1, le=1000)
    guidance: FiniteFloat = Field(ge=0, le=1000)
    width: int = Field(ge=8, le=16384)
    height: int = Field(ge=8, le=16384)
    frames: int = Field(ge=1, le=1024)
    fps: FiniteFloat = Field(ge=0, le=1000)
    strength: FiniteFloat = Field(ge=-10, le=10)
    weights: Annotated[tuple[Weights, ...], Field(min_length=1, max_length=3, strict=False)]


@dataclass(frozen=True)
class SampleAnswer:
    """Names of the images below the run's folder; or why there are none."""

    images: tuple[str, ...] = ()
    step: int = 0
    refused: str = ""
    hint: str = ""


def parse_request(text: str) -> SampleRequest:
    """Raise ValueError, in one line, for what is no request."""
    try:
        return SampleRequest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(each) for each in first["loc"])
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None


def ask(output: Path, content: bytes) -> str:
    """Write a request, and return its id.

    Raises SettingsError where many wait, EnvironmentNotReady where the folder cannot be written.
    """
    folder = output / REQUESTS
    try:
        folder.mkdir(exist_ok=True)
        if len(waiting(output)) >= MOST_WAITING:
            raise SettingsError(f"{MOST_WAITING} requests wait in {folder}", "wait for their images, or remove them")
        # By time, so that the first is answered first.
        name = f"{time.time_ns() // 1000:016x}{secrets.token_hex(4)}"
        with atomic_file(folder / f"{name}{REQUEST}") as file:
            file.write(content)
    except OSError as error:
        raise EnvironmentNotReady(f"cannot write to {folder}: {reason_of_os(error)}", "see who owns the run") from None
    return name


def waiting(output: Path) -> list[str]:
    """Return the ids of requests that no run has taken yet, the first first; none where it cannot be seen."""
    try:
        with os.scandir(output / REQUESTS) as entries:
            matches = [REQUEST_NAME.fullmatch(entry.name) for entry in islice(entries, MOST_LISTED)]
    except OSError:
        return []
    return sorted(match["id"] for match in matches if match)


def take(output: Path, name: str) -> bytes:
    """Rename a request, and return its content. Raises ValueError for one that is not read."""
    folder = output / REQUESTS
    taken = folder / f"{name}{TAKEN_REQUEST}"
    try:
        (folder / f"{name}{REQUEST}").rename(taken)
        status = taken.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("the request is no regular file")
        if status.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"the request is of user {status.st_uid}, and the run of user {os.geteuid()}")
        with open_regular(taken, MOST_BYTES) as file:
            return file.read(MOST_BYTES)
    except OSError as error:
        raise ValueError(f"the request cannot be read: {reason_of_os(error)}") from None


def answer(output: Path, name: str, found: SampleAnswer) -> None:
    """Write the answer, and remove the request. Raises OSError."""
    write_json(output / REQUESTS / f"{name}{ANSWER}", asdict(found))
    remove(output / REQUESTS / f"{name}{TAKEN_REQUEST}")


def read_answer(output: Path, name: str) -> SampleAnswer | None:
    """Return the answer to a request, None while there is none. Raises EnvironmentNotReady."""
    path = output / REQUESTS / f"{name}{ANSWER}"
    try:
        found: Any = json.loads(read_file(path, MOST_ANSWER_BYTES))
        return TypeAdapter(SampleAnswer).validate_python(found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        raise EnvironmentNotReady(f"cannot read {path}", "ask again") from None


def withdraw(output: Path, name: str) -> None:
    for end in (REQUEST, ANSWER):
        with suppress(OSError):
            (output / REQUESTS / f"{name}{end}").unlink()


def left_over(output: Path) -> list[str]:
    """Return the ids of what an earlier start had taken, and did not live to answer."""
    names = [path.stem for path in islice((output / REQUESTS).glob(f"*{TAKEN_REQUEST}"), MOST_LISTED)]
    return [name for name in names if REQUEST_NAME.fullmatch(f"{name}{REQUEST}")]
