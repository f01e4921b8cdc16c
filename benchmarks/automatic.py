"""What model_family=auto costs: a prediction and its gradients beside the class's, on tiny models, and the proof.

    python benchmarks/automatic.py [FAMILY...]

What `auto` adds is Python of the pipeline's own call, the same milliseconds for a model of any size; a pipeline whose
samples cannot share a call (qwen_image) is called once for each.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from interleaved import print_table, ratio, seconds_in_turns
from torch import Tensor, nn

from simpletuner.data.images.geometry import Geometry
from simpletuner.data.prefetch import stack_conditioning
from simpletuner.models.automatic.family import SMALLEST, AutomaticFamily
from simpletuner.models.catalog.registry import TINY
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.models.folder.diffusers_io import libraries_silenced
from simpletuner.models.tiny.build import build_tiny
from simpletuner.settings.declared.sections import Model, Settings, Training

FAMILIES, BATCH_SIZES, ROUNDS = ("flux", "sdxl", "sd3", "qwen_image"), (1, 4), 30
CPU = torch.device("cpu")


def opened(name: str, folder: Path) -> ModelFamily:
    model = Model(model_family=name, pretrained_model_name_or_path=str(folder))
    settings = Settings(model=model, training=Training(mixed_precision="no"))
    return family_class(model).open(folder, settings)


def encoded(family: ModelFamily) -> Conditioning:
    """Return the conditioning of one caption and an image that is not cropped, without a batch axis."""
    text = family.text_encoder(CPU, torch.float32).encode(["a red circle"])
    size = family.size_conditioning(Geometry(SMALLEST, SMALLEST, (0, 0), SMALLEST))
    return {name: value[0] for name, value in text.items()} | size


def load_denoiser(family: ModelFamily) -> nn.Module:
    import diffusers

    cls = getattr(diffusers, family.config["_class_name"])
    return cls.from_pretrained(family.folder / family.denoiser_name, dtype=torch.float32)


@dataclass(frozen=True)
class Step:
    """A prediction for a batch, and its gradients."""

    family: ModelFamily
    denoiser: nn.Module
    noised: Tensor
    times: Tensor
    text: Conditioning

    @classmethod
    def of(cls, family: ModelFamily, denoiser: nn.Module, text: Conditioning, count: int) -> Step:
        noised = torch.ones(count, *family.input_shapes(SMALLEST)["latents"])
        is_flow = "Flow" in type(family.objective()).__name__
        times = torch.full((count,), 0.5) if is_flow else torch.full((count,), 500)
        return cls(family, denoiser, noised, times, stack_conditioning([text] * count))

    def __call__(self) -> None:
        self.family.predict(self.denoiser, self.noised, self.times, self.text).square().mean().backward()


def main() -> None:
    torch.set_num_threads(1)
    rows: list[tuple[str, ...]] = []
    for name in sys.argv[1:] or FAMILIES:
        with TemporaryDirectory() as place, libraries_silenced():
            folder = Path(place) / "base"
            build_tiny(Model(model_family=name, model_flavour=TINY), folder)
            by_class, auto = opened(name, folder), opened("auto", folder)
            assert isinstance(auto, AutomaticFamily)
            began = time.process_time()
            auto.prove([SMALLEST], CPU)
            proof = time.process_time() - began
            denoiser = load_denoiser(by_class)
            texts = {"class": encoded(by_class), "auto": encoded(auto)}
            for count in BATCH_SIZES:
                steps = {
                    "class": Step.of(by_class, denoiser, texts["class"], count),
                    "auto": Step.of(auto, denoiser, texts["auto"], count),
                }
                seconds = seconds_in_turns(steps, ROUNDS, clock=time.process_time)
                ours, theirs = (1000 * statistics.median(seconds[each]) for each in ("class", "auto"))
                added = 1000 * statistics.median(b - a for a, b in zip(seconds["class"], seconds["auto"], strict=True))
                one_by_one = "one by one" if auto.found.unbatched and count > 1 else ""
                cells = (f"{ours:.1f}", f"{theirs:.1f}", f"{ratio(seconds, 'auto', 'class'):.2f}", f"{added:.1f}")
                rows.append((name, str(count), *cells, f"{proof:.1f}", one_by_one))
    columns = ("family", "batch", "class, ms", "auto, ms", "ratio", "added, ms", "proof, s", "")
    print_table("A prediction and its gradients, tiny models at 64 px, one thread, CPU time", columns, rows)


if __name__ == "__main__":
    main()
