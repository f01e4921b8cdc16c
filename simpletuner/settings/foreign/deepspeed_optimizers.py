"""The optimizers of DeepSpeed's JSON, by any of their names, and why some of them cannot be used.

What DeepSpeed makes of each name stands in `_configure_basic_optimizer` of runtime/engine.py (0.19). Here it
shards the same optimizers that the other engines use, so that a run may change from one engine to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from simpletuner.settings.declared.errors import did_you_mean
from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.foreign.deepspeed_keys import ANYWAY, AUTO, is_off
from simpletuner.settings.foreign.deepspeed_parsed import ParsedConfig
from simpletuner.settings.foreign.key_table import KeyTable, Maps, Refuses, Rule, in_section
from simpletuner.settings.values.spelling import normalize_name

# Parameters that are settings of ours; `betas` are two settings.
SETTINGS = {
    "lr": "learning_rate",
    "eps": "adam_epsilon",
    "weight_decay": "adam_weight_decay",
}


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer: DeepSpeed's name, our settings that it takes, its other parameters."""

    name: str
    shared: tuple[str, ...]
    own: Mapping[str, Rule] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """DeepSpeed's values of parameters that are not given."""

    @property
    def table(self) -> KeyTable:
        """The rules of its parameters, except `betas`."""
        shared = {name: Maps(SETTINGS[name]) for name in self.shared if name in SETTINGS}
        return KeyTable(in_section("optimizer.params", shared | dict(self.own)), unset=(None, AUTO), is_off=is_off)


# How a step is computed, as classes of torch and of DeepSpeed call it: it changes no result.
HOW: dict[str, Rule] = dict.fromkeys(("foreach", "fused", "capturable", "differentiable", "set_grad_none"), ANYWAY)
HOW |= {"fp32_optimizer_states": ANYWAY, "maximize": Refuses("losses are minimized")}
HOW |= {"max_grad_norm": Refuses("DeepSpeed refuses it there: write gradient_clipping at the top")}
ADAM: dict[str, Rule] = HOW | {
    "torch_adam": ANYWAY,
    "bias_correction": Refuses("moments are always corrected", (True,)),
    "adam_w_mode": ANYWAY,
    "amsgrad": Refuses("there is no AMSGrad"),
}
ADAGRAD: dict[str, Rule] = HOW | {
    "lr_decay": Refuses("the learning rate is that of lr_scheduler", (0,)),
    "initial_accumulator_value": Refuses("sums of squares begin at zero", (0,)),
}
MUON_RATE = (
    "such as 1e-4: a step of a matrix is 0.2 x sqrt(columns) times DeepSpeed's at the same rate, "
    "11 times with 3,072 columns"
)
ONE_RATE = "one learning_rate is for all: updates of matrices are scaled to the size of AdamW's"
MUON: dict[str, Rule] = HOW | {
    "torch_adam": ANYWAY,
    "adam_w_mode": Refuses("what is no matrix steps by AdamW", (True,)),
    "momentum": Refuses("the momentum is 0.95", (0.95,)),
    "muon_lr": Refuses(ONE_RATE),
    "adam_lr": Refuses(ONE_RATE),
    "ns_method": Refuses("matrices are orthogonalized by five Newton-Schulz iterations", ("gram", "standard")),
    "per_head_muon": Refuses("matrices are orthogonalized as a whole"),
}
ADAM_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": OptimizerSpec("AdamW", ("lr", "betas", "eps", "weight_decay"), ADAM, ADAM_DEFAULTS),
    "adam": OptimizerSpec("Adam", ("lr", "betas", "eps", "weight_decay"), ADAM, ADAM_DEFAULTS),
    "adagrad": OptimizerSpec(
        "Adagrad", ("lr", "eps", "weight_decay"), ADAGRAD, {"lr": 0.01, "eps": 1e-10, "weight_decay": 0.0}
    ),
    "lion": OptimizerSpec(
        "Lion", ("lr", "betas", "weight_decay"), HOW, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
    ),
    # Of the two halves, matrices at 0.02 and the rest at 3e-4, it is the rate of matrices.
    "muon": OptimizerSpec(
        "Muon",
        ("lr", "betas", "eps", "weight_decay"),
        MUON,
        {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0},
    ),
}
TORCH_ADAMW_DECAY = 0.01
"""Default weight decay of torch.optim.AdamW, used by DeepSpeed for AdamW with `torch_adam`."""
ONE_BIT = "it compresses by NCCL or MPI of its own, supports no ZeRO stage above 1, and DeepSpeed 0.19 has removed it"
MUP = "it needs the package mup and a model that was made with mup's base shapes, which diffusers' are not"
REFUSED: dict[str, str] = {
    "lamb": "its step depends on the norm of each layer, and ZeRO hands it slices of all layers as one tensor",
    "onebitadam": ONE_BIT,
    "onebitlamb": ONE_BIT,
    "zerooneadam": ONE_BIT,
    "muadam": MUP,
    "muadamw": MUP,
    "musgd": MUP,
}
MEANS_ADAMW = ("cpuadam", "fusedadam", "deepspeedcpuadam", "cpuadamw", "fusedadamw", "adam8bit", "adamw8bit")
MEANS_ADAMW += ("torchadam", "torchadamw", "adamwtorch", "pagedadamw", "pagedadamw8bit")


