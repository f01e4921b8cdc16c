"""A bucket holds what the folder held that was uploaded: list, headers and captions, whatever the network does."""

from __future__ import annotations

import os
import random
from datetime import timedelta
from pathlib import Path

import boto3
import numpy as np
import pytest
import scanning
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from s3_server import BUCKET, Fault, Proxy, put, s3_proxy, s3_server, upload
from video_files import frame_of, write_video

from simpletuner.caches.latents import decode_image
from simpletuner.data.config.dataset_parts import TableSettings
from simpletuner.data.config.dataset_types import LocalImages, S3Images
from simpletuner.data.config.places import S3
from simpletuner.data.samples.discovery import discover
from simpletuner.data.scan.comparison import hash_ends
from simpletuner.data.scan.file_list import table_of
from simpletuner.data.storage import object_stores as bucket_stores
from simpletuner.data.storage.object_errors import StoreRefusal, run_error
from simpletuner.data.storage.object_storage import HEADER_BYTES, ObjectStorage, open_bucket, sort_by_parts
from simpletuner.data.storage.storage import LocalStorage, StoredFile, UnreadableFileError
from simpletuner.errors import DataError, EnvironmentNotReady, ExitCode, SimpleTunerError
from simpletuner.settings.values.shape import Shape

SIZES = {"small.bin": 3000, "long.bin": 3 * HEADER_BYTES, "other.bin": 2 * HEADER_BYTES}
KEYS = {"aws_access_key_id": "AKIAOWN", "aws_secret_access_key": "hidden"}


@pytest.fixture(scope="module")
def server():
    with s3_server() as address:
        put(f"{address}/{BUCKET}/whole/a.png", b"12345")
        yield address


@pytest.fixture
def proxy(server, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    short = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=9), "base": 2}
    monkeypatch.setattr(
        bucket_stores, "RETRIES", {"max_retries": 3, "retry_timeout": timedelta(seconds=9), "backoff": short}
    )
    with s3_proxy(server) as proxy:
        yield proxy


def images_at(proxy: Proxy, prefix: str = "", **values) -> S3Images:
    given = {"aws_bucket_name": BUCKET, "aws_endpoint_url": proxy.address, "aws_data_prefix": prefix, **KEYS}
    return S3Images(**{"id": "d", "resolution": 64, **given, **values})


def bucket_at(proxy: Proxy, prefix: str = "", **values) -> ObjectStorage:
    return open_bucket(images_at(proxy, prefix, **values))


