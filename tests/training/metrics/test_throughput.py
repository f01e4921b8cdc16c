"""TFLOP/s, MFU and the trace of steps, on real runs; what only a GPU has is not in their metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from counting.test_flops import batch_of
from models.test_inputs import CPU, opened
from models.test_no_waits import META, waits_seen

from simpletuner.counting.flops import FlopCounter
from simpletuner.data.prefetch import Batch, StepBatch
from simpletuner.data.sampler.batch_sampler import SamplerState
from simpletuner.models.families.sdxl import SDXL
from simpletuner.parallel.devices import DEVICES, device_by_driver_name
from simpletuner.report import Report
from simpletuner.settings.declared.sections import Model, Settings
from simpletuner.training.metrics.speed import Throughput, format_throughput
from simpletuner.training.profiling import StepProfiler


def test_a_run_measures_its_throughput_and_traces_the_steps_that_were_asked_for(sdxl, sdxl_flags, train, tmp_path):
    flags = (*sdxl_flags, "--max_train_steps=4", "--gradient_accumulation_steps=2", "--crop")
    flags = (*flags, "--device_peak_tflops=0.5", "--profile_steps=2:3", "--train_batch_size=3")
    run = train(tmp_path / "run", *flags, world=2)
    family = opened("sdxl", sdxl)
    _, conditioning = batch_of(family)
    latents = family.vae(CPU).encode(torch.zeros(6, 3, 64, 64))
    flops = FlopCounter(family).count(latents, conditioning)  # six samples of this rank: two micro-batches of three
    for row in run.rows:
        assert row["tflops_per_second"] * row["seconds"] == pytest.approx(flops / 1e12)
        assert row["mfu"] == pytest.approx(row["tflops_per_second"] / 0.5)
        assert not {"peak_memory_bytes", "reserved_memory_bytes"} & row.keys(), "a CPU has no allocator that counts"
    assert re.search(r"training: 4/4  (0:\S+ left  )?loss .* samples/s  data wait \d+%  MFU ", run.said)
    trace = run.output / "profile" / "steps-2-3.json"
    events = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    steps = {name for name in events if name and name.startswith("ProfilerStep")}
    assert len(steps) == 2 and {"aten::addmm", "aten::convolution_backward"} <= events
    assert str(trace) in run.said and "wait for data" in run.said
    assert sorted(path.name for path in trace.parent.iterdir()) == [trace.name]


def test_a_run_that_ends_before_the_steps_says_so_and_one_that_is_cut_off_keeps_what_it_traced(tmp_path, capsys):
    def take(steps: range, asked: str) -> None:
        profiler = StepProfiler(asked, tmp_path / "profile", CPU, Report())
        with profiler.opened():
            for step in steps:
                profiler.begin(step)
                torch.ones(8).sum()
                profiler.end(step, 0.0)

    take(range(1, 4), "5:6")
    assert "warning: nothing is traced: this run took none of profile_steps = 5:6" in capsys.readouterr().err
    assert not (tmp_path / "profile").exists()
    take(range(4, 6), "3:9")
    assert "nothing is traced" not in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["steps-4-5.json"]


def step_of(latents: torch.Tensor, conditioning: dict[str, torch.Tensor]) -> StepBatch:
    batch = Batch(latents, torch.empty_like(latents), torch.empty(len(latents), device=META), conditioning, ("a",))
    return StepBatch([batch] * 2, SamplerState(0, 1, 2, {}))


def test_counting_a_known_shape_reads_nothing_and_makes_nothing(flux):
    family = opened("flux", flux)
    throughput = Throughput(FlopCounter(family), 2.0, 2, META, Report())
    latents, conditioning = batch_of(family)
    batch = step_of(latents.to(META), {name: value.to(META) for name, value in conditioning.items()})
    first = throughput.count(batch)
    with waits_seen() as waits, torch.profiler.profile() as profile:
        assert throughput.count(batch) == first
        measured = throughput.measure(first, seconds=2.0)
    assert waits == [] and not profile.key_averages()
    # two micro-batches, each shared by two ranks
    assert first == FlopCounter(family).count(latents, conditioning)
    assert measured == {"tflops_per_second": first / 2e12, "mfu": first / 4e12}
    measured = {"tflops_per_second": 412.31, "mfu": 0.4167, "peak_memory_bytes": 3 << 30}
    assert format_throughput(measured) == ["3.0 GiB", "MFU 41.7%"]
    assert format_throughput({"tflops_per_second": 412.31}) == ["412 TFLOP/s"]
    assert format_throughput({}) == []


class ReadsLatents(SDXL):
    """A user's family that reads a number from the device."""

    def predict(self, model, noised_BCHW, timesteps_B, conditioning):
        return super().predict(model, noised_BCHW * float(noised_BCHW.mean() > 0), timesteps_B, conditioning)


def test_a_family_that_cannot_be_counted_is_trained_all_the_same(sdxl, capsys):
    family = ReadsLatents(sdxl, Settings(model=Model(model_family="sdxl")))
    throughput = Throughput(FlopCounter(family), 2.0, 1, CPU, Report())
    batch = step_of(*batch_of(opened("sdxl", sdxl)))
    assert throughput.count(batch) is None and throughput.count(batch) is None
    assert capsys.readouterr().err.count("warning: no TFLOP/s are shown") == 1
    assert throughput.measure(None, 1.0) == {}
    assert not any(parameter.grad is not None for parameter in family.meta_denoiser.parameters())


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA RTX 6000 Ada Generation", 364.0),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3080 Ti", None),
        ("Tesla T4", 65.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("AMD Instinct MI250X/MI250", 181.0),
        ("AMD Instinct MI325X", 1307.4),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_whole_name(name, peak):
    found = device_by_driver_name(name)
    assert (found and found.peak_tflops) == peak


def test_the_table_of_the_documentation_is_that_of_the_package():
    for name, device in DEVICES.items():
        numbers = device.peak_tflops, device.memory_gb_per_second, device.link_gb_per_second
        tflops, rate, link = (f"{each:g}" for each in numbers)
        assert f"| {name} | {tflops} | {device.memory_gib:.1f} | {rate} | {link} |" in Path("docs/plan.md").read_text()
    whitepapers = {"RTX-3080": 59.5, "RTX-3090": 71.2, "RTX-4090": 165.2, "RTX-5090": 209.5}
    assert {name: DEVICES[name].peak_tflops for name in whitepapers} == whitepapers
