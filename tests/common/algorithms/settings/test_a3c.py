"""A3C's clip."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from common.algorithms.settings.a3c import A3CSettings

pytestmark = pytest.mark.pure


def test_a_ratio_below_1_would_shrink_fresh_experience_too():
    """Where the newest policy acted every ratio is 1."""
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        A3CSettings(ratio_clip=0.9)
