"""A run of the services in which processes are killed at random moments and started again at once.

It does not use `rookery train`, because its supervisor ends the run when a learner dies more than five times in five minutes.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.units import Seconds
from services.cli.train import exit_with_parent
from services.cli.train.ports import Ports

POLL: Seconds = 0.02
LONGEST_PAUSE: Seconds = 2.0  # of training, between a kill and the next
SAVING_PAUSE: Seconds = 20.0  # for a checkpoint to begin, where a kill is to interrupt one
LIMIT: Seconds = 1800.0  # a whole run


@dataclass(slots=True)
class Services:
    """A learner and its actors, each in a process group of its own."""

    preset: str
    run_dir: Path
    overrides: Sequence[str]
    actors: int
    claims: Ports = field(default_factory=Ports)
    ports: list[int] = field(init=False)
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Choose the ports."""
        self.ports = self.claims.find(2)

    @property
    def names(self) -> list[str]:
        """Return the names of all processes."""
        return ["learner", *(f"actor-{number}" for number in range(self.actors))]

    def start(self, name: str) -> None:
        """Start one process; a learner resumes where a run exists."""
        endpoint, port = f"tcp://127.0.0.1:{self.ports[0]}", self.ports[1]
        if name == "learner":
            words = ["services.learner", "--config", self.preset, "--run-dir", str(self.run_dir), "--resume-if-found"]
            words += [f"learner.bind={endpoint}", f"metrics.port={port}", *self.overrides]
        else:
            words = ["services.actor", "--learner", endpoint, "--name", name]
        log = self.run_dir.with_name(f"{self.run_dir.name}-{name}.log")
        with log.open("ab") as output:
            self._running[name] = subprocess.Popen(
                [*exit_with_parent.wrapper(), sys.executable, "-m", *words],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Send SIGKILL to the process and all its children."""
        process = self._running[name]
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_all(self) -> None:
        """Kill every process that still runs."""
        for name in self._running:
            self.kill(name)

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of the learner; None while it runs."""
        return self._running["learner"].poll()

    def status(self) -> dict[str, Any]:
        """Return the learner's status; empty while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[1]}/status", timeout=2.0) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (urllib.error.URLError, OSError, http.client.HTTPException, ValueError):
            return {}

    @property
    def saving(self) -> bool:
        """Return whether a checkpoint is being written."""
        return any((self.run_dir / "checkpoints").glob(".partial-*"))


@contextmanager
def services(preset: str, run_dir: Path, overrides: Sequence[str], *, actors: int) -> Iterator[Services]:
    """Yield the running processes; they are killed at the end."""
    group = Services(preset, run_dir, overrides, actors)
    try:
        for name in group.names:
            group.start(name)
        yield group
    finally:
        group.kill_all()


def until(happened: Callable[[], Any], seconds: Seconds = LIMIT) -> bool:
    """Poll until the condition holds; False where it did not within the time limit."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True


def run_killed(group: Services, kills: int, *, seed: int) -> Counter[str]:
    """Kill processes of a run and start them again, `kills` times, then let the run end; return the kills of each kind.

    Half of the kills hit the learner, every second of those while it writes a checkpoint. The run trains on before each kill.
    Raises RuntimeError where the run does not continue.
    """
    chance, killed, updates = random.Random(seed), Counter[str](), -1  # noqa: S311 - to be repeated

    def trains() -> bool:
        if group.exit_code == 0:
            return True
        found = group.status()
        return found.get("phase") == "training" and found["learner_updates"] > updates

    for number in range(kills):
        if not until(trains):
            raise RuntimeError(f"no update in {LIMIT:g} s after {number} kills; see {group.run_dir}-*.log")
        name = "learner" if number % 2 == 0 else f"actor-{chance.randrange(group.actors)}"
        kind = "learner" if name == "learner" else "actor"
        if number % 4 == 0 and until(lambda: group.saving, SAVING_PAUSE):
            kind = "learner, saving"
        else:
            time.sleep(chance.uniform(0.0, LONGEST_PAUSE))
        updates = group.status().get("learner_updates", updates) if name != "learner" else -1
        if group.exit_code == 0:
            return killed
        group.kill(name)
        killed[kind] += 1
        group.start(name)
    if not until(lambda: group.exit_code is not None) or group.exit_code:
        raise RuntimeError(f"the learner did not end well: exit code {group.exit_code}; see {group.run_dir}-*.log")
    return killed
