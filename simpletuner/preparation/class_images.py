"""Class images of a dataset: names, prompts and seeds of what the base model makes, before it is made.

An image's name has a hash of its prompt and of how it is sampled, so what has changed is made by another
name, and the rest is found again. Samples are known without the files: plans and checks need none.
"""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import pyarrow as pa

from simpletuner.caches.store.records import short_hash
from simpletuner.data.config.dataset_parts import has_trigger_word, with_class_words
from simpletuner.data.config.dataset_types import ImageDataset, LocalImages
from simpletuner.data.samples.samples import DatasetSamples, Samples
from simpletuner.data.scan.captions import captions_of
from simpletuner.data.scan.file_list import CAPTION_VERSION, OtherFiles
from simpletuner.data.scan.scan import SCANNED, Scan
from simpletuner.data.storage.storage import LocalStorage, stored_file
from simpletuner.errors import DataError, SettingsError
from simpletuner.models.catalog.support import unfit_shapes
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.parallel.world import World
from simpletuner.preparation.plan import Plan
from simpletuner.settings import Settings
from simpletuner.settings.values.shape import Shape
from simpletuner.system.numbers import count_noun


@dataclass(frozen=True)
class ClassSampling:
    """Sampling parameters of all images of a dataset; image `number` has the seed `seed + number`."""

    shape: Shape
    steps: int
    guidance: float
    negative_prompt: str
    seed: int

    @classmethod
    def of(cls, settings: Settings, dataset: ImageDataset) -> ClassSampling:
        """Raises SettingsError for a size that the model cannot sample."""
        validation, size = settings.validation, {"resolution": dataset.resolution}
        shape = settings.data.model_copy(update={**size, "resolution_type": dataset.resolution_type}).square
        if mistakes := [*unfit_shapes(f"dataset `{dataset.id}`: resolution", str(shape), "resolution", settings.model)]:
            raise SettingsError(mistakes=mistakes)
        guidance = validation.validation_guidance if dataset.prior_guidance is None else dataset.prior_guidance
        return cls(
            shape,
            dataset.prior_num_inference_steps or validation.validation_num_inference_steps,
            float(guidance),
            validation.validation_negative_prompt,
            settings.training.seed if dataset.prior_seed is None else dataset.prior_seed,
        )

    def params(self, number: int) -> SamplingParams:
        return SamplingParams(self.shape, self.steps, self.guidance, self.seed + number)

    def file_name(self, number: int, prompt: str) -> str:
        made_by = [prompt, self.negative_prompt, self.seed, self.steps, self.guidance, *self.shape.size]
        return f"{number:06d}-{short_hash(made_by)[:12]}.png"

    def __str__(self) -> str:
        passes = f"{self.steps} steps, guidance {self.guidance:g}"
        return f"{self.shape.width}x{self.shape.height} px, seed {self.seed}, {passes}"


def scan_of_class_images(settings: Settings, dataset: ImageDataset, scans: Mapping[str, Scan]) -> Scan:
    """Return what a scan of the images would find, once they are made. `scans` are other datasets', by id.

    Raises DataError where no caption has a trigger word.
    """
    assert isinstance(dataset, LocalImages)
    assert dataset.prior_images is not None
    prompts, sampling = prompts_of(dataset, scans), ClassSampling.of(settings, dataset)
    width, height = sampling.shape.size
    rows = [
        {
            "name": sampling.file_name(number, prompt),
            "size_bytes": 0,
            "version": "",
            "problem": "",
            CAPTION_VERSION: "",
            "width": width,
            "height": height,
            "frames": 1,
            "fps": 0.0,
            "animated": False,
            "captions": [prompt],
            "caption_problem": "",
            "caption_form": "",
        }
        for number in range(dataset.prior_images)
        for prompt in [prompts[number % len(prompts)]]
    ]
    table = pa.Table.from_pylist(rows, SCANNED)
    return Scan(dataset, LocalStorage(dataset.instance_data_dir), table, OtherFiles())


def verify_same_images(scans: Sequence[Scan], world: World) -> None:
    """Collective: raise SettingsError where ranks would make other images: their dataset files differ."""
    own = [[scan.dataset.id, scan.table["name"].to_pylist()] for scan in scans]
    digests = world.gather_texts(short_hash(own))
    if len({*digests}) > 1:
        other = next(rank for rank, each in enumerate(digests) if each != digests[0])
        raise SettingsError(
            f"rank {other} would make other class images than rank 0", "give every machine the same dataset file"
        )


