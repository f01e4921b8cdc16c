"""A VAE or text encoders, loaded when they are first used and freed when training begins, or kept for use
during training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

from simpletuner.parallel.gpu import return_memory

Model = TypeVar("Model")


class Encoder(Generic[Model]):
    """Model returned by `load`, used by one thread at a time and shared by several datasets' caches."""

    def __init__(self, load: Callable[[], Model], device: torch.device, beside_training: bool = False) -> None:
        self.load, self.device, self.beside_training = load, device, beside_training
        # On the trainer's stream, copying latents to the host would wait for the whole queued step.
        self.stream = torch.cuda.Stream(device) if beside_training and device.type == "cuda" else None
        self._model: Model | None = None
        self._lock = threading.Lock()

    @contextmanager
    def use(self) -> Iterator[Model]:
        with self._lock, torch.cuda.stream(self.stream):
            if self._model is None:
                self._model = self.load()
            yield self._model

    def load_early(self) -> None:
        # Running out of memory fails before the engine is built.
        with self.use():
            pass

    def free(self) -> None:
        """Give back its memory, which training needs, unless it is used during training."""
        if not self.beside_training:
            self._model = None
            return_memory(self.device)
