"""Components of a pipeline folder for the study, training and sampling.

- Opening a pipeline with its text encoders, VAE and denoiser.
- Copies of a modular pipeline's blocks that let gradients flow and receive their noise. Nothing here changes
  a module of diffusers: blocks get subclasses, with copies of functions that have their own globals.
- Calls of a denoiser without memory: a pipeline reads numbers, so its inputs are recorded on the CPU.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from simpletuner.errors import SettingsError
from simpletuner.models.automatic.hooks import HookedPipeline
from simpletuner.models.automatic.pipeline_run import refused
from simpletuner.models.automatic.prediction import Predictor
from simpletuner.models.automatic.text import padded_records
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.models.family.vae import Vae, cell_of_model
from simpletuner.models.folder.diffusers_io import ENCODING_PARTS, build_on_meta, diffusers_class, require_packages
from simpletuner.models.folder.malformed import translate_load_errors
from simpletuner.models.folder.weights import (
    MODULAR_INDEX,
    any_weights_files,
    index_file,
    is_null,
    read_index,
    weights_files,
)
from simpletuner.private_api.of_torch import outside_modes, tree_leaves, tree_map_only
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from simpletuner.models.automatic.family import AutomaticFamily
    from simpletuner.models.automatic.prediction import Predictor

DENOISERS = ("transformer", "unet", "prior", "decoder")


def denoiser_of(folder: Path) -> str:
    """Return the name of a pipeline's denoiser. Raises SettingsError for one that has none, or two."""
    index = read_index(folder)
    name = str(index.get("_class_name"))
    if index_file(folder).name == MODULAR_INDEX:
        pipeline_class_of(index).check_folder(folder)
    found = [each for each in DENOISERS if any(index.get(each) or ())]
    second = [
        other for each in found for other in (f"{each}_2", f"unconditional_{each}") if any(index.get(other) or ())
    ]
    if not found:
        raise refused(name, f"it has none of {', '.join(DENOISERS)}")
    if len(found + second) > 1:
        raise refused(name, f"it has two denoisers, {' and '.join(found + second)}")
    return found[0]


def open_pipeline(
    family: AutomaticFamily, device: torch.device, text: torch.dtype | None, vae: object
) -> HookedPipeline:
    """Open a pipeline to be hooked: with text encoders in a dtype, or with none; its denoiser is on the meta
    device.

    Without `vae` that one is, too.
    """
    denoiser = build_on_meta(family.config)
    index = family.index
    absent: dict[str, object] = {}
    for name, value in index.items():
        is_text = name.startswith(ENCODING_PARTS)
        has_weights = any((family.folder / name).glob("*.safetensors"))
        if isinstance(value, list) and (is_null(value) or (has_weights and not (is_text and text is not None))):
            # from_pretrained does not load a component that it is given, be it None.
            absent[name] = None
    if text is not None:
        require_packages(index[name] for name in index if name.startswith(ENCODING_PARTS))
    vae = build_without_weights(family) if vae is None else vae
    parts = absent | {"vae": vae, family.denoiser_name: denoiser, "scheduler": family.scheduler()}
    variant = family.settings.model.variant

    def load(cls: Any) -> Any:
        return cls.from_pretrained(
            family.folder, dtype=text or torch.float32, use_safetensors=True, variant=variant, **parts
        )

    with translate_load_errors(family.folder):
        hooked = HookedPipeline(family.pipeline_class, load, family.denoiser_name, device)
    for name in index:
        if name.startswith(("text_encoder", "image_encoder")) and isinstance(
            part := getattr(hooked.pipeline, name, None), nn.Module
        ):
            part.requires_grad_(False).to(device)
    return hooked


def build_without_weights(family: AutomaticFamily) -> nn.Module:
    """Build the VAE on the meta device but for its buffers: statistics of latents (FLUX.2, LTX-Video)."""
    vae, buffers = build_on_meta(family.vae_config), dict[str, Tensor]()
    names = {name for name, _ in vae.named_buffers()}
    for path in any_weights_files(family.folder / "vae") if names else ():
        with safe_open(path, framework="pt") as file:
            buffers |= {name: file.get_tensor(name).float() for name in names & {*file.keys()}}
    vae.load_state_dict(buffers, strict=False, assign=True)
    return vae


