"""What DeepSpeed's JSON becomes: settings with their origins, what is left of it, and agreement with other sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpletuner.errors import SettingsError
from simpletuner.settings import Loaded, load, settings_as_json
from simpletuner.settings.foreign.deepspeed_config import deepspeed_config, deepspeed_options
from simpletuner.settings.foreign.deepspeed_optimizers import REFUSED
from simpletuner.settings.showing.export import explain_settings

NOWHERE = {"SIMPLETUNER_ACCELERATE_CONFIG": "none"}
STAGE2 = {"zero_optimization": {"stage": 2}}


def read(config: Any, **flags: Any) -> Loaded:
    return load({"deepspeed_config": config, **flags}, complete=False, environment=NOWHERE)


def values(loaded: Loaded) -> dict[str, Any]:
    return settings_as_json(loaded)


def refusal(config: Any, **flags: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        read(config, **flags)
    return caught.value.message


def test_all_sources_lead_to_the_same_settings(tmp_path):
    offload = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "ds.json").write_text(json.dumps(offload))
    (tmp_path / "short.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n  offload_optimizer_device: cpu\n"
    )
    (tmp_path / "long.yaml").write_text(
        f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {tmp_path}/ds.json\n"
    )
    (tmp_path / "c.toml").write_text(f"deepspeed_config = {str(tmp_path / 'ds.json')!r}\n")
    loaded = [
        load({"zero_stage": "3", "offload_optimizer": "CPU"}, complete=False, environment=NOWHERE),
        read(offload),
        read(json.dumps(offload)),
        read(str(tmp_path / "ds.json")),
        load({}, tmp_path / "c.toml", complete=False, environment=NOWHERE),
        load({"accelerate_config": str(tmp_path / "short.yaml")}, complete=False, environment={}),
        load({"accelerate_config": str(tmp_path / "long.yaml")}, complete=False, environment={}),
    ]
    assert [one.settings for one in loaded] == [loaded[0].settings] * len(loaded)


def test_every_setting_says_which_key_of_which_file_gave_it(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(STAGE2 | {"gradient_clipping": 0.5}))
    rows = {row.name: row for row in explain_settings(read(str(path)))}
    assert rows["max_grad_norm"].origin == f"{path} gradient_clipping"
    assert rows["zero_stage"].value == 2
    (tmp_path / "c.json").write_text('{\n "deepspeed_config": {"zero_optimization": {"stage": 1}}}')
    loaded = load({}, tmp_path / "c.json", complete=False, environment=NOWHERE)
    assert str(loaded.origins["zero_stage"]) == f"{tmp_path}/c.json:2 deepspeed_config.zero_optimization.stage"


def test_two_sources_may_say_the_same_in_different_words():
    config = STAGE2 | {"gradient_accumulation_steps": 4, "optimizer": {"type": "adamw", "params": {"lr": 1e-4}}}
    loaded = read(config, gradient_accumulation_steps="4", learning_rate="0.0001", zero_stage="2", optimizer="AdamW")
    assert loaded.settings.training.gradient_accumulation_steps == 4
    assert str(loaded.origins["learning_rate"]) == "flag"


def test_rates_that_differ_by_a_thousandth_are_a_mistake():
    config = STAGE2 | {"optimizer": {"type": "adamw", "params": {"lr": 1e-4}}}
    assert read(config, learning_rate=1e-4 * (1 + 1e-12)).settings.optimizer.learning_rate == pytest.approx(1e-4)
    with pytest.raises(SettingsError, match=r"0\.0001001"):
        read(config, learning_rate=1.001e-4)


@pytest.mark.parametrize(
    ("stage", "steps", "mixed_precision", "is_float32"),
    [(1, 4, "bf16", False), (2, 4, "bf16", True), (3, 4, "bf16", True), (2, 1, "bf16", False), (2, 4, "no", False)],
)
def test_gradients_add_up_in_float32_where_that_costs_a_rank_its_own_part_alone(
    stage, steps, mixed_precision, is_float32
):
    config = {"zero_optimization": {"stage": stage}}
    loaded = read(config, gradient_accumulation_steps=steps, mixed_precision=mixed_precision)
    made = deepspeed_config(loaded.settings, 2)
    assert made.get("data_types") == ({"grad_accum_dtype": "fp32"} if is_float32 else None)


def test_what_is_auto_or_missing_is_filled_from_settings():
    config = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto", "bf16": {"enabled": "auto"}}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}, "scheduler": {"type": "auto"}}
    loaded = read(config, learning_rate=3e-4, train_batch_size=2, lr_warmup_steps=7, mixed_precision="no")
    assert deepspeed_config(loaded.settings, 4) == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 2.0,
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 2},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 3e-4, "warmup_num_steps": 7, "warmup_type": "linear"},
        },
    }


@pytest.mark.parametrize(
    ("given", "flags", "micro", "steps"),
    [
        ({"train_batch_size": 24}, {}, 8, 1),
        ({"train_batch_size": 24}, {"train_batch_size": 2}, 2, 4),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 2}, {}, 4, 2),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 8}, {"gradient_accumulation_steps": 1}, 8, 1),
        ({"train_micro_batch_size_per_gpu": 5}, {}, 5, 1),
    ],
)
def test_deepspeeds_batch_of_all_ranks_is_shared_out_over_three_of_them(given, flags, micro, steps):
    settings = read(STAGE2 | given, num_processes=3, **flags).settings
    assert (settings.training.train_batch_size, settings.training.gradient_accumulation_steps) == (micro, steps)
    assert deepspeed_config(settings, 3)["train_batch_size"] == micro * steps * 3


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_a_batch_is_accepted_if_and_only_if_it_is_the_product(total, micro, steps, ranks):
    config = STAGE2 | {"train_batch_size": total, "gradient_accumulation_steps": steps}
    config["train_micro_batch_size_per_gpu"] = micro
    if total == micro * steps * ranks:
        assert read(config, num_processes=ranks).settings.effective_batch_size == total
    else:
        assert f"= {micro * steps * ranks} [" in refusal(config, num_processes=ranks)


@pytest.mark.parametrize("name", ["cpuadam", "CPUAdam", "FusedAdam", "deepspeed_cpu_adam", "Adam"])
def test_other_names_of_adamw_become_it_with_a_warning_that_names_both(name):
    loaded = read(STAGE2 | {"optimizer": {"type": name, "params": {"lr": "auto", "weight_decay": "auto"}}})
    assert loaded.settings.optimizer.optimizer == "adamw"
    [warning] = loaded.warnings
    assert warning.startswith(f"optimizer {name} becomes AdamW")


@pytest.mark.parametrize(
    ("name", "canonical"),
    [("ADAMW", "AdamW"), ("adagrad", "Adagrad"), ("LION", "Lion"), ("Adam", "Adam"), ("muon", "Muon")],
)
def test_usable_optimizers_reach_deepspeed_by_its_own_names(name, canonical):
    params = {"adam_w_mode": False, "lr": 1e-3} if name == "Adam" else {"lr": 1e-3}
    settings = read(STAGE2 | {"optimizer": {"type": name, "params": params}}).settings
    block = deepspeed_config(settings, 1)["optimizer"]
    zero = deepspeed_options(settings)
    assert zero is not None
    assert (block["type"], zero.optimizer, block["params"]["lr"]) == (canonical, canonical, 1e-3)
    assert block["params"].get("adam_w_mode") is (False if name == "Adam" else None)


@pytest.mark.parametrize("name", ["Lamb", "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "MuAdam", "MuAdamW", "MuSGD"])
def test_optimizers_that_cannot_be_used_are_refused_with_the_reason(name):
    assert f"it cannot be used: {REFUSED[name.lower()]}; use AdamW" in refusal(STAGE2 | {"optimizer": {"type": name}})


def scheduler(name: str, **params: Any) -> dict[str, Any]:
    return STAGE2 | {"scheduler": {"type": name, "params": params}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (scheduler("WarmupLR", warmup_num_steps=9), {"lr_scheduler": "constant", "lr_warmup_steps": 9}),
        (scheduler("warmuplr", warmup_max_lr=1e-3), {"learning_rate": 1e-3}),
        (scheduler("WarmupLR", warmup_min_lr=1e-3, warmup_max_lr=1e-3), {"learning_rate": 1e-3, "lr_warmup_steps": 0}),
        (
            scheduler("WarmupDecayLR", total_num_steps=50, warmup_num_steps=5),
            {"lr_scheduler": "linear", "max_train_steps": 50, "lr_warmup_steps": 5, "lr_end": 0},
        ),
        (
            scheduler("WarmupCosineLR", total_num_steps=50, cos_min_ratio=0.5),
            {"lr_scheduler": "cosine", "max_train_steps": 50, "lr_end": 5e-6},
        ),
    ],
)
def test_schedules_become_ours(config, expected):
    found = values(read(config))
    assert {name: found[name] for name in expected} == expected


def test_what_a_schedule_says_beyond_ours_is_a_warning():
    config = scheduler("WarmupLR", warmup_min_lr=1e-6, warmup_num_steps=9, warmup_type="log")
    assert read(config).warnings == (
        "deepspeed_config.scheduler.params.warmup_min_lr = 1e-06 is not used: the warm-up rises from 0",
        "deepspeed_config.scheduler.params.warmup_type = 'log' is not used: the warm-up rises linearly",
    )


@given(
    st.sampled_from(["constant", "constant_with_warmup", "linear", "cosine", "polynomial"]),
    st.integers(0, 50),
    st.none() | st.integers(50, 100),
    st.sampled_from([0.0, 1e-7, 1.0]),
)
def test_a_schedule_that_deepspeed_is_given_means_ours(name, warm_up, total, end):
    flags = {"lr_scheduler": name, "lr_warmup_steps": warm_up, "max_train_steps": total, "lr_end": end}
    loaded = load({"zero_stage": 1, **flags}, complete=False, environment=NOWHERE)
    again = read(deepspeed_config(loaded.settings, 1), **flags)
    assert again.settings == loaded.settings
    assert again.warnings == loaded.warnings


def test_a_larger_tensor_gets_a_larger_buffer():
    flags = {"zero_stage": 3, "offload_param": "nvme", "offload_param_path": "swap"}
    settings = load(flags, complete=False, environment=NOWHERE).settings

    def size(largest: int, ranks: int) -> int:
        return deepspeed_config(settings, ranks, largest)["zero_optimization"]["offload_param"]["buffer_size"]

    assert [size(0, 1), size(340_000_001, 1), size(340_000_001, 2)] == [100_000_000, 340_000_001, 170_000_001]
    zero = deepspeed_options(settings)
    assert zero is not None
    assert zero.uses_nvme
    assert zero.nvme_path == Path.cwd() / "swap"


def test_the_home_folder_is_meant_by_its_sign(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "~/swap"}}}
    assert read(config).settings.parallel.offload_param_path == Path("/home/me/swap")
    assert "there is no home folder ~nobody-here" in refusal(STAGE2, offload_param_path="~nobody-here/x")


def test_deepspeed_is_off_by_default_and_by_none():
    assert deepspeed_options(read(None).settings) is None
    assert deepspeed_options(read("none").settings) is None
    assert "zero_stage = none (flag)" in refusal(STAGE2, zero_stage="none").replace("'none'", "none")
