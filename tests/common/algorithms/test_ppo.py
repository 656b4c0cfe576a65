"""The learner's side of PPO: the ratio, a problem with a known answer, resuming, and data that must do no harm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from common.algorithms.api import Progress
from common.algorithms.policy import ActorCriticPolicy
from common.algorithms.ppo import PPO
from common.algorithms.settings.ppo import PPOSettings
from common.errors import InternalError, ResourceError
from common.models import snapshot
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

MODEL = ModelSettings(conv=((4, 4, 2),), hidden=(16,))


def build(env, *, seed=0, model=MODEL, **settings):
    """A learner; minibatches of 4 env steps and one epoch unless said otherwise."""
    return PPO(settings=PPOSettings(**({"minibatch": 4, "epochs": 1} | settings)), model=model, env=env, seed=seed)


def at(version=0, env_steps=0):
    """A point of a run of 1000 env steps."""
    return Progress(env_steps=env_steps, env_steps_planned=1000, version=version)


def train(algorithm, *samples, progress=None):
    """One update, as the learner's loop does it."""
    return algorithm.update(algorithm.collate(samples), progress or at())


def weights(algorithm):
    """All parameters, as published."""
    return snapshot.flatten(algorithm.model, "fp32")


def act_on(algorithm, env, sample, make_sample, seed=0):
    """The same rollout with the actions that the newest snapshot chooses, as an actor would send it."""
    policy = ActorCriticPolicy(model=MODEL, env=env, precision="fp32", seed=seed)
    policy.load(0, snapshot.to_tensor(snapshot.flatten(algorithm.model, "fp32")), env_steps=0)
    batch = algorithm.collate([sample])
    acted = [policy.act(observation) for observation in batch.observation[:-1]]
    arrays = {name: np.stack([step[name].numpy() for step in acted]) for name in ("action", "log_prob")}
    length, num_envs = sample.arrays["reward"].shape
    return make_sample(env, length=length, num_envs=num_envs, **(dict(sample.arrays) | arrays))


def test_on_fresh_data_the_ratio_is_1(image_env, make_sample):
    """Snapshot to the actor, experience back, first minibatch: to 1e-5, or the recorded numbers are not what acted."""
    algorithm = build(image_env, learning_rate=1e-2)
    train(algorithm, make_sample(image_env, reward=np.eye(4)[:, :2]))  # away from the initial, nearly uniform policy
    fresh = act_on(algorithm, image_env, make_sample(image_env, seed=5), make_sample)
    assert train(algorithm, fresh).metrics["first_ratio_error"] < 1e-5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["constant", "kl_adaptive"])
def test_it_learns_which_action_pays_in_which_context(vector_env, make_sample, precision, schedule):
    """A contextual bandit: action 2 pays where the first number is larger, action 0 where the second is; chance is 1/3."""
    algorithm = build(vector_env, minibatch=64, epochs=4, learning_rate=3e-3, precision=precision, lr_schedule=schedule)
    for round_ in range(25):
        sample = make_sample(vector_env, length=16, num_envs=16, seed=round_, terminated=np.ones((16, 16)))
        sample = act_on(algorithm, vector_env, sample, make_sample, seed=round_)
        right = np.where(sample.arrays["obs"][:-1, :, 0] > sample.arrays["obs"][:-1, :, 1], 2, 0)
        reward = (sample.arrays["action"] == right).astype(np.float32)
        paid = make_sample(vector_env, length=16, num_envs=16, **(dict(sample.arrays) | {"reward": reward}))
        result = train(algorithm, paid)
    assert reward.mean() > 0.9
    assert result.samples == 256
    assert result.metrics["entropy"] < 0.8


def test_a_resumed_run_makes_the_very_same_next_update(image_env, make_sample):
    """Kill and resume from a checkpoint: weights, optimizer, minibatches, statistics and rate, bit for bit."""
    first, second = build(image_env, lr_schedule="kl_adaptive"), build(image_env, seed=99, lr_schedule="kl_adaptive")
    for seed in range(3):
        train(first, make_sample(image_env, seed=seed, reward=np.eye(4)[:, :2] * seed))
    second.load_state_dict(first.state_dict())
    results = [train(one, make_sample(image_env, seed=7, reward=np.ones((4, 2)))) for one in (first, second)]
    assert results[0] == results[1]
    assert np.array_equal(weights(first), weights(second))


