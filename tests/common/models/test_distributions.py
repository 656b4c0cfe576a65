"""Action distributions against hand numbers and torch's own."""

from __future__ import annotations

import math

import pytest
import torch

from common.models.distributions import Categorical, Categoricals, DiagonalGaussian, TanhGaussian

pytestmark = pytest.mark.pure


def test_a_categorical_answers_with_the_numbers_of_its_probabilities():
    """Logits that are logs of 1/2, 1/4, 1/4, shifted: the answers can be written out."""
    policy = Categorical.from_logits(torch.tensor([[0.5, 0.25, 0.25]]).log() + 3.0)
    torch.testing.assert_close(policy.log_prob(torch.tensor([2])), torch.tensor([math.log(0.25)]))
    torch.testing.assert_close(policy.entropy(), torch.tensor([1.5 * math.log(2)]))
    assert policy.mode().tolist() == [0]


def test_an_impossible_action_adds_nothing_to_the_entropy_nor_nan_to_the_gradient():
    """A collapsed policy: one action has all the probability, and training must go on."""
    logits = torch.tensor([[0.0, -math.inf], [0.0, -1e4]], requires_grad=True)
    entropy = Categorical.from_logits(logits).entropy()
    entropy.sum().backward()
    assert entropy.tolist() == [0.0, 0.0]
    assert logits.grad is not None
    assert logits.grad[1].isfinite().all()


def test_samples_of_a_categorical_come_as_often_as_their_probability():
    """Acting: frequencies over 40,000 draws lie within five standard deviations."""
    probabilities = torch.tensor([0.6, 0.3, 0.1, 0.0])
    policy = Categorical.from_logits(probabilities.log().expand(40_000, 4))
    counts = policy.sample(torch.Generator().manual_seed(1)).bincount(minlength=4) / 40_000
    assert counts[3] == 0
    assert ((counts - probabilities).abs() < 5 * (probabilities * (1 - probabilities) / 40_000).sqrt() + 1e-9).all()


def test_logits_of_bfloat16_are_normalised_in_float32():
    """A bf16 actor: the log-probability it records must be one, to float32 accuracy."""
    policy = Categorical.from_logits(torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).bfloat16())
    assert policy.log_probs.dtype == torch.float32
    torch.testing.assert_close(policy.log_probs.exp().sum(-1), torch.ones(5))


def test_independent_categoricals_have_the_probabilities_of_their_joint_choices():
    """A table of all six pairs, by torch's own distributions."""
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    policy = Categoricals.from_logits(logits, (3, 2))
    first, second = (torch.distributions.Categorical(logits=part) for part in (logits[:, :3], logits[:, 3:]))
    for pair in ((0, 0), (2, 1), (1, 0)):
        joint = first.log_prob(torch.tensor(pair[0])) + second.log_prob(torch.tensor(pair[1]))
        torch.testing.assert_close(policy.log_prob(torch.tensor([pair] * 4)), joint)
    torch.testing.assert_close(policy.entropy(), first.entropy() + second.entropy())
    assert policy.mode().tolist() == torch.stack([logits[:, :3].argmax(-1), logits[:, 3:].argmax(-1)], dim=-1).tolist()
    many = Categoricals.from_logits(logits[:1].expand(40_000, 5), (3, 2)).sample(torch.Generator().manual_seed(1))
    pairs = (many[:, 0] * 2 + many[:, 1]).bincount(minlength=6) / 40_000
    expected = (first.probs[0].unsqueeze(1) * second.probs[0]).flatten()
    assert ((pairs - expected).abs() < 5 * (expected * (1 - expected) / 40_000).sqrt()).all()


def test_a_gaussian_agrees_with_torchs_independent_normal():
    """Continuous actions of three components."""
    generator = torch.Generator().manual_seed(2)
    mean, log_std = torch.randn(7, 3, generator=generator), torch.tensor([-1.0, 0.0, 0.5])
    policy = DiagonalGaussian(mean, log_std)
    reference = torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)
    action = policy.sample(generator)
    torch.testing.assert_close(policy.log_prob(action), reference.log_prob(action))
    torch.testing.assert_close(policy.entropy(), reference.entropy())
    assert policy.mode() is mean


