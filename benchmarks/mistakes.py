"""Fifteen mistakes of a first run: the line that names each, its exit code, and the seconds until the line and until the end.

    python -m benchmarks.mistakes [NAME ...]

Each is one command in an empty folder, one after another. CPU seconds are those of the command and of all processes that it
started. A command that waits, such as an actor without a learner, is stopped after its line. The machine should be idle.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import NamedTuple

from common.protocol import codec
from common.protocol.events import RefusalCode
from common.protocol.messages import Envelope, Refusal
from common.transport.zmq import ZmqServer
from common.units import Seconds

LIMIT: Seconds = 300.0
USER_MODULE = """
import sys
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

class Sound(gymnasium.Env):
    observation_space, action_space = Box(-1.0, 1.0, (3,), np.float32), Discrete(2)
    shown, steps = 3, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.shown, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(self.shown, np.float32), self.reward(), False, False, {}

    def reward(self):
        return 1.0

class Raises(Sound):
    def reward(self):
        raise ValueError("no such level")

class RaisesInActors(Sound):
    def reward(self):
        return 1.0 if "actor" not in sys.argv[0] else 1 / 0

class NotANumber(Sound):
    def reward(self):
        return 1.0 if self.steps < 100 else float("nan")

class NotANumberInActors(Sound):
    def reward(self):
        return 1.0 if "actor" not in sys.argv[0] else float("nan")

class OtherShape(Sound):
    shown = 4

class Unbounded(Sound):
    action_space = Box(-np.inf, np.inf, (2,), np.float32)
"""
USER_NETWORK = """
import numpy as np
import torch

class Recurrent(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.memory = torch.nn.LSTM(int(np.prod(shape)), 8)

    def forward(self, observation):
        return self.memory(observation.flatten(1))[0]
"""


class Mistake(NamedTuple):
    """One command of `rookery`, and a part of the line that must answer it."""

    words: str
    line: str


CARTPOLE = "train cartpole"
MISTAKES = {
    "wrong id": Mistake(f"{CARTPOLE} env.id=CartPol-v1", "unknown environment id"),
    "package missing": Mistake(f"{CARTPOLE} env.id=nopackage:Thing-v0", "nopackage"),
    "step raises": Mistake(f"{CARTPOLE} env.entry_point=mistaken:Raises", "no such level"),
    "step raises in actors": Mistake(f"{CARTPOLE} env.entry_point=mistaken:RaisesInActors", "division by zero"),
    "NaN rewards": Mistake(f"{CARTPOLE} env.entry_point=mistaken:NotANumber", "not finite"),
    "NaN rewards in actors": Mistake(f"{CARTPOLE} env.entry_point=mistaken:NotANumberInActors", "found nan"),
    "other shape": Mistake(f"{CARTPOLE} env.entry_point=mistaken:OtherShape", "shape"),
    "discrete with TD3": Mistake("train pendulum-td3 env.id=CartPole-v1", "td3 needs continuous actions"),
    "continuous with DQN": Mistake("train cartpole-dqn env.id=Pendulum-v1", "dqn cannot choose"),
    "typo in key": Mistake(f"{CARTPOLE} env.num_env=4", "did you mean num_envs?"),
    "port in use": Mistake(f"{CARTPOLE} learner.bind=tcp://127.0.0.1:{{taken}}", "in use"),
    "address": Mistake(f"{CARTPOLE} learner.bind=127.0.0.1:5700", "tcp://host:port"),
    "no learner": Mistake("actor --learner tcp://127.0.0.1:{free}", "no_learner_yet"),
    "wrong version": Mistake("actor --learner tcp://127.0.0.1:{older}", "protocol version"),
    "no keys": Mistake(f"{CARTPOLE} learner.bind=tcp://0.0.0.0:5700", "rookery keys"),
    "unbounded action box": Mistake("train pendulum-td3 env.entry_point=mistaken:Unbounded", "finite bounds"),
    "LSTM as own network": Mistake(f"{CARTPOLE} model.entry_point=recurrent:Recurrent", "mixes the rows"),
}
"""The fifteen, and two faults that no check before the start can find."""


class Answer(NamedTuple):
    """`code` is None for a command that waits; `line` is "" where none named the mistake."""

    line: str
    code: int | None
    line_seconds: Seconds
    seconds: Seconds  # until the end
    cpu_seconds: Seconds


def main(names: Sequence[str]) -> int:
    """Make the named mistakes, or all; print a table, and return 1 where one is not answered."""
    print(f"{os.cpu_count()} cores; load before: {os.getloadavg()[0]:.1f}\n")
    print("| mistake | seconds until the line | until the end | CPU seconds | exit code | line |\n|---|---|---|---|---|---|")
    answers = []
    with places() as ports:
        for name in names or MISTAKES:
            answer = answered(MISTAKES[name], ports)
            answers.append(answer)
            code = "waits" if answer.code is None else answer.code
            shown, ended = f"{answer.line_seconds:.1f}", f"{answer.seconds:.1f}"
            print(f"| {name} | {shown} | {ended} | {answer.cpu_seconds:.1f} | {code} | {answer.line} |", flush=True)
    return 0 if all(answer.line for answer in answers) else 1


def answered(mistake: Mistake, ports: dict[str, int]) -> Answer:
    """Make one mistake in an empty folder, and return how it was answered."""
    with TemporaryDirectory() as folder:
        Path(folder, "mistaken.py").write_text(USER_MODULE, encoding="utf-8")
        Path(folder, "recurrent.py").write_text(USER_NETWORK, encoding="utf-8")
        command = [sys.executable, "-m", "services.cli", *mistake.words.format(**ports).split()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(Path.cwd())])}
        before, began, line, line_seconds = _cpu_seconds(), time.monotonic(), "", math.nan
        waits = False
        with subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
        ) as process:
            assert process.stdout is not None
            stop = Thread(target=_stop_late, args=(process, over := Event()), daemon=True)
            stop.start()
            for shown in process.stdout:
                if mistake.line in shown and not line:
                    line, line_seconds = shown.strip(), time.monotonic() - began
                    if mistake.words.startswith("actor") and "error:" not in shown:
                        process.send_signal(signal.SIGTERM)
                        waits = True
            code = process.wait()
            over.set()
        return Answer(line, None if waits else code, line_seconds, time.monotonic() - began, _cpu_seconds() - before)


def _stop_late(process: subprocess.Popen[str], over: Event) -> None:
    if not over.wait(LIMIT):
        os.killpg(process.pid, signal.SIGKILL)


def _cpu_seconds() -> Seconds:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def places() -> Iterator[dict[str, int]]:
    """Yield ports: `taken` by another program, `free`, and of an `older` learner that refuses every worker."""
    over = Event()
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as closed:
        ports = {"taken": taken.getsockname()[1], "free": closed.getsockname()[1]}
        closed.close()
        learner = ZmqServer("tcp://127.0.0.1:0")
        serving = Thread(target=_refuse, args=(learner, over))
        serving.start()
        yield {**ports, "older": int(learner.endpoint.rpartition(":")[2])}
        over.set()
        serving.join()
        learner.close()


def _refuse(learner: ZmqServer, over: Event) -> None:
    message = Refusal(code=RefusalCode.PROTOCOL, reason="protocol version: found 8, wanted 1", retry=False)
    while not over.is_set():
        if (arrived := learner.receive(0.1)) is not None:
            learner.send(arrived[0], codec.encode(Envelope(run="", message=message)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
