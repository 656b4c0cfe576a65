"""Epsilon of each environment: the ladder's rungs, the straight line, and what an evaluator does."""

from __future__ import annotations

import pytest
import torch

from common.algorithms import exploration
from common.algorithms.api import Place
from common.algorithms.settings.dqn import DQNSettings

pytestmark = pytest.mark.pure

LADDER = DQNSettings(exploration="ladder", epsilon=0.4, ladder_alpha=7.0)
LINE = DQNSettings(epsilon_initial=1.0, epsilon=0.1, epsilon_env_steps=1_000)


def place(index=0, peers=1, num_envs=1, **more):
    """Where a policy acts."""
    return Place(index=index, peers=peers, num_envs=num_envs, **more)


def test_the_ladder_of_ape_x_goes_from_its_largest_rung_to_the_eighth_power():
    """Eight actors of one environment: 0.4, then in equal ratios down to 0.4^8, as in table 1 of the paper's appendix."""
    rungs = torch.cat([exploration.epsilon(LADDER, place(index=i, peers=8), env_steps=0) for i in range(8)])
    assert rungs[0].item() == pytest.approx(0.4)
    assert rungs[-1].item() == pytest.approx(0.4**8)
    torch.testing.assert_close(rungs[1:] / rungs[:-1], torch.full((7,), 0.4))


@pytest.mark.parametrize(("peers", "num_envs"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_however_the_environments_are_spread_over_actors_they_stand_on_the_same_rungs(peers, num_envs):
    """The exploration of a run does not depend on how many processes carry it."""
    places = [place(index=i, peers=peers, num_envs=num_envs) for i in range(peers)]
    rungs = torch.cat([exploration.epsilon(LADDER, one, env_steps=0) for one in places]).sort().values
    torch.testing.assert_close(rungs, exploration.epsilon(LADDER, place(num_envs=6), env_steps=0).sort().values)


def test_each_actor_has_high_and_low_rungs():
    """An actor that dies takes no part of the ladder with it."""
    for index in range(3):
        rungs = exploration.epsilon(LADDER, place(index=index, peers=3, num_envs=8), env_steps=0)
        assert rungs.max() > 0.2
        assert rungs.min() < 0.002


def test_an_actor_beyond_the_expected_number_repeats_the_rungs_of_another():
    """Actors may join at any time; none may fall off the ladder."""
    first, late = (exploration.epsilon(LADDER, place(index=i, peers=2, num_envs=4), env_steps=0) for i in (1, 3))
    assert torch.equal(first, late)


def test_a_single_environment_stands_on_the_largest_rung():
    """There is no i/(N-1) for N = 1; and an unknown number of actors counts as one."""
    assert exploration.epsilon(LADDER, place(peers=0), env_steps=0).tolist() == pytest.approx([0.4])


def test_the_line_falls_with_the_env_steps_of_the_run_and_then_stays():
    """By the snapshot's env steps, not by a clock of each actor: all explore alike."""
    found = [exploration.epsilon(LINE, place(index=1, peers=2, num_envs=2), env_steps=at) for at in (0, 500, 1_000, 9_000)]
    assert [epsilon.tolist() for epsilon in found] == [pytest.approx([value] * 2) for value in (1.0, 0.55, 0.1, 0.1)]


def test_no_line_at_all_is_the_end_of_one():
    """`epsilon_env_steps: 0`, from a start at 0 env steps on."""
    settings = DQNSettings(epsilon=0.05, epsilon_env_steps=0)
    assert exploration.annealed(1, settings) == pytest.approx(0.05)


def test_an_evaluator_explores_as_at_the_end_of_training():
    """Its sampled episodes at the very first version show what that exploration costs, not what chance plays like."""
    judge = place(num_envs=3, training=False)
    assert exploration.epsilon(LINE, judge, env_steps=0).tolist() == pytest.approx([0.1] * 3)
