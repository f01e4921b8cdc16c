from __future__ import annotations

import pytest

from simpletuner.errors import SettingsError
from simpletuner.settings import Settings, load
from simpletuner.settings.rules.rules import RULES, find_contradictions

ENOUGH = {"model_family": "sdxl", "instance_data_dir": "pictures"}

REFUSED = [
    (
        {"model_family": ""},
        "model_family is missing: say what to train, such as --model_family=sdxl",
    ),
    (
        {"instance_data_dir": None},
        "no images: give --instance_data_dir=FOLDER or --data_backend_config=FILE",
    ),
    (
        {"num_train_epochs": 0},
        "num_train_epochs = 0 and no max_train_steps: say how long to train, by one of them",
    ),
    (
        {"data_backend_config": "d.json"},
        "instance_data_dir and data_backend_config both name images: keep one of them",
    ),
    (
        {"caption_strategy": "instanceprompt"},
        "caption_strategy=instanceprompt needs --instance_prompt='a phrase'",
    ),
    (
        {"fsdp_enable": True, "zero_stage": 2},
        "FSDP and DeepSpeed cannot be enabled simultaneously. Set zero_stage=none, or fsdp_enable=false",
    ),
    (
        {"model_type": "lora", "zero_stage": 1},
        "model_type=lora cannot run with DeepSpeed: it shares out the state of all weights, of "
        "which an adapter has few, and saves them whole; drop zero_stage and deepspeed_config",
    ),
    (
        {"base_model_precision": "int8"},
        "base_model_precision = int8, but model_type = full trains all weights, in float32; a quantized base is for "
        "LoRA: set model_type=lora, or leave it out and share weights out over the ranks with fsdp_enable",
    ),
    (
        {"export_single_file": True, "model_type": "lora"},
        "export_single_file is for whole models: a LoRA is one file already; leave it out",
    ),
    (
        {"export_precision": "float8", "model_type": "lora"},
        "export_precision = float8 is for whole models, not for adapters; set bf16 or fp16",
    ),
    (
        {"export_single_file": True, "model_family": "flux"},
        "export_single_file is for model_family=sd1x, sd2x, sdxl: the original layout of flux is not written",
    ),
    (
        {"state_layout": "split", "optimizer": "lion"},
        "state_layout = split holds the moments of AdamW: set optimizer=adamw, or state_layout=fp32 for lion",
    ),
    (
        {"float8": True, "mixed_precision": "no"},
        "float8 is for linear layers of a denoiser that computes in bf16: set mixed_precision=bf16",
    ),
    (
        {"float8": True, "zero_stage": 2},
        "float8 was not tried with DeepSpeed, which replaces linear layers itself: use fsdp_enable",
    ),
    (
        {"float8": True, "model_type": "lora"},
        "float8 is for model_type=full: leave it out, or hold the frozen base in 8 bits with base_model_precision=int8",
    ),
    (
        {"optimizer": "adamw_schedulefree", "lr_scheduler": "cosine"},
        "optimizer = adamw_schedulefree averages its steps in place of lr_scheduler = cosine: set lr_scheduler to "
        "constant or constant_with_warmup",
    ),
    (
        {"optimizer": "adamw_schedulefree", "use_ema": True},
        "optimizer = adamw_schedulefree evaluates and saves an average of its own, which needs no second one: set "
        "use_ema=false",
    ),
    (
        {"optimizer": "adamw_schedulefree", "adam_beta1": 0},
        "optimizer = adamw_schedulefree takes gradients near its average, which adam_beta1 = 0 leaves out",
    ),
    (
        {"optimizer": "muon", "zero_stage": 2, "offload_optimizer": "cpu"},
        "optimizer = muon multiplies matrices in each step, which offload_optimizer = cpu would leave to the CPU: set "
        "offload_optimizer=none",
    ),
    (
        {"grad_clip_method": "value", "zero_stage": 2},
        "grad_clip_method = value cannot run with DeepSpeed, which clips by the norm: set norm, or use fsdp_enable",
    ),
    (
        {"optimizer": "muon", "fsdp_enable": True, "fsdp_offload_params": True},
        "optimizer = muon multiplies matrices in each step, which fsdp_offload_params would leave to the CPU: set "
        "fsdp_offload_params=false",
    ),
    (
        {"optimizer_release_gradients": True},
        "optimizer_release_gradients updates weights before all gradients are there, which max_grad_norm = 2.0 clips "
        "together: set max_grad_norm=0",
    ),
    (
        {"optimizer_release_gradients": True, "max_grad_norm": 0, "gradient_accumulation_steps": 2},
        "optimizer_release_gradients frees gradients that gradient_accumulation_steps = 2 would add up: set it to 1",
    ),
    (
        {"optimizer_release_gradients": True, "max_grad_norm": 0, "optimizer": "muon"},
        "optimizer_release_gradients updates weights one by one, but optimizer = muon needs the gradients of many "
        "weights at once: set optimizer=adamw",
    ),
    (
        {"optimizer_release_gradients": True, "max_grad_norm": 0, "zero_stage": 2},
        "optimizer_release_gradients cannot run with DeepSpeed, which keeps gradients in buffers of its own: use "
        "fsdp_enable",
    ),
    (
        {"optimizer_release_gradients": True, "max_grad_norm": 0, "num_processes": 2},
        "optimizer_release_gradients frees nothing on 2 ranks without FSDP2, since DDP keeps all gradients in its "
        "buckets: set fsdp_enable=true",
    ),
    (
        {
            "optimizer_release_gradients": True,
            "max_grad_norm": 0,
            "fsdp_enable": True,
            "fsdp_offload_params": True,
        },
        "optimizer_release_gradients frees no GPU memory with fsdp_offload_params, which moves gradients off the GPU "
        "already: leave it out",
    ),
    (
        {"optimizer_release_gradients": True, "max_grad_norm": 0, "model_type": "lora"},
        "optimizer_release_gradients is for model_type=full: the gradients of a LoRA are small; leave it out",
    ),
    (
        {"state_layout": "split", "mixed_precision": "no"},
        "state_layout = split holds weights in bf16 to compute with them, but mixed_precision = no computes in "
        "float32: set mixed_precision=bf16, or state_layout=fp32",
    ),
    (
        {"state_layout": "split", "zero_stage": 3},
        "state_layout = split cannot run with DeepSpeed, which makes float32 masters and moments of its own: use "
        "fsdp_enable in place of zero_stage, or state_layout=fp32",
    ),
    (
        {"state_layout": "split", "model_type": "lora"},
        "state_layout = split is for model_type=full: the few weights of a LoRA are float32, and its frozen base is in "
        "bf16 already; leave state_layout out",
    ),
    (
        {"model_type": "lora", "lora_type": "dora", "base_model_precision": "int8"},
        "base_model_precision = int8, but lora_type = dora measures the rows of the base's weights in each step, and "
        "peft does not know the quantized ones: take lora, loha, lokr or oft",
    ),
    (
        {"attention_kernel": f"kernels-community/flash-attn3@{'a' * 40}"},
        "attention_kernel is for attention_backend=flash3, but it is auto: set it to flash3",
    ),
    (
        {"model_type": "lora", "base_model_compute": "int8"},
        "base_model_compute = int8 multiplies weights that are in int8, but base_model_precision = no_change: set it "
        "to int8",
    ),
    (
        {"model_type": "lora", "lora_type": "oft", "lora_alpha": 8},
        "lora_type=oft rotates, and has nothing to scale: leave lora_alpha out",
    ),
    (
        {"model_type": "lora", "lora_type": "loha", "lora_dropout": 0.1},
        "lora_dropout zeroes the inputs of LoRA's matrices, which lora_type = loha does not have: leave it out",
    ),
    (
        {"model_type": "lora", "lora_type": "loha", "lokr_factor": 4},
        "lokr_factor is for lora_type=lokr, not loha: leave it out",
    ),
    (
        {"model_type": "lora", "lora_type": "lokr", "export_format": "diffusers,kohya"},
        "export_format = diffusers,kohya writes LoRA alone for other programs, not lokr: leave it out",
    ),
    (
        {"zero_stage": 2, "offload_param": "cpu"},
        "offload_param = cpu, but zero_stage = 2: below stage 3 every rank keeps all weights at hand; set "
        "zero_stage=3, or offload_param=none",
    ),
    (
        {"zero_stage": 2, "offload_optimizer": "nvme", "offload_param_path": "/x"},
        "offload_optimizer = nvme, but zero_stage = 2: below stage 3 DeepSpeed keeps what is offloaded in memory; set "
        "zero_stage=3, or offload_optimizer=cpu",
    ),
    (
        {"zero_stage": 3, "offload_optimizer": "nvme"},
        "offload_optimizer = nvme: where to? Set offload_param_path to a folder on a fast disk of each machine",
    ),
    (
        {"zero_stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"},
        "offload_optimizer = nvme and offload_param = nvme: where to? Set offload_param_path to a folder on a fast "
        "disk of each machine",
    ),
    (
        {"offload_param": "cpu"},
        "offload_param = cpu needs DeepSpeed: set zero_stage, or offload_param=none",
    ),
    (
        {"dp_replicate_size": 2, "num_processes": 4},
        "dp_replicate_size = 2 is for FSDP2, which shards each copy: set fsdp_enable=true, or leave it out for a whole "
        "copy on each rank",
    ),
    (
        {"dp_replicate_size": 2, "num_processes": 3, "fsdp_enable": True},
        "num_processes = 3 is no multiple of dp_replicate_size = 2: copies would be unequal",
    ),
    (
        {"fsdp_offload_params": True},
        "fsdp_offload_params is for FSDP2: set fsdp_enable=true, or zero_stage=3 with offload_param=cpu",
    ),
    (
        {"context_parallel_size": 2, "num_processes": 2},
        "Context parallelism requires FSDP2. Set fsdp_enable=true and fsdp_version=2, or context_parallel_size=1",
    ),
    (
        {"context_parallel_size": 4, "num_processes": 4, "fsdp_enable": True, "dp_replicate_size": 2},
        "dp_replicate_size = 2 leaves 2 ranks to each copy, which is no multiple of context_parallel_size = 4: every "
        "group of ranks must be whole",
    ),
    (
        {"context_parallel_size": 2, "num_processes": 3, "fsdp_enable": True},
        "num_processes = 3 is no multiple of context_parallel_size = 2: every group of ranks must be whole",
    ),
    (
        {
            "context_parallel_size": 2,
            "num_processes": 2,
            "fsdp_enable": True,
            "dynamo_backend": "inductor",
            "dynamo_fullgraph": True,
        },
        "dynamo_fullgraph cannot be used with context_parallel_size above 1, since ranks exchange keys and values "
        "between graphs: leave it out",
    ),
    (
        {"num_processes": 7, "num_machines": 2, "main_process_ip": "10.0.0.1"},
        "num_processes = 7 cannot be shared equally by num_machines = 2: every machine must run the same number of "
        "ranks",
    ),
    *(
        (
            {"gradient_accumulation_steps": 2, "dynamo_backend": "inductor", **graphs},
            "CUDA graphs cannot be used with gradient_accumulation_steps above 1: the next micro-batch writes over the "
            "gradients of this one; set dynamo_mode to default or max-autotune-no-cudagraphs, or train_batch_size to "
            "the sum",
        )
        for graphs in (
            {"dynamo_mode": "reduce-overhead"},
            {"dynamo_mode": "max-autotune"},
            {"dynamo_backend": "cudagraphs"},
        )
    ),
    (
        {"dynamo_backend": "inductor", "dynamo_mode": "reduce-overhead", "fsdp_enable": True},
        "CUDA graphs cannot be used with fsdp_enable: gathered weights have another address in each step, so every "
        "block would be recorded again; set dynamo_mode to default or max-autotune-no-cudagraphs, with "
        "dynamo_backend=inductor",
    ),
    (
        {"profile_steps": "3:9", "max_train_steps": 8},
        "profile_steps = 3:9 goes beyond max_train_steps = 8: end it at 8 or before",
    ),
    (
        {"dynamo_backend": "aot_eager", "dynamo_mode": "max-autotune"},
        "dynamo_mode=max-autotune is for dynamo_backend=inductor: aot_eager has no modes; leave dynamo_mode out",
    ),
    (
        {
            "dynamo_backend": "eager",
            "dynamo_fullgraph": True,
            "dynamo_use_regional_compilation": False,
            "fsdp_enable": True,
        },
        "dynamo_fullgraph cannot compile a sharded denoiser as a whole, since FSDP2 gathers weights between its "
        "graphs: set dynamo_use_regional_compilation=true",
    ),
    (
        {"activation_memory_budget": 0.5, "dynamo_backend": "eager"},
        "activation_memory_budget = 0.5 is not read by dynamo_backend = eager: set "
        "dynamo_backend=inductor or no, or leave the budget to gradient_checkpointing",
    ),
    (
        {"fuse_qkv_projections": True, "model_type": "lora"},
        "fuse_qkv_projections would pass over the adapters that model_type = lora adds to single projections: leave it "
        "out",
    ),
    (
        {"fuse_qkv_projections": True, "zero_stage": 3},
        "fuse_qkv_projections cannot be used with zero_stage = 3, where DeepSpeed gathers a layer's weights when that "
        "layer is called: use fsdp_enable or zero_stage=2, or leave it out",
    ),
    (
        {"fuse_qkv_projections": True, "fsdp_enable": True, "fsdp_auto_wrap_policy": "size"},
        "fuse_qkv_projections needs units that are whole blocks, but fsdp_auto_wrap_policy = SIZE_BASED_WRAP may make "
        "a projection a unit of its own: set TRANSFORMER_BASED_WRAP, or leave it out",
    ),
    (
        {"machine_rank": 1},
        "machine_rank = 1, but num_machines = 1: ranks of machines go from 0 to 0",
    ),
    (
        {"num_processes": 2, "num_machines": 2},
        "num_machines = 2 needs --main_process_ip: the address of machine 0",
    ),
    (
        {"fsdp_auto_wrap_policy": "BLOCKS"},
        "fsdp_auto_wrap_policy = 'BLOCKS': use TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP, "
        "or a dotted path to a callable",
    ),
    (
        {"flow_schedule_auto_shift": True, "flow_schedule_shift": 3.0},
        "flow_schedule_auto_shift shifts by image size, but flow_schedule_shift = 3.0 is for all sizes: leave one of "
        "them out",
    ),
    (
        {"lr_warmup_steps": 11, "max_train_steps": 10},
        "lr_warmup_steps = 11 is more than max_train_steps = 10: set it to 10 or less, or to a fraction of the run, "
        "such as 0.05",
    ),
]

