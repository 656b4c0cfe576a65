"""Acting, batches, and the network's outputs for a batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from common.algorithms import trajectories
from common.algorithms.batch import collate
from common.algorithms.moments import Moments
from common.algorithms.on_policy import ActorCriticLearner, ActorCriticPolicy, network_outputs, recorded_log_prob, return_inputs
from common.algorithms.registry import ALGORITHMS, build_algorithm
from common.algorithms.settings import PPOSettings
from common.envs.spec import ActionSpec
from common.errors import ConfigError
from common.models import nets, snapshot
from common.models.spec import ModelSettings
from tests.common.algorithms.conftest import images, weights

pytestmark = pytest.mark.pure


# --- acting ---


ACTING_MODEL = ModelSettings(conv=((4, 4, 2),), hidden=(8,))


def acting(env, precision="fp32", seed=0):
    """A policy with weights of a learner, far enough from uniform to distinguish actions."""
    net = nets.build_actor_critic(ACTING_MODEL, env, seed=3)
    with torch.no_grad():
        net.policy_head.weight.mul_(200.0)
    net.requires_grad_(requires_grad=False)
    policy = ActorCriticPolicy(model=ACTING_MODEL, env=env, precision=precision, seed=seed)
    policy.load(4, snapshot.to_tensor(snapshot.flatten(net, precision)), env_steps=0)
    return net, policy


def test_the_log_probability_is_that_of_the_weights_that_acted(image_env):
    """Recorded by the actor, recomputed by the learner from the same snapshot: the ratio is 1."""
    net, policy = acting(image_env)
    acted = policy.act(images(image_env))
    again = net(images(image_env)).policy.log_prob(acted["action"])
    torch.testing.assert_close(acted["log_prob"], again, atol=1e-5, rtol=0)
    assert policy.version == 4
    assert len(acted["action"].unique()) > 1


def test_in_bfloat16_the_recorded_numbers_are_those_of_the_rounded_weights(image_env):
    """A bf16 actor: near the learner's float32, and float32 on the wire."""
    net, policy = acting(image_env, "bf16")
    acted = policy.act(images(image_env))
    again = net(images(image_env)).policy.log_prob(acted["action"])
    assert acted["log_prob"].dtype == torch.float32
    torch.testing.assert_close(acted["log_prob"], again, atol=5e-2, rtol=0)


def test_greedy_takes_the_likeliest_action(image_env):
    """The evaluator's greedy mode."""
    net, policy = acting(image_env)
    acted = policy.act(images(image_env), greedy=True)
    assert torch.equal(acted["action"], net(images(image_env)).policy.log_probs.argmax(-1))


def test_the_seed_decides_the_actions(image_env):
    """Actors of one run draw from streams of their own; the same actor started again draws the same."""
    actions = [acting(image_env, seed=seed)[1].act(images(image_env))["action"] for seed in (1, 1, 2)]
    assert torch.equal(actions[0], actions[1])
    assert not torch.equal(actions[0], actions[2])


def test_continuous_actions_are_recorded_unclipped(vector_env):
    """The bounds are the environment's affair: the log-probability is of what was drawn."""
    env = dataclasses.replace(vector_env, action=ActionSpec(shape=(2,), low=(-0.1, -0.1), high=(0.1, 0.1)))
    net, policy = acting(env)
    observation = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    acted = policy.act(observation)
    assert acted["action"].abs().max() > 0.1
    torch.testing.assert_close(acted["log_prob"], net.policy(observation)[0].log_prob(acted["action"]))


def test_what_is_recorded_has_the_declared_shape():
    """The schema's array for what `act` adds."""
    (spec,) = recorded_log_prob(length=5, num_envs=3)
    assert (spec.name, spec.dtype, spec.shape) == ("log_prob", "float32", (5, 3))


# --- batches ---


