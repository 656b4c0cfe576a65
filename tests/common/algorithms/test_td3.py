"""The learner's side of TD3: a problem with a known answer, delay and Polyak, resuming, and data that must do no harm."""

import copy
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from common.algorithms.api import Place, Progress
from common.algorithms.noisy_policy import NoisyPolicy
from common.algorithms.parts import in_turn
from common.algorithms.settings.td3 import TD3Settings
from common.algorithms.td3 import TD3
from common.envs.spec import ActionSpec
from common.errors import ConfigError, ResourceError
from common.models import snapshot
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

MODEL = ModelSettings(hidden=(32,))
SMALL = {"replay_capacity": 4_000, "warmup": 0, "minibatch": 4, "samples_per_insert": 0.5, "learning_rate": 1e-2}


def build(env, *, seed=0, model=MODEL, **settings):
    """A learner that takes one gradient step on 4 transitions per message of 8 env steps, unless said otherwise."""
    return TD3(settings=TD3Settings(**(SMALL | settings)), model=model, env=env, seed=seed)


def train(algorithm, *samples, version=0, env_steps=0):
    """One update, as the learner's loop does it."""
    return algorithm.update(algorithm.collate(samples), Progress(env_steps=env_steps, env_steps_planned=1000, version=version))


def random_play(env, make_sample, *, seq, reward=None, **shape):
    """A message with actions from all over the range; random rewards, or what `reward(obs, action in -1..1)` gives."""
    rng = np.random.default_rng((seq, 1))  # apart from the observations, which come from `seq`
    sample = make_sample(env, seed=seq, **shape)
    unit = rng.uniform(-1.0, 1.0, sample.arrays["action"].shape)
    low, high = np.array(env.action.low), np.array(env.action.high)
    earned = rng.normal(size=unit.shape[:2]) if reward is None else reward(sample.arrays["obs"][:-1], unit)
    arrays = dict(sample.arrays) | {"action": ((unit + 1) / 2 * (high - low) + low).astype(np.float32)}
    return replace(sample, peer="a", seq=seq, arrays=arrays | {"reward": earned.astype(np.float32)})


