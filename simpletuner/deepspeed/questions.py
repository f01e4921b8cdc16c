"""Questions of the DeepSpeed builder, in a terminal and on the page: settings, the most important first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simpletuner.settings.declared.sections import Parallel


@dataclass(frozen=True)
class Question:
    """A setting to ask for, the text of the question, and when it applies."""

    setting: str
    text: str
    default: str = ""
    applies: Callable[[Parallel], bool] = lambda parallel: True


QUESTIONS = (
    Question("num_processes", "How many GPUs in all?"),
    Question("zero_stage", "Partition optimizer state (1), gradients too (2), weights too (3)?", default="2"),
    Question("offload_optimizer", "Where is optimizer state kept? none: on the GPU"),
    Question(
        "offload_param",
        "Where are weights kept between uses? none: on the GPU",
        applies=lambda parallel: parallel.zero_stage == 3,
    ),
    Question("optimizer", "Which optimizer?"),
    Question("lr_scheduler", "Which learning rate schedule after the warm-up?"),
    Question("lr_warmup_steps", "How many warm-up steps?"),
    Question("gradient_accumulation_steps", "How many forward passes per optimizer step?"),
    Question("max_grad_norm", "Clip gradients to which norm? 0: never"),
    Question("mixed_precision", "Compute in bf16, or (no) in float32?"),
)
OFFLOAD_FOLDER = Question("offload_param_path", "In which folder? On a fast disk of each machine")