def test_actors_stand_side_by_side_in_the_order_of_their_messages(vector_env, make_sample):
    """Two actors of different width, read-only memory, vectors without a stack."""
    first = make_sample(vector_env, num_envs=2, version=5, seed=1, reward=np.full((4, 2), 1.0))
    second = make_sample(vector_env, num_envs=3, version=7, seed=2, reward=np.full((4, 3), 2.0))
    batch = collate([first, second], vector_env)
    assert batch.observation.shape == (5, 5, 2)
    assert torch.equal(batch.observation[:, 2:], torch.tensor(second.arrays["obs"]))
    assert batch.reward[0].tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert batch.version.tolist() == [5, 5, 7, 7, 7]
    assert (batch.action.dtype, batch.valid.dtype) == (torch.int64, torch.bool)


def test_stacks_are_rebuilt_from_frames_and_end_at_the_start_of_an_episode(image_env, make_sample):
    """Every stack written out frame by frame: zero where the frame is older than the last start."""
    start = np.zeros((5, 2), bool)
    start[3, 1] = True
    sample = make_sample(image_env, start=start)
    observation = collate([sample], image_env).observation
    frames = torch.tensor(sample.arrays["obs"])
    for t in range(5):
        for b in range(2):
            kept = min(3, t - 3 + 1) if b == 1 and t >= 3 else 3
            expected = frames[t : t + 3, b].clone()
            expected[: 3 - kept] = 0
            assert torch.equal(observation[t, b], expected)


def test_the_last_observation_of_a_cut_episode_is_stacked_on_what_came_before_it(image_env, make_sample):
    """Same-step autoreset, two actors: one episode three steps old, one that had only just begun."""
    last = np.full((1, 10, 12), 200, np.uint8)
    first = make_sample(image_env, num_envs=2, seed=1, final_obs=last, final_index=[2 * 2 + 1])  # t=2, b=1
    start = np.zeros((5, 1), bool)
    start[1] = True
    second = make_sample(image_env, num_envs=1, seed=2, start=start, final_obs=last + 1, final_index=[1])  # t=1, b=0
    batch = collate([first, second], image_env)
    assert batch.final_index.tolist() == [2 * 3 + 1, 1 * 3 + 2]
    frames = first.arrays["obs"][:, 1]
    assert np.array_equal(batch.final_observation[0].numpy(), np.stack([frames[3], frames[4], last[0]]))
    begun = second.arrays["obs"][3, 0]
    assert np.array_equal(batch.final_observation[1].numpy(), np.stack([np.zeros_like(begun), begun, last[0] + 1]))


def test_a_vector_without_stack_is_its_own_last_observation(vector_env, make_sample):
    """CartPole truncated at 500 steps under same-step autoreset."""
    sample = make_sample(vector_env, final_obs=[[3.0, 4.0]], final_index=[7])
    batch = collate([sample], vector_env)
    assert batch.final_observation.tolist() == [[3.0, 4.0]]
    assert batch.final_index.tolist() == [7]


def test_a_single_image_keeps_its_stack_axis(image_env, make_sample):
    """frame_stack 1 on images: the convolutions still want a channel."""
    env = dataclasses.replace(image_env, frame_stack=1)
    batch = collate([make_sample(env, final_obs=np.ones((1, 10, 12)), final_index=[0])], env)
    assert batch.observation.shape == (5, 2, 1, 10, 12)
    assert batch.final_observation.shape == (1, 1, 10, 12)


# --- evaluation ---


MODEL = ModelSettings(conv=((4, 4, 2),), hidden=(16,))
PLAIN = Moments()


@pytest.fixture
def scene(image_env, make_sample):
    """A network, and a batch in which one episode is cut while the next begins at once (same-step autoreset)."""
    ends, start = np.zeros((4, 2), bool), np.zeros((5, 2), bool)
    ends[1, 1] = start[2, 1] = True
    final = np.full((1, 10, 12), 77)
    sample = make_sample(image_env, truncated=ends, start=start, final_obs=final, final_index=[3], action=[[0, 3]] * 4)
    net = nets.build_actor_critic(MODEL, image_env, seed=1)
    torch.nn.init.orthogonal_(net.policy_head.weight, generator=torch.Generator().manual_seed(0))
    return net, collate([sample], image_env)


