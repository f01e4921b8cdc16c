"""The reference images of a dataset's samples as samples of their own, which are cached like others."""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.samples.samples import DatasetSamples, Sample
from simpletuner.data.storage.storage import Storage


class References(Sequence[Sample]):
    """The references of samples in one of their dataset's datasets of references, in the order of the samples."""

    def __init__(self, samples: DatasetSamples, number: int) -> None:
        self.samples, self.number, self.files = samples, number, samples.references[number]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.samples[index].references[self.number]

    @property
    def dataset(self) -> ImageDataset:
        return self.files.dataset

    @property
    def storage(self) -> Storage:
        return self.files.scan.storage

    def checksum(self, *columns: str) -> str:
        """Return a checksum of all that the references and their geometry are made of."""
        return self.samples.checksum(*columns)

    def samples_of(self, broken: Mapping[str, str]) -> dict[str, str]:
        """Return the ids of samples whose reference is broken, and why; `broken` has the reasons by its id."""
        if not broken:
            return {}
        own = {name.removeprefix(f"{self.dataset.id}/"): why for name, why in broken.items()}
        is_broken = pc.is_in(self.files.scan.table["name"], value_set=pa.array(own, pa.large_string())).to_numpy()
        found = np.flatnonzero(is_broken[self.files.rows[self.samples.rows]]).tolist()
        pairs = [(self.samples[index], self.files.file(int(self.samples.rows[index]))[0]) for index in found]
        return {sample.id: f"its reference {name}: {own[name]}" for sample, name in pairs}


def references_of(samples: DatasetSamples) -> list[References]:
    return [References(samples, number) for number in range(len(samples.references))]
