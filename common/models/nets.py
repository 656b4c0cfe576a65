"""The networks of the algorithms: actor-critic, action values (DQN, PQN), and an actor with two critics (TD3, SAC)."""

from __future__ import annotations

import copy
from typing import Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ConfigError
from common.models.distributions import Categorical, Categoricals, DiagonalGaussian, Distribution, TanhGaussian
from common.models.layers import Head, Network, build_trunk, dense, initialised, outlined
from common.models.leaves import Leaves, Observation, mask_logits
from common.models.memory import Past, Recurrent, remember
from common.models.spec import ModelSettings

_NEAR_ZERO = 0.01  # gain of heads of action values: a random network should promise nothing
_LOG_STD = (-20.0, 2.0)  # of the Gaussian before tanh, as in the authors' code of SAC: beyond, float32 overflows


class Output(NamedTuple):
    """Output for N observations: a distribution over actions, value [N] float32, and the states of memories after them."""

    policy: Distribution
    value: Tensor
    state: Tensor | None = None  # [N, S] float32; None without memory


class ActionValues(NamedTuple):
    """Output for N observations: value [N, n] float32, Q(o, a) for all n actions, and the states of memories after them."""

    value: Tensor
    state: Tensor | None = None  # [N, S] float32; None without memory


class ActionBounds(NamedTuple):
    """The box of actions, component by component: `center` and `half_range` [A] float32."""

    center: Tensor
    half_range: Tensor

    @classmethod
    def of(cls, action: ActionSpec) -> Self:
        """Of continuous actions. Raises ConfigError unless each component has finite bounds, low < high."""
        if not all(action.bounded):
            raise ConfigError(
                "actions without bounds cannot be scaled to -1 to 1",
                found=f"low {list(action.low)}, high {list(action.high)}",
                wanted="finite bounds, low < high in each component",
                fix="wrap the environment in gymnasium.wrappers.RescaleAction, or give its action space bounds",
            )
        return cls.where_finite(action)

    @classmethod
    def where_finite(cls, action: ActionSpec) -> Self:
        """Of continuous actions [A]; a component that lacks a bound keeps its own unit: center `origin`, half_range 1."""
        with torch.device("cpu"):  # also where a network is only outlined
            low, high, origin = (torch.tensor(each, dtype=torch.float64) for each in (action.low, action.high, action.origin))
            bounded = torch.tensor(action.bounded, dtype=torch.bool)
        half_range = (high - low) / 2
        return cls(torch.where(bounded, low + half_range, origin).float(), torch.where(bounded, half_range, 1.0).float())

    def to(self, device: torch.device) -> Self:
        """The same on another device; itself where it is there."""
        return self if device == self.center.device else type(self)(*(bound.to(device) for bound in self))

    def scale(self, unit: Tensor) -> Tensor:
        """Actions of the environment [N, A] for those of the networks, -1 to 1 [N, A]."""
        return torch.addcmul(self.center, unit, self.half_range)

    def unscale(self, action: Tensor) -> Tensor:
        """Inverse of `scale`."""
        return (action - self.center) / self.half_range


class ActorCritic(Network):
    """Policy and value, with one trunk or one each; with memory (`model.recurrent`) they share it as the trunk.

    The heads of continuous actions have mean and deviation in halves of an action's range around its centre, so that -1 to 1 are
    the bounds; the distribution is over the environment's own actions.
    """

    def __init__(self, settings: ModelSettings, env: EnvSpec) -> None:
        super().__init__()
        self.trunk = build_trunk(settings, env)
        self.value_trunk = None if settings.shared_trunk else build_trunk(settings, env)
        self.recurrent = Recurrent(self.trunk.features, settings) if settings.recurrent else None
        features = self.trunk.features if self.recurrent is None else self.recurrent.features
        outputs = sum(env.action.choices) or len(env.action.low)
        self.policy_head = Head(features, outputs, gain=0.01)
        self.value_head = Head(features, 1, gain=1.0)
        self.unit_log_std = None if env.action.discrete else nn.Parameter(torch.full((outputs,), settings.initial_log_std))
        self._bounds = None if env.action.discrete else ActionBounds.where_finite(env.action)
        self._choices = env.action.choices if env.action.shape else ()
        self._masks = Leaves(env) if env.action_mask else None

    def policy(self, observation: Observation, past: Past | None = None) -> tuple[Distribution, Tensor | None]:
        """The distribution, and the states after the rows: for acting, because no value is computed. Arguments as `forward`."""
        features, state = remember(self.recurrent, self.trunk(observation, self.compute_dtype(observation)), past)
        return self._policy(features, observation), state

    def forward(self, observation: Observation, past: Past | None = None) -> Output:
        """Observation [N, *input] in the environment's dtype → distribution and value, in float32 whatever the weights are.

        With memory the N rows are those of all environments in `past` at its first row, then those at its second, and so on.
        """
        dtype = self.compute_dtype(observation)
        features, state = remember(self.recurrent, self.trunk(observation, dtype), past)
        value_features = features if self.value_trunk is None else self.value_trunk(observation, dtype)
        return Output(self._policy(features, observation), self.value_head(value_features).squeeze(-1), state)

    def _policy(self, features: Tensor, observation: Observation) -> Distribution:
        outputs = self.policy_head(features)
        if self._masks is not None:
            outputs = mask_logits(outputs, self._masks.mask(observation))
        if self._choices:
            return Categoricals.from_logits(outputs, self._choices)
        if self.unit_log_std is None or self._bounds is None:
            return Categorical.from_logits(outputs)
        if self._bounds.center.device != outputs.device:  # once: a forward pass on a GPU would wait for the copy
            self._bounds = self._bounds.to(outputs.device)
        bounds = self._bounds
        return DiagonalGaussian(bounds.scale(outputs), self.unit_log_std.float() + bounds.half_range.log())


