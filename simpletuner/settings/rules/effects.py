"""Settings without an effect beside others: evaluation and messages of `knob(when=...)`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from simpletuner.errors import BrokenRule
from simpletuner.settings.declared.errors import broken, shorten
from simpletuner.settings.declared.knob import extra_of
from simpletuner.settings.declared.sections import SECTION_OF, DatasetSettings, Optimizer, Settings, setting_fields
from simpletuner.settings.files.raw_values import Origin

TERM = re.compile(r"(?P<no>not )?(?P<name>\w+)(?:(?P<operator>!=|>=|=|>)(?P<value>\S+))?")
COMPARE: Mapping[str, Callable[[Any, float], bool]] = {">": operator.gt, ">=": operator.ge}
FACTS = {
    "references": "a dataset of references",
    "first_frames": "clips that continue their first frame",
    "masks": "a dataset of masks",
    "eval_dataset": "a dataset of dataset_type eval",
}
"""Names in conditions that only the datasets can answer."""
UNKNOWN = "unknown before the dataset file is read"
SAYS_THE_SAME = {"num_train_epochs": 0}
"""Values that switch a setting off by themselves."""

Lookup = Callable[[str], object]


class Term(NamedTuple):
    """A comparison in a condition: `NAME`, `not NAME`, `NAME=a|b`, `NAME!=a`, `NAME>1`."""

    name: str
    operator: str
    value: str
    is_negated: bool

    def holds(self, lookup: Lookup) -> bool | None:
        """Evaluate the comparison; None if it depends on facts that are not known yet."""
        value = lookup(self.name)
        if value is UNKNOWN:
            return None
        if self.operator in COMPARE:
            found = value is not None and COMPARE[self.operator](value, float(self.value))
        elif self.operator:
            found = any(fnmatchcase(as_word(value), each) for each in self.value.split("|"))
        else:
            found = bool(value)
        return found != (self.is_negated or self.operator == "!=")

    def wanted(self) -> str:
        """The condition in words, as a user would have to fulfil it."""
        if self.name in FACTS:
            return FACTS[self.name]
        if self.operator in COMPARE:
            text = self.name if self.operator == ">=" else f"{self.name} above {self.value}"
            return f"no {text}" if self.is_negated else text
        if self.operator == "!=":
            return f"another {self.name}"
        if self.operator:
            words = [
                each[1:-1] if each.startswith("*") and each.endswith("*") else each for each in self.value.split("|")
            ]
            return f"{self.name} = {listed(words, 'or')}"
        is_switch = setting_fields()[self.name].annotation is bool
        return f"{self.name} = {as_word(not self.is_negated)}" if is_switch else self.name


@cache
def condition_of(name: str) -> tuple[tuple[Term, ...], ...]:
    """Return the condition under which a setting has an effect: of several groups one, and of that all terms.

    Empty for a setting that always has one. Raises ValueError for a condition that does not parse.
    """
    text = extra_of(setting_fields()[name], "when") or ""
    return tuple(tuple(map(parse_term, group.split(" and "))) for group in filter(None, text.split(" or ")))


def parse_term(text: str) -> Term:
    if (found := TERM.fullmatch(text)) is None:
        raise ValueError(f"{text!r} is no comparison of a setting")
    return Term(found["name"], found["operator"] or "", found["value"] or "", bool(found["no"]))


def as_word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def has_effect(name: str, lookup: Lookup) -> bool | None:
    """Evaluate a setting's `when=`; None if it depends on facts that are not known yet."""
    groups = [[term.holds(lookup) for term in group] for group in condition_of(name)]
    found = [False if False in group else None if None in group else True for group in groups]
    return True if True in found or not found else None if None in found else False


def why_without_effect(name: str, lookup: Lookup) -> str:
    """Return the rest of a sentence about a setting: beside what it has no effect, and what it is for."""
    groups = [[term for term in group if term.holds(lookup) is False] for group in condition_of(name)]
    failing = [*dict.fromkeys(term for group in groups for term in group)]
    present = [f"{term.name} = {as_word(lookup(term.name))}" for term in failing if is_given(term, lookup)]
    needed = listed([listed([term.wanted() for term in group], "and") for group in groups], "or")
    if not present:
        return f"has no effect without {needed}"
    if all(term.is_negated for term in failing):
        return f"has no effect beside {listed(present, 'and')}"
    return f"has no effect with {listed(present, 'and')}: it is for {needed}"


def is_given(term: Term, lookup: Lookup) -> bool:
    return term.is_negated or (term.name not in FACTS and bool(lookup(term.name)))


def listed(names: Collection[str], word: str) -> str:
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


def lookup_in(settings: Settings, facts: Mapping[str, bool] | None = None) -> Lookup:
    """Lookup of names in conditions: values of settings, and `facts` that the datasets answer."""
    has_file = settings.data.data_backend_config is not None

    def lookup(name: str) -> object:
        if name in FACTS:
            return facts[name] if facts is not None else UNKNOWN if has_file else False
        # In a dataset file the keys of each dataset decide, which `dataset_keys_without_effect` looks at.
        if has_file and name in DatasetSettings.model_fields:
            return UNKNOWN
        return getattr(getattr(settings, SECTION_OF[name]), name)

    return lookup


def without_effect(
    settings: Settings, origins: Mapping[str, Origin], facts: Mapping[str, bool] | None = None
) -> Iterator[BrokenRule]:
    """Yield a sentence for each setting that someone wrote and that has no effect beside the others.

    With `facts` about the datasets only for those that these facts decide: the others were said before.
    """
    lookup, before = lookup_in(settings, facts), lookup_in(settings)
    own = Optimizer(optimizer=settings.optimizer.optimizer)  # some optimizers have defaults of their own
    for name, origin in origins.items():
        section = getattr(settings, SECTION_OF[name])
        value, default = (
            getattr(section, name),
            getattr(own if name in Optimizer.model_fields else type(section)(), name),
        )
        is_new = facts is None or has_effect(name, before) is None
        if value in (default, SAYS_THE_SAME.get(name)) or origin.source == "launcher" or not is_new:
            continue
        if has_effect(name, lookup) is False:
            yield broken(f"{name} = {shorten(value)} {why_without_effect(name, lookup)}", name)
