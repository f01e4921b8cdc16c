"""Mount real file systems on this machine, each twice as two machines see it, and print what each does, row by row.

    python tests/campaigns/real/mounts.py [--install] [--only=sshfs,overlay] [--folder=/var/tmp]

Root only; `--install` gets what is missing from Debian. It runs itself in a mount namespace (`unshare -m -u`), which
takes all mounts with it. The rows are those of docs/nfs.md; it fails where a reader of the product (`read_file`) misses
a file that is being replaced, or a folder that cannot be renamed is not moved. Six minutes, most of it waiting for
listings that are late.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support"), str(Path(__file__).parent)]

from installing import NotHere, from_apt  # noqa: E402
from real_mounts import CannotMount, bindfs, mounted, overlay, sshfs_views  # noqa: E402
from s3_server import BUCKET, s3_server  # noqa: E402

from simpletuner.system.files.atomic import move_folder  # noqa: E402
from simpletuner.system.files.regular_files import read_file  # noqa: E402

PACKAGES = {
    "sshfs": ("sshfs", "openssh-sftp-server"),
    "bindfs": ("bindfs",),
    "mergerfs": ("mergerfs",),
    "gocryptfs": ("gocryptfs",),
    "glusterd": ("glusterfs-server",),
    "s3fs": ("s3fs",),
    "rclone": ("rclone",),
}
"""Packages of Debian 12, by the program that they bring."""
LATE_SECONDS = 60.0
NOT_SEEN = f"not seen after {LATE_SECONDS:.0f} s"
REPLACING_SECONDS = 4.0
FILES = 20
"""Files of the folder that is renamed."""
Views = tuple[Path, Path]
"""A folder as two machines see it; twice the same where a file system has one view."""


@contextmanager
def plain(base: Path) -> Iterator[Views]:
    (base / "plain").mkdir()
    yield base / "plain", base / "plain"


@contextmanager
def tmpfs(base: Path) -> Iterator[Views]:
    with mounted(base / "tmpfs", "mount", "-t", "tmpfs", "-osize=64m", "tmpfs", str(base / "tmpfs")) as point:
        yield point, point


@contextmanager
def overlaid(base: Path) -> Iterator[Views]:
    (base / "lower" / "of the image").mkdir(parents=True)
    (base / "lower" / "of the image" / "file").write_text("lower")
    with overlay(base) as point:
        yield point, point


@contextmanager
def over_sshfs(base: Path, *options: str) -> Iterator[Views]:
    with sshfs_views(base, *options) as views:
        yield views[0], views[1]


@contextmanager
def over_bindfs(base: Path) -> Iterator[Views]:
    with bindfs(base) as point:
        yield point, point


@contextmanager
def merged(base: Path) -> Iterator[Views]:
    disks = [base / "disk1", base / "disk2"]
    for disk in disks:
        disk.mkdir()
    given = ("-ocategory.create=epmfs", ":".join(map(str, disks)))
    with mounted(base / "merged", "mergerfs", *given, str(base / "merged")) as point:
        yield point, point


@contextmanager
def encrypted(base: Path) -> Iterator[Views]:
    cipher, given = base / "cipher", ("gocryptfs", "-q", "-nosyslog", "-extpass", "echo word")
    cipher.mkdir()
    subprocess.run([*given, "-init", str(cipher)], check=True, capture_output=True)
    with mounted(base / "open", *given, str(cipher), str(base / "open")) as point:
        yield point, point


@contextmanager
def gluster(base: Path) -> Iterator[Views]:
    name, brick = f"simpletuner{os.getpid()}", base / "brick"
    brick.mkdir()
    daemon = subprocess.Popen(["glusterd", "-N", "-L", "ERROR"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def volume(*words: str) -> None:
        done = subprocess.run(["gluster", "--mode=script", "volume", *words], capture_output=True, text=True)
        if done.returncode:
            raise CannotMount(f"gluster: {(done.stderr or done.stdout).strip()}")

    try:
        wait_until(lambda: subprocess.run(["gluster", "pool", "list"], capture_output=True).returncode == 0, 30)
        volume("create", name, f"{os.uname().nodename}:{brick}", "force")
        volume("start", name)
        with ExitStack() as stack:
            points = [base / f"gluster{number}" for number in range(2)]
            server = f"{os.uname().nodename}:/{name}"
            first, second = (
                stack.enter_context(mounted(point, "mount", "-t", "glusterfs", server, str(point))) for point in points
            )
            yield first, second
    finally:
        for words in (("stop", name, "force"), ("delete", name)):
            subprocess.run(["gluster", "--mode=script", "volume", *words], capture_output=True)
        daemon.terminate()
        daemon.wait()


@contextmanager
def objects_by_s3fs(base: Path) -> Iterator[Views]:
    password = base / "password"
    password.write_text("key:secret\n")
    password.chmod(0o600)
    with s3_server() as address, ExitStack() as stack:
        given = (f"-ourl={address}", "-ouse_path_request_style", f"-opasswd_file={password}")
        points = [base / f"s3fs{number}" for number in range(2)]
        first, second = (stack.enter_context(mounted(each, "s3fs", BUCKET, str(each), *given)) for each in points)
        yield first, second


@contextmanager
def objects_by_rclone(base: Path) -> Iterator[Views]:
    with s3_server() as address, ExitStack() as stack:
        store = f":s3,provider=Other,access_key_id=key,secret_access_key=secret,endpoint='{address}':{BUCKET}"
        given = ("--daemon", "--vfs-cache-mode=full")
        points = [base / f"rclone{number}" for number in range(2)]
        first, second = (
            stack.enter_context(
                mounted(each, "rclone", "mount", *given, f"--cache-dir={base / each.name}.cache", store, str(each))
            )
            for each in points
        )
        yield first, second


SYSTEMS: dict[str, tuple[str, Callable[[Path], AbstractContextManager[Views]]]] = {
    "plain": ("", plain),
    "tmpfs": ("", tmpfs),
    "overlay": ("", overlaid),
    "bindfs": ("bindfs", over_bindfs),
    "gocryptfs": ("gocryptfs", encrypted),
    "mergerfs": ("mergerfs", merged),
    "sshfs": ("sshfs", over_sshfs),
    "sshfs dir_cache=no": ("sshfs", lambda base: over_sshfs(base, "dir_cache=no")),
    "glusterfs": ("glusterd", gluster),
    "s3fs": ("s3fs", objects_by_s3fs),
    "rclone": ("rclone", objects_by_rclone),
}
"""The program that each needs, and how it is mounted."""


def wait_until(condition: Callable[[], bool], seconds: float) -> float | None:
    """Return after how many seconds something is so; None where it is not."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return None
        time.sleep(0.02)
    return time.monotonic() - began


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def word(action: Callable[[], str]) -> str:
    """Return what a row says, or the name of the errno with which it ends."""
    try:
        return action()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))


