"""LoRA and other adapters by peft: adapted layers, trained tensors, first values.

LoRA (Hu et al. 2021, arXiv:2106.09685) adds a pair of matrices to each adapted layer of the denoiser.
Checkpoints and exported files use peft's names: `<layer>.lora_A.weight` (rank x in) and
`<layer>.lora_B.weight` (out x rank).

DoRA: Liu et al. 2024 (arXiv:2402.09353). LoHa: Hyeon-Woo et al. 2021 (arXiv:2108.06098) as in LyCORIS. LoKr:
Yeh et al. 2023 (arXiv:2309.14859). OFT: Qiu et al. 2023 (arXiv:2306.07280), by Cayley's map as a series.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.data.sampler.epoch_order import hash_key
from simpletuner.errors import SettingsError
from simpletuner.private_api.of_diffusers import modules_in_float32
from simpletuner.settings.declared.errors import nearest
from simpletuner.settings.declared.sections import Settings

# peft's name of the adapter in the names of parameters; files leave it out.
ADAPTER = "default"

TENSOR = re.compile(rf"(?P<layer>.+)\.(?P<kind>lora_\w+|hada_\w+|lokr_\w+|oft_R)\.{ADAPTER}(?P<end>\.weight)?")
"""Names of the parameters that peft adds to a layer."""

# DoRA's length of each row of a weight, which files name without `.weight`, as peft's do.
MAGNITUDE = "lora_magnitude_vector"

LINEAR_ONLY = {
    "dora": "the lengths of a convolution's filters are not shared out by rows as its weights are",
    "oft": "peft rotates the inputs of a convolution as if it had no stride and no padding",
}
"""Kinds that cannot adapt a convolution, and why."""


def peft_arguments(kind: str, rank: int, alpha: float, dropout: float, factor: int) -> tuple[str, dict[str, object]]:
    if kind == "oft":
        return "OFT", {"r": 0, "oft_block_size": rank}
    if kind == "loha":
        return "LOHA", {"r": rank, "alpha": alpha}
    if kind == "lokr":
        return "LOKR", {"r": rank, "alpha": alpha, "decompose_factor": factor}
    dora = {"use_dora": True} if kind == "dora" else {}
    return "LORA", {"r": rank, "lora_alpha": alpha, "lora_dropout": dropout, **dora}


def peft_config(name: str, arguments: Mapping[str, object], modules: Sequence[str]) -> Any:
    from peft import LoHaConfig, LoKrConfig, LoraConfig, OFTConfig

    classes = {"LORA": LoraConfig, "LOHA": LoHaConfig, "LOKR": LoKrConfig, "OFT": OFTConfig}
    return classes[name](**arguments, target_modules=list(modules))


def check_layers(kind: str, rank: int, model: nn.Module, modules: Sequence[str]) -> None:
    """Raise SettingsError for a layer that a kind of adapter cannot adapt."""
    for name in modules:
        layer = model.get_submodule(name)
        if kind in LINEAR_ONLY and not isinstance(layer, nn.Linear):
            raise SettingsError(
                f"lora_type={kind} is for linear layers, and {name} is a convolution: {LINEAR_ONLY[kind]}",
                "leave it out of lora_target_modules, or take lora, loha or lokr",
            )
        if kind == "oft" and isinstance(layer, nn.Linear) and layer.in_features % rank:
            raise SettingsError(
                f"lora_type=oft rotates inputs in blocks of lora_rank = {rank}, which do not divide the "
                f"{layer.in_features} inputs of {name}",
                "take another lora_rank, such as 16 or 32",
            )


def is_adapter(name: str) -> bool:
    return TENSOR.fullmatch(name) is not None


def file_name(name: str) -> str:
    """Parameter's name in files, as peft saves it: `to_q.lora_A.default.weight` -> `to_q.lora_A.weight`."""
    match = TENSOR.fullmatch(name)
    assert match is not None
    end = "" if match["kind"] == MAGNITUDE else match["end"] or ""
    return f"{match['layer']}.{match['kind']}{end}"


def allocate_on_cpu(model: nn.Module) -> None:
    """Replace an adapter's parameters on the meta device by ones in host memory, DoRA's lengths by ones."""
    # Not to_empty(): OFT's modules have buffers, which hold values already.
    for name, parameter in [*model.named_parameters()]:
        if is_adapter(name):
            owner, _, leaf = name.rpartition(".")
            filled = torch.ones if MAGNITUDE in name else torch.empty
            value = filled(parameter.shape, dtype=parameter.dtype)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value, parameter.requires_grad))


