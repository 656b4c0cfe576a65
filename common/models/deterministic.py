"""Networks for continuous actions: an actor that names one action, and two critics that rate it.

They speak in actions of -1 to 1, whatever the environment's bounds are: `ActionBounds` translates.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ConfigError
from common.models.flat import Flat
from common.models.nets import Head, Network, Trunk, dense, initialised, perceptron
from common.models.passes import Passes, Recorded, Written
from common.models.spec import ModelSettings, Precision

_GAIN = 0.01  # actions begin in the middle and values at 0: what a random network promises would have to be unlearned


class ActionBounds(NamedTuple):
    """The box of actions, component by component: `center` and `half_range` [A] float32."""

    center: Tensor
    half_range: Tensor

    @classmethod
    def of(cls, action: ActionSpec) -> Self:
        """Raises ConfigError for actions that are not a vector between finite bounds."""
        low, high = (torch.tensor(bounds, dtype=torch.float64) for bounds in (action.low, action.high))
        if action.discrete or len(action.shape) != 1 or len(low) != action.shape[0]:
            found = f"{action.n} discrete actions" if action.discrete else f"actions of shape {action.shape}"
            fix = "choose an algorithm for it, such as ppo or dqn, or another env.id"
            raise ConfigError("this algorithm needs continuous actions", found=found, wanted="a vector with bounds", fix=fix)
        half_range = (high - low) / 2
        if not (half_range.isfinite().all() and half_range.gt(0).all()):
            raise ConfigError(
                "actions without bounds cannot be scaled to -1 to 1",
                found=f"low {list(action.low)}, high {list(action.high)}",
                wanted="finite bounds, low < high in each component",
                fix="wrap the environment in gymnasium.wrappers.RescaleAction, or give its action space bounds",
            )
        return cls((low + half_range).float(), half_range.float())

    def scale(self, unit: Tensor) -> Tensor:
        """Actions of the environment [N, A] for those of the networks, -1 to 1 [N, A]."""
        return torch.addcmul(self.center, unit, self.half_range)

    def unscale(self, action: Tensor) -> Tensor:
        """Inverse of `scale`."""
        return (action - self.center) / self.half_range


class Actor(Network):
    """mu(o): the one action that is best by the critics; without `layer_norm`, which is about values."""

    def __init__(self, settings: ModelSettings, env: EnvSpec) -> None:
        super().__init__()
        self.trunk = Trunk(settings.model_copy(update={"layer_norm": False}), env)
        self.head = Head(self.trunk.features, math.prod(env.action.shape), gain=_GAIN)

    def forward(self, observation: Tensor) -> Tensor:
        """Observation [N, *input] in the environment's dtype → [N, A] float32 in -1..1, whatever the weights are."""
        action: Tensor = self.head(self.trunk(observation)).tanh_()
        return action


class Critic(Network):
    """Q(o, a). The action joins a vector as it is seen, and an image after the convolutions."""

    def __init__(self, settings: ModelSettings, env: EnvSpec) -> None:
        super().__init__()
        self.trunk = Trunk(settings.model_copy(update={"hidden": ()}), env)
        features = self.trunk.features + math.prod(env.action.shape)
        self.hidden = dense(features, settings.hidden, settings)
        self.head = Head(settings.hidden[-1] if settings.hidden else features, 1, gain=_GAIN)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Observation [N, *input] in the environment's dtype, action [N, A] in -1..1 → [N, 1] float32."""
        features = self.trunk(observation)
        joined = torch.cat([features, action.to(features.dtype)], dim=1)
        value: Tensor = self.head(self.hidden(joined))
        return value


class ActorCritics(Network):
    """An actor and two critics, which share nothing."""

    def __init__(self, settings: ModelSettings, env: EnvSpec) -> None:
        super().__init__()
        self.actor = Actor(settings, env)
        self.critics = nn.ModuleList([Critic(settings, env) for _ in range(2)])


def passes(net: nn.Module, weights: Flat, *, precision: Precision) -> Passes:
    """The quickest way through an actor or a critic; `weights` are its trained parameters."""
    plain = perceptron(net)
    if plain is None:
        return Recorded(net, precision=precision)
    last = plain.features - net.trunk.features if isinstance(net, Critic) else plain.features
    return Written(weights, precision=precision, last=last, layer_norm=plain.layer_norm, squash=isinstance(net, Actor))


def build(settings: ModelSettings, env: EnvSpec, *, seed: int = 0) -> ActorCritics:
    """All networks of a run, float32, freshly initialised from `seed`. Raises ConfigError where they do not fit `env`."""
    return initialised(lambda: ActorCritics(settings, env), env, seed=seed)


def build_actor(settings: ModelSettings, env: EnvSpec) -> Actor:
    """The actor alone, for parameters that come from elsewhere. Errors as in `build`."""
    return initialised(lambda: Actor(settings, env), env, seed=0)
