from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import nfs_recorded
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpletuner.system.files.mounts import MOUNTINFO, Mount, find_mount, parse_mount, parse_mountinfo, unescape
from simpletuner.tools.nfs.mounts import (
    MountScope,
    check_mount,
    fstab_line,
    locks_fix,
    mount_of_node,
    mount_warnings,
    name_of,
    recipe,
    scope_of,
    server_of,
)
from simpletuner.tools.nfs.rendezvous import Node

PATH = PurePosixPath("/mnt/shared")


def recorded(line: str, path: str = str(PATH)) -> Mount:
    mount = parse_mount(line.format(path=path))
    assert mount is not None
    return mount


@pytest.mark.parametrize(
    ("line", "name", "reach", "server"),
    [
        ("NFS4", "NFS 4.2", MountScope.SHARED, "10.0.0.100"),
        ("NFS3", "NFS 3", MountScope.SHARED, "filer"),
        ("EFS", "Amazon EFS (NFS 4.1)", MountScope.SHARED, "fs-0123456789abcdef0.efs.eu-west-1.amazonaws.com"),
        ("EFS_TUNNEL", "Amazon EFS (NFS 4.1)", MountScope.SHARED, "127.0.0.1"),
        ("LUSTRE", "Lustre", MountScope.SHARED, "10.0.1.1@tcp"),
        ("CEPH", "CephFS", MountScope.SHARED, "10.0.2.1"),
        ("CEPH_NEW", "CephFS", MountScope.SHARED, ""),
        ("CEPH_FUSE", "CephFS (fuse)", MountScope.SHARED, ""),
        ("SSHFS", "sshfs", MountScope.SHARED, "ubuntu@10.0.0.100"),
        ("BEEGFS", "BeeGFS", MountScope.SHARED, ""),
        ("GPFS", "IBM Storage Scale (GPFS)", MountScope.SHARED, ""),
        ("SMB", "SMB", MountScope.SHARED, ""),
        ("S3FS", "s3fs", MountScope.SHARED, ""),
        ("RCLONE", "rclone", MountScope.SHARED, ""),
        ("GLUSTER", "GlusterFS", MountScope.SHARED, "server"),
        ("BINDFS", "FUSE (bindfs or another)", MountScope.UNKNOWN, ""),
        ("MERGERFS", "mergerfs", MountScope.UNKNOWN, ""),
        ("GOCRYPTFS", "gocryptfs", MountScope.UNKNOWN, ""),
        ("OVERLAY", "overlay", MountScope.LOCAL, ""),
        ("TMPFS", "tmpfs", MountScope.LOCAL, ""),
        ("XFS", "xfs", MountScope.LOCAL, ""),
        ("BIND_OF_EXT4", "ext4", MountScope.LOCAL, ""),
        ("VIRTIOFS", "virtiofs", MountScope.UNKNOWN, ""),
        ("UNHEARD_OF", "newfs", MountScope.UNKNOWN, ""),
    ],
)
def test_every_filesystem_is_known_by_its_recorded_line(line, name, reach, server):
    mount = recorded(getattr(nfs_recorded, line))
    assert (name_of(mount), scope_of(mount), server_of(mount)) == (name, reach, server)
    assert mount.point == PATH


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("NFS4", "pass", "/mnt/shared is NFS 4.2 from 10.0.0.100:/export/output, rw, hard"),
        ("NFS3", "pass", "NFS 3"),
        ("NFS3_NOLOCK", "warn", "`soft`"),
        ("NFS3_NOLOCK", "warn", "`nolock`"),
        ("NFS4_READ_ONLY", "fail", "read-only"),
        ("EFS", "pass", "Amazon EFS"),
        ("LUSTRE", "pass", "Lustre"),
        ("LUSTRE_NO_FLOCK", "warn", "no `flock`"),
        ("LUSTRE_LOCALFLOCK", "warn", "`localflock`"),
        ("CEPH", "pass", "CephFS"),
        ("SSHFS", "warn", "keeps locks on one node only"),
        ("S3FS", "warn", "objects"),
        ("SMB", "warn", "`nobrl`"),
        ("BEEGFS", "pass", "BeeGFS"),
        ("VIRTIOFS", "warn", "host of this virtual machine"),
        ("UNHEARD_OF", "warn", "does not know"),
        ("BINDFS", "warn", "FUSE (bindfs or another) from /srv/output, rw, a filesystem over another one"),
        ("MERGERFS", "warn", "shared if that is"),
        ("XFS", "fail", "2 nodes cannot share it"),
        ("TMPFS", "fail", "2 nodes cannot share it"),
        ("BIND_OF_EXT4", "fail", "(its folder /srv/output)"),
    ],
)
def test_two_nodes_are_told_what_a_mount_means_for_them(line, status, words):
    finding = check_mount(Node(Path(PATH), nodes=2), recorded(getattr(nfs_recorded, line)), {})
    assert finding.status == status
    assert words in finding.seen
    assert bool(finding.fix) == (status != "pass")


