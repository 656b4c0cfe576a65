"""Bases of the section `algorithm` of the configuration, and the size of a run, which the settings of its algorithm must fit.

It imports no torch, so that a process which only reads a configuration does not wait seconds for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from common.conditions import PER_ENVIRONMENT, AtMost, OnlyIf, Unless, UnlessEqual
from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ConfigError
from common.models.spec import ModelSettings, Precision
from common.replay.blocks import STREAMS, block_rows

_ENTROPY_COEF_DISCRETE = 0.01
_T = TypeVar("_T")
_HELD = AtMost("replay_capacity", "the memory never holds more")
_SOON = AtMost("rollout.length", "a window would be complete only several messages after it began")
_WITHIN_RUN = AtMost("target.env_steps", "the run ends before the schedule does", refused=False)

_Linear: TypeAlias = Annotated[_T, OnlyIf("lr_schedule", "linear")]

# Settings of which several algorithms have a default of their own.
LearningRate: TypeAlias = Annotated[float, Field(gt=0.0, le=1.0, description="of the optimizer; where a schedule starts")]
NormalizeValue: TypeAlias = Annotated[
    bool, Field(description="bring value targets to mean 0 and deviation 1, by those of the run (ppo: of recent updates)")
]
OptimizerName: TypeAlias = Annotated[
    Literal["adam", "rmsprop"],
    Field(description="adam, or rmsprop as TensorFlow computes it: epsilon inside the root, first steps small"),
]
ReplayCapacity: TypeAlias = Annotated[
    int, Field(ge=1, description="env steps kept, over all environments; the oldest make room. Allocated at the start")
]
Warmup: TypeAlias = Annotated[
    int,
    Field(ge=0, description="env steps inserted before the first gradient step"),
    _HELD,
    AtMost("target.env_steps", "the run would end before its first gradient step", below=True),
]
Minibatch: TypeAlias = Annotated[int, Field(ge=1, le=65_536, description="transitions drawn for one gradient step"), _HELD]
Dueling: TypeAlias = Annotated[
    bool, Field(description="state value and advantages in streams of their own, each a last hidden layer")
]
Epsilon: TypeAlias = Annotated[float, Field(ge=0.0, le=1.0, description="where that probability ends, and stays")]
NStep: TypeAlias = Annotated[int, Field(ge=1, le=64, description="env steps of reward before a value stands for the rest"), _SOON]


class RunScale(NamedTuple):
    """The size of a run, as far as an algorithm's settings must fit it."""

    length: int  # T: env steps of each environment in one trajectory
    num_envs: int  # B: environments of each actor
    batch: int  # experience messages per update
    credits: int  # experience messages that each actor may have under way
    max_policy_lag: int  # versions; older experience is dropped
    actors: int  # that the run expects of one rank of the learner; 0: unknown
    env_steps: int  # the run's budget
    memory: bool = False  # whether the network has it (`model.recurrent`)
    ranks: int = 1  # of the learner, each of which takes a minibatch for every gradient step
    frame_stack: int = 1  # S: observations that the network sees

    @property
    def message_env_steps(self) -> int:
        """Rows [T, B] of one trajectory; reset rows among them are not trained on."""
        return self.length * self.num_envs

    @property
    def batch_env_steps(self) -> int:
        """Rows of one batch."""
        return self.batch * self.message_env_steps

    @property
    def streams(self) -> int:
        """Environments for which a replay memory is laid out: those of all actors of one rank.

        Where all actors start elsewhere (0), a memory of sequences is laid out for one: with more environments than rollouts it
        never has a sequence to draw.
        """
        return max(STREAMS, (self.actors or int(self.memory)) * self.num_envs)

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
    lr_final: Annotated[_Linear[float], AtMost("learning_rate", "the schedule goes down")] = Field(
        default=0.0, ge=0.0, le=1.0, description="linear: where the learning rate ends, and stays"
    )
    lr_env_steps: Annotated[_Linear[int], PER_ENVIRONMENT, UnlessEqual("lr_final", "learning_rate"), _WITHIN_RUN] = Field(
        default=0,
        ge=0,
        description="linear: env steps until lr_final is reached; 0: all of target.env_steps, which a resume may raise",
    )
    clip_reward: bool = Field(default=False, description="train on the sign of the reward (returns are always reported raw)")
    precision: Precision = Field(
        default="fp32", description="arithmetic of training; bf16 where the processor has it, else fp32; weights stay float32"
    )

    def conflicts(self, scale: RunScale) -> Iterator[str]:  # noqa: ARG002  subclasses need it
        """Sentences on settings that cannot work with a run of this scale, each beginning with its dotted key."""
        yield from ()

    def notes_on(self, scale: RunScale) -> Iterator[str]:  # noqa: ARG002  subclasses need it
        """Sentences on settings that lose their effect in a run of this scale, each beginning with its dotted key."""
        yield from ()

    def require_actions(self, action: ActionSpec) -> None:
        """Raise `ConfigError` where the algorithm cannot choose among such actions; this class accepts all."""

    def require_observations(self, env: EnvSpec, model: ModelSettings) -> None:
        """Raise `ConfigError` where the algorithm cannot treat observations as `model` asks; this class accepts all."""


