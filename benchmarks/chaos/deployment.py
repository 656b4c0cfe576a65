"""Learner, actors and evaluator as processes of their own, each restarted when it ends, as containers would be.

`Deployment` starts the services with the command lines that an orchestrator uses (`--resume-if-found --linger` for the
learner), ends them on request, and records every exit together with whether the storm caused it. One thread restarts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.chaos import environment, machine
from benchmarks.chaos.clock import Clock
from benchmarks.chaos.proxy import Proxy
from common.observability.deployment import Samples
from common.runtime.run_directory import RunDirectory
from common.transport.curve import make as make_keys
from common.units import EnvSteps, Seconds
from services.cli.inspect.scrape import get, parse_metrics
from services.cli.train import exit_with_parent
from services.cli.train.instructions import env_worker_names, rank_names
from services.cli.train.ports import Ports

ROOT = Path(__file__).parents[2]
PERIOD: Seconds = 0.005  # of one step of one environment
SHORT_PERIOD: Seconds = 0.01  # in the short form, which shares the machine with other tests
ENVS, LENGTH, CREDITS = 4, 16, 2
MESSAGE: EnvSteps = ENVS * LENGTH
UNSEEN: EnvSteps = (CREDITS + 1) * MESSAGE  # most that a killed actor stepped after its last message: its credits and a rollout
WAIT: Seconds = 240.0  # for anything awaited; only a fault lets it pass
POLL: Seconds = 0.02
RESTART: Seconds = 0.2  # between an exit and the next start, doubled up to RESTART_MOST while a service ends at once
RESTART_MOST: Seconds = 3.0

CONFIG = """
env: {{entry_point: "benchmarks.chaos.environment:make", num_envs: {envs}, kwargs: {{folder: "{folder}", period: {period}}}}}
model: {{hidden: [16], activation: tanh}}
algorithm: {{name: ppo, epochs: 1, minibatch: 64, learning_rate: 1e-3}}
rollout: {{length: {length}}}
learner: {{batch: 1, credits: {credits}}}
evaluator: {{every_seconds: 2, episodes: 2, cpu_share: 1.0}}
checkpoint: {{every_seconds: 2}}
target: {{env_steps: 1_000_000_000_000}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The requirements of a storm on its deployment, such as keys or a proxy."""

    actors: int = 2
    ranks: int = 1  # of the learner
    env_workers: int = 0  # of each actor, which is a policy server where it has any
    keys: bool = False  # every connection is encrypted, and each name has a key of its own
    proxy: bool = False  # actors and evaluator reach the learner through a `Proxy`
    disk: bool = False  # the run directory is on a small file system of its own
    disks: bool = False  # the same, and its checkpoints, the logs, and a store of the run are on others
    shm: bool = False  # all services have a /dev/shm of 64 KiB
    clock: bool = False  # the wall clock of all services can be stepped


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """One end of one process."""

    name: str
    pid: int
    code: int
    caused: bool  # the storm ended the process
    words: str  # its last error, or else the last line that it logged


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    started_at: Seconds
    restart_at: Seconds | None = None
    delay: Seconds = RESTART


@dataclass
class Deployment:
    """The processes of one run. A context manager: on exit it ends them and removes their files."""

    setup: Setup
    folder: Path
    period: Seconds = PERIOD
    exits: list[Exit] = field(default_factory=list)
    killed: int = 0  # incarnations of actors that ended without a Goodbye
    _children: dict[str, _Child] = field(default_factory=dict)
    _caused: set[int] = field(default_factory=set)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _stopping: threading.Event = field(default_factory=threading.Event)  # nothing is restarted any more
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Write the configuration and choose the ports."""
        self.steps_folder = self.folder / "steps"
        self.logs = self.folder / "logs"
        self.keys = self.folder / "keys"
        self.disk = self.folder / "disk"
        self.store = self.folder / "store"
        self.clock = Clock(self.folder / "clock")
        for folder in (self.steps_folder, self.logs, self.disk, self.store):
            folder.mkdir()
        self.run_dir = self.disk / "run"
        self.run_files = RunDirectory(self.run_dir)
        self.disks = {"checkpoints": self.run_files.checkpoints, "logs": self.logs, "results": self.run_dir, "store": self.store}
        self.config = self.folder / "chaos.yaml"
        text = CONFIG.format(envs=ENVS, folder=self.steps_folder, period=self.period, length=LENGTH, credits=CREDITS)
        self.config.write_text(textwrap.dedent(text))
        names = [f"actor-{index}" for index in range(self.setup.actors)]
        self.learners = rank_names(self.setup.ranks)
        env_workers = [name for index in range(len(names)) for name in env_worker_names(index, self.setup.env_workers)]
        self.steppers = env_workers or names  # the processes that step environments
        self.workers = [*names, *env_workers, "evaluator"]
        self.names = [*self.learners, *self.workers]
        self._open = ExitStack()
        self.master_port, *ports = self._open.enter_context(Ports()).find(1 + len(self.learners) + len(names) + len(self.names))
        self.ports = dict(zip(self.learners, ports, strict=False))  # for workers, of each rank of the learner
        self.port = self.ports["learner"]
        self.binds = dict(zip(names, ports[len(self.ports) :], strict=False))  # for env workers, of each policy server
        self.http = dict(zip(self.names, ports[len(self.ports) + len(names) :], strict=True))
        if self.setup.keys:
            make_keys(self.keys, [*names, "evaluator", "flooder"])
        self.proxy: Proxy | None = None

    def __enter__(self) -> Self:
        """Start everything and wait until all actors step and the learner trains."""
        for folder in (self.disk,) if self.setup.disk else (self.disk, self.logs, self.store) if self.setup.disks else ():
            self._open.enter_context(machine.tmpfs(folder, machine.DISK_BYTES))
        if self.setup.proxy:
            self.proxy = self._open.enter_context(Proxy(self.port))
        threading.Thread(target=self._restart, daemon=True).start()
        try:
            self.until(lambda: len(self._children) == len(self.names), "all processes are started")
            self.flowing(dict.fromkeys(self.steppers, 0))
            self.until(lambda: self.read("learner"), "the learner answers")
            if self.setup.disks:
                self._move_checkpoints()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs, at once."""
        self._stopping.set()
        with self._lock:
            for child in self._children.values():
                if child.process.poll() is None:
                    child.process.kill()
                child.process.wait()
        self._ended.set()
        self._open.close()

    def _move_checkpoints(self) -> None:
        """Put the checkpoints on a file system of their own; the learner makes their folder in a directory that must be new."""
        checkpoints, copy = self.run_files.checkpoints, self.folder / "checkpoints"
        self.until(checkpoints.exists, "a checkpoint is written")
        with self.paused("learner"):
            shutil.copytree(checkpoints, copy)
            self._open.enter_context(machine.tmpfs(checkpoints, machine.DISK_BYTES))
            shutil.copytree(copy, checkpoints, dirs_exist_ok=True)

    # --- disturbing ---

    def pid(self, name: str) -> int:
        """Return the process id of the service now."""
        return self._children[name].process.pid

    def alive(self, name: str) -> bool:
        """Return whether the service has a process now."""
        return self._children[name].process.poll() is None

    @property
    def actors(self) -> list[str]:
        """Return the names of the actors."""
        return [name for name in self.names if name.startswith("actor")]

    def kill(self, name: str, number: signal.Signals) -> None:
        """End a service by a signal; it is restarted, and its exit counts as the storm's, of a rank those of all ranks."""
        with self._lock:
            child = self._children[name]
            if child.process.poll() is None:
                self._caused |= {self.pid(other) for other in (self.learners if name in self.learners else [name])}
                self.killed += name.startswith("actor") and number != signal.SIGTERM
                child.process.send_signal(number)

    def restart(self, name: str, number: signal.Signals) -> None:
        """End a service by a signal, and wait until it is started again. Raises `TimeoutError`."""
        pid = self.pid(name)
        self.kill(name, number)
        self.await_successor(name, pid)

    def await_successor(self, name: str, pid: int | None) -> None:
        """Wait until a service has another process than `pid`. Raises `TimeoutError`."""
        self.until(lambda: self.pid(name) != pid, f"{name} is started again")

    def pause(self, name: str, *, on: bool) -> None:
        """Stop all threads of a service, or let them continue."""
        with self._lock:
            if self.alive(name):
                self._children[name].process.send_signal(signal.SIGSTOP if on else signal.SIGCONT)

    @contextmanager
    def paused(self, *names: str) -> Iterator[None]:
        """Hold services still for the time of the block."""
        for name in names:
            self.pause(name, on=True)
        try:
            yield
        finally:
            for name in names:
                self.pause(name, on=False)

    # --- reading ---

    def steps(self) -> dict[int, EnvSteps]:
        """Return the env steps of every incarnation of every stepper, by process id, as the environments counted them."""
        return environment.env_steps(self.steps_folder, "env_worker" if self.setup.env_workers else "actor")

    def begun(self) -> int:
        """Return how often the environments of env workers began anew, because their policy server missed a row or is new."""
        return environment.resets(self.steps_folder, "env_worker")

    def read(self, name: str) -> Samples:
        """Return all metrics of a service; empty where it does not answer."""
        with contextlib.suppress(OSError, ValueError):
            code, page = get(f"http://127.0.0.1:{self.http[name]}/metrics", timeout=5.0)
            return parse_metrics(page) if code == 200 else {}  # noqa: PLR2004
        return {}

    def ledger(self) -> dict[str, EnvSteps]:
        """Return the learner's ledger from its metrics: states, and the sum of the drop reasons; empty without an answer."""
        ledger: Counter[str] = Counter()
        for rank in self.learners:
            if not (samples := self.read(rank)):
                return {}
            for (name, label), value in samples.items():
                if name == "rookery_learner_ledger_env_steps":
                    ledger[label] += int(value)
                elif name == "rookery_learner_env_steps_dropped_total":
                    ledger["dropped"] += int(value)
        return dict(ledger)

    def log_bytes(self) -> int:
        """Return the number of bytes that all services have logged."""
        return sum(path.stat().st_size for path in self.logs.iterdir())

    def said(self, name: str) -> str:
        """Return everything that the service has logged."""
        return (self.logs / f"{name}.log").read_text(errors="replace")

    # --- waiting ---

    def until(self, happened: Callable[[], Any], what: str, seconds: Seconds = WAIT) -> Any:
        """Call `happened` until its answer is true, and return that answer. Raises `TimeoutError`."""
        deadline = time.monotonic() + seconds
        while not (answer := happened()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {seconds:g} s still awaited: {what}")
            time.sleep(POLL)
        return answer

    def mark(self) -> dict[str, EnvSteps]:
        """Return the env steps of each stepper's present incarnation, for `flowing`."""
        steps = self.steps()
        return {name: steps.get(self.pid(name), 0) for name in self.steppers}

    def flowing(self, since: dict[str, EnvSteps], seconds: Seconds = WAIT) -> dict[str, Seconds]:
        """Wait until each stepper stepped more than it can without the learner; return when each did, on the monotonic clock.

        `since` is an earlier `mark`; an incarnation that began later is counted from 0. A missing name did not get that far.
        """
        pids = {name: self.pid(name) for name in since}
        done: dict[str, Seconds] = {}
        deadline, alone = time.monotonic() + seconds, UNSEEN // max(1, self.setup.env_workers)
        while len(done) < len(since) and time.monotonic() < deadline:
            steps = self.steps()
            for name in since.keys() - done.keys():
                before = since[name] if self.pid(name) == pids[name] else 0
                if steps.get(self.pid(name), 0) - before > alone and self.alive(name):
                    done[name] = time.monotonic()
            time.sleep(POLL)
        return done

    def bound(self) -> Seconds:
        """Wait until the present learner listens; return when, on the monotonic clock."""
        self.until(lambda: self.alive("learner") and machine.listens(self.port), "the learner listens")
        return time.monotonic()

    # --- ending ---

    def finish(self) -> None:
        """End the run cleanly: actors and evaluator send a Goodbye, then the learner saves."""
        with self._lock:
            self._stopping.set()
            for name in self.workers:
                self._terminate(name)
            for name in self.workers:
                self._reap(name)
        with contextlib.suppress(TimeoutError):
            self.until(
                lambda: (books := self.ledger()) and not books["in_flight"] and not books["queued"],
                "all experience is completed",
                10.0,
            )
        with self._lock:
            for name in self.learners:
                self._terminate(name)
            for name in self.learners:
                self._reap(name)

    def _terminate(self, name: str) -> None:
        child = self._children[name]
        if child.process.poll() is None:
            self._caused.add(child.process.pid)
            child.process.terminate()

    def _reap(self, name: str) -> None:
        process = self._children[name].process
        try:
            process.wait(WAIT / 3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self._caused.discard(process.pid)
        self._record(name, process)

    def _record(self, name: str, process: subprocess.Popen[bytes]) -> None:
        if all(exit_.pid != process.pid for exit_ in self.exits):
            lines = self.said(name).splitlines()
            words = [line for line in lines if ": error: " in line][-1:] or lines[-1:]
            caused = process.pid in self._caused
            self.exits.append(Exit(name=name, pid=process.pid, code=process.returncode, caused=caused, words="".join(words)))

    def _restart(self) -> None:
        """Start all services, and again after each end. They are killed when this thread ends, which lives as long as `self`."""
        with self._lock:
            for name in self.names:
                self._children[name] = _Child(self._start(name), time.monotonic())
        while not self._ended.wait(POLL):
            with self._lock:
                for name, child in self._children.items():
                    if not self._stopping.is_set():
                        self._look_after(name, child)

    def _look_after(self, name: str, child: _Child) -> None:
        if child.process.poll() is None:
            return
        now = time.monotonic()
        if child.restart_at is None:
            self._record(name, child.process)
            child.delay = RESTART if now - child.started_at > 2 * RESTART_MOST else min(2 * child.delay, RESTART_MOST)
            child.restart_at = now + child.delay
        elif now >= child.restart_at:
            child.process, child.started_at, child.restart_at = self._start(name), now, None

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        own = {name_: value for name_, value in os.environ.items() if not name_.startswith("ROOKERY_")}
        words = exit_with_parent.wrapper()
        words += [sys.executable, "-m", *(["benchmarks.chaos.clock", str(self.clock.path)] if self.setup.clock else [])]
        words += [*self._words(name), f"metrics.port={self.http[name]}"]
        if self.setup.shm:
            words = [*machine.SMALL_SHM, *words]
        with (self.logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=own | self._rank(name),
                start_new_session=True,
            )

    def _rank(self, name: str) -> dict[str, str]:
        """Return the variables of torchrun for a rank of several."""
        if self.setup.ranks == 1 or name not in self.learners:
            return {}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.master_port)}
        return {"RANK": str(self.learners.index(name)), "WORLD_SIZE": str(self.setup.ranks), **address}

    def _words(self, name: str) -> list[str]:
        if name in self.learners:
            words = ["services.learner", "--config", str(self.config), "--run-dir", str(self.run_dir)]
            words += ["--resume-if-found", "--linger", f"learner.bind=tcp://127.0.0.1:{self.ports[name]}"]
            words.append(f"learner.ranks={self.setup.ranks}")
            words += [f"run.store=file://{self.store}"] if self.setup.disks else []
        elif name in self.binds and self.setup.env_workers:
            words = ["services.policy_server", "--name", name, "--learner", f"tcp://127.0.0.1:{self.port}"]
            words += [f"policy_server.bind=tcp://127.0.0.1:{self.binds[name]}", f"policy_server.workers={self.setup.env_workers}"]
            words += ["--allow-code", "benchmarks"]
        elif name.startswith("env_worker"):
            bind = self.binds[f"actor-{name.split('-')[1]}"]
            words = ["services.env_worker", "--name", name, "--policy-server", f"tcp://127.0.0.1:{bind}"]
            words += ["--allow-code", "benchmarks"]
        else:
            ports = [self.port] if name == "evaluator" else self.ports.values()
            learner = self.proxy.endpoint if self.proxy else ",".join(f"tcp://127.0.0.1:{port}" for port in ports)
            words = [f"services.{name.partition('-')[0]}", "--name", name, "--learner", learner, "--allow-code", "benchmarks"]
        return words + (["--keys", str(self.keys / name)] if self.setup.keys else [])


@contextmanager
def deployed(setup: Setup, *, short: bool = False) -> Iterator[Deployment]:
    """Yield a running deployment in a folder of its own, which is removed at the end."""
    period = SHORT_PERIOD if short else PERIOD
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, Deployment(setup, Path(folder), period) as deployment:
        yield deployment
