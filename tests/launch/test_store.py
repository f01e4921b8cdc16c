"""The two stores, torch's and a shared folder, behave alike, and messages are read through either."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from simpletuner.launch.store import MessageStore, Store, TorchStore
from simpletuner.tools.nfs.workspace import FolderStore


@pytest.fixture(params=["torch", "folder"])
def store(request, tmp_path) -> Store:
    return TorchStore(HashStore()) if request.param == "torch" else FolderStore(tmp_path)


def test_keys_are_set_listed_and_replaced(store):
    assert store.existing(["0-a", "1-b"]) == set() and not store.all_exist(["0-a"])
    store.set("0-a", "one")
    store.set("0-a", "two")
    assert store.existing(["0-a", "1-b"]) == {"0-a"}
    assert store.all_exist(["0-a"]) and not store.all_exist(["0-a", "1-b"])
    assert store.get(["0-a"]) == [b"two"]


def test_a_key_is_created_once(store):
    assert store.compare_set("0-card", b"", "first") == b"first"
    assert store.compare_set("0-card", b"", "second") == b"first"
    assert store.get(["0-card"]) == [b"first"]


def test_only_valid_messages_are_read(store):
    messages = MessageStore(store)
    messages.write("0-a", {"count": 1})
    store.set("1-a", "nonsense")
    assert messages.read_all(["0-a", "1-a", "2-a"], dict) == {"0-a": {"count": 1}}
    assert messages.rejected_key == "1-a"
    assert messages.put_first("3-a", {"count": 2}, dict) == {"count": 2}
    assert messages.put_first("3-a", {"count": 3}, dict) == {"count": 2}


def test_a_folder_keeps_one_file_per_key_and_never_writes_a_file_twice(tmp_path):
    store = FolderStore(tmp_path)
    names = set()
    for value in "abc":
        store.set("0-beat", value)
        (path,) = tmp_path.iterdir()
        names.add(path.name)
    assert names == {"0-beat.0.json", "0-beat.1.json", "0-beat.2.json"}
    with pytest.raises(NotImplementedError):
        store.compare_set("0-beat", b"c", "d")
