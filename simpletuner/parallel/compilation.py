"""torch.compile in place (`module.compile`): parameter names do not change, as they would in a wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from simpletuner.errors import TrainingError
from simpletuner.parallel.fsdp2 import units_by_class
from simpletuner.private_api import of_torch
from simpletuner.settings.declared.sections import Compile

RECOMPILE_LIMIT = 1024
"""Variants of one block's code before torch gives up: one per image size, block shape, and one for inference."""

LINES_OF_A_REASON, LETTERS_OF_A_REASON = 2, 300


def compile_in_place(model: nn.Module, blocks: tuple[str, ...], settings: Compile) -> None:
    """Compile the blocks, or the whole denoiser, at their first call; equal blocks share one compilation."""
    # torch's default of 8 is soon reached where blocks of many widths share one `forward`; then it silently runs eager.
    of_torch.set_recompile_limit(RECOMPILE_LIMIT)
    # Block by block: equal blocks share one compilation (57 blocks of FLUX are 2), and FSDP2 gathers between
    # them.
    for module in units_by_class(model, blocks) if settings.dynamo_use_regional_compilation else [model]:
        module.compile(
            backend=settings.dynamo_backend,
            mode=settings.dynamo_mode,
            fullgraph=settings.dynamo_fullgraph,
            dynamic=settings.dynamo_dynamic,
        )


@contextmanager
def compiler_explained() -> Iterator[None]:
    """Turn what the compiler raises, at a first call or a recompilation, into a TrainingError."""
    try:
        yield
    except of_torch.compiler_errors() as error:
        hint = "set dynamo_backend=no to train without the compiler; `--debug` shows all that it says"
        raise TrainingError(f"torch.compile failed: {reason(error)}", hint) from error


def reason(error: Exception) -> str:
    """Return the first lines of the compiler's report, which may have hundreds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:LINES_OF_A_REASON])[:LETTERS_OF_A_REASON] or type(error).__name__


def described(settings: Compile) -> str:
    """Describe in a few words how the denoiser is compiled."""
    mode = f" ({settings.dynamo_mode})" if settings.dynamo_mode != "default" else ""
    extent = "block by block" if settings.dynamo_use_regional_compilation else "as a whole"
    shapes = "once for all sizes" if settings.dynamo_dynamic else "once per size"
    return f"{settings.dynamo_backend}{mode}, {extent}, {shapes}{', full graphs' * settings.dynamo_fullgraph}"