@pytest.mark.parametrize(
    ("line", "words", "others"),
    [
        ("NFS4", "nolock", "Lustre"),
        ("LUSTRE", "`flock`", "NFS"),
        ("SSHFS", "however it is mounted: use NFS 4", "nolock"),
        ("S3FS", "however it is mounted: use NFS 4", "nolock"),
        ("SMB", "nobrl", "NFS"),
    ],
)
def test_locks_are_mended_by_what_the_mount_is(line, words, others):
    fixes = " ".join(locks_fix(recorded(getattr(nfs_recorded, line)).fstype))
    assert words in fixes and others not in fixes
    assert {"NFS:", "Lustre:"} <= set(" ".join(locks_fix("newfs")).split())


@pytest.mark.parametrize("line", ["XFS", "TMPFS", "OVERLAY", "BIND_OF_EXT4"])
def test_one_node_may_use_its_own_disk(line):
    assert check_mount(Node(Path(PATH)), recorded(getattr(nfs_recorded, line)), {}).status == "pass"


def test_the_line_for_fstab_mends_the_options_and_leaves_out_what_is_negotiated():
    fixes = [fix for _, fix in mount_warnings(recorded(nfs_recorded.NFS3_NOLOCK))]
    assert fixes[0].startswith("in /etc/fstab: filer:/vol/output /mnt/shared nfs rw,")
    options = fixes[0].split(" ")[5].split(",")
    assert "hard" in options
    assert "soft" not in options
    assert not [option for option in options if option.startswith(("addr=", "mountaddr=", "local_lock="))]
    assert "nolock" not in fixes[1].split(" ")[5].split(",")
    spaced = recorded(nfs_recorded.NFS4, r"/mnt/my\040runs")
    assert r" /mnt/my\040runs nfs4 " in fstab_line(spaced)


def test_the_recipe_begins_with_this_nodes_part_and_names_what_it_can():
    own, other = recipe("/out", "10.1.2.3", 0), recipe("/out", "", 1)
    assert "/out 10.1.2.0/24(rw,sync,no_subtree_check)" in own[1]
    assert "exportfs" in own[1]
    assert other[0].startswith("on the others: ")
    assert "sudo mount NODE0:/out /out" in other[0]
    assert "nfs defaults,_netdev 0 0" in other[1]


