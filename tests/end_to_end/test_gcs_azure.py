"""Google Cloud Storage and Azure: images and caches as in S3, their own credentials and errors, and the same losses."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
from azure_server import CONTAINER, AzureServer, azure_server
from checkpoint_states import save_checkpoint
from s3_server import BUCKET, Fault, Proxy, s3_proxy, s3_server, upload

from simpletuner.checkpoints.layout import load_checkpoint
from simpletuner.data.config.dataset_types import AzureImages, GcsImages
from simpletuner.data.storage import object_stores as bucket_stores
from simpletuner.data.storage.object_storage import ObjectStorage, open_bucket
from simpletuner.data.storage.storage import UnreadableFileError
from simpletuner.errors import DataError, EnvironmentNotReady, SimpleTunerError
from simpletuner.system.files.checksums import file_checksum
from simpletuner.system.files.lease import Lease
from simpletuner.system.files.lease_record import LeaseLost
from simpletuner.training.mirroring.bucket_records import LEASE, BucketRecords
from simpletuner.training.mirroring.remote_run import RemoteRun
from simpletuner.training.mirroring.run_files import whole_folders

SECRET = "unseen7"
KEY = b64encode(b"unseen7").decode()


@dataclass
class Stand:
    """A running stand-in for a service; `place` are the keys of a dataset in it."""

    place: dict[str, object]
    prefix: str
    """What the keys of the service begin with."""
    server: AzureServer | Proxy
    fill: Callable[[Path], None]
    """Upload a folder."""

    def open(self, prefix: str = "", **values: object) -> ObjectStorage:
        kind = {"gcs": GcsImages, "azure": AzureImages}[self.prefix]
        given = {"id": "d", **self.place, f"{self.prefix}_data_prefix": prefix, **values}
        return open_bucket(kind.model_validate(given))

    def fail(self, status: int, code: str) -> None:
        if isinstance(self.server, AzureServer):
            self.server.fault = (status, code)
        else:
            self.server.faults = [Fault("", status, code)]


@contextmanager
def azure_stand() -> Iterator[Stand]:
    with azure_server() as server:
        place = {"type": "azure", "azure_container_name": CONTAINER, "azure_account_name": "acc"}

        def fill(folder: Path) -> None:
            files = (path for path in folder.rglob("*") if path.is_file())
            server.blobs |= {f"set/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in files}

        yield Stand({**place, "azure_endpoint_url": server.address, "azure_access_key": KEY}, "azure", server, fill)


@contextmanager
def gcs_stand(folder: Path) -> Iterator[Stand]:
    account = folder / "account.json"
    keys = {"private_key": SECRET, "private_key_id": "i", "client_email": "e", "disable_oauth": True}
    account.write_text(json.dumps(keys))
    with s3_server() as server, s3_proxy(server) as proxy:  # Google's XML interface is that of S3, but for signatures
        place = {"type": "gcs", "gcs_bucket_name": BUCKET, "gcs_service_account": str(account)}
        yield Stand(
            {**place, "gcs_endpoint_url": proxy.address}, "gcs", proxy, lambda folder: upload(server, folder, "set/")
        )


@pytest.fixture(params=["gcs", "azure"])
def stand(request, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "keys").mkdir()
    with azure_stand() if request.param == "azure" else gcs_stand(tmp_path / "keys") as stand:
        yield stand


def test_a_run_trains_and_caches_in_the_bucket_as_locally(stand, sdxl, shapes, train, tmp_path):
    stand.fill(shapes)
    model = ("--model_family=sdxl", f"--pretrained_model_name_or_path={sdxl}", "--max_train_steps=3")
    prefix = f"{stand.prefix}_data_prefix"
    caches = [{"id": each, "dataset_type": f"{each}_embeds", **stand.place, prefix: f"cache/{each}"}
              for each in ("image", "text")]  # fmt: skip
    here = tmp_path / "keys" / "here.json"
    here.write_text(json.dumps([{"id": "d", "instance_data_dir": str(shapes)}]))
    there = tmp_path / "keys" / "there.json"
    there.write_text(json.dumps([{"id": "d", **stand.place, prefix: "set", "image_embeds": "image"}, *caches]))
    local = train(tmp_path / "local", *model, f"--data_backend_config={here}")
    away = train(tmp_path / "away", *model, f"--data_backend_config={there}")
    stand.server.requests.clear()
    elsewhere = train(tmp_path / "elsewhere", *model, f"--data_backend_config={there}")
    assert len(away.rows) == 3 and elsewhere.losses == away.losses == local.losses and "making" not in elsewhere.said
    assert all(part for path, part in stand.server.requests if ".shard" in path), "records are read, not shards"
    for run in (away, elsewhere):
        texts = [run.said.encode(), *(path.read_bytes() for path in run.output.rglob("*") if path.is_file())]
        assert len(texts) > 1 and not [each for each in texts if SECRET.encode() in each or KEY.encode() in each]


def test_files_are_listed_in_pages_read_in_ranges_and_uploaded_in_parts(stand, tmp_path):
    names = ("a/z.png", "a-b/c.png", "a.png", "é x%+.png")
    for number, name in enumerate(names):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / name).write_bytes(bytes([number]) * 100_000)
    stand.fill(tmp_path / "images")
    stand.server.page = stand.server.page_keys = 2
    storage = stand.open("/set/")
    listed = [*storage.list_files({".png"}).files]
    assert [file.name for file in listed] == sorted(names, key=lambda name: name.split("/"))
    assert len({file.version for file in listed}) == 4 and {file.size_bytes for file in listed} == {100_000}
    assert storage.open_header("é x%+.png").read() == storage.open("é x%+.png").read() == bytes([3]) * 100_000
    assert storage.sizes() == {"a.png": 100_000, "é x%+.png": 100_000}
    large = tmp_path / "large"
    large.write_bytes(os.urandom(11 << 20))
    storage.upload("large", large)
    assert bytes(storage.read_range("large", 6 << 20, 99)) == large.read_bytes()[6 << 20 :][:99]
    with pytest.raises(UnreadableFileError, match="at most 4 are read"):
        storage.read("a.png", 4)


def test_a_mirror_uploads_restores_prunes_and_sets_aside_there_as_in_s3(stand, tmp_path, monkeypatch):
    output = tmp_path / "run"
    remote = RemoteRun(stand.open("run"))
    for step in (1, 2, 3):
        folder = save_checkpoint(output, step, 9 << 20)
        whole = next(each for each in whole_folders(output) if each.step == step)
        remote.upload(whole, folder, (folder / "state.json").read_bytes())
    remote.prune(2)
    again = RemoteRun(stand.open("run"))
    again.refresh()
    assert again.sizes == remote.sizes and [each.step for each in again.whole()] == [3, 2]
    counts: list[int] = []
    again.restore(again.whole()[0], tmp_path / "elsewhere", counts.append)
    restored = load_checkpoint(tmp_path / "elsewhere" / "checkpoints" / "checkpoint-000003")
    assert {name: file_checksum(restored.folder / name) for name in restored.state["files"]} == restored.state[
        "checksums"
    ]
    assert sum(counts) == sum(restored.state["files"].values())
    again.move_aside(again.whole()[0])
    assert [each.step for each in again.whole()] == [2]
    assert "checkpoints/set-aside/checkpoint-000003/state.json" in stand.open("run").all_sizes()
    monkeypatch.setattr("simpletuner.system.files.lease.SETTLE_SECONDS", 0.1)
    first, place = Lease(), BucketRecords(stand.open("run"))
    first.acquire(place)
    first.check()
    place.write(LEASE, replace(first.record, id="other", token=2).encode())
    with pytest.raises(LeaseLost):
        first.check()
    first.release()
    assert not place.system.creates_exclusively  # the stand-ins ignore conditions


GONE = {"gcs": (404, "NoSuchBucket"), "azure": (404, "ContainerNotFound")}
ENDINGS = {
    "gcs": [
        (401, "AuthenticationRequired", "its credentials are not valid", "gcs_service_account"),
        (403, "AccessDenied", "access is denied", "storage.objects.list"),
        (429, "TooMany", "it refuses requests", "gcs_max_pool_connections"),
    ],
    "azure": [
        (403, "AuthenticationFailed", "its credentials are not valid", "azure_access_key"),
        (403, "AuthorizationPermissionMismatch", "access is denied", "Storage Blob Data Reader"),
        (403, "Any</Code><D>Signature not valid in the specified time frame</D><Code>", "have expired", "renew"),
    ],
}


def test_errors_are_named_by_the_service(stand, monkeypatch):
    short = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=9), "base": 2}
    quick = {"max_retries": 1, "retry_timeout": timedelta(seconds=9), "backoff": short}
    monkeypatch.setattr(bucket_stores, "RETRIES", quick)
    storage = stand.open("set")
    word = "container" if stand.prefix == "azure" else "bucket"
    owner = f"dataset `d`: {word} `{BUCKET}` at {stand.server.address.removeprefix('http://')}"
    for status, code, said, hint in ENDINGS[stand.prefix]:
        stand.fail(status, code)
        for ask in (lambda: list(storage.list_files({".png"}).files), lambda: storage.read("a.png", 9)):
            with pytest.raises(EnvironmentNotReady) as caught:
                ask()
            assert caught.value.message.startswith(owner) and said in caught.value.message
            assert hint in caught.value.hint
    stand.fail(*GONE[stand.prefix])
    with pytest.raises(DataError, match="does not exist"):
        storage.read("a.png", 9)
    stand.fail(404, "NoSuchKey")
    with pytest.raises(FileNotFoundError):
        storage.read("a.png", 9)
    closed = stand.open("set", **{f"{stand.prefix}_endpoint_url": "http://127.0.0.1:9"})
    with pytest.raises(EnvironmentNotReady, match="cannot be reached"):
        closed.sizes()


def test_credentials_are_those_of_the_dataset_or_of_the_environment_and_never_shown(stand, monkeypatch, tmp_path):
    signatures = stand.server.signatures
    none = {"gcs_service_account": None} if stand.prefix == "gcs" else {"azure_access_key": None}
    if isinstance(stand.server, AzureServer):
        stand.open().sizes()
        assert signatures[-1].startswith("SharedKey acc:")
        stand.open(**none, azure_sas_token="sv=2026&sig=unseen7").sizes()
        assert "sig=unseen7" in stand.server.requests[-1][0]
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "other")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        stand.open(**none, azure_account_name=None).sizes()
        assert signatures[-1].startswith("SharedKey other:")
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT")
        bad: list[dict[str, object]] = [{"azure_account_name": None}, {"azure_access_key": "unseen7!"}]
    else:
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "unseen7")
        stand.open(**none).sizes()
        assert signatures[-1][0] == "Bearer unseen7"
        monkeypatch.delenv("GOOGLE_BEARER_TOKEN")
        (tmp_path / "bad.json").write_text('{"private_key": ["unseen7"]}')
        bad = [{"gcs_service_account": tmp_path / "bad.json"}]
    for values in bad:
        with pytest.raises(SimpleTunerError) as caught:
            stand.open(**values).sizes()
        said = caught.value.message + caught.value.hint
        assert "unseen7" not in said and stand.prefix in said and "dataset `d`" in said
    assert KEY not in repr(stand.open()) and "unseen7" not in repr(stand.open())
