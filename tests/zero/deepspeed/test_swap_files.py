from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from holders import holder

from simpletuner.deepspeed.swap_files import (
    OWNER_FILE,
    create_swap_folder,
    find_state,
    read_owner,
    remove_swap_folder,
)
from simpletuner.errors import EnvironmentNotReady
from simpletuner.tools.cache.clearing import clear
from simpletuner.tools.cache.contents import find_swap


def test_a_swap_folder_is_new_names_its_owner_and_is_removed_on_exit(tmp_path):
    with (
        create_swap_folder(tmp_path / "nvme", tmp_path / "run") as one,
        create_swap_folder(tmp_path / "nvme", tmp_path / "run") as other,
    ):
        assert one != other
        owner = read_owner(one)
        assert owner is not None and owner.output_dir == str(tmp_path / "run") and owner.is_this_machine
        assert find_state(one, owner) == "live"
        (one / "zero_stage_3").mkdir()
        (one / "zero_stage_3" / "0.tensor.swp").write_bytes(bytes(10))
    assert list((tmp_path / "nvme").iterdir()) == []


def test_the_folder_of_a_killed_process_is_dead(tmp_path):
    with holder("swap", tmp_path) as process:
        (folder,) = tmp_path.iterdir()
        owner = read_owner(folder)
        assert owner is not None and owner.pid == process.pid
        assert find_state(folder, owner) == "live"
        process.kill()
        process.wait()
        assert find_state(folder, owner) == "dead"


def test_a_folder_of_another_machine_is_not_judged_here(tmp_path):
    with holder("swap", tmp_path) as process:
        process.kill()
        process.wait()
    (folder,) = tmp_path.iterdir()
    facts = asdict(read_owner(folder))
    for host, boot, state in (("elsewhere", "other", "elsewhere"), ("elsewhere", facts["boot"], "dead")):
        (folder / OWNER_FILE).write_text(json.dumps(facts | {"host": host, "boot": boot}))
        assert find_state(folder, read_owner(folder)) == state
    (folder / OWNER_FILE).write_text(json.dumps(facts | {"boot": "before a restart"}))
    assert find_state(folder, read_owner(folder)) == "dead", "this machine, restarted since"


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"host": 1'])
def test_a_folder_without_a_readable_owner_is_foreign(tmp_path, content):
    folder = tmp_path / "simpletuner-swap-0"
    folder.mkdir()
    if content is not None:
        (folder / OWNER_FILE).write_text(content)
    assert read_owner(folder) is None
    assert find_state(folder, None) == "foreign"


def test_removing_does_not_follow_links_and_may_be_repeated(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    with create_swap_folder(tmp_path / "nvme", tmp_path) as folder:
        (folder / "link").symlink_to(outside)
        (folder / "deep" / "deeper").mkdir(parents=True)
        (folder / "deep" / "link").symlink_to(outside / "precious")
        remove_swap_folder(folder)
        assert not folder.exists()
        remove_swap_folder(folder)
    assert (outside / "precious").read_text() == "x"
    link = tmp_path / "simpletuner-swap-link"
    link.symlink_to(outside)
    assert read_owner(link) is None


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
        assert find_state(folder, read_owner(folder)) == "dead", "it is still known as ours"
    finally:
        subprocess.run(["umount", "-l", str(busy)], check=True)
    clear([item])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_created_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentNotReady, match="cannot offload to"), create_swap_folder(tmp_path / "file", tmp_path):
        pass
