"""IMPALA's clips."""

from __future__ import annotations

import pytest

from common.algorithms.settings.base import Scale
from common.algorithms.settings.impala import ImpalaSettings

pytestmark = pytest.mark.pure

SCALE = Scale(length=20, num_envs=8, batch=2, credits=2, max_policy_lag=20, actors=2, env_steps=10_000)


@pytest.mark.parametrize(("c_clip", "found"), [(1.5, "1.5"), (None, "null")])
def test_traces_clipped_later_than_the_steps_are_refused(c_clip, found):
    """The paper's theorem assumes c-bar <= rho-bar."""
    (sentence,) = ImpalaSettings(c_clip=c_clip).conflicts(SCALE)
    assert sentence.startswith(f"algorithm.c_clip: found {found}, wanted at most 1.0 = algorithm.rho_clip: ")
    assert list(ImpalaSettings(c_clip=c_clip, rho_clip=None).conflicts(SCALE)) == []
