"""The command `rookery train`: runs the services of a plan, shows their status, and reports the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TextIO

from common.config.code_references import allow_code
from common.config.endpoint import Endpoint, connectable_host, parse_endpoint
from common.config.load import ENV_PREFIX
from common.config.schema import Settings
from common.observability.deployment import LEARNER
from common.runtime.disk import write_atomically
from common.runtime.run_directory import RunDirectory
from common.units import EnvSteps, Seconds
from services.cli.train.failure import crash_line, failure_lines, lost_results, newest_line, refusal_line
from services.cli.train.instructions import (
    CONFIG_EXIT_CODE,
    Outcome,
    Report,
    ReportCrash,
    ReportFailure,
    ReportRefusal,
    actor_names,
    rank_names,
)
from services.cli.train.outcome import draw_curve, final_lines, own_end, read_summary, verdict, written
from services.cli.train.plan import Plan, Request, make_plan
from services.cli.train.ports import binds
from services.cli.train.processes import Processes, Requests, stop_signals, supervise
from services.cli.train.search import ActorSearch
from services.cli.train.status import STARTING, RunStatus, StatusPoller
from services.cli.train.supervisor import Supervisor
from services.cli.train.view import View, ViewFrame, make_view
from services.cli.train.warm_start import describe, describe_resume

SILENCE: Seconds = 30.0  # of actors after the learner began to train, before the terminal shows what they do


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
    supervisor = plan.supervisor()
    # config.yaml has the settings of these variables; a child could read the variables differently.
    inherited = {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)}
    processes = Processes(
        command=plan.command, logs=plan.directory.logs, environment=inherited, added=plan.environment, lock=plan.lock
    )
    requests: Requests = Requests()
    failures: list[ReportFailure] = []
    view = make_view(stdout, plan.settings.log.format, run_id=plan.settings.run.id)
    with stop_signals(lambda: requests.put(supervisor.request_stop)):
        with view, _addresses_written(plan, view), StatusPoller(plan.urls) as watch:
            for line in _first_lines(plan):
                view.print_message(line)
            if not supervisor.actors:
                view.print_message(join_line(plan.settings))
            display = _Display(
                plan=plan,
                supervisor=supervisor,
                watch=watch,
                view=view,
                requests=requests,
                search=plan.search(),
                newest_line=lambda child: newest_line(child, processes),
            )

            def report(instruction: Report) -> None:
                match instruction:
                    case ReportCrash():
                        view.print_message(crash_line(instruction, processes))
                    case ReportRefusal():
                        view.print_message(refusal_line(instruction, processes, rank_names(plan.settings.learner.ranks)))
                    case ReportFailure():
                        failures.append(instruction)

            try:
                supervise(supervisor, processes, requests=requests, on_tick=display.tick, on_report=report)
            except Exception:
                with suppress(OSError):  # stderr may be closed
                    resume = resume_command(plan.settings, plan.directory.path)
                    print(f"rookery train: the supervisor failed and stopped the learner; continue with `{resume}`", file=stderr)
                raise
            display.end()
        return _finish(plan, supervisor, failures, processes, view=view, stderr=stderr, debug=debug)


def _first_lines(plan: Plan) -> Iterator[str]:
    """Yield what there is to say before a run begins."""
    yield f"{plan.title}: run directory {plan.directory.path}"
    yield from plan.loaded.notes
    if plan.resume:
        if changed := describe_resume(plan.replaced_config, plan.settings):
            yield changed
        elif end := own_end(read_summary(plan.directory.summary) or {}, plan.settings.target.model_dump()):
            yield f"the run had ended: {end}; to train on, raise its target or budget (target.*)"
    elif init := plan.settings.run.init:
        yield describe(Path(init), plan.settings)


def join_line(settings: Settings) -> str:
    """Return how an actor joins a run that starts none: the command, with the addresses of all ranks of the learner."""
    endpoints = [parse_endpoint(bind) for bind in binds(settings)]
    any_interface, local = connectable_host(endpoints[0].host) != endpoints[0].host, endpoints[0].loopback
    addresses = ",".join(str(Endpoint("HOST", endpoint.port) if any_interface else endpoint) for endpoint in endpoints)
    access = " --keys DIR" if settings.learner.keys else "" if local else " --insecure"
    access += allow_code(settings.model_dump(mode="json"))
    command = f"no actor is started here; `rookery actor --learner {addresses}{access}`"
    if not local:
        return f"{command} joins the run"
    others = "for other machines set learner.bind=tcp://0.0.0.0:5700 and learner.keys"
    return f"{command} on this machine joins the run; {others} (docs/security.md)"


def resume_command(settings: Settings, run_dir: Path) -> str:
    """Return the command with which the run in `run_dir` goes on, started in the current directory."""
    return f"rookery train --resume --run-dir {run_dir}{allow_code(settings.model_dump(mode='json'), run=run_dir)}"


@contextmanager
def _addresses_written(plan: Plan, view: View) -> Iterator[None]:
    """Keep the addresses of the services in the run directory while inside, for `rookery top` and `rookery doctor`."""
    path, text = plan.directory.addresses, f"{json.dumps(plan.urls, indent=2)}\n"
    try:
        write_atomically(path, text.encode())
    except OSError as error:  # a full disk does not end the run
        view.print_message(f"the addresses of the services cannot be written to the run directory: {error}")
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text(encoding="utf-8") == text:  # else another run wrote it, on a file system without locks
                path.unlink()


def _finish(
    plan: Plan,
    supervisor: Supervisor,
    failures: Sequence[ReportFailure],
    processes: Processes,
    *,
    view: View,
    stderr: TextIO,
    debug: bool,
) -> int:
    """Show the result, draw the curve, and return the exit code."""
    with suppress(OSError):  # stderr may be closed
        for failure in failures:
            for line in failure_lines(failure, processes, debug=debug):
                print(line, file=stderr)
    directory, target, outcome = plan.directory, plan.settings.target, supervisor.outcome
    if outcome is Outcome.REFUSED and not plan.resume and not _has_training(directory):
        plan.withdraw()  # an invalid setting leaves no files
        return CONFIG_EXIT_CODE
    if outcome is Outcome.REFUSED and plan.resume and not supervisor.works:
        try:
            plan.withdraw()
        except OSError as error:
            view.print_message(f"config.yaml keeps the settings that were refused: {error}; correct them with the next --resume")
    ended = outcome in {Outcome.FINISHED, Outcome.STOPPED} and written(directory.summary) != plan.earlier_summary
    summary = read_summary(directory.summary) if ended else None
    resumed = plan.resume and directory.checkpoints.exists()
    code, result = verdict(outcome, summary, worked=supervisor.works, resumed=resumed, target=target.model_dump())
    try:
        draw_curve(
            directory,
            title=f"{plan.curve_title}: {result}",
            target=target.evaluation if target.mean100 is None else target.mean100,
        )
    except OSError as error:  # no reason for the run to fail
        view.print_message(f"no learning curve was drawn: {error}")
    refused = outcome is Outcome.REFUSED and any(failure.child.startswith(LEARNER) for failure in failures)
    vain = outcome is Outcome.FAILED and not _has_training(directory)  # a resumed run would fail in the same way
    resumable = directory.checkpoints.exists() and outcome is not Outcome.FINISHED and not refused and not vain
    lost = lost_results(processes)
    go_on = resume_command(plan.settings, directory.path) if resumable else ""
    lines = final_lines(result, summary, run_dir=directory.path, go_on=go_on, lost=lost)
    facts = {"result": result, "exit_code": code, "run_dir": str(directory.path), "lost": lost}
    view.print_result(lines, {**(summary or {}), **facts})
    return code


def _has_training(directory: RunDirectory) -> bool:
    """Return True where the run directory holds at least one update or a checkpoint without a summary."""
    summary = read_summary(directory.summary)
    return directory.checkpoints.exists() if summary is None else summary["learner_updates"] > 0


@dataclass(slots=True, kw_only=True)
class _Display:
    """Shows the newest status at the period of the view, and passes it to the supervisor and to the search for actors."""

    plan: Plan
    supervisor: Supervisor
    watch: StatusPoller
    view: View
    requests: Requests
    search: ActorSearch | None
    newest_line: Callable[[str], str]  # of the log of a child
    clock: Callable[[], Seconds] = time.monotonic
    _next: Seconds = 0.0
    _started_at: Seconds = field(init=False)  # until the learner answers, which has its own clock
    _stop_shown: bool = False
    _counted: tuple[EnvSteps, int] | None = None  # accepted env steps and refused messages, as the supervisor has them
    _trains_since: Seconds | None = None  # first answer of a learner that trains
    _silence_shown: bool = False
    _deletion_shown: bool = False

    def __post_init__(self) -> None:
        self._started_at = self.clock()

    def tick(self) -> None:
        """Refresh the view where it is due. Called several times a second; does not block."""
        if self.supervisor.outcome is Outcome.STOPPED and not self._stop_shown:
            self._stop_shown = True
            self.view.print_message("stopping: the learner writes a last checkpoint; Ctrl-C again ends everything at once")
        self._restore_directory()
        self._count_experience(self.watch.latest)
        self._show_silence(self.watch.latest)
        if self.search is not None and not self.search.done and self.supervisor.outcome is Outcome.RUNNING:
            self._search(self.search)
        if self.clock() >= self._next and not self.supervisor.done:  # the result follows, and the last status is older
            self._next = self.clock() + self.view.period
            self.view.show(self.frame())

    def _restore_directory(self) -> None:
        """Write config.yaml again, and say so, where the run directory was deleted: nothing there could be resumed without it."""
        if not self.plan.directory.deleted:
            self._deletion_shown = False
            return
        if not self._deletion_shown:
            self._deletion_shown = True
            lost = "what it held is lost, its logs too; the run goes on and writes its next checkpoint and results there"
            self.view.print_message(f"the run directory {self.plan.directory.path} was deleted: {lost}")
        with suppress(OSError):  # the next tick tries again
            self.plan.write_config(self.supervisor.actors)

    def _count_experience(self, status: RunStatus) -> None:
        counted = status.ledger.accepted, status.refused_messages
        if status.phase != STARTING and counted != self._counted:
            self._counted = counted
            self.requests.put(partial(self.supervisor.count_experience, *counted))

    def _show_silence(self, status: RunStatus) -> None:
        """Show once what the first actor logged last, where no experience has come for a while: it may hang."""
        if self._silence_shown or self.supervisor.works or status.phase == STARTING or self.supervisor.actors == 0:
            return
        self._trains_since = self.clock() if self._trains_since is None else self._trains_since
        if self.clock() - self._trains_since >= SILENCE:
            self._silence_shown = True
            line = self.newest_line(actor_names(1)[0])
            self.view.print_message(f"no experience after {SILENCE:.0f} s of training; {line}")

    def _search(self, search: ActorSearch) -> None:
        before = search.actors
        search.observe(self.watch.latest, self.clock())
        if search.actors != before:
            self.requests.put(partial(self.supervisor.set_actors, search.actors))
        if search.done or search.actors != before:
            self._keep_choice(search, show=search.done)

    def end(self) -> None:
        """Keep the best number of actors so far, or that which acts, where the run has ended before the search."""
        search = self.search
        if search is None or search.done:
            return
        measured = bool(search.rates)
        search.finish()
        self._keep_choice(search, show=measured)

    def _keep_choice(self, search: ActorSearch, *, show: bool) -> None:
        if show:
            self.view.print_message(search.result)
        try:
            self.plan.write_config(search.actors)
        except OSError as error:
            self.view.print_message(f"the number of actors cannot be written to config.yaml: {error}")

    def frame(self) -> ViewFrame:
        """Return the current status, with the values that the supervisor adds."""
        added: dict[str, object] = {"actors_wanted": self.supervisor.actors, "restarts": self.supervisor.restarts}
        status = self.watch.latest
        answered = status.phase != STARTING
        if not answered:
            added["wall_seconds"] = self.clock() - self._started_at
        if not self.supervisor.works:
            added["bottleneck"] = ""  # whatever limits a run in which no experience was accepted yet, it is not its speed
        if self.supervisor.outcome is not Outcome.RUNNING:
            added["phase"] = "stopping"
        status = status.model_copy(update=added)
        return ViewFrame(title=self.plan.title, run_dir=str(self.plan.directory.path), status=status, answered=answered)
