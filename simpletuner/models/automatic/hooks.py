"""Hooks at five places of a pipeline's own `__call__`, so that one run of it is one call of the denoiser.

1. `encode_prompt`, and `encode_image` for a given image, replay what they returned when a caption was cached.
2. `randn_tensor` hands in the noised latents: packing, patches and extra axes are the pipeline's.
3. The scheduler has one step, at the time of each sample; its `step` ends the call and has the prediction.
4. A stand-in for the denoiser casts its inputs and calls what the engine wraps.
5. The VAE's `encode` returns the cached latents of a given image.

Nothing here changes a module of diffusers: the functions that draw noise are copied with globals of their
own, so a thread that encodes captions and one that trains do not meet.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from diffusers.utils.torch_utils import randn_tensor as draw
from torch import Tensor

from simpletuner.models.automatic.pipeline_run import (
    FOREIGN_ERRORS,
    EncodedImage,
    PipelineRun,
    Point,
    StandIn,
    StopCall,
    first_line,
    refused,
    without_package,
)
from simpletuner.models.automatic.scheduler import one_step
from simpletuner.private_api.of_torch import tree_leaves, tree_map_only
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

ALWAYS = {
    "clean_caption": False,
    "num_images_per_prompt": 1,
    "num_videos_per_prompt": 1,
    "return_dict": False,
    # A language model would rewrite each caption (ERNIE-Image, LongCat-Image).
    "use_pe": False,
    "enable_prompt_rewrite": False,
    # A cache of text, filled by the first step (Qwen-Image 2.1): later calls would differ from training's.
    "use_kv_cache": False,
    # Sizes are those of the buckets, not the nearest of a list (PixArt, SANA).
    "use_resolution_binning": False,
    # References, too, keep the sizes of theirs (FLUX.1 Kontext).
    "_auto_resize": False,
}
"""Arguments of every run, as far as a pipeline has them."""

FRAMES = ("num_frames", "frames", "video_length")
"""Names that pipelines have for the length of a video."""

IMAGE = "image"
"""Argument of a pipeline's call for the images that it is given beside the caption."""

RATES = ("frame_rate", "fps")
"""Names that pipelines have for frames per second."""

# Frames per second where a pipeline has no default of its own.
DEFAULT_RATE = 24.0

# Components that guide in place of an argument (HunyuanVideo 1.5).
GUIDERS = ("guider", "ocr_guider")


