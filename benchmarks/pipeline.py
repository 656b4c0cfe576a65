"""A whole run as `rookery train` starts it, real processes over loopback, watched for a while through its own `/metrics`.

The run is the preset's, with no end of its own: it trains until the window that is measured is over.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from common.errors import ResourceError
from common.observability.deployment import EVALUATOR, LEARNER
from common.units import Seconds
from services.cli.inspect.scrape import get
from services.cli.train.instructions import Start
from services.cli.train.plan import Plan, Request, make_plan
from services.cli.train.processes import Processes

POLL_SECONDS: Seconds = 0.02
START_SECONDS: Seconds = 120.0  # for a busy machine: the imports alone take several
LEAVE_SECONDS: Seconds = 20.0
PAGE_SECONDS: Seconds = 5.0
LEAST_ENV_STEPS = 1  # that are trained on within a window, however long they take
ENDLESS = ("target.mean100=null", "target.wall_seconds=null", f"target.env_steps={10**12}", "log.format=plain")
TRAINED = "rookery_learner_env_steps_trained_total"
STEPPED = "rookery_actor_env_steps_total"
PLAYED = "rookery_evaluator_env_steps_total"
CPU = "process_cpu_seconds_total"

Reading = dict[str, float]
"""Value of each sample of one scrape; a label stands behind the name, as in `..._phase_seconds_total/train`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The growth of each counter of each process between two scrapes of one run."""

    seconds: Seconds
    growth: dict[str, Reading]  # by child

    @property
    def trained_per_second(self) -> float:
        """Env steps trained on."""
        return self.growth[LEARNER][TRAINED] / self.seconds

    @property
    def sampled_per_second(self) -> float:
        """Env steps stepped by all actors."""
        return sum(reading.get(STEPPED, 0.0) for reading in self.growth.values()) / self.seconds

    @property
    def cores_busy(self) -> float:
        """Core seconds of all processes per second."""
        return sum(self.cpu_seconds().values()) / self.seconds

    @property
    def core_seconds_per_env_step(self) -> float:
        """Core seconds of all processes per env step trained on."""
        return sum(self.cpu_seconds().values()) / (self.trained_per_second * self.seconds)

    def cpu_seconds(self) -> dict[str, Seconds]:
        """Core seconds of each child and of those that it has started."""
        return {child: reading[CPU] for child, reading in self.growth.items()}

    def phases(self, child: str) -> dict[str, float]:
        """Part of the window that the child's loop spent in each phase."""
        found = {}
        for name, seconds in self.growth[child].items():
            metric, _, phase = name.partition("/")
            if metric.endswith("_phase_seconds_total"):
                found[phase] = seconds / self.seconds
        return found


class Run:
    """A run under way."""

    def __init__(self, plan: Plan, processes: Processes) -> None:
        self._plan, self._processes = plan, processes

    def wait_until_trained(self, env_steps: float) -> None:
        """Wait until the learner has trained on `env_steps` more than now. Raises `ResourceError` where nothing moves."""
        wanted = self._trained() + env_steps
        deadline = time.monotonic() + START_SECONDS
        while self._trained() < wanted:
            time.sleep(POLL_SECONDS)
            if gone := self._processes.exited():
                child = next(iter(gone))
                raise ResourceError(f"{child} ended", found="\n".join(self._processes.log_end(child)))
            if time.monotonic() > deadline:
                raise ResourceError("the run does not train", found=f"{self._trained():.0f} env steps", wanted=f"{wanted:.0f}")

    def wait_until_all_step(self, env_steps: int) -> None:
        """Wait until each actor, and the evaluator, has made `env_steps`. Raises `ResourceError` where one does not."""
        deadline = time.monotonic() + START_SECONDS
        for child in (child for child in self._plan.urls if child == EVALUATOR or child.startswith("actor-")):
            while (stepped := self._stepped(child)) < env_steps:
                if time.monotonic() > deadline:
                    raise ResourceError(f"{child} does not step", found=f"{stepped:.0f} env steps", wanted=str(env_steps))
                time.sleep(POLL_SECONDS)

    def watch(self, seconds: Seconds) -> Window:
        """Let the run go on for about `seconds`, from the end of one update to the end of another."""
        began, before = self._at_update(1)
        time.sleep(seconds)
        ended, after = self._at_update(LEAST_ENV_STEPS)
        growth = {
            child: {name: value - before[child].get(name, 0.0) for name, value in reading.items()}
            for child, reading in after.items()
        }
        return Window(seconds=ended - began, growth=growth)

    def resident_bytes(self) -> dict[str, int]:
        """Return the memory of each process that is in RAM."""
        return {child: psutil.Process(pid).memory_info().rss for child, pid in self._processes.pids().items()}

    def _at_update(self, env_steps: int) -> tuple[Seconds, dict[str, Reading]]:
        self.wait_until_trained(env_steps)
        return time.monotonic(), {child: scrape(url) for child, url in self._plan.urls.items()}

    def _stepped(self, child: str) -> float:
        try:
            return scrape(self._plan.urls[child]).get(PLAYED if child == EVALUATOR else STEPPED, 0.0)
        except OSError:  # not up yet
            return 0.0

    def _trained(self) -> float:
        try:
            _, page = get(f"{self._plan.urls[LEARNER]}/status", timeout=PAGE_SECONDS)
        except OSError:  # not up yet
            return 0.0
        status: dict[str, Any] = json.loads(page)
        return float(status.get("env_steps", 0.0))  # it is not there while the learner starts


@contextmanager
def running(preset: str, overrides: Sequence[str] = ()) -> Iterator[Run]:
    """Start the preset's learner, actors and (unless switched off) evaluator; end them all at the end of the block."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="rookery-bench-"))
        request = Request(preset=preset, overrides=(*ENDLESS, *overrides), run_dir=Path(folder) / "run")
        plan = stack.enter_context(make_plan(request, environ={}, command_line=["benchmarks"], now=datetime.now(UTC)))
        processes = Processes(command=plan.command, logs=plan.directory.logs, environment=os.environ, lock=plan.lock)
        try:
            for child in plan.metrics_ports:
                processes.start(Start(child))
            yield Run(plan, processes)
        finally:
            _end(processes)


def _end(processes: Processes) -> None:
    for child in processes.pids():
        processes.terminate(child)
    deadline = time.monotonic() + LEAVE_SECONDS
    while processes.pids() and time.monotonic() < deadline:
        processes.exited()
        time.sleep(POLL_SECONDS)
    processes.kill_all()


def scrape(url: str) -> Reading:
    """Return the metrics of one service. Raises `OSError` where it does not answer."""
    _, text = get(f"{url}/metrics", timeout=PAGE_SECONDS)
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {"/".join((sample.name, *sample.labels.values())): sample.value for sample in samples}
