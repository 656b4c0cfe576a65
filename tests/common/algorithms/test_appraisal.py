"""One pass over a batch: every row gets the numbers of its own observation, and of the one that really followed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.algorithms import appraisal
from common.algorithms.appraisal import appraise, steps
from common.algorithms.batch import collate
from common.algorithms.moments import Moments
from common.models import nets
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

MODEL = ModelSettings(conv=((4, 4, 2),), hidden=(16,))
PLAIN = Moments()


@pytest.fixture
def scene(image_env, make_sample):
    """A network, and a batch in which one episode is cut while the next begins at once (same-step autoreset)."""
    ends, start = np.zeros((4, 2), bool), np.zeros((5, 2), bool)
    ends[1, 1] = start[2, 1] = True
    final = np.full((1, 10, 12), 77)
    sample = make_sample(image_env, truncated=ends, start=start, final_obs=final, final_index=[3], action=[[0, 3]] * 4)
    net = nets.build(MODEL, image_env, seed=1)
    torch.nn.init.orthogonal_(net.policy_head.weight, generator=torch.Generator().manual_seed(0))
    return net, collate([sample], image_env)


def test_each_row_is_judged_by_its_own_observation(scene):
    """Row (t, b) of the answer belongs to o_t of environment b, whatever lies beside it in the pass."""
    net, batch = scene
    seen = appraise(net, batch, moments=PLAIN, precision="fp32")
    for t in range(4):
        policy, value = net(batch.observation[t])
        torch.testing.assert_close(seen.head[t], value)
        torch.testing.assert_close(seen.value[t], value.detach())
        torch.testing.assert_close(seen.log_prob[t], policy.log_prob(batch.action[t]))
        torch.testing.assert_close(seen.entropy[t], policy.entropy())


def test_what_followed_a_cut_episode_is_its_own_last_observation(scene):
    """V(o_{t+1}) elsewhere; and the last row looks at o_T."""
    net, batch = scene
    seen = appraise(net, batch, moments=PLAIN, precision="fp32")
    with torch.no_grad():
        wanted = torch.stack([net(batch.observation[t + 1]).value for t in range(4)])
        wanted[1, 1] = net(batch.final_observation).value[0]
    torch.testing.assert_close(seen.next_value, wanted)


def test_only_what_is_trained_carries_gradient(scene):
    """Targets are made of values: a gradient through them would train the value towards itself."""
    net, batch = scene
    seen = appraise(net, batch, moments=PLAIN, precision="fp32")
    assert [tensor.requires_grad for tensor in seen] == [True, True, True, False, False]


def test_values_are_in_units_of_return_and_the_head_in_its_own(scene):
    """Targets of mean 5 and deviation 2 were trained as 0 and 1."""
    net, batch = scene
    seen = appraise(net, batch, moments=Moments(count=4, mean=5.0, m2=16.0), precision="fp32")
    torch.testing.assert_close(seen.value, seen.head.detach() * 2.0 + 5.0)


def test_parts_of_bounded_size_give_the_same_as_one_pass(scene, monkeypatch):
    """A batch that is no multiple of the part, in parts of 3."""
    net, batch = scene
    whole = appraise(net, batch, moments=PLAIN, precision="fp32")
    monkeypatch.setattr(appraisal, "_FORWARD_ROWS", 3)
    for one, other in zip(whole, appraise(net, batch, moments=PLAIN, precision="fp32"), strict=True):
        torch.testing.assert_close(one, other)


def test_bf16_rounds_the_arithmetic_and_little_else(scene):
    """Log-probabilities come out in float32 and near."""
    net, batch = scene
    exact, rounded = (appraise(net, batch, moments=PLAIN, precision=precision) for precision in ("fp32", "bf16"))
    assert rounded.log_prob.dtype == torch.float32
    torch.testing.assert_close(rounded.log_prob, exact.log_prob, rtol=0.0, atol=0.05)
    assert not torch.equal(rounded.log_prob, exact.log_prob)


def test_rewards_are_clipped_to_their_sign_where_asked(vector_env, make_sample):
    """Breakout's bricks of 1, 4 and 7 points."""
    batch = collate([make_sample(vector_env, reward=[[7.0, -4.0]] * 4)], vector_env)
    seen = appraise(nets.build(ModelSettings(hidden=(4,)), vector_env), batch, moments=PLAIN, precision="fp32")
    assert steps(batch, seen, clip_reward=False)["reward"].tolist() == [[7.0, -4.0]] * 4
    assert steps(batch, seen, clip_reward=True)["reward"].tolist() == [[1.0, -1.0]] * 4