def read_optimizer(block: object, chosen: str, parsed: ParsedConfig) -> None:
    """Read the optimizer of DeepSpeed's JSON; `chosen` is our setting, for a JSON that names none."""
    if block is None or block == AUTO:
        return
    if not isinstance(block, Mapping):
        parsed.refuse("optimizer", block, "use a JSON object with type and params")
        return
    for name in block.keys() - {"type", "params", "legacy_fusion"}:
        parsed.refuse_unknown(f"optimizer.{name}", ("type", "params"))
    params = block.get("params") or {}
    if not isinstance(params, Mapping):
        parsed.refuse("optimizer.params", params, "use a JSON object")
        return
    given = block.get("type")
    name = chosen if given in (None, AUTO) else read_type(given, params, parsed)
    if name in OPTIMIZERS:
        read_params(OPTIMIZERS[name], params, parsed)
        note_defaults(name, params, parsed)
        if name == "muon" and params.get("lr") not in (None, AUTO):
            parsed.warnings.append(
                f"optimizer.params.lr = {params['lr']}{parsed.where} is a rate of AdamW's size here, {MUON_RATE}"
            )


def read_type(given: object, params: Mapping[str, object], parsed: ParsedConfig) -> str:
    """Set which optimizer is meant, and return our name of it; empty for one that cannot be used."""
    word = normalize_name(given).replace("_", "")
    if word in REFUSED:
        parsed.refuse("optimizer.type", given, f"it cannot be used: {REFUSED[word]}; use AdamW")
        return ""
    name = "adamw" if word in MEANS_ADAMW else word
    if name not in OPTIMIZERS:
        known = [spec.name for spec in OPTIMIZERS.values()]
        parsed.refuse("optimizer.type", given, f"use one of {', '.join(known)}", did_you_mean(str(given), known))
        return ""
    if word == "adam" and params.get("adam_w_mode", True) is not False:
        name = "adamw"
        parsed.warnings.append(
            f"optimizer {given}{parsed.where} becomes AdamW, as DeepSpeed has it unless adam_w_mode is false"
        )
    elif word in MEANS_ADAMW:
        parsed.warnings.append(f"optimizer {given}{parsed.where} becomes AdamW, fused, wherever its state is")
    parsed.set("optimizer", name, "optimizer.type")
    return name


def note_defaults(name: str, params: Mapping[str, object], parsed: ParsedConfig) -> None:
    """Record DeepSpeed's defaults for parameters that the JSON does not name."""
    defaults = dict(OPTIMIZERS[name].defaults)
    if name == "adamw" and params.get("torch_adam") is True:
        defaults["weight_decay"] = TORCH_ADAMW_DECAY
    for key, value in defaults.items():
        if key not in params:
            pairs = (
                zip(("adam_beta1", "adam_beta2"), value, strict=True) if key == "betas" else [(SETTINGS[key], value)]
            )
            for setting, own in pairs:
                parsed.leave_out(setting, own, f"optimizer.params.{key}", value)


def read_params(spec: OptimizerSpec, params: Mapping[str, object], parsed: ParsedConfig) -> None:
    betas = params.get("betas") if "betas" in spec.shared else None
    rest = {name: value for name, value in params.items() if name != "betas" or "betas" not in spec.shared}
    if isinstance(betas, list) and len(betas) == 2:
        parsed.set("adam_beta1", betas[0], "optimizer.params.betas")
        parsed.set("adam_beta2", betas[1], "optimizer.params.betas")
    elif betas not in (None, AUTO):
        parsed.refuse("optimizer.params.betas", betas, "use a list of two numbers")
    parsed.read(rest, spec.table, "optimizer.params.")


def optimizer_block(settings: Settings) -> dict[str, object]:
    own = settings.optimizer
    spec = OPTIMIZERS[own.optimizer]
    ours = {name: getattr(own, setting) for name, setting in SETTINGS.items()}
    ours["betas"] = [own.adam_beta1, own.adam_beta2]
    params = {name: ours[name] for name in spec.shared}
    # DeepSpeed makes AdamW of "Adam" unless adam_w_mode is false.
    return {"type": spec.name, "params": params | ({"adam_w_mode": False} if own.optimizer == "adam" else {})}
