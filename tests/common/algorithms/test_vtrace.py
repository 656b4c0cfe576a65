"""V-trace against the sums of the paper, and the identities it must reduce to."""

from __future__ import annotations

import math

import pytest
import torch

from common.algorithms.returns import gae, vtrace
from common.errors import InternalError

pytestmark = pytest.mark.pure

GAMMA, LAMBDA = 0.9, 0.7
CLIPS = [(3.7, 2.2, 1.5), (2.2, 3.7, None), (1.0, 1.0, 1.0), (None, None, None), (None, 0.5, 2.2), (0.5, None, 3.7)]


def rollout(steps=7, num_envs=5, seed=0):
    """Random rewards and values, nothing ends; ratios from e^-2.5 to e^2.5 = 12.2, to either side of every clip."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(steps + 1, num_envs, generator=generator, dtype=torch.float64)
    never = torch.zeros(steps, num_envs, dtype=torch.bool)
    order = torch.randperm(steps * num_envs, generator=generator)
    return {
        "log_ratio": torch.linspace(-2.5, 2.5, steps * num_envs, dtype=torch.float64)[order].view(steps, num_envs),
        "reward": torch.randn(steps, num_envs, generator=generator, dtype=torch.float64),
        "value": values[:-1].clone(),
        "next_value": values[1:].clone(),
        "terminated": never.clone(),
        "truncated": never.clone(),
        "valid": ~never,
    }


def with_ends(layout):
    """Each environment ends elsewhere, as each autoreset mode delivers it, or its agent leaves early; the first never does."""
    data = rollout()
    for t, b, kind in ((2, 1, "terminated"), (2, 2, "truncated"), (4, 2, "terminated"), (5, 3, "truncated"), (6, 4, "truncated")):
        data[kind][t, b] = True
        rows = slice(t + 1, t + 1 + {"next_step": 1, "agents": 3, "same_step": 0}[layout])  # whatever is there must not be seen
        data["valid"][rows, b] = False
        data["reward"][rows, b] = 1e3
        data["log_ratio"][rows, b] = 1e3
        if layout == "same_step":  # o_{t+1} is of the next episode: the value of the last observation is apart
            data["next_value"][t, b] = 5.0
    return data


class Slow:
    """Both results for every valid row by itself: of order T^2 and more, and nothing shared between rows."""

    def __init__(self, data, *, gamma, lambda_, rho_clip, c_clip, pg_rho_clip):
        """`gamma` of each environment."""
        self.gamma, self.lambda_ = gamma, lambda_
        self.rho_clip, self.c_clip, self.pg_rho_clip = rho_clip, c_clip, pg_rho_clip
        self.data = {name: array.tolist() for name, array in data.items()}

    def at(self, name, t, b):
        """One number."""
        return self.data[name][t][b]

    def ratio(self, t, b, clip):
        """min(clip, pi/mu), where None does not clip."""
        ratio = math.exp(self.at("log_ratio", t, b))
        return ratio if clip is None else min(ratio, clip)

    def target(self, s, b):
        """v_s of eq. 1: V(x_s) + sum over t >= s of gamma^(t-s) * (c_s ... c_{t-1}) * delta_t, to the end of the episode."""
        value = self.at("value", s, b)
        for t in range(s, len(self.data["reward"])):
            traces = math.prod(self.lambda_ * self.ratio(i, b, self.c_clip) for i in range(s, t))
            following = 0.0 if self.at("terminated", t, b) else self.at("next_value", t, b)
            error = self.at("reward", t, b) + self.gamma[b] * following - self.at("value", t, b)
            value += self.gamma[b] ** (t - s) * traces * self.ratio(t, b, self.rho_clip) * error
            if self.at("terminated", t, b) or self.at("truncated", t, b):
                break
        return value

    def advantage(self, s, b):
        """rho_s * (r_s + gamma * v_{s+1} - V(x_s)), with lambda * v_{s+1} + (1 - lambda) * V where another row follows."""
        following = self.at("next_value", s, b)
        if self.at("terminated", s, b):
            following = 0.0
        elif s + 1 < len(self.data["reward"]) and not self.at("truncated", s, b):
            following = self.lambda_ * self.target(s + 1, b) + (1 - self.lambda_) * following
        error = self.at("reward", s, b) + self.gamma[b] * following - self.at("value", s, b)
        return self.ratio(s, b, self.pg_rho_clip) * error


@pytest.mark.parametrize("layout", ["endless", "next_step", "same_step", "agents"])
@pytest.mark.parametrize(("rho_clip", "c_clip", "pg_rho_clip"), CLIPS)
@pytest.mark.parametrize("lambda_", [0.0, LAMBDA, 1.0])
def test_targets_and_advantages_are_the_sums_of_the_paper(layout, rho_clip, c_clip, pg_rho_clip, lambda_):
    """Clips inside and outside the range of the ratios and none at all, ends and discounts that differ by environment."""
    data = rollout() if layout == "endless" else with_ends(layout)
    gamma = [0.5, 0.9, 0.99, 1.0, 0.0]
    clips = {"rho_clip": rho_clip, "c_clip": c_clip, "pg_rho_clip": pg_rho_clip}
    found = vtrace(**data, gamma=torch.tensor(gamma, dtype=torch.float64), lambda_=lambda_, **clips)
    slow = Slow(data, gamma=gamma, lambda_=lambda_, **clips)
    wanted = torch.zeros(2, *data["reward"].shape, dtype=torch.float64)
    for t, b in data["valid"].nonzero().tolist():
        wanted[:, t, b] = torch.tensor([slow.advantage(t, b), slow.target(t, b)], dtype=torch.float64)
    torch.testing.assert_close(found.advantage, wanted[0])
    torch.testing.assert_close(found.target, wanted[1])


def test_the_ratios_lie_on_both_sides_of_every_clip():
    """Else the test above would not see one that does nothing."""
    ratio = rollout()["log_ratio"].exp()
    assert all(ratio.min() < clip < ratio.max() for clips in CLIPS for clip in clips if clip is not None)


@pytest.mark.parametrize("layout", ["next_step", "same_step"])
@pytest.mark.parametrize("lambda_", [0.0, LAMBDA, 1.0])
def test_on_policy_it_is_the_lambda_return(layout, lambda_):
    """With experience of the newest policy the correction vanishes (remark 1 of the paper, and its lambda)."""
    data = with_ends(layout)
    data["log_ratio"] = torch.zeros_like(data["reward"])
    found = vtrace(**data, gamma=GAMMA, lambda_=lambda_, rho_clip=1.0, c_clip=1.0, pg_rho_clip=1.0)
    del data["log_ratio"]
    wanted = gae(**data, gamma=GAMMA, lambda_=lambda_)
    torch.testing.assert_close(found.advantage, wanted.advantage)
    torch.testing.assert_close(found.target, wanted.target)


def test_on_policy_with_lambda_1_it_is_the_n_step_return():
    """r_0 + gamma r_1 + gamma^2 r_2 + gamma^3 V, by hand."""
    data = rollout(steps=3, num_envs=1)
    data["log_ratio"] = torch.zeros_like(data["reward"])
    found = vtrace(**data, gamma=GAMMA, lambda_=1.0, rho_clip=1.0, c_clip=1.0, pg_rho_clip=1.0)
    reward, bootstrap = data["reward"][:, 0], data["next_value"][2, 0]
    total = reward[0] + GAMMA * reward[1] + GAMMA**2 * reward[2] + GAMMA**3 * bootstrap
    torch.testing.assert_close(found.target[0, 0], total)
    torch.testing.assert_close(found.advantage[0, 0], total - data["value"][0, 0])


def test_with_rho_0_values_stay_and_the_policy_still_learns():
    """No step counts for the values; the advantage is the one-step error by its own clip."""
    data = rollout()
    found = vtrace(**data, gamma=GAMMA, lambda_=1.0, rho_clip=0.0, c_clip=1.0, pg_rho_clip=1.0)
    assert torch.equal(found.target, data["value"])
    one_step = data["reward"] + GAMMA * data["next_value"] - data["value"]
    torch.testing.assert_close(found.advantage, data["log_ratio"].exp().clamp_max(1.0) * one_step)


def test_what_lies_in_a_reset_row_changes_nothing():
    """The ratio of an action that the environment ignored may even be infinite."""
    data = with_ends("next_step")
    outcomes = []
    for junk in (0.0, 1e4):
        changed = {name: torch.where(data["valid"], data[name], junk) for name in ("log_ratio", "reward", "value", "next_value")}
        outcomes.append(vtrace(**data | changed, gamma=GAMMA, lambda_=LAMBDA, rho_clip=None, c_clip=None, pg_rho_clip=None))
    assert torch.equal(outcomes[0].advantage, outcomes[1].advantage)
    assert torch.equal(outcomes[0].target, outcomes[1].target)
    assert not outcomes[0].target[~data["valid"]].any()


@pytest.mark.parametrize(("name", "match"), [("log_ratio", "log-ratios of another shape"), ("value", "arrays of one shape")])
def test_an_array_of_another_shape_is_refused(name, match):
    """[T, B, 1] against [T, B] would broadcast in silence."""
    data = rollout()
    with pytest.raises(InternalError, match=match):
        vtrace(**data | {name: data[name][..., None]}, gamma=GAMMA, lambda_=1.0, rho_clip=1.0, c_clip=1.0, pg_rho_clip=1.0)
