"""CPU time of one small message at a learner, by the number of workers that share a fixed rate of messages.

The learner's real intake runs in this process: transport, decoding, checks, episodes, ledger, credits, accounts file, queue. In
place of the train loop, each message is taken and completed at once. Heartbeats are rare, so that all numbers of workers send as
many messages.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from benchmarks.transport.machine import ThreadSeconds, open_descriptors, raise_warning
from benchmarks.transport.sessions import ENV, UNDER_WAY, Crowd, connected, require_alive
from common.algorithms.episode_reports import TrajectoryEpisodes
from common.algorithms.payload import check_trajectory, trajectory_schema
from common.errors import ResourceError
from common.protocol.learner_side import LearnerSide
from common.protocol.messages import ArraySpec, Snapshot
from common.protocol.session_config import SessionConfig
from common.runtime.process import allow_descriptors
from common.transport.zmq import ZmqServer
from common.units import MIB, Seconds
from services.learner.accounts import AccountsFile
from services.learner.intake import Intake

START_SECONDS: Seconds = 120.0
WARM_SECONDS: Seconds = 3.0
WAIT_SECONDS: Seconds = 0.05
HEARTBEAT_SECONDS: Seconds = 60.0
LENGTH = 8  # env steps of one environment in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU time of the learner's two threads that move messages."""

    workers: int
    seconds: Seconds
    messages: int  # of experience, all admitted
    others: int  # received beside them
    cpu: ThreadSeconds
    memory_bytes: int
    descriptors: int

    @property
    def intake_us(self) -> float:
        """Return microseconds of the intake thread for each message."""
        return 1e6 * self.cpu.intake / self.messages

    @property
    def zmq_us(self) -> float:
        """Return microseconds of ZeroMQ's I/O thread for each message."""
        return 1e6 * self.cpu.zmq / self.messages


def crowd_of(workers: int, rate: float, *, heartbeat_seconds: Seconds = HEARTBEAT_SECONDS) -> Crowd:
    """Return workers that send rollouts of `LENGTH` env steps of an environment as small as CartPole."""
    recorded = (ArraySpec(name="log_prob", dtype="float32", shape=(LENGTH, 1)),)
    schema = trajectory_schema(ENV, length=LENGTH, num_envs=1, recorded=recorded)
    arrays = {spec.name: np.zeros(np.maximum(spec.shape, 0), spec.dtype) for spec in schema}
    arrays["valid"][:] = True
    config = SessionConfig(
        run="benchmark",
        run_config="{}",
        env_signature=ENV.signature,
        schema=schema,
        credits=2 + UNDER_WAY // workers,
        rollout_env_steps=LENGTH,
        batch=1,
        max_actors=workers,
        heartbeat_seconds=heartbeat_seconds,
        silence_seconds=10 * heartbeat_seconds,
    )
    return Crowd(workers=workers, rate=rate, config=config, arrays=arrays)


class _Accounts(AccountsFile):
    """Raises the first failure, because messages after it would be measured without their accounts."""

    def _lost(self, error: Exception) -> None:
        raise ResourceError("the accounts file failed", found=str(error))


@contextmanager
def serving(crowd: Crowd, endpoint: str = "tcp://127.0.0.1:0", *, resumed: bool = False) -> Iterator[tuple[Intake, str]]:
    """Run a learner's intake with a published policy; yields it with its endpoint."""
    allow_descriptors()
    session = LearnerSide(
        crowd.config,
        check=lambda experience: check_trajectory(ENV, experience.arrays),
        episodes=TrajectoryEpisodes,
        resumed=resumed,
    )
    transport = ZmqServer(endpoint)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "accounts.jsonl"
        accounts = _Accounts(path, run_id="benchmark", clock=time.monotonic)
        log_event = (lambda _: None) if resumed else raise_warning
        intake = Intake(transport=transport, session=session, clock=time.monotonic, log_event=log_event, accounts=accounts)
        intake.start()
        intake.publish(Snapshot(version=0, env_steps=0, precision="fp32", layout="", arrays={}))
        try:
            yield intake, transport.endpoint
        finally:
            intake.close()


def measure(workers: int, *, rate: float, seconds: Seconds) -> Cost:
    """Return the cost of the messages of `seconds`, and of one at least, after all workers have sent one."""
    crowd = crowd_of(workers, rate)
    with serving(crowd) as (intake, endpoint), connected(crowd, endpoint) as processes:
        deadline = time.monotonic() + START_SECONDS
        while intake.stats.actors < workers:
            consume(intake, WAIT_SECONDS, processes)
            if time.monotonic() > deadline:
                raise ResourceError("synthetic workers did not connect", found=intake.stats.actors, wanted=workers)
        consume(intake, WARM_SECONDS + workers / rate, processes)
        intake.update_stats()
        before, cpu, began = intake.stats, ThreadSeconds.now(), time.monotonic()
        consume(intake, seconds, processes)
        while not intake.stats.received["trajectory"] > before.received["trajectory"]:
            consume(intake, WAIT_SECONDS, processes)
            intake.update_stats()
        spent, cpu = time.monotonic() - began, ThreadSeconds.now() - cpu
        intake.update_stats()
        received = intake.stats.received - before.received
        messages = received["trajectory"]
        return Cost(
            workers=workers,
            seconds=spent,
            messages=messages,
            others=received.total() - messages,
            cpu=cpu,
            memory_bytes=psutil.Process().memory_info().rss,
            descriptors=open_descriptors(),
        )


def consume(intake: Intake, seconds: Seconds, processes: list[BaseProcess]) -> None:
    """Stand in for the train loop."""
    deadline = time.monotonic() + seconds
    while (rest := deadline - time.monotonic()) > 0:
        intake.complete(intake.take(1, min(rest, WAIT_SECONDS)))
        require_alive(processes)


def table(costs: Sequence[Cost], crowd: Crowd) -> str:
    """Return the medians of the costs for each number of workers as lines of text, and how far these lie apart."""
    size = sum(array.nbytes for array in crowd.arrays.values())
    lines = [
        f"messages of {LENGTH} env steps, {len(crowd.arrays)} arrays, {size} bytes; {crowd.rate:.0f} messages/s in all; loopback",
        "medians of the turns; in brackets the least and the most",
        f"{'workers':>8} {'messages/s':>11} {'others/s':>9} {'intake us':>16} {'ZeroMQ us':>10} {'MiB':>5} {'descriptors':>12}",
    ]
    medians = []
    for workers in sorted({cost.workers for cost in costs}):
        turns = [cost for cost in costs if cost.workers == workers]
        intake = [cost.intake_us for cost in turns]
        medians.append(median(intake))
        lines.append(
            f"{workers:8,} {median(cost.messages / cost.seconds for cost in turns):11.0f} "
            f"{median(cost.others / cost.seconds for cost in turns):9.1f} "
            f"{f'{medians[-1]:.0f} ({min(intake):.0f}, {max(intake):.0f})':>16} "
            f"{median(cost.zmq_us for cost in turns):10.0f} {median(cost.memory_bytes for cost in turns) / MIB:5.0f} "
            f"{max(cost.descriptors for cost in turns):12,}"
        )
    return "\n".join([*lines, f"intake: largest median over smallest {max(medians) / min(medians):.2f}"])