def table(*lines: str) -> list[Mount]:
    return parse_mountinfo("\n".join(lines))


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("/", 30),
        ("/mnt/shared/run", 50),
        ("/mnt/sharedness", 30),
        ("/mnt/shared", 50),
        ("/run/user", 24),
        ("/data/deep/x", 62),
        ("/hidden/below", 71),
        ("/with space/x", 80),
    ],
)
def test_the_mount_of_a_path_is_the_one_that_the_kernel_walks_to(path, number):
    mounts = table(
        "24 30 0:20 / /run rw - tmpfs tmpfs rw",  # comes before the root, as after an initramfs
        "30 1 254:0 / / rw - ext4 /dev/vda1 rw",
        "40 30 0:50 / /mnt/shared rw - nfs old:/ rw",
        "50 40 0:51 / /mnt/shared rw - nfs4 new:/ rw",  # over the one before
        "60 30 0:52 / /data rw - xfs /dev/sdb rw",
        "61 60 0:53 / /data/deep rw - xfs /dev/sdc rw",
        "62 61 0:54 / /data/deep rw - nfs4 s:/ rw",
        "70 30 0:55 / /hidden/below rw - nfs4 s:/ rw",
        "71 30 0:56 / /hidden rw - tmpfs tmpfs rw",  # hides the one before
        r"80 30 0:57 / /with\040space rw - nfs4 s:/my\040export rw",
    )
    found = find_mount(PurePosixPath(path), mounts)
    assert found is not None
    assert found.number == number


def test_escapes_are_undone_and_odd_lines_left_out():
    (mount,) = table("", "nonsense", "x y 0:1 / /a rw - ext4 /dev/a rw", r"1 0 0:1 /a\134b /c\011d rw - t s\040t rw")
    assert (mount.root, str(mount.point), mount.source) == ("/a\\b", "/c\td", "s t")
    assert find_mount(PurePosixPath("/elsewhere"), [mount]) is None


names = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), min_size=1
)
names = names.filter(lambda name: name not in (".", ".."))


def escaped(text: str) -> str:
    return "".join(f"\\{ord(letter):03o}" if letter in " \t\n\\" else letter for letter in text)


@given(st.lists(names, min_size=1, max_size=3), st.lists(names, max_size=2))
def test_any_mount_point_is_read_back_and_found(point, below):
    path = "/" + "/".join(point)
    lines = ["1 0 0:1 / / rw - ext4 /dev/a rw", f"2 1 0:2 / {escaped(path)} rw,x shared:1 - nfs4 s:/e rw,vers=4.2"]
    found = find_mount(PurePosixPath(path, *below), table(*lines))
    assert found is not None
    assert (found.number, str(found.point), found.value_of("vers")) == (2, path, "4.2")
    assert unescape(escaped(path)) == path


def test_of_mounts_on_one_point_of_one_parent_the_last_counts():
    lines = ["1 0 0:1 / / rw - ext4 /dev/a rw", *(f"{n} 1 0:{n} / /a rw - nfs4 s:/{n} rw" for n in (2, 3, 4))]
    found = find_mount(PurePosixPath("/a/b"), table(*lines))
    assert found is not None and found.number == 4


@given(st.text())
def test_no_text_breaks_the_reader(text):
    find_mount(PurePosixPath("/a/b"), parse_mountinfo(text))


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from(["/", "/a", "/a/b", "/c"])), max_size=6)
)
def test_what_is_found_always_covers_the_path(rows):
    mounts = table(*(f"{number} {parent} 0:1 / {point} rw - t s rw" for number, parent, point in rows))
    found = find_mount(PurePosixPath("/a/b/c"), mounts)
    assert (found is None) == (not any(point in ("/", "/a", "/a/b") for _, _, point in rows))
    assert found is None or found.covers(PurePosixPath("/a/b/c"))


@pytest.mark.skipif(not MOUNTINFO.exists(), reason="Linux only")
@pytest.mark.parametrize("path", ["/", "/proc/self", "/sys/kernel", "/dev/shm", "/tmp"])
def test_this_machines_mounts_are_those_that_stat_knows(path):
    if not Path(path).exists():
        pytest.skip(f"no {path} here")
    real = Path(path).resolve()
    found = mount_of_node(Node(real))
    assert found is not None
    numbers = {line.split(" ")[2] for line in MOUNTINFO.read_text().splitlines() if line.startswith(f"{found.number} ")}
    device = real.stat().st_dev
    assert numbers == {f"{os.major(device)}:{os.minor(device)}"}
