"""Rate at which one learner's I/O thread admits large messages.

Synthetic actors (processes that hold one finished rollout of 84x84 frames and
send it again and again, with real sessions and credits) against a learner's real intake over loopback: transport,
decoding, validation, ledger, queue. In place of the train loop, messages are taken and completed at once.

`compare` measures the cost of encryption: pairs of runs, one plain and one with keys (CURVE), in alternating order.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean, median

import numpy as np
import psutil

from benchmarks.transport.machine import ThreadSeconds, raise_warning
from common.algorithms.payload import check_trajectory, trajectory_schema
from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ResourceError
from common.protocol.learner_side import LearnerSide
from common.protocol.messages import Arrays, ArraySpec, Snapshot, Trajectory
from common.protocol.session_config import SessionConfig
from common.protocol.worker_side import Identity, WorkerSide
from common.transport.curve import ServerKeys, WorkerKeys, make
from common.transport.link import Link
from common.transport.zmq import ZmqServer, ZmqWorker
from common.units import MIB, Seconds
from services.learner.intake import Intake

ENV = EnvSpec(
    observation_shape=(84, 84), observation_dtype="uint8", action=ActionSpec(choices=(6,), shape=()), frame_stack=4, frame_skip=4
)
SNAPSHOT_BYTES = 1_686_695 * 4  # the Nature network's parameters in float32
WARM_SECONDS: Seconds = 3.0
START_SECONDS: Seconds = 60.0
WAIT_SECONDS: Seconds = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The experience that the actors send: number and shape of the messages."""

    actors: int
    length: int  # T
    num_envs: int  # B of each actor

    @property
    def schema(self) -> tuple[ArraySpec, ...]:
        """Arrays of one trajectory."""
        recorded = (ArraySpec(name="log_prob", dtype="float32", shape=(self.length, self.num_envs)),)
        return trajectory_schema(ENV, length=self.length, num_envs=self.num_envs, recorded=recorded)

    @property
    def session_config(self) -> SessionConfig:
        """Return the settings that the learner sends in its Welcome."""
        return SessionConfig(
            run="benchmark",
            run_config="{}",
            env_signature=ENV.signature,
            schema=self.schema,
            credits=2,
            rollout_env_steps=self.length * self.num_envs,
            batch=1,
            max_actors=self.actors,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of the benchmark."""

    seconds: Seconds
    env_steps: int  # admitted
    received_bytes: int
    dropped: int
    intake_cpu_seconds: Seconds  # of the thread that decodes and admits
    zmq_cpu_seconds: Seconds  # of ZeroMQ's own threads, which read the sockets
    memory_bytes: Sequence[int]  # of the learner, from the start of the window to its end

    @property
    def env_steps_per_second(self) -> float:
        """Return env steps admitted per second."""
        return self.env_steps / self.seconds


def benchmark(load: Load, *, seconds: Seconds, readings: int = 60, keys: str = "") -> Result:
    """Let the actors send for `seconds`, and until some of it has arrived, after warming up, with `keys` in a folder if named."""
    transport = ZmqServer("tcp://127.0.0.1:0", keys=ServerKeys.of(keys and f"{keys}/learner"))
    session = LearnerSide(load.session_config, check=lambda experience: check_trajectory(ENV, experience.arrays))
    intake = Intake(transport=transport, session=session, clock=time.monotonic, log_event=raise_warning)
    intake.start()
    intake.publish(Snapshot(version=0, env_steps=0, precision="fp32", layout="", arrays={}))
    try:
        with _actors(load, transport.endpoint, keys and f"{keys}/worker") as actors:
            _consume(intake, until=lambda count: count >= 2 * load.actors, within=START_SECONDS, actors=actors)
            _consume(intake, until=lambda _: False, within=WARM_SECONDS, actors=actors)
            return _measure(intake, actors, seconds, readings)
    finally:
        intake.close()


def _measure(intake: Intake, actors: Sequence[BaseProcess], seconds: Seconds, readings: int) -> Result:
    intake.update_stats()
    before, cpu, began = intake.stats, ThreadSeconds.now(), time.monotonic()
    env_steps, resident = 0, [psutil.Process().memory_info().rss]
    for number in range(readings):
        rest = began + seconds * (number + 1) / readings - time.monotonic()
        env_steps += _consume(intake, until=lambda _: False, within=rest, actors=actors)
        resident.append(psutil.Process().memory_info().rss)
    arrived = lambda count: (env_steps or count) and intake.stats.bytes_received > before.bytes_received  # noqa: E731
    env_steps += _consume(intake, until=arrived, within=START_SECONDS, actors=actors)
    intake.update_stats()
    spent, spent_cpu, after = time.monotonic() - began, ThreadSeconds.now() - cpu, intake.stats
    return Result(
        seconds=spent,
        env_steps=env_steps,
        received_bytes=after.bytes_received - before.bytes_received,
        dropped=sum(after.ledger["dropped"].values()) - sum(before.ledger["dropped"].values()),
        intake_cpu_seconds=spent_cpu.intake,
        zmq_cpu_seconds=spent_cpu.zmq,
        memory_bytes=resident,
    )


def _consume(intake: Intake, *, until: Callable[[int], object], within: Seconds, actors: Sequence[BaseProcess]) -> int:
    """Stand in for the train loop; returns the env steps taken."""
    env_steps, count, deadline = 0, 0, time.monotonic() + within
    while not until(count) and (rest := deadline - time.monotonic()) > 0:
        items = intake.take(1, min(rest, WAIT_SECONDS))
        intake.complete(items)
        env_steps += sum(item.env_steps for item in items)
        count += len(items)
        if any(actor.exitcode is not None for actor in actors):
            raise ResourceError("a synthetic actor ended", found=[actor.exitcode for actor in actors])
    return env_steps


@contextmanager
def _actors(load: Load, endpoint: str, keys: str) -> Iterator[list[BaseProcess]]:
    context = multiprocessing.get_context("spawn")
    actors: list[BaseProcess] = [
        context.Process(target=_act, args=(load, endpoint, keys, number), daemon=True) for number in range(load.actors)
    ]
    for actor in actors:
        actor.start()
    try:
        yield actors
    finally:
        for actor in actors:
            actor.terminate()
            actor.join()


def _act(load: Load, endpoint: str, keys: str, number: int) -> None:
    """Send the same rollout whenever a credit is free, until this process is terminated."""
    identity = Identity(role="actor", name=f"synthetic-{number}", incarnation=time.time_ns(), software="benchmark")
    session = WorkerSide(identity, env_signature=ENV.signature)
    transport = ZmqWorker(endpoint, keys=WorkerKeys.of(keys))
    link = Link(transport=transport, session=session, clock=time.monotonic, log_event=raise_warning)
    arrays, env_steps, produced = rollout(load.schema), load.length * load.num_envs, 0
    while True:
        link.service(WAIT_SECONDS)
        while link.welcome is not None and link.has_credit and session.version >= 0:
            produced += env_steps
            link.count(produced, Counter())
            link.offer(Trajectory(seq=0, env_steps_sent=0, version=0, env_steps=env_steps, arrays=arrays))


def rollout(schema: Sequence[ArraySpec]) -> Arrays:
    """Arrays of the schema as a game without an end would fill them: noise for frames, every row valid."""
    random = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {spec.name: np.zeros(np.maximum(spec.shape, 0), spec.dtype) for spec in schema}
    arrays["obs"][:] = random.integers(256, size=arrays["obs"].shape, dtype=np.uint8)
    arrays["action"][:] = random.integers(ENV.action.n, size=arrays["action"].shape)
    arrays["log_prob"][:] = -np.log(ENV.action.n)
    arrays["valid"][:] = True
    return arrays


def report(load: Load, result: Result) -> str:
    """Return the result as lines of text."""
    third = len(result.memory_bytes) // 3
    resident = [fmean(result.memory_bytes[at : at + third]) / MIB for at in (0, third, 2 * third)]
    growth, two = resident[-1] - resident[0], 2 * SNAPSHOT_BYTES / MIB
    threads = f"{result.intake_cpu_seconds / result.seconds:.1%} of a core"
    system = f"{result.zmq_cpu_seconds / result.seconds:.1%}"
    memory = f"{resident[0]:.0f} MiB in the first third, {resident[1]:.0f} in the second, {resident[2]:.0f} in the last"
    lines = [
        f"{load.actors} synthetic actors, T={load.length}, B={load.num_envs}, frames 84x84, loopback",
        f"  admitted   {result.env_steps_per_second:,.0f} env steps/s (decoded, validated) over {result.seconds:.1f} s",
        f"  received   {result.received_bytes / result.seconds / MIB:,.0f} MiB/s",
        f"  I/O thread {threads}; ZeroMQ's own thread {system}",
        f"  memory     {memory}: growth {growth:.1f} MiB (two snapshots: {two:.1f})",
        f"  dropped    {result.dropped:,} env steps",
    ]
    return "\n".join(lines)


def compare(load: Load, *, seconds: Seconds, pairs: int) -> list[tuple[Result, Result]]:
    """(plain, with keys) of each pair; they run one after the other, and every second pair begins with the keys."""
    compared = []
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), ["worker"])
        for number in range(pairs):
            kinds = ["", folder] if number % 2 == 0 else [folder, ""]
            results = {kind: benchmark(load, seconds=seconds, keys=kind) for kind in kinds}
            compared.append((results[""], results[folder]))
    return compared


def report_pairs(load: Load, compared: Sequence[tuple[Result, Result]]) -> str:
    """Return the pairs as lines of text, and the median of their ratios."""
    lines = [
        f"{load.actors} synthetic actors, T={load.length}, B={load.num_envs}, frames 84x84, loopback: plain, with keys, ratio"
    ]
    ratios = [guarded.env_steps_per_second / plain.env_steps_per_second for plain, guarded in compared]
    for (plain, guarded), ratio in zip(compared, ratios, strict=True):
        each = [
            f"{one.env_steps_per_second:9,.0f} env steps/s, {one.received_bytes / one.seconds / MIB:5,.0f} MiB/s, "
            f"ZeroMQ's thread {one.zmq_cpu_seconds / (one.received_bytes / MIB) * 1000:.2f} ms/MiB"
            for one in (plain, guarded)
        ]
        lines.append(f"  {each[0]}   {each[1]}   {ratio:.2f}")
    lines.append(f"  median of {len(ratios)} ratios {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return "\n".join(lines)
