"""The questions of `simpletuner deepspeed build` in a terminal, one at a time, with the effect of each answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from simpletuner.commands.paths import parse_path
from simpletuner.deepspeed.builder import DeepSpeedBuilder
from simpletuner.deepspeed.estimate import stage_candidates
from simpletuner.deepspeed.questions import OFFLOAD_FOLDER, QUESTIONS, Question
from simpletuner.errors import SettingsError
from simpletuner.report import Report
from simpletuner.settings.declared.knob import shown_default
from simpletuner.settings.declared.sections import setting_fields
from simpletuner.settings.values.spelling import choices_of
from simpletuner.system.numbers import format_gib

DEFAULT_OUTPUT = Path("config/deepspeed.json")


@dataclass
class Wizard:
    """Asks for the settings that no flag, file or template has given."""

    report: Report
    builder: DeepSpeedBuilder

    def run(self) -> None:
        """Ask all questions that apply, and show what has been built so far."""
        for question in QUESTIONS:
            loaded = self.builder.load()
            if question.setting in loaded.origins or not question.applies(loaded.settings.parallel):
                continue
            if question.setting == "zero_stage":
                self.compare_stages()
            self.ask_until_valid(question)
            if loaded.settings.parallel.zero_stage or question.setting == "zero_stage":
                self.show_result()

    def ask_output(self, force: bool) -> Path:
        """Ask where to write, until the file does not exist or may be overwritten."""
        while True:
            path = parse_path(self.report.ask("Write to", default=str(DEFAULT_OUTPUT)))
            if force or not path.is_file() or self.report.confirm(f"{path} exists already: overwrite it?"):
                return path

    def ask_until_valid(self, question: Question) -> None:
        while True:
            answer = self.ask(question)
            answers = {question.setting: answer}
            if answer == "nvme" and self.builder.load().settings.parallel.offload_param_path is None:
                answers[OFFLOAD_FOLDER.setting] = self.ask(OFFLOAD_FOLDER)
            try:
                self.builder.load(**answers)
            except SettingsError as error:
                self.report.error(error)
                continue
            # Only once the settings accept it: a refused answer would make every later question fail, too.
            self.builder.answers |= answers
            return

    def ask(self, question: Question) -> str:
        setting = setting_fields()[question.setting]
        choices = [str(choice) for choice in choices_of(setting.annotation)]
        # Below stage 3 DeepSpeed offloads nothing to files.
        if question.setting.startswith("offload_") and self.builder.load().settings.parallel.zero_stage != 3:
            choices = [choice for choice in choices if choice != "nvme"]
        return self.report.ask(question.text, choices, question.default or shown_default(setting))

    def compare_stages(self) -> None:
        """Show what each choice of stage and offloading would need."""
        builder = self.builder
        if builder.num_parameters is None:
            self.report.say("with --model_family or --parameters=2.6e9 this would show the memory of each choice")
            return
        has_folder = builder.load().settings.parallel.offload_param_path is not None
        folder = {} if has_folder else {OFFLOAD_FOLDER.setting: "/"}  # any folder: settings refuse nvme without one
        rows = []
        for candidate in stage_candidates(with_files=True):
            estimate = builder.estimate(**candidate, **folder)
            needed = (estimate.gpu_bytes, estimate.host_bytes)
            fits = ("no" if builder.budget.shortfall(*needed) else "yes") if builder.budget else ""
            rows.append((*candidate.values(), *map(format_gib, (*needed, estimate.disk_bytes)), fits))
        columns = ("stage", "optimizer", "weights", "per GPU", "per machine", "on its disk", "fits")
        self.report.table(f"{builder.num_parameters:,} parameters", rows, columns)

    def show_result(self) -> None:
        result = self.builder.result()
        self.report.say(json.dumps(result.json, indent=2))
        result.print_estimate(self.report)
        if result.shortfall:
            self.report.say(f"does not fit: it needs {result.shortfall}")
