"""What an actor does all day: wait for a credit, take the newest policy, collect a rollout, send it.

A credit is the permission to collect: it is awaited before the rollout begins, so that waiting makes no experience
old. One rollout is acted by one policy version. The loop knows no sockets (`Link`), no signals and no HTTP.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import torch

from common.errors import DropReason
from common.runtime.metrics import Phases
from common.service.policies import load, load_newest
from common.transport.link import Link
from common.units import EnvSteps, Seconds, Version
from common.wire.messages import ACTOR_STATE, Arrays, Experience, Snapshot
from services.actor.setup import Setup

WAIT_SECONDS: Seconds = 0.05
EPISODES_KEPT = 100


class Actor:
    """One actor's loop. `run` returns when it was asked to stop, or the learner drains."""

    def __init__(
        self,
        *,
        link: Link,
        setup: Setup,
        restart: Callable[[], Setup] | None = None,
        ships: type[Experience],
        phases: Phases,
        stopping: Callable[[], bool],
        alive: Callable[[], None],
        observe_lag: Callable[[int], None],
    ) -> None:
        """`ships` is the message that carries what the policy makes of a rollout.

        `restart`, given in lockstep, builds what a new incarnation goes on with. Each message then carries the state after it.
        `alive` is told at every wait and env step that the loop turns; `observe_lag` the policy lag of each rollout sent.
        """
        self.env_steps: EnvSteps = 0  # stepped by this process
        self.episodes = 0
        self.dropped: Counter[str] = Counter()
        self.version: Version = -1
        self.returns: deque[float] = deque(maxlen=EPISODES_KEPT)
        self._link = link
        self._setup = setup
        self._restart = restart
        self._snapshot: Snapshot | None = None  # the one that acts
        self._phases = phases
        self._stopping = stopping
        self._alive = alive
        self._observe_lag = observe_lag
        self._ships = ships

    def run(self) -> str:
        """Collect and send until there is a reason to stop; returns the reason. Counts an unfinished rollout as dropped."""
        self._link.want_snapshots(after=-1)
        while self._ready():
            self._phases.enter("snapshot")
            self._load_newest()
            if self._collect():
                self._send()
        self._phases.stop()
        return self._link.drain.reason if self._link.drain else "stopped"

    def _ready(self) -> bool:
        """Wait for a credit and a policy; False when it is time to stop."""
        self._phases.enter("credit_wait")
        self._link.service()
        while not self._over():
            if self._restart and self._link.new_incarnation:
                self._begin_again(self._restart)
            elif self._link.may_offer and self._has_policy():
                return True
            self._alive()
            self._link.service(WAIT_SECONDS)
        return False

    def _over(self) -> bool:
        return self._stopping() or self._link.drain is not None

    def _has_policy(self) -> bool:
        """Return whether there is a policy to act by: any, or in lockstep the learner's newest, which the actor waits for."""
        if self._restart is None:
            return self.version >= 0 or self._load_newest()
        self._load_newest()
        return self.version >= 0 and self.version == self._link.session.version

    def _load_newest(self) -> bool:
        snapshot = load_newest(self._link, self._setup.policy)
        if snapshot is not None:
            self._took(snapshot)
        return snapshot is not None

    def _took(self, snapshot: Snapshot) -> None:
        self.version = snapshot.version
        if self._restart:
            self._snapshot = snapshot

    def _begin_again(self, restart: Callable[[], Setup]) -> None:
        """Continue from the state in the newest Welcome; a policy that is loaded stays."""
        if not self._link.welcomed:
            return
        self._link.new_incarnation = False
        self._setup.environment.close()
        self._setup = restart()
        if self._snapshot is not None:
            load(self._snapshot, self._setup.policy)

    def _collect(self) -> bool:
        """Record one rollout; return False, and drop the rows, when it is time to stop or to begin a new incarnation."""
        setup, rollout = self._setup, self._setup.rollout
        before = self.env_steps
        for t in range(rollout.length):
            self._phases.enter("act")
            acted = {name: value.numpy() for name, value in setup.policy.act(torch.from_numpy(rollout.observation(t))).items()}
            action = acted.pop("action")
            self._phases.enter("env")
            transition = setup.environment.step(action)
            rollout.record(t, action, acted, transition)
            self.env_steps = before + rollout.env_steps
            self._phases.enter("snapshot")
            self._link.service()
            self._alive()
            again = self._restart is not None and self._link.new_incarnation
            if again or self._over():
                self.dropped[DropReason.ROLLED_BACK if again else DropReason.UNFINISHED] += rollout.env_steps
                self._link.count(self.env_steps, self.dropped)
                return False
        return True

    def _send(self) -> None:
        self._phases.enter("experience")
        setup = self._setup
        rollout, env_steps = setup.rollout.finish(), setup.rollout.env_steps
        setup.rollout.begin_next()
        self._count_episodes(rollout)
        arrays = setup.policy.experience(rollout)
        if self._restart:
            arrays = {**arrays, ACTOR_STATE: setup.state()}
        self._phases.enter("encode")
        self._link.count(self.env_steps, self.dropped)
        self._observe_lag(max(0, self._link.session.version - self.version))
        self._link.offer(self._ships(seq=0, shipped=0, version=self.version, env_steps=env_steps, arrays=arrays))

    def _count_episodes(self, arrays: Arrays) -> None:
        returns = np.asarray(arrays["episode_return"])
        self.episodes += len(returns)
        self.returns.extend(returns.tolist())