def requests_for(proxy: Proxy, part: str) -> list[str]:
    return [requested for path, requested in proxy.requests if part in path]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Images of each format, in folders that S3 lists in another order, one with a header beyond the first request."""
    noise = Image.frombytes("RGB", (300, 200), random.Random(0).randbytes(180_000))
    names = ("a/z.png", "a-b/c.jpg", "a.webp", "B.png", "a/é x%20+.jpg", "a!/d.png", ".hidden/x.png", "a/.x.png")
    for number, name in enumerate(names):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        noise.crop((0, 0, 250 + number, 200)).save(path)
        path.with_suffix(".txt").write_text(f"caption {number}")
    exif = Image.Exif()
    exif[0x0112] = 6
    noise.save(tmp_path / "images" / "header.jpg", exif=exif, icc_profile=bytes(3 * HEADER_BYTES))
    noise.save(tmp_path / "images" / "turned.webp", exif=exif, lossless=True)
    (tmp_path / "images" / "other.psd").touch()
    (tmp_path / "images" / "empty.png").touch()
    (tmp_path / "images" / "cut.png").write_bytes((tmp_path / "images" / "B.png").read_bytes()[:20])
    (tmp_path / "images" / "B.txt").write_bytes("café".encode("latin-1"))
    return tmp_path / "images"


def test_clips_in_a_bucket_are_read_in_part_and_equal_those_of_the_folder(server, proxy, tmp_path):
    films = tmp_path / "films"
    films.mkdir()
    path = write_video(films / "a.mov", frames=40, size=(320, 240), codec="rawvideo", pixel_format="uyvy422")
    upload(server, films, "films/")
    clip = {"num_frames": 2, "clip_position": "middle"}
    values = {"caption_strategy": "filename", "dataset_type": "video", "video": clip}
    local, far = (
        LocalImages(id="d", instance_data_dir=films, resolution=64, **values),
        images_at(proxy, "films", **values),
    )
    pixels = []
    for dataset, storage in ((local, LocalStorage(films)), (far, open_bucket(far))):
        [sample] = discover([scanning.scanned(dataset, storage)], Shape(1, 64, 64), 0).samples
        decoded = decode_image(sample)
        assert not isinstance(decoded, str), decoded
        pixels.append(decoded)
    assert pixels[0].shape == (3, 2, 64, 64) and (pixels[0] == pixels[1]).all()
    ranges = [tuple(map(int, each.removeprefix("bytes=").split("-"))) for each in requests_for(proxy, "a.mov")]
    assert sum(last + 1 - first for first, last in ranges) < path.stat().st_size / 2


def test_folders_of_frames_in_a_bucket_are_clips_and_the_scan_reads_one_frame_of_each(server, proxy, tmp_path):
    films = tmp_path / "films"
    for folder in ("clip.v2", "a-b/é x%20+", "a/walk"):
        (films / folder).mkdir(parents=True)
        (films / f"{folder}.txt").write_text(f"of {folder}")
        for number in range(1, 12):
            Image.fromarray(frame_of(number)).save(films / folder / f"{number}.png")
    (films / "clip.v2" / ".12.png").touch()
    (films / "a/walk/3.png").write_bytes(b"torn")
    upload(server, films, "frames/")
    last = films / "clip.v2" / "11.png"
    content = last.read_bytes()
    Image.fromarray(frame_of(0)).save(last)
    upload(server, films, "changed/")
    last.write_bytes(content)
    values = {"dataset_type": "video", "video": {"num_frames": 9, "frame_folders_fps": 24}}
    local, far = (
        LocalImages(id="d", instance_data_dir=films, resolution=64, **values),
        images_at(proxy, "frames", **values),
    )
    folders = []
    for dataset, storage in ((local, LocalStorage(films)), (far, open_bucket(far))):
        found = discover([scanning.scanned(dataset, storage)], Shape(1, 64, 64), 0)
        assert not requests_for(proxy, "/2.png")
        proxy.latency_seconds, proxy.most_at_once = 0.02, 0
        folders.append([(each.name, each.captions, decode_image(each)) for each in found.samples])
        versions = [each.version for each in found.samples]
    here, there = folders
    assert [name for name, _, _ in here] == ["a/walk/", "a-b/é x%20+/", "clip.v2/"]
    for (name, captions, pixels), own in zip(there, here, strict=True):
        assert (name, captions) == own[:2] and captions == (f"of {name[:-1]}",)
        assert np.array_equal(pixels, own[2]), name
    assert there[0][2] == "frame 3.png: is not an image in a known format, or is damaged"
    assert proxy.most_at_once > 1 and len(requests_for(proxy, "clip.v2/5.png")) == 1
    far = images_at(proxy, "changed", **values)
    again = discover([scanning.scanned(far, open_bucket(far))], Shape(1, 64, 64), 0).samples
    assert [each.version == old for each, old in zip(again, versions, strict=True)] == [True, True, False]


def test_a_bucket_is_scanned_like_the_folder_that_was_uploaded(server, proxy, folder):
    upload(server, folder, "scanned/below/")
    local = scanning.scanned(LocalImages(id="d", instance_data_dir=folder), LocalStorage(folder))
    images = images_at(proxy, "/scanned/below/")
    storage = open_bucket(images)
    proxy.latency_seconds = 0.2
    found = scanning.scanned(images, storage)
    proxy.latency_seconds = 0
    rows, expected = ([{**row, "version": "", "caption_version": ""} for row in scan.table.to_pylist()]
                      for scan in (found, local))  # fmt: skip
    for row in (rows[names(rows).index("empty.png")], expected[names(expected).index("empty.png")]):
        row["problem"] = bool(row["problem"])
    assert rows == expected and len(rows) == 10
    assert (found.others.not_read, found.others.example) == ({".psd": 1}, f"s3://{BUCKET}/scanned/below/other.psd")
    assert proxy.most_at_once > 4
    assert len(requests_for(proxy, "B.png")) == 2 and requests_for(proxy, "B.png")[0] == "bytes=0-65535"  # and its end
    assert len(requests_for(proxy, "header.jpg")) > 1 and len(requests_for(proxy, "turned.webp")) == 2
    assert not requests_for(proxy, "header.txt") and not requests_for(proxy, "hidden")
    versions = found.table["version"].to_pylist()
    assert len({*versions}) == len(versions) and all(version.count('"') == 2 for version in versions)

    samples = discover(
        [scanning.scanned(images_at(proxy, "scanned/below", caption_strategy="filename"), storage)],
        Shape(1, 64, 64),
        0,
    )
    for sample in samples.samples:
        assert sample.open().read() == (folder / sample.name).read_bytes()
        assert storage.open_header(sample.name).read() == (folder / sample.name).read_bytes()
        assert hash_ends(storage, sample.name) == hash_ends(LocalStorage(folder), sample.name)
        assert not isinstance(decode_image(sample), str)


def names(rows) -> list[str]:
    return [row["name"] for row in rows]


@given(st.lists(st.text("ab/-.!0", min_size=1, max_size=9).filter(lambda name: "//" not in f"/{name}/"), unique=True))
def test_what_s3_lists_is_sorted_by_the_parts_of_names(keys):
    keys = [key for key in keys if not any(other.startswith(f"{key}/") for other in keys)]
    sorted_keys = [file.name for file in sort_by_parts(StoredFile(key) for key in sorted(keys))]
    assert sorted_keys == sorted(keys, key=lambda key: key.split("/"))


def test_files_are_not_held_back_once_no_folder_can_come_before_them():
    taken = []

    def listed():
        for number in range(100):
            taken.append(number)
            yield StoredFile(f"set/image{number:03}.png")

    for number, file in enumerate(sort_by_parts(listed())):
        assert file.name == f"set/image{number:03}.png" and len(taken) <= number + 2


def test_more_keys_than_one_answer_holds_are_all_listed(server, proxy):
    for number in range(5):
        put(f"{server}/{BUCKET}/many/{number}.png")
    proxy.page_keys = 2
    listed = [file.name for file in bucket_at(proxy, "many").list_files({".png"}).files]
    assert listed == [f"{number}.png" for number in range(5)]
    assert len(requests_for(proxy, "list-type")) == 3


def test_what_passes_is_tried_again_and_what_is_wrong_with_one_object_is_its_own(server, proxy, tmp_path):
    for name in ("archived", "cut", "flaky", "gone", "whole"):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(name)
    upload(server, tmp_path, "faults/")
    images = images_at(proxy, "faults")
    proxy.faults = [
        Fault("list-type", 503, "SlowDown", times=2),
        Fault("flaky.png", 503, "SlowDown", times=2),
        Fault("flaky.txt", 500, "InternalError", times=2),
        Fault("whole.png", cut=0.5, times=1),
        Fault("gone.png", 404, "NoSuchKey"),
        Fault("cut.png", cut=0.5),
        Fault("archived.png", 403, "InvalidObjectState"),
        Fault("archived.txt", 404, "NoSuchKey"),
    ]
    found = scanning.scanned(images, open_bucket(images))
    assert {row["name"]: row["problem"] for row in found.table.to_pylist()} == {
        "archived.png": "is archived: restore it first",
        "cut.png": "its content ends too early",
        "flaky.png": "",
        "gone.png": "is not in the bucket any more",
        "whole.png": "",
    }
    assert found.table["captions"].to_pylist() == [[], [], ["flaky"], [], ["whole"]]
    storage = bucket_at(proxy, "faults")
    with pytest.raises(UnreadableFileError, match="ends too early"):
        storage.open("cut.png")
    with pytest.raises(UnreadableFileError, match="has 5 bytes; at most 4 are read"):
        storage.read("flaky.txt", 4)
    with pytest.raises(FileNotFoundError):
        storage.read("none.txt", 4)
    assert hash_ends(storage, "cut.png") == hash_ends(storage, "gone.png") == ""


ENDINGS = [
    (404, "NoSuchBucket", ExitCode.DATA, "does not exist", "aws_bucket_name"),
    (403, "AccessDenied", ExitCode.ENVIRONMENT, ": access is denied", "s3:ListBucket"),
    (403, "InvalidAccessKeyId", ExitCode.ENVIRONMENT, ": its credentials are not valid", "aws_access_key_id"),
    (400, "ExpiredToken", ExitCode.ENVIRONMENT, ": its credentials have expired", "it continues"),
    (301, "PermanentRedirect", ExitCode.ENVIRONMENT, ": it is in another region", "aws_region_name"),
    (503, "SlowDown", ExitCode.ENVIRONMENT, ": it refuses requests", "aws_max_pool_connections"),
    (500, "InternalError", ExitCode.ENVIRONMENT, ": it fails to answer", "it continues"),
    (418, "Teapot", ExitCode.ENVIRONMENT, ": it answers with the error Teapot", "manual"),
]


@pytest.mark.parametrize(("status", "code", "exit_code", "said", "hint"), ENDINGS)
def test_what_concerns_the_bucket_ends_the_run(proxy, status, code, exit_code, said, hint):
    storage = bucket_at(proxy, "whole")
    proxy.faults = [Fault("", status, code)]
    for ask in (
        lambda: list(storage.list_files({".png"}).files),
        lambda: storage.open("a.png"),
        lambda: storage.open_header("a.png").read(1),
        lambda: storage.read("a.png", 9),
    ):
        with pytest.raises(SimpleTunerError) as caught:
            ask()
        assert caught.value.exit_code == exit_code and hint in caught.value.hint
        assert caught.value.message.startswith(
            f"dataset `d`: bucket `{BUCKET}` at {proxy.address.removeprefix('http://')}"
        )
        assert said in caught.value.message and len(caught.value.message) < 120


REFUSED = [
    ("DELETE", 403, "AccessDenied", "it removes nothing: access is denied (AccessDenied)", "s3:DeleteObject"),
    ("DELETE", 501, "NotImplemented", "it removes nothing: it answers with the error NotImplemented", "manual"),
    ("DELETE", 409, "FileImmutable", "it removes nothing: it keeps objects locked for some time (File", "Object Lock"),
    ("PUT", 403, "AccessDenied", ": access is denied (AccessDenied)", "s3:PutObject and s3:DeleteObject for mirror"),
    ("PUT", 400, "MissingUploadObjectWithObjectLockHeaders", "it keeps objects locked", "without Object Lock"),
    ("PUT", 507, "XMinioStorageFull", "it is full, or over its quota (XMinioStorageFull)", "make room there"),
    ("PUT", 403, "QuotaExceeded", "it is full, or over its quota (QuotaExceeded)", "raise the quota"),
    ("PUT", 500, "InternalError", "it takes nothing, though it can be listed; is it full? (InternalError)", "wait"),
]


def test_what_a_store_refuses_is_named_by_its_own_code_and_what_it_needs(proxy):
    storage = bucket_at(proxy, "whole")
    for method, status, code, said, hint in REFUSED:
        proxy.faults = [Fault("", status, code, method=method)]
        with pytest.raises(EnvironmentNotReady) as caught:
            storage.write("b.json", b"{}") if method == "PUT" else storage.remove(["a.png"])
        assert said in caught.value.message and hint in caught.value.hint, code
        assert storage.read("a.png", 9) == b"12345"
    proxy.faults = [Fault("", 500, "InternalError")]
    with pytest.raises(EnvironmentNotReady, match=r"it fails to answer \(InternalError\)"):
        storage.write("b.json", b"{}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<Code>InvalidRequest</Code><Message>Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object "
         "requests with Object Lock parameters</Message>", "locked for some time (InvalidRequest)"),
        ("<Code>AccessDenied</Code><Message>Access denied.</Message><Details>Object 'b/a' is subject to bucket's "
         "retention policy and cannot be deleted or overwritten until 2027</Details>", "some time (AccessDenied)"),
        ("Bulk delete request failed for key a.json: This operation is not permitted as the blob is immutable due to a "
         "policy. (code: 409)", "it removes nothing: it keeps objects locked for some time (409)"),
        ("Bulk delete request failed for key retention/a.json: This request is not authorized to perform this "
         "operation using this permission. (code: 403)", "it removes nothing: access is denied (403)"),
    ],
)  # fmt: skip
def test_locks_that_stores_tell_in_words(text, said):
    status = "" if "Bulk" in text else "Server returned non-2xx status code: 403 Forbidden: "
    assert said in run_error(status + text, "bucket `b`", S3, removing=True).message


def test_a_bucket_with_object_lock_says_so(server, proxy):
    s3 = boto3.client(
        "s3", endpoint_url=server, region_name="us-east-1", aws_access_key_id="A", aws_secret_access_key="hidden"
    )
    s3.create_bucket(Bucket="locked", ObjectLockEnabledForBucket=True)
    rule = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}
    s3.put_object_lock_configuration(
        Bucket="locked", ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule}
    )
    with pytest.raises(StoreRefusal, match=r"locked for some time \(MissingUploadObjectWithObjectLockHeaders\)"):
        bucket_at(proxy, aws_bucket_name="locked").write("a.json", b"{}")


def test_an_object_is_removed_by_the_request_that_all_stores_have(server, proxy):
    """Not by that for many, which Google's S3 endpoint, JuiceFS 1.4.2 and others answer in ways of their own."""
    put(f"{server}/{BUCKET}/removed/a.json", b"{}")
    proxy.faults = [Fault("?delete", 501, "NotImplemented")]
    storage = bucket_at(proxy, "removed")
    storage.remove(["a.json", "never.json"])
    assert storage.all_sizes() == {} and not requests_for(proxy, "?delete")


