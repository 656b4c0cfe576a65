"""What an evaluator does: play whole episodes with the newest policy, greedily and sampled, and report the returns.

Each of E environments plays exactly one episode, the first after a reset, so that short episodes are not counted
more often than long ones. When the learner drains, one last greedy evaluation of the final policy is played if the
deadline allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from common.algorithms.api import Policy
from common.envs.make import VectorEnvironment
from common.envs.stacking import stack
from common.runtime.metrics import Phases
from common.service.policies import load_newest
from common.transport.link import Link
from common.units import EnvSteps, Seconds, Version
from common.wire.messages import MODES, Evaluation

WAIT_SECONDS: Seconds = 0.1
LAST_POLICY_SECONDS: Seconds = 0.5  # many times the way to the learner and back


@dataclass(slots=True)
class Counts:
    """What the evaluator has done so far."""

    env_steps: EnvSteps = 0
    episodes: int = 0
    evaluations: int = 0
    mean: dict[str, float] = field(default_factory=dict)  # newest mean return by mode


class Evaluator:
    """One evaluator's loop. `run` returns when it was asked to stop, or after the learner's drain."""

    def __init__(
        self,
        *,
        link: Link,
        environment: VectorEnvironment,
        policy: Policy,
        seed: int,
        every_seconds: Seconds,
        rest: Callable[[], None],
        phases: Phases,
        stopping: Callable[[], bool],
        alive: Callable[[], None],
        clock: Callable[[], Seconds],
        observe_lag: Callable[[int], None],
    ) -> None:
        """`rest` is called after each env step, outside the last evaluation: it keeps the share of the machine small."""
        self.counts = Counts()
        self.version: Version = -1
        self._link = link
        self._environment = environment
        self._policy = policy
        self._seed = seed
        self._every_seconds = every_seconds
        self._rest = rest
        self._phases = phases
        self._stopping = stopping
        self._alive = alive
        self._clock = clock
        self._observe_lag = observe_lag
        self._played: set[tuple[Version, str]] = set()
        self._unreported: dict[str, Evaluation] = {}  # by mode; of those that ended while the learner was away only the newest

    def run(self) -> str:
        """Evaluate every so often until there is a reason to stop; returns the reason."""
        self._link.want_snapshots(after=-1)
        next_at = self._clock() + self._every_seconds
        while not self._stopping() and self._link.drain is None:
            self._wait(next_at)
            if self._stopping() or self._link.drain is not None:
                break
            next_at = self._clock() + self._every_seconds
            for mode in MODES:
                self._evaluate(mode, keep_going=lambda: not self._stopping() and self._link.drain is None)
        reason = self._finish()
        self._phases.stop()
        return reason

    def _finish(self) -> str:
        drain = self._link.drain
        if drain is None:
            return "stopped"
        # Half of the deadline is for playing: the rest belongs to the report and the learner's own end.
        until = self._clock() + drain.deadline_seconds / 2
        self._load_last(self._clock() + LAST_POLICY_SECONDS)
        if (self.version, "greedy") not in self._played:
            self._evaluate("greedy", keep_going=lambda: not self._stopping() and self._clock() < until, hurry=True)
        while self._unreported and self._clock() < until and not self._stopping():
            self._alive()
            self._link.service(WAIT_SECONDS)
            self._report()
        return drain.reason

    def _load_last(self, until: Seconds) -> None:
        """Take the final policy. It is sent when it is asked for, so that the drain may have overtaken it."""
        self._load_newest()
        known = self.version
        while self.version == known and self._clock() < until and not self._stopping():
            self._alive()
            self._link.service(WAIT_SECONDS)
            self._load_newest()

    def _wait(self, until: Seconds) -> None:
        """Stay in touch with the learner until it is time to play a policy that was not played yet."""
        self._phases.enter("idle")
        while not self._stopping() and self._link.drain is None:
            self._load_newest()
            if self.version >= 0 and self._clock() >= until and (self.version, MODES[-1]) not in self._played:
                return
            self._alive()
            self._link.service(WAIT_SECONDS)
            self._report()

    def _load_newest(self) -> None:
        self._phases.enter("snapshot")
        snapshot = load_newest(self._link, self._policy)
        self._phases.enter("idle")
        if snapshot is not None:
            self.version = snapshot.version

    def _evaluate(self, mode: str, *, keep_going: Callable[[], bool], hurry: bool = False) -> None:
        """Play one episode in each environment with one policy version; report unless interrupted."""
        if self.version < 0:
            return
        environment, size = self._environment, self._environment.spec.frame_stack
        frame = environment.reset(self._seed)
        self._seed += environment.num_envs
        window = np.zeros((size, *frame.shape), frame.dtype)
        window[-1] = frame
        start = np.ones(environment.num_envs, np.bool_)
        tally = Tally(environment.num_envs)
        while not tally.complete:
            self._phases.enter("act")
            observation = stack(window, start[np.newaxis])[0]
            action = self._policy.act(torch.from_numpy(observation), greedy=mode == "greedy")["action"].numpy()
            self._phases.enter("env")
            transition = environment.step(action)
            self.counts.env_steps += tally.add(transition.reward, transition.terminated | transition.truncated)
            # The stack that was just seen, blanked where an episode began within it, loses its oldest frame to the new one.
            seen = np.moveaxis(observation[:, 1:], 1, 0) if size > 1 else window[:0]
            window = np.concatenate([seen, transition.observation[np.newaxis]])
            start = transition.start
            self._phases.enter("idle")
            self._link.service()
            self._alive()
            if not keep_going():
                return
            if not hurry:
                self._rest()
        self._ended(mode, tally)
        self._report()

    def _ended(self, mode: str, tally: Tally) -> None:
        arrays = {"episode_return": tally.returns.astype(np.float32), "episode_length": tally.lengths}
        self._unreported[mode] = Evaluation(version=self.version, mode=mode, arrays=arrays)
        self._observe_lag(max(0, self._link.session.version - self.version))
        self._played = {key for key in self._played if key[0] == self.version} | {(self.version, mode)}
        self.counts.episodes += len(tally.returns)
        self.counts.evaluations += 1
        self.counts.mean[mode] = float(tally.returns.mean())

    def _report(self) -> None:
        """Tell the learner what it was not told yet; while it is away, that is kept."""
        for mode, evaluation in list(self._unreported.items()):
            if self._link.say(evaluation):
                del self._unreported[mode]


class Tally:
    """Returns and lengths of the first episode of each of E environments."""

    def __init__(self, num_envs: int) -> None:
        self.returns: NDArray[np.float64] = np.zeros(num_envs)
        self.lengths: NDArray[np.int32] = np.zeros(num_envs, np.int32)
        self._playing = np.ones(num_envs, np.bool_)

    @property
    def complete(self) -> bool:
        """Whether every environment has ended its first episode."""
        return not self._playing.any()

    def add(self, reward: NDArray[np.float32], ended: NDArray[np.bool_]) -> int:
        """Count one step of all environments; returns how many of them are still in their first episode."""
        playing = int(self._playing.sum())
        self.returns += np.where(self._playing, reward, 0.0)
        self.lengths += self._playing
        self._playing &= ~ended
        return playing
