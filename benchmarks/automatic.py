"""What model_family=auto costs: a prediction and its gradients beside the class's, on tiny models, and the proof.

    python benchmarks/automatic.py [CASE...]

What `auto` adds are the operators of the pipeline's own call, the same milliseconds for a model of any size; a call
that cannot be traced adds its Python, too. Cases with an image hold its latents.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from interleaved import print_table, ratio, seconds_in_turns
from torch import Tensor, nn

from simpletuner.data.images.geometry import Geometry
from simpletuner.data.prefetch import FIRST_FRAME, PREFIX, stack_conditioning
from simpletuner.models.automatic.family import SMALLEST, AutomaticFamily
from simpletuner.models.catalog.registry import TINY
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.models.folder.diffusers_io import libraries_silenced
from simpletuner.models.tiny.build import build_tiny
from simpletuner.settings.declared.sections import Model, Settings, Training
from simpletuner.settings.values.shape import SampleShape

BATCH_SIZES, ROUNDS, CPU = (1, 4), 30, torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A family's tiny pipeline with other entries in its index, those of `auto` apart, and what a sample is given."""

    family: str
    sample: SampleShape = SampleShape(SMALLEST)
    index: Mapping[str, object] = field(default_factory=dict)
    auto: Mapping[str, object] = field(default_factory=dict)


EDIT, CLIP = SampleShape(SMALLEST, (SMALLEST,)), SampleShape(SMALLEST._replace(frames=5), (), True)
CASES = {name: Case(name) for name in ("flux", "sdxl", "sd3", "qwen_image")} | {
    "kontext": Case("flux", EDIT, {"_class_name": "FluxKontextPipeline"}),
    "flux2 edit": Case("flux2", EDIT),
    "wan i2v": Case("wan", CLIP, {"expand_timesteps": True}, {"_class_name": "WanImageToVideoPipeline"}),
}


def opened(name: str, folder: Path) -> ModelFamily:
    model = Model(model_family=name, pretrained_model_name_or_path=str(folder))
    settings = Settings(model=model, training=Training(mixed_precision="no"))
    return family_class(model).open(folder, settings)


def encoded(family: ModelFamily) -> Conditioning:
    """Return the conditioning of one caption and an image that is not cropped, without a batch axis."""
    text = family.text_encoder(CPU, torch.float32).encode(["a red circle"])
    size = family.size_conditioning(Geometry(SMALLEST, SMALLEST, (0, 0), SMALLEST))
    return {name: value[0] for name, value in text.items()} | size


def with_index(folder: Path, changes: Mapping[str, object]) -> Path:
    """Return a copy of a folder beside it, whose index has other entries; the folder itself for none."""
    if not changes:
        return folder
    copy = shutil.copytree(folder, folder.with_name(f"{folder.name}+"))
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(json.dumps(index | dict(changes)))
    return copy


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
    def of(cls, family: ModelFamily, denoiser: nn.Module, text: Conditioning, count: int, sample: SampleShape) -> Step:
        shapes = family.input_shapes(*sample)
        noised = torch.ones(count, *shapes["latents"])
        text = text | {name: torch.ones(shapes[name]) for name in shapes if name == FIRST_FRAME or PREFIX in name}
        is_flow = "Flow" in type(family.objective()).__name__
        times = torch.full((count,), 0.5) if is_flow else torch.full((count,), 500)
        return cls(family, denoiser, noised, times, stack_conditioning([text] * count))

    def __call__(self) -> None:
        self.family.predict(self.denoiser, self.noised, self.times, self.text).square().mean().backward()


def main() -> None:
    torch.set_num_threads(1)
    rows: list[tuple[str, ...]] = []
    for name in sys.argv[1:] or CASES:
        case = CASES.get(name) or Case(name)
        with TemporaryDirectory() as place, libraries_silenced():
            folder = Path(place) / "base"
            build_tiny(Model(model_family=case.family, model_flavour=TINY), folder)
            folder = with_index(folder, case.index)
            by_class, auto = opened(case.family, folder), opened("auto", with_index(folder, case.auto))
            assert isinstance(auto, AutomaticFamily)
            began = time.process_time()
            auto.prove([case.sample], CPU)
            proof = time.process_time() - began
            denoiser = load_denoiser(by_class)
            texts = {"class": encoded(by_class), "auto": encoded(auto)}
            for count in BATCH_SIZES:
                steps = {
                    "class": Step.of(by_class, denoiser, texts["class"], count, case.sample),
                    "auto": Step.of(auto, denoiser, texts["auto"], count, case.sample),
                }
                seconds = seconds_in_turns(steps, ROUNDS, clock=time.process_time)
                ours, theirs = (1000 * statistics.median(seconds[each]) for each in ("class", "auto"))
                added = 1000 * statistics.median(b - a for a, b in zip(seconds["class"], seconds["auto"], strict=True))
                one_by_one = "one by one" if auto.found.unbatched and not auto.found.joins and count > 1 else ""
                cells = (f"{ours:.1f}", f"{theirs:.1f}", f"{ratio(seconds, 'auto', 'class'):.2f}", f"{added:.1f}")
                rows.append((name, str(count), *cells, f"{proof:.1f}", one_by_one))
    columns = ("case", "batch", "class, ms", "auto, ms", "ratio", "added, ms", "proof, s", "")
    print_table("A prediction and its gradients, tiny models at 64 px, one thread, CPU time", columns, rows)


if __name__ == "__main__":
    main()
