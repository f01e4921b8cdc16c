from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from simpletuner.errors import ExitCode, TrainingError
from simpletuner.parallel.engine import warn_of_slow_dtype
from simpletuner.parallel.gpu import describe_device, explain_out_of_memory, next_to_try, set_float32_precision
from simpletuner.settings.declared.sections import Compile, Ema, Launch, Model, Parallel, Settings, Training

CPU = torch.device("cpu")
SAID = "CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 139.72 GiB. 1 GiB is free."


def settings(**sections) -> Settings:
    return Settings(training=Training(train_batch_size=1, gradient_checkpointing=True), **sections)


def test_a_gpu_without_memory_is_a_sentence_with_the_next_thing_to_try():
    with pytest.raises(TrainingError) as caught, explain_out_of_memory(settings(), CPU):
        raise torch.OutOfMemoryError(SAID)
    assert caught.value.exit_code == ExitCode.TRAINING == 5
    assert caught.value.message == "CUDA out of memory. Tried to allocate 2.25 GiB"
    assert "model_type=lora" in caught.value.hint
    with pytest.raises(TrainingError), explain_out_of_memory(settings(), CPU):
        raise torch.OutOfMemoryError
    with pytest.raises(ZeroDivisionError), explain_out_of_memory(settings(), CPU):
        raise ZeroDivisionError


def test_what_costs_least_is_proposed_first():
    half = Training(activation_memory_budget=0.5)
    several, averaged = Launch(num_processes=2), Ema(use_ema=True, ema_device="accelerator")
    recomputed, compiled = partial(Training, gradient_checkpointing=True), Compile(dynamo_backend="inductor")
    least = recomputed(train_batch_size=1, offload_activations=True)
    for own, proposed in [
        (Settings(training=Training(gradient_checkpointing=False)), "gradient_checkpointing"),
        (Settings(training=recomputed(train_batch_size=6)), "train_batch_size=3 and gradient_accumulation_steps=2"),
        (settings(ema=averaged, launch=several), "ema_device=cpu"),
        (settings(launch=several), "fsdp_enable, which shards"),
        (settings(launch=several, parallel=Parallel(fsdp_enable=True)), "offload_activations"),
        (settings(model=Model(model_type="lora")), "offload_activations"),
        (Settings(training=half, compile=compiled), "budget=0.25"),
        (Settings(training=least, model=Model(model_type="lora")), "use more GPUs"),
        (settings(), "fsdp_enable with fsdp_offload_params"),
    ]:
        assert proposed in next_to_try(own)


def test_the_device_is_described_with_the_kernel_that_computes_attention():
    assert re.fullmatch(
        r"cpu( \(no GPU found\))?, \d+ threads?, attention: (flash|math|efficient|cudnn)", describe_device(CPU)
    )


def test_float32_is_float32_unless_tf32_is_allowed():
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    try:
        for allowed in (True, False):
            set_float32_precision(allowed)
            assert {each.fp32_precision == "tf32" for each in backends} == {allowed}
    finally:
        set_float32_precision(False)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (torch.AcceleratorError, "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        (torch.distributed.DistBackendError, "NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'"),
    ],
)
def test_memory_that_others_than_the_allocator_lack_is_told_the_same_way(kind, said):
    with pytest.raises(TrainingError) as caught, explain_out_of_memory(settings(), CPU):
        raise kind(said)
    assert caught.value.message == said.splitlines()[0]
    assert "model_type=lora" in caught.value.hint
    with pytest.raises(RuntimeError, match="shapes"), explain_out_of_memory(settings(), CPU):
        raise RuntimeError("CUDA error: shapes differ")


def test_the_switches_of_older_programs_can_be_read():
    """Inductor reads them for products that max-autotune tunes; torch refuses where only newer ones were set."""
    try:
        for allowed, precision in ((True, "high"), (False, "highest")):
            set_float32_precision(allowed)
            assert torch.get_float32_matmul_precision() == precision
            assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == allowed
    finally:
        set_float32_precision(False)


@pytest.mark.parametrize(("capability", "is_slow"), [("AVX2", True), ("AVX512", False), ("SVE256", False)])
def test_bf16_on_a_cpu_without_instructions_for_it_is_said(capability, is_slow, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    settings = [Settings(training=Training(mixed_precision=each)) for each in ("bf16", "no")]
    warnings = [warn_of_slow_dtype(each, torch.device(kind)) for each in settings for kind in ("cpu", "cuda")]
    assert [bool(each) for each in warnings] == [is_slow, False, False, False]
