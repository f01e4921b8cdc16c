from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from simpletuner.system.files.checksums import READ_BYTES, file_checksum, is_intact, with_checksum

VALUES = {"steps": 3, "files": {"a": 1}}


def test_values_with_a_checksum_of_their_own_are_intact_until_any_of_them_changes():
    whole = with_checksum(VALUES)
    assert is_intact(whole) and is_intact(dict(reversed(whole.items()))), "the order of keys is nothing"
    for change in ({"steps": 4}, {"files": {}}, {"more": 0}):
        assert not is_intact(whole | change)
    assert not is_intact({name: value for name, value in whole.items() if name != "steps"})


@pytest.mark.parametrize("checksum", [None, "", 0, "xxh3:"])
def test_without_a_checksum_or_with_one_that_is_none_nothing_is_intact(checksum):
    assert not is_intact(VALUES | {"checksum": checksum})
    assert not is_intact(VALUES)


@pytest.mark.parametrize("length", [0, 1, READ_BYTES - 1, READ_BYTES, READ_BYTES + 1, 2 * READ_BYTES + 7])
def test_a_file_has_the_checksum_of_its_bytes_whatever_its_length(tmp_path: Path, length: int):
    content = bytes(range(251)) * (length // 251 + 1)
    (tmp_path / "file").write_bytes(content[:length])
    assert file_checksum(tmp_path / "file") == f"xxh3:{xxhash.xxh3_128_hexdigest(content[:length])}"
