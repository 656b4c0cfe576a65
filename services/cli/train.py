"""`rookery train`: run the services of a plan, show how they are, and say how it ended."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TextIO

from common.runtime.config import ENV_PREFIX
from common.runtime.disk import write_atomically
from common.runtime.run_directory import RunDirectory
from common.units import Seconds
from services.cli.curve import draw_curve
from services.cli.plan import Plan, Request, make_plan
from services.cli.processes import Inbox, Processes, stop_signals, supervise
from services.cli.progress import Progress
from services.cli.report import closing, read_summary, verdict
from services.cli.search import ActorSearch
from services.cli.status import STARTING
from services.cli.supervisor import CONFIG_EXIT_CODE, LEARNER, GiveUp, Outcome, Scale, Supervisor
from services.cli.view import Frame, View, make_view
from services.cli.watch import Watch


def train(
    request: Request,
    *,
    environ: Mapping[str, str],
    command_line: Sequence[str],
    stdout: TextIO,
    stderr: TextIO,
    debug: bool = False,
) -> int:
    """Run to the end and return the exit code. Raises `ConfigError` or `ResourceError` before anything is written."""
    now = datetime.now().astimezone()
    with make_plan(request, environ=environ, command_line=command_line, now=now) as plan:
        return _run(plan, environ=environ, stdout=stdout, stderr=stderr, debug=debug)


def _run(plan: Plan, *, environ: Mapping[str, str], stdout: TextIO, stderr: TextIO, debug: bool) -> int:
    core = plan.supervisor()
    # config.yaml holds what the environment said; a child that read the variables again could read them differently
    inherited = {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)}
    processes = Processes(command=plan.command, logs=plan.directory.logs, environment=inherited, lock=plan.lock)
    inbox: Inbox = Inbox()
    gave_up: list[GiveUp] = []
    view = make_view(stdout, plan.settings.log.format)
    with stop_signals(inbox):
        with view, _announced(plan, view), Watch(plan.urls) as watch:
            view.say(f"{plan.title}: run directory {plan.directory.path}")
            show = _Show(plan=plan, core=core, watch=watch, view=view, inbox=inbox, search=plan.search())
            supervise(core, processes, inbox=inbox, on_tick=show.tick, on_give_up=gave_up.append)
        return _finish(plan, core.outcome, gave_up, processes, view=view, stderr=stderr, debug=debug)


@contextmanager
def _announced(plan: Plan, view: View) -> Iterator[None]:
    """Say in the run directory where the services answer, for as long as they run: `rookery top` looks there."""
    path, text = plan.directory.addresses, f"{json.dumps(plan.urls, indent=2)}\n"
    try:
        write_atomically(path, text.encode())
    except OSError as error:  # a full disk ends no run
        view.say(f"the run directory does not hold the addresses of its services: {error}")
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text(encoding="utf-8") == text:  # else another run wrote it, on a file system without locks
                path.unlink()


def _finish(
    plan: Plan, outcome: Outcome, gave_up: Sequence[GiveUp], processes: Processes, *, view: View, stderr: TextIO, debug: bool
) -> int:
    """Say how it went, draw the curve, and return the exit code."""
    with suppress(OSError):  # nobody reads stderr any more; the rest is to be done all the same
        for instruction in gave_up:
            _quote(instruction, processes, stderr=stderr, debug=debug)
    directory, target = plan.directory, plan.settings.target
    if outcome is Outcome.REFUSED and not plan.resume and not _learned(directory):
        _remove(plan)  # it was empty before and holds no training: bad input leaves no files
        return CONFIG_EXIT_CODE
    summary = read_summary(directory.summary) if outcome in {Outcome.FINISHED, Outcome.STOPPED} else None
    code, sentence = verdict(outcome, summary, env_steps=target.env_steps, wall_seconds=target.wall_seconds)
    try:
        draw_curve(directory, title=f"{plan.title}: {sentence}", target=target.mean100)
    except OSError as error:  # a picture less is no reason to call the run failed
        view.say(f"no learning curve was drawn: {error}")
    refused = outcome is Outcome.REFUSED and any(instruction.child == LEARNER for instruction in gave_up)
    resumable = directory.checkpoints.exists() and outcome is not Outcome.FINISHED and not refused
    for line in closing(sentence, summary, run_dir=directory.path, resumable=resumable):
        view.say(line)
    return code


def _remove(plan: Plan) -> None:
    """Remove what this run wrote, and its directory where this run made that."""
    if plan.made_folder:
        shutil.rmtree(plan.directory.path)
        return
    for entry in plan.directory.path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _learned(directory: RunDirectory) -> bool:
    """Whether there is anything in the run directory that somebody would miss."""
    summary = read_summary(directory.summary)
    return directory.checkpoints.exists() if summary is None else summary["learner_updates"] > 0


def _quote(instruction: GiveUp, processes: Processes, *, stderr: TextIO, debug: bool) -> None:
    """Why the run was given up, in the child's own words: its last line where that is the message, else the end of its log."""
    child, refused = instruction.child, instruction.exit_code == CONFIG_EXIT_CODE
    words = processes.last_words(child) or ["it left no word"]
    if refused and not debug:
        message = words[-1].partition(": error: ")[2] or words[-1]
        print(f"rookery train: error: {message} (says {child})", file=stderr)
        return
    print(f"rookery train: {child} was given up: {instruction.reason}; the end of {processes.log(child)}:", file=stderr)
    for line in words:
        print(f"  {line}", file=stderr)


@dataclass(slots=True, kw_only=True)
class _Show:
    """Shows the newest status at the view's own pace, says what the user must not miss, and lets a search see it too."""

    plan: Plan
    core: Supervisor
    watch: Watch
    view: View
    inbox: Inbox
    search: ActorSearch | None
    clock: Callable[[], Seconds] = time.monotonic
    _progress: Progress = field(default_factory=Progress)
    _next: Seconds = 0.0
    _began: Seconds = field(init=False)
    _said_stopping: bool = False

    def __post_init__(self) -> None:
        """Until the learner tells the time, it is counted from here."""
        self._began = self.clock()

    def tick(self) -> None:
        """Called several times a second; returns at once."""
        if self.core.outcome is Outcome.STOPPED and not self._said_stopping:
            self._said_stopping = True
            self.view.say("stopping: the learner writes a last checkpoint; Ctrl-C again ends everything at once")
        if self.search is not None and not self.search.done and self.core.outcome is Outcome.RUNNING:
            self._look(self.search)
        if self.clock() >= self._next or self.core.done:
            self._next = self.clock() + self.view.period
            self.view.show(self.frame())

    def _look(self, search: ActorSearch) -> None:
        before = search.actors
        search.look(self.watch.latest, self.clock())
        if search.actors != before:
            self.inbox.put(Scale(search.actors))
        if search.done:
            self.view.say(search.sentence)
            try:
                self.plan.keep_actors(search.actors)
            except OSError as error:
                self.view.say(f"the number of actors is not in config.yaml: {error}")

    def frame(self) -> Frame:
        """The run as it is now, with what only the supervisor knows."""
        known: dict[str, object] = {"actors_wanted": self.core.actors, "restarts": sum(self.core.restarts.values())}
        status = self.watch.latest
        if status.phase == STARTING:
            known["wall_seconds"] = self.clock() - self._began
        if self.core.outcome is not Outcome.RUNNING:
            known["phase"] = "ended" if self.core.done else "stopping"
        status = status.model_copy(update=known)
        estimate = self._progress.update(status)
        return Frame(title=self.plan.title, run_dir=str(self.plan.directory.path), status=status, estimate=estimate)
