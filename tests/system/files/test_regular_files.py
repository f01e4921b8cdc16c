"""Whatever has a name is opened at once, and only regular files of bounded size are read."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from simpletuner.system.files.regular_files import check_regular, open_regular, read_end, read_file


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
