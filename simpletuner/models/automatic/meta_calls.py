"""Calls of a denoiser without memory: a pipeline reads numbers, so its inputs are recorded on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.models.automatic.prediction import Predictor
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.private_api.of_torch import outside_modes, tree_leaves, tree_map_only


@dataclass
class MetaCalls:
    """Inputs that a predictor on the CPU gives to the denoiser, kept by the shapes of batches and texts."""

    predictor: Predictor
    recorded: dict[Any, list[dict[str, Any]]] = field(default_factory=dict)

    def predict(self, model: nn.Module, noised: Tensor, conditioning: Conditioning) -> Tensor:
        """Call a denoiser with tensors of the shapes that a run on the CPU gives it; return all outputs, flat."""
        rows = {name: len(conditioning[name][0]) for name in self.predictor.found.text.names.values()}
        outputs: list[Any] = []
        for given in self.inputs(tuple(noised.shape), rows):
            outputs += tree_leaves(model(**{name: self.without_memory(name, given[name], noised) for name in given}))
        return torch.cat([each.flatten() for each in outputs if isinstance(each, Tensor)])

    def inputs(self, shape: tuple[int, ...], rows: Mapping[str, int]) -> list[dict[str, Any]]:
        """Return all inputs of the denoiser in the calls for a batch, given the rows of its texts."""
        key = (shape, *rows.items())
        if key not in self.recorded:
            seen: list[dict[str, Any]] = []
            found = self.predictor.found

            def record(given: dict[str, Any]) -> Any:
                seen.append(given)
                return self.predictor.blank(given)

            # Whoever counts would count this run, too.
            with outside_modes(), torch.no_grad():
                times = found.schedule.timesteps(*[0.5] * shape[0])
                self.predictor.predict(record, torch.zeros(shape), times, [found.text.ones(rows)] * shape[0])
            self.recorded[key] = seen
        return self.recorded[key]

    def without_memory(self, name: str, value: Any, noised: Tensor) -> Any:
        """Return an input with its floating-point tensors on the device of `noised`, uninitialized if none is read."""
        # Constants have no gradient: CogVideoX writes into what is multiplied by its rotary table.
        fixed = name in self.predictor.found.float32_inputs
        # Sums of masks may be lengths; HunyuanVideo 1.5 reads whether its image embedding is zero.
        is_on_host = noised.device.type in ("cpu", "meta")
        dtype = torch.float32 if fixed else noised.dtype
        has_gradient = not fixed and noised.requires_grad

        def one(each: Tensor) -> Tensor:
            is_read = is_on_host and ("mask" in name or not each.any())
            if is_read or not each.is_floating_point():
                return each
            return torch.empty(each.shape, dtype=dtype, device=noised.device, requires_grad=has_gradient)

        return tree_map_only(Tensor, one, value)
