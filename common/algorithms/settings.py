"""Section `algorithm` of the configuration: one class per algorithm, selected by `name`. It imports no torch, as `sections`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from common.algorithms.sections import (
    ActionValueSection,
    ActorCriticSection,
    Dueling,
    EpochsSection,
    Epsilon,
    LearningRate,
    Minibatch,
    NormalizeValue,
    NStep,
    OptimizerName,
    ReplayCapacity,
    ReplaySection,
    RunScale,
    Warmup,
)
from common.conditions import PER_ENVIRONMENT, AtMost, OnlyIf, Unless
from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ConfigError
from common.models.spec import ModelSettings, Precision
from common.replay import sequences

LOWEST_ADAPTIVE_RATE, HIGHEST_ADAPTIVE_RATE = 1e-6, 1e-2
"""The bounds of the learning rate of `kl_adaptive`: below them Adam does nothing, above them it does harm."""


# --- on-policy ---


class PPOSettings(EpochsSection, ActorCriticSection):
    """Proximal policy optimisation (`common.algorithms.ppo`)."""

    name: Literal["ppo"] = Field(default="ppo", description="proximal policy optimisation")
    lr_schedule: Literal["constant", "linear", "kl_adaptive"] = Field(  # type: ignore[assignment]  # its update can measure one more
        default="constant",
        description="linear: down to lr_final; kl_adaptive: times or over 1.5, to stay near kl_target; a resumed run "
        "keeps its adapted rate, whatever learning_rate is then",
    )
    kl_target: Annotated[float, OnlyIf("lr_schedule", "kl_adaptive")] = Field(
        default=0.01, gt=0.0, description="kl_adaptive: wanted KL divergence of one update, nats"
    )
    clip: float = Field(default=0.2, gt=0.0, lt=1.0, description="how far from 1 the probability ratio still counts (epsilon)")
    adam_eps: float = Field(
        default=1e-5, gt=0.0, description="epsilon of Adam, part of the recipe: damps steps on tiny gradients"
    )
    normalize_advantage: bool = Field(
        default=True, description="bring the advantages of each minibatch to mean 0 and deviation 1"
    )
    normalize_value: NormalizeValue = True
    plain_ratio_lag: Annotated[int, Unless("run.mode", "lockstep")] = Field(
        default=2,
        ge=0,
        description="policy lag (versions) above which the clip is centred on the newest policy, not on the actor's",
    )

    @property
    def optimizer_recipe(self) -> tuple[OptimizerName, float]:
        """Adam with `adam_eps`."""
        return "adam", self.adam_eps

    def conflicts(self, scale: RunScale) -> Iterator[str]:
        """The KL divergence of an update is measured before each of its gradient steps."""
        yield from super().conflicts(scale)
        minibatches = round(scale.batch_env_steps / self.minibatch)
        if scale.memory:  # each is whole environments
            minibatches = min(minibatches, scale.num_envs * scale.batch)
        if self.lr_schedule == "kl_adaptive" and self.epochs * minibatches == 1:
            yield (
                "algorithm.lr_schedule: found kl_adaptive, wanted another with one gradient step per update (epochs 1, one "
                "minibatch): the KL divergence is measured before each step, and would always be 0"
            )

    @model_validator(mode="after")
    def _adaptive_rate_starts_inside(self) -> Self:
        low, high = LOWEST_ADAPTIVE_RATE, HIGHEST_ADAPTIVE_RATE
        if self.lr_schedule == "kl_adaptive" and not low <= self.learning_rate <= high:
            text = f"learning_rate {self.learning_rate} is outside {low}..{high}, where kl_adaptive would move it at once"
            raise ValueError(text)
        return self


class SinglePassSection(ActorCriticSection):
    """Base of the sections of algorithms that take one gradient step for each batch; losses are means over its env steps."""

    optimizer: OptimizerName = "adam"
    optimizer_eps: float = Field(
        default=1e-5, gt=0.0, description="epsilon of the optimizer, part of the recipe: damps steps on tiny gradients"
    )

    @property
    def optimizer_recipe(self) -> tuple[OptimizerName, float]:
        """The settings `optimizer` and `optimizer_eps`."""
        return self.optimizer, self.optimizer_eps

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
    gae_lambda: Annotated[float, Unless("rollout.length", 1)] = Field(
        default=1.0, ge=0.0, le=1.0, description="lambda of V-trace: 1 is the paper's"
    )
    optimizer: OptimizerName = "rmsprop"
    rho_clip: float | None = Field(
        default=1.0, ge=0.0, description="most that a step's probability ratio weighs in value targets (rho-bar); null: no limit"
    )
    c_clip: Annotated[
        float | None,
        AtMost("rho_clip", "V-trace is a contraction only then"),
        Unless("gae_lambda", 0.0),
        Unless("rollout.length", 1),
    ] = Field(default=1.0, ge=0.0, description="most that it carries later surprises back (c-bar); null: no limit")
    pg_rho_clip: float | None = Field(
        default=1.0, ge=0.0, description="most that it weighs in the policy gradient; null: no limit"
    )
    normalize_value: NormalizeValue = False

    @property
    def clips(self) -> tuple[float | None, float | None, float | None]:
        """`rho_clip`, `c_clip` and `pg_rho_clip` of `returns.vtrace`."""
        return self.rho_clip, self.c_clip, self.pg_rho_clip


class A3CSettings(SinglePassSection):
    """A3C by data (`common.algorithms.a3c`)."""

    name: Literal["a3c"] = Field(default="a3c", description="asynchronous advantage actor-critic: actors send experience")
    learning_rate: LearningRate = 7e-4
    ratio_clip: float = Field(
        default=1.0, ge=1.0, description="most that the probability ratio of an env step counts, where another policy acted"
    )
    normalize_value: NormalizeValue = False

    @property
    def clips(self) -> tuple[float, float, float]:
        """One clip, at least 1, for all. Where the newest policy acted V-trace is GAE: all ratios are 1, but for rounding."""
        return self.ratio_clip, self.ratio_clip, self.ratio_clip


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
        if model.normalize_observation and any(part.is_vector for part in env.parts):
            found, wanted = "true", "false, because gradients carry no observations to take the statistics of"
            fix = "set it to false, or choose algorithm.name=a3c"
            raise ConfigError("model.normalize_observation for vectors by a3c-grad", found=found, wanted=wanted, fix=fix)

    def _loss_env_steps(self, scale: RunScale) -> int:
        return scale.message_env_steps


class PQNSettings(EpochsSection, ActionValueSection):
    """Parallelised Q-network (`common.algorithms.pqn`)."""

    name: Literal["pqn"] = Field(default="pqn", description="Q-learning on trajectories, without replay and target network")
    q_lambda: Annotated[float, Unless("rollout.length", 1)] = Field(
        default=0.65,
        ge=0.0,
        le=1.0,
        description="how far rewards are trusted over values: 0 one step, 1 the whole episode",
    )


# --- off-policy ---


class DQNSettings(ActionValueSection, ReplaySection):
    """Deep Q-learning (`common.algorithms.dqn`)."""

    name: Literal["dqn"] = Field(default="dqn", description="deep Q-learning with replay")
    double: bool = Field(default=True, description="the online network selects the next action, the target network rates it")
    dueling: Dueling = True
    n_step: NStep = 3
    huber: float | None = Field(default=1.0, gt=0.0, description="errors beyond this count linearly; null: all squared")
    adam_eps: float = Field(default=1.5e-4, gt=0.0, description="epsilon of Adam: damps steps on tiny gradients")
    target_every: int = Field(
        default=1_000, ge=1, description="gradient steps between two copies of the network to the target network"
    )
    target_rate: Annotated[
        float, OnlyIf("target_every", 1, why="the target network would move too rarely to follow the trained one")
    ] = Field(default=1.0, gt=0.0, le=1.0, description="how much of it is copied; below 1: Polyak averaging")
    average_rate: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="actors get a running average of the network, which moves this much each gradient step; 1: the network",
    )
    epsilon: Epsilon = 0.02
    burn_in: Annotated[int, OnlyIf("model.recurrent", "lstm", "gru")] = Field(
        default=8, ge=0, description="rows of a sequence that only bring its stored state to that of the newest weights"
    )

    def conflicts(self, scale: RunScale) -> Iterator[str]:
        """Sequences are trained on whole."""
        yield from super().conflicts(scale)
        if scale.memory and self.minibatch % scale.length:
            yield (
                f"algorithm.minibatch: found {self.minibatch}, wanted a multiple of {scale.length} = rollout.length: with "
                "model.recurrent sequences are trained on whole"
            )

    def require_room(self, scale: RunScale) -> None:
        """As the base; sequences have a memory of their own."""
        super().require_room(scale)
        if scale.memory:
            sizes = {"length": scale.length, "burn_in": self.burn_in, "n_step": self.n_step}
            sequences.require_room(self.replay_capacity, **sizes, streams=scale.streams)

    def notes_on(self, scale: RunScale) -> Iterator[str]:
        """An interval with which the run never copies the target network."""
        yield from super().notes_on(scale)
        yield from self._beyond_run("target_every", scale, "the target network keeps its initial weights")


class TwinCriticSection(ReplaySection):
    """Base of the sections of algorithms with two critics of continuous actions (`common.algorithms.twin_critics`)."""

    learning_rate: float = Field(default=3e-4, gt=0.0, le=1.0, description="of both optimizers, Adam")
    critic_learning_rate: float | None = Field(
        default=None, gt=0.0, le=1.0, description="of the critics, before any schedule, which scales it too; null: learning_rate"
    )
    replay_capacity: ReplayCapacity = 1_000_000
    warmup: Warmup = 10_000
    minibatch: Minibatch = 256
    samples_per_insert: float = Field(
        default=256.0,
        gt=0.0,
        le=100_000.0,
        description="times an env step is trained on, on average; equal to minibatch: one gradient step per env step",
    )
    target_rate: float = Field(default=0.005, gt=0.0, le=1.0, description="how far the targets move each time (Polyak, tau)")
    random_env_steps: Annotated[int, PER_ENVIRONMENT, AtMost("target.env_steps", "the policy would never act", below=True)] = (
        Field(default=10_000, ge=0, description="env steps of the run with actions drawn from all alike, before the policy acts")
    )

    def require_actions(self, action: ActionSpec) -> None:
        """Refuse discrete actions, and components without a range: networks and initial play are in halves of it."""
        without = action.bounded.count(False)
        if action.discrete or without:
            components = f"{without} of {len(action.low)} components without finite bounds, low < high"
            found = f"{action.n} discrete actions" if action.discrete else components
            fix = f"choose an algorithm for them, such as algorithm.name={'ppo' if action.shape else 'dqn'}"
            raise ConfigError(f"{self.name} needs continuous actions", found=found, wanted="a vector with bounds", fix=fix)


class TD3Settings(TwinCriticSection):
    """Twin delayed deterministic policy gradients (`common.algorithms.td3`). Noise is in halves of an action's range."""

    name: Literal["td3"] = Field(default="td3", description="twin delayed deterministic policy gradient, continuous actions")
    policy_delay: int = Field(default=2, ge=1, description="gradient steps of the critics per step of the actor and the targets")
    target_noise: Annotated[float, Unless("target_noise_clip", 0.0)] = Field(
        default=0.2, ge=0.0, description="deviation of the noise on the target's action"
    )
    target_noise_clip: Annotated[float, Unless("target_noise", 0.0)] = Field(
        default=0.5, ge=0.0, description="that noise goes no further than this"
    )
    exploration_noise: float = Field(default=0.1, ge=0.0, description="deviation of the noise on the actors' actions")

    def notes_on(self, scale: RunScale) -> Iterator[str]:
        """An interval with which the run never trains the actor."""
        yield from super().notes_on(scale)
        yield from self._beyond_run("policy_delay", scale, "the policy and the targets keep their initial weights")


class SACSettings(TwinCriticSection):
    """Soft actor-critic (`common.algorithms.sac`)."""

    name: Literal["sac"] = Field(default="sac", description="soft actor-critic: learned noise, continuous actions")


AlgorithmSettings: TypeAlias = Annotated[
    PPOSettings | ImpalaSettings | A3CSettings | A3CGradSettings | PQNSettings | DQNSettings | TD3Settings | SACSettings,
    Field(discriminator="name"),
]
"""The union of all of them, for pydantic to choose from."""
