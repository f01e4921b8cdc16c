"""A run whose folder is mirrored in a bucket: what the bucket holds, and what another machine makes of it."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from buckets_here import bucket_server
from conftest import SMALL, Ranks
from patience import PATIENCE
from s3_server import BUCKET

from simpletuner.data.config.places import mirror_place
from simpletuner.data.storage.object_storage import ObjectStorage, open_bucket

ADDRESS = f"s3://{BUCKET}/runs/one"
MIRROR = (f"--mirror_output={ADDRESS}", "--checkpoint_step_interval=2", "--checkpoints_total_limit=2")
HELD_OUT = ("--eval_split=0.2", "--eval_step_interval=2", "--eval_timesteps=2")


@pytest.fixture
def config(tmp_path) -> Iterator[str]:
    """Serve a bucket; return the flag that names what opens it."""
    with bucket_server(tmp_path) as (_, file):
        yield f"--config={file}"


def bucket() -> ObjectStorage:
    return open_bucket(mirror_place(ADDRESS))


def names(storage: ObjectStorage) -> set[str]:
    return {name for name in storage.all_sizes() if not name.startswith(".")}


def kept(folder: Path) -> set[str]:
    """Return the names in a run's folder that belong into the bucket."""
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith(("cache/", "."))}


def wait_for_step(output: Path, run: Ranks, step: int) -> None:
    metrics, end = output / "metrics.jsonl", time.monotonic() + PATIENCE
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        assert all(each.is_alive() for each in run.processes) and time.monotonic() < end, run.said
        time.sleep(0.02)


def steps_of(storage: ObjectStorage) -> list[str]:
    return sorted({name.split("/")[1] for name in names(storage) if name.startswith("checkpoints/checkpoint-")})


@pytest.mark.long
def test_a_fresh_machine_goes_on_from_the_bucket_alone(sdxl_flags, train, config, tmp_path):
    prompts = ("--validation_prompt=a red circle", "--validation_step_interval=2", "--validation_num_inference_steps=1")
    flags = (config, *sdxl_flags, *MIRROR, *HELD_OUT, *prompts, "--train_batch_size=4", "--use_ema")
    whole = train(tmp_path / "whole", *flags, "--mirror_output=", "--max_train_steps=8")
    first = train(tmp_path / "first", *flags, "--max_train_steps=4")
    assert names(bucket()) == kept(first.output) and steps_of(bucket()) == ["checkpoint-000002", "checkpoint-000004"]
    for name in sorted(kept(first.output)):
        assert bucket().read(name, 1 << 30) == (first.output / name).read_bytes(), name
    assert b'"state": "finished"' in bucket().read("status.json", 1 << 20)
    shutil.rmtree(first.output)

    second = train(tmp_path / "second", *flags, "--max_train_steps=8")
    assert f"downloading {ADDRESS}/checkpoints/checkpoint-000004" in second.said
    assert second.losses == whole.losses and len(second.losses) == 8
    assert names(bucket()) == kept(second.output) | {
        name for name in names(bucket()) if name.startswith("checkpoints/")
    }
    assert steps_of(bucket()) == ["checkpoint-000006", "checkpoint-000008"]
    grids = {path.name for path in second.output.glob("validation/grid-*.png")}
    assert grids == {path.name for path in whole.output.glob("validation/grid-*.png")}
    started = (second.output / "log.txt").read_text().count("started: simpletuner")
    assert started == 2, "the log goes on"
    shutil.rmtree(second.output)

    flags = (*flags, "--train_batch_size=2")  # on two ranks from here on
    third = train(tmp_path / "third", *flags, "--max_train_steps=8", world=2)
    assert "finished already, after 8 steps" in third.said
    shutil.rmtree(third.output)

    back = train(tmp_path / "back", *flags, "--max_train_steps=8", "--resume_from_checkpoint=6", world=2)
    assert f"downloading {ADDRESS}/checkpoints/checkpoint-000006" in back.said
    assert back.losses == pytest.approx(whole.losses, rel=1e-5)
    assert f"later checkpoints are set aside in {ADDRESS}: checkpoints/checkpoint-000008" in back.said
    assert "checkpoints/set-aside/checkpoint-000008/state.json" in names(bucket())
    assert steps_of(bucket()) == ["checkpoint-000006", "checkpoint-000008"]
    said = "".join(run.said for run in (first, second, third, back))
    assert "hidden7" not in said and "warning: mirror" not in said


def test_a_machine_that_is_taken_away_saves_and_uploads_before_it_leaves(sdxl_flags, starter, train, config, tmp_path):
    output, notice = tmp_path / "taken", tmp_path / "notice"
    flags = (config, *SMALL, *sdxl_flags, f"--mirror_output={ADDRESS}", "--train_batch_size=4")
    run = starter.train(
        1, f"--output_dir={output}", *flags, "--max_train_steps=100000", f"--preemption_check=test -e {notice}"
    )
    wait_for_step(output, run, 2)
    notice.touch()
    [code] = run.wait()
    assert code == 143, run.said
    assert "preemption_check: this machine will be taken away\nstopping: finishing step" in run.said
    [step] = re.findall(r"stopped by SIGTERM at step (\d+); its checkpoint is saved", run.said)
    assert f"all of {output} is in {ADDRESS}" in run.said
    assert b'"state": "stopped"' in bucket().read("status.json", 1 << 20)
    shutil.rmtree(output)
    again = train(tmp_path / "again", *flags, f"--max_train_steps={int(step) + 1}")
    assert f"downloading {ADDRESS}/checkpoints/checkpoint-{int(step):06d}" in again.said
    assert [row["step"] for row in again.rows if "loss" in row] == [*range(1, int(step) + 2)]
