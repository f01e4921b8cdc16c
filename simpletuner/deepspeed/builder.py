"""State of `simpletuner deepspeed build`: settings and answers so far, their JSON, the memory it needs.

Its questions, the most important first, are asked in a terminal and on the page. Named configurations are
those shipped with simpletuner, and the user's own in SIMPLETUNER_HOME.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simpletuner.counting.zero_memory import (
    FREE_SHARE,
    StageChoice,
    choose_stage,
    describe_stage,
    estimate_for_settings,
    stage_candidates,
)
from simpletuner.deepspeed.requirements import check_settings
from simpletuner.errors import SettingsError
from simpletuner.parallel.devices import MemoryBudget, MemoryEstimate
from simpletuner.report import Report
from simpletuner.settings.declared.errors import nearest
from simpletuner.settings.declared.sections import Parallel
from simpletuner.settings.declared.table import canonical_name
from simpletuner.settings.files.formats import toml_line
from simpletuner.settings.files.raw_values import RawValue, Source
from simpletuner.settings.foreign.deepspeed_config import deepspeed_config, with_auto
from simpletuner.settings.resolving.deepspeed_source import NAME, as_source
from simpletuner.settings.resolving.loading import Loaded, resolve, settings_as_json
from simpletuner.settings.resolving.sources import RANKS, collect_from_file, collect_sources, from_flags
from simpletuner.settings.values.spelling import as_text
from simpletuner.system.files.cache_files import user_home
from simpletuner.system.files.regular_files import read_file
from simpletuner.system.numbers import count_noun, format_gib, parse_bytes, parse_count

OFFLOADS = ("offload_optimizer", "offload_param")
LEGEND = "P parameters, N ranks; buffers at their largest; `simpletuner plan` also counts activations"


@dataclass
class DeepSpeedBuilder:
    """Sources of settings, answers that override them, available memory, and the parameters if known."""

    sources: list[Source]
    budget: MemoryBudget | None = None
    num_parameters: int | None = None
    answers: dict[str, object] = field(default_factory=dict)
    sources_of_run: frozenset[str] = frozenset()
    """Sources read by the run, too: the JSON need not repeat their values."""
    inline: frozenset[str] = frozenset()
    """Settings that an inline DeepSpeed JSON decides in the file to apply to; the new JSON replaces it."""

    @classmethod
    def from_arguments(
        cls,
        flags: Mapping[str, object],
        config: Path | None,
        template: str | None,
        apply: Path | None,
        gpu_memory: str | None,
        host_memory: str | None,
        parameters: str | None,
    ) -> DeepSpeedBuilder:
        """Build from command-line arguments. Raises SettingsError for invalid ones.

        The file to `apply` to is also read for settings, with a DeepSpeed JSON in it, but not one it names.
        """
        from simpletuner.models.catalog.architecture import parameters_of

        base = [as_source(f"template {template}", find_template(template).config)] if template else []
        sources = collect_sources(flags, config or apply, os.environ)
        kept = [without_deepspeed_config(source) if source.name == str(apply) else source for source in sources]
        inline = [read_inline(apply, flags)] if apply else []
        ranked = [*base, *kept[:-1], *inline, kept[-1]]  # flags come last
        builder = cls(ranked, sources_of_run=frozenset({"launcher", str(apply)}))
        builder.inline = frozenset(given.name for source in inline for given in source.values)
        if gpu_memory is not None:
            host_bytes = parse_bytes(host_memory, "--host_memory") if host_memory is not None else None
            builder.budget = MemoryBudget(parse_bytes(gpu_memory, "--gpu_memory"), host_bytes, FREE_SHARE)
        counted = parameters_of(builder.load().settings.model) if parameters is None else None
        builder.num_parameters = parse_count(parameters, "--parameters") if parameters else counted and counted[0]
        return builder

    def load(self, **more_answers: object) -> Loaded:
        """Resolve the settings so far, with more answers. Raises SettingsError for invalid ones."""
        return resolve([*self.sources, from_flags(self.answers | more_answers)], complete=False)

    def result(self) -> BuildResult:
        return BuildResult(self.load(), self.sources_of_run, self.budget, self.num_parameters)

    def check_applies(self, apply: Path, config: Mapping[str, object]) -> None:
        """Raise SettingsError if a config file contradicts the DeepSpeed JSON that it is going to name.

        Also if that JSON cannot hold what an inline one says so far: it would be lost.
        """
        named = Source("built", [RawValue(NAME, dict(config), "built")])
        after = resolve([*map(without_deepspeed_config, collect_from_file(apply)), named], complete=False)
        values, wanted = settings_as_json(after), settings_as_json(self.load())
        if lost := [f"{name} = {as_text(wanted[name])}" for name in self.inline if values[name] != wanted[name]]:
            raise SettingsError(
                f"the deepspeed_config in {apply} says {', '.join(sorted(lost))}, which the new one cannot hold",
                f"write it into {apply} as a setting, and run this again",
            )

    def estimate(self, **more_answers: object) -> MemoryEstimate:
        """Estimate what the settings so far, with more answers, need. `num_parameters` must be known."""
        assert self.num_parameters is not None
        return estimate_for_settings(self.load(**more_answers).settings, self.num_parameters)

    def choose(self) -> str:
        """Answer with the lowest stage and the least offloading that fit, and return why."""
        if self.budget is None or self.num_parameters is None:
            needs = {"--gpu_memory=24GiB": self.budget is None, "--parameters=2.6e9": self.num_parameters is None}
            missing = " and ".join(flag for flag, is_missing in needs.items() if is_missing)
            raise SettingsError(
                f"--stage=auto needs {missing}", "--model_family, or a folder of weights, gives the parameters too"
            )
        loaded = self.load()
        fixed = {name: parallel_setting(loaded, name) for name in OFFLOADS if name in loaded.origins}
        choice = self._choose_from_candidates(self.budget, fixed)
        self.answers |= {name: value for name, value in choice.settings.items() if name not in fixed}
        return choice.reason

    def refuse_shortfall(self, shortfall: str) -> None:
        """Raise SettingsError for a choice that does not fit; its hint names the lowest stage that does."""
        assert self.budget is not None
        message = f"this does not fit: it needs {shortfall}"
        try:
            fitting = self._choose_from_candidates(self.budget).settings
        except SettingsError as nothing_fits:
            raise SettingsError(message, nothing_fits.message) from None
        flags = {"--stage": fitting["zero_stage"]} | {f"--{name}": fitting[name] for name in OFFLOADS}
        typed = " ".join(f"{flag}={value}" for flag, value in flags.items() if value != "none")
        raise SettingsError(message, f"{describe_stage(fitting)} fits: {typed}")

    def _choose_from_candidates(self, budget: MemoryBudget, fixed: Mapping[str, object] | None = None) -> StageChoice:
        # Offloading to files is proposed only to a user who has named a folder for it.
        with_files = self.load().settings.parallel.offload_param_path is not None
        candidates = stage_candidates(with_files, fixed)
        return choose_stage(budget, candidates, lambda settings: self.estimate(**settings))


def parallel_setting(loaded: Loaded, name: str) -> object:
    return getattr(loaded.settings.parallel, name)


@dataclass(frozen=True)
class BuildResult:
    """DeepSpeed's JSON for the settings so far, and the memory it needs."""

    loaded: Loaded
    sources_of_run: frozenset[str]
    budget: MemoryBudget | None
    num_parameters: int | None

    @property
    def json(self) -> dict[str, Any]:
        """DeepSpeed's JSON; what the user has not chosen is `auto`."""
        settings = self.loaded.settings
        chosen = {name for name, origin in self.loaded.origins.items() if origin.source not in self.sources_of_run}
        return with_auto(deepspeed_config(settings, settings.launch.num_processes), chosen)

    @property
    def shortfall(self) -> str:
        """Describe resources that the configuration exceeds; empty if it fits, or if capacity is unknown."""
        if self.budget is None or self.num_parameters is None:
            return ""
        estimate = estimate_for_settings(self.loaded.settings, self.num_parameters)
        return self.budget.shortfall(estimate.gpu_bytes, estimate.host_bytes)

    def print_warnings(self, report: Report) -> None:
        """Print warnings. Raises EnvironmentNotReady for a folder that cannot be offloaded to."""
        for warning in (*self.loaded.warnings, *check_settings(self.loaded.settings, self.num_parameters)):
            report.warn(warning)

    def print_estimate(self, report: Report) -> None:
        if self.num_parameters is None:
            report.say("memory is unknown: give --model_family, a folder of weights, or --parameters=2.6e9")
            return
        estimate = estimate_for_settings(self.loaded.settings, self.num_parameters)
        choice = {name: parallel_setting(self.loaded, name) for name in ("zero_stage", *OFFLOADS)}
        ranks = self.loaded.settings.launch.num_processes
        title = f"{describe_stage(choice)}: {self.num_parameters:,} parameters, {count_noun(ranks, 'rank')}"
        report.table(title, memory_table(estimate), ("", "per GPU", "per machine", "on its disk", "per rank"))
        report.say(LEGEND, style="dim")
        if self.budget is not None and self.budget.gpu_bytes is not None and not self.shortfall:
            left = format_gib(self.budget.gpu_bytes - estimate.gpu_bytes)
            report.say(f"fits: {left} of each GPU are left")


