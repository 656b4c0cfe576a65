"""Conditions of one setting on another, declared beside the setting, and the rule that applies all of them.

    lr_final: Annotated[float, OnlyIf("lr_schedule", "linear")] = Field(default=0.0, description=...)

A key without a dot names a setting of the same section. `every_setting` of a section has what holds for all of its settings.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

DEFAULT: Final = "default"
"""Source of a value that nobody set."""

PER_ENVIRONMENT: Final = "per environment"
"""Marks a setting whose good value depends on the environment: a run of another one names those that it has from its preset."""


class OnlyIf:
    """The setting has an effect only where the one called `key` has one of `values`; text may end in `*`.

    With `why` it does harm elsewhere, and no value but the default is accepted there. `elsewhere` says what else may use it,
    where workers find the learner because its address was set.
    """

    negated = False

    def __init__(self, key: str, *values: object, why: str = "", elsewhere: str = "") -> None:
        """A missing setting has the value None."""
        self.key, self.values, self.why, self.elsewhere = key, values, why, elsewhere

    def holds(self, value: object) -> bool:
        """Return whether the setting has an effect where the other has this value."""
        same = (fnmatchcase(str(value), each) if isinstance(each, str) else value == each for each in self.values)
        return any(same) is not self.negated

    def fix(self, key: str) -> str:
        """Return how a user makes it hold."""
        return f"change {key}" if self.negated else f"set {key}={shown(self.values[0])}".replace("*", "...")


class Unless(OnlyIf):
    """The setting has an effect only where the other has none of these values."""

    negated = True


class AtMost(NamedTuple):
    """The setting is at most the value of the one called `key`, or `below` it, for the reason in `why`; null: no limit."""

    key: str
    why: str
    below: bool = False


def shown(value: object) -> str:
    """Return a value as YAML has it."""
    short = f"{value:g}" if isinstance(value, float) else ""
    return short if short and float(short) == value else value if isinstance(value, str) and value else json.dumps(value)


def marks(settings: BaseModel) -> Iterator[tuple[str, Any]]:
    """Yield what declarations say besides types: the key of a setting with each condition and mark of it and of its section."""
    for section, own in settings:
        for name, field in type(own).model_fields.items():
            yield from ((f"{section}.{name}", each) for each in (*field.metadata, *getattr(own, "every_setting", ())))


def unmet(settings: BaseModel) -> Iterator[tuple[str, OnlyIf, str, Any]]:
    """Yield each setting that has no effect, whatever its value: key, condition, key and value of the other setting.

    Where the algorithm has no such other setting, the algorithm's name takes its place.
    """
    seen = set()
    for key, condition in marks(settings):
        if isinstance(condition, OnlyIf) and key not in seen:
            section, name = _place(key, condition.key)
            own = getattr(settings, section)
            if f"{section}.{name}" != key and not condition.holds(getattr(own, name, None)):
                seen.add(key)
                name = name if name in type(own).model_fields else "name"
                yield key, condition, f"{section}.{name}", getattr(own, name)


def conflicts(settings: BaseModel) -> Iterator[str]:
    """Yield a sentence for each value that does harm by its conditions or is above its bound."""
    idle = {key: rest for key, *rest in unmet(settings)}
    for key, (condition, other, found) in idle.items():
        value, default = value_of(settings, key)
        if condition.why and value != default:
            where = f"where {other} is {shown(found)}: {condition.why}; or {condition.fix(other)}"
            yield f"{key}: found {shown(value)}, wanted {shown(default)} {where}"
    for key, bound in marks(settings):
        if isinstance(bound, AtMost) and key not in idle:
            other = ".".join(_place(key, bound.key))
            (value, _), (most, _) = value_of(settings, key), value_of(settings, other)
            size, limit = (math.inf if each is None else each for each in (value, most))
            if size > limit or (bound.below and size == limit):
                wanted = "less than" if bound.below else "at most"
                yield f"{key}: found {shown(value)}, wanted {wanted} {most} = {other}: {bound.why}"


def without_effect(
    settings: BaseModel, source: Callable[[str], str], *, inherited: Collection[str], checked: bool
) -> tuple[list[str], list[str]]:
    """Return a line for each value that was set where it has no effect: those to refuse, and those to tell the user.

    Refused is a value that contradicts settings of its own source or of one below. A value that is the default, as where a
    deployment sets every variable, is told. A value of the preset or file (a source in
    `inherited`) is told where the command line or the environment removed its effect, or where the file was `checked` when its
    run began. `source` returns the source of a key.
    """
    refused, told, lost = [], [], defaultdict[str, list[str]](list)
    for key, condition, other, found in unmet(settings):
        own, cause, (value, default) = source(key), source(other), value_of(settings, key)
        if condition.why or own == DEFAULT or value in ("", None) or (value == default and (own in inherited or not value)):
            continue
        where = f"no effect where {other} is {shown(found)} ({cause})"
        line = f"{key}: found {shown(value)} ({own}), which has {where}"
        if own in inherited and (checked or cause not in {DEFAULT, *inherited}):
            if condition not in getattr(getattr(settings, key.partition(".")[0]), "every_setting", ()):  # switched off as a whole
                lost[f"{own} sets what has {where}"].append(f"{key}={shown(value)}")
        elif value == default:
            told.append(line)
        elif not condition.elsewhere or source("learner.bind") == DEFAULT:
            refused.append(f"{line}; leave it out, or {condition.fix(other)}")
        elif own not in inherited:
            told.append(f"{line}; {condition.elsewhere}")
    return refused, told + [f"{what}: {', '.join(values)}" for what, values in lost.items()]


def value_of(settings: BaseModel, key: str) -> tuple[Any, Any]:
    """Return the value and the default of a setting."""
    section, name = key.split(".")
    own = getattr(settings, section)
    return getattr(own, name), type(own).model_fields[name].get_default(call_default_factory=True)


def _place(key: str, other: str) -> tuple[str, str]:
    """Return section and name of the setting that the declaration of `key` calls `other`."""
    section, _, name = other.rpartition(".")
    return section or key.partition(".")[0], name
