"""The optimizers of DeepSpeed's JSON, by any of their names, and why some of them cannot be used.

What DeepSpeed makes of each name stands in `_configure_basic_optimizer` of deepspeed/runtime/engine.py (0.19). Here it
shares out the same optimizers that the other engines use, so that a run may go from one engine to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from simpletuner.settings.deepspeed.keys import Key, idle, refused
from simpletuner.settings.deepspeed.reading import AUTO, Found, read_key
from simpletuner.settings.mistakes import nearest
from simpletuner.settings.sections import Settings
from simpletuner.settings.spelling import normalize_name


@dataclass(frozen=True)
class Kind:
    """One optimizer: DeepSpeed's name, which of our settings it takes, its other parameters, its float32 states."""

    name: str
    shared: tuple[str, ...]
    own: Mapping[str, Key] = field(default_factory=dict)
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")


ADAM = {
    "torch_adam": idle(),
    "bias_correction": refused("moments are always corrected", True),
    "adam_w_mode": idle(),
    "fp32_optimizer_states": idle(),
    "amsgrad": refused("there is no AMSGrad"),
}
ADAGRAD = {
    "lr_decay": refused("the learning rate is that of lr_scheduler"),
    "initial_accumulator_value": refused("sums of squares begin at zero"),
}
KINDS: dict[str, Kind] = {
    "adamw": Kind("AdamW", ("lr", "betas", "eps", "weight_decay"), ADAM),
    "adam": Kind("Adam", ("lr", "betas", "eps", "weight_decay"), ADAM),
    "adagrad": Kind("Adagrad", ("lr", "eps", "weight_decay"), ADAGRAD, ("sum",)),
    "lion": Kind("Lion", ("lr", "betas", "weight_decay"), {}, ("exp_avg",)),
}
ONE_BIT = "it compresses by NCCL or MPI of its own, knows no ZeRO stage above 1, and DeepSpeed 0.19 has removed it"
MUP = "it needs the package mup and a model that was made with mup's base shapes, which diffusers' are not"
REFUSED: dict[str, str] = {
    "lamb": "its step depends on the norm of each layer, and ZeRO hands it slices of all layers as one tensor",
    "onebitadam": ONE_BIT,
    "onebitlamb": ONE_BIT,
    "zerooneadam": ONE_BIT,
    "muadam": MUP,
    "muadamw": MUP,
    "musgd": MUP,
    "muon": "it updates matrices alone, and everything else with a second optimizer; here one optimizer updates all",
}
MEANS_ADAMW = ("cpuadam", "fusedadam", "deepspeedcpuadam", "cpuadamw", "fusedadamw", "adam8bit", "adamw8bit")
MEANS_ADAMW += ("torchadam", "torchadamw", "adamwtorch", "pagedadamw", "pagedadamw8bit")

KNOBS = {
    "lr": "learning_rate",
    "eps": "adam_epsilon",
    "weight_decay": "adam_weight_decay",
    "max_grad_norm": "max_grad_norm",
}
"""Parameters that are settings of ours; `betas` are two."""


def read_optimizer(block: Any, chosen: str, found: Found) -> None:
    """Account for the optimizer of DeepSpeed's JSON; `chosen` is our setting, for a JSON that names none."""
    if block is None or block == AUTO:
        return
    if not isinstance(block, Mapping):
        found.wrong("optimizer", block, "use a JSON object with type and params")
        return
    for name in block.keys() - {"type", "params", "legacy_fusion"}:
        found.unknown(f"optimizer.{name}", ("type", "params"))
    params = block.get("params") or {}
    if not isinstance(params, Mapping):
        found.wrong("optimizer.params", params, "use a JSON object")
        return
    given = block.get("type")
    name = chosen if given in (None, AUTO) else read_type(given, params, found)
    if name in KINDS:
        read_params(KINDS[name], params, found)


def read_type(given: Any, params: Mapping[str, Any], found: Found) -> str:
    """Note which optimizer is meant, and return our name of it; empty for one that cannot be used."""
    word = normalize_name(given).replace("_", "")
    if word in REFUSED:
        found.wrong("optimizer.type", given, f"it cannot be used: {REFUSED[word]}; use AdamW")
        return ""
    name = "adamw" if word in MEANS_ADAMW else word
    if name not in KINDS:
        known = [kind.name for kind in KINDS.values()]
        found.wrong("optimizer.type", given, f"use one of {', '.join(known)}{nearest(str(given), known)}")
        return ""
    if word == "adam" and params.get("adam_w_mode", True) is not False:
        name = "adamw"
        found.warnings.append(f"optimizer {given} becomes AdamW, as DeepSpeed has it unless adam_w_mode is false")
    elif word in MEANS_ADAMW:
        found.warnings.append(f"optimizer {given} becomes AdamW, fused, wherever its state is")
    found.say("optimizer", name, "optimizer.type")
    return name


def read_params(kind: Kind, params: Mapping[str, Any], found: Found) -> None:
    """Account for the parameters of an optimizer."""
    for name, value in params.items():
        path = f"optimizer.params.{name}"
        if value is None or value == AUTO:
            continue
        if name == "betas" and "betas" in kind.shared:
            read_betas(path, value, found)
        elif name in KNOBS and name in (*kind.shared, "max_grad_norm"):
            found.say(KNOBS[name], value, path)
        elif name in kind.own:
            read_key(kind.own[name], path, path, value, found)
        else:
            found.unknown(path, (*kind.shared, *kind.own))


def read_betas(path: str, value: Any, found: Found) -> None:
    """Note the decays of both moments."""
    if isinstance(value, list) and len(value) == 2:
        found.say("adam_beta1", value[0], path)
        found.say("adam_beta2", value[1], path)
    else:
        found.wrong(path, value, "use a list of two numbers")


def optimizer_block(settings: Settings) -> dict[str, Any]:
    """Return the optimizer of DeepSpeed's JSON for our settings."""
    own = settings.optimizer
    kind = KINDS[own.optimizer]
    ours = {
        "lr": own.learning_rate,
        "betas": [own.adam_beta1, own.adam_beta2],
        "eps": own.adam_epsilon,
        "weight_decay": own.adam_weight_decay,
    }
    params = {name: ours[name] for name in kind.shared}
    return {"type": kind.name, "params": params | ({"adam_w_mode": False} if own.optimizer == "adam" else {})}


def states_of(settings: Settings) -> tuple[str, ...]:
    """Return the names of the float32 states that the optimizer keeps of each weight, as DeepSpeed calls them."""
    return KINDS[settings.optimizer.optimizer].states
