"""Optimizers, gradient steps, schedules, moments, and the state of a checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn

from common.algorithms import optim
from common.algorithms.api import RunProgress
from common.algorithms.moments import Moments
from common.algorithms.settings import DQNSettings, ImpalaSettings
from common.errors import ResourceError
from common.models import snapshot

pytestmark = pytest.mark.pure


# --- optimizers ---


def weight(net):
    """The only one."""
    return net.weight.item()


def one_weight(value=1.0):
    """A network of one weight."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, value)
    return net


def step(net, optimizer, gradient):
    """One step along a given gradient."""
    net.weight.grad = torch.full((1, 1), gradient)
    optimizer.step()


def test_rmsprop_begins_at_1_and_has_its_epsilon_inside_the_root():
    """Two steps by hand: g2 = 0.99 * 1 + 0.01 * 4 = 1.03, then 0.99 * 1.03 + 0.01 * 1."""
    net = one_weight()
    optimizer = optim.build_optimizer("rmsprop", net, lr=0.1, eps=0.5)
    step(net, optimizer, 2.0)
    after_one = 1.0 - 0.1 * 2.0 / math.sqrt(1.03 + 0.5)
    assert weight(net) == pytest.approx(after_one)
    step(net, optimizer, -1.0)
    assert weight(net) == pytest.approx(after_one + 0.1 / math.sqrt(0.99 * 1.03 + 0.01 + 0.5))


def test_radam_is_torchs_own_and_leaves_out_a_step_that_is_not_finite():
    """Past the five steps of plain momentum; what is left out is not counted either."""
    nets = [one_weight(), one_weight()]
    own, theirs = optim.build_optimizer("radam", nets[0], lr=0.1, eps=1e-8), torch.optim.RAdam(nets[1].parameters(), lr=0.1)
    for number in range(9):
        gradient = 0.3 * number - 0.7
        step(nets[1], theirs, gradient)
        nets[0].weight.grad = torch.full((1, 1), gradient)
        optim.step(own, lr=0.1, finite=torch.tensor(1.0))
        nets[0].weight.grad = torch.full((1, 1), math.nan)
        optim.step(own, lr=0.1, finite=torch.tensor(math.nan))
    assert weight(nets[0]) == weight(nets[1]) != 1.0
    assert own.state[nets[0].weight]["step"] == 9


def test_a_parameter_without_a_gradient_stands_still():
    """Parameters that are not trained (means of observations) have none."""
    net = one_weight()
    optim.build_optimizer("rmsprop", net, lr=0.1, eps=0.1).step()
    assert weight(net) == 1.0


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_a_restored_optimizer_takes_the_very_same_step(name):
    """Its memory of past gradients comes back; that of a network laid out otherwise in memory too."""
    first, second = (nn.Conv2d(2, 3, 2).to(memory_format=layout) for layout in (torch.channels_last, torch.contiguous_format))
    second.load_state_dict(first.state_dict())
    optimizer, restored = (optim.build_optimizer(name, net, lr=0.1, eps=1e-5) for net in (first, second))

    def along(net, made, seed):
        for parameter in net.parameters():
            parameter.grad = torch.empty_like(parameter).copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            )
        made.step()

    along(first, optimizer, 0)
    second.load_state_dict(first.state_dict())
    snapshot.restore_optimizer(restored, second, snapshot.optimizer_state(optimizer, first))
    along(first, optimizer, 1)
    along(second, restored, 1)
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_a_step_that_is_not_finite_is_left_out_and_the_optimizer_does_not_remember_it(name, bad):
    """Neither one whose loss is finite and whose gradient is not, nor the reverse."""
    net, other = one_weight(), one_weight()
    optimizer, undisturbed = (optim.build_optimizer(name, each, lr=0.1, eps=1e-5) for each in (net, other))

    def take(each, made, loss):
        return optim.gradient_step(made, each, loss, lr=0.1, max_grad_norm=1.0).item()

    for factor in (2.0, -1.0):
        assert take(net, optimizer, factor * net.weight.sum()) == take(other, undisturbed, factor * other.weight.sum())
        assert math.isnan(take(net, optimizer, (0.0 * net.weight.sum()).sqrt()))  # 0, and infinitely steep
        assert math.isnan(take(net, optimizer, net.weight.sum() + bad))
        assert weight(net) == weight(other)
    states = [snapshot.optimizer_state(*each) for each in ((optimizer, net), (undisturbed, other))]
    assert states[0] == states[1]


