"""The replay benchmark at a tiny size: what it samples is a full memory. How fast it is, is not tested."""

import numpy as np
import pytest

from benchmarks.replay import ENV, Load, benchmark, report, rollout
from common.algorithms.payload import check_trajectory, trajectory_schema
from common.protocol.content import check_numbers, check_schema

pytestmark = pytest.mark.pure


def test_a_full_memory_is_sampled():
    """Transitions nearly as many as env steps fit, and each figure measured."""
    load = Load(capacity=2_000, batch=16)
    result = benchmark(load, repeats=3)
    assert 1_000 < result.transitions <= 2_100
    assert result.batch_bytes == 2 * 16 * 4 * 84 * 84
    assert min(result.insert, result.sample, result.copy_scattered, result.copy, result.copy_again) > 0
    text = report(load, result)
    for words in ("transitions in", "sample of 16", "MiB/s", "sampling / copying", "us per env step"):
        assert words in text


@pytest.mark.parametrize("ends", [True, False])
def test_what_is_inserted_would_pass_as_a_rollout(ends: bool):
    """Else the memory would hold what no actor sends."""
    arrays = rollout(np.random.default_rng(0), ends=ends)
    check_schema(arrays, trajectory_schema(ENV, length=16, num_envs=16, recorded=()))
    check_numbers(arrays)
    check_trajectory(ENV, arrays)
    assert arrays["start"].any() == ends
