"""The learner's side of TD3: a problem with a known answer, policy delay and Polyak averaging."""

import numpy as np
import pytest
import torch

from common.algorithms.api import RunProgress, WorkerContext
from common.algorithms.settings import TD3Settings
from common.algorithms.td3 import TD3, NoisyPolicy
from common.models import snapshot
from common.models.spec import ModelSettings
from tests.common.algorithms.conftest import network_weights, random_play, spread

pytestmark = pytest.mark.pure

MODEL = ModelSettings(hidden=(32,))
SMALL = {"replay_capacity": 4_000, "warmup": 0, "minibatch": 4, "samples_per_insert": 0.5, "learning_rate": 1e-2}


def build(env, *, seed=0, model=MODEL, **settings):
    """A learner that takes one gradient step on 4 transitions per message of 8 env steps, unless said otherwise."""
    return TD3(settings=TD3Settings(**(SMALL | settings)), model=model, env=env, seed=seed)


def train(algorithm, *samples, version=0, env_steps=0):
    """One update, as the learner's loop does it."""
    return algorithm.update(algorithm.ingest(samples), RunProgress(env_steps=env_steps, env_steps_planned=1000, version=version))


@pytest.mark.parametrize(("precision", "activation"), [("fp32", "relu"), ("bf16", "silu")])
def test_it_learns_the_best_action_where_that_is_known(continuous_env, make_sample, precision, activation):
    """One step, reward -(a_0 - (o_0 - 0.5))^2 - (a_1 - 0.3)^2 with a in halves of the range: bounds that are not centred."""

    def reward(observation, unit):
        return -((unit[..., 0] - (observation[..., 0] - 0.5)) ** 2) - (unit[..., 1] - 0.3) ** 2

    model = MODEL.model_copy(update={"activation": activation})
    algorithm = build(continuous_env, model=model, minibatch=64, samples_per_insert=64, learning_rate=3e-3, precision=precision)
    ends = {"terminated": np.ones((16, 4))}
    for seq in range(25):
        result = train(algorithm, random_play(continuous_env, make_sample, seq=seq, reward=reward, length=16, num_envs=4, **ends))
    context = WorkerContext(index=0, workers=1, num_envs=3)
    policy = NoisyPolicy(settings=TD3Settings(), model=model, env=continuous_env, precision="fp32", seed=0, context=context)
    policy.load(1, snapshot.to_tensor(snapshot.flatten(algorithm.model, "fp32")), env_steps=0)
    observation = torch.tensor([[0.1, 0.5], [0.5, 0.5], [0.9, 0.5]])
    action = policy.act(observation, greedy=True)["action"]
    best = torch.tensor([[1.0 + 2.0 * (-0.4), 6.5], [1.0, 6.5], [1.0 + 2.0 * 0.4, 6.5]])
    assert ((action - best) / torch.tensor([2.0, 5.0])).abs().max() < 0.15
    assert result.metrics["gradient_steps"] == 64.0
    assert result.metrics["td_abs"] < 0.2


def test_a_value_looks_ahead_by_gamma_and_stops_at_a_terminal_step(continuous_env, make_sample):
    """Reward 1 each step: worth 1 where every step ends the episode, 1 / (1 - gamma) where none does."""
    worth = []
    for ends in (1.0, 0.0):
        algorithm = build(
            continuous_env, minibatch=32, samples_per_insert=64, learning_rate=3e-3, gamma=0.5, target_rate=0.1, policy_delay=1
        )
        ended = {"terminated": np.full((16, 4), ends), "reward": lambda observation, _: np.ones(observation.shape[:2])}
        for seq in range(5):
            result = train(algorithm, random_play(continuous_env, make_sample, seq=seq, length=16, num_envs=4, **ended))
        worth.append(result.metrics["q_mean"])
    assert worth == pytest.approx([1.0, 2.0], abs=0.15)


def test_actor_and_targets_move_only_every_so_many_steps_of_the_critics(continuous_env, make_sample):
    """policy_delay 3: two steps of the critics alone, and the third moves everything."""
    algorithm = build(continuous_env, policy_delay=3)
    nets, targets = algorithm._nets, algorithm._targets
    moved = []
    for seq in range(6):
        before = [network_weights(net) for net in (nets.critics, nets.actor, targets)]
        metrics = train(algorithm, random_play(continuous_env, make_sample, seq=seq)).metrics
        moved.append(
            [not torch.equal(a, network_weights(net)) for a, net in zip(before, (nets.critics, nets.actor, targets), strict=True)]
        )
        assert ("actor_loss" in metrics) == moved[-1][1]
    assert moved == [[True, False, False], [True, False, False], [True, True, True]] * 2


