"""Deltas that LoRA, DoRA, LoHa, LoKr and OFT, in files of any program, add to the weights of a model.

Each formula is that of the paper and of peft's layer: LoRA's product of matrices, DoRA's rows at their
length, LoHa's product by element (LyCORIS' Tucker form too), LoKr's Kronecker product; OFT's rotation is
peft's own. A LoRA of text encoders is read by the names of their weights, without their code.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.family.adapter import Adapter, layers_ending_with, peft_config
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.opening.lora_config import LoraFile, OriginalLayer, original_layer, read_lora
from simpletuner.models.opening.lora_file import (
    DENOISERS,
    NAMES,
    LoraLayer,
    flat,
    layers_of,
    lora_file,
    read_layers,
)
from simpletuner.models.opening.stored_weights import StoredTensors, encoder_weights, in_full

SUBJECT = "LoRA"
"""Subject of the sentences about a file."""

Delta = Callable[[Tensor], Tensor]
"""Returns what is added to a weight, which is in float32 or float64 and not changed."""

# File of `lora extract` with what no LoRA holds: norms, biases, tables; and the ends of its names.
EXACT, DIFFERENCE = "exact_differences.safetensors", ".diff"

# Names of a text encoder's tensors: of diffusers, and of kohya's programs.
ENCODER = re.compile(r"(?:base_model\.model\.)?(?:text_encoder(?P<own>_\d)?\.|lora_te(?P<kohya>\d?)_)(?P<rest>.+)")

OTHER_KIND = re.compile(rf"{DENOISERS}(?P<layer>.+?)\.(?P<part>hada_\w+|lokr_\w+|oft_R|alpha)(?:\.weight)?")
"""Names of LoHa, LoKr and OFT, of peft and of LyCORIS."""

HADA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


def read_deltas(path: Path, family: ModelFamily) -> dict[str, dict[str, Delta]]:
    """Return what a file adds to weights by component and name; of a folder of `lora extract` all of it.

    Raises SettingsError for a file that does not fit, naming its keys, EnvironmentNotReady for a damaged one.
    """
    file = read_lora(lora_file(path), f"{family.lora_prefix}.", SUBJECT)
    of_encoders = [name for name in file.tensors if ENCODER.fullmatch(name)]
    own = {name: each for name, each in file.tensors.items() if name not in of_encoders}
    found = {name: {} for name in [family.denoiser_name] * bool(own)}
    if own:
        found[family.denoiser_name] = of_denoiser(replace(file, tensors=own), family)
    for component, tensors in by_encoder(file, of_encoders, family).items():
        config = read_lora(file.path, f"{component}.", SUBJECT).config
        found[component] = of_encoder(replace(file, tensors=tensors, config=config), component, family)
    if path.is_dir() and (path / EXACT).is_file():
        exact = read_exact(path / EXACT, family)
        found[family.denoiser_name] = found.get(family.denoiser_name, {}) | exact
    return found


def of_denoiser(file: LoraFile, family: ModelFamily) -> dict[str, Delta]:
    if file.kind in ("lora", "dora"):
        file.check_config()
        shapes = {name: tuple(each.shape) for name, each in family.meta_denoiser.named_parameters()}
        return dict(of_matrices(read_layers(file, family), shapes, file))
    return dict(of_other_kind(file, family))


def of_matrices(
    matrices: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], file: LoraFile
) -> Iterator[tuple[str, Delta]]:
    """Yield what LoRA's or DoRA's matrices, at their own scale, add to each weight and bias."""
    for name, up in matrices.items():
        layer, is_bias = name.rpartition(".lora_")[0], name.endswith(NAMES["bias"])
        if not is_bias and not name.endswith(NAMES["up"]):
            continue
        weight = f"{layer}.bias" if is_bias else f"{layer}.weight"
        shape = shapes.get(weight)
        if shape is None:
            raise file.error(f"has lora_bias, but {layer} has no bias to add it to")
        down = torch.ones(1, 1) if is_bias else matrices[f"{layer}.{NAMES['down']}"].flatten(1)
        up = up[:, None] if is_bias else up.flatten(1)
        lengths = None if is_bias else matrices.get(f"{layer}.{NAMES['length']}")
        check_fits(file, layer, shape, (up.shape[0], down.shape[1]))
        yield weight, (product(down, up) if lengths is None else stretched(down, up, lengths))


def check_fits(file: LoraFile, layer: str, shape: Sequence[int], matrix: tuple[int, int]) -> None:
    """Raise SettingsError where a matrix has not the rows and columns of a weight, whose filters are rows."""
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    if matrix != (rows, columns):
        raise file.error(
            f"is of another model: what it adds to {layer} is {matrix[0]} x {matrix[1]}, and the weight is "
            f"{rows} x {columns}",
            "take one of the same model",
        )


def product(down: Tensor, up: Tensor) -> Delta:
    def delta(weight: Tensor) -> Tensor:
        return (up.to(weight) @ down.to(weight)).view(weight.shape)

    return delta


def stretched(down: Tensor, up: Tensor, lengths: Tensor) -> Delta:
    """DoRA, Liu et al. 2024, equation 5: the rows of the sum, each at its length."""

    def delta(weight: Tensor) -> Tensor:
        whole = weight + (up.to(weight) @ down.to(weight)).view(weight.shape)
        rows = whole.flatten(1)
        return (rows * (lengths.to(weight).flatten() / rows.norm(dim=1))[:, None]).view(weight.shape) - weight

    return delta


def added(difference: Tensor) -> Delta:
    return lambda weight: difference.to(weight).view(weight.shape)


def of_other_kind(file: LoraFile, family: ModelFamily) -> Iterator[tuple[str, Delta]]:
    """Yield what LoHa, LoKr or OFT add to each weight. Raises SettingsError for unknown layers."""
    layers = parts_of_layers(file)
    adapter = adapter_of(file)
    file.check_config(adapter)
    for layer in layers_ending_with(family.meta_denoiser, ""):
        original = original_layer(family, layer) or OriginalLayer(layer, (layer,))
        name = next((each for each in (flat(layer), flat(original.name)) if each in layers), None)
        if name is None:
            continue
        found, shape = layers[name], tuple(family.meta_denoiser.get_parameter(f"{layer}.weight").shape)
        found.is_used = True
        if file.kind == "oft":
            yield f"{layer}.weight", rotated(found, adapter, family.meta_denoiser.get_submodule(layer))
            continue
        matrix = dense(found, file)
        if name != flat(layer):
            matrix = rows_in_diffusers(matrix, original, layer, family, file)
        check_fits(file, layer, shape, (matrix.shape[0], matrix[0].numel()))
        yield f"{layer}.weight", added(matrix)
    if unknown := sorted(each.name for each in layers.values() if not each.is_used):
        raise file.error(
            f"adapts {unknown[0]}, which is no layer of {type(family.meta_denoiser).__name__}",
            "take a LoRA of the same model",
        )


class OtherLayer(LoraLayer):
    """A layer of LoHa, LoKr or OFT."""

    is_used: bool = False


def parts_of_layers(file: LoraFile) -> dict[str, OtherLayer]:
    layers: dict[str, OtherLayer] = {}
    for name, tensor in file.tensors.items():
        if (match := OTHER_KIND.fullmatch(name)) is None:
            raise file.error(f"is no {file.kind} that is known here: it has {name}", "merge it with its own program")
        layers.setdefault(flat(match["layer"]), OtherLayer(match["layer"])).tensors[match["part"]] = tensor.float()
    return layers


def adapter_of(file: LoraFile) -> Adapter:
    """The adapter that a file's config describes; of LyCORIS' files, which have none, peft's defaults."""
    rank = file.config.get("oft_block_size") if file.kind == "oft" else file.config.get("r", 8)
    alpha, factor = file.config.get("alpha", 8), file.config.get("decompose_factor", -1)
    if not all(isinstance(each, int | float) for each in (rank, alpha, factor)):
        raise file.error("has a rank or an alpha that is no number in its config")
    return Adapter(int(rank or 0), float(alpha), 0.0, (), (), 0, file.kind, int(factor))