def test_a_store_that_answers_ranges_with_whole_objects_is_read_so(server, proxy, tmp_path, capsys):
    content = {name: random.Random(name).randbytes(size) for name, size in SIZES.items()}
    for name, data in content.items():
        put(f"{server}/{BUCKET}/ranges/{name}", data)
    proxy.has_ranges = False
    storage = bucket_at(proxy, "ranges")
    assert storage.open_header("small.bin").read(10) == content["small.bin"][:10]
    assert "ranges" not in capsys.readouterr().err, "the whole is what was asked for"
    for name, requests in (("long.bin", 2), ("other.bin", 1)):
        with storage.open_header(name) as file:
            head = file.read(HEADER_BYTES + 9)
            file.seek(-7, os.SEEK_END)
            assert (head, file.read()) == (content[name][: len(head)], content[name][-7:])
        assert len(requests_for(proxy, name)) == requests
    kept = []
    assert storage.read_range("long.bin", 9, 5, kept.append) == content["long.bin"][9:14]
    assert kept == [content["long.bin"]]
    assert capsys.readouterr().err.count("it answers no ranges, so whole objects are read") == 1
    proxy.has_ranges = True
    kept = []
    assert bucket_at(proxy, "ranges").read_range("long.bin", 9, 5, kept.append) == content["long.bin"][9:14]
    assert kept == []


