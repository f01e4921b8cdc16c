"""Questions of `simpletuner deepspeed build` in a terminal, and what each answer makes of the configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from simpletuner.commands.deepspeed_builder import Builder, estimate_for
from simpletuner.deepspeed.choice import candidates
from simpletuner.errors import SettingsError
from simpletuner.report import Report
from simpletuner.settings.knob import shown_default
from simpletuner.settings.sections import Parallel, setting_fields
from simpletuner.settings.spelling import choices_of
from simpletuner.system.numbers import format_gib

DEFAULT_OUTPUT = Path("config/deepspeed.json")


def always(parallel: Parallel) -> bool:
    return True


def shards_weights(parallel: Parallel) -> bool:
    return parallel.zero_stage == 3


@dataclass(frozen=True)
class Question:
    """One setting to ask for: the question, and for which settings it is asked."""

    setting: str
    text: str
    when: Callable[[Parallel], bool] = always
    default: str = ""


QUESTIONS = (
    Question("num_processes", "How many GPUs in all?"),
    Question("zero_stage", "Shard optimizer state (1), gradients too (2), weights too (3)?", default="2"),
    Question("offload_optimizer", "Where is optimizer state kept? none: on the GPU"),
    Question("offload_param", "Where are weights kept between uses? none: on the GPU", shards_weights),
    Question("optimizer", "Which optimizer?"),
    Question("lr_scheduler", "How does the learning rate change after the warm-up?"),
    Question("lr_warmup_steps", "Over how many steps does it warm up?"),
    Question("gradient_accumulation_steps", "How many forward passes per optimizer step?"),
    Question("max_grad_norm", "Scale gradients down to which norm? 0: never"),
    Question("mixed_precision", "Compute in bf16, or (no) in float32?"),
)
FOLDER = Question("offload_param_path", "In which folder? On a fast disk of each machine")


@dataclass
class Wizard:
    """Asks for each setting that is not chosen yet."""

    report: Report
    builder: Builder

    def run(self) -> None:
        """Ask all questions, and show what has been built so far."""
        for question in QUESTIONS:
            loaded = self.builder.load()
            # A setting that any source gives is not asked for again.
            if question.setting in loaded.origins or not question.when(loaded.settings.parallel):
                continue
            if question.setting == "zero_stage":
                self.compare()
            self.ask_until_valid(question)
            if loaded.settings.parallel.zero_stage or question.setting == "zero_stage":
                self.show()

    def file(self, force: bool) -> Path:
        """Ask where to write, until the file does not exist or may be overwritten."""
        while True:
            path = Path(self.report.ask("Write to", default=str(DEFAULT_OUTPUT)))
            if force or not path.is_file() or self.report.confirm(f"{path} exists already: overwrite it?"):
                return path

    def ask_until_valid(self, question: Question) -> None:
        """Ask until the answer is accepted, and keep it."""
        while True:
            answer = self.ask(question)
            more = {question.setting: answer}
            if answer == "nvme" and self.builder.load().settings.parallel.offload_param_path is None:
                more[FOLDER.setting] = self.ask(FOLDER)
            try:
                self.builder.load(**more)
            except SettingsError as error:
                self.report.error(error)
                continue
            self.builder.answers |= more
            return

    def ask(self, question: Question) -> str:
        field = setting_fields()[question.setting]
        choices = [str(choice) for choice in choices_of(field.annotation)]
        if question.setting.startswith("offload_") and self.builder.load().settings.parallel.zero_stage != 3:
            choices = [choice for choice in choices if choice != "nvme"]
        return self.report.ask(question.text, choices, question.default or shown_default(field))

    def compare(self) -> None:
        """Show how much memory each choice of stage and offloading takes."""
        builder = self.builder
        if builder.parameters is None:
            self.report.say(
                "with --model_family or --parameters=2.6e9 this would show the memory that each choice takes"
            )
            return
        rows = []
        for choice in candidates(with_files=True):
            # An estimate needs some path for files; it does not depend on which.
            path = {} if builder.load().settings.parallel.offload_param_path else {FOLDER.setting: "/"}
            held = estimate_for(builder.load(**choice, **path), builder.parameters)
            verdict = ("no" if builder.room.lacks(held) else "yes") if builder.room else ""
            sizes = map(format_gib, (held.gpu_bytes, held.host_bytes, held.disk_bytes))
            rows.append((*choice.values(), *sizes, verdict))
        title = f"{builder.parameters:,} parameters"
        columns = ("stage", "optimizer", "weights", "per GPU", "per machine", "on its disk", "fits")
        self.report.table(title, rows, columns)

    def show(self) -> None:
        """Show the JSON so far, and what it means."""
        result = self.builder.result()
        self.report.say(json.dumps(result.json, indent=2))
        result.tell(self.report)
