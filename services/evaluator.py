"""The evaluator: play whole episodes with the newest policy, greedily and sampled, and report the returns.

Each of E environments plays exactly one episode, the first after a reset, so that short episodes are not counted
more often than long ones; of fewer environments, which a user's function may make, each plays as many. When the learner
drains, one last greedy evaluation of the final policy is played if the deadline allows. Environments, policy and loop are built
from the learner's Welcome; the rest of the root is in `services.worker`.
"""

from __future__ import annotations

from common.runtime.lifecycle import begin_process

if __name__ == "__main__":
    begin_process()

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from common.algorithms.api import Policy, begin_episodes
from common.conditions import DEFAULT
from common.config.load import LoadedSettings
from common.config.run_config import RunConfig
from common.config.sections import EvaluationSettings
from common.envs.make import build
from common.envs.vector import VectorEnvironment
from common.observability import logs
from common.observability.worker_metrics import EVALUATOR_METRICS, EvaluatorStats
from common.policies.episodes import Episodes, Tally, of_all_agents
from common.protocol.messages import MODES, Evaluation
from common.runtime import process
from common.runtime.lifecycle import BUILD_SECONDS
from common.runtime.machine import cores
from common.transport.link import Link
from common.units import Seconds, Version
from services import worker
from services.acting.policy import load_newest_policy, policy_of
from services.worker import WelcomedWorker

WAIT_SECONDS: Seconds = 0.1
LAST_POLICY_SECONDS: Seconds = 0.5  # many times the way to the learner and back
LONGEST_REST: Seconds = 0.2

