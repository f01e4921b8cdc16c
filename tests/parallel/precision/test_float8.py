from __future__ import annotations

import pytest
import torch
from torch import nn

from simpletuner.parallel.precision.precision import convert_linear_layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.narrow, self.down = nn.Linear(32, 64), nn.Linear(64, 6), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return x + self.down(hidden.sigmoid()) * self.narrow(hidden).mean()


def losses_of(float8: bool) -> tuple[torch.Tensor, nn.Module]:
    """Train for some steps, 3 rows at a time, which is no multiple of 16."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 32), Block(), Block())
    names = list(model.state_dict())
    if float8:
        convert_linear_layers(model, ("Block",), emulate=True)
    assert list(model.state_dict()) == names
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    optimizer, losses, inputs = torch.optim.AdamW(model.parameters(), lr=1e-2), [], torch.randn(3, 32)
    for _ in range(20):
        loss = (model(inputs) - inputs.sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), model


def test_linear_layers_of_blocks_compute_in_float8_and_train_nearly_alike():
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    (exact, _), (losses, model) = losses_of(float8=False), losses_of(float8=True)
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    converted = {"1.up", "1.down", "2.up", "2.down"}
    assert {name for name, kind in kinds.items() if kind == "Float8Linear"} == converted
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    difference = (losses - exact).abs().max() / (exact[0] - exact[-1])
    assert 1e-5 < difference < 0.05


def test_outputs_and_gradients_of_a_frozen_layer_are_as_far_off_as_the_docs_say():
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(512, 1024, bias=False)).requires_grad_(False)
    model = nn.Sequential(nn.Sequential(nn.Linear(512, 1024, bias=False))).requires_grad_(False)
    model[0].load_state_dict(exact.state_dict())
    convert_linear_layers(model, ("Sequential",), emulate=True)
    inputs, other = (each.requires_grad_() for each in torch.randn(300, 512).expand(2, 300, 512).clone())
    wanted, found = exact(inputs), model(other)
    gradient = torch.randn_like(wanted)
    wanted.backward(gradient)
    found.backward(gradient)
    errors = [(found - wanted).norm() / wanted.norm(), (other.grad - inputs.grad).norm() / inputs.grad.norm()]
    assert [each.item() for each in errors] == pytest.approx([0.037, 0.058], rel=0.05)


def test_the_matrices_of_a_lora_keep_their_precision():
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    from peft import LoraConfig, inject_adapter_in_model
    from torchao.float8.float8_linear import Float8Linear

    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32)))
    inject_adapter_in_model(LoraConfig(r=16, target_modules=["0.0"]), model)
    convert_linear_layers(model, ("Sequential",), emulate=True)
    converted = {name for name, layer in model.named_modules() if isinstance(layer, Float8Linear)}
    assert converted == {"0.0.base_layer"}


def test_a_run_on_a_device_without_float8_ends_with_a_sentence(sdxl_flags, train, tmp_path):
    flags = (*sdxl_flags, "--train_batch_size=2", "--mixed_precision=bf16", "--max_train_steps=1")
    run = train(tmp_path / "run", *flags, "--float8", "--dynamo_backend=no", code=3)
    assert "float8 needs an NVIDIA GPU of the Ada generation or newer" in " ".join(run.said.split())
    assert "float8 without torch.compile" in " ".join(run.said.split())