def test_what_was_copied_is_not_changed_by_the_next_step():
    """A checkpoint is written by another thread while training goes on."""
    net = one_weight()
    optimizer = optim.build_optimizer("rmsprop", net, lr=0.1, eps=0.1)
    assert snapshot.optimizer_state(optimizer, net) == {}
    step(net, optimizer, 2.0)
    state = snapshot.optimizer_state(optimizer, net)
    step(net, optimizer, 5.0)
    assert state["weight"]["square"].item() == pytest.approx(1.03)


# --- schedules ---


@pytest.mark.parametrize(("env_steps", "rate"), [(0, 1e-3), (250, 7.5e-4), (1000, 0.0), (1200, 0.0)])
def test_the_linear_rate_falls_to_0_at_the_planned_end_and_stays(env_steps, rate):
    """The last batch of a run often goes beyond the budget."""
    progress = RunProgress(env_steps=env_steps, env_steps_planned=1000, version=3)
    settings = DQNSettings(learning_rate=1e-3, lr_schedule="linear")
    assert optim.scheduled_learning_rate(settings, progress) == pytest.approx(rate)


@pytest.mark.parametrize(("env_steps", "rate"), [(0, 1e-3), (200, 6e-4), (400, 2e-4), (900, 2e-4)])
def test_the_linear_rate_can_end_early_at_a_floor(env_steps, rate):
    """A budget far longer than the run should need: the rate must not wait for it, nor fall to nothing."""
    progress = RunProgress(env_steps=env_steps, env_steps_planned=1000, version=3)
    settings = DQNSettings(learning_rate=1e-3, lr_schedule="linear", lr_final=2e-4, lr_env_steps=400)
    assert optim.scheduled_learning_rate(settings, progress) == pytest.approx(rate)


def test_a_rate_without_a_schedule_stays():
    """`lr_final` has no effect on a constant rate."""
    progress = RunProgress(env_steps=900, env_steps_planned=1000, version=3)
    assert optim.scheduled_learning_rate(DQNSettings(learning_rate=1e-3, lr_final=2e-4), progress) == 1e-3


@pytest.mark.parametrize(("env_steps", "bonus"), [(0, 0.01), (100, 0.0075), (400, 0.0), (900, 0.0)])
def test_the_entropy_bonus_falls_in_a_straight_line_and_stays(env_steps, bonus):
    """However long the run goes on."""
    settings = ImpalaSettings(entropy_coef=0.01, entropy_env_steps=400)
    assert optim.scheduled_entropy_coef(settings, env_steps=env_steps) == pytest.approx(bonus)


def test_the_entropy_bonus_may_end_elsewhere_or_stay():
    """It ends at what the settings say, above or below; without a schedule it is the same everywhere."""
    settings = ImpalaSettings(entropy_coef=0.01, entropy_final=0.03, entropy_env_steps=400)
    assert optim.scheduled_entropy_coef(settings, env_steps=100) == pytest.approx(0.015)
    assert optim.scheduled_entropy_coef(ImpalaSettings(entropy_coef=0.01), env_steps=900) == 0.01


@pytest.mark.parametrize(("kl", "rate"), [(0.021, 2e-4), (0.019, 3e-4), (0.01, 3e-4), (0.006, 3e-4), (0.004, 4.5e-4)])
def test_the_adaptive_rate_moves_only_outside_half_to_twice_the_target(kl, rate):
    """Target 0.01: too far, twice nearly, on it, half nearly, too little."""
    assert optim.kl_adapted_rate(3e-4, kl=kl, target=0.01) == pytest.approx(rate)


def test_the_adaptive_rate_stays_within_its_bounds():
    """A policy that does not react at all, or to everything."""
    assert optim.kl_adapted_rate(9e-3, kl=0.0, target=0.01) == optim.HIGHEST_ADAPTIVE_RATE
    assert optim.kl_adapted_rate(1.2e-6, kl=1.0, target=0.01) == optim.LOWEST_ADAPTIVE_RATE


