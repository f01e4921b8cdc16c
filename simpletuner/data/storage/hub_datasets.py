"""Datasets of the Hugging Face hub by name: the files of one commit, fetched once into the hub's own cache.

Two forms are read: Parquet files with the images or videos in them, and files beside a `metadata` table (an
"imagefolder" or "videofolder").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from simpletuner.data.config.dataset_parts import PARQUET, TableSettings
from simpletuner.data.config.dataset_types import ImageDataset, LocalImages, SnapshotImages, belongs_to_split
from simpletuner.data.images.image_formats import BY_PILLOW, BY_PLUGIN, VIDEO_SUFFIXES
from simpletuner.errors import DataError, EnvironmentNotReady
from simpletuner.system.processes.threads import run_bounded

# As many as huggingface_hub's snapshot_download takes.
THREADS = 8
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
# Name in the table of an imagefolder: https://huggingface.co/docs/datasets/image_dataset#imagefolder.
FILENAME_COLUMN = "file_name"
PARQUET_BRANCH = "refs/convert/parquet"
"""The branch on which the hub keeps Parquet files of datasets in other forms."""


@dataclass(frozen=True)
class HubFiles:
    """Files that are read of a dataset: at a commit, by their names there; plain values, kept as JSON."""

    dataset_name: str
    revision: str | None
    split: str
    commit: str
    files: list[str]
    noun: str = "image"
    """Kind of the files, `image` or `video`; missing in records of earlier versions."""

    def is_of(self, dataset: SnapshotImages) -> bool:
        asked = (str(dataset.dataset_name), dataset.revision, dataset.split, dataset.noun)
        return (self.dataset_name, self.revision, self.split, self.noun) == asked


def find_files(dataset: SnapshotImages) -> HubFiles:
    """Look up a dataset's commit and files. Raises EnvironmentNotReady, and DataError without images."""
    from huggingface_hub import HfApi

    name = str(dataset.dataset_name)
    with explain_hub_errors(dataset):
        info = HfApi().dataset_info(name, revision=dataset.revision)
    names = [each.rfilename for each in info.siblings or ()]
    files = files_of_split(names, dataset.split, VIDEO_SUFFIXES if dataset.clips else BY_PILLOW | BY_PLUGIN)
    if not files or not info.sha:
        kinds = Counter(PurePosixPath(each).suffix or each for each in names).most_common(5)
        held = f"it holds {', '.join(f'{count} {kind}' for kind, count in kinds)}" if kinds else "it is empty"
        raise DataError(
            f"dataset `{dataset.id}`: {name} has no Parquet files and no {dataset.noun}s of the split "
            f"`{dataset.split}`: {held}",
            f"set split to what its files or folders are named by, or revision to {PARQUET_BRANCH}, where the hub may "
            "have it as Parquet files",
        )
    return HubFiles(name, dataset.revision, dataset.split, info.sha, files, dataset.noun)


def files_of_split(names: Sequence[str], split: str, suffixes: Collection[str]) -> list[str]:
    """Return the Parquet files of a split, or else its files with these suffixes and their table."""
    if parquet := [name for name in names if is_parquet(name) and belongs_to_split(PurePosixPath(name), split)]:
        return parquet
    files = [name for name in names if PurePosixPath(name).suffix.lower() in suffixes or is_metadata(name)]
    of_split = [name for name in files if split in PurePosixPath(name).parts[:-1]]
    chosen = of_split or files  # a dataset of one split may have no folder for it
    return chosen if any(not is_metadata(name) for name in chosen) else []


def is_metadata(name: str) -> bool:
    return PurePosixPath(name).name in METADATA


def is_parquet(name: str) -> bool:
    return name.endswith(".parquet") and not is_metadata(name)


def fetch_files(
    dataset: SnapshotImages, found: HubFiles, stop: Callable[[], None], show: Callable[[int], object]
) -> None:
    """Fetch the files that this machine does not have. Raises EnvironmentNotReady."""
    from huggingface_hub import hf_hub_download

    def fetch(file: str) -> str:
        return hf_hub_download(found.dataset_name, file, repo_type="dataset", revision=found.commit)

    with explain_hub_errors(dataset):
        for done, (_, future) in enumerate(run_bounded(fetch, found.files, THREADS, stop), start=1):
            future.result()
            show(done)


@contextmanager
def explain_hub_errors(dataset: SnapshotImages) -> Iterator[None]:
    # HTTPError is that of the hub's HTTP client, of whose errors it wraps only some.
    from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except (HTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        name, at = dataset.dataset_name, f" at {dataset.revision}" if dataset.revision else ""
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        command = f"hf download {name} --repo-type dataset{f' --revision {dataset.revision}' if at else ''}"
        raise EnvironmentNotReady(
            f"dataset `{dataset.id}`: no folder is named {name}, and the hub's {name}{at} cannot be fetched: {reason}",
            f"private ones need HF_TOKEN; elsewhere fetched by `{command} --local-dir FOLDER`, dataset_name is FOLDER",
        ) from None


def as_fetched(dataset: SnapshotImages, found: HubFiles) -> ImageDataset:
    """Return the dataset of the files that were fetched. Raises DataError for images without their table."""
    from huggingface_hub import snapshot_download

    folder = Path(
        snapshot_download(found.dataset_name, repo_type="dataset", revision=found.commit, local_files_only=True)
    )
    if any(map(is_parquet, found.files)):
        return dataset.model_copy(update={"dataset_name": folder})
    return as_image_folder(dataset, found, folder)


def as_image_folder(dataset: SnapshotImages, found: HubFiles, folder: Path) -> LocalImages:
    """Images or videos with captions in `metadata`, which has paths relative to its folder."""
    tables = sorted(filter(is_metadata, found.files))
    shared = (LocalImages.model_fields.keys() & SnapshotImages.model_fields) - {"type", "parquet", "caption_strategy"}
    values = {name: getattr(dataset, name) for name in shared}  # validated already
    if dataset.caption_strategy == "instanceprompt":
        top = PurePosixPath(tables[0]).parent if len(tables) == 1 else PurePosixPath()
        return LocalImages.model_construct(**values, caption_strategy="instanceprompt", instance_data_dir=folder / top)
    if len(tables) != 1:
        raise DataError(
            f"dataset `{dataset.id}`: {found.dataset_name} has {len(tables)} tables ({' or '.join(METADATA)}) of its "
            f"{dataset.noun}s in the split `{dataset.split}`, where captions would be",
            "set split to the folder of one, or caption_strategy to instanceprompt",
        )
    table = TableSettings(
        path=folder / tables[0],
        filename_column=FILENAME_COLUMN,
        caption_column=[dataset.caption_column or ""],
        identifier_includes_extension=True,
    )
    own = {"caption_strategy": PARQUET, "metadata_backend": PARQUET, "parquet": table}
    return LocalImages.model_construct(**{**values, **own}, instance_data_dir=(folder / tables[0]).parent)
