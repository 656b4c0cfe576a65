"""Section `algorithm` of the configuration: one class per algorithm, selected by `name`.

It imports no torch, so that a process which only reads a configuration does not wait seconds for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ConfigError
from common.models.spec import ModelSettings, Precision

LOWEST_ADAPTIVE_RATE, HIGHEST_ADAPTIVE_RATE = 1e-6, 1e-2
"""The bounds of the learning rate of `kl_adaptive`: below them Adam does nothing, above them it does harm."""

_ENTROPY_COEF_DISCRETE = 0.01

# Settings of which several algorithms have a default of their own.
LearningRate: TypeAlias = Annotated[float, Field(gt=0.0, le=1.0, description="of the optimizer; where a schedule starts")]
NormalizeValue: TypeAlias = Annotated[
    bool, Field(description="bring value targets to mean 0 and deviation 1, by the statistics of the whole run")
]
Optimizer: TypeAlias = Annotated[
    Literal["adam", "rmsprop"],
    Field(description="adam, or rmsprop as TensorFlow computes it: epsilon inside the root, first steps small"),
]
ReplayCapacity: TypeAlias = Annotated[
    int, Field(ge=1, description="env steps kept, over all environments; the oldest make room. Allocated at the start")
]
Warmup: TypeAlias = Annotated[int, Field(ge=0, description="env steps inserted before the first gradient step")]
Minibatch: TypeAlias = Annotated[int, Field(ge=1, le=65_536, description="transitions drawn for one gradient step")]
NStep: TypeAlias = Annotated[int, Field(ge=1, le=64, description="env steps of reward before a value stands for the rest")]


class RunScale(NamedTuple):
    """The size of a run, as far as an algorithm's settings must fit it."""

    length: int  # T: env steps of each environment in one trajectory
    num_envs: int  # B: environments of each actor
    batch: int  # experience messages per update
    credits: int  # experience messages that each actor may have under way
    max_policy_lag: int  # versions; older experience is dropped
    actors: int  # that the run expects; 0: unknown
    env_steps: int  # the run's budget

    @property
    def environments(self) -> int:
        """Environments of all actors that the run expects."""
        return self.actors * self.num_envs

    @property
    def message_env_steps(self) -> int:
        """Rows [T, B] of one trajectory; reset rows among them are not trained on."""
        return self.length * self.num_envs

    @property
    def batch_env_steps(self) -> int:
        """Rows of one batch."""
        return self.batch * self.message_env_steps

    @property
    def waiting(self) -> int:
        """Updates that a message waits for at most: its lag when all actors have used all their credits."""
        under_way = max(self.credits * self.actors, self.batch)  # a window is widened where few actors must fill a batch
        return -(-under_way // self.batch)

    @property
    def batch_words(self) -> str:
        """The rows of a batch as the product of the settings that a user can change."""
        product = f"learner.batch {self.batch} x rollout.length {self.length} x env.num_envs {self.num_envs}"
        return f"{self.batch_env_steps} = {product}"


class AlgorithmSection(BaseModel):
    """Base of all sections. A section of a user's own is named `package.module:ENTRY`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(description="which algorithm; your own: package.module:ENTRY")
    gamma: float = Field(default=0.99, ge=0.0, le=1.0, description="discount per env step")
    learning_rate: LearningRate = 2.5e-4
    lr_schedule: Literal["constant", "linear"] = Field(default="constant", description="linear: down to lr_final")
    lr_final: float = Field(default=0.0, ge=0.0, le=1.0, description="linear: where the learning rate ends, and stays")
    lr_env_steps: int = Field(
        default=0, ge=0, description="linear: env steps until lr_final is reached; 0: all of target.env_steps"
    )
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="times environments / learning_rate_envs, or the root of that; environments of all actors"
    )
    learning_rate_envs: int = Field(default=16, ge=1, description="linear, sqrt: environments that learning_rate was tuned for")
    clip_reward: bool = Field(default=False, description="train on the sign of the reward (returns are always reported raw)")
    precision: Precision = Field(
        default="fp32", description="arithmetic of training; bf16 where the processor has it, else fp32; weights stay float32"
    )

    def conflicts(self, scale: RunScale) -> Iterator[str]:
        """Sentences on settings that cannot work with a run of this scale, each beginning with its dotted key."""
        if self.learning_rate_scaling != "none" and scale.actors == 0:
            yield (
                f"algorithm.learning_rate_scaling: found {self.learning_rate_scaling}, wanted none where actor.count is 0: "
                "the number of environments is not known"
            )
        if (rate := self.scaled(scale).learning_rate) > 1.0:
            yield (
                f"algorithm.learning_rate: found {rate:g} = {self.learning_rate:g} scaled to {scale.environments} environments, "
                "wanted at most 1"
            )

    def require_actions(self, action: ActionSpec) -> None:
        """Raise `ConfigError` where the algorithm cannot choose among such actions; this class accepts all."""

    def require_observations(self, env: EnvSpec, model: ModelSettings) -> None:
        """Raise `ConfigError` where the algorithm cannot treat observations as `model` asks; this class accepts all."""

    def scaled(self, scale: RunScale) -> Self:
        """These settings with the learning rate of a run of this scale; a schedule keeps its shape.

        Linear in the number of environments, which sets how much is learned from at once (Krizhevsky 2014, arXiv:1404.5997;
        Goyal et al. 2017, arXiv:1706.02677), or in its square root, which keeps the variance of a step (Hoffer et al. 2017,
        arXiv:1705.08741).
        """
        if self.learning_rate_scaling == "none":
            return self
        ratio = scale.environments / self.learning_rate_envs
        factor = ratio if self.learning_rate_scaling == "linear" else math.sqrt(ratio)
        rates = {"learning_rate": self.learning_rate * factor, "lr_final": self.lr_final * factor}
        return self.model_copy(update=rates | {"learning_rate_scaling": "none"})


# --- on-policy ---


class ActorCriticSection(AlgorithmSection):
    """Base of the sections of algorithms that learn a policy and its value."""

    gae_lambda: float = Field(
        default=0.95, ge=0.0, le=1.0, description="how far rewards are trusted over values: 0 one step, 1 the whole episode"
    )
    value_coef: float = Field(default=0.5, ge=0.0, description="weight of the value loss")
    entropy_coef: float | None = Field(
        default=None,
        ge=0.0,
        description="weight of the entropy bonus, per nat; where it starts; null: 0.01, and 0 where actions are continuous",
    )
    entropy_final: float = Field(default=0.0, ge=0.0, description="where that weight ends, and stays")
    entropy_env_steps: int = Field(
        default=0, ge=0, description="env steps until entropy_final is reached in a straight line; 0: it stays at entropy_coef"
    )
    max_grad_norm: float = Field(default=0.5, gt=0.0, description="gradients are scaled down to this L2 norm")
    normalize_advantage: bool = Field(default=False, description="bring the advantages of each loss to mean 0 and deviation 1")
    least_advantage_std: float = Field(
        default=0.0,
        ge=0.0,
        description="normalize_advantage: a deviation below this counts as this, so that what makes no difference stays small",
    )

    def for_actions(self, *, discrete: bool) -> Self:
        """These settings with the entropy bonus of this kind of action, where none is set.

        The noise of a Gaussian explores by itself, and its entropy has no upper limit.
        """
        chosen = _ENTROPY_COEF_DISCRETE if discrete else 0.0
        return self if self.entropy_coef is not None else self.model_copy(update={"entropy_coef": chosen})

    def conflicts(self, scale: RunScale) -> Iterator[str]:
        """Settings that have no effect without another: `entropy_final` and `least_advantage_std`."""
        yield from super().conflicts(scale)
        if self.entropy_final != 0.0 and self.entropy_env_steps == 0:
            yield (
                f"algorithm.entropy_final: found {self.entropy_final}, wanted 0.0 where algorithm.entropy_env_steps is 0: "
                "the bonus then stays as it is; say after how many env steps it ends"
            )
        if self.least_advantage_std > 0.0 and not self.normalize_advantage:
            yield (
                f"algorithm.least_advantage_std: found {self.least_advantage_std}, wanted 0.0 where "
                "algorithm.normalize_advantage is false: advantages are then used as they are; set it to true"
            )


class PPOSettings(ActorCriticSection):
    """Proximal policy optimisation (`common.algorithms.ppo`)."""

    name: Literal["ppo"] = Field(default="ppo", description="proximal policy optimisation")
    epochs: int = Field(default=4, ge=1, le=100, description="passes over each batch")
    minibatch: int = Field(default=256, ge=2, description="env steps per gradient step (a batch is cut into nearly equal parts)")
    lr_schedule: Literal["constant", "linear", "kl_adaptive"] = Field(  # type: ignore[assignment]  # its update can measure one more
        default="constant",
        description="linear: down to lr_final; kl_adaptive: times or over 1.5, to stay near kl_target",
    )
    kl_target: float = Field(default=0.01, gt=0.0, description="kl_adaptive: wanted KL divergence of one update, nats")
    clip: float = Field(default=0.2, gt=0.0, lt=1.0, description="how far from 1 the probability ratio still counts (epsilon)")
    adam_eps: float = Field(
        default=1e-5, gt=0.0, description="epsilon of Adam, part of the recipe: damps steps on tiny gradients"
    )
    normalize_advantage: bool = Field(
        default=True, description="bring the advantages of each minibatch to mean 0 and deviation 1"
    )
    normalize_value: NormalizeValue = True
    plain_ratio_lag: int = Field(
        default=2,
        ge=0,
        description="policy lag (versions) above which the clip is centred on the newest policy, not on the actor's",
    )

    @model_validator(mode="after")
    def _adaptive_rate_starts_inside(self) -> Self:
        low, high = LOWEST_ADAPTIVE_RATE, HIGHEST_ADAPTIVE_RATE
        if self.lr_schedule == "kl_adaptive" and not low <= self.learning_rate <= high:
            text = f"learning_rate {self.learning_rate} is outside {low}..{high}, where kl_adaptive would move it at once"
            raise ValueError(text)
        return self

    def conflicts(self, scale: RunScale) -> Iterator[str]:
        """A minibatch is cut out of one batch."""
        yield from super().conflicts(scale)
        if self.minibatch > scale.batch_env_steps:
            yield (
                f"algorithm.minibatch: found {self.minibatch}, wanted at most {scale.batch_words}: "
                "a minibatch is cut out of one batch"
            )


class SinglePassSection(ActorCriticSection):
    """Base of the sections of algorithms that take one gradient step for each batch; losses are means over its env steps."""

    optimizer: Optimizer = "adam"
    optimizer_eps: float = Field(
        default=1e-5, gt=0.0, description="epsilon of the optimizer, part of the recipe: damps steps on tiny gradients"
    )

    def conflicts(self, scale: RunScale) -> Iterator[str]:
        """One env step alone has no deviation."""
        yield from super().conflicts(scale)
        if self.normalize_advantage and self._loss_env_steps(scale) == 1:
            yield (
                "algorithm.normalize_advantage: found true, wanted false where a loss is over 1 env step "
                "(rollout.length x env.num_envs): one advantage alone would always count 0"
            )

    def _loss_env_steps(self, scale: RunScale) -> int:
        return scale.batch_env_steps


class ImpalaSettings(SinglePassSection):
    """IMPALA (`common.algorithms.impala`)."""

    name: Literal["impala"] = Field(default="impala", description="importance-weighted actor-learner: V-trace, one pass")
    learning_rate: LearningRate = 6e-4
    gae_lambda: float = Field(default=1.0, ge=0.0, le=1.0, description="lambda of V-trace: 1 is the paper's")
    optimizer: Optimizer = "rmsprop"
    rho_clip: float | None = Field(
        default=1.0, ge=0.0, description="most that a step's probability ratio weighs in value targets (rho-bar); null: no limit"
    )
    c_clip: float | None = Field(
        default=1.0, ge=0.0, description="most that it carries later surprises back (c-bar); null: no limit"
    )
    pg_rho_clip: float | None = Field(
        default=1.0, ge=0.0, description="most that it weighs in the policy gradient; null: no limit"
    )
    normalize_value: NormalizeValue = False

    def conflicts(self, scale: RunScale) -> Iterator[str]:
        """The paper assumes c-bar <= rho-bar."""
        yield from super().conflicts(scale)
        if self.rho_clip is not None and (self.c_clip is None or self.c_clip > self.rho_clip):
            yield (
                f"algorithm.c_clip: found {'null' if self.c_clip is None else self.c_clip}, wanted at most {self.rho_clip} = "
                "algorithm.rho_clip: V-trace is a contraction only then"
            )


class A3CSettings(SinglePassSection):
    """A3C by data (`common.algorithms.a3c`)."""

    name: Literal["a3c"] = Field(default="a3c", description="asynchronous advantage actor-critic: actors send experience")
    learning_rate: LearningRate = 7e-4
    ratio_clip: float = Field(
        default=1.0, ge=1.0, description="most that the probability ratio of an env step counts, where an older policy acted"
    )
    normalize_value: NormalizeValue = False


class A3CGradSettings(SinglePassSection):
    """A3C by gradients (`common.algorithms.a3c_grad`)."""

    name: Literal["a3c-grad"] = Field(
        default="a3c-grad", description="asynchronous advantage actor-critic: actors send gradients of their own experience"
    )
    learning_rate: float = Field(default=7e-4, gt=0.0, le=1.0, description="of the learner's optimizer, the only one")
    gradient_precision: Precision = Field(
        default="fp32", description="gradients on the wire; bf16 halves the bytes and rounds, the arithmetic is unchanged"
    )

    def require_observations(self, env: EnvSpec, model: ModelSettings) -> None:
        """Refuse to normalise vectors: the learner receives no observations to take the running statistics of."""
        if model.normalize_observation and not env.is_image:
            found, wanted = "true", "false, because gradients carry no observations to take the statistics of"
            fix = "set it to false, or choose algorithm.name=a3c"
            raise ConfigError("model.normalize_observation for vectors by a3c-grad", found=found, wanted=wanted, fix=fix)

    def _loss_env_steps(self, scale: RunScale) -> int:
        return scale.message_env_steps


# --- off-policy ---


class ReplaySection(AlgorithmSection):
    """Base of the sections `algorithm` of algorithms that train on samples of what was inserted before."""

    replay_capacity: ReplayCapacity = 100_000
    warmup: Warmup = 1_000
    minibatch: Minibatch = 32
    samples_per_insert: float = Field(
        default=8.0,
        gt=0.0,
        le=100_000.0,
        description="times an env step is trained on, on average: gradient steps per env step x minibatch; held at any speed",
    )
    n_step: NStep = 1

    def conflicts(self, scale: RunScale) -> Iterator[str]:
        """Sizes of the memory, the run and its messages that do not fit one another."""
        yield from super().conflicts(scale)
        yield from self._window_conflicts(scale)
        if self.minibatch > self.replay_capacity:
            yield (
                f"algorithm.minibatch: found {self.minibatch}, wanted at most {self.replay_capacity} = "
                "algorithm.replay_capacity: it is drawn from that many env steps"
            )
        if self.warmup > self.replay_capacity:
            yield (
                f"algorithm.warmup: found {self.warmup}, wanted at most {self.replay_capacity} = "
                "algorithm.replay_capacity: the memory never holds more"
            )
        first = self.warmup + math.ceil(self.minibatch / self.samples_per_insert)  # env steps that pay for the first minibatch
        if max(first, scale.batch_env_steps) < self.minibatch <= self.replay_capacity:
            yield (
                f"algorithm.warmup: found {self.warmup}, wanted at least {self.minibatch} = algorithm.minibatch: the first one "
                f"would be drawn from {max(first, scale.batch_env_steps)} env steps, most of them several times"
            )
        if scale.batch_env_steps > self.replay_capacity:
            yield (
                f"algorithm.replay_capacity: found {self.replay_capacity}, wanted at least {scale.batch_words}: "
                "that many are inserted at once"
            )
        paid = self.samples_per_insert * (scale.env_steps - self.warmup)
        if paid < self.minibatch:
            yield (
                f"algorithm.samples_per_insert: found {self.samples_per_insert:g}, wanted more: target.env_steps "
                f"{scale.env_steps} less algorithm.warmup {self.warmup} pay for {max(0.0, paid):g} samples, and one gradient "
                f"step takes algorithm.minibatch {self.minibatch}"
            )
        if scale.waiting > scale.max_policy_lag:
            yield (
                f"learner.max_policy_lag: found {scale.max_policy_lag}, wanted at least {scale.waiting} = learner.credits x "
                "actor.count / learner.batch: messages wait while the gradient steps that earlier ones paid for are taken, "
                "and those that are dropped as stale would pay for none"
            )

    def _window_conflicts(self, scale: RunScale) -> Iterator[str]:
        """A window of n steps must be complete soon, and fit into what the memory holds of one environment."""
        if self.n_step > scale.length:
            yield (
                f"algorithm.n_step: found {self.n_step}, wanted at most {scale.length} = rollout.length: "
                "a window would be complete only several messages after it began"
            )
        streams = scale.num_envs * max(1, scale.actors)
        if (self.n_step + 1) * streams > self.replay_capacity:
            yield (
                f"algorithm.n_step: found {self.n_step}, wanted less than {self.replay_capacity / streams:g} = "
                f"algorithm.replay_capacity / {streams} environments: a window lies in the memory of one environment"
            )


class DQNSettings(ReplaySection):
    """Deep Q-learning (`common.algorithms.dqn`)."""

    name: Literal["dqn"] = Field(default="dqn", description="deep Q-learning with replay")
    double: bool = Field(default=True, description="the online network selects the next action, the target network rates it")
    dueling: bool = Field(
        default=True, description="state value and advantages in streams of their own, each a last hidden layer"
    )
    n_step: NStep = 3
    huber: float | None = Field(default=1.0, gt=0.0, description="errors beyond this count linearly; null: all squared")
    max_grad_norm: float = Field(default=10.0, gt=0.0, description="gradients are scaled down to this L2 norm")
    adam_eps: float = Field(default=1.5e-4, gt=0.0, description="epsilon of Adam: damps steps on tiny gradients")
    target_every: int = Field(
        default=1_000, ge=1, description="gradient steps between two copies of the network to the target network"
    )
    target_rate: float = Field(
        default=1.0, gt=0.0, le=1.0, description="how much of it is copied; below 1 (Polyak averaging) set target_every to 1"
    )
    average_rate: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="actors get a running average of the network, which moves this much each gradient step; 1: the network",
    )
    epsilon_initial: float = Field(default=1.0, ge=0.0, le=1.0, description="probability of a random action at the start")
    epsilon: float = Field(default=0.02, ge=0.0, le=1.0, description="where that probability ends, and stays")
    epsilon_env_steps: int = Field(default=100_000, ge=0, description="env steps until epsilon is reached in a straight line")

    def require_actions(self, action: ActionSpec) -> None:
        """Refuse continuous actions."""
        if not action.discrete:
            wanted, fix = "one of n actions", "choose an algorithm for continuous actions, such as algorithm.name=td3"
            raise ConfigError("dqn cannot choose among these actions", found=f"shape {action.shape}", wanted=wanted, fix=fix)


class TD3Settings(ReplaySection):
    """Twin delayed deterministic policy gradients (`common.algorithms.td3`). Noise is in halves of an action's range."""

    name: Literal["td3"] = Field(default="td3", description="twin delayed deterministic policy gradient, continuous actions")
    learning_rate: float = Field(default=3e-4, gt=0.0, le=1.0, description="of both optimizers, Adam")
    replay_capacity: ReplayCapacity = 1_000_000
    warmup: Warmup = 10_000
    minibatch: Minibatch = 256
    samples_per_insert: float = Field(
        default=256.0,
        gt=0.0,
        le=100_000.0,
        description="times an env step is trained on, on average; equal to minibatch: one gradient step per env step",
    )
    policy_delay: int = Field(default=2, ge=1, description="gradient steps of the critics per step of the actor and the targets")
    target_rate: float = Field(default=0.005, gt=0.0, le=1.0, description="how far the targets move each time (Polyak, tau)")
    target_noise: float = Field(default=0.2, ge=0.0, description="deviation of the noise on the target's action")
    target_noise_clip: float = Field(default=0.5, ge=0.0, description="that noise goes no further than this")
    random_env_steps: int = Field(
        default=10_000, ge=0, description="env steps of the run with actions drawn from all alike, before the policy acts"
    )
    exploration_noise: float = Field(default=0.1, ge=0.0, description="deviation of the noise on the actors' actions")

    def require_actions(self, action: ActionSpec) -> None:
        """Refuse discrete actions."""
        if action.discrete:
            found, fix = f"{action.n} discrete actions", "choose an algorithm for them, such as algorithm.name=dqn"
            raise ConfigError("td3 needs continuous actions", found=found, wanted="a vector with bounds", fix=fix)

    def conflicts(self, scale: RunScale) -> Iterator[str]:
        """The policy must get to act."""
        yield from super().conflicts(scale)
        if self.random_env_steps >= scale.env_steps:
            yield (
                f"algorithm.random_env_steps: found {self.random_env_steps}, wanted less than {scale.env_steps} = "
                "target.env_steps: the policy would never act"
            )


AlgorithmSettings: TypeAlias = Annotated[
    PPOSettings | ImpalaSettings | A3CSettings | A3CGradSettings | DQNSettings | TD3Settings, Field(discriminator="name")
]
"""The union of all of them, for pydantic to choose from."""
