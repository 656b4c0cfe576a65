"""Action values: one number for each action of a discrete environment, from the same layers as the actor-critic."""

from __future__ import annotations

from torch import Tensor, nn

from common.envs.spec import EnvSpec
from common.models.nets import Head, Network, Trunk, dense, initialised
from common.models.spec import ModelSettings

_GAIN = 0.01  # values begin near 0: what a random network promises would have to be unlearned


class QNetwork(Network):
    """Q(o, a) for all actions a, with one stream or two (`dueling`).

    In a dueling network state value and advantages have the last of `model.hidden` to themselves and share what lies before,
    as in Wang et al. 2016 (arXiv:1511.06581), section 3: there all convolutions are shared, and each stream has one hidden layer.
    """

    def __init__(self, settings: ModelSettings, env: EnvSpec, *, dueling: bool) -> None:
        """`env` must have discrete actions."""
        super().__init__()
        shared = settings.hidden[:-1] if dueling else settings.hidden
        self.trunk = Trunk(settings.model_copy(update={"hidden": shared}), env)
        own = settings.hidden[len(shared) :]
        self.action_stream = self._stream(own, env.action.n, settings)
        self.value_stream = self._stream(own, 1, settings) if dueling else None

    def forward(self, observation: Tensor) -> Tensor:
        """Observation [N, *input] in the environment's dtype → Q [N, n] float32 whatever the weights are."""
        features = self.trunk(observation)
        action: Tensor = self.action_stream(features)
        return action if self.value_stream is None else duel(self.value_stream(features), action)

    def _stream(self, hidden: tuple[int, ...], outputs: int, settings: ModelSettings) -> nn.Sequential:
        layers = dense(self.trunk.features, hidden, settings)
        return layers.append(Head(hidden[-1] if hidden else self.trunk.features, outputs, gain=_GAIN))


def duel(value: Tensor, advantage: Tensor) -> Tensor:
    """Q = V + (A - mean_a A) (Wang et al. 2016, eq. 9): value [N, 1] and advantage [N, n] → [N, n].

    Without the mean V and A could not be told apart: a constant might move from one to the other.
    """
    return value + (advantage - advantage.mean(dim=-1, keepdim=True))


def build(settings: ModelSettings, env: EnvSpec, *, dueling: bool, seed: int = 0) -> QNetwork:
    """The Q network of a run, float32, freshly initialised from `seed`. Raises ConfigError where it does not fit the input."""
    return initialised(lambda: QNetwork(settings, env, dueling=dueling), env, seed=seed)
