"""Study of a pipeline by running it: its objective, how guidance is off, and what its denoiser is given.

Nothing here is believed: `proof.py` runs the pipeline's own loop with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor

from simpletuner.errors import SettingsError
from simpletuner.models.automatic.findings import Check, Findings, GivenImages, Layout, Output, latents_among
from simpletuner.models.automatic.hooks import FRAMES, IMAGE, HookedPipeline, image_argument, stop
from simpletuner.models.automatic.pipeline_run import REFUSED, PipelineRun, refused, tensors_of
from simpletuner.models.automatic.prediction import find_guided_text
from simpletuner.models.automatic.scheduler import NoiseSchedule, study_schedule
from simpletuner.models.automatic.text import TextLayout, batch_axes, same, same_texts
from simpletuner.models.family.vae import frames_of_cell
from simpletuner.settings.values.shape import SampleShape, Shape
from simpletuner.system.numbers import count_noun

# Short and long ones; the last is as long as text encoders read. Words in quotation marks are encoded once
# more by HunyuanVideo 1.5, HunyuanImage and LongCat-Image.
CAPTIONS = (
    "a red circle",
    'two large blue squares and the words "three four" below them on a bright background, in pink',
    "a photo",
    " ".join(["a small yellow star beside a large purple heart"] * 64),
)


class SeveralCalls(SettingsError):
    """A step calls the denoiser more than once: guidance, which another scale may turn off."""


NO_CLIPS = f"its call has none of {', '.join(FRAMES)}, so it makes no clips"


@dataclass
class Study:
    """Runs of one pipeline with all its components, at one shape in px."""

    hooked: HookedPipeline
    module: Callable[..., Any]
    """The denoiser, with weights."""
    shape: Shape
    guidance: float = 1.0
    """Embedded guidance scale to train with, where a denoiser has one."""
    given: dict[str, Any] = field(default_factory=dict)
    """Further arguments of each call."""
    checks: list[Check] = field(default_factory=list)
    """Points that were shown so far."""
    encoded: list[Any] = field(default_factory=list)
    images: tuple[Image.Image, ...] = ()
    """Images that the pipeline is given beside each caption, and others of the same sizes."""
    others: tuple[Image.Image, ...] = ()
    is_first_frame: bool = False
    reads_images: bool = False
    """True if a text is cached for each pair, since text or image encoders read its images."""
    encoded_with_others: list[Any] = field(default_factory=list)
    """The encoding of the first two captions with the other images."""

    @property
    def name(self) -> str:
        return self.hooked.cls.__name__

    def refused(self, why: str) -> SettingsError:
        return refused(self.name, why)

    def given_images(self, sample: SampleShape) -> Study:
        """Return the study with images of a sample's sizes: of clips, their own first frame."""
        if sample.has_first_frame:
            images = (image_of(moving_ramp(sample.target)[0, :, 0]),)
        else:
            images = tuple(image_of(moving_ramp(each)[0].transpose(-1, -2).flip(-1)) for each in turned(sample))
        others = tuple(ImageOps.invert(each) for each in images)
        return replace(self, images=images, others=others, is_first_frame=sample.has_first_frame)

    def at_own_size(self, sample: SampleShape) -> SampleShape:
        """Return a sample whose references have the size to which the call brings the first of them."""
        study = self.given_images(sample)
        run = PipelineRun(time=torch.zeros(1, device=self.hooked.device), denoise=stop, encodes="nothing")
        with torch.no_grad():
            self.hooked.run(run, ["x"], self.shape, **image_argument(study.images))
        if not run.shown:
            return sample
        (height, width), count = run.shown[0][-2:], len(sample.references)
        return sample._replace(references=(Shape(1, height, width),) * count)

    def find(self) -> Findings:
        """Raises SettingsError with the first reason why the pipeline cannot be trained, guidance last."""
        schedule = study_schedule(self.hooked.real_scheduler, self.name)
        refusals: list[SettingsError] = []
        # Guidance is off at 1 in most pipelines, at 0 in some (Z-Image), and others have no such argument.
        for scale in (1.0, 0.0, None):
            off = {} if scale is None else {"guidance_scale": scale, "true_cfg_scale": scale}
            given = self.given | off | image_argument(self.images)
            arguments = {name: value for name, value in given.items() if name in self.hooked.parameters}
            try:
                found = self.probe(schedule, arguments)
            except SettingsError as error:
                refusals.append(error)
                continue
            by = type(self.hooked.real_scheduler).__name__
            self.checks.append(Check("objective", f"{schedule.objective} by {by}"))
            self.checks.append(Check("inputs", describe_inputs(found)))
            found = self.find_batches(self.find_embedded_guidance(found))
            return find_guided_text(self.hooked, self.shape, found, CAPTIONS[:3], (self.images, self.others))
        why = min(refusals, key=lambda refusal: isinstance(refusal, SeveralCalls))
        raise SettingsError(why.message, self.refused("").hint)

    def probe(self, schedule: NoiseSchedule, arguments: Mapping[str, object]) -> Findings:
        """Study the pipeline with arguments that may turn guidance off."""
        self.encoded = [self.hooked.encode([caption], self.shape, **arguments) for caption in CAPTIONS]
        text = self.find_text(arguments)
        layout = self.find_layout(arguments)
        self.check_text(arguments)
        noise = random(layout.shape, 0)
        first, time = self.encoded[0], schedule.example()
        output: list[object] = []

        def predict(given: Mapping[str, object]) -> object:
            output.append(self.module(**given))
            return output[-1]

        run = self.run(first, noise, time, arguments, denoise=predict)
        if len(run.calls) != 1:
            raise SeveralCalls(self.refused(f"it calls its denoiser {len(run.calls)} times in one step").message)
        changed = self.run(first, noise + 1, time, arguments).calls[0]
        others = [self.run(each, noise, time, arguments).calls[0] for each in self.encoded[1:]]
        given = tensors_of(run.calls[0])
        images = None
        if self.images:
            with_others = {**arguments, **image_argument(self.others)}
            others.append(self.run(self.encoded_with_others[0], noise, time, with_others).calls[0])
            images = self.find_images(run, others[-1], layout)
        name, images = self.find_latents(given, tensors_of(changed), noise, layout, images)
        fixed = {
            each.partition("[")[0]
            for each, tensor in given.items()
            if tensor.is_floating_point()
            and all(same(tensor, tensors_of(other).get(each)) for other in (changed, *others))
        }
        outputs = Output.of(output[0], latents_among(run.calls[0], name), self.name)
        known = {each: value for each, value in arguments.items() if each != IMAGE}
        return Findings(self.shape, schedule, text, layout, known, name, frozenset(fixed), outputs, images)

    def find_text(self, arguments: Mapping[str, object]) -> TextLayout:
        """Find the layout of texts. Raises SettingsError where one depends on images but not its cache."""
        if not self.images:
            return TextLayout.of(self.encoded, self.name)
        given = {**arguments, **image_argument(self.others)}
        self.encoded_with_others = [self.hooked.encode([each], self.shape, **given) for each in CAPTIONS[:2]]
        if not self.reads_images and not same_texts(self.encoded[0], self.encoded_with_others[0]):
            raise self.refused("its texts depend on the image that it is given by another way than encode_prompt")
        return TextLayout.of(self.encoded, self.name, self.encoded_with_others[0])

    def find_images(self, run: PipelineRun, other: Mapping[str, object], layout: Layout) -> GivenImages:
        """Find the denoiser's inputs that depend on the images, and what of them the VAE is given."""
        inputs = differing(run.calls[0], other)
        if not inputs:
            raise self.refused(f"no input of its denoiser depends on the image that it is given{self.no_argument}")
        if len(run.shown) != len(self.images):
            times, images = count_noun(len(run.shown), "time"), count_noun(len(self.images), "image")
            raise self.refused(f"its VAE encodes {times} when it is given {images}")
        if why := self.size_error(run):
            raise self.refused(why)
        frames = run.shown[0][2] if len(run.shown[0]) == 5 else 1
        if frames not in ({1, self.shape.frames} if self.is_first_frame else {1}):
            raise self.refused(f"its VAE encodes a clip of {frames} frames of the image that it is given")
        shapes = tuple(Shape(1, each.height, each.width) for each in self.images)
        return GivenImages(shapes, inputs, self.is_first_frame, frames)

    def size_error(self, run: PipelineRun) -> str:
        """Reason why images are not encoded in the sizes that they have; empty if they are."""
        sizes = [(shape[-1], shape[-2]) for shape in run.shown]
        changed = [(given.size, size) for given, size in zip(self.images, sizes, strict=True) if given.size != size]
        said = " and ".join("{}x{} px to {}x{} px".format(*given, *size) for given, size in changed)
        return f"it brings the image that it is given from {said}: train with images of that size" if said else ""

    @property
    def no_argument(self) -> str:
        return "" if IMAGE in self.hooked.parameters else f": its call has no argument `{IMAGE}`"

    def run(
        self, text: object, noise: Tensor, time: Tensor, arguments: Mapping[str, object], denoise: object = None
    ) -> PipelineRun:
        """Make one prediction; without `denoise` its inputs alone are recorded."""
        device = self.hooked.device
        run = PipelineRun(text=text, noise=noise.to(device), time=time.to(device), encodes="mean")
        run.denoise = denoise or stop
        with torch.no_grad():
            self.hooked.run(run, ["x"], self.shape, **arguments)
        if not run.calls:
            raise self.refused("it never calls its denoiser")
        if not run.drawn:
            raise self.refused("it draws no noise by randn_tensor, so it could not be given noised latents")
        return run

    def find_latents(
        self,
        given: dict[str, Tensor],
        changed: dict[str, Tensor],
        noise: Tensor,
        layout: Layout,
        images: GivenImages | None,
    ) -> tuple[str, GivenImages | None]:
        """Find the input that holds the latents, and whether a given image replaces the first frame."""
        names = [name for name, tensor in given.items() if not same(tensor, changed.get(name))]
        kinds = {name.partition("[")[0] for name in names}
        if len(kinds) != 1:
            raise self.refused(f"{len(kinds)} inputs of its denoiser depend on the latents")
        count = sum(int((given[name] != changed[name]).sum()) for name in names)
        cells = layout.shape[layout.frames] if layout.frames is not None else 1
        if images is not None and images.is_first_frame and count == noise.numel() // cells * (cells - 1):
            if layout.frames != 1:  # of channels, frames, rows and columns: the loss leaves out the first frame
                raise self.refused("a given first frame takes the place of noise whose first axis is not of channels")
            return kinds.pop(), replace(images, replaces_noise=True)
        if count != noise.numel():
            raise self.refused(f"its denoiser is given {count} elements of latents, of which there are {noise.numel()}")
        return kinds.pop(), images

    def find_layout(self, arguments: Mapping[str, object]) -> Layout:
        """Find the axes of the noise by drawing it at several shapes, and that the pipeline keeps to them."""
        (frames, height, width), text = self.shape, self.encoded[0]
        shapes = (self.shape, Shape(frames, height, width * 2), Shape(frames, height * 2, width))
        square, wide, high = (self.hooked.noise_shape(text, shape, **arguments) for shape in shapes)
        columns, rows = changed_axes(square, wide), changed_axes(square, high)
        if len(columns) != 1 or len(rows) != 1 or wide[columns[0]] != 2 * square[columns[0]]:
            raise self.refused(
                f"it does not keep to the size it is asked for: it draws noise of shape {square} for {width}x{height} "
                f"px, and {wide} for {width * 2}x{height} px"
            )
        cell_px = width // square[columns[0]]
        if cell_px * square[columns[0]] != width or cell_px * square[rows[0]] != height:
            raise self.refused(f"it does not keep to the size it is asked for, {width}x{height} px")
        if square[0] != 1:
            raise self.refused(f"it draws noise of shape {square}, whose first axis is not the batch")
        cell = Shape(self.step, cell_px, cell_px)
        return Layout(square[1:], rows[0] - 1, columns[0] - 1, cell, self.find_frames(square, arguments))

    def find_frames(self, drawn: tuple[int, ...], arguments: Mapping[str, object]) -> int | None:
        """Find the axis of frames in noise without batch, and check that the pipeline keeps their number."""
        frames = self.shape.frames
        if not {*FRAMES} & {*self.hooked.parameters}:
            if frames > 1:
                raise self.refused(NO_CLIPS)
            return None
        longer = self.shape._replace(frames=frames + self.step)
        other = self.hooked.noise_shape(self.encoded[0], longer, **arguments)
        axes, cells = changed_axes(drawn, other), (frames - 1) // self.step + 1
        if len(axes) != 1 or (drawn[axes[0]], other[axes[0]]) != (cells, cells + 1):
            raise self.refused(
                f"it does not keep to the frames it is asked for: it draws noise of shape {drawn} for {frames} frames, "
                f"and {other} for {longer.frames}"
            )
        return axes[0] - 1

    def shape_error(self, shape: Shape, found: Findings) -> str:
        """Reason why the pipeline draws noise of another shape than is trained; empty if it does not."""
        if shape.frames > 1 and found.layout.frames is None:
            return NO_CLIPS
        if (shape.frames - 1) % self.step:
            return f"its clips have a multiple of {self.step} and one more frame, not {shape.frames}"
        arguments = found.arguments | image_argument(self.images)
        drawn, wanted = self.hooked.noise_shape(self.encoded[0], shape, **arguments), found.layout.axes_for(shape)
        if drawn[1:] != wanted or not self.images:
            return f"it draws noise of shape {drawn[1:]} for {shape} px, not {wanted}" if drawn[1:] != wanted else ""
        run = PipelineRun(text=self.encoded[0], time=found.schedule.example().to(self.hooked.device), denoise=stop)
        with torch.no_grad():
            self.hooked.run(run, ["x"], shape, **arguments)
        return self.size_error(run)

    @property
    def step(self) -> int:
        """Frames that one latent cell covers, as the VAE says."""
        return frames_of_cell(self.hooked.stand_ins["vae"].module)

    def check_text(self, arguments: Mapping[str, object]) -> None:
        """Raise SettingsError where a text depends on the shape: it is cached once for all of them."""
        other = Shape(self.shape.frames + self.step, self.shape.height, self.shape.width * 2)
        if not same_texts(self.encoded[0], self.hooked.encode([CAPTIONS[0]], other, **arguments)):
            raise self.refused("what its encode_prompt returns depends on the size, or on the number of frames")

    def find_embedded_guidance(self, found: Findings) -> Findings:
        """Use the guidance scale's setting if it is an input and the denoiser is still called once."""
        noise, time = random(found.layout.shape, 0), found.schedule.example()
        if "guidance_scale" not in self.hooked.parameters:
            return found
        arguments, images = found.arguments | {"guidance_scale": self.guidance}, image_argument(self.images)
        plain, scaled = (
            tensors_of(self.run(None, noise, time, found.arguments | images | {"guidance_scale": scale}).calls[0])
            for scale in (found.arguments.get("guidance_scale", 1.0), 5.0)
        )
        differ = [name for name, tensor in plain.items() if not same(tensor, scaled.get(name))]
        is_input = bool(differ) and all(plain[name].shape == scaled[name].shape for name in differ if name in scaled)
        return replace(found, arguments=arguments, embeds_guidance=True) if is_input else found

    def find_batches(self, found: Findings) -> Findings:
        arguments, texts = found.arguments | image_argument(self.images), [CAPTIONS[0]]
        one = self.hooked.encode(texts, self.shape, **arguments)
        try:
            two = self.hooked.encode(texts * 2, self.shape, **arguments)
        except SettingsError as error:  # one prompt per call (FLUX.3), which only costs speed
            return replace(found, unbatched=error.message.partition(f"{REFUSED}: ")[2])
        axes, why = batch_axes(one, two)
        return replace(found, axes=tuple(axes) if axes is not None else None, unbatched=why)


