from __future__ import annotations

import pytest
import torch

from simpletuner.errors import SettingsError
from simpletuner.parallel.model.attention_backend import attention_by, attention_kernel

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