def dense(layer: OtherLayer, file: LoraFile) -> Tensor:
    """Return the whole matrix or convolution that LoHa or LoKr adds to a layer."""
    try:
        matrix, rank = hadamard(layer.tensors) if file.kind == "loha" else kronecker(layer.tensors)
    except (KeyError, RuntimeError) as error:
        raise file.error(f"has tensors that do not fit each other for {layer.name}: {error}", "copy it again") from None
    alpha = layer.tensors.get("alpha")
    if file.config:  # of peft, which scales whole factors, too
        scale = adapter_of(file).alpha / int(file.config.get("r", 8))
    else:
        scale = 1.0 if alpha is None or rank is None else alpha.item() / rank
    return matrix * scale


def hadamard(parts: Mapping[str, Tensor]) -> tuple[Tensor, int | None]:
    """Elementwise product of LoHa's two matrices, and the rank; `hada_t1` is the core of the Tucker form."""
    one_a, one_b, two_a, two_b = (parts[name] for name in HADA)
    if "hada_t1" in parts:
        # As LyCORIS (functional/loha.py): cores are (rank, rank, height, width).
        one = torch.einsum("ijkl,jr,ip->prkl", parts["hada_t1"], one_b, one_a)
        two = torch.einsum("ijkl,jr,ip->prkl", parts["hada_t2"], two_b, two_a)
        return one * two, one_b.shape[0]
    return (one_a @ one_b) * (two_a @ two_b), one_b.shape[0]


