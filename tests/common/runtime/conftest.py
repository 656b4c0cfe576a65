"""What the tests of this folder share."""

from __future__ import annotations

import pytest


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        """Any moment will do."""
        self.now = 100.0

    def __call__(self):
        """The time."""
        return self.now


@pytest.fixture
def clock():
    """A clock that the test turns: `clock.now += 5.0`."""
    return Clock()