def read_inline(apply: Path, flags: Mapping[str, object]) -> Source:
    """Read the settings of a DeepSpeed JSON within a config file that the rest of the file does not set."""
    ranks = from_flags({name: value for name, value in flags.items() if name == RANKS})  # they divide its batch
    sources = [*collect_from_file(apply), ranks]
    is_inline = any(
        canonical_name(given.name) == NAME and is_json(given.value) for each in sources for given in each.values
    )
    if not is_inline:
        return Source("", [])
    whole, bare = (resolve(each, complete=False) for each in (sources, map(without_deepspeed_config, sources)))
    values = settings_as_json(whole)
    said = [
        RawValue(name, values[name], whole.origins[name].place) for name in whole.origins.keys() - bare.origins.keys()
    ]
    return Source(f"{NAME} of {apply}", said, [text for text in whole.warnings if text not in bare.warnings])


def is_json(value: object) -> bool:
    """True for a deepspeed_config that is the JSON itself, not the name of a file."""
    return isinstance(value, Mapping) or (isinstance(value, str) and value.lstrip().startswith("{"))


def without_deepspeed_config(source: Source) -> Source:
    return replace(source, values=[given for given in source.values if canonical_name(given.name) != NAME])


def memory_table(estimate: MemoryEstimate) -> list[tuple[str, ...]]:
    ranks = estimate.inputs.ranks_per_machine
    rows = [(row.name, (row.gpu, row.host * ranks, row.disk * ranks), row.formula) for row in estimate.rows]
    rows.append(("together", (estimate.gpu_bytes, estimate.host_bytes, estimate.disk_bytes), ""))
    return [(name, *map(format_gib, sizes), formula) for name, sizes, formula in rows]


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


