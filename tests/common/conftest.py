"""Fixtures of this folder."""

from __future__ import annotations

import pytest


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        """The time."""
        return self.now


@pytest.fixture
def clock():
    """A clock that the test turns: `clock.now += 5.0`."""
    return Clock()
