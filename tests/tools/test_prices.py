"""The user's table of prices: offers in the order of their price, and a sentence for what it cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from simpletuner.errors import SettingsError
from simpletuner.tools.plan.prices import compare_offers, price_of, read_offers, row_of

OFFER = '[[offer]]\nname = "{}"\ngpu = "{}"\nprice = {}\n'


def table(folder: Path, text: str | bytes) -> Path:
    path = folder / "prices.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_offers_are_compared_by_price_and_those_that_do_not_fit_come_last(tmp_path):
    offers = [("slow", "H100", 1), ("dear", "h100", 4.5), ("fast", "H200", 2), ("small", "L40S", 0.1)]
    found = read_offers(table(tmp_path, "".join(OFFER.format(*each) for each in offers)))
    asked = []

    def plan(device):
        asked.append(device)
        return (device.memory_gib > 60, 2.0 if device.memory_gib < 100 else 0.5, 1800, 4)

    costs = compare_offers(found, plan)
    assert [each.offer.name for each in costs] == ["fast", "slow", "dear", "small"]
    assert len(asked) == 4, "names of GPUs are as they were typed"
    assert (costs[0].hours, costs[0].price) == (0.25, 2.0) and costs[1].price == 4.0
    assert row_of(costs[0]) == ("fast", "H200", "2", "yes", "0.5 s", "0:15:00", "2.00", "1.11")
    unknown = compare_offers(found[:1], lambda device: (True, 1.0, None, 1))[0]
    assert row_of(unknown) == ("slow", "H100", "1", "yes", "1 s", "", "", "0.28")
    assert price_of(None, 1.0, 1, 1.0) is None and price_of(3600, 1.0, 8, 2.5) == 20.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "offer: field required"),
        ("offer = []", "offer: list should have at least 1 item"),
        (OFFER.format("a", "H100", '"2.5"'), "offer.0.price: input should be a valid number"),
        (OFFER.format("a", "H100", "-1"), "offer.0.price: input should be greater than or equal to 0"),
        (OFFER.format("a", "H100", "nan"), "offer.0.price: input should be"),
        (OFFER.format("a", "H100", "1") + "currency = 1\n", "offer.0.currency: extra inputs are not permitted"),
        (OFFER.format("", "H100", "1"), "offer.0.name: string should have at least 1 character"),
        (OFFER.format("a", "H10", "1"), "did you mean `H100`?"),
        ("[[offer", "is not TOML: "),
        (b"\xff\xfe", "is not TOML: "),
        ("a = " + "[" * 5000, "is not TOML: "),
    ],
)
def test_a_table_that_cannot_be_read_is_one_sentence(tmp_path, text, said):
    with pytest.raises(SettingsError) as caught:
        read_offers(table(tmp_path, text))
    assert said in caught.value.message.replace("\n", " ") or said in f"{caught.value.message} {caught.value.hint}"


def test_what_is_no_file_is_said(tmp_path):
    with pytest.raises(SettingsError, match="there is no table of prices at"):
        read_offers(tmp_path / "prices.toml")
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(SettingsError, match="cannot be read"):
            read_offers(path)
