"""What all tests share."""

from __future__ import annotations

import pytest
from hypothesis import settings

# A busy machine is no failing test: time is measured in benchmarks/, not asserted here.
settings.register_profile("rookery", deadline=None)
settings.load_profile("rookery")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts processes begins first, since it takes longest: at the end no core waits for another's last file."""
    items.sort(key=lambda item: item.get_closest_marker("system") is None)