def test_a_network_that_fails_is_not_mistaken_for_a_damaged_image(proxy):
    storage = bucket_at(proxy, "whole")
    proxy.faults = [Fault("a.png", cut=0.5, times=1), Fault("a.png", 503, "SlowDown")]
    proxy.head_faults = True
    with pytest.raises(EnvironmentNotReady, match="it refuses requests"):
        storage.open("a.png")
    for address in ("http://127.0.0.1:9", "http://nothing.invalid"):
        away = bucket_at(proxy, aws_endpoint_url=address)
        with pytest.raises(EnvironmentNotReady, match=f"at {address.removeprefix('http://')} cannot be reached"):
            list(away.list_files({".png"}).files)


def test_a_bucket_that_is_not_there_and_a_key_that_is_no_path_are_named(server, proxy):
    with pytest.raises(DataError, match="bucket `missing` at .* does not exist"):
        list(bucket_at(proxy, aws_bucket_name="missing").list_files({".png"}).files)
    put(f"{server}/{BUCKET}/odd//a.png")
    with pytest.raises(DataError, match='Path "odd//a.png" contained empty path segment'):
        list(bucket_at(proxy, "odd").list_files({".png"}).files)


def test_the_endpoint_is_that_of_the_dataset_then_of_the_environment(proxy, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert [file.name for file in bucket_at(proxy, "whole").list_files({".png"}).files] == ["a.png"]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.address)
    storage = bucket_at(proxy, "whole", aws_endpoint_url=None)
    assert [file.name for file in storage.list_files({".png"}).files] == ["a.png"]