class ActorCriticSection(AlgorithmSection):
    """Base of the sections of algorithms that learn a policy and its value."""

    gae_lambda: Annotated[float, Unless("rollout.length", 1)] = Field(
        default=0.95, ge=0.0, le=1.0, description="how far rewards are trusted over values: 0 one step, 1 the whole episode"
    )
    value_coef: float = Field(default=0.5, ge=0.0, description="weight of the value loss")
    entropy_coef: float | None = Field(
        default=None,
        ge=0.0,
        description="weight of the entropy bonus, per nat; where it starts; null: 0.01, and 0 where actions are continuous",
    )
    entropy_final: Annotated[float, Unless("entropy_env_steps", 0)] = Field(
        default=0.0, ge=0.0, description="where that weight ends, and stays"
    )
    entropy_env_steps: Annotated[int, PER_ENVIRONMENT, UnlessEqual("entropy_final", "entropy_coef"), _WITHIN_RUN] = Field(
        default=0, ge=0, description="env steps until entropy_final is reached in a straight line; 0: it stays at entropy_coef"
    )
    max_grad_norm: float = Field(default=0.5, gt=0.0, description="gradients are scaled down to this L2 norm")
    normalize_advantage: bool = Field(default=False, description="bring the advantages of each loss to mean 0 and deviation 1")
    least_advantage_std: Annotated[float, OnlyIf("normalize_advantage", True)] = Field(
        default=0.0,
        ge=0.0,
        description="normalize_advantage: a deviation below this counts as this, so that what makes no difference stays small",
    )

    @property
    def optimizer_recipe(self) -> tuple[OptimizerName, float]:
        """Name and epsilon of the optimizer that `ActorCriticLearner` builds; a section with settings for these returns them."""
        return "adam", 1e-5

    def for_actions(self, *, discrete: bool) -> Self:
        """These settings with the entropy bonus of this kind of action, where none is set.

        The noise of a Gaussian explores by itself, and its entropy has no upper limit.
        """
        chosen = _ENTROPY_COEF_DISCRETE if discrete else 0.0
        return self if self.entropy_coef is not None else self.model_copy(update={"entropy_coef": chosen})


class ActionValueSection(AlgorithmSection):
    """Base of the sections of algorithms that learn Q(o, a), and act by it epsilon-greedily."""

    dueling: Dueling = False
    max_grad_norm: float = Field(default=10.0, gt=0.0, description="gradients are scaled down to this L2 norm")
    epsilon_initial: Annotated[float, Unless("epsilon_env_steps", 0)] = Field(
        default=1.0, ge=0.0, le=1.0, description="probability of a random action at the start"
    )
    epsilon: Epsilon = 0.01
    epsilon_env_steps: Annotated[int, PER_ENVIRONMENT, UnlessEqual("epsilon", "epsilon_initial"), _WITHIN_RUN] = Field(
        default=100_000, ge=0, description="env steps until epsilon is reached in a straight line"
    )

    def require_actions(self, action: ActionSpec) -> None:
        """Refuse actions of several components, and continuous ones."""
        if action.shape:
            continuous = f"a continuous vector of shape {action.shape}"
            found = f"{len(action.choices)} discrete components" if action.discrete else continuous
            fix = f"choose an algorithm for them, such as algorithm.name={'ppo' if action.discrete else 'td3'}"
            raise ConfigError(f"{self.name} cannot choose among these actions", found=found, wanted="one of n actions", fix=fix)