def test_the_targets_follow_all_networks_by_the_rate(continuous_env, make_sample):
    """A quarter of the way at a rate of 0.25, after the networks' own step, for actor and critics."""
    algorithm = build(continuous_env, policy_delay=1, target_rate=0.25)
    train(algorithm, random_play(continuous_env, make_sample, seq=0))
    before = network_weights(algorithm._targets)
    train(algorithm, random_play(continuous_env, make_sample, seq=1))
    wanted = 0.25 * network_weights(algorithm._nets) + 0.75 * before
    assert torch.allclose(network_weights(algorithm._targets), wanted, atol=1e-6)


def test_at_the_start_the_targets_are_the_networks_themselves(continuous_env):
    """Also after the normalisation of observations was fixed, which no optimizer moves."""
    algorithm = build(continuous_env, model=MODEL.model_copy(update={"normalize_observation": True}))
    algorithm.calibrate(torch.randn(100, 2) * 5.0 + 3.0)
    assert torch.equal(network_weights(algorithm._nets), network_weights(algorithm._targets))


def test_no_network_moves_where_one_critic_is_not_finite(continuous_env, make_sample):
    """The step is left out and counted."""
    algorithm = build(continuous_env, policy_delay=1)
    with torch.no_grad():
        algorithm._nets.critics[1].head.bias.fill_(1e25)  # its square is not finite
    before = network_weights(algorithm._nets)
    metrics = train(algorithm, random_play(continuous_env, make_sample, seq=0)).metrics
    assert (metrics["gradient_steps"], metrics["nonfinite_steps"]) == (0.0, 1.0)
    assert torch.equal(network_weights(algorithm._nets), before)


@pytest.mark.parametrize("steep", ["critics", "actor"])
def test_no_network_moves_along_a_gradient_that_is_not_finite(continuous_env, make_sample, steep):
    """The loss is finite, as with a square root of 0 in a user's network."""
    algorithm = build(continuous_env, policy_delay=1)
    net = getattr(algorithm._nets, steep)
    next(p for p in net.parameters() if p.requires_grad).register_hook(lambda gradient: gradient * torch.inf)
    before = network_weights(net)
    metrics = train(algorithm, random_play(continuous_env, make_sample, seq=0)).metrics
    assert (metrics["gradient_steps"], metrics["nonfinite_steps"]) == (0.0, 1.0)
    assert torch.equal(network_weights(net), before)


def test_a_step_that_left_out_the_actor_moves_no_target_and_is_made_up_for_by_the_next(continuous_env, make_sample):
    """The critics moved; the third step trains the actor that the second one left out."""
    algorithm = build(continuous_env, policy_delay=2)
    gradients = iter([torch.inf, 1.0])
    parameter = next(p for p in algorithm._nets.actor.parameters() if p.requires_grad)
    parameter.register_hook(lambda gradient: gradient * next(gradients))
    found = []
    for seq in range(3):
        before = [network_weights(net) for net in (algorithm._nets.critics, algorithm._nets.actor, algorithm._targets)]
        metrics = train(algorithm, random_play(continuous_env, make_sample, seq=seq)).metrics
        after = [network_weights(net) for net in (algorithm._nets.critics, algorithm._nets.actor, algorithm._targets)]
        found.append((metrics["nonfinite_steps"], *(not torch.equal(*pair) for pair in zip(before, after, strict=True))))
    assert found == [(0.0, True, False, False), (1.0, True, False, False), (0.0, True, True, True)]


@pytest.mark.parametrize(("noise", "clip"), [(0.0, 0.5), (0.3, 0.5), (0.3, 0.1)])
def test_the_targets_are_those_of_a_textbook(continuous_env, make_sample, noise, clip):
    """Algorithm 1 of Fujimoto et al. 2018: the smaller of the target critics' values of the target actor's smoothed action."""
    algorithm = build(continuous_env, n_step=3, target_noise=noise, target_noise_clip=clip)
    targets = algorithm._targets
    spread(algorithm._nets, seed=1)
    spread(targets, seed=11)
    ends = {"terminated": np.random.default_rng(0).random((16, 4)) < 0.2}
    algorithm.ingest([random_play(continuous_env, make_sample, seq=0, length=16, num_envs=4, **ends)])
    rows = algorithm._replay.sample(64, np.random.default_rng(0))
    reward, discount, following = map(torch.from_numpy, (rows.reward, rows.discount, rows.next_observation))
    drawn = torch.empty(64, 2).normal_(generator=torch.Generator().manual_seed(algorithm._generator.initial_seed()))
    action = (targets.actor(following) + (noise * drawn).clamp(-clip, clip)).clamp(-1.0, 1.0)
    one, other = (critic(following, action)[:, 0] for critic in targets.critics)
    assert 0 < (one < other).sum() < 64
    assert 0 < (discount == 0.0).sum() < 64
    torch.testing.assert_close(algorithm._td_targets(rows), reward + discount * torch.minimum(one, other))
