"""`rookery top`: a table of a running deployment, renewed on a terminal, one after the other elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common.errors import RookeryError
from common.runtime.bottleneck import percent
from common.units import MIB, Seconds
from services.cli.doctor import measure
from services.cli.readings import Fleet, Moment, Service, compare
from services.cli.sources import Source
from services.cli.supervisor import ACTOR, LEARNER

ONCE_SECONDS: Seconds = 2.0  # measured for a single table, where the past cannot be asked
PERIOD: Seconds = 1.0  # between two looks on a terminal
LINE_PERIOD: Seconds = 5.0
PLAIN_WIDTH = 150  # of a table in a file, where nobody folds it

COLUMNS = ("service", "state", "env steps/s", "frames/s", "busiest", "queue", "version", "lag", "drops/s", "memory", "CPU")


def top(source: Source, *, once: bool, stdout: TextIO, sleep: Callable[[Seconds], None] = time.sleep) -> int:
    """Show tables until interrupted, or `once`; returns the exit code."""
    console = Console(file=stdout, width=None if stdout.isatty() else PLAIN_WIDTH)
    if once:
        seconds = source.window if source.remembers else ONCE_SECONDS
        console.print(screen(source.title, measure(source, seconds, sleep=sleep)))
        return 0
    with suppress(KeyboardInterrupt):  # the way to leave
        _follow(source, console, sleep)
    return 0


def _follow(source: Source, console: Console, sleep: Callable[[Seconds], None]) -> None:
    """Show the last seconds again and again."""
    kept: deque[Moment] = deque([source.read(source.window)])
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    period = PERIOD if live else LINE_PERIOD
    with live or nullcontext():
        while True:
            sleep(0.0 if source.remembers and len(kept) == 1 else period)
            try:
                kept.append(source.read())
            except RookeryError as error:  # a Prometheus that is restarted: the last table stays
                console.print(f"{error}", markup=False, highlight=False)
                continue
            while len(kept) > 1 + source.window / period:
                kept.popleft()
            shown = screen(source.title, compare(kept[0], kept[-1]))
            if live:
                live.update(shown, refresh=True)
            else:
                console.print(shown)


def screen(title: str, fleet: Fleet) -> Group:
    """The head lines and a row for each service."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if number in (0, 1, 4) else "right", no_wrap=True)
    for service in fleet.services:
        table.add_row(*row(service, fleet))
    return Group(Text(title, style="bold"), *map(Text, head(fleet)), Text(), table, Text())


def head(fleet: Fleet) -> Iterator[str]:
    """How the run is, and what holds it up."""
    learner = fleet.learner
    if learner is None:
        yield "no learner is among these: name its address for the figures of the run"
        return
    if not learner.after.samples:
        yield f"the learner does not answer: {learner.after.silence}"
        return
    mean, steps = learner.now("episode_return_mean"), learner.now("ledger_env_steps", "trained")
    yield (
        f"mean100 {figure(mean, '.4g')}   {steps:,.0f} env steps   {learner.rate('env_frames_trained_total'):,.0f} frames/s   "
        f"connected actors {learner.now('peers_connected', ACTOR):.0f}"
    )
    yield fleet.bottleneck.sentence


def row(service: Service, fleet: Fleet) -> tuple[str, ...]:
    """What the table says of one service; a dash where it has no such thing."""
    if service.after.silence:
        return (service.title, service.after.silence)
    played = "env_{}_trained_total" if service.role == LEARNER else "env_{}_total"
    return (
        service.title,
        state(service),
        f"{service.rate(played.format('steps')):,.0f}",
        f"{service.rate(played.format('frames')):,.0f}",
        busiest(service),
        queue(service),
        figure(service.now("policy_version"), ".0f"),
        lag(service, fleet),
        f"{sum(service.grew_by_label('env_steps_dropped_total').values()) / service.seconds:,.0f}" if service.measured else "-",
        f"{service.now('process_resident_memory_bytes') / MIB:,.0f} MiB",
        percent(service.rate("process_cpu_seconds_total")),
    )


def state(service: Service) -> str:
    """In one word."""
    if service.after.complaint:
        return "hung"
    if service.role == LEARNER:
        return "not training" if service.now("training") == 0 else "training"
    return "connected" if service.now("connected") else "no learner"


def busiest(service: Service) -> str:
    """The phase in which it spends most of its time, waiting included."""
    if not service.shares:
        return "-"
    phase, share = max(service.shares.items(), key=lambda item: item[1])
    return f"{phase} {percent(share)}"


def queue(service: Service) -> str:
    """Messages in it, of those that may be."""
    depth, capacity = service.now("queue_depth"), service.now("queue_capacity")
    return "-" if math.isnan(depth) else f"{depth:.0f}/{capacity:.0f}"


def lag(service: Service, fleet: Fleet) -> str:
    """Versions behind: of what the learner trained on meanwhile the mean, of a peer as it is now."""
    if service.role == LEARNER:
        return figure(service.mean("policy_lag_versions"), ".1f")
    newest = fleet.learner.now("policy_version") if fleet.learner else math.nan
    return figure(newest - service.now("policy_version"), ".0f")


def figure(value: float, form: str) -> str:
    """A number, or a dash where there is none."""
    return "-" if math.isnan(value) else format(value, form)
