"""Train pipelines without a class by model_family=auto, and sample them by their own loops: do samples follow captions?

    python tests/campaigns/learning.py [PIPELINE...] [--steps=300]

Each pipeline learns the latents of two captions. Afterwards a sample of a caption must be nearer to that caption's
latents than to the other's, by `RATIO`.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]

from foreign import build_foreign  # noqa: E402

from simpletuner.data.prefetch import stack_conditioning  # noqa: E402
from simpletuner.models.automatic.family import SMALLEST, AutomaticFamily  # noqa: E402
from simpletuner.models.family.objectives import sample_losses  # noqa: E402
from simpletuner.models.family.sampling import SamplingParams  # noqa: E402
from simpletuner.models.folder.diffusers_io import silence_libraries  # noqa: E402
from simpletuner.settings.declared.sections import Data, Model, ObjectiveSettings, Settings, Training  # noqa: E402

PIPELINES = ("HunyuanVideoPipeline", "BriaPipeline", "OvisImagePipeline")
CAPTIONS = ("a red circle", "two large blue squares on a bright background")
RATIO = 2.0
"""How much nearer a sample must be to its own caption's latents, in squared distance."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Learned:
    """Mean losses of the first and last tenth of the steps, and squared distances of samples to known latents."""

    first_loss: float
    last_loss: float
    before: float
    own: float
    other: float
    proof_seconds: float
    """CPU seconds of study and proof."""

    @property
    def follows_captions(self) -> bool:
        return RATIO * self.own < self.other


def learn(name: str, folder: Path, steps: int, learning_rate: float = 2e-3) -> Learned:
    """Train one tiny pipeline on two captions, and sample both before and after."""
    family = opened(build_foreign(name, folder))
    began = time.process_time()
    family.prove([SMALLEST], CPU)
    proof_seconds = time.process_time() - began
    denoiser = load_denoiser(family)
    encoded = family.text_encoder(CPU, torch.float32).encode([*CAPTIONS, ""])
    *texts, empty = ({key: value[row] for key, value in encoded.items()} for row in range(len(CAPTIONS) + 1))
    shape = family.input_shapes(SMALLEST)["latents"]
    clean = torch.randn(len(CAPTIONS), *shape, generator=torch.Generator().manual_seed(0))
    vae = family.vae(CPU)

    def distances() -> Tensor:
        """Return squared distances of a sample of each caption (rows) to each caption's latents (columns)."""
        denoiser.eval()
        sampling = SamplingParams(SMALLEST, 10, 1.0, seed=3)
        samples = [
            family.sample(denoiser, vae, sampling, stack_conditioning([text]), stack_conditioning([empty]))
            for text in texts
        ]
        return torch.stack([(sample.view(1, *shape) - clean).square().flatten(1).mean(1) for sample in samples])

    before = distances()
    losses = train(
        family, denoiser, clean.repeat(2, *[1] * len(shape)), stack_conditioning(texts * 2), steps, learning_rate
    )
    after = distances()
    tenth = max(1, steps // 10)
    return Learned(
        sum(losses[:tenth]) / tenth,
        sum(losses[-tenth:]) / tenth,
        float(before.diag().mean()),
        float(after.diag().mean()),
        float(after.flip(1).diag().mean()),
        proof_seconds,
    )


def opened(folder: Path) -> AutomaticFamily:
    settings = Settings(
        model=Model(model_family="auto", pretrained_model_name_or_path=str(folder)),
        data=Data(tokenizer_max_length=16),  # a sixteenth of the tokens, which cost most
        objective=ObjectiveSettings(flow_schedule_shift=1.5),
        training=Training(mixed_precision="no"),
    )
    return AutomaticFamily(folder, settings)


def load_denoiser(family: AutomaticFamily) -> nn.Module:
    import diffusers

    cls = getattr(diffusers, family.config["_class_name"])
    return cls.from_pretrained(family.folder / family.denoiser_name, dtype=torch.float32)


def train(
    family: AutomaticFamily,
    denoiser: nn.Module,
    clean: Tensor,
    text: dict[str, Tensor],
    steps: int,
    learning_rate: float,
) -> list[float]:
    """Train all weights on one batch with new noise and noise levels at each step; return the losses."""
    generator, objective = torch.Generator().manual_seed(1), family.objective()
    optimizer = torch.optim.AdamW(denoiser.parameters(), lr=learning_rate)
    losses: list[float] = []
    denoiser.train()
    for _ in range(steps):
        noise = torch.randn(clean.shape, generator=generator)
        noised = objective.add_noise(clean, noise, torch.rand(len(clean), generator=generator))
        prediction = family.predict(denoiser, noised.x_t, noised.timesteps, text)
        loss = sample_losses(prediction, noised.target, noised.weights).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(denoiser.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipelines", nargs="*", default=PIPELINES)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    silence_libraries()
    print(f"{'pipeline':<24}{'loss':>16}{'before':>8}{'own':>8}{'other':>8}{'proof':>9}{'CPU':>8}")
    failed = 0
    for name in given.pipelines:
        began = time.process_time()
        with TemporaryDirectory() as folder:
            found = learn(name, Path(folder) / "base", given.steps)
        failed += not found.follows_captions
        print(
            f"{name:<24}{found.first_loss:>8.3f}{found.last_loss:>8.3f}{found.before:>8.2f}{found.own:>8.3f}"
            f"{found.other:>8.3f}{found.proof_seconds:>7.1f} s{time.process_time() - began:>6.0f} s"
            f"{'' if found.follows_captions else '  samples do not follow captions'}",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