def weights(net):
    """All parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


@pytest.mark.parametrize(("precision", "activation"), [("fp32", "relu"), ("bf16", "relu"), ("fp32", "silu"), ("bf16", "silu")])
def test_it_learns_the_best_action_where_that_is_known(continuous_env, make_sample, precision, activation):
    """One step, reward -(a_0 - (o_0 - 0.5))^2 - (a_1 - 0.3)^2 with a in halves of the range: bounds that are not centred."""

    def reward(observation, unit):
        return -((unit[..., 0] - (observation[..., 0] - 0.5)) ** 2) - (unit[..., 1] - 0.3) ** 2

    model = MODEL.model_copy(update={"activation": activation})
    algorithm = build(continuous_env, model=model, minibatch=64, samples_per_insert=64, learning_rate=3e-3, precision=precision)
    ends = {"terminated": np.ones((16, 4))}
    for seq in range(20):
        result = train(algorithm, random_play(continuous_env, make_sample, seq=seq, reward=reward, length=16, num_envs=4, **ends))
    place = Place(index=0, peers=1, num_envs=3)
    policy = NoisyPolicy(settings=TD3Settings(), model=model, env=continuous_env, precision="fp32", seed=0, place=place)
    policy.load(1, snapshot.to_tensor(snapshot.flatten(algorithm.model, "fp32")), env_steps=0)
    observation = torch.tensor([[0.1, 0.5], [0.5, 0.5], [0.9, 0.5]])
    action = policy.act(observation, greedy=True)["action"]
    best = torch.tensor([[1.0 + 2.0 * (-0.4), 6.5], [1.0, 6.5], [1.0 + 2.0 * 0.4, 6.5]])
    assert ((action - best) / torch.tensor([2.0, 5.0])).abs().max() < 0.15
    assert result.metrics["gradient_steps"] == 64.0
    assert result.metrics["td_abs"] < 0.2


@pytest.mark.parametrize("minibatch", [1, 5])
@pytest.mark.parametrize("delay", [1, 2, 3, 7])
def test_written_passes_train_as_recorded_ones_whatever_is_drawn_together(
    continuous_env, make_sample, monkeypatch, delay, minibatch
):
    """All weights after 24 steps of both; with minibatches that have no even halves, or none at all."""
    settings = {"policy_delay": delay, "minibatch": minibatch, "samples_per_insert": float(minibatch)}
    settings |= {"target_rate": 0.2, "learning_rate": 1e-3}
    model = ModelSettings(hidden=(16, 8))
    written = build(continuous_env, model=model, **settings)
    monkeypatch.setattr("common.models.deterministic.perceptron", lambda _: None)
    recorded = build(continuous_env, model=model, **settings)
    for seq in range(3):
        message = random_play(continuous_env, make_sample, seq=seq)
        results = [train(algorithm, message) for algorithm in (written, recorded)]
        assert results[0].metrics["gradient_steps"] == 8.0
        assert results[0].metrics == pytest.approx(results[1].metrics, rel=1e-3, abs=1e-5)
    for found, wanted in ((written._nets, recorded._nets), (written._targets, recorded._targets)):
        assert torch.allclose(weights(found), weights(wanted), atol=1e-5)


@pytest.mark.parametrize(
    ("bound", "allowed", "drawn"),
    [
        ("_MOST_DRAWN", 16, 16),
        ("_MOST_DRAWN_BYTES", 3 * 4 * 2 * (2 * 4), 3),  # of 4 rows with two observations of 2 float32
        ("_MOST_DRAWN_PRODUCTS", 2 * 4 * (5 * 32 + 33), 2),  # of 4 rows with the weights of a critic: 2 + 2 inputs, 32, 1 output
        ("_MOST_DRAWN_PRODUCTS", 1, 1),
    ],
)
def test_many_minibatches_are_drawn_at_once_only_where_they_are_small(continuous_env, monkeypatch, bound, allowed, drawn):
    """What was drawn is trained on before a stop is heeded, and takes memory."""
    monkeypatch.setattr(f"common.algorithms.td3.{bound}", allowed)
    assert build(continuous_env)._together == drawn


def test_both_optimizers_follow_the_schedule_of_the_learning_rate(continuous_env, make_sample):
    """Where it has come to 0 the actor and the critics stand still, though steps are taken."""
    algorithm = build(continuous_env, lr_schedule="linear", policy_delay=1)
    train(algorithm, random_play(continuous_env, make_sample, seq=0))
    before = weights(algorithm._nets)
    last = train(algorithm, random_play(continuous_env, make_sample, seq=1), env_steps=1000)
    assert (last.metrics["learning_rate"], last.metrics["gradient_steps"]) == (0.0, 1.0)
    assert torch.equal(weights(algorithm._nets), before)


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
        before = [weights(net) for net in (nets.critics, nets.actor, targets)]
        metrics = train(algorithm, random_play(continuous_env, make_sample, seq=seq)).metrics
        moved.append(
            [not torch.equal(a, weights(net)) for a, net in zip(before, (nets.critics, nets.actor, targets), strict=True)]
        )
        assert ("actor_loss" in metrics) == moved[-1][1]
    assert moved == [[True, False, False], [True, False, False], [True, True, True]] * 2


def test_the_targets_follow_all_networks_by_the_rate(continuous_env, make_sample):
    """A quarter of the way at a rate of 0.25, after the networks' own step, for actor and critics."""
    algorithm = build(continuous_env, policy_delay=1, target_rate=0.25)
    train(algorithm, random_play(continuous_env, make_sample, seq=0))
    before = weights(algorithm._targets)
    train(algorithm, random_play(continuous_env, make_sample, seq=1))
    wanted = 0.25 * weights(algorithm._nets) + 0.75 * before
    assert torch.allclose(weights(algorithm._targets), wanted, atol=1e-6)


def test_at_the_start_the_targets_are_the_networks_themselves(continuous_env):
    """Also after the normalisation of observations was fixed, which no optimizer moves."""
    algorithm = build(continuous_env, model=MODEL.model_copy(update={"normalize_observation": True}))
    algorithm.calibrate(torch.randn(100, 2) * 5.0 + 3.0)
    assert torch.equal(weights(algorithm._nets), weights(algorithm._targets))


def test_training_leaves_the_normalisation_of_observations_alone(continuous_env, make_sample):
    """It is published with the actor, and fixed once and for all."""
    algorithm = build(continuous_env, policy_delay=1, model=MODEL.model_copy(update={"normalize_observation": True}))
    algorithm.calibrate(torch.randn(100, 2) * 5.0 + 3.0)
    normalisation = algorithm.model.trunk.normalisation
    before = weights(normalisation)
    train(algorithm, random_play(continuous_env, make_sample, seq=0))
    assert torch.equal(weights(normalisation), before)


def test_the_actor_alone_is_published(continuous_env):
    """Peers need neither critics nor targets; what they build takes what is sent."""
    algorithm = build(continuous_env)
    place = Place(index=0, peers=1, num_envs=1)
    policy = NoisyPolicy(settings=TD3Settings(), model=MODEL, env=continuous_env, precision="fp32", seed=0, place=place)
    assert policy.layout == snapshot.Layout.of(algorithm.model).fingerprint
    assert snapshot.Layout.of(algorithm.model).size == 2 * 32 + 32 + 32 * 2 + 2


def test_a_resumed_run_makes_the_very_same_next_update(continuous_env, make_sample):
    """Kill and resume: networks, targets, both optimizers, noise, sampling and the delay, bit for bit, on the same memory."""
    first, second = build(continuous_env), build(continuous_env, seed=99)
    for seq in range(3):
        train(first, random_play(continuous_env, make_sample, seq=seq))
    second.load_state_dict(first.state_dict())
    second._replay, second._pace = copy.deepcopy((first._replay, first._pace))  # not in a checkpoint: it would be filled again
    for seq in (3, 4):
        message = random_play(continuous_env, make_sample, seq=seq)
        results = [train(one, message) for one in (first, second)]
        assert results[0] == results[1]
    assert torch.equal(weights(first._nets), weights(second._nets))
    assert torch.equal(weights(first._targets), weights(second._targets))