def build_actor_critic(settings: ModelSettings, env: EnvSpec, *, seed: int = 0) -> ActorCritic:
    """The actor-critic of a run, float32, freshly initialised from `seed`. Raises ConfigError where it does not fit the input."""
    return initialised(lambda: ActorCritic(settings, env), seed=seed)


def outline_actor_critic(settings: ModelSettings, env: EnvSpec) -> ActorCritic:
    """The actor-critic's names and shapes alone, without storage. Raises ConfigError where it does not fit the input."""
    return outlined(lambda: ActorCritic(settings, env))


class QNetwork(Network):
    """Q(o, a) for all actions a, with one stream or two (`dueling`).

    In a dueling network state value and advantages have the last of `model.hidden` to themselves and share what lies before,
    as in Wang et al. 2016 (arXiv:1511.06581), section 3: there all convolutions are shared, and each stream has one hidden layer.
    Memory (`model.recurrent`) is shared too.
    """

    def __init__(self, settings: ModelSettings, env: EnvSpec, *, dueling: bool) -> None:
        """`env` must have discrete actions."""
        super().__init__()
        shared = settings.hidden[:-1] if dueling else settings.hidden
        self.trunk = build_trunk(settings.model_copy(update={"hidden": shared}), env)
        self.recurrent = Recurrent(self.trunk.features, settings) if settings.recurrent else None
        streams = settings.hidden[len(shared) :]
        self.action_stream = self._stream(streams, env.action.n, settings)
        self.value_stream = self._stream(streams, 1, settings) if dueling else None
        self._masks = Leaves(env) if env.action_mask else None

    def forward(self, observation: Observation, past: Past | None = None) -> ActionValues:
        """Observation [N, *input] in the environment's dtype → Q [N, n] float32 whatever the weights are, states of the memory.

        Of an action that a mask forbids Q is the lowest finite number, so that it is no maximum. A mask that allows nothing
        counts as none: the last observation of a truncated episode may have it, and is bootstrapped from. `past`, the order of
        the rows and the states [N, S] are those of `ActorCritic.forward`.
        """
        features, state = remember(self.recurrent, self.trunk(observation, self.compute_dtype(observation)), past)
        action: Tensor = self.action_stream(features)
        values = action if self.value_stream is None else duel(self.value_stream(features), action)
        if (allowed := self.allowed(observation)) is not None:
            values = mask_logits(values, allowed | ~allowed.any(dim=1, keepdim=True))
        return ActionValues(values, state)

    def allowed(self, observation: Observation) -> Tensor | None:
        """The actions [N, n] bool that the mask of an observation allows; None without masks."""
        return None if self._masks is None else self._masks.mask(observation)

    def _stream(self, hidden: tuple[int, ...], outputs: int, settings: ModelSettings) -> nn.Sequential:
        features = self.trunk.features if self.recurrent is None else self.recurrent.features
        layers = dense(features, hidden, settings)
        return layers.append(Head(hidden[-1] if hidden else features, outputs, gain=_NEAR_ZERO))


def duel(value: Tensor, advantage: Tensor) -> Tensor:
    """Q = V + (A - mean_a A) (Wang et al. 2016, eq. 9): value [N, 1] and advantage [N, n] → [N, n].

    Without the mean V and A would not be unique: a constant could move from one to the other.
    """
    return value + (advantage - advantage.mean(dim=-1, keepdim=True))


def build_q_network(settings: ModelSettings, env: EnvSpec, *, dueling: bool, seed: int = 0) -> QNetwork:
    """The Q network of a run, float32, freshly initialised from `seed`. Raises ConfigError where it does not fit the input."""
    return initialised(lambda: QNetwork(settings, env, dueling=dueling), seed=seed)


