"""A3C and the single pass that IMPALA shares with it: loss, update, returns, and data that must do no harm."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.algorithms.a3c import LOSS_PARTS, SinglePassLearner, single_pass_loss
from common.algorithms.api import RunProgress
from common.algorithms.batch import collate
from common.algorithms.moments import Moments
from common.algorithms.on_policy import NetworkOutputs, network_outputs, return_inputs
from common.algorithms.ppo import PPO
from common.algorithms.returns import Returns, gae, vtrace
from common.algorithms.settings import A3CSettings, ImpalaSettings, PPOSettings
from common.errors import InternalError, ResourceError
from common.models.spec import ModelSettings
from tests.common.algorithms.conftest import act_on, weights

pytestmark = pytest.mark.pure


MODEL = ModelSettings(conv=((4, 4, 2),), hidden=(16,))
BOTH = pytest.mark.parametrize("kind", [ImpalaSettings, A3CSettings])


def build(kind, env, *, seed=0, model=MODEL, **settings):
    """Return a learner with weights that its first step changes."""
    return SinglePassLearner(settings=kind(**{"learning_rate": 1e-2} | settings), model=model, env=env, seed=seed)


def train(algorithm, *samples, version=0, env_steps=0):
    """One update, as the learner's loop does it, in a run of 1000 env steps."""
    progress = RunProgress(env_steps=env_steps, env_steps_planned=1000, version=version)
    return algorithm.update(algorithm.ingest(samples), progress)


def evaluation(rows):
    """Numbers that the loss is made of, for [1, N] rows."""
    zeros = torch.zeros(1, rows)
    parts = {"log_prob": zeros - 1.0, "entropy": zeros + 0.5, "normalized_value": zeros + 2.0}
    return NetworkOutputs(**parts, value=zeros, next_value=zeros, state=torch.zeros(rows, 0))


def test_the_loss_by_hand(vector_env, make_sample):
    """Three rows, the last one a reset: -mean(A log pi) + 0.25 mean(V - v)^2 / 2 - 0.1 mean H, over two."""
    batch = collate([make_sample(vector_env, length=1, num_envs=3, valid=[[True, True, False]])], vector_env)
    returns = Returns(torch.tensor([[3.0, -1.0, 99.0]]), torch.tensor([[1.0, 5.0, 99.0]]))
    loss = single_pass_loss(A3CSettings(value_coef=0.25), batch, evaluation(3), returns, returns.target, entropy_coef=0.1)
    policy_loss, value_loss = (3.0 - 1.0) / 2, 0.5 * (1.0 + 9.0) / 2
    assert loss.total.item() == pytest.approx(policy_loss + 0.25 * value_loss - 0.1 * 0.5)
    parts = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": 0.5, "explained_variance": 0.0}
    assert dict(zip(LOSS_PARTS, torch.stack(loss[1:]).tolist(), strict=True)) == pytest.approx(parts)


def test_advantages_of_another_shape_never_broadcast_into_the_loss(vector_env, make_sample):
    """(N,) against (N, 1): the mistake that made a widely copied A3C use the batch mean for a baseline."""
    batch = collate([make_sample(vector_env, length=1, num_envs=3)], vector_env)
    returns = Returns(torch.zeros(1, 3, 1), torch.zeros(1, 3))
    with pytest.raises(InternalError, match="vectors of one length"):
        single_pass_loss(A3CSettings(), batch, evaluation(3), returns, returns.target, entropy_coef=0.01)


@BOTH
def test_the_gradient_is_that_of_the_loss(vector_env, make_sample, kind):
    """Finite differences in the policy head: the step follows what the loss really does."""
    algorithm = build(kind, vector_env)
    batch = algorithm.ingest([make_sample(vector_env, reward=np.eye(4)[:, :2])])

    def loss():
        seen = network_outputs(algorithm.model, batch, moments=Moments(), precision="fp32")
        return single_pass_loss(algorithm._settings, batch, seen, returns, returns.target, entropy_coef=0.01).total

    seen = network_outputs(algorithm.model, batch, moments=Moments(), precision="fp32")
    with torch.no_grad():
        returns = algorithm.returns(batch, seen)
    loss().backward()
    bias = algorithm.model.policy_head.bias
    with torch.no_grad():
        bias[0] += 1e-2
        above = loss().item()
        bias[0] -= 2e-2
        below = loss().item()
    assert bias.grad[0].item() == pytest.approx((above - below) / 2e-2, rel=1e-2)
    assert bias.grad[0].item() != 0.0


