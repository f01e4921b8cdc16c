"""Valid settings of all kinds: per setting from its type and bounds, combined, and kept if they load."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from hypothesis import assume
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from simpletuner.errors import SettingsError
from simpletuner.settings import Loaded, load
from simpletuner.settings.declared.sections import setting_fields
from simpletuner.settings.values.spelling import choices_of

HOOK = {"HOOK_OF_TESTS": "https://example.org/hook"}
"""What settings refer to as a secret."""
NOWHERE = {"SIMPLETUNER_ACCELERATE_CONFIG": "none", **HOOK}
"""An environment that says nothing of settings, and keeps accelerate's default file out."""

TRICKY = (
    "",
    "none",
    "null",
    " true ",
    "no",
    "1e5",
    "007",
    "[a, b]",
    '["a"]',
    "[",
    "{",
    '{"a": 1}',
    "it's",
    'say "x"',
    "$HOME",
    "`date`",
    "$(date)",
    "a # b",
    "#",
    "a\nb",
    "a\n",
    "\ta\r\n",
    "a\\",
    "\\n",
    "a\\\nb",
    "--seed=3",
    "-x",
    "a=b",
    "!x",
    "~/pictures",
    "a;b&c|d",
    "*",
    "\x07",
    "a\x0bb\x0cc",
    "\x85",
    "a\u2028b",
    "Bär „groß“",
    "火",
    "\U0001f98a",
    "\ufeffa",
    "'''",
    '"""',
    "%(x)s {y}",
    "- a: b",
    "2020-01-01",
    "@file",
    "\x7f",
)

texts = st.sampled_from(TRICKY) | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
paths = texts.map(lambda text: text or "folder").map(Path)
numbers = st.floats(0, 1e9, allow_nan=False, allow_infinity=False)
zero_optimization = st.fixed_dictionaries(
    {},
    optional={
        "reduce_bucket_size": st.integers(1, 10**12) | st.just(5e8),
        "overlap_comm": st.booleans(),
        "leaf_module": st.fixed_dictionaries({"names": st.lists(texts, max_size=3)}),
        "offload_optimizer": st.fixed_dictionaries({}, optional={"pin_memory": st.booleans()}),
        "stage3_max_live_parameters": st.just("auto") | st.integers(0, 10**12),
    },
)
deepspeed_configs = st.fixed_dictionaries(
    {},
    optional={
        "zero_optimization": zero_optimization,
        "flops_profiler": st.fixed_dictionaries({"recompute_fwd_factor": numbers, "enabled": st.booleans()}),
        "aio": st.fixed_dictionaries({"queue_depth": st.integers(1, 64), "single_submit": st.booleans()}),
        "log_level": texts,
        "optimizer": st.fixed_dictionaries({"params": st.fixed_dictionaries({"torch_adam": st.booleans()})}),
    },
)
OWN_WORDS = {
    "fsdp_auto_wrap_policy": st.sampled_from(
        ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", "my.wrap.policy"]
    ),
    "validation_resolution": st.sampled_from(["", "512", "1216x832"]),
    "mirror_output": st.sampled_from(["", "s3://bucket/runs/one", "gs://b", "az://container/é+x"]),
    "main_process_ip": st.sampled_from(["", "10.0.0.1", "fe80::1%eth0", "::1", "node-1.cluster.local", "bär.example"]),
    "notify_url": st.sampled_from(["", "{env:HOOK_OF_TESTS}"]),
    "deepspeed_config": deepspeed_configs.filter(lambda config: "torch_adam" not in str(config)) | st.none(),
}
"""Knobs whose text has rules of its own."""


def values_of(name: str, field: FieldInfo) -> st.SearchStrategy[Any]:
    """Return a strategy for a setting's values."""
    return OWN_WORDS[name] if name in OWN_WORDS else of_type(field.annotation, bounds_of(field))


def bounds_of(field: FieldInfo) -> dict[str, float]:
    return {
        name: getattr(part, name)
        for part in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if getattr(part, name, None) is not None
    }


def of_type(annotation: Any, bounds: dict[str, float]) -> st.SearchStrategy[Any]:
    if choices := choices_of(annotation):
        optional = [None] if type(None) in get_args(annotation) else []
        return st.sampled_from([*choices, *optional])
    if get_origin(annotation) in (Union, types.UnionType):
        return st.one_of(st.none() if part is type(None) else of_type(part, bounds) for part in get_args(annotation))
    if annotation is int:
        return st.integers(int(bounds.get("ge", 0)), int(bounds.get("le", 10**12)))
    if annotation is float:
        lowest, highest = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
        outside = {"exclude_min": "gt" in bounds, "exclude_max": "lt" in bounds}
        return st.floats(lowest, highest, allow_nan=False, allow_infinity=False, **outside)
    tables = st.dictionaries(texts, texts, max_size=3)
    kinds = {bool: st.booleans(), str: texts, Path: paths, list: st.lists(texts, max_size=3), dict: tables}
    return kinds[get_origin(annotation) or annotation]


VALUES = {name: values_of(name, field) for name, field in setting_fields().items()}

ENGINES: tuple[dict[str, Any], ...] = (
    {},
    {"num_processes": 4, "use_cpu": True},
    {"fsdp_enable": True, "num_processes": 8},
    {"fsdp_enable": True, "num_processes": 16, "num_machines": 4, "machine_rank": 3, "main_process_ip": "10.0.0.1"},
    {"fsdp_enable": True, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 7},
    {"fsdp_enable": True, "context_parallel_size": 2, "context_parallel_comm_strategy": "alltoall", "num_processes": 2},
    {"dynamo_backend": "inductor", "dynamo_mode": "max-autotune", "dynamo_fullgraph": True, "fsdp_enable": False},
    {"zero_stage": 3, "num_processes": 2},
    {"zero_stage": 1, "offload_optimizer": "cpu", "optimizer": "adam", "lr_warmup_steps": 10},
    {"zero_stage": 2, "optimizer": "lion", "lr_scheduler": "cosine", "max_train_steps": 70, "lr_end": 1e-7},
    {"zero_stage": 3, "optimizer": "adagrad", "lr_scheduler": "linear", "max_train_steps": 70, "lr_warmup_steps": 7},
    {"zero_stage": 3, "offload_param": "nvme", "offload_optimizer": "nvme", "offload_param_path": "x y/z"},
    {"deepspeed_config": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x y"}}}},
    {
        "deepspeed_config": {
            "train_batch_size": 24,
            "bf16": {"enabled": False},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"type": "Adagrad", "params": {"lr": 1e-3, "eps": 1e-10}},
        },
        "num_processes": 3,
    },
)
"""Combinations that chance alone would seldom find; settings drawn beside them may change them."""
SEVERAL = ("num_processes", "num_machines", "machine_rank", "context_parallel_size", "model_type", "optimizer")
SEVERAL += ("zero_stage", "offload_optimizer", "offload_param", "fsdp_enable")
"""Knobs that mostly contradict others when drawn alone."""


@st.composite
def loaded_settings(draw: st.DrawFn) -> Loaded:
    """Draw some settings, and keep what loads."""
    names = draw(st.lists(st.sampled_from([name for name in VALUES if name not in SEVERAL]), max_size=8, unique=True))
    values = draw(st.sampled_from(ENGINES)) | {name: draw(VALUES[name]) for name in names}
    try:
        return load(values, complete=False, environment=NOWHERE)
    except SettingsError as error:
        assume(False)
        raise AssertionError from error
