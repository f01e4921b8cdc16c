"""Losses of 500 steps with 8-bit moments beside float32: state_layout=split, and torchao's AdamW8bit over bf16 weights.

torchao rounds bf16 weights stochastically and holds no remainder of them: 4 bytes per parameter between steps, and
`split` 6. Needs `pip install 'torchao>=0.18' 'torch>=2.10' 'peft>=0.21'`.
"""

from __future__ import annotations

import copy

import torch
from interleaved import print_table
from torch import Tensor, nn
from torchao.optim import AdamW8bit

from simpletuner.parallel.precision.split_adamw import SplitAdamW, write_float32

STEPS, WINDOW, WIDTH = 500, 20, 256
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    hidden = [each for _ in range(3) for each in (nn.Linear(WIDTH, WIDTH), nn.SiLU())]
    return nn.Sequential(nn.Linear(64, WIDTH), nn.SiLU(), *hidden, nn.Linear(WIDTH, 16))


def make_optimizer(way: str, model: nn.Module, exact: list[Tensor], rate: float) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if way == "torchao":
        return AdamW8bit(parameters, lr=rate, **ADAM, bf16_stochastic_round=True)
    if way == "split":
        split = SplitAdamW(parameters, lr=rate, **ADAM)
        for parameter, values in zip(parameters, exact, strict=True):
            split.remainders[parameter] = torch.empty_like(parameter, dtype=torch.int16)
            write_float32(values, parameter.data, split.remainders[parameter])
        return split
    return torch.optim.AdamW(parameters, lr=rate, **ADAM)


def losses_of(way: str, rate: float) -> Tensor:
    """Return the means of windows of losses. Both layouts compute in bf16; `autocast` does so over float32 weights."""
    model = make_model()
    exact = [parameter.detach().clone() for parameter in model.parameters()]
    teacher = copy.deepcopy(model)
    for parameter in teacher.parameters():
        parameter.data.mul_(1.5)
    if way in ("split", "torchao"):
        model.bfloat16()
    optimizer, losses = make_optimizer(way, model, exact, rate), []
    noise = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs = torch.randn(64, 64, generator=noise)
        with torch.no_grad():
            wanted = teacher(inputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            predicted = model(inputs.to(next(model.parameters()).dtype))
        loss = (predicted.float() - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).view(-1, WINDOW).mean(dim=1)


def main() -> None:
    """Print how far the losses are from those of float32, at two learning rates; torchao compiles its steps first."""
    rows = []
    for rate in (1e-4, 1e-3):
        exact = losses_of("fp32", rate)
        for way in ("autocast", "split", "torchao"):
            apart = (losses_of(way, rate) / exact - 1).abs()
            rows.append([f"{way}, learning rate {rate:g}", f"{apart.max():.2%}", f"{apart[-5:].mean():.2%}"])
    title = f"{STEPS} steps of a network of {sum(p.numel() for p in make_model().parameters()):,} parameters"
    print_table(title, ["weights and moments", f"most, of means of {WINDOW}", "last 100 steps"], rows)


if __name__ == "__main__":
    main()
