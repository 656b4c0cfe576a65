"""Distributions over actions: categoricals, and Gaussians with independent components, as they are or squashed by tanh.

All are immutable; N is the number of observations (in any order). Those of actor-critics (`Distribution`) have the same four
methods. Randomness comes only from the generator, or the noise, passed in.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

_HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)
_LOG_2 = math.log(2.0)


class Categorical(NamedTuple):
    """Distribution over {0 .. n-1}; `log_probs` [N, n] float32 is normalised (build it with `from_logits`)."""

    log_probs: Tensor

    @classmethod
    def from_logits(cls, logits: Tensor) -> Categorical:
        """Normalise [N, n] of any float dtype, once, in float32: sampling, log-probability and entropy all need it."""
        return cls(functional.log_softmax(logits, dim=-1, dtype=torch.float32))

    def sample(self, generator: torch.Generator) -> Tensor:
        """[N] int64 drawn by the Gumbel-max trick, as the race of exponentials: argmin E_i / p_i with E_i ~ Exp(1)."""
        race = torch.empty_like(self.log_probs).exponential_(generator=generator).log_()
        return torch.sub(self.log_probs, race, out=race).argmax(dim=-1)

    def mode(self) -> Tensor:
        """[N] int64: the likeliest action (the lowest of equals)."""
        return self.log_probs.argmax(dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """[N] float32 of the actions [N] int64."""
        return self.log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """[N] float32, in nats."""
        # An action of probability 0 contributes 0: its log is -inf, and 0 * -inf would be NaN.
        return -(self.log_probs.exp() * self.log_probs.clamp_min(torch.finfo(torch.float32).min)).sum(dim=-1)


class Categoricals(NamedTuple):
    """K independent categoricals, one for each component: the probability of a joint choice is the product."""

    parts: tuple[Categorical, ...]

    @classmethod
    def from_logits(cls, logits: Tensor, choices: tuple[int, ...]) -> Categoricals:
        """Split [N, sum of `choices`] into the logits of each component."""
        return cls(tuple(map(Categorical.from_logits, torch.split(logits, list(choices), dim=-1))))

    def sample(self, generator: torch.Generator) -> Tensor:
        """[N, K] int64."""
        return torch.stack([part.sample(generator) for part in self.parts], dim=-1)

    def mode(self) -> Tensor:
        """[N, K] int64: of each component the likeliest choice."""
        return torch.stack([part.mode() for part in self.parts], dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """[N] float32 of the actions [N, K] int64, summed over components."""
        return torch.stack([part.log_prob(chosen) for part, chosen in zip(self.parts, action.unbind(-1), strict=True)]).sum(0)

    def entropy(self) -> Tensor:
        """[N] float32, in nats, summed over components."""
        return torch.stack([part.entropy() for part in self.parts]).sum(0)


class DiagonalGaussian(NamedTuple):
    """Gaussian over R^A; `mean` [N, A] float32, `log_std` [A] float32 (the same for every observation).

    It is unbounded. Where the environment has bounds, the *environment step* of the actor clips the action; what is
    recorded and trained on is the unclipped action and its log-probability, so that the ratio of two policies stays exact.
    """

    mean: Tensor
    log_std: Tensor

    def sample(self, generator: torch.Generator) -> Tensor:
        """[N, A] float32."""
        noise = torch.empty_like(self.mean).normal_(generator=generator)
        return torch.addcmul(self.mean, noise, self.log_std.exp())

    def mode(self) -> Tensor:
        """[N, A] float32: the mean."""
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        """[N] float32 of the actions [N, A] float32, summed over components."""
        z = (action - self.mean) * (-self.log_std).exp()
        return -(0.5 * z.square() + self.log_std + _HALF_LOG_TAU).sum(dim=-1)

    def entropy(self) -> Tensor:
        """[N] float32, in nats."""
        return (self.log_std + (0.5 + _HALF_LOG_TAU)).sum().expand(self.mean.shape[0])


class TanhGaussian(NamedTuple):
    """tanh(u) in -1..1 with u Gaussian, component by component; `mean` and `log_std` [N, A] float32 are those of u.

    Its entropy has no closed form; the mean of -log pi over draws estimates it.
    """

    mean: Tensor
    log_std: Tensor

    def sample(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [N, A] and their log-probabilities [N] float32, for standard normal noise [N, A].

        With u = mean + std * noise, by the change of variables (Haarnoja et al. 2018, arXiv:1812.05905, appendix C):

            log pi(tanh(u)) = sum over components of log N(u; mean, std) - log(1 - tanh(u)^2)

        Both carry gradient to `mean` and `log_std`. The logarithm of 1 - tanh(u)^2 is 2 (log 2 - u - log(1 + exp(-2u))), which
        stays exact where tanh(u) rounds to 1.
        """
        u = torch.addcmul(self.mean, noise, self.log_std.exp())
        log_gaussian = -(0.5 * noise.square() + self.log_std + _HALF_LOG_TAU)
        log_slope = 2.0 * (_LOG_2 - u - functional.softplus(-2.0 * u))
        return u.tanh(), (log_gaussian - log_slope).sum(dim=-1)

    def median(self) -> Tensor:
        """[N, A] float32: of each component the median, tanh(mean)."""
        return self.mean.tanh()


Distribution: TypeAlias = Categorical | Categoricals | DiagonalGaussian
