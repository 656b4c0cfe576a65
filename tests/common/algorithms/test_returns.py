"""Advantages against the double sum of the paper, and what they must never do at the end of an episode."""

from __future__ import annotations

import pytest
import torch

from common.algorithms.returns import gae, q_lambda
from common.errors import InternalError

pytestmark = pytest.mark.pure

GAMMA, LAMBDA = 0.9, 0.7


def brute_force(data, gamma, lambda_):
    """A_t as the sum over l of (gamma * lambda)^l * delta_{t+l}, written out, up to and including the end of the episode."""
    steps, num_envs = data["reward"].shape
    advantage = torch.zeros(steps, num_envs)
    for b in range(num_envs):
        for t in range(steps):
            if not data["valid"][t, b]:
                continue
            for later in range(t, steps):
                bootstrap = 0.0 if data["terminated"][later, b] else data["next_value"][later, b]
                delta = data["reward"][later, b] + gamma * bootstrap - data["value"][later, b]
                advantage[t, b] += (gamma * lambda_) ** (later - t) * delta
                if data["terminated"][later, b] or data["truncated"][later, b]:
                    break
    return advantage


def rollout(steps=12, num_envs=5, seed=0):
    """Random rewards and values in which nothing ends; V(next) is V(o_{t+1})."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(steps + 1, num_envs, generator=generator)
    never = torch.zeros(steps, num_envs, dtype=torch.bool)
    return {
        "reward": torch.randn(steps, num_envs, generator=generator),
        "value": values[:-1].clone(),
        "next_value": values[1:].clone(),
        "terminated": never.clone(),
        "truncated": never.clone(),
        "valid": ~never,
    }


def with_ends(layout):
    """Ends in the middle, in a row, and at the last step, as each autoreset mode delivers them, and agents that leave early."""
    data = rollout()
    for t, b, kind in (
        (3, 0, "terminated"),
        (3, 1, "truncated"),
        (5, 1, "terminated"),
        (7, 2, "truncated"),
        (11, 3, "truncated"),
    ):
        data[kind][t, b] = True
        rows = slice(t + 1, t + 1 + {"next_step": 1, "agents": 4, "same_step": 0}[layout])  # V(next) is V(o_{t+1}), the last one
        data["valid"][rows, b] = False
        data["reward"][rows, b] = 1e3  # whatever is there must not be seen
        if layout == "same_step":  # o_{t+1} is of the next episode: the value of the last observation is apart
            data["next_value"][t, b] = 5.0
    return data


@pytest.mark.parametrize("layout", ["next_step", "same_step", "agents"])
@pytest.mark.parametrize("lambda_", [0.0, LAMBDA, 1.0])
def test_advantages_are_the_double_sum_of_the_paper(layout, lambda_):
    """Rollouts with terminations, truncations and resets in the middle, in both layouts of autoreset."""
    data = with_ends(layout)
    found = gae(**data, gamma=GAMMA, lambda_=lambda_)
    torch.testing.assert_close(found.advantage, brute_force(data, GAMMA, lambda_))
    torch.testing.assert_close(found.target, torch.where(data["valid"], found.advantage + data["value"], 0.0))


def plain_q_lambda(data, gamma, lambda_):
    """Eq. 1 of PQN (arXiv:2407.04811), row after row backwards, with the ends of episodes written out."""
    returns = torch.zeros_like(data["reward"], dtype=torch.float64)
    steps, num_envs = returns.shape
    for b in range(num_envs):
        for t in reversed(range(steps)):
            if not data["valid"][t, b]:
                continue
            reward, greedy = data["reward"][t, b].double(), data["next_value"][t, b].double()
            if data["terminated"][t, b]:
                returns[t, b] = reward
            elif data["truncated"][t, b] or t + 1 == steps or not data["valid"][t + 1, b]:
                returns[t, b] = reward + gamma * greedy
            else:
                returns[t, b] = reward + gamma * (lambda_ * returns[t + 1, b] + (1 - lambda_) * greedy)
    return returns.float()


@pytest.mark.parametrize("layout", ["next_step", "same_step", "agents"])
@pytest.mark.parametrize("lambda_", [0.0, 0.65, 1.0])
def test_q_lambda_is_the_recursion_of_the_paper(layout, lambda_):
    """The same rollouts, with largest action values in place of values."""
    data = with_ends(layout)
    found = q_lambda(**data, gamma=GAMMA, lambda_=lambda_)
    torch.testing.assert_close(found, plain_q_lambda(data, GAMMA, lambda_), rtol=0, atol=1e-6)


def test_lambda_0_is_the_one_step_error_and_lambda_1_the_discounted_rewards():
    """The two limits of eqs. 17 and 18."""
    data = rollout(steps=3, num_envs=1)
    one_step = data["reward"] + GAMMA * data["next_value"] - data["value"]
    torch.testing.assert_close(gae(**data, gamma=GAMMA, lambda_=0.0).advantage, one_step)
    reward, bootstrap = data["reward"][:, 0], data["next_value"][2, 0]
    total = reward[0] + GAMMA * reward[1] + GAMMA**2 * reward[2] + GAMMA**3 * bootstrap
    torch.testing.assert_close(gae(**data, gamma=GAMMA, lambda_=1.0).target[0, 0], total)


def test_a_truncated_episode_bootstraps_and_a_terminated_one_does_not():
    """Hand numbers: one step, reward 1, V(o) 2, V(next) 10, gamma 0.9."""
    data = {name: array[:1, :2] for name, array in rollout().items()}
    data |= {"reward": torch.ones(1, 2), "value": torch.full((1, 2), 2.0), "next_value": torch.full((1, 2), 10.0)}
    data |= {"terminated": torch.tensor([[True, False]]), "truncated": torch.tensor([[False, True]])}
    assert gae(**data, gamma=0.9, lambda_=0.95).target.tolist() == [[1.0, 10.0]]


def test_two_episodes_in_one_trace_are_the_two_apart():
    """Nothing of the second episode reaches the first."""
    data = rollout(steps=10)
    data["truncated"][4] = True
    whole = gae(**data, gamma=GAMMA, lambda_=LAMBDA).advantage
    halves = [gae(**{k: v[part] for k, v in data.items()}, gamma=GAMMA, lambda_=LAMBDA) for part in (slice(5), slice(5, 10))]
    torch.testing.assert_close(whole, torch.cat([half.advantage for half in halves]))


def test_what_lies_in_a_reset_row_changes_nothing():
    """The reward and value of a row in which the action was ignored."""
    data = with_ends("next_step")
    before = gae(**data, gamma=GAMMA, lambda_=LAMBDA)
    for name in ("reward", "next_value", "value"):
        data[name] = torch.where(data["valid"], data[name], 77.0)
    after = gae(**data, gamma=GAMMA, lambda_=LAMBDA)
    assert torch.equal(before.advantage, after.advantage)
    assert torch.equal(before.target, after.target)


@pytest.mark.parametrize("shape", [(12, 5, 1), (12, 1), (60,)])
def test_values_of_another_shape_are_refused(shape):
    """A value head with an extra last axis would broadcast without an error."""
    data = rollout() | {"value": torch.zeros(shape)}
    with pytest.raises(InternalError, match="returns need arrays of one shape"):
        gae(**data, gamma=GAMMA, lambda_=LAMBDA)
