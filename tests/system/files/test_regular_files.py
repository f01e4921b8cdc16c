"""Whatever has a name is opened at once, and only regular files of bounded size are read."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import PATIENCE
from real_mounts import bindfs, or_skipped

from simpletuner.system.files.late_files import find_late, shorter_caches
from simpletuner.system.files.regular_files import MISSES, check_regular, open_regular, read_end, read_file


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


SPECIAL = {
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": make_socket,
    "a folder": Path.mkdir,
}
READ = {
    "opened": open_regular,
    "checked": check_regular,
    "whole": read_file,
    "its end": lambda path: read_end(path, 10),
}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_what_is_no_regular_file_is_named_and_not_waited_for(make, read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket has at most 107 bytes
    make(Path("odd"))
    with pytest.raises(OSError, match=r"(not a regular file|is a directory): 'odd'"):
        read(Path("odd"))


def test_a_file_of_a_terabyte_is_read_at_its_end_alone(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"the end")
    for refuse in (read_file, lambda path: open_regular(path, 1 << 20), lambda path: check_regular(path, 1 << 20)):
        with pytest.raises(OSError, match="it is larger than"):
            refuse(path)
    assert read_end(path, 7) == b"the end" and read_end(tmp_path / "missing", 7) == b""


def test_a_file_that_is_read_whole_may_have_the_largest_size(tmp_path):
    path = tmp_path / "file"
    for content in (b"", b"12345678"):
        path.write_bytes(content)
        assert read_file(path, 8) == content
        with open_regular(path, 8) as file:
            assert file.read() == content and file.name == str(path) and os.get_blocking(file.fileno())
    with pytest.raises(OSError, match="larger"):
        read_file(path, 7)
    assert read_file(Path("/proc/self/stat")), "a file that says it is empty"


@pytest.mark.parametrize("size", [8, 9])
def test_a_pipe_that_a_shell_hands_over_is_read_up_to_the_limit(size):
    reader, writer = os.pipe()
    os.write(writer, b"1" * size)
    os.close(writer)
    path = Path(f"/dev/fd/{reader}")
    read: Callable[[], bytes] = lambda: read_file(path, 8)  # noqa: E731
    if size > 8:
        with pytest.raises(OSError, match="larger"):
            read()
    else:
        assert read() == read() == b"1" * size, "a second reader finds it there, too"
    os.close(reader)


REPLACING = """
import os, sys
for number in range(10**9):
    with open(sys.argv[1] + ".new", "wb") as file:
        file.write(b"%09d" % number * 500)
    os.replace(sys.argv[1] + ".new", sys.argv[1])
"""


def test_a_file_that_another_process_replaces_on_fuse_is_always_read_whole(tmp_path):
    """As https://github.com/libfuse/libfuse/issues/637 describes."""
    with or_skipped(), bindfs(tmp_path) as folder:
        path, missed, end = folder / "status.json", 0, time.monotonic() + PATIENCE
        path.write_bytes(bytes(9) * 500)
        with subprocess.Popen([sys.executable, "-c", REPLACING, str(path)]) as replacing:
            try:
                while missed < 5:
                    assert time.monotonic() < end, "no reader missed the file: is it so on FUSE any more?"
                    try:
                        path.open("rb").close()
                    except FileNotFoundError:
                        missed += 1
                    for content in (read_file(path), read_end(path, 4500)):
                        assert content == content[:9] * 500
            finally:
                replacing.kill()


def test_a_stale_handle_is_tried_again_within_a_bound_and_a_missing_file_is_missing_at_once(tmp_path, monkeypatch):
    path, answers, opened = tmp_path / "file", [], []
    path.write_bytes(b"content")

    def stale(*given, real=os.open, **more):
        opened.append(given)
        if answers:
            raise OSError(answers.pop(), "not now")
        return real(*given, **more)

    monkeypatch.setattr(os, "open", stale)
    for number in (errno.ESTALE, errno.ENOENT):  # GlusterFS and NFS; FUSE
        answers[:] = [number] * 3
        assert read_file(path) == b"content" and not answers
    answers[:], opened[:] = [errno.ESTALE] * 10**6, []
    monkeypatch.setattr("simpletuner.system.files.regular_files.REPLACED_SECONDS", 0.05)
    with pytest.raises(OSError, match="not now"):
        open_regular(path)
    assert len(opened) < 100
    answers[:], opened[:] = [], []
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "missing")
    assert len(opened) <= MISSES


def test_a_file_that_another_machine_has_named_is_waited_for_until_it_has_its_size(tmp_path):
    """As a mount with a cache shows it late; each look comes with a question whether to stop."""
    folder, looks = tmp_path / "late", []

    def show_more() -> None:
        looks.append(len(looks))
        folder.mkdir(exist_ok=True)
        (folder / "shard").write_bytes(bytes(2 * len(looks)))

    assert find_late(folder, {"shard": 6}, show_more, seconds=PATIENCE) == "" and len(looks) == 3
    assert find_late(folder, {"shard": 6, "other": 1}, show_more, seconds=0.0) == "other"
    assert f"`simpletuner nfs check --path={folder}`" in shorter_caches(folder)
    with pytest.raises(KeyboardInterrupt):
        find_late(folder, {"other": 1}, lambda: signal.raise_signal(signal.SIGINT), seconds=PATIENCE)
