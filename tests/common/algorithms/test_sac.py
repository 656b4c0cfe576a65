"""SAC: one update against a textbook's, a problem with a known answer, the temperature, and steps that are left out."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.algorithms.api import RunProgress, WorkerContext
from common.algorithms.sac import SAC, SACPolicy, soft_value, temperature_loss
from common.algorithms.settings import SACSettings
from common.envs.spec import ActionSpec
from common.errors import ConfigError, InternalError
from common.models import snapshot
from common.models.spec import ModelSettings
from common.replay.buffer import Transitions
from tests.common.algorithms.conftest import network_weights, random_play

pytestmark = pytest.mark.pure

MODEL = ModelSettings(hidden=(32,))
SMALL = {"replay_capacity": 4_000, "warmup": 0, "minibatch": 4, "samples_per_insert": 0.5, "learning_rate": 1e-2}


def build(env, *, seed=0, model=MODEL, **settings):
    """A learner that takes one gradient step on 4 transitions per message of 8 env steps, unless said otherwise."""
    return SAC(settings=SACSettings(**(SMALL | settings)), model=model, env=env, seed=seed)


def train(algorithm, *samples, env_steps=0):
    """One update, as the learner's loop does it."""
    return algorithm.update(algorithm.ingest(samples), RunProgress(env_steps=env_steps, env_steps_planned=1000, version=0))


# --- one update ---


class Textbook:
    """Algorithm 1 of Haarnoja et al. 2018 in float64, of networks with one hidden layer, written out from its equations."""

    def __init__(self, state, *, learning_rate, critic_learning_rate, tau):
        self.w = {name: value.double().requires_grad_() for name, value in state["parameters"].items()}
        self.targets = {name: value.double() for name, value in state["targets"].items()}
        self.rates, self.tau = {"critics": critic_learning_rate, "actor": learning_rate, "temperature": learning_rate}, tau
        self.moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in self.w.items()}
        self.steps = 0

    def step(self, observation, action, *, reward, discount, following, noise):
        """One gradient step; actions in -1..1, `discount` gamma or 0, noise for the next action and for the present one."""
        self.steps += 1
        alpha = self.w["temperature.log"].exp()
        with torch.no_grad():
            drawn, log_prob = self.policy(following, noise[0])
            least = torch.minimum(*(self.q(self.targets, k, following, drawn) for k in (0, 1)))
            y = reward + discount * (least - alpha * log_prob)
        losses = [0.5 * ((self.q(self.w, k, observation, action) - y) ** 2).mean() for k in (0, 1)]
        self.descend(2.0 * (losses[0] + losses[1]), "critics")
        drawn, log_prob = self.policy(observation, noise[1])
        least = torch.minimum(*(self.q(self.w, k, observation, drawn) for k in (0, 1)))
        gradient = (-alpha * (log_prob.detach() - action.shape[1])).mean()
        self.descend((alpha.detach() * log_prob - least).mean(), "actor")
        self.descend(gradient, "temperature")
        for name, value in self.targets.items():
            value.mul_(1 - self.tau).add_(self.tau * self.w[name].detach())

    def layer(self, w, name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def q(self, w, k, observation, action):
        hidden = self.layer(w, f"critics.{k}.hidden.0", torch.cat([observation, action], 1)).relu()
        return self.layer(w, f"critics.{k}.head", hidden)[:, 0]

    def policy(self, observation, noise):
        outputs = self.layer(self.w, "actor.head", self.layer(self.w, "actor.trunk.hidden.0", observation).relu())
        mean, log_std = outputs[:, : noise.shape[1]], outputs[:, noise.shape[1] :]
        u = mean + log_std.exp() * noise
        density = (-0.5 * ((u - mean) / log_std.exp()) ** 2).exp() / (log_std.exp() * (2 * torch.pi) ** 0.5)
        return u.tanh(), (density / (1 - u.tanh() ** 2)).log().sum(1)

    def descend(self, loss, part):
        """Adam (Kingma and Ba 2015, algorithm 1)."""
        names = [name for name in self.w if name.startswith(part)]
        for name, g in zip(names, torch.autograd.grad(loss, [self.w[name] for name in names]), strict=True):
            m, v = self.moments[name]
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g**2)
            step = m / (1 - 0.9**self.steps) / ((v / (1 - 0.999**self.steps)).sqrt() + 1e-8)
            self.w[name].data.sub_(self.rates[part] * step)