def kronecker(parts: Mapping[str, Tensor]) -> tuple[Tensor, int | None]:
    """LoKr's Kronecker product, and the rank of a factor that is a product; None where both are whole."""
    rank = next((parts[name].shape[0] for name in ("lokr_w1_b", "lokr_w2_b") if name in parts), None)
    one = parts["lokr_w1"] if "lokr_w1" in parts else parts["lokr_w1_a"] @ parts["lokr_w1_b"]
    if "lokr_w2" in parts:
        two = parts["lokr_w2"]
    elif "lokr_t2" in parts:
        two = torch.einsum("ijkl,jr,ip->prkl", parts["lokr_t2"], parts["lokr_w2_b"], parts["lokr_w2_a"])
    else:
        two = parts["lokr_w2_a"] @ parts["lokr_w2_b"]
    return torch.kron(one.reshape(*one.shape, *[1] * (two.ndim - 2)), two.contiguous()), rank


def rows_in_diffusers(
    matrix: Tensor, original: OriginalLayer, layer: str, family: ModelFamily, file: LoraFile
) -> Tensor:
    """Return the rows of one layer of diffusers in what is added to an original's stack of layers."""
    if original.is_swapped:
        return torch.cat(matrix.chunk(2)[::-1])
    rows = [family.meta_denoiser.get_parameter(f"{part}.weight").shape[0] for part in original.parts]
    if sum(rows) != matrix.shape[0]:
        raise file.error(
            f"is of another model: it has {matrix.shape[0]} rows for {original.name}, which has {sum(rows)}"
        )
    return matrix.split(rows)[original.parts.index(layer)]


def rotated(layer: OtherLayer, adapter: Adapter, module: nn.Module) -> Delta:
    """OFT by peft's own layer, whose rotation is a series."""

    def delta(weight: Tensor) -> Tensor:
        from peft import inject_adapter_in_model

        blank = copy.deepcopy(module).to_empty(device="cpu").to(weight.dtype)
        blank.weight.data.copy_(weight)  # pyright: ignore[reportCallIssue]
        blocks = layer.tensors["oft_R"]
        size = adapter.rank or (1 + round((1 + 8 * blocks.shape[1]) ** 0.5)) // 2
        kind, arguments = "OFT", {"r": 0, "oft_block_size": size}
        model = nn.ModuleDict({"layer": blank})
        inject_adapter_in_model(peft_config(kind, arguments, ["layer"]), model)
        own = next(each for name, each in model.named_parameters() if ".oft_R." in name)
        own.data.copy_(blocks)
        model["layer"].merge()  # pyright: ignore[reportCallIssue]
        return blank.weight.data - weight  # pyright: ignore[reportOperatorIssue]

    return delta


def by_encoder(file: LoraFile, names: Sequence[str], family: ModelFamily) -> dict[str, dict[str, Tensor]]:
    """Sort tensors of text encoders by component, by the rest of their names.

    kohya's `lora_te1_` is the first one, and FLUX.1's `lora_te3_` the T5, diffusers' second one.
    """
    here = sorted(key for key, each in family.index.items() if key.startswith("text_encoder") and is_model(each))
    found: dict[str, dict[str, Tensor]] = {}
    for name in names:
        match = ENCODER.fullmatch(name)
        assert match is not None
        number = int((match["own"] or "")[1:] or match["kohya"] or 1)
        if match["kohya"] == "3" and len(here) == 2:
            number = 2
        component = "text_encoder" if number == 1 else f"text_encoder_{number}"
        if component not in here:
            raise file.error(f"adapts {name}, and this model has no {component}", "take a LoRA of the same model")
        found.setdefault(component, {})[match["rest"]] = file.tensors[name]
    return found


def is_model(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) > 1 and all(isinstance(each, str) for each in entry[:2])


def of_encoder(file: LoraFile, component: str, family: ModelFamily) -> dict[str, Delta]:
    """Return what a LoRA adds to a text encoder's weights."""
    if file.kind != "lora":
        raise file.error(f"is of lora_type {file.kind} for {component}, which is merged for LoRA alone")
    file.check_config()
    shapes = {name: tuple(each.shape) for name, each in encoder_weights(family, component).shapes.items()}
    known = {flat(name.removesuffix(".weight")): name for name in shapes if name.endswith(".weight")}
    matrices = {}
    for key, layer in layers_of(file).items():
        name = next(
            (known[each] for each in (key, f"text_model_{key}", key.removeprefix("text_model_")) if each in known), ""
        )
        if not name:
            raise file.error(f"adapts {layer.name}, which is no layer of {component}", "take a LoRA of the same model")
        for part, tensor in layer.scaled(file, 1).items():
            matrices[f"{name.removesuffix('.weight')}.{NAMES[part]}"] = tensor
    return dict(of_matrices(matrices, shapes, file))


def read_exact(path: Path, family: ModelFamily) -> dict[str, Delta]:
    """Return the differences that `lora extract` has kept beside its LoRA."""
    stored, found = StoredTensors([path]), {}
    shapes = family.meta_denoiser.state_dict()
    for name in stored.shapes:
        own = name.removesuffix(DIFFERENCE)
        if own not in shapes or stored.shapes[name].shape != shapes[own].shape:
            raise EnvironmentNotReady(f"{path} is of another model: it has {name}", "take one of the same model")
        found[own] = lambda weight, name=name: in_full(stored.read_finite(name)).to(weight)
    return found
