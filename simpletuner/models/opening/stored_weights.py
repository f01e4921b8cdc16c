"""A model's weights in its folder's files, read one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.malformed import translate_load_errors
from simpletuner.models.folder.safetensors_dtypes import DTYPES
from simpletuner.models.folder.weights import any_weights_files, weights_files


def denoiser_weights(family: ModelFamily) -> StoredTensors:
    return StoredTensors(weights_files(family.folder / family.denoiser_name, family.settings.model.variant))


def encoder_weights(family: ModelFamily, component: str) -> StoredTensors:
    return StoredTensors(any_weights_files(family.folder / component))


class StoredTensors:
    """Tensors of safetensors files, one file or the parts of a model: headers at once, data by name."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Raises EnvironmentNotReady for a damaged file, SettingsError for weights of another precision."""
        self.place: dict[str, tuple[Path, Any]] = {}
        self.shapes: dict[str, Tensor] = {}
        for path in files:
            with translate_load_errors(path):
                opened = safe_open(path, framework="pt")
                for name in opened.keys():  # noqa: SIM118  an opened file is no dict
                    part = opened.get_slice(name)
                    kind = part.get_dtype()
                    if kind not in DTYPES:
                        raise SettingsError(
                            f"{path} holds {name} in {kind}, which was rounded for inference",
                            "take the model in bf16, fp16 or fp32",
                        )
                    self.place[name] = path, opened
                    self.shapes[name] = torch.empty(part.get_shape(), dtype=DTYPES[kind], device="meta")

    def read(self, name: str) -> Tensor:
        """Return one tensor. Raises EnvironmentNotReady where the file ends before its end."""
        path, opened = self.place[name]
        with translate_load_errors(path):
            return opened.get_tensor(name)

    def read_finite(self, name: str) -> Tensor:
        """Return one tensor in float32, or float64. Raises EnvironmentNotReady for NaN and infinity."""
        tensor = in_full(self.read(name))
        if not torch.isfinite(tensor).all():
            raise EnvironmentNotReady(f"{self.place[name][0]} has NaN or infinite values in {name}", "copy it again")
        return tensor


def in_full(tensor: Tensor) -> Tensor:
    # float64 stays, everything else is computed with in float32.
    return tensor if tensor.dtype == torch.float64 else tensor.float()
