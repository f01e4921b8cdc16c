from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from holders import holder

from simpletuner.deepspeed.swap_files import OWNER, claimed, owner_of, remove, state_of
from simpletuner.errors import EnvironmentNotReady
from simpletuner.tools.cache.clearing import clear
from simpletuner.tools.cache.contents import find_swap


def test_a_claimed_folder_is_new_says_whose_it_is_and_goes_in_the_end(tmp_path):
    with claimed(tmp_path / "nvme", tmp_path / "run") as one, claimed(tmp_path / "nvme", tmp_path / "run") as other:
        assert one != other
        owner = owner_of(one)
        assert owner is not None and owner.output_dir == str(tmp_path / "run") and owner.is_here
        assert state_of(one, owner) == "live"
        (one / "zero_stage_3").mkdir()
        (one / "zero_stage_3" / "0.tensor.swp").write_bytes(bytes(10))
    assert list((tmp_path / "nvme").iterdir()) == []


def test_the_folder_of_a_killed_process_is_dead(tmp_path):
    with holder("swap", tmp_path) as process:
        (folder,) = tmp_path.iterdir()
        owner = owner_of(folder)
        assert owner is not None and owner.pid == process.pid
        assert state_of(folder, owner) == "live"
        process.kill()
        process.wait()
        assert state_of(folder, owner) == "dead"


def test_a_folder_of_another_machine_is_not_judged_here(tmp_path):
    with holder("swap", tmp_path) as process:
        process.kill()
        process.wait()
    (folder,) = tmp_path.iterdir()
    facts = asdict(owner_of(folder))
    for host, boot, state in (("elsewhere", "other", "elsewhere"), ("elsewhere", facts["boot"], "dead")):
        (folder / OWNER).write_text(json.dumps(facts | {"host": host, "boot": boot}))
        assert state_of(folder, owner_of(folder)) == state
    (folder / OWNER).write_text(json.dumps(facts | {"boot": "before a restart"}))
    assert state_of(folder, owner_of(folder)) == "dead", "this machine, restarted since"


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"host": 1'])
def test_a_folder_without_a_readable_owner_is_not_ours(tmp_path, content):
    folder = tmp_path / "simpletuner-swap-0"
    folder.mkdir()
    if content is not None:
        (folder / OWNER).write_text(content)
    assert owner_of(folder) is None
    assert state_of(folder, None) == "foreign"


def test_removing_does_not_follow_links_and_may_be_repeated(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    with claimed(tmp_path / "nvme", tmp_path) as folder:
        (folder / "link").symlink_to(outside)
        (folder / "deep" / "deeper").mkdir(parents=True)
        (folder / "deep" / "link").symlink_to(outside / "precious")
        remove(folder)
        assert not folder.exists()
        remove(folder)
    assert (outside / "precious").read_text() == "x"
    link = tmp_path / "simpletuner-swap-link"
    link.symlink_to(outside)
    assert owner_of(link) is None


def test_a_removal_that_fails_can_be_repeated(tmp_path):
    with holder("swap", tmp_path) as process:
        process.kill()
    folder, busy = Path(process.held), Path(process.held) / "zzz"
    busy.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(busy)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        (item,), _ = find_swap(tmp_path)
        with pytest.raises(EnvironmentNotReady, match=rf"cannot remove {busy}: .*busy"):
            clear([item])
        assert state_of(folder, owner_of(folder)) == "dead", "it is still known as ours"
    finally:
        subprocess.run(["umount", "-l", str(busy)], check=True)
    clear([item])
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_nothing_can_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentNotReady, match="cannot offload to"), claimed(tmp_path / "file", tmp_path):
        pass
