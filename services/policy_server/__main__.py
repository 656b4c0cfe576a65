"""The policy server's root: an actor for environments that env workers step. See docs/policy-server.md."""

from __future__ import annotations

from common.runtime.lifecycle import exit_on_signals

if __name__ == "__main__":
    exit_on_signals()  # before the imports, which take seconds

import time
from contextlib import closing

from common.config.run_config import EnvRunConfig, RunConfig
from common.envs.remote import observe_schema
from common.envs.spec import EnvSpec
from common.envs.trial import spec_of
from common.errors import ConfigError
from common.observability import logs
from common.observability.env_metrics import POLICY_SERVER_METRICS, PolicyServerStats
from common.protocol.env_side import EnvSide
from common.protocol.env_slots import SILENCE_SECONDS, EnvSessionConfig
from common.protocol.messages import ACTOR_STATE
from common.runtime import process
from common.runtime.machine import cpu_limit
from common.transport.curve import ServerKeys
from common.transport.zmq import ZmqServer
from services import worker
from services.acting.loop import ActorLoop
from services.acting.parts import acting_policy, build_parts, message_type_of
from services.policy_server.remote_environments import RemoteEnvironments
from services.worker import WelcomedWorker

_log = logs.EventLog(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run one policy server until a stop is requested or the run ends."""
    stats = PolicyServerStats(cpu_limit=cpu_limit)
    return worker.main("policy-server", argv, stats=stats, metrics=POLICY_SERVER_METRICS, build=PolicyServerLoop)


class PolicyServerLoop:
    """The actor's loop over remote environments, and the end of the env workers with the run."""

    def __init__(self, welcomed: WelcomedWorker[RunConfig], stats: PolicyServerStats) -> None:
        """Listen for env workers.

        Raises `ConfigError` where the run cannot be divided among them or its policy cannot be built, `ResourceError` where the
        address is in use.
        """
        if any(spec.name == ACTOR_STATE for spec in welcomed.welcome.schema):
            fact = "a policy server cannot take part in lockstep: the clock decides which env workers are late"
            raise ConfigError(fact, found="run.mode lockstep", wanted="asynchronous", fix="use `rookery actor`")
        self._worker = welcomed
        spec = spec_of(welcomed.run.env)
        stats.frame_skip = spec.frame_skip
        policy = acting_policy(welcomed, spec, num_envs=welcomed.run.env.num_envs)  # one that cannot be built opens no port
        environments = RemoteEnvironments(
            side=EnvSide(_session(welcomed, spec)),
            transport=_listen(welcomed),
            spec=spec,
            step_timeout=welcomed.invocation.settings.policy_server.step_timeout_ms / 1000,
            stats=stats,
            clock=time.monotonic,
            log_event=_log.log_event,
            idle=self._idle,
            stopping=self._over,
        )
        self._environments = welcomed.resources.enter_context(closing(environments))
        self._actor = ActorLoop(
            link=welcomed.link,
            parts=build_parts(welcomed, self._environments, policy),
            message_type=message_type_of(welcomed.run, self._environments),
            stats=stats,
            stopping=lambda: welcomed.shutdown.requested,
            alive=self._alive,
        )
        self._stats = stats

    def run(self) -> str:
        """Collect and send until there is a reason to stop; return the reason."""
        link, server = self._worker.link, self._worker.invocation.settings.actor.server

        def obstacle() -> str:
            if link.drain:
                return ""
            return "no env worker" if not self._stats.env_workers else "" if link.joined else f"no learner at {server}"

        self._worker.health.ready(unless=obstacle)
        reason = self._actor.run()
        if link.drain:
            self._environments.drain(reason)
        return reason

    def _over(self) -> bool:
        return self._worker.shutdown.requested or self._worker.link.drain is not None

    def _idle(self) -> None:
        self._worker.link.service()
        self._worker.health.tick(doing="waits for env workers")

    def _alive(self) -> None:
        self._environments.service()
        self._worker.health.tick()


def _session(welcomed: WelcomedWorker[RunConfig], spec: EnvSpec) -> EnvSessionConfig:
    own, run = welcomed.invocation.settings.policy_server, welcomed.run
    rows, rest = divmod(run.env.num_envs, own.workers)
    if rest:
        fix = "choose --workers, or env.num_envs at the learner"
        wanted = f"a divisor of the learner's env.num_envs, {run.env.num_envs}"
        raise ConfigError("policy_server.workers", found=own.workers, wanted=wanted, fix=fix)
    return EnvSessionConfig(
        run=run.run_id,
        env_config=EnvRunConfig.of(run, rows=rows).model_dump_json(),
        env_signature=spec.signature,
        schema=observe_schema(spec, rows=rows),
        slots=own.workers,
        rows=rows,
        silence_seconds=SILENCE_SECONDS + own.step_timeout_ms / 1000,
    )


def _listen(welcomed: WelcomedWorker[RunConfig]) -> ZmqServer:
    own = welcomed.invocation.settings.policy_server
    transport = ZmqServer(own.bind, keys=ServerKeys.of(own.keys))
    _log.info("listening", env_workers=own.workers, bind=transport.endpoint)
    return transport


if __name__ == "__main__":
    process.end_process(main())