SHIPPED_FOLDER = Path(__file__).with_name("templates")
USER_FOLDER = "deepspeed"
SUFFIX = ".toml"
DESCRIPTION = "description"


@dataclass(frozen=True)
class DeepSpeedTemplate:
    """A named configuration; `config` is DeepSpeed's JSON, in which `auto` and missing keys are filled in."""

    name: str
    path: Path
    description: str
    config: Mapping[str, Any]

    @property
    def is_shipped(self) -> bool:
        return self.path.parent == SHIPPED_FOLDER


def load_templates(environment: Mapping[str, str] = os.environ) -> dict[str, DeepSpeedTemplate]:
    """Read all templates, by name; the user's own replace shipped ones of the same name."""
    folders = (SHIPPED_FOLDER, user_folder(environment))
    paths = [path for folder in folders for path in sorted(folder.glob(f"*{SUFFIX}"))]
    return {path.stem: read_template(path) for path in paths}


def user_folder(environment: Mapping[str, str]) -> Path:
    return user_home(environment) / USER_FOLDER


def find_template(name: str, environment: Mapping[str, str] = os.environ) -> DeepSpeedTemplate:
    """Return the template of that name. Raises SettingsError if there is none."""
    known = load_templates(environment)
    if name not in known:
        raise SettingsError(f"there is no template `{name}`{nearest(name, known)}", "`simpletuner deepspeed templates`")
    return known[name]


def read_template(path: Path) -> DeepSpeedTemplate:
    """Read a template. Raises SettingsError for a file that is not one."""
    try:
        values = tomllib.loads(read_file(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"{path} is not a template: {reason}", "correct the file, or remove it") from None
    description = str(values.pop(DESCRIPTION, ""))
    return DeepSpeedTemplate(path.stem, path, description, values)


def user_template_path(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file of a user's own template. Raises SettingsError for an invalid name."""
    # Neither separators nor a leading dot: the name becomes a path below the user's folder.
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise SettingsError(f"`{name}` cannot name a template", "use letters, digits, `-`, `_` and `.`")
    return user_folder(environment) / f"{name}{SUFFIX}"


def format_template(config: Mapping[str, object]) -> str:
    return "".join(f"{toml_line(name, value)}\n" for name, value in config.items())
