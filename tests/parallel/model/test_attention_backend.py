from __future__ import annotations

import json
from functools import partial

import huggingface_hub.constants
import pytest
import torch
from torch.nn.attention import _fa3
from torch.utils.checkpoint import checkpoint

from simpletuner.errors import SettingsError
from simpletuner.parallel.model.attention_backend import attention_by, attention_kernel
from simpletuner.private_api.of_torch import TorchDispatchMode, equal_gradient_layouts
from simpletuner.settings.values.parsed import check_kernel

CPU = torch.device("cpu")


def test_the_kernel_is_the_one_that_was_asked_for():
    before = attention_kernel(CPU, torch.float32)
    query, mask = torch.rand(3, 1, 2, 5, 8), torch.rand(1, 1, 5, 5) > 0.3
    results = []
    for name in ("auto", "flash", "math"):
        with attention_by(name, CPU, torch.float32):
            assert attention_kernel(CPU, torch.float32) == (before if name == "auto" else name)
            results.append(torch.nn.functional.scaled_dot_product_attention(*query, attn_mask=mask))
    assert attention_kernel(CPU, torch.float32) == before
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cudnn", "attention_backend = cudnn: torch has no such kernel for bfloat16 on this cpu"),
        ("efficient", "attention_backend = efficient: torch has no such kernel for bfloat16 on this cpu"),
        ("flash3", "attention_backend = flash3 needs flash_attn_interface: No module named 'flash_attn_interface'"),
    ],
)
def test_a_kernel_that_is_not_there_is_refused(name, sentence):
    before = attention_kernel(CPU)
    with pytest.raises(SettingsError) as caught, attention_by(name, CPU, torch.bfloat16):
        pass
    assert caught.value.message == sentence and "attention_backend=auto" in caught.value.hint
    assert attention_kernel(CPU) == before


class Strides(TorchDispatchMode):
    """Notes the strides with which a backward pass of attention is called: of the gradient and of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is CPU_BACKWARD:
            self.seen.append((args[0].stride(), args[4].stride()))
        return func(*args, **(kwargs or {}))


CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def joined(query, key, value):
    """As in FLUX's single blocks, where a slice is the gradient of attention."""
    heads = (each.transpose(1, 2) for each in (query, key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    return torch.cat([attended, 2 * attended.detach()], 2)


def test_gradients_come_in_the_layout_of_the_output():
    """By the CPU's operator, since cuDNN's has the same first arguments: see `layouts` in benchmarks/gpu/machine.py."""
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    for operator in (CPU_BACKWARD, cudnn):
        names = [each.name for each in operator._schema.arguments[:5]]
        assert names == ["grad_out", "query", "key", "value", "out"]
    for _ in range(2):  # a run after another one registers it again
        library = equal_gradient_layouts()
        del library
    leaves = [torch.randn(2, 16, 4, 8, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(2, 16, 64)
    with Strides() as before:
        expected = torch.autograd.grad(joined(*leaves), leaves, gradient)
    assert before.seen == [((1024, 8, 64, 1), (512, 8, 32, 1))]
    library = equal_gradient_layouts(CPU_BACKWARD, "AutogradCPU")
    for call in (joined, partial(checkpoint, joined, use_reentrant=False)):
        with Strides() as within:
            found = torch.autograd.grad(call(*leaves), leaves, gradient)
        assert within.seen == [((512, 8, 32, 1), (512, 8, 32, 1))]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    compiled = torch.compile(joined, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves, gradient), expected, rtol=0, atol=0)
    del library
    with Strides() as after:
        torch.autograd.grad(joined(*leaves), leaves, gradient)
    assert after.seen == before.seen


KERNEL = f"someone/flash-attn3@{'a' * 40}"
METADATA = {"id": "_attention_of_tests", "name": "flash-attn3", "version": 1, "license": "BSD-3-Clause"}
OPERATORS = """
import torch
LIBRARY = torch.library.Library("_attention_of_tests", "DEF")
LIBRARY.define("fwd(Tensor q) -> Tensor")
LIBRARY.define("bwd(Tensor q) -> Tensor")
ops = torch.ops._attention_of_tests
"""


def test_flash_attention_3_of_the_hub_becomes_torchs_own(tmp_path, monkeypatch):
    """By a kernel in a folder: its operators are CUDA's, so nothing calls them here."""
    (variant := tmp_path / "build" / "torch-cpu").mkdir(parents=True)
    metadata = METADATA | {"python-depends": [], "backend": {"type": "cpu"}}
    (variant / "metadata.json").write_text(json.dumps(metadata))
    (variant / "__init__.py").write_text("from ._ops import ops\n")
    (variant / "_ops.py").write_text(OPERATORS)
    monkeypatch.setenv("LOCAL_KERNELS", f"someone/flash-attn3={tmp_path}")
    before = attention_kernel(CPU, torch.float32)
    with attention_by("flash3", CPU, torch.float32, KERNEL):
        assert attention_kernel(CPU, torch.float32) == "flash (FA3 of the hub)"
        assert _fa3._FA3_CUDA_FWD is torch.ops._attention_of_tests.fwd
    assert attention_kernel(CPU, torch.float32) == before


def test_a_kernel_that_is_not_in_the_cache_is_said_offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SettingsError) as caught, attention_by("flash3", CPU, torch.float32, KERNEL):
        pass
    assert caught.value.message.startswith(f"attention_kernel = {KERNEL}: Cannot find a local snapshot")


@pytest.mark.parametrize("name", ["flash-attn3", "someone/flash-attn3", "someone/flash-attn3@main", f"x@{'a' * 40}"])
def test_a_kernel_is_named_by_its_commit(name):
    with pytest.raises(ValueError, match="use OWNER/NAME@COMMIT"):
        check_kernel(name)
