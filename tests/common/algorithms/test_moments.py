"""Running mean and deviation against numpy over the whole stream."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from common.algorithms.moments import Moments

pytestmark = pytest.mark.pure


def test_merged_parts_are_the_whole():
    """Targets come batch by batch, of different sizes, far from 0."""
    values = np.random.default_rng(0).normal(1e4, 3.0, 1000)
    merged = Moments()
    for part in np.split(values, [1, 7, 500]):
        merged = merged.merge(Moments.of(torch.from_numpy(part)))
    assert merged.count == 1000
    assert merged.mean == pytest.approx(values.mean())
    assert merged.std == pytest.approx(values.std())


def test_before_anything_was_seen_values_pass_unchanged():
    """The first batch of a run; an empty part changes nothing."""
    values = torch.tensor([3.0, -1.0])
    empty = Moments().merge(Moments.of(torch.zeros(0)))
    assert torch.equal(empty.normalize(values), values)
    assert torch.equal(empty.denormalize(values), values)


def test_normalised_values_have_mean_0_and_deviation_1_and_come_back():
    """Value targets on their way to the value head, and its predictions on their way back."""
    values = torch.randn(500, generator=torch.Generator().manual_seed(1)) * 7 - 20
    moments = Moments.of(values)
    normal = moments.normalize(values)
    assert normal.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert normal.std(correction=0).item() == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(moments.denormalize(normal), values)


def test_a_constant_stream_normalises_to_0():
    """Pong before the first point: all targets are the same."""
    assert Moments.of(torch.full((5,), 2.0)).normalize(torch.tensor([2.0])).tolist() == [0.0]


def test_they_survive_a_checkpoint_exactly():
    """Resume: JSON there and back."""
    moments = Moments.of(torch.tensor([0.1, 0.7, 1e6]))
    assert Moments(**json.loads(json.dumps(asdict(moments)))) == moments
