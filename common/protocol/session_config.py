"""Settings of a session, with the rule of the actors' windows and the time limits of silence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.protocol.arrays import DTYPES
from common.protocol.limits import SLOWEST_LINK
from common.protocol.messages import ArraySpec
from common.units import EnvSteps, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Settings of a session, fixed for the life of the learner."""

    run: str
    run_config: str  # the run's configuration as JSON
    env_signature: str
    schema: tuple[ArraySpec, ...]
    credits: int  # window of each actor, at least
    rollout_env_steps: EnvSteps  # most env steps in one experience message
    batch: int  # messages the learner takes at once: the windows together never hold less, or it would wait for ever
    max_actors: int
    rank: int = 0  # of the learner, among `ranks`: indices of workers differ between ranks
    ranks: int = 1
    lockstep: bool = False  # each batch needs all actors alike: no window is widened while some of them are not here
    max_evaluators: int = 16  # each costs the learner a snapshot per evaluation, and more are of no use
    heartbeat_seconds: Seconds = 1.0
    silence_seconds: Seconds = 10.0  # without a message, and the time in which its largest one crosses, a worker is away
    forget_seconds: Seconds = 60.0  # the same, until its account is closed and its experience in flight dropped

    def window(self, actors: int) -> int:
        """Return the credits of each of so many actors: the setting, or more where few must fill one batch."""
        return self.credits if self.lockstep else max(self.credits, -(-self.batch // max(1, actors)))

    def in_flight(self, role: str) -> EnvSteps:
        """Return the most env steps that a worker of this role can have stepped that reached the learner in no message.

        They are the messages of the largest window, the rollout under way, and one rollout that a new incarnation dropped.
        """
        return (self.window(actors=1) + 2) * self.rollout_env_steps if role == "actor" else 0

    def crossing(self, role: str) -> Seconds:
        """Return how long an experience message of this role crosses the slowest link, without its arrays of free length."""
        fixed = [spec for spec in self.schema if role == "actor" and -1 not in spec.shape]
        return sum(math.prod(spec.shape) * DTYPES[spec.dtype].itemsize for spec in fixed) / SLOWEST_LINK

    def slots(self, role: str) -> int:
        """Return the most workers of this role that are connected at once."""
        return self.max_actors if role == "actor" else self.max_evaluators
