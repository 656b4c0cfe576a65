"""Classes that keep what a protocol promises, and those that do not."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

import pytest

from common.algorithms.promises import require, require_call
from common.errors import ConfigError

pytestmark = pytest.mark.pure


class Bird(Protocol):
    """What is asked for."""

    @property
    def wings(self) -> int:
        """A number."""

    def fly(self) -> None:
        """A method."""

    def sing(self) -> None:
        """Another."""


class Rook:
    """Has it all, one part only when it is built."""

    def __init__(self):
        """Two of them."""
        self.wings = 2

    def fly(self):
        """Away."""

    def sing(self):
        """Loudly."""


class Wingless(Rook):
    """Built without."""

    def __init__(self):
        """None."""


class Stone:
    """Lacks methods too."""

    def sing(self):
        """Rolling."""


class Heir(Bird):
    """Derives from the protocol itself, whose methods do nothing."""

    wings = 2

    def fly(self):
        """Away."""


class Sketch(Rook):
    """Leaves one to those who derive from it."""

    @abstractmethod
    def nest(self):
        """Somewhere."""


@pytest.mark.parametrize("thing", [Rook, Rook(), Wingless, lambda: None], ids=["class", "object", "not built yet", "function"])
def test_what_keeps_the_promise_or_still_may_passes(thing):
    """An attribute that `__init__` sets is not there before; what a function builds is judged when it is built."""
    require(thing, Bird, of="own")


@pytest.mark.parametrize(
    ("thing", "lacks"),
    [(Stone, "fly"), (Stone(), "wings, fly"), (Wingless(), "wings"), (Heir, "sing"), (Heir(), "sing"), (Sketch, "nest")],
)
def test_what_is_missing_is_named(thing, lacks):
    """Also where it is inherited from a class that only says what there should be."""
    with pytest.raises(ConfigError, match=rf"own: \w+ is no Bird: found no {lacks}, wanted what"):
        require(thing, Bird, of="own")


def test_a_class_that_takes_other_arguments_is_refused():
    """It would fail in the learner, after the run has begun."""
    require_call(dict, ("settings", "env"), of="own")
    require_call(lambda **_: None, ("settings", "env"), of="own")
    with pytest.raises(ConfigError, match=r"own: Rook cannot be built: found .*'settings', wanted arguments settings, env"):
        require_call(Rook, ("settings", "env"), of="own")
