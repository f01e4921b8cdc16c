"""Two and three real processes as nodes on one folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from nfs_recorded import LOCAL_ROOT, NFS3_NOLOCK, RCLONE
from patience import PATIENCE
from real_mounts import bindfs, or_skipped, sshfs_views

from simpletuner.tools.nfs.results import CHECKS
from simpletuner.tools.nfs.workspace import Workspace, arriving


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a node as another user")


def wait_for(condition, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def test_three_nodes_on_a_good_folder_pass_every_check_and_leave_nothing(nodes):
    three = nodes.check({}, {}, {}, address="127.0.0.1", port=free_port())
    for rank, node in enumerate(three):
        assert node.code == 0, node.said
        assert node.statuses() == dict.fromkeys(CHECKS, "pass"), node.result
        assert node.result["status"] == "pass"
        assert [other["node_rank"] for other in node.result["others"]] == [r for r in range(3) if r != rank]
    assert "NFS 4.2 from 10.0.0.100:/export/output" in three[0]["mount"]["seen"]
    assert not nodes.path.exists()  # the check made it


def test_what_was_in_the_folder_stays(nodes):
    nodes.path.mkdir()
    (nodes.path / "settings.json").write_text("{}")
    nodes.check({}, {})
    assert nodes.left_behind() == [nodes.path / "settings.json"]


def test_folders_above_are_made_and_removed_again_but_not_those_that_were_there(nodes):
    top = nodes.path
    top.mkdir()
    nodes.path = top / "2026" / "run"
    (only,) = nodes.check({})
    assert only.result["status"] == "pass"
    assert list(top.iterdir()) == []


def test_nodes_that_make_the_folder_at_the_same_moment_do_not_disturb_each_other(tmp_path):
    """In 473 of 500 pairs one failed with EEXIST where both recorded what they had made."""
    together = threading.Barrier(2)

    def make(number: int) -> Workspace:
        workspace = Workspace(tmp_path / f"{number}" / "2026" / "run")
        together.wait()
        workspace.create()
        return workspace

    with ThreadPoolExecutor(2) as nodes:
        for number in range(50):
            (made, _) = [arrived.result() for arrived in [nodes.submit(make, number) for _ in range(2)]]
            made.remove_if_empty()
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_arrives_while_the_last_one_leaves_makes_the_folder_again(tmp_path):
    leaving, arrivals = Workspace(tmp_path / "run"), []

    def arrive() -> None:
        leaving.create()
        if not arrivals:
            leaving.remove_if_empty()
        arrivals.append(leaving.probe(0))
        arrivals[-1].touch()

    arriving(arrive)
    assert arrivals == [leaving.probe(0)] * 2


def test_a_local_folder_on_two_nodes_fails_with_the_way_to_share_it(nodes):
    nodes.mountinfo.write_text("25 1 254:0 / / rw,relatime - ext4 /dev/vda1 rw\n")
    first, second = nodes.check({}, {}, address="10.0.0.100", port=free_port())
    for node in (first, second):
        assert node["mount"]["status"] == "fail"
        assert "/ is ext4 from /dev/vda1, rw, a local filesystem: 2 nodes cannot share it" in node["mount"]["seen"]
        fixes = "\n".join(node["mount"]["fix"])
        assert f"{nodes.path} 10.0.0.0/24(rw,sync,no_subtree_check)" in fixes
        assert f"sudo mount 10.0.0.100:{nodes.path} {nodes.path}" in fixes
    for node in (first, second):
        assert node["mount"]["fix"][0].startswith("give a folder that all nodes share")
    assert first["mount"]["fix"][1].startswith("on node 0")
    assert second["mount"]["fix"][1].startswith("on the others")


def test_a_local_folder_that_one_node_serves_to_the_others_is_right(nodes, tmp_path):
    local = tmp_path / "local"
    local.write_text("25 1 254:0 / / rw,relatime - ext4 /dev/vda1 rw\n")
    first, second = nodes.check({"mountinfo": str(local)}, {})
    assert first["mount"]["seen"].endswith("which this node serves to node 1")
    assert (first.result["status"], second.result["status"]) == ("warn", "warn")  # for the port without an address


def test_a_cautious_word_about_the_mount_reaches_the_other_node(nodes, tmp_path):
    risky = tmp_path / "risky"
    risky.write_text(f"25 1 254:0 / / rw - ext4 /dev/vda1 rw\n{NFS3_NOLOCK.format(path=nodes.path)}\n")
    first, second = nodes.check({}, {"mountinfo": str(risky)})
    assert second["mount"]["status"] == "warn"
    assert "`soft`" in second["mount"]["seen"]
    (told,) = first.result["others"]
    assert told["checks"][0] == second["mount"]


def test_a_missing_node_is_named_with_what_it_should_run(nodes, tmp_path):
    """On a mount that lists files minutes late, it may have been started."""
    late = tmp_path / "late"
    late.write_text(f"{LOCAL_ROOT}\n{RCLONE.format(path=nodes.path)}\n")
    mounts = {0: {}, 2: {"mountinfo": str(late)}}
    process = [nodes.start(rank, 3, timeout_seconds=1.5, **mounts[rank]) for rank in (0, 2)]
    for rank, out in zip((0, 2), (nodes.end(p) for p in process), strict=True):
        assert out.result["status"] == "fail"
        assert out["see"]["seen"] == "node 1 did not come within 1.5 s", rank
        assert out["see"]["fix"] == [
            f"on node 1: simpletuner nfs check --path={nodes.path} --nodes=3 --node-rank=1",
            *(
                [
                    "where they were started, this mount shows their files late: mount with `rclone mount "
                    "--dir-cache-time=5s --poll-interval=0`: its default is 5 minutes"
                ]
                if rank == 2
                else []
            ),
        ]
        assert out["lock"] == {
            "check": "lock",
            "status": "skip",
            "seen": "not checked: the nodes did not meet",
            "fix": [],
            "values": {},
        }
        assert (out["write"]["status"], out["space"]["status"]) == ("pass", "skip" if rank == 2 else "pass")
    assert not nodes.path.exists()


def test_nodes_that_disagree_on_their_number_say_so(nodes):
    processes = [nodes.start(0, 2, timeout_seconds=2), nodes.start(1, 3, timeout_seconds=2)]
    first, second = map(nodes.end, processes)
    assert first["see"]["seen"] == "node 1 was started with --nodes 3, this one with --nodes 2"
    assert second["see"]["status"] == "fail"


def test_a_clock_that_is_wrong_is_measured_on_both_nodes(nodes):
    first, second = nodes.check({}, {"clock_ahead": 120.0})
    assert first["clock"]["status"] == second["clock"]["status"] == "fail"
    assert abs(first["clock"]["values"]["offset_seconds"] - 120) < 0.5
    assert abs(second["clock"]["values"]["offset_seconds"] + 120) < 0.5
    assert "ahead of this node" in first["clock"]["seen"]
    assert "behind this node" in second["clock"]["seen"]
    assert "timedatectl" in first["clock"]["fix"][0]
    assert first["see"]["status"] == "pass"  # round trips are measured on one clock


def test_a_clock_that_is_a_little_wrong_is_a_warning(nodes):
    first, second = nodes.check({"clock_ahead": -5.0}, {})
    assert first["clock"]["status"] == second["clock"]["status"] == "warn"


def test_locks_that_hold_on_one_node_only_are_found_by_all(nodes):
    first, second = nodes.check({"locks": "only here"}, {"locks": "only here"})
    for node in (first, second):
        assert node["lock"]["status"] == "fail"
        assert node["lock"]["seen"] == "node 1 got the lock that node 0 was holding: locks are not shared"
        assert "nolock" in node["lock"]["fix"][0]


def test_a_node_whose_locks_are_only_its_own_is_named(nodes):
    first, _, third = nodes.check({}, {}, {"locks": "only here"})
    assert first["lock"]["seen"] == third["lock"]["seen"]
    assert first["lock"]["seen"].startswith("node 2 got the lock")


def test_a_mount_without_locks_is_found(nodes):
    first, second = nodes.check({}, {"locks": "unknown"})
    assert first["lock"]["seen"] == second["lock"]["seen"]
    assert "node 1: this mount has no working locks" in first["lock"]["seen"]
    assert "ENOSYS" in first["lock"]["seen"]


@only_root
def test_another_user_is_found(open_nodes):
    first, second = open_nodes.check({}, {"user": 1234})
    assert first["identity"]["status"] == second["identity"]["status"] == "fail"
    assert "uid differs (node 0: root 0, node 1: uid 1234 1234)" in first["identity"]["seen"]
    assert first["identity"]["fix"] == ["start every node as the same user: uid 0, gid 0"]
    assert open_nodes.left_behind() == []


@only_root
def test_another_user_who_may_not_write_is_found_although_the_nodes_meet(open_nodes):
    path = open_nodes.path
    path.chmod(0o755)
    started = open_nodes.start(0)
    wait_for(lambda: (path / ".simpletuner-nfs-check" / "0-card.json").exists())
    first, second = map(open_nodes.end, [started, open_nodes.start(1, user=1234)])
    assert second["write"]["status"] == "fail"
    assert f"no permission to write in {path} (EACCES, uid:gid 1234:1234)" in second["write"]["seen"]
    assert f"sudo chown 1234:1234 {path}" in second["write"]["fix"][0]
    assert (first["write"]["status"], first.result["status"]) == ("pass", "fail")
    assert first.result["others"][0]["checks"][1] == second["write"]
    assert open_nodes.left_behind() == []


def test_the_port_in_use_is_told_by_both_nodes(nodes):
    with socket.create_server(("", 0)) as busy:
        port = busy.getsockname()[1]
        first, second = nodes.check({}, {}, address="127.0.0.1", port=port)
    for node in (first, second):
        assert node["port"]["seen"] == f"port {port} of node 0 is already in use"
        assert f"sport = :{port}" in node["port"]["fix"][0]


def test_a_port_that_cannot_be_reached_is_told_by_both_nodes_with_the_firewall_command(nodes):
    if os.geteuid() != 0 or subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("cannot make a network of its own for a node")
    port = free_port()
    processes = [
        nodes.start(0, address="127.0.0.1", port=port),
        nodes.start(1, before=("unshare", "-n"), address="127.0.0.1", port=port),
    ]
    for node in map(nodes.end, processes):
        assert node["port"]["status"] == "fail"
        assert "node 1: Network is unreachable" in node["port"]["seen"]
        assert f"sudo ufw allow {port}/tcp" in node["port"]["fix"][0]


def test_another_program_at_the_address_is_not_taken_for_node_0(nodes):
    if os.geteuid() != 0 or subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("cannot make a network of its own for a node")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        processes = [
            nodes.start(0, before=("unshare", "-n"), address="127.0.0.1", port=port),
            nodes.start(1, address="127.0.0.1", port=port),
        ]
        caller, _ = stranger.accept()
        caller.sendall(b"220 mail\r\n")
        caller.close()
        first, second = map(nodes.end, processes)
    assert "node 1: somebody else than node 0 answers there" in first["port"]["seen"]
    assert second["port"]["seen"] == first["port"]["seen"]


def test_without_an_address_the_port_is_a_warning_and_with_two_a_failure(nodes):
    first, _ = nodes.check({}, {})
    assert (first["port"]["status"], first.result["status"]) == ("warn", "warn")
    first, second = nodes.check({"address": "127.0.0.1"}, {"address": "127.0.0.2"})
    assert first["port"]["status"] == second["port"]["status"] == "fail"
    assert "different addresses" in first["port"]["seen"]


def test_a_second_process_of_the_same_rank_is_refused_with_host_and_pid_and_the_first_goes_on(nodes):
    first = nodes.start(0)
    wait_for(lambda: (nodes.path / ".simpletuner-nfs-check" / "0-card.json").exists())
    refused = nodes.end(nodes.start(0))
    assert refused["see"]["status"] == "fail"
    assert refused["see"]["seen"] == f"node rank 0 is already taken by process {first.pid} on {socket.gethostname()}"
    second = nodes.end(nodes.start(1))
    assert nodes.end(first)["see"]["status"] == second["see"]["status"] == "pass"
    assert not nodes.path.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_node_leaves_nothing(nodes, number):
    process = nodes.start(0)
    wait_for(lambda: (nodes.path / ".simpletuner-nfs-check" / "0-card.json").exists())
    time.sleep(0.1)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    wait_for(lambda: not nodes.path.exists())


def test_a_node_that_dies_in_the_midst_is_named_at_once_and_leaves_nothing(nodes):
    began = time.monotonic()
    first, second = nodes.check({}, {"locks": "deadly"}, timeout_seconds=120)
    assert second.code == -signal.SIGKILL
    assert time.monotonic() - began < 60
    assert first["lock"]["seen"] == "not finished: node 1 ended before it was through"
    assert first["rename"]["status"] == "pass"
    assert (first.result["status"], first.result["silent"]) == ("fail", [1])
    assert not nodes.path.exists()


@pytest.mark.parametrize("where", ["here", "on a lost machine"])
def test_what_a_dead_session_left_is_taken_over(nodes, where):
    """The cleanup process cannot help where a machine lost its power: all files of the session stay."""
    folder = nodes.path / ".simpletuner-nfs-check"
    process = nodes.start(0)
    wait_for(lambda: (folder / "0-card.json").stat().st_size if (folder / "0-card.json").exists() else False)
    card = (folder / "0-card.json").read_text()
    process.kill()
    process.communicate()
    wait_for(lambda: not nodes.path.exists())
    folder.mkdir(parents=True)
    boot = "another" if where != "here" else ""
    changed = card.replace(r"\"boot\": \"", rf"\"boot\": \"{boot}")  # the card is JSON in JSON, as signed messages are
    assert (changed == card) == (where == "here")
    (folder / "0-card.json").write_text(changed)
    (folder / "0-lock").touch()
    (folder / "0-seen").mkdir()
    first, second = nodes.check({}, {})
    assert first["see"]["status"] == second["see"]["status"] == "pass", first.result
    assert nodes.left_behind() == []


def test_a_lock_that_cannot_be_taken_at_all_is_told(nodes):
    first, second = nodes.check({"locks": "taken"}, {})
    assert first["lock"]["seen"] == second["lock"]["seen"]
    assert first["lock"]["seen"] == "node 0 could not take a lock on a new file: another process holds it"


def test_a_file_that_is_away_for_a_moment_while_it_is_replaced_is_seen(nodes):
    """A filesystem whose rename first removes the old name."""
    process, ending = nodes.start(0, 1), threading.Event()
    path = nodes.path / ".simpletuner-nfs-check" / "0-renamed"

    def keep_removing() -> None:
        while not ending.is_set():
            path.unlink(missing_ok=True)

    remover = threading.Thread(target=keep_removing)
    remover.start()
    told = nodes.end(process)
    ending.set()
    remover.join()
    assert told["rename"]["status"] == "fail"
    assert told["rename"]["values"]["missing"] > 0
    assert "use NFS 4, Lustre or CephFS" in told["rename"]["fix"][0]


def own_view(view: Path, share: Path) -> tuple[str, ...]:
    """Return what starts a command in a mount namespace in which `share` is a machine's own mount."""
    inside = f'mount --make-rprivate / && mount --bind "{view}" "{share}" && exec "$@"'
    return ("unshare", "-m", "sh", "-c", inside, "sh")