@pytest.mark.parametrize(
    ("rates", "rate", "critic_rate"),
    [
        ({"learning_rate": 1e-3}, 1e-3, 1e-3),
        ({"learning_rate": 1e-3, "critic_learning_rate": 3e-3}, 1e-3, 3e-3),
        ({"learning_rate": 2e-3, "critic_learning_rate": 6e-3, "lr_schedule": "linear"}, 1e-3, 3e-3),  # in the middle of the run
    ],
)
def test_updates_are_those_of_a_textbook(continuous_env, make_sample, rates, rate, critic_rate):
    """The same weights, noise and minibatches for three steps: all parameters, temperature and targets within 1e-6."""
    algorithm = build(continuous_env, seed=3, minibatch=8, samples_per_insert=1, target_rate=0.1, **rates)
    random, noise = torch.Generator().manual_seed(1), torch.Generator().manual_seed(algorithm._generator.initial_seed())
    for parameter in algorithm._nets.parameters():  # heads begin near 0, where little of a mistake would be seen
        parameter.data.add_(torch.empty_like(parameter).normal_(std=0.1, generator=random))
    algorithm.load_parameters(algorithm.state_dict())
    textbook = Textbook(algorithm.state_dict(), learning_rate=rate, critic_learning_rate=critic_rate, tau=0.1)
    low, half_range = torch.tensor([-1.0, 0.0]), torch.tensor([2.0, 5.0])
    for seq in range(3):
        observation, following = torch.randn(2, 8, 2, generator=random)
        unit = torch.empty(8, 2).uniform_(-1, 1, generator=random)
        reward, discount = torch.randn(8, generator=random), 0.9 * (torch.rand(8, generator=random) < 0.7).float()
        rows = Transitions(
            observation=observation.numpy(),
            action=((unit + 1) * half_range + low).numpy(),
            reward=reward.numpy(),
            env_steps=np.ones(8, np.int64),
            discount=discount.numpy(),
            next_observation=following.numpy(),
        )
        algorithm._replay.sample = lambda *_, rows=rows: rows
        metrics = train(algorithm, random_play(continuous_env, make_sample, seq=seq), env_steps=500).metrics
        drawn = [torch.empty(8, 2).normal_(generator=noise).double() for _ in range(2)]
        rest = {"reward": reward.double(), "discount": discount.double(), "following": following.double(), "noise": drawn}
        textbook.step(observation.double(), unit.double(), **rest)
    assert metrics["gradient_steps"] == 1.0
    state = algorithm.state_dict()
    for found, wanted in ((state["parameters"], textbook.w), (state["targets"], textbook.targets)):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name].double(), value.detach(), atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert state["parameters"]["temperature.log"] != 0.0


def test_the_soft_value_counts_the_entropy_by_the_temperature():
    value, log_prob = torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 0.5])
    assert soft_value(value, log_prob, temperature=torch.tensor(0.2)).tolist() == pytest.approx([1.2, 1.9])
    with pytest.raises(InternalError):
        soft_value(value, log_prob.unsqueeze(1), temperature=torch.tensor(0.2))


@pytest.mark.parametrize(("log_prob", "gradient"), [([-1.0, -2.0], 3.5), ([3.0, 5.0], -2.0)])
def test_the_temperature_falls_while_there_is_more_entropy_than_wanted(log_prob, gradient):
    """By hand, H = -2: entropies 1.5 and -4, and no gradient of the policy."""
    temperature, of_policy = torch.tensor(0.7, requires_grad=True), torch.tensor(log_prob, requires_grad=True)
    loss = temperature_loss(temperature, of_policy, target_entropy=-2.0)
    loss.backward()
    assert temperature.grad.item() == pytest.approx(gradient)
    assert loss.item() == pytest.approx(0.7 * gradient)
    assert of_policy.grad is None


# --- learning ---