def test_each_row_is_evaluated_by_its_own_observation(scene):
    """Row (t, b) of the answer belongs to o_t of environment b, whatever lies beside it in the pass."""
    net, batch = scene
    seen = network_outputs(net, batch, moments=PLAIN, precision="fp32")
    for t in range(4):
        policy, value, _ = net(batch.observation[t])
        torch.testing.assert_close(seen.normalized_value[t], value)
        torch.testing.assert_close(seen.value[t], value.detach())
        torch.testing.assert_close(seen.log_prob[t], policy.log_prob(batch.action[t]))
        torch.testing.assert_close(seen.entropy[t], policy.entropy())


def test_what_followed_a_cut_episode_is_its_own_last_observation(scene):
    """V(o_{t+1}) elsewhere; and the last row looks at o_T."""
    net, batch = scene
    seen = network_outputs(net, batch, moments=PLAIN, precision="fp32")
    with torch.no_grad():
        wanted = torch.stack([net(batch.observation[t + 1]).value for t in range(4)])
        wanted[1, 1] = net(batch.final_observation).value[0]
    torch.testing.assert_close(seen.next_value, wanted)


def test_only_what_is_trained_carries_gradient(scene):
    """Targets are made of values: a gradient through them would train the value towards itself."""
    net, batch = scene
    seen = network_outputs(net, batch, moments=PLAIN, precision="fp32")
    assert [tensor.requires_grad for tensor in seen] == [True, True, True, False, False, False]


def test_values_are_in_units_of_return_and_the_head_in_its_own(scene):
    """Targets of mean 5 and deviation 2 were trained as 0 and 1."""
    net, batch = scene
    seen = network_outputs(net, batch, moments=Moments.of(torch.tensor([3.0, 7.0])), precision="fp32")
    torch.testing.assert_close(seen.value, seen.normalized_value.detach() * 2.0 + 5.0)


def test_parts_of_bounded_size_give_the_same_as_one_pass(scene, monkeypatch):
    """A batch that is no multiple of the part, in parts of 3."""
    net, batch = scene
    whole = network_outputs(net, batch, moments=PLAIN, precision="fp32")
    monkeypatch.setattr(trajectories, "_FORWARD_ROWS", 3)
    for one, other in zip(whole, network_outputs(net, batch, moments=PLAIN, precision="fp32"), strict=True):
        torch.testing.assert_close(one, other)


def test_bf16_rounds_the_arithmetic_and_little_else(scene):
    """Log-probabilities come out in float32 and near."""
    net, batch = scene
    exact, rounded = (network_outputs(net, batch, moments=PLAIN, precision=precision) for precision in ("fp32", "bf16"))
    assert rounded.log_prob.dtype == torch.float32
    torch.testing.assert_close(rounded.log_prob, exact.log_prob, rtol=0.0, atol=0.05)
    assert not torch.equal(rounded.log_prob, exact.log_prob)


def test_rewards_are_clipped_to_their_sign_where_asked(vector_env, make_sample):
    """Breakout's bricks of 1, 4 and 7 points."""
    batch = collate([make_sample(vector_env, reward=[[7.0, -4.0]] * 4)], vector_env)
    seen = network_outputs(
        nets.build_actor_critic(ModelSettings(hidden=(4,)), vector_env), batch, moments=PLAIN, precision="fp32"
    )
    assert return_inputs(batch, seen, clip_reward=False)["reward"].tolist() == [[7.0, -4.0]] * 4
    assert return_inputs(batch, seen, clip_reward=True)["reward"].tolist() == [[1.0, -1.0]] * 4


# --- value targets ---

ALL = torch.ones(16, 16, dtype=torch.bool)


def targets_of_updates(*, mean, std, updates):
    """Value targets [16, 16] of each update."""
    generator = torch.Generator().manual_seed(updates)
    return [torch.randn(16, 16, generator=generator) * std + mean for _ in range(updates)]


def learner(env):
    """A learner that was not trained yet."""
    return ActorCriticLearner(settings=PPOSettings(), model=ModelSettings(hidden=(8,)), env=env, seed=0)


