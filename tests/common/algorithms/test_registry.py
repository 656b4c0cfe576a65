"""Algorithms by name."""

from __future__ import annotations

import pytest

from common.algorithms import registry
from common.algorithms.policy import ActorCriticPolicy
from common.algorithms.ppo import PPO
from common.algorithms.settings.ppo import PPOSettings
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure


def test_every_entry_is_found_by_the_name_its_settings_carry():
    """The configuration tells algorithms apart by `name` alone."""
    for name, entry in registry.ALGORITHMS.items():
        assert entry.settings().name == name


def test_settings_lead_to_both_sides_of_their_algorithm(vector_env):
    """A learner and an actor build from the same section of the configuration."""
    settings, model = PPOSettings(), ModelSettings(hidden=(4,))
    assert isinstance(registry.build_algorithm(settings, model=model, env=vector_env, seed=1), PPO)
    policy = registry.build_policy(settings, model=model, env=vector_env, precision="fp32", seed=1)
    assert isinstance(policy, ActorCriticPolicy)
    assert [spec.name for spec in registry.recorded_specs(settings, length=2, num_envs=1)] == ["log_prob"]