def load_shared(family: AutomaticFamily, device: torch.device) -> nn.Module:
    """Load a denoiser with its inner equal blocks shared: little memory, float32."""
    model = build_on_meta(family.config)
    share_equal_blocks(model)
    wanted = {*dict(model.named_parameters()), *dict(model.named_buffers())}
    tensors: dict[str, Tensor] = {}
    for path in weights_files(family.folder / family.denoiser_name, family.settings.model.variant):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name).float() for name in wanted & {*file.keys()}}
    model.load_state_dict(tensors, strict=False, assign=True)
    return model.to(device).eval()


def share_equal_blocks(model: nn.Module) -> None:
    """Replace blocks between the first and last of equal ones by the first; the last may differ in use."""
    for module in list(model.modules()):
        if not isinstance(module, nn.ModuleList) or len(module) < 3:
            continue
        first = described(module[0])
        for number in range(1, len(module) - 1):
            if described(module[number]) == first:
                module[number] = module[0]


def described(block: nn.Module) -> tuple[str, str]:
    """Representation that equal blocks share: modules with their shapes, and plain attributes."""
    plain = [
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, int | float | str | None)
    ]
    return repr(block), repr(plain)


class AutomaticVae(Vae):
    """A VAE with latents normalized as at the end of the pipeline's loop, in the shape of its noise."""

    def __init__(self, family: AutomaticFamily, device: torch.device, predictor: Callable[[object], Predictor]) -> None:
        super().__init__(family.folder / "vae", device, family.settings.model)
        # That of HunyuanVideo 1.5 attends over a mask that only a batch of one has the shape of.
        if self.has_frames and hasattr(self.model, "use_slicing"):
            self.model.enable_slicing()
        self.predictor = predictor(self.model)

    @property
    def cell(self) -> Shape:
        return self.predictor.found.layout.cell

    def normalize(self, latents: Tensor) -> Tensor:
        cell = cell_of_model(self.model, patch=1)
        frames = (latents.shape[2] - 1) * cell.frames + 1 if latents.ndim == 5 else 1
        height, width = latents.shape[-2] * cell.height, latents.shape[-1] * cell.width
        return self.predictor.from_vae(latents.cpu(), Shape(frames, height, width))

    def denormalize(self, latents: Tensor) -> Tensor:
        for_vae = self.predictor.to_vae(latents.cpu())
        return for_vae.squeeze(2) if for_vae.ndim == 5 and for_vae.shape[2] == 1 else for_vae


def remember_encodings(model: Any) -> None:
    """Encode equal pixels once: a proof shows a VAE few images dozens of times, 5 CPU s each at 1024 px."""
    known, own = dict[tuple[object, ...], Any](), model.encode

    def encode(pixels: Tensor, *args: object, **kwargs: object) -> Any:
        data = sha256(pixels.cpu().contiguous().view(torch.uint8).numpy()).digest()
        key = data, pixels.shape, pixels.dtype, repr((args, kwargs))
        if key not in known:
            known[key] = own(pixels, *args, **kwargs)
        return copy.deepcopy(known[key])  # a call may write into its latents

    model.encode = encode


def library_versions() -> Mapping[str, str]:
    import diffusers
    import transformers

    return {"diffusers": diffusers.__version__, "transformers": transformers.__version__}


def pipeline_class_of(index: Mapping[str, object]) -> Any:
    """Return the class that an index names. Raises SettingsError where it is not a pipeline of diffusers."""
    from diffusers import DiffusionPipeline

    name = index.get("_class_name")
    if not isinstance(name, str):
        raise SettingsError("the index names no pipeline", "name a pipeline's folder in diffusers format")
    cls = diffusers_class(name)
    if isinstance(cls, type) and issubclass(cls, DiffusionPipeline):
        return cls
    # A second or so, which only modular pipelines need.
    from simpletuner.models.automatic.modular import modular_class

    return modular_class(cls, index)


PACKAGE = "diffusers.modular_pipelines."
FRAMEWORK = PACKAGE + "modular_pipeline"


