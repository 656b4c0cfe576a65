"""Real processes of the services over loopback: started, watched over HTTP, killed; none is left behind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.ports import free_ports

DEADLINE = 300.0  # seconds for anything awaited, on a machine that is busy; only a fault lets it pass
POLL = 0.05

# A contextual bandit with a known answer. Each step takes a moment: a run at full speed would keep all cores from the tests.
PACED = """
import time
import gymnasium
from common.envs.probes import matching_action

class Paced(gymnasium.Wrapper):
    def __init__(self, pause):
        super().__init__(matching_action())
        self.pause = pause

    def step(self, action):
        time.sleep(self.pause)
        return self.env.step(action)

def make(pause=0.003):
    return Paced(pause)
"""

# `rookery` on a machine of any speed: `top` and `doctor` call no service unreachable because it is slow, and `train` kills none.
PATIENT = """
import runpy
from services.cli.inspect import scrape
from services.cli.train.supervisor import Timeouts

scrape.TIMEOUT = scrape.DEADLINE = scrape.PROMETHEUS_TIMEOUT = 300.0
Timeouts.__init__.__kwdefaults__.update(learner_stop=300.0, terminate=300.0)
runpy.run_module("services.cli", run_name="__main__", alter_sys=True)
"""

# With a net of a few hundred weights: a run is over, or under way, within a second.
PROBE = """
env: {entry_point: "paced:make", num_envs: 8}
model: {hidden: [16], activation: tanh}
algorithm: {name: ppo, epochs: 2, minibatch: 64, learning_rate: 1e-2, entropy_coef: 0.0}
rollout: {length: 16}
learner: {batch: 1, credits: 2}
actor: {count: 2}
evaluator: {every_seconds: 1.0, episodes: 4, cpu_share: 1.0}
checkpoint: {every_seconds: 0.5}
target: {env_steps: 100_000_000}
"""


def until(happened: Callable[[], Any], what: str, seconds: float = DEADLINE) -> Any:
    """Ask again and again until the answer is true; returns it."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not (answer := happened()):
        assert time.monotonic() < deadline, f"it never happened: {what}"
        pause.wait(POLL)
    return answer


