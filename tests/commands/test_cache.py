"""`simpletuner cache`, as a user types it, on real files and with real runs."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import SMALL
from holders import holder
from patience import PATIENCE
from rich.filesize import decimal

from simpletuner.app import main
from simpletuner.caches.store.shards import ShardReader, ShardWriter
from simpletuner.system.files.cache_files import block_cache_paths, lock_of

PROGRAM = Path(sys.executable).with_name("simpletuner")


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """Work in an empty folder, with a user's home and cache of its own."""
    monkeypatch.setenv("SIMPLETUNER_HOME", str(tmp_path / "user-home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass
class Said:
    """What a command has printed."""

    stdout: str
    stderr: str


@pytest.fixture
def cache(home, capsys) -> Callable[..., Said]:
    """Run `simpletuner cache ...` without a terminal."""

    def run(*arguments: str, code: int = 0) -> Said:
        with pytest.raises(SystemExit) as ended:
            main(["cache", *arguments])
        said = Said(*capsys.readouterr())
        assert (ended.value.code or 0) == code, said.stderr
        assert "Traceback" not in said.stderr
        return said

    return run


def shards(folder: Path, *names: str, rank: int = 0) -> Path:
    with ShardWriter(folder, rank) as writer:
        for name in names:
            writer.write(name, {"file": "1"}, {"t": torch.zeros(100)})
    return folder


def blocks() -> Path:
    path, _ = block_cache_paths()
    path.parent.mkdir(parents=True)
    path.write_text('{"unet": ["Block"], "transformer": []}')
    return path


def listed(cache: Callable[..., Said], *flags: str) -> dict[str, dict]:
    """Return what `cache list --json` says by path."""
    return {item.pop("path"): item for item in json.loads(cache("list", "--json", *flags).stdout)}


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_list_finds_all_that_settings_name_and_counts_it(cache, home):
    latents, text = shards(home / "output/cache/latents/pictures", "a", "b"), shards(home / "my text", "c")
    shards(latents, "d", rank=1)
    path = blocks()
    found = listed(cache, f"--cache_dir_text={text}")
    assert found == {
        "output/cache/latents/pictures": {"kind": "latents", "entries": 3, "bytes": size(latents), "in_use": False},
        str(text): {"kind": "text", "entries": 1, "bytes": size(text), "in_use": False},
        str(path): {"kind": "blocks", "entries": 2, "bytes": path.stat().st_size, "in_use": False},
    }
    table = cache("list", f"--cache_dir_text={text}")
    row = next(line for line in table.stdout.splitlines() if "pictures" in line)
    assert row.split() == ["latents", "output/cache/latents/pictures", "3", *decimal(size(latents)).split(), "no"]
    assert "3 caches" in table.stderr


def test_datasets_of_a_file_and_a_config_file_say_where_to_look(cache, home):
    for name in ("here", "default-place/one", "text"):
        shards(home / name, "a")
    (home / "data.json").write_text(
        json.dumps(
            [
                {"id": "one", "instance_data_dir": "p"},
                {"id": "two", "instance_data_dir": "q", "cache_dir_vae": "here"},
                {"id": "t", "dataset_type": "text_embeds", "cache_dir": "text"},
            ]
        )
    )
    (home / "run.toml").write_text('data_backend_config = "data.json"\ncache_dir_vae = "default-place"\n')
    found = listed(cache, "--config=run.toml")
    assert {path: item["kind"] for path, item in found.items()} == {
        "here": "latents",
        "default-place/one": "latents",
        "text": "text",
    }


def test_nothing_cached_is_said_so(cache):
    assert cache("list").stdout == ""
    assert json.loads(cache("list", "--json").stdout) == []
    done = cache("clear", "all", "--yes")
    assert done.stdout == "" and "nothing to remove" in done.stderr


def test_clear_removes_what_was_asked_for_and_says_where_and_how_many_bytes(cache, home):
    latents, text = shards(home / "output/cache/latents/p", "a"), shards(home / "output/cache/text", "b")
    path, other_path = blocks(), home / "elsewhere" / "fsdp_block_cache.json"
    other_path.parent.mkdir()
    other_path.write_text("{}")
    assert len(list(ShardReader(latents).records())) == 1
    bytes_there = size(latents)
    for spelling in ("--dry_run", "--dry-run"):
        done = cache("clear", "latents", spelling)
        assert f"would remove 1 cache, {bytes_there} bytes" in done.stderr
        assert "output/cache/latents/p" in done.stdout
    assert latents.exists()
    done = cache("clear", "latents", "--yes")
    assert f"removed {bytes_there} bytes" in done.stderr
    assert "output/cache/latents/p" in done.stdout and str(bytes_there) in done.stdout
    assert not latents.exists()
    assert len(list(ShardReader(text).records())) == 1 and path.exists()
    cache("clear", "blocks")  # asks nothing: it is made anew in seconds
    assert not path.exists() and text.exists()
    assert json.loads(cache("clear", "text", "blocks", "--yes", "--json").stdout)[0]["kind"] == "text"
    assert not text.exists()
    assert other_path.exists()


def test_what_is_not_ours_stays_and_is_named(cache, home):
    latents = shards(home / "output/cache/latents/p", "a")
    outside = home / "outside.shard"
    outside.write_text("precious")
    (latents / "notes.txt").write_text("mine")
    (latents / "mine.shard").write_text("mine")
    (latents / "rank007-00000.shard").symlink_to(outside)
    (home / "output/cache/latents/link").symlink_to(shards(home / "another run", "a"))
    (home / "elsewhere").mkdir()
    done = cache("clear", "all", "--yes")
    for name in ("notes.txt", "mine.shard", "rank007-00000.shard"):
        assert name in done.stderr
    assert sorted(path.name for path in latents.iterdir()) == ["mine.shard", "notes.txt", "rank007-00000.shard"]
    assert outside.read_text() == "precious"
    assert len(list(ShardReader(home / "another run").records())) == 1


def test_latents_and_text_in_one_folder_are_only_cleared_together(cache, home):
    both = shards(home / "both", "a")
    flags = (f"--cache_dir_vae={both}", f"--cache_dir_text={both}", "--yes")
    for kind in ("latents", "text"):
        assert "latents and text in the same files" in cache("clear", kind, *flags, code=2).stderr
    assert len(listed(cache, *flags[:2])) == 1
    inside = shards(both / "text", "b")
    cache("clear", "latents", f"--cache_dir_vae={both}", f"--cache_dir_text={inside}", "--yes")
    assert [path.name for path in both.iterdir()] == ["text"], "a text cache below the latents is not latents"
    cache("clear", "latents", "text", f"--cache_dir_vae={both}", f"--cache_dir_text={inside}", "--yes")
    assert not inside.exists()


def test_what_a_run_holds_is_refused_until_it_is_killed(cache, home):
    latents, text = shards(home / "output/cache/latents/p", "a"), shards(home / "output/cache/text", "b")
    path = blocks()
    with holder("cache", latents) as process:
        assert listed(cache)["output/cache/latents/p"]["in_use"] is True
        for how in ("--yes", "--dry_run"):
            done = cache("clear", "all", how, code=3)
            assert "output/cache/latents/p is in use by a run" in done.stderr and "hint:" in done.stderr
        assert path.exists() and len(list(ShardReader(text).records())) == 1, "all that was asked for, or nothing"
        assert len(list(ShardReader(latents).records())) == 1
        process.kill()
        process.wait()
        cache("clear", "all", "--yes")
        assert not path.exists() and not latents.exists() and not text.exists()


def test_swap_folders_go_with_their_runs_and_others_are_named(cache, home):
    nvme = home / "nvme"
    (nvme / "zero_stage_3").mkdir(parents=True)
    (nvme / "zero_stage_3" / "x.swp").write_text("not ours")
    (nvme / "photos").mkdir()
    path = blocks()
    with holder("swap", nvme) as dead, holder("swap", nvme) as alive:
        for process in (dead, alive):
            (Path(process.held) / "zero_stage_3").mkdir()
            (Path(process.held) / "zero_stage_3" / "x.swp").write_bytes(bytes(1000))
        dead.kill()
        dead.wait()
        found = listed(cache, f"--offload_param_path={nvme}")
        assert [found[process.held]["in_use"] for process in (dead, alive)] == [False, True]
        done = cache("clear", "deepspeed", f"--offload_param_path={nvme}", "--yes")
        assert not Path(dead.held).exists() and dead.held in done.stdout
        assert (Path(alive.held) / "zero_stage_3" / "x.swp").stat().st_size == 1000
        assert f"left: {alive.held}: in use by pid {alive.pid}" in done.stderr and alive.held not in done.stdout
    assert "not written by simpletuner, left:" in done.stderr and str(nvme / "zero_stage_3") in done.stderr
    assert "photos" not in done.stderr
    assert (nvme / "zero_stage_3" / "x.swp").exists() and path.exists()
    with holder("file", lock_of(block_cache_paths()[0])):
        cache("clear", "deepspeed", f"--offload_param_path={nvme}", "--yes")  # knows nothing of blocks
    assert sorted(each.name for each in nvme.iterdir()) == ["photos", "zero_stage_3"]


def test_without_a_terminal_nothing_but_blocks_is_removed_unasked(cache, home):
    latents = shards(home / "output/cache/latents/p", "a")
    blocks()
    for kinds in (["latents"], ["all"], ["blocks", "latents"]):
        done = cache("clear", *kinds, code=2)
        assert "hint:" in done.stderr and "--yes" in done.stderr
    assert latents.exists() and block_cache_paths()[0].exists()


@pytest.mark.parametrize(("answer", "stays"), [("n", True), ("", True), ("y", False), ("yes", False)])
def test_at_a_terminal_it_asks(home, answer, stays):
    latents = shards(home / "output/cache/latents/p", "a")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [PROGRAM, "cache", "clear", "latents"], cwd=home, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        os.write(ours, f"{answer}\n".encode())
        _, said = process.communicate(timeout=PATIENCE)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0
    assert b"remove 1 cache" in said
    assert latents.exists() is stays


@pytest.mark.parametrize(
    "arguments", [["clear"], ["clear", "lattents", "--yes"], ["clear", "text", "--yes", "--sed=1"]]
)
def test_mistakes_end_with_2_and_name_what_can_be_said(cache, arguments):
    done = cache(*arguments, code=2)
    assert done.stdout == "" and "hint:" in done.stderr
    assert "latents" in done.stderr or "--sed" in done.stderr


def test_what_vanishes_meanwhile_is_no_error(home):
    from simpletuner.tools.cache import clearing
    from simpletuner.tools.cache.contents import CacheKind, find_blocks, find_shards, find_swap

    latents, nvme = shards(home / "latents", "a"), home / "nvme"
    blocks()
    with holder("swap", nvme) as process:
        process.kill()
    items = [*find_blocks(), *find_shards(CacheKind.LATENTS, [latents]), *find_swap(nvme)[0]]
    assert [item.kind.value for item in items] == ["blocks", "latents", "deepspeed"]
    for folder in (block_cache_paths()[0].parent, latents, nvme):
        subprocess.run(["rm", "-r", folder], check=True)
    assert clearing.clear(items) == 0


def test_a_training_run_holds_its_caches_on_every_rank_and_a_killed_one_does_not(
    cache, home, sdxl_uncached, starter, train
):
    output = home / "run"
    flags = (f"--output_dir={output}", *sdxl_uncached, "--train_batch_size=2")
    run = starter.train(2, *SMALL, *flags, "--max_train_steps=100000")
    end = time.monotonic() + PATIENCE
    while not (output / "metrics.jsonl").exists():
        assert time.monotonic() < end, run.said
        time.sleep(0.05)
    assert [item["in_use"] for item in listed(cache, *flags).values()] == [True, True]
    first, second = run.processes
    os.kill(second.pid, signal.SIGSTOP)  # or it would end with the first
    first.kill()
    first.join()
    assert "in use by a run" in cache("clear", "latents", *flags, "--yes", code=3).stderr
    run.kill()
    run.wait()
    entries = {item["kind"]: item["entries"] for item in listed(cache, *flags).values()}
    assert entries["latents"] == 36 and entries["text"] > 0
    cache("clear", "latents", "text", *flags, "--yes")
    assert not list(output.rglob("*.shard"))
    again = train(output, *sdxl_uncached, "--train_batch_size=4", "--max_train_steps=1")
    assert "encoding 36 images" in again.said