@BOTH
@pytest.mark.parametrize(("optimizer", "rate"), [("adam", 2e-2), ("rmsprop", 0.5)])
def test_it_learns_which_action_pays_in_which_context(vector_env, make_sample, kind, optimizer, rate):
    """A contextual bandit: action 2 pays where the first number is larger, action 0 where the second is; chance is 1/3."""
    algorithm = build(kind, vector_env, learning_rate=rate, optimizer=optimizer)
    for round_ in range(120):
        sample = make_sample(vector_env, length=8, num_envs=16, seed=round_, terminated=np.ones((8, 16)))
        sample = act_on(algorithm, vector_env, sample, make_sample, model=MODEL, seed=round_)
        right = np.where(sample.arrays["obs"][:-1, :, 0] > sample.arrays["obs"][:-1, :, 1], 2, 0)
        reward = (sample.arrays["action"] == right).astype(np.float32)
        result = train(algorithm, make_sample(vector_env, length=8, num_envs=16, **(dict(sample.arrays) | {"reward": reward})))
    assert reward.mean() > 0.9
    assert result.samples == 128
    assert result.metrics["first_ratio_error"] < 1e-5


@BOTH
@pytest.mark.parametrize("normalize", [False, True])
def test_reset_rows_are_never_trained_on(vector_env, make_sample, kind, normalize):
    """Next-step autoreset: whatever the ignored row holds, the update is the same, and it is no sample."""
    valid, ends = np.ones((4, 2), bool), np.zeros((4, 2), bool)
    valid[2, 0], ends[1, 0] = False, True
    outcomes = []
    for junk in (0.0, 1e6):
        algorithm = build(kind, vector_env, normalize_value=normalize, normalize_advantage=normalize)
        reward, log_prob = np.where(valid, 1.0, junk), np.where(valid, -1.0, -junk)
        sample = make_sample(vector_env, valid=valid, truncated=ends, reward=reward, log_prob=log_prob)
        outcomes.append((train(algorithm, sample, version=1), weights(algorithm).tobytes()))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0].samples == 7


@BOTH
def test_normalised_values_make_the_value_loss_blind_to_the_scale_of_rewards(vector_env, make_sample, kind):
    """Returns of hundreds and of thousandths are learned alike."""
    found = []
    for scale in (1e-2, 1e3):
        sample = make_sample(vector_env, reward=np.random.default_rng(0).random((4, 2)) * scale, terminated=np.ones((4, 2)))
        found.append(train(build(kind, vector_env, normalize_value=True), sample).metrics["value_loss"])
    assert found[0] == pytest.approx(found[1], rel=0.05)


@BOTH
def test_standardised_advantages_make_the_policy_loss_blind_to_it_too(vector_env, make_sample, kind):
    """The same for the policy: only which actions were better counts."""
    found = []
    for scale in (1.0, 1e3):
        sample = make_sample(vector_env, reward=np.eye(4)[:, :2] * scale, terminated=np.ones((4, 2)))
        algorithm = build(kind, vector_env, normalize_advantage=True)
        torch.nn.init.zeros_(algorithm.model.value_head.weight)
        found.append(train(algorithm, sample).metrics["policy_loss"])
    assert found[0] == pytest.approx(found[1], abs=1e-5)


@BOTH
def test_advantages_below_the_floor_keep_their_size(vector_env, make_sample, kind):
    """Ten times smaller rewards: a policy loss ten times smaller, where a deviation of 1 is the least."""
    found = []
    for scale in (1e-1, 1e-2):
        sample = make_sample(vector_env, reward=np.eye(4)[:, :2] * scale, terminated=np.ones((4, 2)))
        algorithm = build(kind, vector_env, normalize_advantage=True, least_advantage_std=1.0, entropy_coef=0.0)
        torch.nn.init.zeros_(algorithm.model.value_head.weight)
        found.append(train(algorithm, sample).metrics["policy_loss"])
    assert found[0] == pytest.approx(10.0 * found[1], rel=1e-3)
    assert found[1] != 0.0


