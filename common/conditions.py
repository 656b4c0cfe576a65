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

COMMAND_LINE: Final = "command line"
"""Source of a value that the command sets for this run alone."""

PER_ENVIRONMENT: Final = "per environment"
"""Marks a setting whose good value depends on the environment: a run of another one than the preset's has a note on it."""


class OnlyIf:
    """The setting has an effect only where the one called `key` has one of `values`; text may end in `*`.

    With `why` it does harm elsewhere, and no value but the default is accepted there. Where the setting called `unless_set` was
    set, a process that is started by itself may use this one, so that it is never refused.
    """

    def __init__(self, key: str, *values: object, why: str = "", unless_set: str = "") -> None:
        """A missing setting has the value None."""
        self.key, self.values, self.why, self.unless_set = key, values, why, unless_set

    def holds(self, section: BaseModel, name: str) -> bool:
        """Return whether the setting has an effect, by the other, which is called `name` in its section."""
        value = getattr(section, name, None)
        return any(fnmatchcase(str(value), each) if isinstance(each, str) else value == each for each in self.values)

    def cause(self, key: str, value: object, source: str) -> str:
        """Return the state of the other setting with which this one has no effect."""
        return f"{key} is {yaml_text(value)} ({source})"

    def fix(self, key: str) -> str:
        """Return how a user makes it hold."""
        return f"set {key}={yaml_text(self.values[0])}".replace("*", "...")


class Unless(OnlyIf):
    """The setting has an effect only where the other has none of these values."""

    def holds(self, section: BaseModel, name: str) -> bool:
        """As the base."""
        return not super().holds(section, name)

    def fix(self, key: str) -> str:
        """As the base."""
        return f"change {key}"


class UnlessEqual(Unless):
    """The setting has an effect only where the one called `key` and the one called `other`, of one section, differ."""

    def __init__(self, key: str, other: str) -> None:
        super().__init__(key)
        self.other = other

    def holds(self, section: BaseModel, name: str) -> bool:
        """As the base."""
        return bool(getattr(section, name) != getattr(section, self.other))

    def cause(self, key: str, value: object, source: str) -> str:
        """As the base."""
        return f"{key} ({source}) equals {key.partition('.')[0]}.{self.other} = {yaml_text(value)}"


class AtMost(NamedTuple):
    """The setting is at most the value of the one called `key`, or `below` it, for the reason in `why`; null: no limit.

    A larger value is refused, or has a note only.
    """

    key: str
    why: str
    below: bool = False
    refused: bool = True


def yaml_text(value: object) -> str:
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

    Where the algorithm has no such other setting, the algorithm's name takes its place. A condition on a setting without effect
    does not count: where `env.entry_point` is set, `env.id` leaves open whether the environment is of Atari.
    """
    found: dict[str, OnlyIf] = {}
    for key, condition in marks(settings):
        if isinstance(condition, OnlyIf) and key not in found:
            section, name = _place(key, condition.key)
            own, other = getattr(settings, section), f"{section}.{name}"
            is_open = other == key or (other in found and not found[other].why)
            if not is_open and not condition.holds(own, name):
                found[key] = condition
                name = name if name in type(own).model_fields else "name"
                yield key, condition, f"{section}.{name}", getattr(own, name)


def contradictions(
    settings: BaseModel, source: Callable[[str], str], *, files: Collection[str], begun: bool, strict: bool
) -> tuple[list[str], list[str]]:
    """Return the lines to refuse, and notes: a line for each value that does harm, one for each source and cause without effect.

    Harm is refused, except in the `files` of a run that has `begun`. Without effect, values of the command line are refused, if
    `strict`, where they are not the default; other sources may be of several processes, of which another uses the value. Nothing
    is said of empty values, nor of defaults in `files`, because a run's config.yaml has every setting.
    """
    refused, notes, lost = list[str](), list[str](), defaultdict[str, list[str]](list)
    idle = {key: rest for key, *rest in unmet(settings)}

    def add_harm(key: str, other: str, wanted: str) -> None:
        accepted = begun and {source(key), source(other)} <= {DEFAULT, *files}
        line = f"{key}: found {yaml_text(value_of(settings, key)[0])}, wanted {wanted} ({key} from {source(key)})"
        (notes if accepted else refused).append(line)

    for key, (condition, other, found) in idle.items():
        own, fix, (value, default) = source(key), condition.fix(other), value_of(settings, key)
        if condition.why and value != default:
            add_harm(key, other, f"{yaml_text(default)} where {other} is {yaml_text(found)}: {condition.why}; or {fix}")
        if condition.why or own == DEFAULT or value in ("", None) or (value == default and (own in files or not value)):
            continue
        where = f"has no effect where {condition.cause(other, found, source(other))}"
        if strict and own == COMMAND_LINE and value != default and source(condition.unless_set) == DEFAULT:  # of "" too
            refused.append(f"{key}: found {yaml_text(value)} ({own}), which {where}; leave it out, or {fix}")
        else:
            lost[f"{own} sets what {where}"].append(f"{key}={yaml_text(value)}")
    for key, bound in marks(settings):
        if isinstance(bound, AtMost) and key not in idle:
            other = ".".join(_place(key, bound.key))
            size, limit = (math.inf if each is None else each for each in (value_of(settings, each)[0] for each in (key, other)))
            if size <= limit and not (bound.below and size == limit):
                continue
            if bound.refused:
                add_harm(key, other, f"{'less than' if bound.below else 'at most'} {limit} = {other}: {bound.why}")
            else:
                notes.append(f"{key}={size} ({source(key)}) is more than {other}={limit} ({source(other)}): {bound.why}")
    return refused, notes + [f"{what}: {', '.join(values)}" for what, values in lost.items()]


def value_of(settings: BaseModel, key: str) -> tuple[Any, Any]:
    """Return the value and the default of a setting."""
    section, name = key.split(".")
    own = getattr(settings, section)
    return getattr(own, name), type(own).model_fields[name].get_default(call_default_factory=True)


def _place(key: str, other: str) -> tuple[str, str]:
    """Return section and name of the setting that the declaration of `key` calls `other`."""
    section, _, name = other.rpartition(".")
    return section or key.partition(".")[0], name
