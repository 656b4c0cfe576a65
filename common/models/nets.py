"""Actor-critic networks: convolutions for images, a multilayer perceptron for vectors, policy and value heads.

Orthogonal initialisation with gain sqrt(2), 0.01 for the policy head and 1 for the value head, biases 0 (the usual recipe
of PPO implementations). A network draws its initial weights from its own generator, never from torch's global one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.envs.spec import EnvSpec
from common.errors import ConfigError
from common.models.distributions import Categorical, DiagonalGaussian, Distribution
from common.models.spec import ModelSettings

_ACTIVATIONS = {"relu": functional.relu, "elu": functional.elu, "tanh": torch.tanh, "silu": functional.silu}
_IMAGE_RANK = 2  # a frame [H, W]; its stack [S, H, W] is what the convolutions see


class Output(NamedTuple):
    """What the network says about N observations: a distribution over actions, and value [N] float32."""

    policy: Distribution
    value: Tensor


class Trunk(nn.Module):
    """Observation [N, *input] in the environment's dtype → features [N, F] in the weights' dtype (or autocast's)."""

    def __init__(self, settings: ModelSettings, env: EnvSpec, generator: torch.Generator) -> None:
        super().__init__()
        self._activation = _ACTIVATIONS[settings.activation]
        self._scale = 1.0 / 255.0 if env.observation_dtype == "uint8" else 1.0
        self.conv = nn.ModuleList()
        shape = env.network_input_shape
        if len(env.observation_shape) == _IMAGE_RANK:
            for channels, kernel, stride in settings.conv:
                self.conv.append(_orthogonal(nn.Conv2d(shape[0], channels, kernel, stride), math.sqrt(2), generator))
                shape = (channels, *(_convolved(size, kernel, stride, settings, env) for size in shape[1:]))
        self.features = math.prod(shape)
        self.hidden = nn.ModuleList()
        for width in settings.hidden:
            self.hidden.append(_orthogonal(nn.Linear(self.features, width), math.sqrt(2), generator))
            self.features = width
        self._first: nn.Module = next(iter((*self.conv, *self.hidden)))

    def forward(self, observation: Tensor) -> Tensor:
        """See the class."""
        raise NotImplementedError


class ActorCritic(nn.Module):
    """Policy and value, with one trunk or one each."""

    def policy(self, observation: Tensor) -> Distribution:
        """The distribution alone, for acting: no value is computed."""
        raise NotImplementedError

    def forward(self, observation: Tensor) -> Output:
        """Observation [N, *input] in the environment's dtype → distribution and value, in float32 whatever the weights are."""
        raise NotImplementedError


def build(settings: ModelSettings, env: EnvSpec, *, seed: int = 0) -> ActorCritic:
    """The network of a run, float32, freshly initialised from `seed`. Raises ConfigError where it does not fit the input."""
    raise NotImplementedError
