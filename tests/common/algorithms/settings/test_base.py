"""What the sections of all algorithms share: the learning rate and the size of a run."""

from __future__ import annotations

import pytest

from common.algorithms.settings.a3c import A3CGradSettings, A3CSettings
from common.algorithms.settings.base import Scale
from common.algorithms.settings.dqn import DQNSettings
from common.algorithms.settings.impala import ImpalaSettings
from common.algorithms.settings.ppo import PPOSettings
from common.algorithms.settings.td3 import TD3Settings

pytestmark = pytest.mark.pure

SCALE = Scale(length=20, num_envs=8, batch=2, credits=2, max_policy_lag=20, actors=8, env_steps=100_000)  # 64 environments
SECTIONS = [PPOSettings, ImpalaSettings, A3CSettings, A3CGradSettings, DQNSettings, TD3Settings]


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_learning_rate_follows_the_number_of_environments_where_that_is_asked(section, scaling, factor):
    """Tuned for 16 and run with 64: four times as many, so four times or twice the rate; once, however often it is asked."""
    settings = section(learning_rate=1e-3, learning_rate_envs=16, learning_rate_scaling=scaling)
    scaled = settings.scaled(SCALE)
    assert scaled.learning_rate == pytest.approx(factor * 1e-3)
    assert scaled.scaled(SCALE) == scaled
    assert list(settings.conflicts(SCALE)) == []


def test_fewer_environments_make_a_smaller_rate():
    """A quarter of them, on a laptop."""
    settings = PPOSettings(learning_rate=1e-3, learning_rate_envs=256, learning_rate_scaling="linear")
    assert settings.scaled(SCALE).learning_rate == pytest.approx(2.5e-4)


def test_a_schedule_is_scaled_as_a_whole():
    """From start to end, or a larger start would only fall more steeply."""
    settings = A3CSettings(learning_rate=1e-3, lr_final=1e-4, lr_schedule="linear", learning_rate_scaling="linear")
    assert settings.scaled(SCALE).lr_final == pytest.approx(4e-4)


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(
    ("changed", "actors", "sentence"),
    [
        ({"learning_rate_scaling": "sqrt"}, 0, "algorithm.learning_rate_scaling: found sqrt, wanted none where actor.count is 0"),
        (
            {"learning_rate": 0.5, "learning_rate_scaling": "linear"},
            8,
            "algorithm.learning_rate: found 2 = 0.5 scaled to 64 environments, wanted at most 1",
        ),
    ],
)
def test_a_rate_that_nobody_knows_or_wants_is_refused(section, changed, actors, sentence):
    """Actors that are started elsewhere are not counted; a rate above 1 is refused wherever it comes from."""
    found = list(section(**changed).conflicts(SCALE._replace(actors=actors)))
    assert any(line.startswith(sentence) for line in found), found