def draw_first_values(layer: Any) -> None:
    """Initialize a layer's adapter to change no output, with random values by torch's generator."""
    if hasattr(layer, "reset_lora_parameters"):
        layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)
    elif hasattr(layer, "reset_oft_parameters"):
        layer.reset_oft_parameters(ADAPTER, True)
    else:
        layer.reset_adapter_parameters(ADAPTER)


def layer_of(name: str) -> str:
    """Return the layer of a tensor in a file: `to_q.lora_A.weight` -> `to_q`."""
    return re.sub(r"\.(lora|hada|lokr|oft)_\w+(\.weight)?$", "", name)


@torch.no_grad()
def measure_lengths(tensors: Mapping[str, Tensor]) -> None:
    """Set DoRA's magnitudes to the norms of the base's rows, so that it changes no output.

    A rank that holds some rows of a weight holds their lengths, so nothing is exchanged.
    """
    for name, lengths in tensors.items():
        match = TENSOR.fullmatch(name)
        if match is not None and match["kind"] == MAGNITUDE:
            weight = tensors[f"{match['layer']}.base_layer.weight"]
            lengths.copy_(torch.linalg.vector_norm(weight.float(), dim=1))


# Names of attention projections in diffusers; the last one is FLUX.2's, which also holds the MLP.
ATTENTION = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
    "to_qkv_mlp_proj",
)


