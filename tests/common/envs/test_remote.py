"""A policy server takes rows that environments bring from its env workers, and no others."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from common.envs.leaves import action_mask, random_allowed
from common.envs.make import make
from common.envs.remote import check_observe, first_row, row_of
from common.envs.spec import EnvSettings
from common.errors import ProtocolError

pytestmark = pytest.mark.service

PROBES = {
    "cartpole": EnvSettings(id="CartPole-v1", num_envs=4),
    "agents": EnvSettings(entry_point="common.envs.probes:leaving_agents", kwargs={"mask": "leaf"}, action_mask=True, num_envs=4),
}


def played(environment, number):
    """The rows of all Observes of `number` steps: each with those that had ended before it."""
    spec, random = environment.spec, np.random.default_rng(1)
    answers, ended = [(None, first_row(environment.reset(3).copy()))], None
    for _ in range(number):
        ended = check_observe(spec, answers[-1][1], ended)
        seen = answers[-1][1]["observation"]
        mask = action_mask(spec, seen) if spec.action_mask else np.ones((len(seen), sum(spec.action.choices)), np.bool_)
        answers.append((ended, row_of(environment.step(random_allowed(spec, mask, random)))))
    return answers


@pytest.mark.parametrize("probe", PROBES)
def test_all_rows_of_environments_are_taken(probe):
    with closing(make(PROBES[probe])) as environment:
        answers = played(environment, 40)
    assert sum(arrays["start"].any() for _, arrays in answers) > 2
    assert any((ended & ~arrays["start"]).any() for ended, arrays in answers[1:]) == (probe == "agents")


def test_a_row_with_a_lost_life_is_taken():
    with closing(make(EnvSettings(id="ALE/Breakout-v5", terminate_on_life_loss=True, num_envs=2))) as environment:
        answers = played(environment, 400)
    assert any(arrays["life_lost"].any() for _, arrays in answers)


IDLE = ("reward", "terminated", "truncated")
WRONG = {
    "an env step after an end": lambda row, over, _: row["valid"].__setitem__(over, True),
    "no env step within an episode": lambda row, _, alive: [row[name].__setitem__(alive, 0) for name in ("valid", *IDLE)],
    "a start within an episode": lambda row, _, alive: row["start"].__setitem__(alive, True),
    "a reward in a reset row": lambda row, over, _: row["reward"].__setitem__(over, 1.0),
    "a termination in a reset row": lambda row, over, _: row["terminated"].__setitem__(over, True),
    "a truncation in a reset row": lambda row, over, _: row["truncated"].__setitem__(over, True),
    "a lost life in a reset row": lambda row, over, _: row["life_lost"].__setitem__(over, True),
    "a lost life at an end": lambda row, _, alive: [row[name].__setitem__(alive, True) for name in ("terminated", "life_lost")],
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("probe", PROBES)
def test_a_row_that_no_environment_brings_is_refused(probe, change):
    """The learner would refuse the whole rollout, with the rows of all other env workers."""
    with closing(make(PROBES[probe])) as environment:
        ended, row = next(answer for answer in played(environment, 40)[1:] if len(set(answer[0])) == 2)
        check_observe(environment.spec, row, ended)
        over, alive = np.flatnonzero(ended)[-1], np.flatnonzero(~ended)[0]
        change(row, over, alive)
        with pytest.raises(ProtocolError, match=rf"row ({over}|{alive}) of an Observe, (after an end|within an episode): found "):
            check_observe(environment.spec, row, ended)


@pytest.mark.parametrize("begins", [True, False])
def test_a_row_that_is_acted_on_has_an_allowed_action(begins):
    """A mask of zeros has no meaning but in the row of an agent that has left."""
    with closing(make(PROBES["agents"])) as environment:
        spec = environment.spec
        (_, row), *others = played(environment, 40)
        ended, row = (None, row) if begins else next(answer for answer in others if len(set(answer[0])) == 2)
        over = check_observe(spec, row, ended)
        row["observation"][over, -2:] = 0
        check_observe(spec, row, ended)
        row["observation"][~over, -2:] = 0
        with pytest.raises(ProtocolError, match=r"action mask of an Observe: found a mask of zeros in row \d"):
            check_observe(spec, row, ended)