def test_samples_of_a_gaussian_have_its_mean_and_deviation():
    """Acting with continuous actions."""
    policy = DiagonalGaussian(torch.tensor([1.0, -2.0]).expand(40_000, 2), torch.tensor([0.0, -1.0]))
    drawn = policy.sample(torch.Generator().manual_seed(3))
    torch.testing.assert_close(drawn.mean(0), torch.tensor([1.0, -2.0]), atol=0.03, rtol=0)
    torch.testing.assert_close(drawn.std(0), torch.tensor([1.0, math.exp(-1.0)]), atol=0.03, rtol=0)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.7, 0.5), (-1.5, 0.1), (0.2, 3.0)])
def test_the_density_of_a_squashed_gaussian_integrates_to_the_probability_of_each_interval(mean, std):
    """By the trapezoidal rule over the actions; the probability of an interval is that of the noise that leads there."""
    noise = torch.linspace(-8.0, 8.0, 200_001, dtype=torch.float64)
    policy = TanhGaussian(torch.full((1, 1), mean, dtype=torch.float64), torch.full((1, 1), math.log(std), dtype=torch.float64))
    action, log_prob = policy.sample(noise.unsqueeze(1))
    assert torch.trapezoid(log_prob.exp(), action[:, 0]).item() == pytest.approx(1.0, abs=1e-6)
    for low, high in ((-1.0, 0.0), (0.5, 2.0), (-3.0, 3.0)):
        inside = (noise > low - 1e-5) & (noise < high + 1e-5)  # the ends are points of the grid
        wanted = torch.special.ndtr(torch.tensor(high)) - torch.special.ndtr(torch.tensor(low))
        assert torch.trapezoid(log_prob[inside].exp(), action[inside, 0]).item() == pytest.approx(wanted.item(), abs=1e-6)


def test_a_squashed_gaussian_of_several_components_agrees_with_torchs_change_of_variables():
    """Three components, and the gradient by mean and deviation that trains the actor."""
    generator = torch.Generator().manual_seed(2)
    mean, log_std, noise = (torch.randn(7, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    found, wanted = ([tensor.clone().requires_grad_() for tensor in (mean, log_std)] for _ in range(2))
    action, log_prob = TanhGaussian(*found).sample(noise)
    u = wanted[0] + wanted[1].exp() * noise
    normal = torch.distributions.Normal(wanted[0], wanted[1].exp())
    expected = (normal.log_prob(u) - (1.0 - u.tanh() ** 2).log()).sum(-1)
    torch.testing.assert_close(action, u.tanh())
    torch.testing.assert_close(log_prob, expected)
    for tensors, value in ((found, log_prob + action.sum(-1)), (wanted, expected + u.tanh().sum(-1))):
        value.sum().backward()
        assert all(tensor.grad is not None for tensor in tensors)
    torch.testing.assert_close([tensor.grad for tensor in found], [tensor.grad for tensor in wanted])


def test_the_log_probability_of_an_action_that_rounds_to_its_bound_is_finite_and_exact():
    """tanh(20) is 1 in float32, where the logarithm of 1 - tanh^2 would be infinite."""
    policy = TanhGaussian(torch.full((1, 1), 20.0, requires_grad=True), torch.zeros(1, 1))
    action, log_prob = policy.sample(torch.zeros(1, 1))
    log_prob.sum().backward()
    assert action.item() == 1.0
    assert log_prob.item() == pytest.approx(-0.5 * math.log(2 * math.pi) + 40.0 - math.log(4.0), rel=1e-6)
    assert policy.mean.grad.item() == pytest.approx(2.0)
    assert policy.median().item() == 1.0


@pytest.mark.parametrize(
    "policy",
    [
        Categorical.from_logits(torch.zeros(4, 3)),
        Categoricals.from_logits(torch.zeros(4, 5), (3, 2)),
        DiagonalGaussian(torch.zeros(4, 2), torch.zeros(2)),
    ],
)
def test_the_same_seed_draws_the_same_actions(policy):
    """Two runs with one seed must agree."""
    first, second = (policy.sample(torch.Generator().manual_seed(9)) for _ in range(2))
    assert torch.equal(first, second)