def test_a_run_that_has_not_trained_yet_can_be_resumed_too(vector_env, make_sample):
    """A checkpoint at version 0: the optimizer has no state."""
    first, second = build(vector_env), build(vector_env, seed=1)
    second.load_state_dict(first.state_dict())
    assert train(first, make_sample(vector_env)) == train(second, make_sample(vector_env))


def test_a_checkpoint_is_not_changed_by_training_on(vector_env, make_sample):
    """It is written by another thread while the next update runs."""
    algorithm = build(vector_env)
    train(algorithm, make_sample(vector_env))
    state = algorithm.state_dict()
    kept = {name: tensor.clone() for name, tensor in state["parameters"].items()}
    train(algorithm, make_sample(vector_env, seed=1, reward=np.ones((4, 2))))
    assert all(torch.equal(kept[name], tensor) for name, tensor in state["parameters"].items())


def test_a_checkpoint_of_another_network_is_refused_and_changes_nothing(image_env):
    """`--resume` with a changed model section: found and wanted are named, what is equal is not."""
    algorithm, other = build(image_env), build(image_env, model=ModelSettings(conv=((4, 4, 2),), hidden=(8,)))
    before = weights(algorithm)
    with pytest.raises(ResourceError, match=r"another network: found .*'policy_head.weight': \[4, 8\].*\[4, 16\]") as raised:
        algorithm.load_state_dict(other.state_dict())
    assert "conv" not in str(raised.value)
    assert np.array_equal(weights(algorithm), before)


