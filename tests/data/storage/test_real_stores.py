"""Object stores that others wrote, of which the campaign runs more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "campaigns" / "real"))

from installing import NotHere
from stores import ROWS, examine


@pytest.mark.parametrize(
    ("name", "differs"),
    [("moto", {"`If-None-Match: *` on an object": "refused"}), ("rclone", {"ranges": "whole objects instead"})],
)
def test_a_store_does_what_a_mirror_images_and_caches_need(name, differs, tmp_path):
    try:
        found = examine(name, tmp_path, install=False)
    except NotHere as error:
        pytest.skip(str(error))
    expected = {"listed": "by bytes", "`If-None-Match: *` on an object": "overwritten", **differs}
    assert found == {**dict.fromkeys(ROWS, "yes"), **expected}
