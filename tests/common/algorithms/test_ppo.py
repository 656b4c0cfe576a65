"""PPO: the ratio and its clip, a problem with a known answer, schedules, and data that must do no harm."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.algorithms.api import RunProgress
from common.algorithms.ppo import PPO
from common.algorithms.settings import PPOSettings
from common.errors import InternalError
from common.models.spec import ModelSettings
from tests.common.algorithms.conftest import act_on, weights

pytestmark = pytest.mark.pure

MODEL = ModelSettings(conv=((4, 4, 2),), hidden=(16,))


def build(env, *, seed=0, model=MODEL, **settings):
    """A learner; minibatches of 4 env steps and one epoch unless said otherwise."""
    return PPO(settings=PPOSettings(**({"minibatch": 4, "epochs": 1} | settings)), model=model, env=env, seed=seed)


def at(version=0, env_steps=0):
    """A point of a run of 1000 env steps."""
    return RunProgress(env_steps=env_steps, env_steps_planned=1000, version=version)


def train(algorithm, *samples, progress=None):
    """One update, as the learner's loop does it."""
    return algorithm.update(algorithm.ingest(samples), progress or at())


def test_on_fresh_data_the_ratio_is_1(image_env, make_sample):
    """Snapshot to the actor, experience back, first minibatch: to 1e-5, or the recorded numbers are not what acted."""
    algorithm = build(image_env, learning_rate=1e-2)
    train(algorithm, make_sample(image_env, reward=np.eye(4)[:, :2]))  # away from the initial, nearly uniform policy
    fresh = act_on(algorithm, image_env, make_sample(image_env, seed=5), make_sample, model=MODEL)
    assert train(algorithm, fresh).metrics["first_ratio_error"] < 1e-5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["constant", "kl_adaptive"])
def test_it_learns_which_action_pays_in_which_context(vector_env, make_sample, precision, schedule):
    """A contextual bandit: action 2 pays where the first number is larger, action 0 where the second is; chance is 1/3."""
    algorithm = build(vector_env, minibatch=64, epochs=4, learning_rate=3e-3, precision=precision, lr_schedule=schedule)
    for round_ in range(25):
        sample = make_sample(vector_env, length=16, num_envs=16, seed=round_, terminated=np.ones((16, 16)))
        sample = act_on(algorithm, vector_env, sample, make_sample, model=MODEL, seed=round_)
        right = np.where(sample.arrays["obs"][:-1, :, 0] > sample.arrays["obs"][:-1, :, 1], 2, 0)
        reward = (sample.arrays["action"] == right).astype(np.float32)
        paid = make_sample(vector_env, length=16, num_envs=16, **(dict(sample.arrays) | {"reward": reward}))
        result = train(algorithm, paid)
    assert reward.mean() > 0.9
    assert result.samples == 256
    assert result.metrics["entropy"] < 0.8


def test_an_update_without_a_divergence_to_measure_leaves_the_rate(vector_env, make_sample):
    """An update of one step has none, as where half of the rows are reset rows; that of an interrupted update is of a part."""
    few, stopped = (build(vector_env, minibatch=size, epochs=3 - size // 2, lr_schedule="kl_adaptive") for size in (4, 2))
    half = make_sample(vector_env, valid=np.arange(8).reshape(4, 2) < 4)
    for _ in range(3):
        assert train(few, half).metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    asked = iter([False, False, False, True, True])  # of eight steps
    stopped.update(stopped.ingest([make_sample(vector_env)]), at(), lambda: next(asked))
    assert [each.state_dict()["learning_rate"] for each in (few, stopped)] == [PPOSettings().learning_rate] * 2


def test_reset_rows_are_never_trained_on(vector_env, make_sample):
    """Next-step autoreset: whatever the ignored row holds, the update is the same, and it is no sample."""
    valid = np.ones((4, 2), bool)
    valid[2, 0] = False
    ends = np.zeros((4, 2), bool)
    ends[1, 0] = True
    outcomes = []
    for junk in (0.0, 1e6):
        algorithm = build(vector_env)
        reward = np.where(valid, 1.0, junk)
        log_prob = np.where(valid, -1.0, -junk)
        sample = make_sample(vector_env, valid=valid, truncated=ends, reward=reward, log_prob=log_prob)
        outcomes.append((train(algorithm, sample), weights(algorithm).tobytes()))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0].samples == 7


def test_a_cut_episode_bootstraps_from_its_own_last_observation(vector_env, make_sample):
    """Same-step autoreset: o_{t+1} is of the next episode, and what it is must not matter."""
    ends, start = np.zeros((4, 2), bool), np.zeros((5, 2), bool)
    ends[3, 1] = start[4, 1] = True
    outcomes = []
    for first_of_next, last in ((0.0, 1.0), (9.0, 1.0), (0.0, 2.0)):
        obs = np.array(make_sample(vector_env).arrays["obs"])
        obs[4, 1] = first_of_next
        given = {"obs": obs, "truncated": ends, "start": start, "final_obs": [[last, last]], "final_index": [7]}
        algorithm = build(vector_env)
        train(algorithm, make_sample(vector_env, **given))
        outcomes.append(weights(algorithm).tobytes())
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] != outcomes[2]


