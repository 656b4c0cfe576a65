"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no failing test: time is measured in benchmarks/, not asserted here.
settings.register_profile("rookery", deadline=None)
settings.load_profile("rookery")
