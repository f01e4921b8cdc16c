"""Values written as one text: addresses, buckets, ranges of steps, trackers, formats of an export."""

from __future__ import annotations

import re
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from simpletuner.errors import EnvironmentNotReady
from simpletuner.extras import install_command
from simpletuner.settings.values.spelling import normalize_name
from simpletuner.system.files.paths import is_address

DIFFUSERS = "diffusers"
PROGRAMS = (DIFFUSERS, "comfyui", "kohya")

LORA_TYPES = {"lora": "LoRA", "dora": "DoRA", "loha": "LoHa", "lokr": "LoKr", "oft": "OFT"}
"""Spelling of each lora_type."""


def normalize_formats(text: str) -> str:
    """Programs in one spelling, each once, diffusers' first. Raises ValueError for one that is not known."""
    names = [normalize_name(word) for word in text.split(",") if word.strip()]
    if unknown := [name for name in names if name not in PROGRAMS]:
        raise ValueError(f"{unknown[0]} is not known; use {DIFFUSERS}, or several: {','.join(PROGRAMS)}")
    return ",".join(name for name in PROGRAMS if name in (DIFFUSERS, *names))


# RFC 1035: labels of at most 63 characters, 253 in all as text.
LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.IGNORECASE)
LONGEST = 253


def check_host(host: str) -> str:
    """Return the address as it came. Raises ValueError for what no name service could look up."""
    if not host or is_ip(host):
        return host
    if found := re.fullmatch(r"(?P<host>[^:/]+|\[[^\]/]+\]):(?P<port>\d+)", host):
        raise ValueError(f"write {found['host'].strip('[]')}, and the port as main_process_port={found['port']}")
    if "://" in host:
        raise ValueError("use an address without `://` and what is around it, such as 10.0.0.1")
    labels = host.removesuffix(".").split(".")
    if all(label.isdecimal() for label in labels):
        raise ValueError("this is no IP address; one has four numbers from 0 to 255, such as 10.0.0.1")
    if len(host) > LONGEST or not all(map(is_label, labels)):
        raise ValueError("use an IP address or a host name")
    return host