class EpochsSection(AlgorithmSection):
    """Base of the sections of algorithms that train on each batch for several epochs of random minibatches."""

    epochs: int = Field(default=4, ge=1, le=100, description="passes over each batch")
    minibatch: int = Field(default=256, ge=2, description="env steps per gradient step (a batch is cut into nearly equal parts)")

    def conflicts(self, scale: RunScale) -> Iterator[str]:
        """A minibatch is cut out of one batch."""
        yield from super().conflicts(scale)
        if self.minibatch > scale.batch_env_steps:
            yield (
                f"algorithm.minibatch: found {self.minibatch}, wanted at most {scale.batch_words}: "
                "a minibatch is cut out of one batch"
            )

    def notes_on(self, scale: RunScale) -> Iterator[str]:
        """A minibatch of a network with memory is whole environments."""
        yield from super().notes_on(scale)
        if scale.memory and self.minibatch < scale.length:
            yield (
                f"algorithm.minibatch: found {self.minibatch}, and minibatches have at least rollout.length {scale.length} env "
                "steps: with model.recurrent each is whole environments"
            )


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

    def _samples(self, scale: RunScale) -> float:
        return self.samples_per_insert * (scale.env_steps - self.warmup)

    def _beyond_run(self, name: str, scale: RunScale, why: str) -> Iterator[str]:
        """Yield a sentence where the setting `name`, an interval in gradient steps, is longer than the run."""
        most, found = int(self._samples(scale) / (self.minibatch * scale.ranks)), getattr(self, name)
        if found > most:
            yield (
                f"algorithm.{name}: found {found}, more than the number of gradient steps that target.env_steps "
                f"{scale.env_steps} pays for, {most}: {why}"
            )

    def conflicts(self, scale: RunScale) -> Iterator[str]:
        """Sizes of the memory, the run and its messages that do not fit one another."""
        yield from super().conflicts(scale)
        drawn = self.minibatch * scale.ranks
        paid_from = (self.warmup + math.ceil(drawn / self.samples_per_insert)) // scale.ranks  # inserted by each rank
        newest = max(1, scale.actors) * scale.message_env_steps if scale.memory else 0  # rollouts that nothing follows yet
        first = max(max(paid_from, scale.batch_env_steps) - newest, scale.message_env_steps)
        ranks = f" x learner.ranks {scale.ranks}" if scale.ranks > 1 else ""
        if first < self.minibatch <= self.replay_capacity:
            more = f" + {newest * scale.ranks}, the newest rollouts, which nothing follows yet" if newest else ""
            yield (
                f"algorithm.warmup: found {self.warmup}, wanted at least {drawn + newest * scale.ranks} = algorithm.minibatch"
                f"{ranks}{more}: the first one would be drawn from {first} env steps, most of them several times"
            )
        if scale.batch_env_steps > self.replay_capacity:
            yield (
                f"algorithm.replay_capacity: found {self.replay_capacity}, wanted at least {scale.batch_words}: "
                "that many are inserted at once"
            )
        paid = self._samples(scale)
        if 0 < paid < drawn:
            yield (
                f"algorithm.samples_per_insert: found {self.samples_per_insert:g}, wanted more: target.env_steps "
                f"{scale.env_steps} less algorithm.warmup {self.warmup} pay for {paid:g} samples, and one gradient "
                f"step takes algorithm.minibatch {self.minibatch}{ranks}"
            )
        if scale.waiting > scale.max_policy_lag:
            yield (
                f"learner.max_policy_lag: found {scale.max_policy_lag}, wanted at least {scale.waiting} = learner.credits x "
                "actor.count (of a rank) / learner.batch: messages wait while the gradient steps that earlier ones paid for are "
                "taken, and those that are dropped as stale would pay for none"
            )
        try:
            self.require_room(scale)
        except ConfigError as error:
            yield str(error)

    def require_room(self, scale: RunScale) -> None:
        """Raise `ConfigError` where the memory has no room for the environments that write to it."""
        if not scale.memory:
            block_rows(scale.frame_stack, capacity=self.replay_capacity, n_step=self.n_step, streams=scale.streams)
