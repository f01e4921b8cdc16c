"""The proof that training by a pipeline's own call is right, on its real components, at one shape in px.

Each check raises SettingsError with one sentence. What the study inferred (sign, time, order, scale) is shown
by the pipeline's own loop with its own scheduler, so nothing rests on what diffusers' code looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from simpletuner.errors import SettingsError
from simpletuner.models.automatic.components import AutomaticVae
from simpletuner.models.automatic.findings import Check, Findings
from simpletuner.models.automatic.hooks import image_argument
from simpletuner.models.automatic.pipeline_run import FOREIGN_ERRORS, REFUSED, PipelineRun, first_line
from simpletuner.models.automatic.prediction import Predictor
from simpletuner.models.automatic.replay import NotTraced
from simpletuner.models.automatic.scheduler import exact_prediction
from simpletuner.models.automatic.study import Study, differing, moving_ramp, random
from simpletuner.models.automatic.text import padded_records
from simpletuner.models.family.schedulers import REACHED
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.models.family.vae import encode_first_frame, pixels_of
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from diffusers import SchedulerMixin

STEPS = 4
# Largest difference of two predictions, relative to the largest element: kernels differ.
CLOSE = 1e-3
# Largest mean difference of two images in 0..1, one of them through a VAE in bf16.
ALIKE = 2e-2


@dataclass
class Proof:
    """Checks of what a study found."""

    study: Study
    found: Findings
    vae: AutomaticVae

    def __post_init__(self) -> None:
        self.predictor = self._predictor(self.found)

    def prove(self) -> Findings:
        """Run all checks, and return the findings with the sign and with what can share a call."""
        clean = self.latents_of_image()
        self.found = replace(self.found, sign=self.find_sign(clean))
        self.predictor = self._predictor(self.found)
        self.check_images()
        self.check_later_steps()
        reason = self.found.unbatched or self.batching_error()
        if reason:
            self.found = replace(self.found, axes=None, unbatched=reason)
        self.note("batch", f"one call for each sample, since {reason}" if reason else "two samples share a call")
        self.find_replays()
        return self.found

    def confirm(self) -> Findings:
        """Run all checks at another shape than the study's."""
        known, found = self.found.sign, self.prove()
        if found.sign != known:
            raise self.study.refused(f"its scheduler gets another sign at {self.study.shape} than at {found.shape} px")
        return found

    def latents_of_image(self) -> Tensor:
        """Normalized latents (1, ...) of an image or a clip, as the goal of the pipeline's loop."""
        try:
            clean = self.vae.encode(moving_ramp(self.study.shape))
        except torch.OutOfMemoryError:
            raise
        except FOREIGN_ERRORS as error:  # Allegro encodes tiles alone
            kind = "clip" if self.study.shape.frames > 1 else "image"
            why = f"its VAE encodes no {kind}: {type(error).__name__}, {first_line(error)}"
            raise self.study.refused(why) from error
        if tuple(clean.shape[1:]) != self.axes:
            raise self.study.refused(f"its VAE makes latents of shape {tuple(clean.shape[1:])}, not of its noise")
        return clean

    def find_sign(self, clean: Tensor) -> float:
        """Find the sign of exact predictions with which the loop ends at known latents and their image."""
        off: dict[float, float] = {}
        for sign in (1.0, -1.0):
            ended, wanted, image = self.exact_loop(clean, sign)
            off[sign] = float((ended - wanted).abs().max() / wanted.abs().max().clamp(min=1))
            if off[sign] < REACHED:
                self.note("own loop", "exact predictions lead it to known latents", off[sign], REACHED)
                self.compare_images(image, clean)
                return sign
        raise self.study.refused(
            f"exact predictions do not lead its own loop to known latents: it ends {min(off.values()):.2g} away"
        )

    def exact_loop(self, clean: Tensor, sign: float) -> tuple[Tensor, Tensor, Tensor]:
        """Run the pipeline's loop with the exact prediction towards `clean` at each step.

        Returns the latents that it ends at, those that it should, and what it decodes.
        """
        ends: list[Tensor] = []

        def at_step(
            scheduler: SchedulerMixin,
            own: Any,
            output: Tensor,
            timestep: object,
            sample: Tensor,
            *args: object,
            **kw: object,
        ) -> Any:
            target = self.predictor.to_step(clean, sample).to(sample.dtype)
            exact = sign * exact_prediction(scheduler, sample, timestep, target, len(ends))
            stepped = own(exact.to(output.dtype), timestep, sample, *args, **kw)
            ends.append(stepped[0] if isinstance(stepped, tuple) else stepped.prev_sample)
            return stepped

        noise = random(clean.shape[1:], 1)
        # Kept for `at_step`: finding it runs the pipeline, which cannot be called while its loop runs.
        self.predictor.order(tuple(clean.shape[1:]), self.device)
        output = self.loop(PipelineRun(noise=noise, denoise=self.predictor.blank, at_step=at_step), "pt")
        ended = ends[-1].float().cpu()
        return ended, self.predictor.to_step(clean, ended), output[0].detach().float().cpu()

    def compare_images(self, image: Tensor, clean: Tensor) -> None:
        expected = self.vae.decode(clean).add(1).div(2).clamp(0, 1)
        expected = expected.transpose(1, 2).flatten(0, 1) if expected.ndim == 5 else expected
        if len(expected) != self.study.shape.frames:
            raise self.study.refused(f"its VAE makes {len(expected)} frames of a clip of {self.study.shape.frames}")
        image = image.flatten(0, -4)[:, :3]  # a video has an axis more, that of frames; some are of RGBA
        if image.shape != expected.shape:
            found = Shape(image.shape[0], image.shape[-2], image.shape[-1])
            raise self.study.refused(f"its image for {self.study.shape} px is {found} px")
        off = float((image - expected).abs().mean())
        if off > ALIKE:
            raise self.study.refused(f"its image differs from the VAE's reconstruction by {off:.2g} on average")
        self.note("image", "is the VAE's reconstruction, at the size of the bucket", off, ALIKE)

    def check_later_steps(self) -> None:
        """Compare each later call of a real loop with a single one at its time and latents."""
        seen: list[tuple[Tensor, Tensor, Tensor]] = []

        def at_step(
            scheduler: SchedulerMixin,
            own: Any,
            output: Tensor,
            timestep: object,
            sample: Tensor,
            *args: object,
            **kw: object,
        ) -> Any:
            scaled = hasattr(scheduler, "scale_model_input")
            shown = scheduler.scale_model_input(sample, timestep) if scaled else sample
            # Kandinsky 5 writes the next latents into these.
            seen.append((scheduler.timesteps[len(seen)].reshape(1), shown.clone(), output.clone()))
            return own(output, timestep, sample, *args, **kw)

        run = PipelineRun(noise=random(self.axes, 2), denoise=self.denoise, at_step=at_step)
        self.loop(run, "latent")
        most = 0.0
        for step in range(1, len(seen)):
            time, shown, output = seen[step]
            latents = self.predictor.from_step(shown, self.axes).float()
            single = PipelineRun(text=self.study.encoded[0], noise=latents, time=time, denoise=self.denoise)
            single.encodes = "mean"
            self.study.hooked.run(single, ["x"], self.study.shape, **self.arguments)
            assert single.handed is not None
            if (off := distance(single.handed[0], output)) > CLOSE or not output.isfinite().all():
                inputs = ", ".join(differing(run.calls[step], single.calls[0])) or "the prediction"
                raise self.study.refused(
                    f"what its denoiser is given depends on the number of the step ({inputs} differs by {off:.2g} at "
                    f"step {step + 1}), so a single call does not tell it"
                )
            most = max(most, off)
        self.note("later step", "each is the single call of training", most, CLOSE)

    def batching_error(self) -> str:
        """Reason why two samples in one call differ from each alone; empty if they do not."""
        # Of two captions, and two images where there are some.
        text = padded_records([self.text(0), self.text(1, with_others=True)])
        given = [
            torch.cat(each) for each in zip(*map(self.cached, (self.study.images, self.study.others)), strict=True)
        ]
        noised = random(self.axes, 3, count=2).to(self.device)
        times = self.found.schedule.timesteps(0.2, 0.8).to(self.device)
        alone = self._predictor(replace(self.found, axes=None)).predict(self.denoise, noised, times, text, given)
        try:
            together = self.predictor.predict(self.denoise, noised, times, text, given)
        except SettingsError as error:  # refused here, it only costs speed
            return error.message.partition(f"{REFUSED}: ")[2]
        off = distance(together, alone)
        return "" if off < CLOSE else f"two samples in one call differ by {off:.1g} from each alone"

    def find_replays(self) -> None:
        """Find whether traced calls predict what calls do, and whether samples can share a denoiser call."""
        known = self.found
        self.study.hooked.remember_images()  # as in training: PIL and numpy are not traced
        for joins in (True, False) if known.axes is None else (False,):
            self.found = replace(known, replays=True, joins=joins)
            try:
                off = self.replay_difference()
            except NotTraced:  # what the call makes of the denoiser's output
                continue
            if off < CLOSE:
                self.predictor = self._predictor(self.found)
                shared = ", and samples share a call of the denoiser" if joins else ""
                self.note("replay", f"of a call's operators is the same{shared}", off, CLOSE)
                return
        self.found = known

    def replay_difference(self) -> float:
        """Return the largest difference between calls and their replays, for two samples of the same shapes;
        infinity where there is no trace, or samples do not share a call.
        """
        own = self.text(0)
        other = {name: -each if each.is_floating_point() else each for name, each in own.items()}
        text = padded_records([own, other])
        pairs = zip(*map(self.cached, (self.study.images, self.study.others)), strict=True)
        given = [torch.cat(each) for each in pairs]
        times = self.found.schedule.timesteps(0.2, 0.8).to(self.device)
        plain, replayed = (
            self._predictor(each) for each in (replace(self.found, replays=False, joins=False), self.found)
        )
        calls: list[object] = []

        def denoise(named: dict[str, Any]) -> Any:
            calls.append(None)
            return self.denoise(named)

        def predictions(predictor: Predictor, seed: int) -> Tensor:
            noised = random(self.axes, seed, count=2).to(self.device)
            calls.clear()
            return predictor.predict(denoise, noised, times.roll(seed), text, given)

        with torch.no_grad():
            # The second replay is compared: it is given other values than the trace was made with, and the
            # constants that the denoiser may have written into in the first.
            for seed in (3, 4):
                found = predictions(replayed, seed)
                if not any(replayed.replays.values()) or (self.found.joins and len(calls) > 1):
                    return float("inf")
            return distance(found, predictions(plain, 4))

    def without_gradient(self, named: Callable[[], object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the parameters without effect on predictions, and prefixes of those with zero gradients."""
        noised = random(self.axes, 4).to(self.device)
        time = self.found.schedule.timesteps(0.5).to(self.device)
        plain = self._predictor(replace(self.found, replays=False))  # shapes that cannot be traced are called
        with torch.enable_grad():
            prediction = plain.predict(self.denoise, noised, time, self.text(1), self.cached(self.study.images))
        if not prediction.requires_grad:
            raise self.study.refused("its call computes no gradients")
        # Not its mean square, whose gradients are all zero where a last layer begins at zero (ERNIE-Image).
        (prediction * random(prediction.shape, 5)[0].to(prediction)).mean().backward()
        parameters = dict(named())
        unused = tuple(name for name, parameter in parameters.items() if parameter.grad is None)
        zeros = (name for name, each in parameters.items() if each.grad is not None and not each.grad.any())
        self.note("gradients", f"reach {len(parameters) - len(unused):,} of {len(parameters):,} parameters")
        # A LoRA's matrices are named after the module.
        return unused, tuple(name.removesuffix("weight") for name in zeros)

    def note(self, name: str, finding: str, off: float | None = None, limit: float | None = None) -> None:
        shape = self.study.shape
        self.study.checks.append(Check(name, finding + (f", {shape}" if shape.frames > 1 else ""), off, limit))

    @property
    def axes(self) -> tuple[int, ...]:
        return self.found.layout.axes_for(self.study.shape)

    def text(self, number: int, with_others: bool = False) -> Conditioning:
        encoded = self.study.encoded_with_others if with_others and self.study.images else self.study.encoded
        return self.found.text.record(encoded[number], self.study.name)

    @property
    def arguments(self) -> dict[str, Any]:
        return self.found.arguments | image_argument(self.study.images)

    def cached(self, images: Sequence[Image.Image]) -> list[Tensor]:
        """Latents (1, ...) of images as caches hold them: of references, or of a clip beginning with one."""
        given = self.found.images
        if given is None or not images:
            return []
        if not given.is_first_frame:
            return [self.vae.encode(pixels_of(each)).to(self.device) for each in images]
        clip = moving_ramp(self.study.shape)
        clip[:, :, 0] = pixels_of(images[0])
        if given.frames > 1 or given.is_alone:
            first = encode_first_frame(self.vae, clip, given.is_alone)
        else:
            first = self.found.layout.first_frame(self.vae.encode(clip))
        return [first.to(self.device)]

    def check_training(self, predictor: Predictor) -> None:
        """Compare the denoiser's inputs with those of training, where no VAE is loaded."""
        if self.study.images:
            with_vae = self._predictor(replace(self.found, replays=False))
            with_vae, without = (self.replayed(each) for each in (with_vae, predictor))
            if inputs := differing(with_vae, without):
                raise self.study.refused(f"{', '.join(inputs)} of its denoiser depends on weights of its VAE")

    def replayed(self, predictor: Predictor) -> dict[str, object]:
        """Return the denoiser's inputs for images from the cache."""
        seen: list[dict[str, Any]] = []

        def record(given: dict[str, Any]) -> object:
            seen.append(given)
            return self.predictor.blank(given)

        noised, time = random(self.axes, 4).to(self.device), self.found.schedule.timesteps(0.5)
        with torch.no_grad():
            predictor.predict(record, noised, time, self.text(0), self.cached(self.study.images))
        return seen[0]

    def check_images(self) -> None:
        """Compare the denoiser's inputs for given images with those that are replayed from the cache."""
        if self.found.images is None:
            return
        if not self.study.images:
            self.note(self.found.images.kind, "left out: the call is that of a caption alone")
            return
        noised, time = random(self.axes, 4).to(self.device), self.found.schedule.timesteps(0.5)
        own = self.study.run(
            self.study.encoded[0], noised, self.found.schedule.time(time), self.arguments, denoise=self.predictor.blank
        )
        inputs = differing(own.calls[0], self.replayed(self.predictor))
        if inputs and self.found.images.is_first_frame and self.found.images.frames == 1:
            self.found = replace(self.found, images=replace(self.found.images, is_alone=True))
            self.predictor = self.vae.predictor = self._predictor(self.found)
            inputs = differing(own.calls[0], self.replayed(self.predictor))
        if inputs:
            raise self.study.refused(
                f"{', '.join(inputs)} of its denoiser differs between an image that it is given and its cached latents"
            )
        self.note(
            self.found.images.kind,
            f"reach the denoiser by {', '.join(self.found.images.inputs)}, the same from the cache",
        )

    @property
    def device(self) -> torch.device:
        return self.study.hooked.device

    def denoise(self, given: Mapping[str, object]) -> Any:
        return self.study.module(**given)

    def loop(self, run: PipelineRun, output_type: str) -> tuple[Any, ...]:
        run.text = self.study.encoded[0]
        run.encodes = "mean"
        arguments = {**self.arguments, "output_type": output_type, "num_inference_steps": STEPS}
        # Ancestral schedulers draw while they step.
        arguments["generator"] = torch.Generator().manual_seed(5)
        with torch.no_grad():
            output = self.study.hooked.run(run, ["x"], self.study.shape, **arguments)
        if output is None or len(run.calls) < 2:
            raise self.study.refused(f"its loop of {STEPS} steps calls its denoiser {len(run.calls)} times")
        return output

    def _predictor(self, found: Findings) -> Predictor:
        return Predictor(self.study.hooked, found)


def distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    return float((one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1e-12))