class DeterministicActor(Network):
    """mu(o): the action with the highest value; without `layer_norm`, which is for values."""

    def __init__(self, settings: ModelSettings, env: EnvSpec) -> None:
        super().__init__()
        self.trunk = build_trunk(settings.model_copy(update={"layer_norm": False}), env)
        self.head = Head(self.trunk.features, env.action.shape[0])

    def forward(self, observation: Observation) -> Tensor:
        """Observation [N, *input] in the environment's dtype → [N, A] float32 in -1..1, whatever the weights are."""
        action: Tensor = self.head(self.trunk(observation, self.compute_dtype(observation))).tanh_()
        return action


class GaussianActor(Network):
    """pi(a | o), a Gaussian squashed by tanh, its deviation a function of the observation; without `layer_norm`, as above."""

    def __init__(self, settings: ModelSettings, env: EnvSpec) -> None:
        super().__init__()
        self.trunk = build_trunk(settings.model_copy(update={"layer_norm": False}), env)
        self.head = Head(self.trunk.features, 2 * env.action.shape[0])

    def forward(self, observation: Observation) -> TanhGaussian:
        """Observation [N, *input] in the environment's dtype → distribution over actions [N, A] in -1..1."""
        mean, log_std = self.head(self.trunk(observation, self.compute_dtype(observation))).chunk(2, dim=1)
        return TanhGaussian(mean, log_std.clamp(*_LOG_STD))


class Critic(Network):
    """Q(o, a). The action is concatenated with a vector observation, or with the features of an image."""

    def __init__(self, settings: ModelSettings, env: EnvSpec) -> None:
        super().__init__()
        self.trunk = build_trunk(settings.model_copy(update={"hidden": ()}), env)
        features = self.trunk.features + env.action.shape[0]
        self.hidden = dense(features, settings.hidden, settings)
        self.head = Head(settings.hidden[-1] if settings.hidden else features, 1)

    def forward(self, observation: Observation, action: Tensor) -> Tensor:
        """Observation [N, *input] in the environment's dtype, action [N, A] in -1..1 → [N, 1] float32."""
        features = self.trunk(observation, self.compute_dtype(observation))
        joined = torch.cat([features, action.to(features.dtype)], dim=1)
        value: Tensor = self.head(self.hidden(joined))
        return value


Actor = TypeVar("Actor", bound=Network)


class TwinCritics(Network):
    """Two critics without shared layers. Their actions are in -1..1; `ActionBounds` converts."""

    critics: nn.ModuleList

    def q_values(self, observation: Observation, action: Tensor) -> Tensor:
        """Values by both critics, [2, N] float32; arguments as those of `Critic`."""
        return torch.stack([critic(observation, action).squeeze(1) for critic in self.critics])


class ActorWithCritics(TwinCritics, Generic[Actor]):
    """An actor and two critics without shared layers."""

    def __init__(self, actor: Actor, settings: ModelSettings, env: EnvSpec) -> None:
        super().__init__()
        self.actor = actor
        self.critics = nn.ModuleList([Critic(settings, env) for _ in range(2)])


class Temperature(nn.Module):
    """alpha > 0, the weight of the entropy against the reward (SAC), learned as its logarithm; 1 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))

    def forward(self) -> Tensor:
        """alpha, a scalar."""
        return self.log.exp()


class SACNetworks(ActorWithCritics[GaussianActor]):
    """Everything that SAC trains: actor, critics and temperature."""

    def __init__(self, settings: ModelSettings, env: EnvSpec) -> None:
        super().__init__(GaussianActor(settings, env), settings, env)
        self.temperature = Temperature()

    def target_critics(self) -> TwinCritics:
        """A copy of the critics that no gradient trains, its parameters by the names that they have here."""
        targets = TwinCritics()
        targets.critics = copy.deepcopy(self.critics).requires_grad_(requires_grad=False)
        return targets


def build_td3_networks(settings: ModelSettings, env: EnvSpec, *, seed: int = 0) -> ActorWithCritics[DeterministicActor]:
    """All networks of a run, float32, freshly initialised from `seed`. Raises ConfigError where they do not fit `env`."""
    return initialised(lambda: ActorWithCritics(DeterministicActor(settings, env), settings, env), seed=seed, orthogonal=False)


def build_sac_networks(settings: ModelSettings, env: EnvSpec, *, seed: int = 0) -> SACNetworks:
    """As `build_td3_networks`, with a stochastic actor and a temperature."""
    return initialised(lambda: SACNetworks(settings, env), seed=seed, orthogonal=False)


def build_actor(kind: type[Actor], settings: ModelSettings, env: EnvSpec) -> Actor:
    """The actor of either alone, for parameters that come from elsewhere. Errors as in `build_td3_networks`."""
    return initialised(lambda: kind(settings, env), seed=0, orthogonal=False)
