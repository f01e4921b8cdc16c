"""Training from a bucket: the losses of the folder that was uploaded, and no secret in anything that is written."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from conftest import SMALL
from patience import PATIENCE
from s3_server import BUCKET, Fault, Proxy, s3_proxy, s3_server, upload

from simpletuner.app import main

SECRETS = {
    "aws_access_key_id": "AKIAUNSEEN7",
    "aws_secret_access_key": "keyunseen7",
    "aws_session_token": "tokenunseen7",
}


@pytest.fixture
def proxy(shapes, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with s3_server() as server, s3_proxy(server) as proxy:
        upload(server, shapes, "set/")
        yield proxy


def dataset_file(path: Path, **values: object) -> str:
    path.write_text(json.dumps([{"id": "d", **values}], indent=1))
    return f"--data_backend_config={path}"


def in_bucket(path: Path, proxy: Proxy, **values: object) -> str:
    place = {"aws_bucket_name": BUCKET, "aws_data_prefix": "set", "aws_endpoint_url": proxy.address, **SECRETS}
    return dataset_file(path, type="aws", **{**place, **values})


def assert_nothing_hidden(folder: Path, said: str) -> None:
    texts = [said.encode(), *(path.read_bytes() for path in folder.rglob("*") if path.is_file())]
    assert len(texts) > 1 and not [text for text in texts if b"unseen7" in text.lower()]


def test_two_ranks_train_from_a_bucket_as_from_the_folder(sdxl, shapes, train, proxy, tmp_path):
    model = ("--model_family=sdxl", f"--pretrained_model_name_or_path={sdxl}", "--max_train_steps=3")
    files = tmp_path / "files"
    files.mkdir()
    folder = dataset_file(files / "local.json", instance_data_dir=str(shapes))
    bucket = in_bucket(files / "s3.json", proxy)
    local = train(tmp_path / "local", *model, folder, world=2)
    proxy.faults = [Fault("list-type", 503, "SlowDown", times=2), Fault(".png", cut=0.5, times=3)]
    away = train(tmp_path / "away", *model, bucket, world=2)
    assert away.losses == local.losses and len(away.losses) == 3
    assert_nothing_hidden(away.output, away.said)

    proxy.requests.clear()
    again = train(tmp_path / "away", *model, "--max_train_steps=4", bucket, world=2)
    assert len(again.rows) == 4
    assert {"list-type" in path for path, _ in proxy.requests} == {True}

    proxy.faults = [Fault(".png", 400, "ExpiredToken")]
    stopped = train(tmp_path / "stopped", *model, bucket, "--debug", code=1)
    assert f"dataset `d`: bucket `{BUCKET}` at" in stopped.said and "its credentials have expired" in stopped.said
    assert_nothing_hidden(stopped.output, stopped.said)
    proxy.faults = []
    gone = train(
        tmp_path / "gone", *model, in_bucket(files / "gone.json", proxy, aws_bucket_name="gone"), world=2, code=4
    )
    assert "bucket `gone` at" in gone.said and "does not exist" in gone.said
    assert_nothing_hidden(tmp_path / "gone", gone.said)


def entries_in_bucket(proxy: Proxy, **values: object) -> list[dict[str, object]]:
    """Images, their latents and their text embeddings, all in one bucket."""
    place = {"type": "aws", "aws_bucket_name": BUCKET, "aws_endpoint_url": proxy.address, **SECRETS, **values}
    caches = [{"id": each, "dataset_type": f"{each}_embeds", "aws_data_prefix": f"cache/{each}", **place}
              for each in ("image", "text")]  # fmt: skip
    return [{"id": "d", "aws_data_prefix": "set", "image_embeds": "image", **place}, *caches]


def test_two_ranks_cache_in_the_bucket_and_another_output_dir_finds_all_of_it_there(
    sdxl, shapes, train, starter, proxy, tmp_path, capsys
):
    model = ("--model_family=sdxl", f"--pretrained_model_name_or_path={sdxl}", "--max_train_steps=3")
    (tmp_path / "files").mkdir()
    folder = dataset_file(tmp_path / "files" / "local.json", instance_data_dir=str(shapes))
    file = tmp_path / "files" / "s3.json"
    file.write_text(json.dumps(entries_in_bucket(proxy)))
    bucket = f"--data_backend_config={file}"
    local = train(tmp_path / "local", *model, folder, world=2)

    proxy.faults = [Fault("cache/image/rank", 503, "SlowDown")]  # text goes to the bucket, latents cannot
    killed = starter.train(2, f"--output_dir={tmp_path / 'away'}", *SMALL, *model, bucket)
    end = time.monotonic() + PATIENCE
    while sum(path.read_bytes().count(b"\n") for path in tmp_path.glob("away/cache/image_embeds/image/*.jsonl")) < 8:
        assert time.monotonic() < end and all(each.is_alive() for each in killed.processes), killed.said
        time.sleep(0.001)
    killed.kill()
    killed.wait()
    proxy.faults = [Fault(".shard", 503, "SlowDown", times=2), Fault(".jsonl", 500, "InternalError", times=1)]
    away = train(tmp_path / "away", *model, bucket, world=2)
    assert away.losses == local.losses and len(away.losses) == 3
    captions = re.compile(r"encoding (\d+ of )?\d+ captions")
    assert captions.search(killed.said) and not captions.search(away.said)
    assert "encoding 36 images" in killed.said and "encoding 36 images" not in away.said
    assert_nothing_hidden(away.output, away.said)
    config = ("--model_family=sdxl", f"--output_dir={away.output}", bucket)
    with pytest.raises(SystemExit):
        main(["cache", "clear", "latents", "--yes", *config])
    said = "".join(capsys.readouterr()).replace("\n", " ")
    assert f"is the local copy of s3://{BUCKET}/cache/image; `cache clear` leaves" in said
    assert not [*away.output.glob("cache/image_embeds/image/*")] and [*away.output.glob("cache/text_embeds/text/*")]

    proxy.requests.clear()
    proxy.faults = [Fault(".shard", cut=0.5, times=3), Fault(".shard", 503, "SlowDown", times=2)]
    elsewhere = train(tmp_path / "elsewhere", *model, bucket, world=2)
    assert elsewhere.losses == local.losses and "making" not in elsewhere.said
    assert all(part for path, part in proxy.requests if ".shard" in path), "records are read, not shards"
    assert_nothing_hidden(elsewhere.output, elsewhere.said)

    proxy.faults = [Fault(".shard", 404, "NoSuchBucket")]
    gone = train(tmp_path / "gone", *model, bucket, code=4)
    assert "does not exist" in gone.said and "Traceback" not in gone.said


def test_no_command_shows_a_secret(sdxl, proxy, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    (tmp_path / "written").mkdir()
    config = tmp_path / "files" / "run.toml"
    bucket = in_bucket(tmp_path / "files" / "s3.json", proxy)
    (tmp_path / "files" / "s3.json").write_text(json.dumps(entries_in_bucket(proxy), indent=1))
    config.write_text(f'model_family = "sdxl"\npretrained_model_name_or_path = "{sdxl}"\noutput_dir = "out"\n'
                      f'data_backend_config = "{bucket.partition("=")[2]}"\n')  # fmt: skip
    in_bucket(tmp_path / "files" / "mistakes.json", proxy, aws_session_token=["unseen7"], instance_data_dir="hid")
    said = ""
    for code, *command in (
        (0, "config", "validate", str(config)),
        (0, "config", "show", f"--config={config}"),
        (0, "train", "--dry_run", f"--config={config}"),
        (0, "cache", "list", f"--config={config}"),
        (0, "config", "import", str(tmp_path / "files" / "s3.json"), "--output=written/new.json"),
        (2, "train", f"--config={config}", f"--data_backend_config={tmp_path / 'files' / 'mistakes.json'}"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(command)
        shown = "".join(capsys.readouterr())
        assert int(caught.value.code or 0) == code, shown
        said += shown
    assert "aws_session_token = ..." in said and "a secret is not copied" in said
    assert json.loads((tmp_path / "written" / "new.json").read_text())[0]["aws_bucket_name"] == BUCKET
    assert_nothing_hidden(tmp_path / "written", said)
    for package in ("boto3", "obstore"):
        monkeypatch.setitem(sys.modules, package, None)  # what Python has for a package that cannot be imported
        with pytest.raises(SystemExit) as caught:
            main(["train", f"--config={config}"])
        assert caught.value.code == 3
        shown = capsys.readouterr().err
        sentence = f"dataset `d` is in S3, and {package} is not installed"
        assert sentence in shown and "pip install 'obstore>=0.12' 'boto3>=1.35'" in shown