def gone(process: psutil.Process) -> bool:
    """Return whether a process has ended; it may be reaped between any two questions."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Http:
    """HTTP client for one service's port."""

    def __init__(self, port: int, *, host: str = "127.0.0.1", seconds: float = DEADLINE) -> None:
        """Send nothing yet; each request times out after `seconds`."""
        self.url, self._seconds = f"http://{host}:{port}", seconds

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body; (0, b"") where the connection fails."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=self._seconds) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except (OSError, http.client.HTTPException):  # or it ended in the middle of its answer
            return 0, b""

    def status(self) -> dict[str, Any]:
        """The learner's /status; empty where there is none."""
        code, body = self.get("/status")
        return json.loads(body) if code == 200 else {}

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics; NaN where there is none."""
        text = self.get("/metrics")[1].decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        return float("nan")


class Service:
    """One process that the test started."""

    def __init__(self, words: list[str], folder: Path, *, port: int = 0) -> None:
        """Start it in a session of its own; what it says goes to a file."""
        self.said = folder / f"{threading.get_ident()}-{time.monotonic_ns()}.log"
        self.http = Http(port)
        self.may_end = False  # whether the test has signalled it, waits for its end, or expects it: see `Colony.wait`
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ROOKERY_")}
        with self.said.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """All it has said so far."""
        return self.said.read_text()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone."""
        self.may_end = self.may_end or number not in {signal.SIGSTOP, signal.SIGCONT}
        self.process.send_signal(number)

    def ended(self, seconds: float = DEADLINE) -> int:
        """Its exit code, once it has one."""
        self.may_end = True
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s; it said:\n{self.output}")

    def children(self) -> dict[str, psutil.Process]:
        """The services that a supervisor has started, by name."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                words = child.cmdline()
            except psutil.Error:
                continue
            if "services.learner" in words:
                found["learner"] = child
            elif "--name" in words:
                found[words[words.index("--name") + 1]] = child
        return found

    def kill_tree(self) -> None:
        """Leave nobody behind."""
        try:
            family = [*psutil.Process(self.process.pid).children(recursive=True)]
        except psutil.Error:
            family = []
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for child in family:
            try:
                child.kill()
            except psutil.Error:
                continue


class Colony:
    """The processes of one test."""

    def __init__(self, folder: Path) -> None:
        """An empty folder to run in."""
        self.folder = folder
        self.config = folder / "probe.yaml"
        self.config.write_text(textwrap.dedent(PROBE))
        (folder / "paced.py").write_text(PACED)
        (folder / "patient.py").write_text(PATIENT)
        self.run_dir = folder / "run"
        self.services: list[Service] = []
        (self.port,) = free_ports(1)

    @property
    def endpoint(self) -> str:
        """Return the learner's endpoint, also before the learner has started."""
        return f"tcp://127.0.0.1:{self.port}"

    def _service(self, words: list[str], port: int, folder: Path | None = None) -> Service:
        self.services.append(Service(words, folder or self.folder, port=port))
        return self.services[-1]

    def start(self, *words: str) -> Service:
        """Any module with its words."""
        return self._service(list(words), 0)

    def learner(self, *words: str, config: str = "") -> Service:
        """`rookery learner`, here and with the probe's settings."""
        (port,) = free_ports(1)
        own = ["--config", config or str(self.config), "--run-dir", str(self.run_dir), f"metrics.port={port}"]
        return self._service(["services.learner", *own, f"learner.bind={self.endpoint}", *words], port)

    def worker(self, role: str, name: str, *words: str, folder: Path | None = None) -> Service:
        """Start `rookery actor` or `rookery evaluator` with the learner's address and a name.

        It starts in `folder`, and imports modules from there, as on another machine. The module `paced` is allowed;
        a test with another package adds `--allow-code`.
        """
        (port,) = free_ports(1)
        own = ["--learner", self.endpoint, "--name", name, "--allow-code", "paced", f"metrics.port={port}"]
        return self._service([f"services.{role}", *own, *words], port, folder)

    def train(self, *words: str, preset: str = "") -> Service:
        """`rookery train`, its services' ports from one base on: the learner's is the first."""
        base, *_ = free_ports(6)  # learner, evaluator, two actors and an env worker of each count up from the first
        own = ["train", preset or str(self.config), "--run-dir", str(self.run_dir)]
        own += [] if any(word.startswith("metrics.port=") for word in words) else [f"metrics.port={base}"]
        return self._service(["patient", *own, *words], base)

    def rookery(self, *words: str) -> Service:
        """The `rookery` command, which waits for each service as long as a test does."""
        return self.start("patient", *words)

    def wait(self, happened: Callable[[], Any], what: str, seconds: float = DEADLINE) -> Any:
        """As `until`, and fail at once where a service has ended that the test did not end: nothing will happen."""

        def happened_or_ended() -> Any:
            ended = [service for service in self.services if not service.may_end and service.process.poll() is not None]
            if not (answer := happened()) and ended:
                words = [f"{' '.join(service.process.args)}: {service.process.returncode}\n{service.output}" for service in ended]
                pytest.fail("\n".join([f"never happened: {what}; ended meanwhile:", *words]))
            return answer

        return until(happened_or_ended, what, seconds)

    def left(self) -> list[str]:
        """Names in the folder of what the services have made, but for their logs and compiled modules."""
        given = {"probe.yaml", "paced.py", "patient.py", "__pycache__"}
        return sorted(path.name for path in self.folder.iterdir() if path.name not in given and path.suffix != ".log")

    def summary(self) -> dict[str, Any]:
        """The run's summary.json."""
        return json.loads((self.run_dir / "summary.json").read_text())

    def checkpoints(self) -> list[str]:
        """Names of the checkpoints that are whole."""
        return sorted(path.name for path in (self.run_dir / "checkpoints").glob("checkpoint-*"))


def assert_balances(ledger: dict[str, Any]) -> None:
    """Every env step that was produced is explained, to the step."""
    explained = ledger["trained"] + ledger["queued"] + ledger["in_flight"] + sum(ledger["dropped"].values())
    assert ledger["produced"] == explained, ledger


@pytest.fixture
def colony(tmp_path: Path) -> Iterator[Colony]:
    """A folder, a free port, and processes that do not outlive the test."""
    built = Colony(tmp_path)
    yield built
    for service in built.services:
        service.kill_tree()


@pytest.fixture
def wait(colony: Colony) -> Callable[..., Any]:
    """`wait(happened, what)`: poll until the answer is true; returns it."""
    return colony.wait


@pytest.fixture
def balances() -> Callable[[dict[str, Any]], None]:
    """Asserts that a ledger balances."""
    return assert_balances


@pytest.fixture
def said(colony: Colony) -> Callable[..., list[tuple[int, str]]]:
    """`said(*lines)`: exit code and words of each of some `rookery` commands, which run side by side."""

    def run(*lines: str, patient: bool = True) -> list[tuple[int, str]]:
        start = colony.rookery if patient else partial(colony.start, "services.cli")
        asked = [start(*line.split()) for line in lines]
        return [(command.ended(), command.output) for command in asked]

    return run
