"""Descriptions of environments."""

import pytest

from common.envs.spec import ActionSpec
from common.errors import ConfigError

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (1, 1), "low": (-1.0,), "high": (1.0,)},
        {"shape": (2,)},
        {"shape": ()},
        {"shape": (2,), "low": (-1.0, -1.0), "high": (1.0,)},
        {"choices": (3,), "shape": (2,)},
        {"choices": (3, 2), "shape": ()},
        {"choices": (3, 0), "shape": (2,)},
    ],
)
def test_actions_are_numbers_or_vectors_with_their_bounds(wrong):
    with pytest.raises(ConfigError, match=r"not supported: found shape .*, wanted .*; flatten"):
        ActionSpec(**wrong)
