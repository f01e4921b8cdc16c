"""The proof that training by a pipeline's own call is right, on its real components, at one shape in px.

Each check raises SettingsError with one sentence. What the study inferred (sign, time, order, scale) is shown
by the pipeline's own loop with its own scheduler, so nothing rests on what diffusers' code looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from simpletuner.errors import SettingsError
from simpletuner.models.automatic.components import AutomaticVae
from simpletuner.models.automatic.findings import Check, Findings
from simpletuner.models.automatic.pipeline_run import FOREIGN_ERRORS, REFUSED, PipelineRun, first_line, tensors_of
from simpletuner.models.automatic.prediction import Predictor
from simpletuner.models.automatic.scheduler import exact_prediction
from simpletuner.models.automatic.study import Study, random
from simpletuner.models.family.schedulers import REACHED
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from diffusers import SchedulerMixin

STEPS = 4
CLOSE = 1e-3
"""Largest difference of two predictions, relative to the largest element: kernels differ."""
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
        self.check_later_steps()
        reason = self.found.unbatched or self.batching_error()
        if reason:
            self.found = replace(self.found, axes=None, unbatched=reason)
        self.note("batch", f"one call for each sample, since {reason}" if reason else "two samples share a call")
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
            ended, image = self.exact_loop(clean, sign)
            off[sign] = float((ended - clean).abs().max() / clean.abs().max().clamp(min=1))
            if off[sign] < REACHED:
                self.note("own loop", "exact predictions lead it to known latents", off[sign], REACHED)
                self.compare_images(image, clean)
                return sign
        raise self.study.refused(
            f"exact predictions do not lead its own loop to known latents: it ends {min(off.values()):.2g} away"
        )

    def exact_loop(self, clean: Tensor, sign: float) -> tuple[Tensor, Tensor]:
        """Run the pipeline's loop with the exact prediction towards `clean` at each step.

        Returns the latents that it ends at, and what it decodes.
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
        ended = self.predictor.from_step(ends[-1].float(), tuple(clean.shape[1:])).cpu()
        return ended, output[0].detach().float().cpu()

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
            self.study.hooked.run(single, ["x"], self.study.shape, **self.found.arguments)
            assert single.handed is not None
            if (off := distance(single.handed[0], output)) > CLOSE or not output.isfinite().all():
                inputs = differing(run.calls[step], single.calls[0]) or "the prediction"
                raise self.study.refused(
                    f"what its denoiser is given depends on the number of the step ({inputs} differs by {off:.2g} at "
                    f"step {step + 1}), so a single call does not tell it"
                )
            most = max(most, off)
        self.note("later step", "each is the single call of training", most, CLOSE)

    def batching_error(self) -> str:
        """Reason why two samples in one call differ from each alone; empty if they do not."""
        texts = [self.text(number) for number in (0, 1)]
        noised = random(self.axes, 3, count=2).to(self.device)
        times = self.found.schedule.timesteps(0.2, 0.8).to(self.device)
        alone = self._predictor(replace(self.found, axes=None)).predict(self.denoise, noised, times, texts)
        try:
            together = self.predictor.predict(self.denoise, noised, times, texts)
        except SettingsError as error:  # refused here, it only costs speed
            return error.message.partition(f"{REFUSED}: ")[2]
        off = distance(together, alone)
        return "" if off < CLOSE else f"two samples in one call differ by {off:.1g} from each alone"

    def unused_parameters(self, named: Callable[[], object]) -> tuple[str, ...]:
        noised = random(self.axes, 4).to(self.device)
        time = self.found.schedule.timesteps(0.5).to(self.device)
        with torch.enable_grad():
            prediction = self.predictor.predict(self.denoise, noised, time, [self.text(1)])
        if not prediction.requires_grad:
            raise self.study.refused("its call computes no gradients")
        prediction.square().mean().backward()
        parameters = dict(named())
        unused = tuple(name for name, parameter in parameters.items() if parameter.grad is None)
        self.note("gradients", f"reach {len(parameters) - len(unused):,} of {len(parameters):,} parameters")
        return unused

    def note(self, name: str, finding: str, off: float | None = None, limit: float | None = None) -> None:
        shape = self.study.shape
        self.study.checks.append(Check(name, finding + (f", {shape}" if shape.frames > 1 else ""), off, limit))

    @property
    def axes(self) -> tuple[int, ...]:
        return self.found.layout.axes_for(self.study.shape)

    def text(self, number: int) -> list[Any]:
        text = self.found.text
        return text.leaves(text.record(self.study.encoded[number], self.study.name), 0)

    @property
    def device(self) -> torch.device:
        return self.study.hooked.device

    def denoise(self, given: Mapping[str, object]) -> Any:
        return self.study.module(**given)

    def loop(self, run: PipelineRun, output_type: str) -> tuple[Any, ...]:
        run.text = self.study.encoded[0]
        arguments = {**self.found.arguments, "output_type": output_type, "num_inference_steps": STEPS}
        # Ancestral schedulers draw while they step.
        arguments["generator"] = torch.Generator().manual_seed(5)
        with torch.no_grad():
            output = self.study.hooked.run(run, ["x"], self.study.shape, **arguments)
        if output is None or len(run.calls) < 2:
            raise self.study.refused(f"its loop of {STEPS} steps calls its denoiser {len(run.calls)} times")
        return output

    def _predictor(self, found: Findings) -> Predictor:
        return Predictor(self.study.hooked, found)


def moving_ramp(shape: Shape) -> Tensor:
    """Pixels in -1..1, (1, 3, H, W) or for a clip (1, 3, F, H, W), with colours that move to the right."""
    frames = [
        torch.linspace(-1, 1, shape.width).roll(shape.width * each // shape.frames) for each in range(shape.frames)
    ]
    ramp = torch.stack(frames)[:, None].expand(-1, shape.height, -1).reshape(shape.axes)
    return torch.stack([ramp, -ramp, 0.5 * ramp])[None]


def distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    return float((one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1e-12))


def differing(one: Mapping[str, object], other: Mapping[str, object]) -> str:
    """Return the names of a denoiser's inputs that differ."""
    first, second = tensors_of(one), tensors_of(other)
    return ", ".join(
        name
        for name, each in first.items()
        if name not in second or second[name].shape != each.shape or not torch.allclose(each, second[name], atol=1e-4)
    )