def test_credentials_are_those_of_the_dataset_then_of_the_environment_then_of_a_profile(proxy, tmp_path, monkeypatch):
    def signature(**values) -> tuple[str, str]:
        proxy.signatures.clear()
        none = dict.fromkeys(KEYS)
        list(bucket_at(proxy, "none", **{**none, **values}).list_files({".png"}).files)
        return proxy.signatures[0]

    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(EnvironmentNotReady, match="no credentials were found"):
        signature()
    home = tmp_path / "home" / ".aws"
    home.mkdir(parents=True)
    keys = "aws_access_key_id = {}\naws_secret_access_key = hidden%\n"
    profiles = ("[default]", keys.format("FILE"), "[two]", keys.format("TWO"), "aws_session_token = T2")
    (home / "credentials").write_text("\n".join(profiles))
    (home / "config").write_text("[profile two]\nregion = eu-west-1\n")
    assert signature() == ("FILE", "")
    monkeypatch.setenv("AWS_PROFILE", "two")
    assert signature() == ("TWO", "T2")
    for name, value in (("ACCESS_KEY_ID", "ENV"), ("SECRET_ACCESS_KEY", "hidden"), ("SESSION_TOKEN", "T1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    assert signature() == ("ENV", "T1")
    assert signature(**KEYS) == ("AKIAOWN", "")
    assert signature(**KEYS, aws_session_token="T3") == ("AKIAOWN", "T3")
    (home / "credentials").write_text("[two]\naws_secret_access_key hidden\n")
    with pytest.raises(EnvironmentNotReady, match="Unable to parse config file: .*credentials") as caught:
        signature()
    assert "hidden" not in caught.value.message + repr(images_at(proxy)) + repr(bucket_at) + caught.value.hint


def test_a_profile_may_have_its_credentials_from_a_process_or_a_login(proxy, tmp_path, monkeypatch):
    none = dict.fromkeys(KEYS)
    home = tmp_path / "home" / ".aws"
    home.mkdir(parents=True)
    given = '{"Version": 1, "AccessKeyId": "PROCESS", "SecretAccessKey": "hidden", "SessionToken": "T5"}'
    (tmp_path / "given.json").write_text(given)
    process = f"[profile process]\ncredential_process = cat {tmp_path}/given.json\n"
    missing = "[profile no_process]\ncredential_process = /nowhere/aws-keys\n"
    login = "sso_start_url = https://a.invalid\nsso_region = us-east-1\nsso_account_id = 1\nsso_role_name = r\n"
    (home / "config").write_text(f"{process}{missing}[profile login]\n{login}")
    monkeypatch.setenv("AWS_PROFILE", "process")
    list(bucket_at(proxy, "none", **none).list_files({".png"}).files)
    assert proxy.signatures == [("PROCESS", "T5")]
    for name, sentence in (
        ("gone", r"its AWS profile cannot be used: The config profile \(gone\) could not be found"),
        ("no_process", "its AWS profile cannot be used: .*/nowhere/aws-keys"),
        ("login", "its credentials have expired"),
    ):
        monkeypatch.setenv("AWS_PROFILE", name)
        with pytest.raises(EnvironmentNotReady, match=f"dataset `d`: .*{sentence}"):
            list(bucket_at(proxy, "none", **none).list_files({".png"}).files)


def test_a_table_is_an_object_below_the_prefix_or_a_local_file(server, proxy, tmp_path):
    local = tmp_path / "t.csv"
    local.write_text("file,caption\na,local")
    put(f"{server}/{BUCKET}/tables/t.csv", b"file,caption\na,stored")
    put(f"{server}/{BUCKET}/tables/u.csv", b"file,caption\na,changed")

    def captions(path: str) -> tuple[list, str]:
        block = TableSettings(path=Path(path), filename_column="file", caption_column=["caption"])
        dataset = images_at(proxy, "tables", caption_strategy="parquet", parquet=block)
        table = table_of(dataset, open_bucket(dataset))
        assert table is not None
        return table.rows()["captions"].to_pylist(), table.version()

    assert captions("t.csv")[0] == [["stored"]] and captions(str(local))[0] == [["local"]]
    assert captions("t.csv")[1] != captions("u.csv")[1] != captions(str(local))[1]
    with pytest.raises(DataError, match=f"the table s3://{BUCKET}/tables/no.csv does not exist"):
        captions("no.csv")