def test_value_targets_are_normalised_by_the_returns_of_today(vector_env):
    """300 updates with returns near 0, then 100 with returns near 2000: the first 300 do not count any more."""
    trained = learner(vector_env)
    updates = targets_of_updates(mean=0.0, std=1.0, updates=300) + targets_of_updates(mean=2000.0, std=40.0, updates=100)
    for target in updates:
        trained.move_value_units(target, ALL)
    normalised = trained._moments.normalize(updates[-1])
    assert normalised.mean().abs() < 0.5
    assert 0.2 < normalised.std() < 2.0


def test_values_in_units_of_return_stay_the_same_when_their_units_move(vector_env):
    """PopArt: the outputs of the head follow its units."""
    trained, observation = learner(vector_env), torch.randn(5, 2)
    values = []
    for target in targets_of_updates(mean=5.0, std=3.0, updates=1) + targets_of_updates(mean=500.0, std=80.0, updates=3):
        trained.move_value_units(target, ALL)
        values.append(trained._moments.denormalize(trained.model(observation).value))
    assert trained._moments.mean > 50.0
    torch.testing.assert_close(values[-1], values[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["ppo", "impala", "a3c", "a3c-grad"])
def test_values_of_loaded_weights_stay_what_they_are(vector_env, name):
    """Weights of a run without units of their own, and of one with: V is the same as there, also after the units have moved."""
    observation = torch.randn(5, 2)

    def value(algorithm):
        return algorithm._moments.denormalize(algorithm.model(observation).value)

    plain, moved = learner(vector_env), learner(vector_env)
    for source in (plain, moved):  # an optimizer that has stepped
        source.model.value_head.weight.grad = torch.ones_like(source.model.value_head.weight)
        source._optimizer.step()
    for target in targets_of_updates(mean=200.0, std=30.0, updates=3):
        moved.move_value_units(target, ALL)
    for normalize in (False, True) if "normalize_value" in ALGORITHMS[name].settings.model_fields else (None,):
        section = ALGORITHMS[name].settings(**({} if normalize is None else {"normalize_value": normalize}))
        for source in (plain, moved):
            loaded = build_algorithm(section, model=ModelSettings(hidden=(8,)), env=vector_env, seed=1)
            if normalize and name != "ppo" and source is plain:
                with pytest.raises(ConfigError, match=r"values of these weights are in units of return: .*normalize_value=false"):
                    loaded.load_parameters(source.state_dict())
                continue
            loaded.load_parameters(source.state_dict())
            torch.testing.assert_close(value(loaded), value(source), rtol=1e-4, atol=1e-3)
            if normalize and name == "ppo":
                loaded.move_value_units(torch.randn(16, 16) * 30 + 200, ALL)
                torch.testing.assert_close(value(loaded), value(source), rtol=1e-4, atol=1e-3)


def test_an_algorithm_without_the_setting_keeps_its_units_at_a_resume(vector_env):
    """One of the user's own, whose section need not have `normalize_value`."""
    observation, section = torch.randn(5, 2), ALGORITHMS["a3c-grad"].settings()
    built = [ActorCriticLearner(settings=section, model=ModelSettings(hidden=(8,)), env=vector_env, seed=seed) for seed in (0, 1)]
    built[0].normalize_targets(torch.randn(16, 16) * 30 + 200, ALL)
    built[1].load_state_dict(built[0].state_dict())
    values = [each._moments.denormalize(each.model(observation).value) for each in built]
    torch.testing.assert_close(*values, rtol=0, atol=0)
    for each in built:
        each.normalize_targets(torch.full((16, 16), 200.0), ALL)
    values = [each._moments.denormalize(each.model(observation).value) for each in built]
    torch.testing.assert_close(*values, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_targets_that_are_not_finite_move_no_units(vector_env, bad):
    trained = learner(vector_env)
    trained.move_value_units(torch.full((16, 16), 3.0), ALL)
    before = weights(trained), trained._moments
    trained.move_value_units(torch.full((16, 16), bad), ALL)
    assert np.array_equal(weights(trained), before[0])
    assert trained._moments is before[1]
