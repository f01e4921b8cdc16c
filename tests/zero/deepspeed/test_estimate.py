"""Memory estimates, compared with the paper, DeepSpeed's own estimators, and what DeepSpeed allocates."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import zero_allocated
from hypothesis import given
from hypothesis import strategies as st

from simpletuner.counting.zero_memory import FREE_SHARE, choose_stage, estimate_memory, stage_candidates
from simpletuner.errors import SettingsError
from simpletuner.parallel.devices import MemoryBudget, MemoryEstimate, MemoryInputs, MemoryRow
from simpletuner.parallel.moments import TrainedWeights
from simpletuner.settings import load
from simpletuner.settings.foreign.deepspeed_config import deepspeed_config
from simpletuner.system.numbers import format_count, format_flops, format_gib, parse_bytes, parse_count

NOWHERE = {"SIMPLETUNER_ACCELERATE_CONFIG": "none"}
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
NO_BUFFERS = {"reduce_bucket_size": 20_000, "stage3_max_live_parameters": 0}


def config(stage: int, optimizer: str = "none", weights: str = "none", **flags: Any) -> dict[str, Any]:
    offload = {"offload_optimizer": optimizer, "offload_param": weights, "offload_param_path": "/x"}
    ranks = flags.setdefault("num_processes", 2)
    settings = load({"zero_stage": stage, **offload, **flags}, complete=False, environment=NOWHERE).settings
    return deepspeed_config(settings, ranks)


def held(
    stage: int, optimizer: str = "none", weights: str = "none", inputs: MemoryInputs | None = None, **flags: Any
) -> Any:
    """Return bytes per parameter on GPU, in memory and on disk of one rank, by kind."""
    inputs = inputs or MemoryInputs(1000, 2)
    found = estimate_memory(config(stage, optimizer, weights, num_processes=inputs.num_ranks, **flags), inputs)
    count = inputs.num_parameters
    return {row.name: (row.gpu / count, row.host / count, row.disk / count) for row in found.rows}


def test_the_paper_s_table_for_7_5_billion_parameters_on_64_gpus():
    """Rajbhandari et al. 2020, figure 1: 31.4 GB at stage 1, 16.6 GB at stage 2, 1.9 GB at stage 3, in GB of 10^9."""
    inputs, kinds = MemoryInputs(7_500_000_000, 64), ("weights", "optimizer")
    states = {stage: held(stage, inputs=inputs) for stage in (1, 2, 3)}
    kept = {stage: sum(7.5 * states[stage][kind][0] for kind in kinds) for stage in states}
    gradients = {1: 2 * 7.5, 2: 2 * 7.5 / 64, 3: 2 * 7.5 / 64}  # as the paper counts them: in half precision, at rest
    assert {stage: round(kept[stage] + gradients[stage], 1) for stage in kept} == {1: 31.4, 2: 16.6, 3: 1.9}


@pytest.mark.parametrize(
    ("stage", "places", "weights", "gradients", "optimizer"),
    [
        (1, ("none", "none"), (2, 0, 0), (4, 0, 0), (6, 0, 0)),
        (2, ("none", "none"), (2, 0, 0), (4, 0, 0), (6, 0, 0)),
        (3, ("none", "none"), (1, 0, 0), (3, 0, 0), (6, 0, 0)),
        (2, ("cpu", "none"), (2, 1, 0), (0, 2, 0), (0, 6, 0)),
        (3, ("cpu", "none"), (1, 0, 0), (0, 3, 0), (0, 6, 0)),
        (3, ("cpu", "cpu"), (0, 1, 0), (0, 3, 0), (0, 6, 0)),
        (3, ("nvme", "cpu"), (0, 1, 0), (0, 1, 2), (0, 0, 6)),
        (3, ("nvme", "nvme"), (0, 1, 1), (0, 1, 2), (0, 0, 6)),
    ],
)
def test_bytes_per_parameter_of_one_of_two_ranks_in_bf16(stage, places, weights, gradients, optimizer):
    found = held(stage, *places)
    assert found["weights"] == weights
    assert found["gradients"] == gradients
    assert found["optimizer"] == optimizer
    assert found["EMA"] == (0, 0, 0)


def test_float32_accumulation_other_optimizers_and_ema_count():
    assert held(1, mixed_precision="no")["weights"] == (4, 0, 0)
    assert held(1, gradient_accumulation_steps=2)["gradients"] == (6, 0, 0)
    assert held(2, gradient_accumulation_steps=2)["gradients"] == (4, 0, 0)
    assert held(1, "cpu", gradient_accumulation_steps=2)["gradients"] == (2, 2, 0)
    assert held(2, "cpu", gradient_accumulation_steps=2)["gradients"] == (0, 4, 0)  # 4 P / N, twice, in float32
    assert held(2, inputs=MemoryInputs(1000, 2, num_states=1, ema_device="cpu"))["optimizer"] == (4, 0, 0)
    assert held(2, inputs=MemoryInputs(1000, 2, ema_device="cpu"))["EMA"] == (0, 2, 0)
    assert held(2, inputs=MemoryInputs(1000, 2, ema_device="accelerator"))["EMA"] == (2, 0, 0)
    flags = {"zero_stage": 2, "optimizer": "lion", "use_ema": True, "num_processes": 8, "num_machines": 2}
    settings = load(flags, complete=False, environment=NOWHERE).settings
    found = MemoryInputs.of(settings, TrainedWeights.of_count(7))
    assert found == MemoryInputs(7, 8, 2, num_states=1, ema_device="cpu", num_weights=1)


def test_host_bytes_are_those_of_all_ranks_of_a_machine():
    one, two = (
        estimate_memory(config(2, "cpu", num_processes=8), MemoryInputs(1000, 8, machines)) for machines in (1, 2)
    )
    assert one.gpu_bytes == two.gpu_bytes
    assert one.host_bytes == 2 * two.host_bytes == 18 * 1000


@given(st.integers(10**6, 10**11), st.integers(1, 64), st.sampled_from([1, 2, 3]))
def test_more_ranks_never_need_more_of_a_gpu(parameters, ranks, stage):
    few, many = (
        estimate_memory(config(stage, num_processes=n), MemoryInputs(parameters, n)) for n in (ranks, 2 * ranks)
    )
    assert many.gpu_bytes <= few.gpu_bytes


def test_the_first_candidate_that_fits_is_chosen():
    sizes = {1: 50.0, 2: 30.0, 3: 10.0}

    def of(settings: dict[str, Any]) -> MemoryEstimate:
        stage = settings["zero_stage"]
        gpu = sizes[stage] if settings["offload_optimizer"] == "none" else sizes[stage] / 10
        return MemoryEstimate(MemoryInputs(1, 1), (MemoryRow("all", gpu=gpu * 2**30),))

    assert (
        choose_stage(
            MemoryBudget(40 * 2**30, None, FREE_SHARE), stage_candidates(False, {"offload_optimizer": "none"}), of
        ).settings["zero_stage"]
        == 2
    )
    choice = choose_stage(MemoryBudget(40 * 2**30, None, FREE_SHARE), stage_candidates(False), of)
    assert choice.settings == {"zero_stage": 1, "offload_optimizer": "cpu", "offload_param": "none"}
    assert choice.reason == (
        "stage 1 with optimizer state on cpu fits 40.0 GiB per GPU, 35.0 GiB are left for activations; "
        "stage 1 would need 50.0 GiB per GPU"
    )
    with pytest.raises(SettingsError, match="nothing fits 512 MiB per GPU: stage 1 would need 50.0 GiB"):
        choose_stage(MemoryBudget(2**29, None, FREE_SHARE), stage_candidates(True), of)


def test_candidates_go_from_the_lowest_stage_and_the_least_offloading_up():
    found = [tuple(settings.values()) for settings in stage_candidates(True)]
    assert found == sorted(found, key=lambda choice: choice[0])
    assert found[0] == (1, "none", "none")
    assert found[-1] == (3, "nvme", "nvme")
    assert not [choice for choice in found if choice[0] < 3 and ("nvme" in choice or choice[2] != "none")]
    assert len(list(stage_candidates(False))) == len(found) - 2


@pytest.mark.parametrize(
    ("text", "count"),
    [("24GiB", 24 * 2**30), ("24gib", 24 * 2**30), ("80 GB", 80 * 10**9), ("9237MiB", 9237 * 2**20), ("1024", 1024)],
)
def test_amounts_of_memory_are_read(text, count):
    assert parse_bytes(text, "--gpu_memory") == count


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "24 apples", "1e9GiB", "0", "GiB"])
def test_invalid_amounts_are_refused(text):
    with pytest.raises(SettingsError, match="use an amount of memory"):
        parse_bytes(text, "--gpu_memory")


def test_counts_are_read_and_bytes_are_formatted():
    texts = ("2.6e9", "2.6B", "900M", "12_000_000_000")
    assert [parse_count(text, "--parameters") for text in texts] == [2_600_000_000] * 2 + [900_000_000, 12_000_000_000]
    assert [format_gib(count) for count in (0, 2**20, 3 * 2**29)] == ["", "1 MiB", "1.5 GiB"]
    assert [format_count(count) for count in (512, 860_000_000, 11_900_000_000)] == ["512", "860 M", "11.9 B"]
    flops = [format_flops(count) for count in (0, 1_517_000_000, 223_150_000_000_000, 9_999_000_000_000_000)]
    assert flops == ["0 FLOP", "1.52 GFLOP", "223 TFLOP", "10.0 PFLOP"]


@needs_deepspeed
def test_estimates_agree_with_deepspeeds_own_estimators(run_on):
    """They leave the flat copy of the gradients out: at stage 2, 18 P / N where we count 20; at stage 3 as well."""
    parameters, ranks = 10**9, 8
    own = run_on(zero_allocated.estimators, 1, parameters, ranks)
    inputs = MemoryInputs(parameters, ranks)
    found = {stage: estimate_memory(config(stage, num_processes=ranks), inputs) for stage in (2, 3)}
    for stage, share in ((2, 2 * parameters / ranks), (3, 2 * parameters / ranks)):
        states = sum(row.gpu for row in found[stage].rows if row.name != "buffers")
        assert states == pytest.approx(own[f"stage{stage}"] + share, rel=1e-6)
    offloaded = estimate_memory(config(2, "cpu", num_processes=ranks), inputs)
    assert offloaded.gpu_bytes - offloaded.rows[-1].gpu == own["stage2 cpu"]
    assert offloaded.host_bytes == pytest.approx(18 * parameters)  # theirs: max(4 N, 16) P x 1.5


@needs_deepspeed
@pytest.mark.parametrize(
    ("stage", "optimizer", "weights", "dtype", "passes"),
    [
        (1, "none", "none", "bf16", 1),
        (2, "none", "none", "no", 1),
        (3, "none", "none", "bf16", 1),
        (3, "none", "none", "bf16", 2),
        (3, "cpu", "cpu", "bf16", 1),
    ],
)  # what lies in `.grad` alone no Python object shows; so gradients are held against it only where they are kept flat
def test_two_ranks_of_deepspeed_allocate_what_is_estimated(stage, optimizer, weights, dtype, passes, run_on):
    """At rest: gradients of stages 1 and 2 are gone then, float32 gradients of stage 3 are gone unless offloaded."""
    parts = {"zero_stage": stage, "offload_optimizer": optimizer, "offload_param": weights}
    flags = {**parts, "mixed_precision": dtype, "num_processes": 2, "train_batch_size": 1}
    flags |= {"gradient_accumulation_steps": passes}
    whole = load(flags, complete=False, environment=NOWHERE).settings
    wanted = deepspeed_config(whole, 2)
    wanted["zero_optimization"] |= {**NO_BUFFERS, "stage3_param_persistence_threshold": 0}
    wanted["optimizer"]["params"] |= {"torch_adam": True} if optimizer == "none" else {}
    per_parameter = run_on(zero_allocated.allocated, 2, wanted)
    rows = held(stage, optimizer, weights, mixed_precision=dtype)
    states = sum(sum(rows[kind]) for kind in ("weights", "optimizer"))
    width = 2 if dtype == "bf16" and passes == 1 else 4  # several passes are added up in float32
    at_rest = {1: 0, 2: 0, 3: width / 2 + (2 if optimizer != "none" else 0)}[stage]
    assert per_parameter == pytest.approx(states + at_rest, rel=0.05)