ACCEPTED = [
    {},
    {"instance_data_dir": None, "data_backend_config": "d.json", "caption_strategy": "instanceprompt"},
    {"caption_strategy": "instanceprompt", "instance_prompt": "a phrase"},
    {"fsdp_auto_wrap_policy": "my.policies.blocks"},
    {"fsdp_auto_wrap_policy": "none"},
    {"validation_resolution": "1024"},
    {"validation_resolution": "1216x832"},
    {"validation_resolution": "1024X1024, 1280x768"},
    {"lr_warmup_steps": 10, "max_train_steps": 10},
    {"lr_warmup_steps": 1000},
    {"lr_warmup_steps": 0.05, "max_train_steps": 3},
    {"dynamo_backend": "inductor", "dynamo_mode": "max-autotune"},
    {"dynamo_mode": "max-autotune"},
    {"dynamo_mode": "max-autotune-no-cudagraphs", "gradient_accumulation_steps": 2},
    {"activation_memory_budget": 0.5},
    {"activation_memory_budget": 0, "dynamo_backend": "aot_eager"},
    {"activation_memory_budget": 0.5, "dynamo_backend": "no"},
    {"fuse_qkv_projections": True, "fsdp_enable": True, "zero_stage": None},
    {"zero_stage": 1, "offload_optimizer": "cpu"},
    {"zero_stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme", "offload_param_path": "/x"},
    {"zero_stage": 3, "offload_param": "cpu"},
    {"zero_stage": 2, "optimizer": "lion"},
    {"dynamo_backend": "eager", "dynamo_fullgraph": True, "fsdp_enable": True},
    {"dynamo_backend": "eager", "dynamo_fullgraph": True, "dynamo_use_regional_compilation": False},
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_each_contradiction_is_one_sentence(change, sentence):
    with pytest.raises(SettingsError) as caught:
        load({**ENOUGH, **change})
    assert caught.value.message == sentence


@pytest.mark.parametrize("change", ACCEPTED)
def test_what_does_not_contradict_itself_is_accepted(change):
    assert find_contradictions(load({**ENOUGH, **change}).settings) == []


def test_every_rule_has_a_case_above():
    spoken = set()
    for change, _ in REFUSED:
        values = {**ENOUGH, **change}
        sections = {
            name: field.annotation(**{k: v for k, v in values.items() if k in field.annotation.model_fields})
            for name, field in Settings.model_fields.items()
        }
        spoken |= {rule for rule in RULES if list(rule(Settings(**sections)))}
    assert spoken == set(RULES)


def test_several_contradictions_are_reported_at_once():
    with pytest.raises(SettingsError) as caught:
        load({"validation_resolution": "big", "machine_rank": 1})
    assert len(caught.value.message.splitlines()) == 4


def test_an_unknown_name_does_not_hide_a_contradiction():
    with pytest.raises(SettingsError) as caught:
        load({"instance_data_dir": "x", "sed": "1"})
    assert "sed (flag): unknown setting" in caught.value.message
    assert "model_family is missing" in caught.value.message


@pytest.mark.parametrize("size", ["0", "1024x", "0x512", "512x0", "512,", "512,512x512"])
def test_a_validation_size_of_no_pixels_or_a_size_twice_is_refused(size):
    with pytest.raises(SettingsError, match=f"validation_resolution = '{size}' .flag.: (write an edge|512x512 stands)"):
        load({**ENOUGH, "validation_resolution": size})


def test_a_small_rate_is_said_where_prodigy_multiplies_it():
    flags = {"model_family": "sdxl", "optimizer": "prodigy"}
    assert load(flags, complete=False, environment={}).warnings == ()
    [warning] = load(flags | {"learning_rate": 1e-5}, complete=False, environment={}).warnings
    assert "optimizer = prodigy multiplies the rate that it finds by learning_rate = 1e-05: 1 is usual" in warning