class HookedPipeline:
    """A pipeline of diffusers with hooks in its call. Not for several threads at once.

    `load` gets the class to open, a subclass of the pipeline's. The denoiser's and the VAE's attributes are
    read, so both are there, if only on the meta device.
    """

    def __init__(self, cls: Any, load: Callable[[object], object], denoiser: str, device: torch.device) -> None:
        self.device, self.denoiser, self.current = device, denoiser, PipelineRun()
        self.cls, self.running = cls, False
        if not hasattr(cls, "encode_prompt"):
            raise refused(cls.__name__, "it has no encode_prompt, whose embeddings could be cached")
        self.pipeline = load(self._subclass(cls))
        self.pipeline.set_progress_bar_config(disable=True)
        # torch.no_grad leaves the function that it decorates.
        self.run_call = self._with_own_noise(inspect.unwrap(cls.__call__))
        self.parameters = inspect.signature(cls.__call__).parameters
        self.frame_rate = frame_rate_of(cls)
        self.module = getattr(self.pipeline, denoiser)
        self.names = list(inspect.signature(type(self.module).forward).parameters)[1:]
        self.real_scheduler = self.pipeline.scheduler
        self.one_step = one_step(self.real_scheduler, lambda: self.current)
        self.stand_ins = {denoiser: StandIn(self.module, call=self._call_denoiser)}
        if (vae := getattr(self.pipeline, "vae", None)) is not None:
            self.stand_ins["vae"] = StandIn(vae, decode=self._decode, encode=self._encode_pixels)
            # Its inputs' device, also for weights on none; else it is found by its modules, in 1 CPU ms.
            self.stand_ins["vae"].__dict__.update(device=device, modules=lambda: ())
        self.encoded_shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def run(
        self, run: PipelineRun, prompts: Sequence[str], shape: Shape, guided: bool = False, **arguments: object
    ) -> tuple[Any, ...] | None:
        """Run the pipeline for images of a shape in px, and return its output; None if a hook ended it."""
        given = {"prompt": list(prompts), "width": shape.width, "height": shape.height, "output_type": "latent"}
        given |= {**dict.fromkeys(FRAMES, shape.frames), **dict.fromkeys(RATES, self.frame_rate)}
        # FLUX.1 Kontext brings the size that it is asked for to this area.
        given["max_area"] = shape.area
        given |= {"num_inference_steps": 4, **ALWAYS, **arguments}
        assert not self.running, "a hook called the pipeline again"
        self.current, self.running = run, True
        run.has_images = IMAGE in arguments
        # Not by setattr, which would look up each component's class for the pipeline's config.
        own = {**self.stand_ins, "scheduler": self._scheduler(run)}
        before = {name: self.pipeline.__dict__[name] for name in own}
        guiders = [] if guided else [each for name in GUIDERS if (each := getattr(self.pipeline, name, None))]
        guiders = [each for each in guiders if each._enabled]
        self.pipeline.__dict__.update(own)
        for each in guiders:
            each.disable()
        try:
            return self.run_call(
                self.pipeline, **{name: value for name, value in given.items() if name in self.parameters}
            )
        except StopCall:
            return None
        # A RuntimeError like those below, but it says nothing of the pipeline.
        except torch.OutOfMemoryError:
            raise
        except NameError as error:
            raise without_package(self.cls.__name__, error) from error
        except FOREIGN_ERRORS as error:
            raise refused(
                self.cls.__name__, f"its own call fails with {type(error).__name__}: {first_line(error)}"
            ) from error
        finally:
            for each in guiders:
                each.enable()
            self.pipeline.__dict__.update(before)
            self.current, self.running = PipelineRun(), False

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], shape: Shape, guided: bool = False, **arguments: object) -> list[Any]:
        """Results of each call of encode_prompt, for captions."""
        run = PipelineRun(stop_at_noise=True, time=torch.zeros(1, device=self.device), denoise=stop)
        self.run(run, prompts, shape, guided, **arguments)
        if not run.encoded:
            raise refused(self.cls.__name__, "it draws noise before it calls encode_prompt, or never calls it")
        return run.encoded

    @torch.no_grad()
    def noise_shape(self, text: object, shape: Shape, **arguments: object) -> tuple[int, ...]:
        """Return the shape of the noise that is drawn for an image of a shape in px."""
        run = PipelineRun(text=text, stop_at_noise=True, time=torch.zeros(1, device=self.device), denoise=stop)
        self.run(run, ["x"], shape, **arguments)
        if not run.drawn:
            raise refused(self.cls.__name__, "it draws no noise by randn_tensor, so it cannot be given noised latents")
        return run.drawn[0]

    def remember_images(self) -> None:
        """Prepare each image once, on this device: only sizes matter of those of training."""
        from diffusers.image_processor import VaeImageProcessor

        for name, each in list(vars(self.pipeline).items()):
            if isinstance(each, VaeImageProcessor):
                own = {method: self._remembered(getattr(each, method)) for method in ("resize", "preprocess")}
                self.pipeline.__dict__[name] = StandIn(each, **own)

    def _remembered(self, function: Callable[..., object]) -> Callable[..., object]:
        known: dict[object, tuple[object, Any]] = {}

        def call(*args: object, **kwargs: object) -> Any:
            given = [*args, *kwargs.values()]
            key = tuple(part if isinstance(part, int | float | str | None) else id(part) for part in tree_leaves(given))
            if key not in known:
                made = function(*args, **kwargs)
                # With what it was made of, whose ids are not given again then.
                known[key] = given, made.to(self.device) if isinstance(made, Tensor) else made
            return known[key][1]

        return call

    # The hooks.

    def _encode(self, real: Callable[..., object], *args: object, **kwargs: object) -> Any:
        run = self.current
        if run.text is not None and len(run.encoded) == len(run.text):
            raise refused(self.cls.__name__, "it calls encode_prompt more often than when a caption was cached")
        if run.text is not None:
            encoded = run.text[len(run.encoded)]
        else:
            with torch.no_grad():
                encoded = real(*args, **kwargs)
        run.encoded.append(encoded)
        # The pipeline computes in float32, as a class does; text encoders may be in bf16.
        return tree_map_only(Tensor, lambda each: each.float() if each.is_floating_point() else each, encoded)

    def _randn_tensor(self, shape: object, *args: object, **kwargs: object) -> Tensor:
        run = self.current
        if run.calls:
            return draw(shape, *args, **kwargs)
        run.drawn.append(tuple(shape))
        if len(run.drawn) > 1:
            first, other = run.drawn[:2]
            raise refused(self.cls.__name__, f"it draws noise twice before the denoiser is called, {first} and {other}")
        if run.stop_at_noise:
            raise StopCall
        if run.noise is None:
            return draw(shape, *args, **kwargs)
        if tuple(run.noise.shape) != tuple(shape):
            wanted = tuple(run.noise.shape)
            raise refused(self.cls.__name__, f"it draws noise of shape {tuple(shape)} where {wanted} was expected")
        # Kandinsky 5 and SANA-Video write the image into it.
        return run.noise.clone() if run.has_images else run.noise

    def _call_denoiser(self, *args: object, **kwargs: object) -> object:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        self.current.calls.append(given)
        return self.module(**given) if self.current.denoise is None else self.current.denoise(given)

    def _encode_pixels(self, pixels: Tensor, *args: object, **kwargs: object) -> object:
        run, vae = self.current, self.stand_ins["vae"].module
        run.shown.append(tuple(pixels.shape))
        if run.encodes == "nothing":
            raise StopCall
        if len(pixels) > 1:
            raise refused(
                self.cls.__name__,
                f"its VAE encodes {len(pixels)} images at once, so they could not be cached one by one",
            )
        if run.latents is None and run.encodes != "zeros":
            with torch.no_grad():
                encoded = vae.encode(pixels.to(vae.device, vae.dtype), *args, **kwargs)
            return encoded if run.encodes == "drawn" else point(mean_of(encoded).float())
        wanted = self.latents_shape(pixels)
        if run.latents is None:
            return point(torch.zeros(wanted, device=self.device))
        if len(run.shown) > len(run.latents):
            raise refused(
                self.cls.__name__, f"its VAE encodes more than the {len(run.latents)} images that it is given"
            )
        latents = run.latents[len(run.shown) - 1]
        if latents.shape[1:] != wanted[1:]:
            size = f"{pixels.shape[-1]}x{pixels.shape[-2]}"
            raise refused(
                self.cls.__name__,
                f"it brings the image that it is given to {size} px, whose latents are {wanted[1:]}, where those of "
                f"shape {tuple(latents.shape[1:])} are cached",
            )
        return point(latents)

    @torch.no_grad()
    def latents_shape(self, pixels: Tensor) -> tuple[int, ...]:
        """Return the shape of the latents that the VAE makes of pixels of this shape."""
        if (key := tuple(pixels.shape)) not in self.encoded_shapes:
            vae = self.stand_ins["vae"].module
            self.encoded_shapes[key] = tuple(mean_of(vae.encode(pixels.to(vae.device, vae.dtype))).shape)
        return self.encoded_shapes[key]

    def _decode(self, latents: Tensor, *args: object, **kwargs: object) -> object:
        vae = self.stand_ins["vae"].module
        if self.current.decode is not None:
            return self.current.decode(latents)
        return vae.decode(latents.to(vae.dtype), *args, **kwargs)

    def _scheduler(self, run: PipelineRun) -> Any:
        if run.time is not None:
            # A loop takes one item per step; with an axis before, that is the times of all samples.
            self.one_step.timesteps = run.time if len(run.time) == 1 else run.time[None]
            return self.one_step
        scheduler = type(self.real_scheduler).from_config(self.real_scheduler.config)
        if run.at_step is not None:
            own, at_step = scheduler.step, run.at_step
            scheduler.step = lambda *args, **kwargs: at_step(scheduler, own, *args, **kwargs)
        return scheduler

    # How the pipeline is made to come here.

    def _subclass(self, cls: Any) -> object:
        """Return a subclass of a pipeline's class that works on `device`, whatever its components are on."""
        outer, on_device = self, property(lambda _: self.device)

        def encode_prompt(pipeline: DiffusionPipeline, *args: object, **kwargs: object) -> Any:
            return outer._encode(MethodType(cls.encode_prompt, pipeline), *args, **kwargs)

        def encode_image(pipeline: DiffusionPipeline, *args: object, **kwargs: object) -> Any:
            return outer._encode(MethodType(cls.encode_image, pipeline), *args, **kwargs)

        own: dict[str, object] = {
            "__module__": cls.__module__,
            "device": on_device,
            "_execution_device": on_device,
            "encode_prompt": encode_prompt,
        }
        if hasattr(cls, "encode_image"):
            own["encode_image"] = encode_image
        drawing = {name: self._with_own_noise(each) for name, each in drawing_functions(cls)}
        return type(cls.__name__, (cls,), drawing | own)

    def _with_own_noise(self, function: Any) -> object:
        """Return a copy of a function whose global `randn_tensor` is ours."""
        own = {**function.__globals__, "randn_tensor": self._randn_tensor}
        copy = FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy


def mean_of(encoded: Any) -> Tensor:
    """Mean of a VAE's posterior; an autoencoder without one (AutoencoderDC) returns the latents."""
    posterior = encoded[0] if isinstance(encoded, tuple) else encoded
    posterior = getattr(posterior, "latent_dist", posterior)
    if isinstance(posterior, Tensor):
        return posterior
    return posterior.latent if hasattr(posterior, "latent") else posterior.mode()


def point(latents: Tensor) -> EncodedImage:
    return EncodedImage((Point(latents),))


def image_argument(images: Sequence[object]) -> dict[str, Any]:
    """Argument of a call for given images: one as it is, several as a list."""
    return {IMAGE: images[0] if len(images) == 1 else [*images]} if images else {}


def frame_rate_of(cls: Any) -> float:
    """Return the frames per second that a pipeline's call has by default."""
    parameters = inspect.signature(cls.__call__).parameters
    defaults = (parameters[name].default for name in RATES if name in parameters)
    return next((each for each in defaults if isinstance(each, int | float)), DEFAULT_RATE)


def stop(given: Mapping[str, object]) -> Any:
    """End a run at the denoiser's call, whose inputs it has shown."""
    raise StopCall


def drawing_functions(cls: object) -> Iterator[tuple[str, object]]:
    """Yield all methods of a class that draw noise, but for `__call__`."""
    for name, function in inspect.getmembers(cls, inspect.isfunction):
        if name != "__call__" and "randn_tensor" in function.__code__.co_names:
            yield name, function