def test_stale_experience_is_clipped_around_the_newest_policy(vector_env, make_sample):
    """Lag 3 of a plain lag of 2: the ratio starts at 1 though the actor's policy was another; at lag 2 it does not."""
    sample = make_sample(vector_env, log_prob=np.full((4, 2), -2.0), version=4)
    plain = train(build(vector_env), sample, progress=at(version=6))
    decoupled = train(build(vector_env), sample, progress=at(version=7))
    assert plain.metrics["first_ratio_error"] > 0.5
    assert decoupled.metrics["first_ratio_error"] < 1e-5
    assert (plain.metrics["policy_lag_mean"], decoupled.metrics["policy_lag_mean"]) == (2.0, 3.0)


def test_each_actor_of_a_batch_has_its_own_lag(vector_env, make_sample):
    """One slow actor among fast ones raises the mean."""
    samples = [make_sample(vector_env, version=4), make_sample(vector_env, version=7)]
    assert train(build(vector_env), *samples, progress=at(version=7)).metrics["policy_lag_mean"] == 1.5


@pytest.mark.parametrize("schedule", ["constant", "kl_adaptive"])
def test_a_falling_entropy_bonus_is_that_of_the_progress_of_the_run(vector_env, make_sample, schedule):
    """Halfway from 0.4 to 0.2 the update is that of a constant 0.3, and no other."""
    moved = []
    falling = {"entropy_coef": 0.4, "entropy_final": 0.2, "entropy_env_steps": 500}
    for settings in (falling, {"entropy_coef": 0.3}, {"entropy_coef": 0.4}):
        algorithm = build(vector_env, learning_rate=1e-2, lr_schedule=schedule, **settings)
        torch.nn.init.orthogonal_(algorithm.model.policy_head.weight, generator=torch.Generator().manual_seed(0))
        result = train(algorithm, make_sample(vector_env, reward=np.eye(4)[:, :2]), progress=at(env_steps=250))
        moved.append((result.metrics["entropy_coef"], weights(algorithm)))
    assert [coef for coef, _ in moved] == pytest.approx([0.3, 0.3, 0.4])
    assert np.allclose(moved[0][1], moved[1][1])
    assert not np.allclose(moved[0][1], moved[2][1])


@pytest.mark.parametrize(("schedule", "rate"), [("constant", 1e-4), ("linear", 1e-4), ("kl_adaptive", 1e-3)])
def test_a_resumed_run_follows_a_learning_rate_that_was_changed(vector_env, make_sample, schedule, rate):
    """A constant or linear rate follows the new settings; an adaptive one continues from its last value."""
    before = build(vector_env, learning_rate=1e-3, lr_schedule=schedule)
    after = build(vector_env, learning_rate=1e-4, lr_schedule=schedule)
    after.load_state_dict(before.state_dict())
    assert train(after, make_sample(vector_env)).metrics["learning_rate"] == pytest.approx(rate)


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_an_adaptive_rate_begins_anew_after_another_schedule(vector_env, make_sample, schedule):
    """A linear rate is near 0 late in a run. The state of a run by A3C has no rate either."""
    before = build(vector_env, learning_rate=1e-3, lr_schedule=schedule)
    after = build(vector_env, learning_rate=1e-4, lr_schedule="kl_adaptive")
    after.load_state_dict(before.state_dict())
    assert train(after, make_sample(vector_env)).metrics["learning_rate"] == pytest.approx(1e-4)