def prompts_of(dataset: ImageDataset, scans: Mapping[str, Scan]) -> list[str]:
    """Return the prompts of a dataset, each once, in the order of the file or of the images' names."""
    if dataset.prior_captions_of is None:
        return [*dict.fromkeys(dataset.prior_prompt)]
    captions = [*dict.fromkeys(captions_in(scans[dataset.prior_captions_of]))]
    words = dataset.class_words
    if captions and not has_trigger_word(captions, words):
        raise DataError(
            f"dataset `{dataset.id}`: none of {count_noun(len(captions), 'caption')} of `{dataset.prior_captions_of}` "
            f"has {' or '.join(map(repr, words))}, such as {captions[0][:80]!r}",
            "class_words names the trigger words as they are in the captions",
        )
    replaced = (with_class_words(each, words) for each in captions)
    # Where the other dataset has no caption at all, that is what ends the run, not this.
    return [*dict.fromkeys(filter(None, replaced))] or [*words.values()]


def captions_in(scan: Scan) -> Iterable[str]:
    columns = [scan.table[name].to_pylist() for name in ("name", "captions", "problem", "caption_problem")]
    for name, lines, *problems in zip(*columns, strict=True):
        if not any(problems):
            yield from captions_of(scan.dataset, name, lines)


@dataclass(frozen=True)
class ClassImages:
    """The class images of one dataset: names and prompts of those that are trained on or held out."""

    dataset: ImageDataset
    folder: Path
    prompts: Mapping[str, str]
    """Prompts by file name."""
    sampling: ClassSampling

    @classmethod
    def of(cls, settings: Settings, part: DatasetSamples) -> ClassImages:
        assert isinstance(part.storage, LocalStorage)
        rows = part.table.select(["name", "captions"]).take(pa.array(part.rows))
        captions = (lines[0] for lines in rows["captions"].to_pylist())
        prompts = dict(zip(rows["name"].to_pylist(), captions, strict=True))
        return cls(part.dataset, part.storage.folder, prompts, ClassSampling.of(settings, part.dataset))

    @property
    def missing(self) -> int:
        # Files are not opened.
        return sum(not (self.folder / name).is_file() for name in self.prompts)

    @property
    def sample_equivalents(self) -> float:
        """Number of trained samples whose work is that of sampling the missing ones.

        A trained sample is a forward and a backward pass of twice its work; guidance doubles the calls.
        """
        passes = self.sampling.steps * (2 if self.sampling.guidance > 1 else 1)
        return self.missing * passes / 3

    def seconds(self, sample_seconds: float, sample_px: float, ranks: int) -> float:
        """Estimate how long sampling takes, by the seconds in which a rank trains a sample of some pixels."""
        return self.sample_equivalents * sample_seconds * self.sampling.shape.area / sample_px / ranks

    def describe(self) -> str:
        """Return what is made, from what, and where."""
        prompts = [*dict.fromkeys(self.prompts.values())]
        shown = ", ".join(map(repr, islice(prompts, 2)))
        more = f" and {len(prompts) - 2} more prompts" if len(prompts) > 2 else ""
        count = count_noun(len(self.prompts), "image")
        return f"{count} by the base model of {shown}{more}, {self.sampling}, in {self.folder}"

    def describe_missing(self) -> str:
        """Return how many images a run would make, and how much work that is."""
        if not (missing := self.missing):
            return "all are there, and are made again where the base model is another"
        work = f"as much work as training on about {self.sample_equivalents:,.0f} samples of this size"
        return f"a run makes {missing:,} of them first, {work}"


def with_versions(part: DatasetSamples, versions: Mapping[str, str]) -> DatasetSamples:
    """Return the samples with the versions that their files have, by path, once these are made."""
    assert isinstance(part.storage, LocalStorage)
    place, folder = part.table.schema.get_field_index("version"), part.storage.folder
    found = [versions.get(f"{folder}/{name}", "") for name in part.table["name"].to_pylist()]
    table = part.table.set_column(place, "version", pa.chunked_array([pa.array(found, pa.large_string())]))
    return DatasetSamples(part.dataset, part.storage, table, part.rows, part.sizes, part.seed, part.conditioning)


def with_file_versions(plan: Plan) -> Plan:
    parts = [
        with_versions(part, {str(path): stored_file(path.name, path.stat).version for path in paths_of(part)})
        if part.dataset.prior_images
        else part
        for part in plan.samples.parts
    ]
    return replace(plan, samples=Samples(parts))


def paths_of(part: DatasetSamples) -> Iterator[Path]:
    assert isinstance(part.storage, LocalStorage)
    return (part.storage.folder / name for name in part.table["name"].to_pylist())


def class_images_of(settings: Settings, parts: Iterable[DatasetSamples]) -> list[ClassImages]:
    return [ClassImages.of(settings, part) for part in parts if part.dataset.prior_images]
