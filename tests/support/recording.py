"""Which settings code reads: those that it does not read in some situation are declared to depend on something."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel

from common.conditions import unmet
from common.config.schema import Settings

M = TypeVar("M", bound=BaseModel)


def recorded(section: M) -> tuple[M, set[str]]:
    """Return a copy of `section`, and the set of the names of its settings that were read from the copy or from copies of it."""
    read: set[str] = set()
    names = frozenset(type(section).model_fields)

    class Recorded(type(section)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> object:
            if name in names:
                read.add(name)
            return super().__getattribute__(name)

    copy: M = Recorded.model_construct(**{name: getattr(section, name) for name in names})
    read.clear()
    return copy, read


def unread(reads: list[tuple[Settings, str, set[str]]]) -> set[str]:
    """Return the keys that code does not read in one of these situations, in which they should have an effect.

    A situation is the settings, the section that was recorded, and the names that were read.
    """
    missing = set()
    for settings, section, read in reads:
        idle = {key for key, *_ in unmet(settings)}
        own = {f"{section}.{name}" for name in type(getattr(settings, section)).model_fields}
        missing |= own - {f"{section}.{name}" for name in read} - idle
    return missing
