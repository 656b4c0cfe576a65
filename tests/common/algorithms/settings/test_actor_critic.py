"""What the sections of actor-critic algorithms share."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from common.algorithms.settings.a3c import A3CGradSettings, A3CSettings
from common.algorithms.settings.base import Scale
from common.algorithms.settings.impala import ImpalaSettings
from common.algorithms.settings.ppo import PPOSettings

pytestmark = pytest.mark.pure

SCALE = Scale(length=20, num_envs=8, batch=2, credits=2, max_policy_lag=20, actors=2, env_steps=10_000)


@pytest.mark.parametrize("section", [A3CSettings, A3CGradSettings, ImpalaSettings])
def test_the_defaults_fit_together(section):
    """`algorithm.name` alone is a valid section."""
    assert list(section().conflicts(SCALE)) == []


@pytest.mark.parametrize(
    ("section", "batch", "refused"), [(A3CSettings, 1, True), (A3CSettings, 2, False), (A3CGradSettings, 2, True)]
)
def test_one_advantage_alone_cannot_be_standardised(section, batch, refused):
    """One env step a loss: of a batch by data, of a message by gradients."""
    settings = section(normalize_advantage=True)
    sentences = list(settings.conflicts(SCALE._replace(length=1, num_envs=1, batch=batch)))
    assert bool(sentences) == refused
    assert all(sentence.startswith("algorithm.normalize_advantage: found true, wanted false") for sentence in sentences)


@pytest.mark.parametrize("section", [A3CSettings, A3CGradSettings, ImpalaSettings, PPOSettings])
def test_a_floor_under_what_nothing_is_divided_by_is_refused(section):
    """Somebody who sets it expects it to do something."""
    (sentence,) = section(least_advantage_std=0.2, normalize_advantage=False).conflicts(SCALE)
    assert sentence.startswith("algorithm.least_advantage_std: found 0.2, wanted 0.0 where algorithm.normalize_advantage is")
    assert list(section(least_advantage_std=0.2, normalize_advantage=True).conflicts(SCALE)) == []


@pytest.mark.parametrize("section", [A3CSettings, A3CGradSettings, ImpalaSettings, PPOSettings])
def test_an_end_of_the_entropy_bonus_that_it_never_moves_to_is_refused(section):
    """Nobody can tell when it should be reached."""
    (sentence,) = section(entropy_final=0.2).conflicts(SCALE)
    assert sentence.startswith("algorithm.entropy_final: found 0.2, wanted 0.0 where algorithm.entropy_env_steps is 0")
    assert list(section(entropy_final=0.2, entropy_env_steps=100).conflicts(SCALE)) == []


@pytest.mark.parametrize("section", [A3CSettings, A3CGradSettings, ImpalaSettings])
def test_a_schedule_that_needs_several_steps_an_update_is_refused(section):
    """kl_adaptive belongs to PPO, whose update moves the policy by itself."""
    with pytest.raises(ValidationError, match="'constant' or 'linear'"):
        section(lr_schedule="kl_adaptive")
