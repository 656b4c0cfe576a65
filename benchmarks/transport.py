"""How much experience can one learner's I/O thread admit?

Run it with `python -m benchmarks.transport`. Synthetic actors (processes that hold one finished rollout of 84x84 frames and
send it again and again, with real sessions and credits) against a learner's real intake over loopback: transport,
decoding, validation, ledger, queue. Where the train loop would be, messages are taken and settled at once.

With `--keys` pairs of runs, one plain and one with keys (CURVE), whichever first in turn: what encryption costs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean, median

import numpy as np

from common.algorithms.trajectory import check_trajectory, trajectory_schema
from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ResourceError
from common.session.actor_side import ActorSide, Identity
from common.session.events import Note
from common.session.learner_side import LearnerSide
from common.session.roster import Terms
from common.transport.curve import LearnerKeys, PeerKeys, make
from common.transport.link import Link
from common.transport.zmq import ZmqLearner, ZmqPeer
from common.units import MIB, Seconds
from common.wire.messages import Arrays, ArraySpec, Snapshot, Trajectory
from services.learner.intake import Intake

ENV = EnvSpec(
    observation_shape=(84, 84), observation_dtype="uint8", action=ActionSpec(n=6, shape=()), frame_stack=4, frame_skip=4
)
SNAPSHOT_BYTES = 1_686_695 * 4  # the Nature network's parameters in float32
WARM_SECONDS: Seconds = 3.0
START_SECONDS: Seconds = 60.0
WAIT_SECONDS: Seconds = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent."""

    actors: int
    length: int  # T
    num_envs: int  # B of each actor
    credits: int = 2

    @property
    def schema(self) -> tuple[ArraySpec, ...]:
        """Arrays of one trajectory."""
        recorded = (ArraySpec(name="log_prob", dtype="float32", shape=(self.length, self.num_envs)),)
        return trajectory_schema(ENV, length=self.length, num_envs=self.num_envs, recorded=recorded)

    @property
    def terms(self) -> Terms:
        """What the learner offers its actors."""
        return Terms(
            run="benchmark",
            config="{}",
            env_signature=ENV.signature,
            schema=self.schema,
            credits=self.credits,
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
    zmq_cpu_seconds: Seconds  # of ZeroMQ's own thread, which reads the sockets
    resident_bytes: Sequence[int]  # of the learner, from the start of the window to its end

    @property
    def env_steps_per_second(self) -> float:
        """Rate of admission."""
        return self.env_steps / self.seconds


def benchmark(load: Load, *, seconds: Seconds, readings: int = 60, keys: str = "") -> Result:
    """Let the actors send for `seconds` after warming up, with the `keys` in a folder if one is named."""
    transport = ZmqLearner("tcp://127.0.0.1:0", keys=LearnerKeys.of(keys and f"{keys}/learner"))
    session = LearnerSide(load.terms, check=lambda experience: check_trajectory(ENV, experience.arrays))
    intake = Intake(transport=transport, session=session, clock=time.monotonic, note=_raise_warning)
    intake.start()
    intake.publish(Snapshot(version=0, env_steps=0, precision="fp32", layout="", arrays={}))
    try:
        with _actors(load, transport.endpoint, keys and f"{keys}/peer") as actors:
            _consume(intake, until=lambda count: count >= 2 * load.actors, within=START_SECONDS, actors=actors)
            _consume(intake, until=lambda _: False, within=WARM_SECONDS, actors=actors)
            return _measure(intake, actors, seconds, readings)
    finally:
        intake.close()


def _measure(intake: Intake, actors: Sequence[BaseProcess], seconds: Seconds, readings: int) -> Result:
    before, cpu, began = intake.figures, _thread_seconds(), time.monotonic()
    env_steps, resident = 0, [_resident_bytes()]
    for number in range(readings):
        rest = began + seconds * (number + 1) / readings - time.monotonic()
        env_steps += _consume(intake, until=lambda _: False, within=rest, actors=actors)
        resident.append(_resident_bytes())
    spent, after = time.monotonic() - began, intake.figures
    now = _thread_seconds()
    return Result(
        seconds=spent,
        env_steps=env_steps,
        received_bytes=after.bytes_received - before.bytes_received,
        dropped=sum(after.ledger["dropped"].values()),
        intake_cpu_seconds=now["intake"] - cpu["intake"],
        zmq_cpu_seconds=sum(now[name] - cpu[name] for name in cpu if name.startswith("ZMQ")),
        resident_bytes=resident,
    )


def _consume(intake: Intake, *, until: Callable[[int], bool], within: Seconds, actors: Sequence[BaseProcess]) -> int:
    """Stand in for the train loop; returns the env steps taken."""
    env_steps, count, deadline = 0, 0, time.monotonic() + within
    while not until(count) and (rest := deadline - time.monotonic()) > 0:
        items = intake.take(1, min(rest, WAIT_SECONDS))
        intake.settle(items)
        env_steps += sum(item.experience.env_steps for item in items)
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
    session = ActorSide(identity, env_signature=ENV.signature)
    transport = ZmqPeer(endpoint, keys=PeerKeys.of(keys))
    link = Link(transport=transport, session=session, clock=time.monotonic, note=_raise_warning)
    arrays, env_steps, produced = rollout(load.schema), load.length * load.num_envs, 0
    while True:
        link.service(WAIT_SECONDS)
        while link.welcome is not None and link.may_offer and session.version >= 0:
            produced += env_steps
            link.count(produced, Counter())
            link.offer(Trajectory(seq=0, shipped=0, version=0, env_steps=env_steps, arrays=arrays))


def rollout(schema: Sequence[ArraySpec]) -> Arrays:
    """Arrays of the schema as a game without an end would fill them: noise for frames, every row valid."""
    random = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {spec.name: np.zeros(np.maximum(spec.shape, 0), spec.dtype) for spec in schema}
    arrays["obs"][:] = random.integers(256, size=arrays["obs"].shape, dtype=np.uint8)
    arrays["action"][:] = random.integers(ENV.action.n, size=arrays["action"].shape)
    arrays["log_prob"][:] = -np.log(ENV.action.n)
    arrays["valid"][:] = True
    return arrays


def _raise_warning(note: Note) -> None:
    """Nothing may go wrong here: a refused or repeated message would be counted as speed."""
    if note.warning:
        raise ResourceError(note.event, found=str(note.fields))


def _thread_seconds() -> dict[str, Seconds]:
    """Core seconds of this process's threads by name, Python's own name where it has one; those of one name are added up."""
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    spent: dict[str, Seconds] = {}
    for task in Path("/proc/self/task").iterdir():
        system, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        name, fields = python.get(int(task.name), system), rest.split()
        ticks = int(fields[11]) + int(fields[12])  # utime and stime, see proc(5)
        spent[name] = spent.get(name, 0.0) + ticks / os.sysconf("SC_CLK_TCK")
    return spent


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def report(load: Load, result: Result) -> str:
    """The result in lines to read."""
    third = len(result.resident_bytes) // 3
    resident = [fmean(result.resident_bytes[at : at + third]) / MIB for at in (0, third, 2 * third)]
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
        make(Path(folder), ["peer"])
        for number in range(pairs):
            kinds = ["", folder] if number % 2 == 0 else [folder, ""]
            results = {kind: benchmark(load, seconds=seconds, keys=kind) for kind in kinds}
            compared.append((results[""], results[folder]))
    return compared


def report_pairs(load: Load, compared: Sequence[tuple[Result, Result]]) -> str:
    """The pairs in lines to read, and the median of their ratios."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--length", type=int, default=128, help="T")
    parser.add_argument("--num-envs", type=int, default=16, help="B")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keys", action="store_true", help="pairs of runs, plain and with keys")
    asked = parser.parse_args(argv)
    load = Load(actors=asked.actors, length=asked.length, num_envs=asked.num_envs)
    if asked.keys:
        print(f"load before: {os.getloadavg()[0]:.1f}", flush=True)
        print(report_pairs(load, compare(load, seconds=asked.seconds, pairs=asked.repeats)), flush=True)
        return 0
    for _ in range(asked.repeats):
        print(f"load before: {os.getloadavg()[0]:.1f}", flush=True)
        print(report(load, benchmark(load, seconds=asked.seconds)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
