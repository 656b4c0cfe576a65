"""The actor's loop: wait for a credit, load the newest policy, collect a rollout, send it.

A credit is the permission to collect: the loop waits for it before the rollout begins, so that waiting makes no experience old.
One rollout is acted by one policy version. The policy of the next is requested late in the rollout, and once more when a credit
comes for which the loop had to wait. Most versions that are published meanwhile are never sent, so that snapshots do not grow
with the square of the number of actors. The loop has no sockets (`Link`), no signals and no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from common.algorithms.api import begin_episodes, states
from common.errors import DropReason, RunChangedError
from common.observability import logs
from common.observability.worker_metrics import ActorStats
from common.protocol.messages import ACTOR_STATE, Arrays, ExperienceMessage, Snapshot, Welcome
from common.runtime.lifecycle import BUILD_SECONDS
from common.transport.link import Link
from common.units import Seconds
from services.acting.incarnation import Incarnation, begin_alike
from services.acting.policy import load_newest_policy, load_policy

WAIT_SECONDS: Seconds = 0.05
REQUEST_SHARE = 1 / 4  # of a rollout that is left when the policy of the next one is requested: time for its way here

_log = logs.EventLog(__name__)


@dataclass(slots=True, kw_only=True)
class ActorLoop:
    """Loop of one actor, in the thread that calls `run`."""

    link: Link
    incarnation: Incarnation
    # Given in lockstep: builds a new incarnation in place of the one before. Each message then has the state after it.
    restart: Callable[[], Incarnation] | None = None
    message_type: type[ExperienceMessage]  # carries the arrays that the policy makes of a rollout
    stats: ActorStats  # the loop alone writes them
    stopping: Callable[[], bool]  # whether a stop is requested
    alive: Callable[..., None]  # called at every wait, and as `Health.tick` before each env step
    _snapshot: Snapshot | None = None  # in lockstep: the one that acts
    _unstepped: Welcome | None = None  # in lockstep: the Welcome for which the incarnation was built, until its first env step

    def run(self) -> str:
        """Collect and send until there is a reason to stop; return the reason. Counts an unfinished rollout as dropped.

        An earlier loop of this process leaves its counters in `stats`. Its policy is gone.
        """
        self.stats.version = -1
        self.link.count_from(self.stats.env_steps, self.stats.dropped)
        self._built()
        try:
            while self._ready():
                if self._collect():
                    self._send()
        except RunChangedError:
            self.stats.dropped[DropReason.UNFINISHED] += self.incarnation.rollout.env_steps
            raise
        self.stats.phases.stop()
        return self.link.drain.reason if self.link.drain else "stopped"

    def _ready(self) -> bool:
        """Wait for a credit, and load a policy; return False when it is time to stop."""
        waited = False
        self.link.service()
        while not self._over():
            waits_for = "credit_wait"
            self.stats.phases.enter("snapshot")
            loaded = self._load_newest()
            if self.restart and self.link.new_incarnation:
                self._begin_again(self.restart)
            elif self.link.has_credit and (self.link.welcomed or self._unstepped is None):
                if self._has_policy(newest=waited and not loaded):
                    return True
                self.link.request_snapshot(after=self.stats.version)
                waits_for = "snapshot"
            self.stats.phases.enter(waits_for)
            waited = waited or not self.link.has_credit
            self.alive()
            self.link.service(WAIT_SECONDS)
        return False

    def _over(self) -> bool:
        return self.stopping() or self.link.drain is not None

    def _begin_again(self, restart: Callable[[], Incarnation]) -> None:
        """Continue from the state in the newest Welcome; a policy that is loaded stays.

        One that was built for an equal Welcome, and has not stepped, stays too: the learner forgets an actor that builds for a
        minute, and would forget it again.
        """
        welcome = self.link.welcome
        if welcome is None or not self.link.welcomed:
            return
        self.link.new_incarnation = False
        if self._unstepped is not None and begin_alike(self._unstepped, welcome):
            return
        self.incarnation = restart()
        self._built()
        if self._snapshot is not None:
            load_policy(self._snapshot, self.incarnation.policy)

    def _built(self) -> None:
        """In lockstep, wait for the learner, which may have forgotten this actor while it built its environments."""
        if self.restart:
            self._unstepped = self.link.welcome
            self.link.greet_after_silence()

    def _has_policy(self, *, newest: bool) -> bool:
        """Return whether a policy is loaded that may act: in lockstep, or where asked for, the `newest` that the learner named.

        Another one may act unless its version is beyond that: then the learner continues from an older one, and would refuse it.
        """
        version, named = self.stats.version, self.link.session.version
        return version == named >= 0 if newest or self.restart else 0 <= version <= named

    def _load_newest(self) -> bool:
        snapshot = load_newest_policy(self.link, self.incarnation.policy)
        if snapshot is None:
            return False
        self.stats.version = snapshot.version
        self._snapshot = snapshot if self.restart else None
        return True

    def _collect(self) -> bool:
        """Record one rollout; return False, and drop the rows, when it is time to stop or to begin a new incarnation."""
        incarnation, rollout = self.incarnation, self.incarnation.rollout
        self._unstepped = None
        before, request_at = self.stats.env_steps, rollout.length - 1 - round(REQUEST_SHARE * rollout.length)
        for t in range(rollout.length):
            self.alive(doing="steps its environments", within=BUILD_SECONDS)  # a step may begin an episode, and build as much
            self.stats.phases.enter("act")
            begin_episodes(incarnation.policy, rollout.start(t))
            acted = {name: value.numpy() for name, value in incarnation.policy.act(torch.from_numpy(rollout.observation)).items()}
            action = acted.pop("action")
            self.stats.phases.enter("env")
            transition = incarnation.environment.step(action)
            rollout.record(t, action, acted, transition)
            self.stats.env_steps = before + rollout.env_steps
            self.stats.phases.enter("snapshot")
            if t == request_at:
                self.link.request_snapshot(after=self.stats.version)
            self.link.service()
            again = self.restart is not None and self.link.new_incarnation
            if again or self._over():
                self.stats.dropped[DropReason.ROLLED_BACK if again else DropReason.UNFINISHED] += rollout.env_steps
                self.link.count(self.stats.env_steps, self.stats.dropped)
                return False
        return True

    def _send(self) -> None:
        self.stats.phases.enter("experience")
        incarnation = self.incarnation
        rollout, env_steps = incarnation.rollout.finish(states(incarnation.policy)), incarnation.rollout.env_steps
        incarnation.rollout.begin_next()
        returns = np.asarray(rollout["episode_return"])
        self.stats.episodes += len(returns)
        self.stats.returns.extend(returns.tolist())
        arrays: Arrays = incarnation.policy.experience(rollout)
        if self.restart:
            arrays = {**arrays, ACTOR_STATE: incarnation.state()}
        self.stats.phases.enter("encode")
        stats = self.stats
        self.link.count(stats.env_steps, stats.dropped)
        stats.policy_lag.observe(max(0, self.link.session.version - stats.version))
        self.link.offer(self.message_type(seq=0, env_steps_sent=0, version=stats.version, env_steps=env_steps, arrays=arrays))