@pytest.mark.parametrize(("precision", "activation"), [("fp32", "relu"), ("bf16", "silu")])
def test_it_learns_the_best_action_where_that_is_known(continuous_env, make_sample, precision, activation):
    """One step, reward -(a_0 - (o_0 - 0.5))^2 - (a_1 - 0.3)^2 with a in halves of the range.

    The policy of the highest soft value, of density proportional to e^(reward / alpha), is there a Gaussian of variance
    alpha / 2 in each component, whose entropy is log(pi e alpha).
    """

    def reward(observation, unit):
        return -((unit[..., 0] - (observation[..., 0] - 0.5)) ** 2) - (unit[..., 1] - 0.3) ** 2

    model = MODEL.model_copy(update={"activation": activation})
    algorithm = build(continuous_env, model=model, minibatch=64, samples_per_insert=64, precision=precision)
    ends = {"terminated": np.ones((16, 4))}
    for seq in range(12):
        result = train(algorithm, random_play(continuous_env, make_sample, seq=seq, reward=reward, length=16, num_envs=4, **ends))
    context = WorkerContext(index=0, workers=1, num_envs=3)
    policy = SACPolicy(settings=SACSettings(), model=model, env=continuous_env, precision="fp32", seed=0, context=context)
    policy.load(1, snapshot.to_tensor(snapshot.flatten(algorithm.model, "fp32")), env_steps=10_000)
    observation = torch.tensor([[0.1, 0.5], [0.5, 0.5], [0.9, 0.5]])
    action = policy.act(observation, greedy=True)["action"]
    best = torch.tensor([[1.0 + 2.0 * (-0.4), 6.5], [1.0, 6.5], [1.0 + 2.0 * 0.4, 6.5]])
    assert ((action - best) / torch.tensor([2.0, 5.0])).abs().max() < 0.15
    assert result.metrics["gradient_steps"] == 64.0
    alpha = result.metrics["temperature"]
    assert alpha < 0.2  # from 1: there is more entropy than -2 nats
    assert result.metrics["entropy"] == pytest.approx(np.log(np.pi * np.e * alpha), abs=0.15)


def test_each_step_moves_everything_and_the_targets_by_their_rate(continuous_env, make_sample):
    algorithm = build(continuous_env, target_rate=0.25)
    nets, targets = algorithm._nets, algorithm._targets
    parts = (nets.critics, nets.actor, nets.temperature, targets)
    before = [network_weights(net) for net in parts]
    train(algorithm, random_play(continuous_env, make_sample, seq=0))
    assert not any(torch.equal(a, network_weights(net)) for a, net in zip(before, parts, strict=True))
    assert torch.allclose(network_weights(targets), 0.25 * network_weights(nets.critics) + 0.75 * before[-1], atol=1e-6)


# --- state ---


def test_the_weights_of_another_run_bring_their_temperature_and_begin_the_targets(continuous_env, make_sample):
    source, algorithm = build(continuous_env), build(continuous_env, seed=1)
    train(source, random_play(continuous_env, make_sample, seq=0))
    algorithm.load_parameters(source.state_dict())
    assert torch.equal(network_weights(algorithm._nets), network_weights(source._nets))
    assert torch.equal(network_weights(algorithm._targets), network_weights(source._nets.critics))


# --- steps that are left out ---


@pytest.mark.parametrize("steep", ["critics", "actor", "temperature"])
def test_no_network_moves_along_a_gradient_that_is_not_finite(continuous_env, make_sample, steep):
    """The loss is finite; what moved before in the step stays moved, and what comes after stays as it was."""
    algorithm = build(continuous_env)
    net = getattr(algorithm._nets, steep)
    next(p for p in net.parameters() if p.requires_grad).register_hook(lambda gradient: gradient * torch.inf)
    later = [algorithm._nets.actor, algorithm._nets.temperature, algorithm._targets]
    watched = [algorithm._nets.critics, *later] if steep == "critics" else later
    before = [network_weights(each) for each in watched]
    metrics = train(algorithm, random_play(continuous_env, make_sample, seq=0)).metrics
    assert (metrics["gradient_steps"], metrics["nonfinite_steps"]) == (0.0, 1.0)
    assert all(torch.equal(a, network_weights(each)) for a, each in zip(before, watched, strict=True))


@pytest.mark.parametrize(
    ("action", "found", "fix"),
    [
        (ActionSpec(choices=(5,), shape=()), "5 discrete actions", "dqn"),
        (ActionSpec(choices=(2, 3), shape=(2,)), "discrete actions", "ppo"),
        (ActionSpec(shape=(1,), low=(-np.inf,), high=(np.inf,)), "1 of 1 components without finite bounds, low < high", "ppo"),
        (ActionSpec(shape=(2,), low=(0.0, -1.0), high=(0.0, 1.0)), "1 of 2 components without finite bounds, low < high", "ppo"),
    ],
)
def test_discrete_and_unbounded_actions_are_refused_before_memory_is_allocated(continuous_env, action, found, fix):
    """One line: found, wanted, an algorithm that can."""
    with pytest.raises(ConfigError, match=f"sac needs continuous actions: found .*{found}, wanted .*; .*name={fix}") as refused:
        build(replace(continuous_env, action=action), replay_capacity=10**15)
    assert "\n" not in str(refused.value)