def test_a_run_that_has_not_trained_yet_can_be_resumed_too(continuous_env, make_sample):
    """A checkpoint of the warm-up: the optimizers have no state."""
    first, second = build(continuous_env), build(continuous_env, seed=1)
    second.load_state_dict(first.state_dict())
    message = random_play(continuous_env, make_sample, seq=0)
    assert train(first, message) == train(second, message)


def test_a_checkpoint_of_another_network_is_refused_and_changes_nothing(continuous_env):
    """Resumed with a changed model section."""
    algorithm, other = build(continuous_env), build(continuous_env, model=ModelSettings(hidden=(8,)))
    before = weights(algorithm._nets)
    with pytest.raises(ResourceError, match="another network"):
        algorithm.load_state_dict(other.state_dict())
    assert torch.equal(weights(algorithm._nets), before)


def test_numbers_that_are_not_finite_never_reach_the_weights(continuous_env, make_sample):
    """Should a bad number pass admission: the step is left out and counted."""
    algorithm = build(continuous_env, policy_delay=1)
    before = weights(algorithm._nets)
    bad = random_play(continuous_env, make_sample, seq=0, reward=lambda observation, _: np.full(observation.shape[:2], np.nan))
    result = train(algorithm, bad)
    assert result.metrics["nonfinite_steps"] == 1.0
    assert "critic_loss" not in result.metrics
    assert torch.equal(weights(algorithm._nets), before)
    assert torch.equal(weights(algorithm._targets), before)


def test_a_critic_that_is_not_finite_takes_no_step(continuous_env, make_sample):
    """Its step is left out and counted, and the actor is not trained by it."""
    algorithm = build(continuous_env, policy_delay=1)
    with torch.no_grad():
        algorithm._nets.critics[1].head.bias.fill_(1e25)  # its square is not finite
    untouched = algorithm._nets.critics[1], algorithm._nets.actor
    before = [weights(net) for net in untouched]
    metrics = train(algorithm, random_play(continuous_env, make_sample, seq=0)).metrics
    assert (metrics["gradient_steps"], metrics["nonfinite_steps"]) == (0.0, 1.0)
    assert all(torch.equal(then, weights(net)) for then, net in zip(before, untouched, strict=True))


def test_it_is_divided_where_its_passes_are_written_out(continuous_env):
    """Not where a minibatch has no halves; nor a user's own network, which may keep or draw something while it computes."""
    assert len(build(continuous_env).parts) == 2
    assert len(build(continuous_env, minibatch=1).parts) == 1
    assert len(build(continuous_env, model=MODEL.model_copy(update={"activation": "tanh"})).parts) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_does_not_matter_which_part_is_computed_first_between_two_meetings(continuous_env, make_sample, precision):
    """Nothing that one writes is read by the other before they have met: to the bit."""
    found = []
    for run_parts in (in_turn, lambda parts: in_turn(parts[::-1])):
        algorithm = build(continuous_env, minibatch=5, samples_per_insert=5.0, precision=precision)
        algorithm.run_parts = run_parts
        results = [train(algorithm, random_play(continuous_env, make_sample, seq=seq)) for seq in range(4)]
        found.append((results, weights(algorithm._nets), weights(algorithm._targets)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][2], found[1][2])


def test_a_users_own_network_draws_the_same_in_two_runs_of_one_seed(continuous_env, make_sample, monkeypatch):
    """From torch's generator, say."""
    own = ModuleType("own_dropout")
    own.noisy = lambda _shape: torch.nn.Dropout(0.2)
    monkeypatch.setitem(sys.modules, "own_dropout", own)
    model = ModelSettings(entry_point="own_dropout:noisy", hidden=(8,))
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        algorithm = build(continuous_env, model=model, policy_delay=1)
        for seq in range(3):
            train(algorithm, random_play(continuous_env, make_sample, seq=seq))
        found.append(weights(algorithm._nets))
        assert len(algorithm.parts) == 1
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("action", "found"),
    [
        (ActionSpec(n=5, shape=()), "5 discrete actions"),
        (ActionSpec(n=0, shape=(1,), low=(-np.inf,), high=(np.inf,)), r"low \[-inf\], high \[inf\]"),
    ],
)
def test_discrete_and_unbounded_actions_are_refused_before_memory_is_allocated(continuous_env, action, found):
    """CartPole with TD3, a torque without limit: one line, found, wanted, what to do."""
    with pytest.raises(ConfigError, match=f"found {found}, wanted .*; "):
        build(replace(continuous_env, action=action), replay_capacity=10**15)
