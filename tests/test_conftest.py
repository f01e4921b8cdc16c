from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from conftest import begun_with_long


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
def test_each_worker_begins_with_its_share_of_the_long_tests_file_by_file(workers):
    tests: list[Any] = [
        SimpleNamespace(nodeid=f"test_{n // 20}.py::{n}", path=n // 20, is_long=n % 100 < 3) for n in range(1000)
    ]
    ordered = list(begun_with_long(tests, workers, lambda test: test.is_long))
    assert sorted(map(id, ordered)) == sorted(map(id, tests))
    left, files = list(ordered), []
    for number in range(workers):
        size = len(left) // (workers - number)  # as xdist's WorkStealingScheduling.check_schedule sends them
        part, left = left[:size], left[size:]
        count = sum(test.is_long for test in part)
        assert all(test.is_long for test in part[:count])
        files.append({test.path for test in part[:count]})
    assert sum(map(len, files)) == 10 and max(map(len, files)) - min(map(len, files)) <= 1
