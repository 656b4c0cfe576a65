"""The env worker: wait for an Act, step the environments or begin new episodes, answer with an Observe. Imports no torch.

The answer to the newest Act is kept: an Act that arrives twice is answered twice, and stepped once.
"""

from __future__ import annotations

from common.runtime.lifecycle import begin_process

if __name__ == "__main__":
    begin_process()

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.config.run_config import EnvRunConfig
from common.envs.remote import act_schema, first_row, observe_schema, row_of
from common.envs.state import seed_generators
from common.envs.vector import VectorEnvironment
from common.errors import ConfigError, ProtocolError
from common.observability.env_metrics import ENV_WORKER_METRICS, EnvWorkerStats
from common.protocol.content import check_schema
from common.protocol.messages import Act, Observe, Report
from common.runtime import process
from common.runtime.lifecycle import BUILD_SECONDS
from common.transport.link import Link
from common.units import Seconds
from services import worker
from services.worker import WelcomedWorker

WAIT_SECONDS: Seconds = 0.05


def main(argv: list[str] | None = None) -> int:
    """Run one env worker until a stop is requested or the run ends."""
    return worker.main("env-worker", argv, stats=EnvWorkerStats(), metrics=ENV_WORKER_METRICS, build=_loop)


def _loop(welcomed: WelcomedWorker[EnvRunConfig], stats: EnvWorkerStats) -> EnvWorkerLoop:
    environment = welcomed.environments()
    if environment.same_step:
        fact = f"{welcomed.run.env.name} resets in the step of an episode's end, which a slow reset would lose"
        raise ConfigError(fact, found="SAME_STEP", wanted="NEXT_STEP, or no policy server", fix="change its autoreset_mode")
    welcomed.link.check_environment(environment.spec)
    stats.frame_skip = environment.spec.frame_skip
    return EnvWorkerLoop(
        link=welcomed.link,
        environment=environment,
        stats=stats,
        stopping=lambda: welcomed.shutdown.requested,
        alive=welcomed.health.tick,
    )


@dataclass(kw_only=True)
class EnvWorkerLoop:
    """Loop of one env worker, in the thread that calls `run`."""

    link: Link
    environment: VectorEnvironment
    stats: EnvWorkerStats  # the loop alone writes them
    stopping: Callable[[], bool]
    alive: Callable[..., None]
    _answer: Observe | None = None  # to the newest Act

    def __post_init__(self) -> None:
        """Raise `ConfigError` where the Welcome describes other rows than `environment` has."""
        self._actions = act_schema(self.environment.spec, rows=self.environment.num_envs)
        self._rows = observe_schema(self.environment.spec, rows=self.environment.num_envs)
        self._welcome = self.link.welcome
        self._check_welcome()

    def run(self) -> str:
        """Step until there is a reason to stop; return the reason."""
        while not (self.stopping() or self.link.drain):
            self.turn(WAIT_SECONDS)
        self.stats.phases.stop()
        return self.link.drain.reason if self.link.drain else "stopped"

    def turn(self, timeout: Seconds) -> None:
        """Wait up to `timeout` seconds for an Act, and answer it."""
        self.stats.phases.enter("wait")
        self.link.service(timeout)
        self.alive()
        if self.link.welcome is not self._welcome:  # a restarted policy server, or another slot, numbers its Acts anew
            self._welcome, self._answer = self.link.welcome, None
        act = self.link.take_act()
        if act is not None and self.link.welcomed:
            self._check_welcome()
            self._answer_to(act)

    def _check_welcome(self) -> None:
        welcome = self.link.welcome
        assert welcome is not None
        if tuple(welcome.schema) != self._rows:
            found, wanted = (
                ", ".join(f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in each)
                for each in (self._rows, welcome.schema)
            )
            fact = "the policy server wants other rows than the environments here have"
            fix = "restart this env worker, with the policy server's version of Rookery"
            raise ConfigError(fact, found=found, wanted=wanted, fix=fix)

    def _answer_to(self, act: Act) -> None:
        if self._answer is None or act.number > self._answer.number:
            try:
                self._answer = self._stepped(act)
            except ProtocolError as error:
                self.link.refuse(error)
                return
        elif act.number < self._answer.number:
            return  # an Act that was delayed on a connection that is gone
        self.stats.phases.enter("encode")
        self.link.say(self._answer)

    def _stepped(self, act: Act) -> Observe:
        self.stats.phases.enter("env")
        if act.seed >= 0:
            self.stats.resets += 1
            seed_generators(act.seed)
            self.link.say(Report(produced=0))  # from now on the policy server waits `reset_seconds`
            self.alive(doing="begins new episodes", within=BUILD_SECONDS)
            with process.build_limit():
                observation = self.environment.reset(act.seed).copy()
            return Observe(number=act.number, arrays=first_row(observation))
        check_schema(act.arrays, self._actions)
        self.alive(doing="steps its environments", within=BUILD_SECONDS)  # a step may begin an episode
        transition = self.environment.step(act.arrays["action"])
        self.stats.env_steps += int(np.count_nonzero(transition.valid))
        return Observe(number=act.number, arrays=row_of(transition))  # a copy: it may be sent again, or later


if __name__ == "__main__":
    process.end_process(main())