class Copies:
    """Copies of blocks whose functions draw noise by one of ours, and leave out torch.no_grad."""

    def __init__(self, draw: Callable[..., object]) -> None:
        self.draw = draw
        self.globals: dict[str, dict[str, object]] = {}

    def block(self, block: Any) -> Any:
        cls, own = type(block), copy.copy(block)
        functions = {name: self.member(each) for name, each in members(cls)}
        own.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **functions})
        own.sub_blocks = type(block.sub_blocks)((name, self.block(each)) for name, each in block.sub_blocks.items())
        return own

    def member(self, value: Any) -> object:
        if isinstance(value, staticmethod | classmethod):
            return type(value)(self.function(value.__func__))
        return self.function(value)

    def function(self, function: object) -> Any:
        # torch.no_grad leaves the function that it decorates.
        plain = inspect.unwrap(function)
        code, own = plain.__code__, self.globals_of(plain.__globals__)
        made = FunctionType(code, own, plain.__name__, plain.__defaults__, plain.__closure__)
        made.__kwdefaults__ = plain.__kwdefaults__
        return made

    def globals_of(self, module: Mapping[str, object]) -> dict[str, object]:
        """Return a module's names with copies of all functions of modular pipelines among them."""
        name = module["__name__"]
        if name not in self.globals:
            own = self.globals[name] = {**module}
            functions = {key: each for key, each in module.items() if inspect.isfunction(each)}
            own |= {key: self.function(each) for key, each in functions.items() if each.__module__.startswith(PACKAGE)}
            if "randn_tensor" in own:
                own["randn_tensor"] = self.draw
        return self.globals[name]


def members(cls: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions of a block's class, except diffusers' base classes'."""
    found: set[str] = set()
    for each in cls.__mro__:
        if each.__module__.startswith(PACKAGE) and each.__module__ != FRAMEWORK:
            for name, value in vars(each).items():
                is_function = inspect.isfunction(value) or isinstance(value, staticmethod | classmethod)
                if is_function and name not in found and name != "__init__":
                    found.add(name)
                    yield name, value


@dataclass
class MetaCalls:
    """Inputs that a predictor on the CPU gives to the denoiser, kept by the shapes of batches and texts."""

    predictor: Predictor
    recorded: dict[object, list[dict[str, object]]] = field(default_factory=dict)

    def predict(self, model: nn.Module, noised: Tensor, conditioning: Conditioning, images: Sequence[Tensor]) -> Tensor:
        """Call a denoiser with tensors shaped as in a run on the CPU; return all outputs, flat."""
        rows = {name: len(conditioning[name][0]) for name in self.predictor.found.text.names.values()}
        outputs: list[object] = []
        for given in self.inputs(tuple(noised.shape), rows, [tuple(each.shape) for each in images]):
            outputs += tree_leaves(model(**{name: self.without_memory(name, given[name], noised) for name in given}))
        return torch.cat([each.flatten() for each in outputs if isinstance(each, Tensor)])

    def inputs(
        self, shape: tuple[int, ...], rows: Mapping[str, int], images: Sequence[tuple[int, ...]] = ()
    ) -> list[dict[str, Any]]:
        """Return all inputs of the denoiser in the calls for a batch, given the rows of its texts, and the
        shapes of the latents of images.
        """
        key = (shape, *rows.items(), *images)
        if key not in self.recorded:
            seen: list[dict[str, object]] = []
            found = self.predictor.found

            def record(given: Mapping[str, object]) -> object:
                seen.append(given)
                return self.predictor.blank(given)

            # Whoever counts would count this run, too.
            with outside_modes(), torch.no_grad():
                times = found.schedule.timesteps(*[0.5] * shape[0])
                given = [torch.zeros(each) for each in images]
                text = padded_records([found.text.ones(rows)] * shape[0])
                for _ in range(2):  # the first is a call of its own, later ones are traced, as a run's are
                    seen.clear()
                    self.predictor.predict(record, torch.zeros(shape), times, text, given)
            self.recorded[key] = seen
        return self.recorded[key]

    def without_memory(self, name: str, value: object, noised: Tensor) -> object:
        """Input with its floating-point tensors on the device of `noised`, uninitialized if none is read."""
        # Constants have no gradient: CogVideoX writes into what is multiplied by its rotary table.
        fixed = name in self.predictor.found.float32_inputs
        # Sums of masks may be lengths; HunyuanVideo 1.5 reads whether its image embedding is zero.
        is_on_host = noised.device.type in ("cpu", "meta")
        dtype = torch.float32 if fixed else noised.dtype
        has_gradient = not fixed and noised.requires_grad

        def one(each: Tensor) -> Tensor:
            is_read = is_on_host and ("mask" in name or not each.any())
            if is_read or not each.is_floating_point():
                return each
            return torch.empty(each.shape, dtype=dtype, device=noised.device, requires_grad=has_gradient)

        return tree_map_only(Tensor, one, value)