def test_on_a_policy_whose_kl_grows_with_the_rate_it_settles_near_the_target():
    """Closed loop: KL = (100 * rate)^2, as for a natural step; from far above and far below."""
    for rate in (1e-5, 9e-3):
        for _ in range(40):
            rate = optim.kl_adapted_rate(rate, kl=(100 * rate) ** 2, target=0.01)  # noqa: PLW2901 - the loop under test
        assert 0.005 <= (100 * rate) ** 2 <= 0.02


# --- running statistics ---


def test_merged_parts_are_the_whole():
    """Targets come batch by batch, of different sizes, far from 0."""
    values = np.random.default_rng(0).normal(1e4, 3.0, 1000)
    merged = Moments()
    for part in np.split(values, [1, 7, 500]):
        merged = merged.merge(Moments.of(torch.from_numpy(part)))
    assert merged.count == 1000
    assert merged.mean.item() == pytest.approx(values.mean())
    assert merged.std.item() == pytest.approx(values.std())


def test_before_anything_was_seen_values_pass_unchanged():
    """The first batch of a run; an empty part changes nothing."""
    values = torch.tensor([3.0, -1.0])
    empty = Moments().merge(Moments.of(torch.zeros(0)))
    assert torch.equal(empty.normalize(values), values)
    assert torch.equal(empty.denormalize(values), values)


def test_normalised_values_have_mean_0_and_deviation_1_and_come_back():
    """Value targets on their way to the value head, and its predictions on their way back."""
    values = torch.randn(500, generator=torch.Generator().manual_seed(1)) * 7 - 20
    moments = Moments.of(values)
    normal = moments.normalize(values)
    assert normal.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert normal.std(correction=0).item() == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(moments.denormalize(normal), values)


def test_a_constant_stream_normalises_to_0():
    """Pong before the first point: all targets are the same."""
    assert Moments.of(torch.full((5,), 2.0)).normalize(torch.tensor([2.0])).tolist() == [0.0]


@pytest.mark.parametrize("saved", [dict, lambda state: json.loads(json.dumps(state, default=torch.Tensor.item))])
def test_they_survive_a_checkpoint_exactly_as_tensors_and_as_floats(saved):
    moments = Moments.of(torch.tensor([0.1, 0.7, 1e6]))
    assert Moments.restored(saved(asdict(moments))) == moments


# --- parameters of a network ---


def test_a_network_takes_the_parameters_of_another_bit_for_bit():
    """Out and in again."""
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    snapshot.restore_network(second, snapshot.network_state(first))
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.bias, second.bias)


def test_what_was_taken_is_not_changed_by_training_on():
    """A checkpoint is written by another thread while the next update runs."""
    net = nn.Linear(3, 2)
    state = snapshot.network_state(net)
    before = state["weight"].clone()
    net.weight.data.add_(1.0)
    assert torch.equal(state["weight"], before)


def test_another_architecture_is_refused_by_what_differs_and_changes_nothing():
    """Resumed with another model section: what is equal is not named."""
    net = nn.Linear(3, 2)
    before = net.weight.clone()
    with pytest.raises(ResourceError, match=r"another network: found {'weight': \[2, 4\]}, wanted {'weight': \[2, 3\]}; resume"):
        snapshot.restore_network(net, snapshot.network_state(nn.Linear(4, 2)))
    assert torch.equal(net.weight, before)


def test_a_target_goes_a_part_of_the_way_and_its_network_stays():
    """A rate of 0.25 from 0 to 8: 2, then 3.5; a rate of 1 copies. Nothing moves after a step that was left out."""
    target, online = nn.Linear(2, 1), nn.Linear(2, 1)
    for net, value in ((target, 0.0), (online, 8.0)):
        for parameter in net.parameters():
            parameter.data.fill_(value)
    for rate, norm, wanted in ((0.25, 1.0, 2.0), (1.0, math.nan, 2.0), (0.25, 1.0, 3.5), (1.0, 1.0, 8.0)):
        optim.polyak_update(target, online, rate, finite=torch.tensor(norm))
        assert target.weight.tolist() == [[wanted, wanted]]
        assert target.bias.tolist() == [wanted]
    assert online.weight.tolist() == [[8.0, 8.0]]