@dataclass(frozen=True)
class Adapter:
    """A LoRA: `targets` are suffixes and patterns in lora_target_modules, `modules` full names of layers."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    modules: tuple[str, ...]
    seed: int
    kind: str = "lora"
    """The value of lora_type."""
    factor: int = -1
    assistants: tuple[str, ...] = ()
    """Names of the files that assistant_lora merges into the base."""
    assistant_strength: float = 1.0

    @classmethod
    def of(cls, model: nn.Module, settings: Settings, unused: tuple[str, ...]) -> Adapter:
        """Find the layers to adapt. Raises SettingsError for a target that matches no layer of the model.

        Layers whose weights' names begin with one of `unused` get no gradient, so they are left out.
        """
        own = settings.lora
        targets = tuple(sorted({name.strip() for name in own.lora_target_modules.split(",")} - {""}))
        # Attention alone, as in Hu et al. 2021 (section 4.2) and in the LoRA scripts of diffusers.
        targets = targets or attention_projections(model)
        if not targets:
            raise SettingsError(
                f"{type(model).__name__} has no attention projection with one of diffusers' usual names",
                f"name the layers to adapt with lora_target_modules: it has {', '.join(ends_of_layers(model))}",
            )
        modules = [name for name in layers_named(model, targets) if not f"{name}.weight".startswith(unused)]
        check_layers(own.lora_type, own.lora_rank, model, modules)
        return cls(
            rank=own.lora_rank,
            alpha=own.lora_rank if own.lora_alpha is None else own.lora_alpha,
            dropout=own.lora_dropout,
            targets=targets,
            modules=tuple(modules),
            seed=settings.training.seed,
            kind=own.lora_type,
            factor=own.lokr_factor,
            assistants=tuple(path.name for path in own.assistant_lora),
            assistant_strength=own.assistant_lora_strength,
        )

    def as_settings(self) -> dict[str, Any]:
        """Return the settings that a checkpoint's weights depend on, by name."""
        targets = ",".join(self.targets)
        own = {} if self.kind == "lora" else {"lora_type": self.kind, "lokr_factor": self.factor}
        if self.assistants:
            own |= {"assistant_lora": ",".join(self.assistants), "assistant_lora_strength": self.assistant_strength}
        return {"lora_rank": self.rank, "lora_alpha": float(self.alpha), "lora_target_modules": targets} | own

    def peft_arguments(self) -> tuple[str, dict[str, object]]:
        """Return peft's name of this kind of adapter, and the arguments of its config."""
        return peft_arguments(self.kind, self.rank, self.alpha, self.dropout, self.factor)

    def attach(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Insert the matrices, in float32 on the meta device, and return them by name."""
        from peft import inject_adapter_in_model

        config = peft_config(*self.peft_arguments(), self.modules)
        inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
        from simpletuner.private_api.of_peft import apply_kronecker_products, apply_low_rank_products

        apply_kronecker_products(model)
        apply_low_rank_products(model)
        trained = adapter_parameters(model)
        for each in trained.values():
            # Over a bf16 base, too: in bf16 an update below 0.2 % of a weight is rounded away.
            each.data = each.data.float()
        return trained

    def attach_new(self, model: nn.Module) -> None:
        """Insert the matrices, in host memory. A is random, B is 0, so the output does not change yet.

        The values depend on the seed alone, so they are the same on all ranks. DoRA's lengths are measured
        later, when the base has its weights.
        """
        self.attach(model)
        allocate_on_cpu(model)
        # Hashed: on a CPU torch's generator keeps the lower 32 bits of a seed only.
        torch.default_generator.manual_seed(hash_key(self.seed, "lora"))
        for layer in adapted_layers(model):
            draw_first_values(layer)


def attention_projections(model: nn.Module) -> tuple[str, ...]:
    """Return the attention projections of a denoiser, which are the default of lora_target_modules."""
    return tuple(sorted(name for name in ATTENTION if layers_ending_with(model, name)))


def count_targets(model: nn.Module) -> dict[str, dict[str, int]]:
    """Count the layers of each attention projection, and a LoRA's parameters on them at rank 1."""
    counts = {}
    for target in attention_projections(model):
        shapes = [model.get_parameter(f"{name}.weight").shape for name in layers_ending_with(model, target)]
        counts[target] = {"layers": len(shapes), "parameters_per_rank": sum(sum(shape[:2]) for shape in shapes)}
    return counts


def layers_named(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Names of all layers that end with a target. Raises SettingsError for a target that matches none."""
    found: dict[str, None] = {}
    for target in targets:
        layers = layers_ending_with(model, target)
        if not layers:
            ends = ends_of_layers(model)
            raise SettingsError(
                f"lora_target_modules: {type(model).__name__} has no layer `{target}`{nearest(target, ends)}",
                f"it has {', '.join(ends)}; `simpletuner detect-blocks --lora` shows those of attention",
            )
        found |= dict.fromkeys(layers)
    return list(found)


def layers_ending_with(model: nn.Module, target: str) -> list[str]:
    """Names of linear and convolution layers that end with the dotted name `target`, or match it as a pattern
    of whole names (`transformer_blocks.*`); all if it is empty."""
    kinds = (nn.Linear, nn.Conv2d)
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    if "*" in target:
        return fnmatch.filter(names, target)
    return [name for name in names if not target or f".{name}".endswith(f".{target}")]


def end_of(name: str) -> str:
    """Last part of a layer's name, and the one before it if the last is a number: `to_q`, `to_out.0`."""
    parts = name.split(".")
    return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])


def ends_of_layers(model: nn.Module) -> list[str]:
    """Valid names for lora_target_modules."""
    return sorted({end_of(name) for name in layers_ending_with(model, "")})


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Matrices by the names that files have. Optimizer, EMA, checkpoints and ranks know only these."""
    return {file_name(name): each for name, each in model.named_parameters() if is_adapter(name)}


def base_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the base model among `tensors`, by its names."""
    return {name.replace(".base_layer.", "."): each for name, each in tensors.items() if not is_adapter(name)}


def freeze(model: nn.Module, dtype: torch.dtype) -> None:
    """Freeze all weights of a model on meta, and convert its matrices and their biases to `dtype`.

    Norms stay float32: they are small, and autocast uses them in float32. So do the modules in diffusers'
    `_keep_in_fp32_modules`. A float32 bias of a linear layer would be cast at each use, to the same values.
    """
    for path, module in model.named_modules():
        has_products = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        for name, parameter in module.named_parameters(path, recurse=False):
            parameter.requires_grad_(False)
            if (has_products or parameter.ndim > 1) and not is_kept_in_float32(model, name):
                parameter.data = parameter.data.to(dtype)


def is_kept_in_float32(model: nn.Module, name: str) -> bool:
    return any(part in name.split(".") for part in modules_in_float32(model))


def adapted_layers(model: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Disable the adapters within the block."""
    # Layer by layer: peft's context manager is a method of PeftModel, which does not wrap the denoiser.
    layers = adapted_layers(model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