@pytest.mark.parametrize("array", ["reward", "log_prob", "obs"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_numbers_that_are_not_finite_never_reach_the_weights(vector_env, make_sample, array, poison):
    """Should a bad number pass admission: steps are left out and counted, and the next batch trains as if nothing was."""
    algorithm = build(vector_env, minibatch=16, lr_schedule="kl_adaptive")
    bad = np.array(make_sample(vector_env).arrays[array])
    bad[1, 1] = poison
    before = weights(algorithm)
    result = train(algorithm, make_sample(vector_env, **{array: bad}))
    assert result.metrics["nonfinite_steps"] == 1
    assert "policy_loss" not in result.metrics
    assert np.array_equal(weights(algorithm), before)
    healed = train(algorithm, make_sample(vector_env, reward=np.eye(4)[:, :2]))
    assert healed.metrics["nonfinite_steps"] == 0
    assert all(np.isfinite(value) for value in healed.metrics.values())
    assert np.isfinite(weights(algorithm)).all()
    assert not np.array_equal(weights(algorithm), before)


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


def test_a_batch_of_nothing_but_reset_rows_trains_nothing(vector_env, make_sample):
    """One environment, one step, and that was the reset."""
    algorithm = build(vector_env)
    before = weights(algorithm)
    result = train(algorithm, make_sample(vector_env, length=1, num_envs=1, valid=[[False]]))
    assert result.samples == 0
    assert np.array_equal(weights(algorithm), before)


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
    """One slow actor among fast ones: the mean says so."""
    samples = [make_sample(vector_env, version=4), make_sample(vector_env, version=7)]
    assert train(build(vector_env), *samples, progress=at(version=7)).metrics["policy_lag_mean"] == 1.5


def test_a_falling_entropy_bonus_is_that_of_the_progress_of_the_run(vector_env, make_sample):
    """Halfway from 0.4 to 0.2 the update is that of a constant 0.3, and no other."""
    moved = []
    falling = {"entropy_coef": 0.4, "entropy_final": 0.2, "entropy_env_steps": 500}
    for settings in (falling, {"entropy_coef": 0.3}, {"entropy_coef": 0.4}):
        algorithm = build(vector_env, learning_rate=1e-2, **settings)
        torch.nn.init.orthogonal_(algorithm.model.policy_head.weight, generator=torch.Generator().manual_seed(0))
        result = train(algorithm, make_sample(vector_env, reward=np.eye(4)[:, :2]), progress=at(env_steps=250))
        moved.append((result.metrics["entropy_coef"], weights(algorithm)))
    assert [coef for coef, _ in moved] == pytest.approx([0.3, 0.3, 0.4])
    assert np.allclose(moved[0][1], moved[1][1])
    assert not np.allclose(moved[0][1], moved[2][1])


def test_a_linear_rate_follows_the_progress_of_the_run(vector_env, make_sample):
    """At the planned end the rate is 0 and the weights stand still."""
    algorithm = build(vector_env, learning_rate=1e-3, lr_schedule="linear")
    assert train(algorithm, make_sample(vector_env), progress=at(env_steps=250)).metrics["learning_rate"] == pytest.approx(7.5e-4)
    before = weights(algorithm)
    assert train(algorithm, make_sample(vector_env, seed=1), progress=at(env_steps=1000)).metrics["learning_rate"] == 0.0
    assert np.array_equal(weights(algorithm), before)


@pytest.mark.parametrize(("schedule", "rate"), [("constant", 1e-4), ("linear", 1e-4), ("kl_adaptive", 1e-3)])
def test_a_resumed_run_follows_a_learning_rate_that_was_changed(vector_env, make_sample, schedule, rate):
    """Whoever resumes with a smaller rate wants it used; only one that adapts itself goes on from where it had come to."""
    before = build(vector_env, learning_rate=1e-3, lr_schedule=schedule)
    after = build(vector_env, learning_rate=1e-4, lr_schedule=schedule)
    after.load_state_dict(before.state_dict())
    assert train(after, make_sample(vector_env)).metrics["learning_rate"] == pytest.approx(rate)


@pytest.mark.parametrize("steps", [0, 3])
def test_an_update_that_is_told_to_stop_leaves_out_the_steps_to_come(vector_env, make_sample, steps):
    """SIGTERM during an update of a hundred epochs: what was done stands, nothing is added."""
    cut, untouched = build(vector_env, epochs=100), build(vector_env)
    asked = iter(range(1_000_000))
    sample = make_sample(vector_env, length=16, reward=np.random.default_rng(0).random((16, 2)))
    result = cut.update(cut.collate([sample]), at(), lambda: next(asked) >= steps)
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


def test_with_clipped_rewards_only_the_sign_counts(vector_env, make_sample):
    """Breakout's bricks of 1, 4 and 7 points."""
    outcomes = []
    for clip, scale in ((True, 1.0), (True, 7.0), (False, 7.0)):
        algorithm = build(vector_env, clip_reward=clip, normalize_advantage=False, normalize_value=False)
        train(algorithm, make_sample(vector_env, reward=np.eye(4)[:, :2] * scale))
        outcomes.append(weights(algorithm).tobytes())
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] != outcomes[2]


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
    algorithm._step = lambda rows: seen.append(rows.observation) or step(rows)
    train(algorithm, make_sample(vector_env, length=5))
    assert [len(rows) for rows in seen] == [5, 5, 5, 5]
    assert len(torch.cat(seen[:2]).unique(dim=0)) == len(torch.cat(seen[2:]).unique(dim=0)) == 10
    assert not torch.equal(torch.cat(seen[:2]), torch.cat(seen[2:]))


def test_a_value_head_that_keeps_its_last_axis_is_refused(vector_env, make_sample):
    """The (N, 1) against (N,) class of mistake cannot pass unseen."""
    algorithm = build(vector_env)
    forward = algorithm.model.forward
    algorithm.model.forward = lambda observation: forward(observation)._replace(value=forward(observation).value[:, None])
    with pytest.raises((InternalError, RuntimeError)):
        train(algorithm, make_sample(vector_env))


def test_an_adaptive_rate_outside_its_bounds_is_refused_with_the_reason():
    """A preset that mixes up two schedules."""
    with pytest.raises(ValidationError, match=r"learning_rate 0.1 is outside 1e-06..0.01, where kl_adaptive would move it"):
        PPOSettings(lr_schedule="kl_adaptive", learning_rate=0.1)
    assert PPOSettings(lr_schedule="constant", learning_rate=0.1).learning_rate == 0.1


def test_calibration_is_not_trained_away_and_survives_a_resume(image_env, make_sample):
    """The means of example frames stay as they were, update after update, and come back from a checkpoint."""
    model = MODEL.model_copy(update={"normalize_observation": True})
    first, second = build(image_env, model=model), build(image_env, model=model)
    first.calibrate(torch.randint(0, 256, (9, 10, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    mean = first.model.trunk.normalisation.mean.clone()
    train(first, make_sample(image_env))
    second.load_state_dict(first.state_dict())
    for algorithm in (first, second):
        assert torch.equal(algorithm.model.trunk.normalisation.mean, mean)
