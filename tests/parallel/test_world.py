from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from simpletuner.parallel.world import open_store


def test_ranks_meet_whose_agents_have_counted_different_numbers_of_restarts():
    """A machine that joins torchrun's run later begins to count at 0; there rank 0 serves a new store each time."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(open_store, place | {"TORCHELASTIC_RESTART_COUNT": "1"}, 0, 2)
        second = open_store(place | {"TORCHELASTIC_RESTART_COUNT": "0"}, 1, 2)
        first.result().set("key", "value")
        assert second.get("key") == b"value"
