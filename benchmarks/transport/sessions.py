"""Processes that hold many workers each: real sessions and connections, a fixed rate of small messages, and no environments.

A process has one ZeroMQ context, one loop and up to `SESSIONS` workers. Its workers send in turn, so that the messages of all
workers arrive at an even rate. A worker without a free credit leaves out its turn.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

import zmq

from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ResourceError
from common.protocol import codec
from common.protocol import events as e
from common.protocol.messages import Arrays, Envelope, Reject, Trajectory
from common.protocol.session_config import SessionConfig
from common.protocol.worker_side import Identity, WorkerSide
from common.runtime.process import allow_descriptors
from common.transport.zmq import DEALER_OPTIONS
from common.units import Seconds

SESSIONS = 250  # in one process
TICK_SECONDS: Seconds = 0.25
CATCH_UP_SECONDS: Seconds = 0.1  # of turns that a process missed because others had the cores
UNDER_WAY = 60  # credits of all workers together; of one worker fewer than its connection has room for

ENV = EnvSpec(
    observation_shape=(4,), observation_dtype="float32", action=ActionSpec(choices=(2,), shape=()), frame_stack=1, frame_skip=1
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Workers of one learner: their number, what they send, and how often."""

    workers: int
    rate: float  # messages/s of all workers together
    config: SessionConfig
    arrays: Arrays  # of each message

    def session(self, number: int) -> WorkerSide:
        """Return the session of one worker."""
        identity = Identity(role="actor", name=f"synthetic-{number}", incarnation=time.time_ns(), software="benchmark")
        return WorkerSide(identity, env_signature=self.config.env_signature)


@contextmanager
def connected(crowd: Crowd, endpoint: str) -> Iterator[list[BaseProcess]]:
    """Start the processes that hold the workers, and terminate them at the end."""
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    for first in range(0, crowd.workers, SESSIONS):
        numbers = range(first, min(first + SESSIONS, crowd.workers))
        processes.append(context.Process(target=hold, args=(crowd, endpoint, numbers), daemon=True))
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
            process.join()


def require_alive(processes: Sequence[BaseProcess]) -> None:
    """Raise `ResourceError` where a process has ended: its workers would be missing in the figures."""
    if any(process.exitcode is not None for process in processes):
        raise ResourceError("a process of synthetic workers ended", found=[process.exitcode for process in processes])


def hold(crowd: Crowd, endpoint: str, numbers: range) -> None:
    """Run the workers of these `numbers` until this process is terminated."""
    allow_descriptors()
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * SESSIONS)
    workers = [_Worker(crowd, context, endpoint, number) for number in numbers]
    poller = zmq.Poller()
    for worker in workers:
        poller.register(worker.socket, zmq.POLLIN)
    by_socket = {worker.socket: worker for worker in workers}
    pause = crowd.workers / (crowd.rate * len(workers))
    turn, turn_at, tick_at = 0, time.monotonic(), 0.0
    while True:
        now = time.monotonic()
        if now >= tick_at:
            tick_at = now + TICK_SECONDS
            for worker in workers:
                worker.handle(e.Tick())
        if now >= turn_at:
            turn_at = max(turn_at + pause, now - CATCH_UP_SECONDS)
            workers[turn % len(workers)].offer()
            turn += 1
        for socket, _ in poller.poll(int(max(0.0, turn_at - time.monotonic()) * 1000)):
            by_socket[socket].receive()


class _Worker:
    """One worker: its session, its socket, and the message that it sends again and again."""

    def __init__(self, crowd: Crowd, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, number: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        for option, value in DEALER_OPTIONS.items():
            self.socket.setsockopt(option, value)
        self.socket.connect(endpoint)
        self._session = crowd.session(number)
        self._arrays = crowd.arrays
        self._env_steps = crowd.config.rollout_env_steps
        self._produced = 0
        self._perform(self._session.request_snapshot(-1, time.monotonic()))

    def offer(self) -> None:
        """Send a message, if a credit is free and there is a policy that may have acted."""
        if not self._session.has_credit or self._session.version < 0:
            return
        self._produced += self._env_steps
        self._session.count(produced=self._produced)
        message = Trajectory(seq=0, env_steps_sent=0, version=0, env_steps=self._env_steps, arrays=self._arrays)
        self._perform(self._session.offer(message, time.monotonic()))

    def receive(self) -> None:
        """Handle all messages that have arrived."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self.handle(e.Received(envelope=codec.decode(frames)))

    def handle(self, event: e.Event) -> None:
        """Let the session handle an event, and send its messages."""
        self._perform(self._session.handle(event, time.monotonic()))

    def _perform(self, instructions: list[e.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case e.Send(message=message):
                    frames = codec.encode(Envelope(run=self._session.run, message=message))
                    try:
                        self.socket.send_multipart(frames, zmq.DONTWAIT)
                    except zmq.Again:  # no connection; the session greets again
                        return self.handle(e.Unsent(message=message))
                case e.Refused() | Reject():
                    raise ResourceError("a synthetic worker was refused", found=str(instruction))
                case e.NewIncarnation():
                    self._produced = 0
        return None
