"""What `simpletuner deepspeed build` knows while it asks: sources and answers, the result, and what that costs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simpletuner.deepspeed.checks import check_zero, model_of
from simpletuner.deepspeed.choice import Room, candidates, choose, in_words
from simpletuner.deepspeed.estimate import Estimate, estimate
from simpletuner.errors import SettingsError
from simpletuner.report import Report
from simpletuner.settings.deepspeed.config import deepspeed_config, with_auto
from simpletuner.settings.deepspeed.source import NAME, as_source
from simpletuner.settings.loading import Loaded, canonical_name, resolve
from simpletuner.settings.sources import RawValue, Source, collect_from_file, collect_sources, from_flags
from simpletuner.system.numbers import format_gib, parse_bytes, parse_count

ASSUMED = "P parameters, N ranks; buffers at most; activations come on top"


@dataclass
class Builder:
    """Sources of settings, answers that outrank them, the memory there is, and the parameters if they are known."""

    sources: list[Source]
    room: Room | None = None
    parameters: int | None = None
    answers: dict[str, Any] = field(default_factory=dict)
    said_in: frozenset[str] = frozenset()
    """Sources that will be there beside the result, so that it need not say again what they say."""

    @classmethod
    def of(
        cls,
        flags: Mapping[str, Any],
        config: Path | None,
        template: str | None,
        apply: Path | None,
        gpu_memory: str | None,
        host_memory: str | None,
        parameters: str | None,
    ) -> Builder:
        """Return a builder for what was typed. Raises SettingsError for its mistakes.

        The file to `apply` to says what is not typed, but for the configuration that it names already.
        """
        from simpletuner.deepspeed import template_files as templates
        from simpletuner.models.parameter_count import parameters_of

        start = [as_source(f"template {template}", templates.find(template).config)] if template else []
        sources = collect_sources(flags, config or apply, os.environ)
        kept = [without_zero(source) if source.name == str(apply) else source for source in sources]
        builder = cls([*start, *kept], said_in=frozenset({"launcher", str(apply)}))
        if gpu_memory is not None:
            host = parse_bytes(host_memory, "--host_memory") if host_memory is not None else None
            builder.room = Room(parse_bytes(gpu_memory, "--gpu_memory"), host)
        counted = parameters_of(builder.load().settings.model) if parameters is None else None
        builder.parameters = parse_count(parameters, "--parameters") if parameters else counted and counted[0]
        return builder

    def load(self, **more: Any) -> Loaded:
        """Return the settings so far, or with some more answers. Raises SettingsError for what cannot be."""
        return resolve([*self.sources, from_flags(self.answers | more)], complete=False)

    def result(self) -> Result:
        """Return what the settings so far make of DeepSpeed."""
        return Result(self.load(), self.said_in, self.room, self.parameters)

    def check_in(self, apply: Path, config: Mapping[str, Any]) -> None:
        """Raise SettingsError if a config file says otherwise than a DeepSpeed JSON that it is to name."""
        named = Source("built", [RawValue(NAME, dict(config), "built")])
        resolve([*map(without_zero, collect_from_file(apply)), named], complete=False)

    def estimate_of(self, settings: Mapping[str, Any]) -> Estimate:
        """Return what some settings of DeepSpeed would keep. The parameters must be known."""
        assert self.parameters is not None
        return estimate_for(self.load(**settings), self.parameters)

    def choose(self) -> str:
        """Take the lowest stage and the least offloading that fit, and return why."""
        if self.room is None or self.parameters is None:
            needs = {"--gpu_memory=24GiB": self.room is None, "--parameters=2.6e9": self.parameters is None}
            said = " and ".join(flag for flag, is_missing in needs.items() if is_missing)
            raise SettingsError(
                f"--stage=auto needs {said}", "--model_family, or a folder of weights, says how many too"
            )
        loaded = self.load()
        fixed = {name: value_of(loaded, name) for name in OFFLOADS if name in loaded.origins}
        with_files = loaded.settings.parallel.offload_param_path is not None
        found = choose(self.room, candidates(with_files, fixed), self.estimate_of)
        self.answers |= {name: value for name, value in found.settings.items() if name not in fixed}
        return found.because

    def refuse_lack(self, lack: str) -> None:
        """Raise SettingsError for a choice that does not fit, which names the lowest one that does."""
        assert self.room is not None
        parallel = self.load().settings.parallel
        try:
            found = choose(self.room, candidates(parallel.offload_param_path is not None), self.estimate_of).settings
        except SettingsError as nothing:
            raise SettingsError(f"this does not fit: it needs {lack}", nothing.message) from None
        flags = {"--stage": found["zero_stage"]} | {f"--{name}": found[name] for name in OFFLOADS}
        typed = " ".join(f"{flag}={value}" for flag, value in flags.items() if value != "none")
        raise SettingsError(f"this does not fit: it needs {lack}", f"{in_words(found)} fits: {typed}")


OFFLOADS = ("offload_optimizer", "offload_param")


def value_of(loaded: Loaded, name: str) -> Any:
    """Return the value of a knob about parallelism."""
    return getattr(loaded.settings.parallel, name)


@dataclass(frozen=True)
class Result:
    """What settings make of DeepSpeed: its JSON, and what it keeps of the model."""

    loaded: Loaded
    said_in: frozenset[str]
    room: Room | None
    parameters: int | None

    @property
    def json(self) -> dict[str, Any]:
        """Return DeepSpeed's JSON; what nobody chose is `auto`."""
        settings = self.loaded.settings
        chosen = {name for name, origin in self.loaded.origins.items() if origin.source not in self.said_in}
        return with_auto(deepspeed_config(settings, settings.launch.num_processes), chosen)

    def warn(self, report: Report) -> None:
        """Say what the user should know. Raises EnvironmentFault for a folder that cannot be offloaded to."""
        for warning in (*self.loaded.warnings, *check_zero(self.loaded.settings, self.parameters)):
            report.warn(warning)

    def tell(self, report: Report) -> None:
        """Say what the configuration keeps where."""
        if self.parameters is None:
            report.say("what it takes is not known: say --model_family, a folder of weights, or --parameters=2.6e9")
            return
        held = estimate_for(self.loaded, self.parameters)
        report.table(self.title, memory_rows(held), ("", "per GPU", "per machine", "on its disk", "per rank"))
        report.say(ASSUMED, style="dim")
        if self.room is not None:
            left = format_gib(self.room.gpu_bytes - held.gpu_bytes)
            report.say(f"does not fit: it needs {self.lack}" if self.lack else f"fits: {left} of each GPU are left")

    @property
    def lack(self) -> str:
        """Return what the configuration needs more of than there is; empty if it fits, or if that is not known."""
        if self.room is None or self.parameters is None:
            return ""
        return self.room.lacks(estimate_for(self.loaded, self.parameters))

    @property
    def title(self) -> str:
        """Return what the table is about."""
        choice = {name: value_of(self.loaded, name) for name in ("zero_stage", *OFFLOADS)}
        ranks = self.loaded.settings.launch.num_processes
        return f"{in_words(choice)}: {self.parameters:,} parameters, {ranks} rank{'s' * (ranks > 1)}"


def without_zero(source: Source) -> Source:
    """Return a source without the DeepSpeed JSON that it names."""
    return replace(source, values=[given for given in source.values if canonical_name(given.name) != NAME])


def estimate_for(loaded: Loaded, parameters: int) -> Estimate:
    """Return what settings with DeepSpeed keep of a model with so many parameters."""
    settings = loaded.settings
    return estimate(deepspeed_config(settings, settings.launch.num_processes), model_of(settings, parameters))


def memory_rows(held: Estimate) -> list[tuple[str, ...]]:
    """Return an estimate as rows of a table."""
    ranks = held.model.ranks_per_machine
    rows = [(row.what, (row.gpu, row.host * ranks, row.disk * ranks), row.formula) for row in held.rows]
    rows.append(("together", (held.gpu_bytes, held.host_bytes, held.disk_bytes), ""))
    return [(what, *map(format_gib, sizes), formula) for what, sizes, formula in rows]