def test_two_views_of_sshfs_list_late_and_have_locks_of_their_own(nodes, tmp_path):
    late = [f"dcache_{what}timeout=3" for what in ("", "stat_", "dir_", "link_")]
    nodes.path.mkdir()
    with or_skipped(), sshfs_views(tmp_path, *late) as views:
        given = {"mountinfo": "/proc/self/mountinfo", "late_seconds": 1}
        started = [nodes.start(rank, before=own_view(view, nodes.path), **given) for rank, view in enumerate(views)]
        both = list(map(nodes.end, started))
        for node in both:
            assert node["see"]["status"] == "warn", node.result
            assert "in a folder that was listed before, a new file was not listed for" in node["see"]["seen"]
            assert 1 < node["see"]["values"]["listed_seconds"] < PATIENCE
            assert node["see"]["fix"] == ["mount with `sshfs -o dir_cache=no`"]
            assert "sshfs keeps locks on one node only" in node["mount"]["seen"]
            assert node["lock"]["status"] == "fail" and "however it is mounted" in node["lock"]["fix"][0]
            assert node["rename"]["status"] in ("pass", "warn") and node["rename"]["values"]["half"] == 0
            assert node["rename"]["values"]["replaced"] >= 30


def test_fuse_over_a_local_disk_is_named_for_what_it_is_and_suits_a_run(nodes, tmp_path):
    with or_skipped(), bindfs(tmp_path) as nodes.path:
        for node in nodes.check({}, {}, mountinfo="/proc/self/mountinfo"):
            assert node["rename"]["status"] in ("pass", "warn"), "a run reads again what it misses"
            assert node["rename"]["values"]["replaced"] >= 30
            assert "FUSE (bindfs or another)" in node["mount"]["seen"]
            assert node["lock"]["status"] == "pass"
    assert list((tmp_path / "below").iterdir()) == []


