"""Hardware -> Accelerate: sharding, processes and the compiler in one view, with labels for people.

Only the labels and the order are here. Whether this family and this machine can do something is asked of the
rules that `train` asks, by trying it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from simpletuner.deepspeed.requirements import check_platform
from simpletuner.errors import SimpleTunerError
from simpletuner.models.catalog.support import check_context_parallel
from simpletuner.page.editing.documents import Document
from simpletuner.page.editing.fields import ConfigCheck, FieldGroup, make_field
from simpletuner.settings import Settings
from simpletuner.settings.declared.sections import SECTION_OF
from simpletuner.settings.rules.rules import find_contradictions

GROUPS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "fsdp": (
        "Fully Sharded Data Parallel",
        {
            "fsdp_enable": "Enable FSDP v2",
            "fsdp_version": "FSDP Version",
            "fsdp_reshard_after_forward": "Reshard After Forward",
            "fsdp_state_dict_type": "Checkpoint Format",
            "fsdp_cpu_ram_efficient_loading": "CPU RAM Efficient Loading",
            "fsdp_auto_wrap_policy": "Auto Wrap Policy",
            "fsdp_transformer_layer_cls_to_wrap": "Transformer Classes to Wrap",
            "fsdp_min_num_params": "Smallest Unit of Size Based Wrap",
            "dp_replicate_size": "Hybrid Sharding: Copies of the Model",
            "fsdp_sync_each_batch": "Reduce Gradients After Each Micro-Batch",
            "fsdp_offload_params": "Offload Parameters",
        },
    ),
    "context-parallel": (
        "Context Parallel",
        {
            "context_parallel_size": "Context Parallel Size",
            "context_parallel_comm_strategy": "Context Parallel Rotation",
        },
    ),
    "processes": (
        "Processes and Machines",
        {
            "num_processes": "Processes",
            "num_machines": "Machines",
            "machine_rank": "Machine Rank",
            "main_process_ip": "Main Process IP",
            "main_process_port": "Main Process Port",
            "gpu_ids": "GPUs of Each Machine",
            "use_cpu": "Train on the CPU",
            "mixed_precision": "Mixed Precision",
        },
    ),
    "compile": (
        "torch.compile",
        {
            "dynamo_backend": "Backend",
            "dynamo_mode": "Mode",
            "dynamo_fullgraph": "Full Graph",
            "dynamo_dynamic": "Dynamic Shapes",
            "dynamo_use_regional_compilation": "Regional Compilation",
        },
    ),
    "deepspeed": (
        "DeepSpeed",
        {
            "deepspeed_config": "DeepSpeed Config (JSON)",
            "zero_stage": "ZeRO Stage",
            "offload_optimizer": "Offload Optimizer",
            "offload_param": "Offload Parameters to",
            "offload_param_path": "Offload Folder",
        },
    ),
}
CHOICES = {"fsdp_state_dict_type": {"SHARDED_STATE_DICT": "Sharded", "FULL_STATE_DICT": "Full"}}
"""Words for choices that the form is known for."""


def accelerate_groups(document: Document, examined: ConfigCheck) -> Iterator[FieldGroup]:
    reasons = {name: reason(examined.settings) for name, reason in REASONS.items()}
    for anchor, (title, labels) in GROUPS.items():
        why = reasons.get(anchor, "")
        fields = [make_field(name, document, examined, label, CHOICES.get(name), why) for name, label in labels.items()]
        yield FieldGroup(anchor, title, fields)


def why_no_fsdp(settings: Settings) -> str:
    return contradiction(settings, {"fsdp_enable": True, "zero_stage": None}, "fsdp_enable")


def why_no_context_parallel(settings: Settings) -> str:
    tried = {"fsdp_enable": True, "fsdp_version": 2, "zero_stage": None, "context_parallel_size": 2}
    if why := contradiction(settings, tried, "context_parallel_size", "fsdp_enable"):
        return why
    try:
        check_context_parallel(with_values(settings, tried))
    except SimpleTunerError as error:
        return error.message
    return ""


def why_no_deepspeed(settings: Settings) -> str:
    try:
        check_platform()
    except SimpleTunerError as error:
        return error.message
    return contradiction(settings, {"fsdp_enable": False, "context_parallel_size": 1, "zero_stage": 2}, "zero_stage")


# By group, what says why it cannot be had whatever else is set in this view; empty where it can.
REASONS = {"fsdp": why_no_fsdp, "context-parallel": why_no_context_parallel, "deepspeed": why_no_deepspeed}


def contradiction(settings: Settings, tried: Mapping[str, object], *about: str) -> str:
    """First rule that some values would break, of those about the model and one of the settings `about`."""
    for rule in find_contradictions(with_values(settings, tried)):
        names = {rule.setting, *rule.others}
        if names & set(about) and any(SECTION_OF[name] == "model" for name in names):
            return rule.message
    return ""


def with_values(settings: Settings, values: Mapping[str, object]) -> Settings:
    """Return settings with other values, which are not checked."""
    sections = {
        section: getattr(settings, section).model_copy(
            update={name: value for name, value in values.items() if SECTION_OF[name] == section}
        )
        for section in {SECTION_OF[name] for name in values}
    }
    return settings.model_copy(update=sections)