_log = logs.EventLog(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run one evaluator until a stop is requested or the run ends."""
    return worker.main("evaluator", argv, stats=EvaluatorStats(), metrics=EVALUATOR_METRICS, build=_loop)


def _loop(welcomed: WelcomedWorker[RunConfig], stats: EvaluatorStats) -> EvaluatorLoop:
    link, shutdown = welcomed.link, welcomed.shutdown
    settings = evaluation_settings(welcomed.invocation.loaded, welcomed.run)
    environment = welcomed.environments(lambda env: build(env, settings.episodes))
    stats.frame_skip = environment.spec.frame_skip
    return EvaluatorLoop(
        link=link,
        environment=environment,
        episodes=of_all_agents(settings.episodes, environment.agents),
        policy=policy_of(welcomed, environment.spec, num_envs=environment.num_envs, training=False),
        seed=welcomed.seed("environment"),
        every_seconds=settings.every_seconds,
        rest=Throttle(share=settings.cpu_share, cores=cores(), cpu=time.process_time, clock=time.monotonic, sleep=shutdown.wait),
        stats=stats,
        stopping=lambda: shutdown.requested,
        alive=welcomed.health.tick,
        clock=time.monotonic,
    )


def evaluation_settings(own: LoadedSettings, run: RunConfig) -> EvaluationSettings:
    """Return the run's evaluation settings, overridden by those that were set for this process."""
    overridden = {
        name: getattr(own.settings.evaluator, name)
        for name in EvaluationSettings.model_fields
        if own.provenance[f"evaluator.{name}"] != DEFAULT
    }
    return run.evaluation.model_copy(update=overridden)


@dataclass(slots=True, kw_only=True)
class EvaluatorLoop:
    """Loop of one evaluator, in the thread that calls `run`."""

    link: Link
    environment: VectorEnvironment
    episodes: int  # of an evaluation
    policy: Policy
    seed: int
    every_seconds: Seconds
    rest: Callable[[], None]  # called after each env step, outside the last evaluation: it keeps the share of the machine small
    stats: EvaluatorStats  # the loop alone writes them
    stopping: Callable[[], bool]
    alive: Callable[..., None]
    clock: Callable[[], Seconds]
    _played: set[tuple[Version, str]] = field(default_factory=set)
    _unreported: dict[str, Evaluation] = field(default_factory=dict)  # by mode; of those without a learner only the newest

    def run(self) -> str:
        """Evaluate every `every_seconds` until a stop is requested or the learner drains; return the reason."""
        self.stats.version, self.stats.playing = -1, 0  # an earlier loop of this process had another policy
        self.link.request_snapshot(after=-1)  # at once: a policy that does not fit ends the process before an evaluation is due
        next_at = self.clock() + self.every_seconds
        while self._wait(next_at):
            next_at = self.clock() + self.every_seconds
            for mode in MODES:
                self._evaluate(mode, keep_going=self._goes_on)
        reason = self._finish()
        self.stats.phases.stop()
        return reason

    def _goes_on(self) -> bool:
        return not self.stopping() and self.link.drain is None

    def _wait(self, until: Seconds) -> bool:
        """Wait until it is time to play, and a policy to play has arrived; return False where the run ends first."""
        self.stats.phases.enter("idle")
        requested = False
        while self._goes_on():
            if not requested and self.clock() >= until:
                requested = True
                played = (self.stats.version, MODES[-1]) in self._played
                self.link.request_snapshot(after=self.stats.version if played else -1)
            if self._load_newest() and requested:
                return True
            self.alive()
            self.link.service(WAIT_SECONDS)
            self._report()
        return False

    def _load_newest(self) -> bool:
        self.stats.phases.enter("snapshot")
        snapshot = load_newest_policy(self.link, self.policy)
        self.stats.phases.enter("idle")
        if snapshot is not None:
            self.stats.version = snapshot.version
        return snapshot is not None

    def _evaluate(self, mode: str, *, keep_going: Callable[[], bool], rest: bool = True) -> None:
        """Play the episodes of an evaluation with one policy version; report unless interrupted."""
        if self.stats.version < 0:
            return
        episodes = Episodes(self.environment, episodes=self.episodes, seed=self.seed)
        self.seed += self.environment.num_envs
        while not episodes.complete:
            self.stats.phases.enter("act")
            begin_episodes(self.policy, episodes.start)
            observation = torch.from_numpy(episodes.observation)
            action = self.policy.act(observation, greedy=mode == "greedy")["action"].numpy()
            self.stats.phases.enter("env")
            self.alive(doing="steps its environments", within=BUILD_SECONDS)  # a step may begin an episode
            self.stats.env_steps += episodes.step(action)
            self.stats.playing = self.episodes - episodes.tally.ended
            self.stats.phases.enter("idle")
            self.link.service()
            if not keep_going():
                return
            if rest:
                self.rest()
        self._ended(mode, episodes.tally)
        self._report()

    def _ended(self, mode: str, tally: Tally) -> None:
        arrays = {"episode_return": tally.returns.astype(np.float32), "episode_length": tally.lengths}
        self._unreported[mode] = Evaluation(version=self.stats.version, mode=mode, arrays=arrays)
        self.stats.policy_lag.observe(max(0, self.link.session.version - self.stats.version))
        self._played = {key for key in self._played if key[0] == self.stats.version} | {(self.stats.version, mode)}
        self.stats.episodes += len(tally.returns)
        self.stats.evaluations += 1
        self.stats.return_means[mode] = float(tally.returns.mean())

    def _report(self) -> None:
        for mode, evaluation in list(self._unreported.items()):
            if self.link.say(evaluation):
                del self._unreported[mode]

    def _finish(self) -> str:
        drain, self.stats.playing = self.link.drain, 0  # an evaluation that was interrupted is over
        if drain is None:
            return "stopped"
        # Half of the deadline is for playing: the rest belongs to the report and the learner's own end.
        until = self.clock() + drain.deadline_seconds / 2
        self._load_last(until)
        if (self.stats.version, "greedy") not in self._played:
            self._evaluate("greedy", keep_going=lambda: not self.stopping() and self.clock() < until, rest=False)
        if self.stats.playing and self.clock() >= until:
            ended, seconds = f"{self.episodes - self.stats.playing} of {self.episodes}", drain.deadline_seconds / 2
            _log.warning("evaluation_unfinished", version=self.stats.version, episodes_ended=ended, seconds=seconds)
        self.stats.playing = 0
        while self._unreported and self.clock() < until and not self.stopping():
            self.alive()
            self.link.service(WAIT_SECONDS)
            self._report()
        return drain.reason

    def _load_last(self, until: Seconds) -> None:
        """Load the final policy, which is sent on request, so that the drain may have overtaken it.

        Without a newer version that the learner is known to have, wait for one at most `LAST_POLICY_SECONDS`.
        """
        unknown_until = self.clock() + LAST_POLICY_SECONDS
        self._load_newest()
        self.link.request_snapshot(after=self.stats.version)
        while not self._load_newest() and self.clock() < until and not self.stopping():
            if self.clock() >= unknown_until and self.link.session.version == self.stats.version:
                return
            self.alive()
            self.link.service(WAIT_SECONDS)


@dataclass(kw_only=True)
class Throttle:
    """Keeps a process to a share of the machine: call it after each piece of work, and it sleeps until the share is kept.

    CPU time used stays at most share x cores x time passed. No rest is longer than `LONGEST_REST`, so that the caller's loop goes
    on turning.
    """

    share: float
    cores: int
    cpu: Callable[[], Seconds]  # time that this process has used
    clock: Callable[[], Seconds]
    sleep: Callable[[Seconds], object]

    def __post_init__(self) -> None:
        self._cpu_from, self._from = self.cpu(), self.clock()

    def __call__(self) -> None:
        """Rest if more has been used than the share allows."""
        due = self._from + (self.cpu() - self._cpu_from) / (self.share * self.cores)
        rest = due - self.clock()
        if rest > 0:
            self.sleep(min(rest, LONGEST_REST))


if __name__ == "__main__":
    process.end_process(main())