@BOTH
def test_a_falling_entropy_bonus_is_that_of_the_progress_of_the_run(vector_env, make_sample, kind):
    """Halfway from 0.4 to 0.2 the step is that of a constant 0.3, and no other."""
    sample, moved = make_sample(vector_env, reward=np.eye(4)[:, :2]), []
    falling = {"entropy_coef": 0.4, "entropy_final": 0.2, "entropy_env_steps": 500}
    for settings in (falling, {"entropy_coef": 0.3}, {"entropy_coef": 0.4}):
        algorithm = build(kind, vector_env, **settings)
        torch.nn.init.orthogonal_(algorithm.model.policy_head.weight, generator=torch.Generator().manual_seed(0))
        result = train(algorithm, sample, env_steps=250)
        moved.append((result.metrics["entropy_coef"], weights(algorithm)))
    assert [coef for coef, _ in moved] == pytest.approx([0.3, 0.3, 0.4])
    assert np.allclose(moved[0][1], moved[1][1])
    assert not np.allclose(moved[0][1], moved[2][1])


@BOTH
def test_the_movement_of_the_policy_since_it_acted_is_measured(vector_env, make_sample, kind):
    """Acted with e^-2 where the newest policy says 1/3: the ratio is 2.46."""
    sample = make_sample(vector_env, log_prob=np.full((4, 2), -2.0), version=1)
    metrics = train(build(kind, vector_env), sample, version=3).metrics
    assert metrics["first_ratio_error"] == pytest.approx(np.exp(2.0) / 3.0 - 1.0, abs=0.1)
    assert metrics["approx_kl"] > 0.3
    assert metrics["policy_lag_mean"] == 2.0


# --- returns of A3C ---


def test_another_policy_is_corrected_environment_by_environment(vector_env, make_sample):
    """By the recorded probabilities and not by the version, which is used again after a rollback, with other weights.

    The newest policy acted in the first column, which has plain GAE; another one in the second, which has V-trace.
    """
    settings = A3CSettings(gamma=0.9, gae_lambda=0.8, ratio_clip=1.2)
    algorithm = SinglePassLearner(settings=settings, model=ModelSettings(hidden=(8,)), env=vector_env, seed=0)
    sample = make_sample(vector_env, reward=np.eye(4)[:, :2], log_prob=np.linspace(-3.0, -0.1, 8).reshape(4, 2))
    batch = algorithm.ingest([sample])
    with torch.no_grad():
        seen = network_outputs(algorithm.model, batch, moments=Moments(), precision="fp32")
        batch.log_prob[:, 0] = seen.log_prob[:, 0]
        found = algorithm.returns(batch, seen)
    rollout = return_inputs(batch, seen, clip_reward=False)
    plain = gae(**rollout, gamma=0.9, lambda_=0.8)
    clips = {"rho_clip": 1.2, "c_clip": 1.2, "pg_rho_clip": 1.2}
    corrected = vtrace(**rollout, log_ratio=seen.log_prob - batch.log_prob, gamma=0.9, lambda_=0.8, **clips)
    for got, fresh, old in zip(found, plain, corrected, strict=True):
        torch.testing.assert_close(got[:, 0], fresh[:, 0])
        torch.testing.assert_close(got[:, 1], old[:, 1])
        assert not torch.allclose(got[:, 1], fresh[:, 1])


# --- checkpoints of another algorithm ---


def test_a_checkpoint_of_another_optimizer_is_refused_and_changes_nothing(vector_env):
    """`--resume algorithm.optimizer=adam` of a run with rmsprop, which has another state."""
    algorithm = build(A3CSettings, vector_env, optimizer="adam")
    other = build(A3CSettings, vector_env, seed=1, optimizer="rmsprop")
    before = weights(algorithm)
    with pytest.raises(ResourceError, match=r"another optimizer: found \['rmsprop'\], wanted \['adam'\]"):
        algorithm.load_state_dict(other.state_dict())
    assert np.array_equal(weights(algorithm), before)


def test_a_run_may_be_resumed_by_another_algorithm_with_the_same_optimizer(vector_env, make_sample):
    """`--resume algorithm.name=a3c` of a PPO run with Adam: the same policy, and the same values in units of return."""
    first = PPO(settings=PPOSettings(learning_rate=1e-2), model=MODEL, env=vector_env, seed=0)
    second = build(A3CSettings, vector_env, seed=1)
    train(first, make_sample(vector_env, reward=np.eye(4)[:, :2]))
    second.load_state_dict(first.state_dict())
    observation = torch.randn(5, *vector_env.observation_shape)
    one, other = first.model(observation), second.model(observation)
    torch.testing.assert_close(one.policy.entropy(), other.policy.entropy(), rtol=0, atol=0)
    values = [learner._moments.denormalize(output.value) for learner, output in ((first, one), (second, other))]
    torch.testing.assert_close(*values, check_dtype=False)
    assert second._moments.count == 0