def differing(one: Mapping[str, object], other: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of a denoiser's inputs that differ."""
    first, second = tensors_of(one), tensors_of(other)
    return tuple(
        name
        for name, each in first.items()
        if name not in second or second[name].shape != each.shape or not torch.allclose(each, second[name], atol=1e-4)
    )


def describe_inputs(found: Findings) -> str:
    kept = ", ".join(sorted(found.float32_inputs)) or "none"
    return f"one call, latents once as {found.latents_input}; the same for all images and captions: {kept}"


def turned(sample: SampleShape) -> list[Shape]:
    """Return the shapes of references with width and height exchanged."""
    return [each._replace(height=each.width, width=each.height) for each in sample.references]


def moving_ramp(shape: Shape) -> Tensor:
    """Pixels in -1..1, (1, 3, H, W) or for a clip (1, 3, F, H, W), with colours that move to the right."""
    frames = [
        torch.linspace(-1, 1, shape.width).roll(shape.width * each // shape.frames) for each in range(shape.frames)
    ]
    ramp = torch.stack(frames)[:, None].expand(-1, shape.height, -1).reshape(shape.axes)
    pixels = torch.stack([ramp, -ramp, 0.5 * ramp])[None]
    return ((pixels + 1) * 127.5).round() / 127.5 - 1  # as an image has them


def image_of(pixels_CHW: Tensor) -> Image.Image:
    return Image.fromarray(((pixels_CHW + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())


def random(shape: Sequence[int], seed: int, count: int = 1) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def changed_axes(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [axis for axis, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
