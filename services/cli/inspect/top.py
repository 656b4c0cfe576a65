"""`rookery top`: a table of a running deployment, renewed on a terminal, one after the other elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common.errors import RookeryError
from common.observability import learner_metrics as metrics
from common.observability import worker_metrics as worker
from common.observability.bottleneck import percent
from common.observability.deployment import ACTOR, LEARNER, Deployment, Scrape, Service, compare
from common.protocol.messages import server_of
from common.units import MIB, Seconds
from services.cli.inspect.doctor import measure, with_learner
from services.cli.inspect.scrape import Source
from services.cli.train.view import mean_remark, number, time_left

ONCE_SECONDS: Seconds = 2.0  # measured for a single table, where the source keeps no history
PERIOD: Seconds = 1.0  # between two tables on a terminal
LINE_PERIOD: Seconds = 5.0
PLAIN_WIDTH = 150  # of a table that goes to a file

COLUMNS = ("service", "state", "env steps/s", "frames/s", "busiest", "queue", "version", "lag", "drops/s", "memory", "CPU")
DROPPED_FIRST = ("version", "drops/s", "memory", "frames/s", "queue", "lag", "CPU", "busiest")
"""Columns in the order in which a narrow terminal goes without them."""
GAP = 2  # spaces between two columns
UNREACHABLE = "unreachable"  # state of a service that does not answer


def top(source: Source, *, once: bool, stdout: TextIO, sleep: Callable[[Seconds], None] = time.sleep) -> int:
    """Show tables until interrupted, or `once`; returns the exit code."""
    console = Console(file=stdout, width=None if stdout.isatty() else PLAIN_WIDTH)
    if once:
        seconds = source.window if source.keeps_history else ONCE_SECONDS
        console.print(screen(source.title, measure(source, seconds, sleep=sleep), width=console.width))
        return 0
    with suppress(KeyboardInterrupt):  # the way to leave
        _follow(source, console, sleep)
    return 0


def _follow(source: Source, console: Console, sleep: Callable[[Seconds], None]) -> None:
    kept: deque[Scrape] = deque([source.read(source.window)])
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    period = PERIOD if live else LINE_PERIOD
    with live or nullcontext():
        while True:
            sleep(0.0 if source.keeps_history and len(kept) == 1 else period)
            try:
                kept.append(source.read())
            except RookeryError as error:  # a Prometheus that is restarted: the last table stays
                console.print(f"{error}", markup=False, highlight=False)
                continue
            while len(kept) > 1 + source.window / period:
                kept.popleft()
            shown = screen(source.title, compare(kept[0], kept[-1]), width=console.width)
            if live:
                live.update(shown, refresh=True)
            else:
                console.print(shown)


def screen(title: str, run: Deployment, *, width: int) -> Group:
    """Return the head lines, a row for each service with the columns that fit, and the reasons why services do not answer."""
    run = with_learner(run)
    rows = [dict(zip(COLUMNS, row(service, run), strict=False)) for service in run.services]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    shown = fitting(rows, width)
    for name in shown:
        table.add_column(name, justify="left" if name in {"service", "state", "busiest"} else "right", no_wrap=True)
    for cells in rows:
        table.add_row(*(cells.get(name, "") for name in shown))
    return Group(Text(title, style="bold"), *map(Text, head(run)), Text(), table, *map(Text, silent(run)), Text())


def fitting(rows: Sequence[Mapping[str, str]], width: int) -> list[str]:
    """Return the columns that fit side by side into `width` characters."""
    needed = {name: GAP + max(len(name), *(len(cells.get(name, "")) for cells in rows), 0) for name in COLUMNS}
    shown = list(COLUMNS)
    for name in DROPPED_FIRST:
        if sum(needed[kept] for kept in shown) - GAP <= width:
            break
        shown.remove(name)
    return shown


def silent(run: Deployment) -> Iterator[str]:
    """Yield a line for each service that does not answer, with the reason; the head has that of the learner."""
    for service in run.services:
        if service.after.unreachable and service.role != LEARNER:
            yield f"{service.title} does not answer: {service.after.unreachable}"


def head(run: Deployment) -> Iterator[str]:
    """Yield the lines above the table: the state of the run, and its bottleneck."""
    learner = run.known_learner
    if learner is None:
        silent = any(not service.role for service in run.services)
        yield "no learner answers" if silent else "no learner is among these: name its address to see the state of the run"
        return
    if not run.of_one_run:
        yield "several runs are among these: name the services of one, or its --namespace, to see its state"
        return
    if not learner.after.samples:
        yield f"the learner does not answer: {learner.after.unreachable}"
        return
    returns = (learner.now(metric) for metric in (metrics.EPISODE_RETURN_MEAN, metrics.TARGET_RETURN))
    mean, target = (None if math.isnan(value) else value for value in returns)
    steps, planned = learner.now(metrics.LEDGER_ENV_STEPS, "trained"), learner.now(metrics.ENV_STEPS_PLANNED)
    means = (metrics.EPISODE_RETURN_MEAN_EPISODES, metrics.ENVIRONMENTS_UNFINISHED, metrics.EPISODES_BEFORE_LEAVING)
    remark = mean_remark(*map(learner.now, means))
    scores = f"mean100 {number(mean, target)}{remark}" + ("" if target is None else f", target {number(target, mean)}")
    counts = f"{scores}   {steps:,.0f}" + ("" if math.isnan(planned) else f" of {planned:,.0f}") + " env steps"
    pace, actors = formatted(learner.now(metrics.ENV_FRAMES_RATE), ",.0f"), learner.now(metrics.WORKERS_CONNECTED, ACTOR)
    yield f"{counts}   {pace} frames/s   connected actors {actors:.0f}"
    if run.missing_ranks:
        yield run.missing_ranks
    if learner.now(metrics.TRAINING) and (left := learner.now(metrics.TIME_LEFT)) >= 0:  # it may be NaN
        yield time_left(left)
    yield run.bottleneck.sentence


def row(service: Service, run: Deployment) -> tuple[str, ...]:
    """Return the cells of one service; a dash where there is no value."""
    if service.after.unreachable:
        return (service.title, UNREACHABLE)
    trains = service.role == LEARNER
    steady = service.measured and not (trains and service.restarted)  # a resumed learner's counters begin with its checkpoint's
    # Names of metrics are built with the service's role, so those of the actor serve the evaluator's row too.
    steps = metrics.ENV_STEPS_TRAINED if trains else worker.ACTOR_ENV_STEPS
    frames = metrics.ENV_FRAMES_TRAINED if trains else worker.ACTOR_ENV_FRAMES
    return (
        service.title,
        state(service),
        f"{service.rate(steps):,.0f}" if steady else "-",
        f"{service.rate(frames):,.0f}" if steady else "-",
        busiest(service),
        queue(service),
        formatted(policy_version(service), ".0f"),
        lag(service, run),
        f"{sum(service.grew_by_label(metrics.ENV_STEPS_DROPPED).values()) / service.seconds:,.0f}" if steady else "-",
        f"{service.now('process_resident_memory_bytes') / MIB:,.0f} MiB",
        percent(service.rate("process_cpu_seconds_total")) if service.measured else "-",
    )


def state(service: Service) -> str:
    """Return the state in one or two words."""
    if service.after.unhealthy:
        return "hung"
    if service.role == LEARNER:
        return "not training" if service.now(metrics.TRAINING) == 0 else "training"
    if service.now(worker.ACTOR_CONNECTED):
        return "connected"
    return f"no {server_of(service.role)}"


def busiest(service: Service) -> str:
    """Return the phase that takes most of the time, waiting included, with its share."""
    if not service.shares:
        return "-"
    phase, share = max(service.shares.items(), key=lambda item: item[1])
    return f"{phase} {percent(share)}"


def queue(service: Service) -> str:
    """Return the messages in the queue and its capacity."""
    depth, capacity = service.now(metrics.QUEUE_DEPTH), service.now(metrics.QUEUE_CAPACITY)
    return "-" if math.isnan(depth) else f"{depth:.0f}/{capacity:.0f}"


def lag(service: Service, run: Deployment) -> str:
    """Return the lag in versions: of the learner the mean of the experience trained on, of a worker that of its policy now."""
    if service.role == LEARNER:
        return formatted(service.mean(metrics.POLICY_LAG), ".1f")
    newest = run.known_learner.now(metrics.POLICY_VERSION) if run.known_learner else math.nan
    behind = max(newest - policy_version(service), 0.0)  # the learner may answer before the worker; NaN, as the first, stays
    return formatted(behind, ".0f")


def policy_version(service: Service) -> float:
    """Return the version of the policy of a service; NaN where it has none yet, of which its metric is -1."""
    version = service.now(metrics.POLICY_VERSION)
    return version if version >= 0 else math.nan


def formatted(value: float, form: str) -> str:
    """Return a number in a format; a dash for NaN."""
    return "-" if math.isnan(value) else format(value, form)