def check_url(url: str) -> str:
    """Return the address of a page as it came. Raises ValueError for one that nothing can be posted to."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if url and not (usable and url.isascii() and url.isprintable() and " " not in url):
        raise ValueError("use an address such as https://example.org/hook")
    return url


def check_repository(name: str) -> str:
    """Return the id of a repository on the hub as it came. Raises ValueError for what cannot be one."""
    # 96 characters is the limit of huggingface_hub (utils/_validators.py, 2.4).
    if name and not (re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", name, re.ASCII) and len(name) <= 96):
        raise ValueError("use OWNER/NAME or NAME, of letters, digits, `-`, `_` and `.`")
    return name


def check_kernel(name: str) -> str:
    """Return a kernel of the hub as it came. Raises ValueError for one without an owner or a whole commit."""
    repository, _, commit = name.partition("@")
    if name and not ("/" in repository and re.fullmatch(r"[0-9a-f]{40}", commit)):
        raise ValueError("use OWNER/NAME@COMMIT, with a commit of 40 hex digits: a branch may change")
    check_repository(repository)
    return name


def is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_label(label: str) -> bool:
    # Letters beyond ASCII are encoded first (IDNA).
    try:
        return LABEL.fullmatch(label.encode("idna").decode()) is not None
    except UnicodeError:
        return False


# Of one range. A trace holds every operator of every step: some 10 MB for each step of a large model.
MOST_STEPS = 100


def normalize_step_range(text: str) -> str:
    """Return a range without blanks, or an empty text. Raises ValueError for what is no range."""
    text = text.replace(" ", "")
    if not text:
        return ""
    if not re.fullmatch(r"[0-9]{1,12}:[0-9]{1,12}", text):
        raise ValueError("write the first and the last step, such as 10:12")
    first, last = parse_step_range(text)
    if not 1 <= first <= last:
        raise ValueError("steps count from 1, and the last is not before the first: write 10:12")
    if last - first >= MOST_STEPS:
        raise ValueError(f"{last - first + 1:,} steps are too many for one trace: take at most {MOST_STEPS}")
    return f"{first}:{last}"


def parse_step_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    return int(first), int(last)


TRACKERS = {
    "tensorboard": "pip install tensorboard",
    "wandb": install_command("wandb"),
    "trackio": "pip install trackio",
    "swanlab": "pip install swanlab",
}
"""Commands that install each tracker."""

OTHERS = ("comet_ml", "mlflow", "custom_tracker", "simpletuner", "clearml", "aim")
"""Trackers of other tools, which users have in their files."""


def normalize_trackers(text: str) -> str:
    """Return the trackers in one spelling, each once. Raises ValueError for what is no tracker."""
    names = [normalize_name(word) for word in text.split(",") if word.strip()]
    if names in ([], ["none"]):
        return "none"
    for name in names:
        if name in OTHERS:
            raise ValueError(f"{name} is not supported; use one or several of {','.join(TRACKERS)}")
        if name not in TRACKERS:
            raise ValueError(f"use none, or one or several of {','.join(TRACKERS)}")
    return ",".join(dict.fromkeys(names))


def check_installed(text: str) -> None:
    """Raise EnvironmentNotReady for a tracker whose package is not installed."""
    for name in parse_trackers(text):
        if find_spec(name) is None:
            raise EnvironmentNotReady(f"report_to={name} needs a package that is not installed", TRACKERS[name])


def parse_trackers(text: str) -> list[str]:
    return [name for name in text.split(",") if name in TRACKERS]


ADDRESS = re.compile(r"(s3|gs|az)://([^/\s?#@:]+)((?:/[^/\s?#]+)*)/?")


class BucketAddress(NamedTuple):
    """Parts of an address; the folder is empty for the bucket as a whole."""

    scheme: str
    bucket: str
    folder: str


def parse_bucket(address: str) -> BucketAddress | None:
    """Return the parts of an address; None for what is none."""
    found = ADDRESS.fullmatch(address)
    if not found or {".", ".."} & {*address.split("/")}:
        return None
    return BucketAddress(found[1], found[2], found[3].strip("/"))


def no_url(folder: Path) -> Path:
    """Folder as it came. Raises ValueError for an address that is none of a bucket, such as `s3:/BUCKET`."""
    if is_address(folder):
        raise ValueError("is no folder: use a path, or s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER")
    return folder


ADDRESSES = {"s3": "aws", "gs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
"""`type` of a dataset by the scheme of an address."""
ONLY_LISTS = "a web server lists no files: write the addresses of its images into a table, and use type csv"


def no_address(folder: Path | None) -> Path | None:
    """Folder of images as it came. Raises ValueError for an address, with what to write instead."""
    scheme = re.match(r"([a-z0-9]+):/", str(folder))
    if scheme and scheme[1] in ("http", "https"):
        raise ValueError(ONLY_LISTS)
    if scheme and (kind := ADDRESSES.get(scheme[1])):
        bucket = "container" if kind == "azure" else "bucket"
        raise ValueError(f"is no folder: a dataset file takes type {kind}, {kind}_{bucket}_name and {kind}_data_prefix")
    return folder


def checkpoint_name(text: str) -> str:
    """Name of a checkpoint's folder; of a step in digits, that of its checkpoint."""
    return f"checkpoint-{int(text):06d}" if text.isdecimal() and len(text) < LONGEST_STEP else text


LONGEST_STEP = 12  # Python converts at most 4,300 digits


def check_bucket(address: str) -> str:
    """Return an address without a slash at its end. Raises ValueError for what is none."""
    if address and parse_bucket(address) is None:
        raise ValueError("use s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER")
    return address.rstrip("/")