@pytest.mark.parametrize("steps", [0, 3])
def test_an_update_that_is_stopped_leaves_out_the_steps_to_come(vector_env, make_sample, steps):
    """SIGTERM during an update of a hundred epochs: what was done stands, nothing is added."""
    cut, untouched = build(vector_env, epochs=100), build(vector_env)
    asked = iter(range(1_000_000))
    sample = make_sample(vector_env, length=16, reward=np.random.default_rng(0).random((16, 2)))
    result = cut.update(cut.ingest([sample]), at(), lambda: next(asked) >= steps)
    assert ("policy_loss" in result.metrics) == (steps > 0)
    taken = [int(state["step"]) for state in cut.state_dict()["optimizer"]["adam"].values()]
    assert taken == [steps] * len(taken)
    assert np.array_equal(weights(cut), weights(untouched)) == (steps == 0)
    assert result.metrics["nonfinite_steps"] == 0


def test_an_adaptive_rate_rises_where_the_policy_hardly_moves(vector_env, make_sample):
    """The rate of the next update answers to the KL of this one."""
    algorithm = build(vector_env, learning_rate=1e-5, lr_schedule="kl_adaptive")
    rates = [train(algorithm, make_sample(vector_env, seed=seed)).metrics["learning_rate"] for seed in range(3)]
    assert rates == pytest.approx([1e-5, 1.5e-5, 2.25e-5])


def test_the_kl_divergence_of_an_update_is_not_that_of_the_updates_before_it(vector_env, make_sample):
    """The policy that acted was another one; this update hardly moves, and so the rate rises."""
    algorithm = build(vector_env, learning_rate=1e-5, lr_schedule="kl_adaptive", plain_ratio_lag=2)
    acted = make_sample(vector_env, log_prob=np.full((4, 2), -3.0))
    metrics = [train(algorithm, acted, progress=at(version=1)).metrics for _ in range(2)]
    assert metrics[0]["approx_kl"] < 1e-6
    assert metrics[0]["first_ratio_error"] > 1
    assert metrics[1]["learning_rate"] == pytest.approx(1.5e-5)


def test_normalised_values_make_the_value_loss_blind_to_the_scale_of_rewards(vector_env, make_sample):
    """Returns of hundreds and of thousandths are learned alike."""
    losses = []
    for scale in (1e-2, 1e3):
        sample = make_sample(vector_env, reward=np.random.default_rng(0).random((4, 2)) * scale, terminated=np.ones((4, 2)))
        losses.append(train(build(vector_env, minibatch=16), sample).metrics["value_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_minibatch_is_never_a_small_rest(vector_env, make_sample):
    """10 env steps in minibatches of 4: the batch is cut into nearly equal parts, each step once per epoch."""
    algorithm, seen = build(vector_env, epochs=2), []
    step = algorithm._step
    algorithm._step = lambda part, *more: seen.append(part.rows.observation) or step(part, *more)
    train(algorithm, make_sample(vector_env, length=5))
    assert [len(rows) for rows in seen] == [5, 5, 5, 5]
    assert len(torch.cat(seen[:2]).unique(dim=0)) == len(torch.cat(seen[2:]).unique(dim=0)) == 10
    assert not torch.equal(torch.cat(seen[:2]), torch.cat(seen[2:]))


def test_a_value_head_that_keeps_its_last_axis_is_refused(vector_env, make_sample):
    """The (N, 1) against (N,) class of mistake cannot pass unseen."""
    algorithm = build(vector_env)
    forward = algorithm.model.forward
    algorithm.model.forward = lambda *given: forward(*given)._replace(value=forward(*given).value[:, None])
    with pytest.raises((InternalError, RuntimeError)):
        train(algorithm, make_sample(vector_env))


def test_stale_experience_counts_by_how_much_likelier_its_actions_have_become(vector_env, make_sample):
    """Its weight is pi_prox / mu: of actions that were half as likely twice as much."""
    found = []
    for behaviour in (-2.0, -2.0 - np.log(2.0)):
        algorithm = build(vector_env, minibatch=16, normalize_advantage=False, normalize_value=False)
        sample = make_sample(vector_env, reward=np.eye(4)[:, :2], log_prob=np.full((4, 2), behaviour), version=4)
        found.append(train(algorithm, sample, progress=at(version=7)).metrics["policy_loss"])
    assert abs(found[0]) > 0.01
    assert found[1] == pytest.approx(2 * found[0], rel=1e-4)
