"""Trajectories as a shipment."""

from __future__ import annotations

import numpy as np
import pytest

from common.algorithms.shipment import trajectories
from common.algorithms.trajectory import trajectory_schema
from common.errors import PeerError
from common.wire.messages import Trajectory

pytestmark = pytest.mark.pure


def test_rollouts_are_sent_as_they_are_and_checked_as_trajectories(vector_env):
    """An action outside the action space fits every schema."""
    schema = trajectory_schema(vector_env, length=2, num_envs=1, recorded=())
    shipment = trajectories(env=vector_env, rollout=schema, settings=None, model=None, length=2, num_envs=1)
    assert (shipment.message, shipment.schema) == (Trajectory, schema)
    arrays = {spec.name: np.zeros([max(0, axis) for axis in spec.shape], spec.dtype) for spec in schema}
    shipment.check(Trajectory(seq=0, version=0, env_steps=2, shipped=2, arrays=arrays))
    wrong = Trajectory(seq=0, version=0, env_steps=2, shipped=2, arrays=arrays | {"action": np.full((2, 1), 9)})
    with pytest.raises(PeerError, match="action outside"):
        shipment.check(wrong)
