"""Algorithms by name."""

from __future__ import annotations

import numpy as np
import pytest

from common.algorithms import registry
from common.algorithms.api import Place
from common.algorithms.policy import ActorCriticPolicy
from common.algorithms.ppo import PPO
from common.algorithms.settings.ppo import PPOSettings
from common.errors import PeerError
from common.models.spec import ModelSettings
from common.wire.messages import Trajectory

pytestmark = pytest.mark.pure


def test_every_entry_is_found_by_the_name_its_settings_carry():
    """The configuration tells algorithms apart by `name` alone."""
    for name, entry in registry.ALGORITHMS.items():
        assert entry.settings().name == name


def test_settings_lead_to_both_sides_of_their_algorithm(vector_env):
    """A learner and an actor build from the same section of the configuration."""
    settings, model = PPOSettings(), ModelSettings(hidden=(4,))
    assert isinstance(registry.build_algorithm(settings, model=model, env=vector_env, seed=1), PPO)
    place = Place(index=0, peers=1, num_envs=1)
    policy = registry.build_policy(settings, model=model, env=vector_env, precision="fp32", seed=1, place=place)
    assert isinstance(policy, ActorCriticPolicy)


def test_an_actor_critic_ships_its_rollouts_with_the_log_probability_of_every_action(vector_env):
    """What is sent is what was written down, and it is checked as a trajectory."""
    settings, size = PPOSettings(), {"length": 2, "num_envs": 1}
    ships = registry.shipment(settings, model=ModelSettings(), env=vector_env, **size)
    assert ships.message is Trajectory
    assert ships.schema == registry.rollout_schema(settings, env=vector_env, **size)
    assert ships.schema[-1].name == "log_prob"
    broken = {spec.name: np.zeros([max(0, axis) for axis in spec.shape], spec.dtype) for spec in ships.schema}
    with pytest.raises(PeerError, match="action outside"):
        ships.check(Trajectory(seq=0, version=0, env_steps=2, shipped=2, arrays=broken | {"action": np.full((2, 1), 9)}))