def seconds(waited: float | None) -> str:
    return f"after {LATE_SECONDS:.0f} s not" if waited is None else "at once" if waited < 1 else f"{waited:.0f} s"


def locks(here: Path, there: Path) -> str:
    (here / "lock").write_text("")
    if wait_until((there / "lock").exists, LATE_SECONDS) is None:
        return NOT_SEEN
    with (here / "lock").open("r+b") as first, (there / "lock").open("r+b") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "all machines" if here != there else "one view"
    return "one machine"


def creating(here: Path, there: Path) -> str:
    """Let both create the same file exclusively, at the same moment, twenty times."""
    won_twice, barrier = 0, threading.Barrier(2)
    for number in range(20):
        won: list[bool] = []

        def create(folder: Path, name: str = f"exclusive{number}", won: list[bool] = won) -> None:
            barrier.wait()
            try:
                (folder / name).open("xb").close()
                won.append(True)
            except OSError:
                pass

        threads = [threading.Thread(target=create, args=(each,)) for each in (here, there)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        won_twice += len(won) > 1
    return f"{won_twice} of 20 won twice"


def listing(here: Path, there: Path) -> str:
    (here / "listed").mkdir()
    (here / "listed" / "old").write_text("old")
    if wait_until(lambda: "listed" in names_in(there) and "old" in names_in(there / "listed"), LATE_SECONDS) is None:
        return NOT_SEEN
    (here / "listed" / "new").write_text("new")
    (here / "listed" / "old").unlink()
    asked = {
        "new by name": lambda: (there / "listed" / "new").exists(),
        "listed": lambda: "new" in names_in(there / "listed"),
        "removed by name": lambda: not (there / "listed" / "old").exists(),
        "from the list": lambda: "old" not in names_in(there / "listed"),
    }
    began, found = time.monotonic(), dict[str, float | None].fromkeys(asked)
    while None in found.values() and time.monotonic() - began < LATE_SECONDS:
        for each in (each for each in asked if found[each] is None and asked[each]()):
            found[each] = time.monotonic() - began
        time.sleep(0.02)
    return ", ".join(f"{each} {seconds(waited)}" for each, waited in found.items())


REPLACING = """
import os, sys, time
end, number = time.monotonic() + float(sys.argv[2]), 0
while time.monotonic() < end:
    with open(sys.argv[1] + ".new", "wb") as file:
        file.write(b"%09d" % number * 500)
    os.replace(sys.argv[1] + ".new", sys.argv[1])
    number += 1
    time.sleep(0.002)
"""


def replacing(here: Path, there: Path, faults: list[str]) -> str:
    """Read a file that another process replaces, by both views; return how many reads found what else than a file."""
    path, seen = here / "replaced", Counter[str]()
    path.write_bytes(bytes(9) * 500)
    is_seen = wait_until((there / "replaced").exists, LATE_SECONDS) is not None
    with subprocess.Popen([sys.executable, "-c", REPLACING, str(path), str(REPLACING_SECONDS)]) as process:
        while process.poll() is None:
            for each in dict.fromkeys((path, there / "replaced") if is_seen else (path,)):
                seen["reads"] += 1
                try:
                    content = each.read_bytes()
                    seen["half"] += content != content[:9] * 500
                except OSError as error:
                    seen[errno.errorcode[error.errno or 0]] += 1
                try:
                    read_file(each)
                except OSError as error:
                    faults.append(f"read_file({each}): {error}")
    found = ", ".join(f"{count:,} {what}" for what, count in seen.items() if count and what != "reads")
    return f"{found or 'none'} of {seen['reads']:,}"


def renaming(here: Path, there: Path, faults: list[str]) -> str:
    """Rename a folder of some files back and forth while the other view lists it; then one of a lower layer, if any."""
    names, seen = ("folder-a", "folder-b"), Counter[str]()
    (here / names[0]).mkdir()
    for number in range(FILES):
        (here / names[0] / f"{number}").write_text("content")
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            for name in names:
                try:
                    found = len(names_in(there / name))
                    seen["part" if 0 < found < FILES else "whole"] += 1
                except OSError:
                    pass

    looking = threading.Thread(target=look)
    looking.start()
    began = time.monotonic()
    try:
        for number in range(6):
            (here / names[number % 2]).rename(here / names[1 - number % 2])
    finally:
        ended.set()
        looking.join()
    took = f"{1000 * (time.monotonic() - began) / 6:.0f} ms, a part seen {seen['part']} times"
    return "; ".join([took, *of_lower_layer(here, faults)])


def of_lower_layer(here: Path, faults: list[str]) -> list[str]:
    lower = here / "of the image"
    if not lower.exists():
        return []
    said = word(lambda: str(lower.rename(here / "moved").name))
    if lower.exists():
        move_folder(lower, here / "moved")
    if (here / "moved" / "file").read_text() != "lower" or lower.exists():
        faults.append("a folder of the lower layer was not moved")
    return [f"of a lower layer {said}"]


def linking(here: Path, there: Path) -> str:
    (here / "first").write_text("content")
    os.link(here / "first", here / "second")
    first, second = (here / "first").stat(), (here / "second").stat()
    return f"{first.st_nlink} names, {'one' if first.st_ino == second.st_ino else 'another'} inode"


def timing(here: Path, there: Path) -> str:
    (here / "timed").write_text("content")
    os.utime(here / "timed", ns=(0, 1_700_000_000_123_456_789))
    kept = (here / "timed").stat().st_mtime_ns % 10**9
    return {123_456_789: "ns", 0: "s"}.get(kept, f"{kept} ns of 123456789")


def room(here: Path, there: Path) -> str:
    state = os.statvfs(here)
    free = state.f_bavail * state.f_frsize
    return "a constant" if free > 10**15 else f"real, {'with' if state.f_files else 'without'} inodes"


def version_of(program: str) -> str:
    if not program:
        return f"Linux {os.uname().release.partition('-')[0]}"
    asked = ["dpkg-query", "-W", "-f", "${Version}", PACKAGES[program][0]]
    return subprocess.run(asked, capture_output=True, text=True).stdout.partition("-")[0].partition("+")[0]


def rows(name: str, base: Path, install: bool, faults: list[str]) -> list[str]:
    """Return a row of the table. Raises CannotMount or NotHere."""
    program, mount = SYSTEMS[name]
    if program:
        from_apt(PACKAGES[program], program, install)
    with mount(base) as (here, there):
        asked: list[Callable[[], str]] = [
            lambda: locks(here, there),
            lambda: creating(here, there),
            lambda: listing(here, there),
            lambda: replacing(here, there, faults),
            lambda: renaming(here, there, faults),
            lambda: linking(here, there),
            lambda: timing(here, there),
            lambda: room(here, there),
        ]
        return [f"{name} {version_of(program)}", *map(word, asked)]


def in_namespace(arguments: Sequence[str], script: str = __file__) -> None:
    """Run a script again in a mount namespace of its own."""
    if os.environ.get("SIMPLETUNER_IN_NAMESPACE"):
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        return
    os.environ["SIMPLETUNER_IN_NAMESPACE"] = "1"
    os.execvp("unshare", ["unshare", "-m", "-u", sys.executable, script, *arguments])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*SYSTEMS])
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"))
    given = parser.parse_args(arguments)
    in_namespace(arguments)
    os.environ.pop("AWS_CA_BUNDLE", None)  # rclone 1.60 refuses to start with one
    columns = [
        "",
        "locks",
        "O_EXCL",
        "listing",
        "replaced: reads without it",
        "folder renamed",
        "link",
        "mtime",
        "room",
    ]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    faults: list[str] = []
    for name in given.only:
        base = Path(tempfile.mkdtemp(prefix="simpletuner-mounts-", dir=given.folder))
        try:
            print(f"| {' | '.join(rows(name, base, given.install, faults))} |", flush=True)
        except (CannotMount, NotHere) as why:
            print(f"{name}: skipped, {why}", flush=True)
        finally:
            shutil.rmtree(base, ignore_errors=True)
    print(time.strftime("run on %Y-%m-%d"), *faults, sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
