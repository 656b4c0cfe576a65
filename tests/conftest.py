"""What all tests share."""

from __future__ import annotations

import resource
from contextlib import contextmanager

import pytest
from hypothesis import settings

# A busy machine is no failing test: time is measured in benchmarks/, not asserted here.
settings.register_profile("rookery", deadline=None)
settings.load_profile("rookery")


def pytest_collection_modifyitems(items):
    """What takes longest begins first (what has a time limit of its own, then real processes), so that all cores end together."""

    def order(item):
        limit = item.get_closest_marker("timeout")
        return -limit.args[0] if limit else 0, item.get_closest_marker("system") is None

    items.sort(key=order)


@pytest.fixture
def no_room():
    """A context in which no file of this process, and of those it starts, can grow: what a write meets on a full disk."""

    @contextmanager
    def full():
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return full