def test_a_read_only_folder_is_told_and_left_as_it_was(nodes, mounted, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    nodes.path = mounted(nodes.path, "--bind", str(source))
    subprocess.run(["mount", "-o", "remount,ro,bind", str(nodes.path)], check=True)
    (told,) = nodes.check({}, mountinfo="/proc/self/mountinfo")
    assert told["write"]["seen"].startswith(f"{nodes.path} is read-only (EROFS")
    assert "remount,rw" in told["write"]["fix"][0]
    assert told["mount"]["status"] == "fail"
    assert told["mount"]["seen"].endswith("read-only")
    assert told["see"]["seen"].startswith("cannot meet: ")
    assert list(source.iterdir()) == []


def test_a_full_folder_is_told_and_left_as_it_was(nodes, mounted):
    nodes.path = mounted(nodes.path, "-t", "tmpfs", "-o", "size=64k", "none")
    with pytest.raises(OSError, match="No space"):
        (nodes.path / "full").write_bytes(b"x" * 100_000)
    (told,) = nodes.check({})
    assert told["write"]["seen"].startswith(f"no room is left at {nodes.path} (ENOSPC")
    assert told["write"]["fix"][0].startswith("df -h")
    assert (told["space"]["status"], told["space"]["values"]["free_bytes"]) == ("warn", 0)
    assert [path.name for path in nodes.left_behind()] == ["full"]


def test_a_filesystem_that_never_answers_ends_the_check(nodes):
    """Opening a pipe that nobody reads waits for ever, as a write does when the file server is down."""
    nodes.path.mkdir()
    os.mkfifo(nodes.path / ".simpletuner-nfs-check.probe-0")
    told = nodes.end(nodes.start(0, 1, timeout_seconds=1))
    assert (told.code, told.result) == (3, {})
    assert f"error: {nodes.path} has not answered for" in told.said
    assert "(in `write`)" in told.said
    wait_for(lambda: nodes.left_behind() == [])
