"""What an actor does all day: wait for a credit, take the newest policy, collect a rollout, send it.

A credit is the permission to collect: it is awaited before the rollout begins, so that waiting makes no experience
old. One rollout is acted by one policy version. The loop knows no sockets (`Link`), no signals and no HTTP.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import torch

from common.algorithms.api import Policy
from common.envs.make import VectorEnvironment
from common.errors import DropReason
from common.models.snapshot import to_tensor
from common.runtime.metrics import Phases
from common.transport.link import Link
from common.units import EnvSteps, Seconds, Version
from common.wire.messages import Arrays, Experience
from services.actor.rollout import Rollout

WAIT_SECONDS: Seconds = 0.05
EPISODES_KEPT = 100


class Actor:
    """One actor's loop. `run` returns when it was asked to stop, or the learner drains."""

    def __init__(
        self,
        *,
        link: Link,
        environment: VectorEnvironment,
        policy: Policy,
        rollout: Rollout,
        ships: type[Experience],
        phases: Phases,
        stopping: Callable[[], bool],
        alive: Callable[[], None],
        observe_lag: Callable[[int], None],
    ) -> None:
        """`rollout` begins with a reset of `environment`; `ships` is the message that carries what the policy makes of it.

        `alive` is told at every wait and env step that the loop turns; `observe_lag` the policy lag of each rollout sent.
        """
        self.env_steps: EnvSteps = 0  # stepped by this process
        self.episodes = 0
        self.dropped: Counter[str] = Counter()
        self.version: Version = -1
        self.returns: deque[float] = deque(maxlen=EPISODES_KEPT)
        self._link = link
        self._environment = environment
        self._policy = policy
        self._phases = phases
        self._stopping = stopping
        self._alive = alive
        self._observe_lag = observe_lag
        self._rollout = rollout
        self._ships = ships

    def run(self) -> str:
        """Collect and send until there is a reason to stop; returns the reason. Counts an unfinished rollout as dropped."""
        self._link.want_snapshots(after=-1)
        while self._ready():
            self._phases.enter("snapshot")
            self._load_newest()
            if not self._collect():
                break
            self._send()
        self._phases.stop()
        return self._link.drain.reason if self._link.drain else "stopped"

    def _ready(self) -> bool:
        """Wait for a credit and a policy; False when it is time to stop."""
        self._phases.enter("credit_wait")
        self._link.service()
        while not self._over():
            if self._link.may_offer and (self.version >= 0 or self._load_newest()):
                return True
            self._alive()
            self._link.service(WAIT_SECONDS)
        return False

    def _over(self) -> bool:
        return self._stopping() or self._link.drain is not None

    def _load_newest(self) -> bool:
        snapshot = self._link.take_snapshot()
        if snapshot is not None:
            self._policy.load(snapshot.version, to_tensor(snapshot.arrays["parameters"]), env_steps=snapshot.env_steps)
            self.version = snapshot.version
        return snapshot is not None

    def _collect(self) -> bool:
        """Record one rollout; False, and what was recorded dropped, when it is time to stop."""
        rollout = self._rollout
        before = self.env_steps
        for t in range(rollout.length):
            self._phases.enter("act")
            acted = {name: value.numpy() for name, value in self._policy.act(torch.from_numpy(rollout.observation(t))).items()}
            action = acted.pop("action")
            self._phases.enter("env")
            transition = self._environment.step(action)
            rollout.record(t, action, acted, transition)
            self.env_steps = before + rollout.env_steps
            self._phases.enter("snapshot")
            self._link.service()
            self._alive()
            if self._over():
                self.dropped[DropReason.UNFINISHED] += rollout.env_steps
                self._link.count(self.env_steps, self.dropped)
                return False
        return True

    def _send(self) -> None:
        self._phases.enter("experience")
        rollout, env_steps = self._rollout.finish(), self._rollout.env_steps
        self._rollout.begin_next()
        self._count_episodes(rollout)
        arrays = self._policy.experience(rollout)
        self._phases.enter("encode")
        self._link.count(self.env_steps, self.dropped)
        self._observe_lag(max(0, self._link.session.version - self.version))
        self._link.offer(self._ships(seq=0, shipped=0, version=self.version, env_steps=env_steps, arrays=arrays))

    def _count_episodes(self, arrays: Arrays) -> None:
        returns = np.asarray(arrays["episode_return"])
        self.episodes += len(returns)
        self.returns.extend(returns.tolist())
