"""Rates of cards: what `plan` reads is what figures in the repository say, of the card or the most similar one."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from simpletuner.counting.step_trace import StepTrace
from simpletuner.parallel.devices import DEVICES, MemoryInputs
from simpletuner.settings import load
from simpletuner.tools.plan.measure import estimate_step
from simpletuner.tools.plan.rates import MEASURED, Rates, rates_of

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu import machine
from gpu.rates import measured_rates, rates_as_toml

COMPILED = {"dynamo_backend": "inductor"}


def test_the_rates_that_are_installed_are_those_of_the_figures_in_the_repository():
    assert MEASURED.read_text(encoding="utf-8") == rates_as_toml(), "run `python benchmarks/gpu rates` into it"
    cards = {card for device in DEVICES.values() for card in rates_of(device).card.split(" and ")}
    assert cards <= DEVICES.keys()


def figures() -> list[dict[str, object]]:
    """Return records as a check of a GPU writes them; what was measured here is of this CPU."""
    return [
        {"part": "ceilings", "what": "rates", **machine.measure_rates(64, 2**16, 0.01)},
        {"part": "ceilings", "what": "attention auto", "forward, TFLOP/s": 600.0, "backward, TFLOP/s": 500.0},
        {"part": "ceilings", "what": "attention flash3", "error": "is not installed"},
        {"part": "link", "what": "link of 8 ranks, GB/s", "all_gather": 400.0, "reduce_scatter": 360.0},
        {"step": "small", "kind": "measured", "flags": {"dynamo_backend": "no"}, "s/step": 0.1},
        {"step": "small", "kind": "trace", "seconds": 0.13, "busy": 0.03, "launches": 10_000, "top": []},
        {"step": "large", "kind": "measured", "flags": {"dynamo_backend": "no"}, "s/step": 4.0},
        {"step": "large", "kind": "trace", "seconds": 4.0, "busy": 3.9, "launches": 10_000, "top": []},
        {"step": "small, compiled", "kind": "measured", "flags": COMPILED, "s/step": 0.05},
        {"step": "small, compiled", "kind": "trace", "seconds": 0.05, "busy": 0.03, "launches": 2_500, "top": []},
    ]


def test_figures_of_a_card_become_its_rates_and_those_of_similar_cards(tmp_path):
    found = figures()
    for card, records in (("H200", found), ("L4", [{"what": "rates", **found[0], "copy, TB/s": 0.24}])):
        (tmp_path / "figures" / card).mkdir(parents=True)
        lines = [json.dumps(each) for each in records]
        (tmp_path / "figures" / card / "2026-11-27-abc.jsonl").write_text("\n".join([*lines, '{"cut o']))
    (measured := tmp_path / "rates.toml").write_text(rates_as_toml(tmp_path / "figures"))
    rates = rates_of(DEVICES["H200"], measured)
    similar = rates_of(DEVICES["H100"], measured)
    assert similar == rates_of(DEVICES["B200"], measured)
    assert similar == replace(rates, host_gb_per_second=Rates().host_gb_per_second), "of the machine, not of the card"
    assert rates.card == "H200" and str(rates) == "rates measured on H200"
    assert rates.attention == pytest.approx(3.5 / (1 / 600 + 2.5 / 500) / 989.5, rel=1e-3)
    assert rates.link == pytest.approx(0.8) and rates.launch_seconds == pytest.approx(1e-5), "the host waited in one"
    assert rates.compiled_launch_seconds == pytest.approx(2e-5)
    assert 0 < rates.products < 1 and 0 < rates.traffic < 1 and rates.host_gb_per_second > 0
    small = rates_of(DEVICES["RTX-3060"], measured)
    assert small.card == "L4 and H200" and small.traffic == pytest.approx(0.8) and small.attention == rates.attention
    (empty := tmp_path / "empty.toml").write_text("# nothing was measured\n")
    assert rates_of(DEVICES["H200"], empty) == Rates() and str(Rates()) == "assumed rates"
    assert not list(
        measured_rates(DEVICES["H200"], [{"what": "link", "error": "one GPU"}, {"kind": "trace"} | found[5]])
    )


def test_a_step_takes_as_long_as_its_rates_say():
    trace = StepTrace(1, 0, 0, ((0, 1.0),), 10**14, 10**13, 10**12, 1000)
    inputs, device = MemoryInputs(10**9, 1), DEVICES["H200"]

    def seconds(rates: Rates, **flags: object) -> dict[str, float]:
        settings = load({"dynamo_backend": "no", **flags}, complete=False, environment={}).settings
        return asdict(estimate_step(settings, trace, device, inputs, 1.0, rates))

    assumed = seconds(Rates())
    halved = seconds(Rates(products=0.355, attention=0.275, traffic=0.4))
    assert halved == {name: pytest.approx(2 * value) for name, value in assumed.items()} and assumed["products"] > 0
    slow = Rates(launch_seconds=1e-3, compiled_launch_seconds=2e-3)
    waiting = 1 - assumed["products"] - assumed["attention"]
    assert seconds(slow)["other"] == pytest.approx(waiting) and seconds(slow, **COMPILED)["other"] < waiting
