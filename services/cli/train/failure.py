"""Texts from the logs of children: why one ended, why its experience was refused, what the results of the run lack."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from common.observability.deployment import ACTOR, ENV_WORKER, LEARNER
from services.cli.train.instructions import CONFIG_EXIT_CODE, ReportCrash, ReportFailure, ReportRefusal, describe_exit
from services.cli.train.processes import Processes

LOG_LINES = 200  # that are searched for the reason: a traceback follows the line that has it
REASONS = (  # event and field of a log
    ("process_not_started", "error"),
    ("unexpected_error", "error"),
    ("environment_hangs", "detail"),
    ("message_rejected", "detail"),
    ("experience_refused", "detail"),
)

_STARTED = re.compile(r'(\S+ [\w-]+ |.*"event": ")\w+_started\b')
"""The line, plain or JSON, that a service logs when it starts."""


def crash_line(crash: ReportCrash, processes: Processes) -> str:
    """Return the message for a child that crashed and will be restarted."""
    ended = describe_exit(crash.exit_code)
    # A process that a signal ends logs no reason, nor does one that an environment ends: an earlier error is not its own.
    reason = ended if crash.exit_code < 0 else logged_reason(_of_newest(processes.log_end(crash.child, LOG_LINES))) or ended
    return f"{crash.child} crashed and is restarted: {reason} ({processes.log(crash.child)})"


def _of_newest(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines from the newest start of a process on; all where none is among them."""
    starts = [number for number, line in enumerate(lines) if _STARTED.match(line)]
    return lines[starts[-1] if starts else 0 :]


def newest_line(child: str, processes: Processes) -> str:
    """Return what a child logged last, and where."""
    (line,) = processes.log_end(child, 1) or ["nothing"]
    return f"{child} logged last: {line} ({processes.log(child)})"


def refusal_line(refusal: ReportRefusal, processes: Processes, ranks: Sequence[str] = (LEARNER,)) -> str:
    """Return the message for experience that one of the `ranks` of the learner refused while other experience is accepted."""
    reasons = {rank: logged_reason(processes.log_end(rank, LOG_LINES)) for rank in ranks}
    rank = next((rank for rank, reason in reasons.items() if reason), LEARNER)
    many = "1 message" if refusal.messages == 1 else f"{refusal.messages} messages"
    return f"{many} of experience refused: {reasons[rank] or 'its log has the reason'} ({processes.log(rank)})"


def failure_lines(failure: ReportFailure, processes: Processes, *, debug: bool) -> Iterator[str]:
    """Yield the lines for a run that fails: one for an invalid setting or an actor that cannot work, else the end of the log."""
    child, log = failure.child, processes.log(failure.child)
    reason = logged_reason(processes.log_end(child, LOG_LINES)) if child.startswith((ACTOR, ENV_WORKER)) else ""
    lines = processes.log_end(child) or ["its log is empty"]
    if failure.exit_code == CONFIG_EXIT_CODE and not debug:
        errors = [error for line in lines if (error := line.partition(": error: ")[2])]  # counts of lines left out may follow
        yield f"rookery train: error: {(errors or lines)[-1]} (from {child})"
    elif reason and not debug:
        yield f"rookery train: error: {child} cannot work: {failure.reason}: {reason}; correct the environment ({log})"
    else:
        yield f"rookery train: {child} failed: {failure.reason}; the end of {log}:"
        yield from (f"  {line}" for line in lines)


def lost_results(processes: Processes) -> str:
    """Return what the results of the run lack by the newest learner, and its log; "" where nothing was lost."""
    for line in reversed(processes.log_end(LEARNER, LOG_LINES)):
        if "learner_started" in line:
            return ""
        if "results_incomplete" in line and (detail := _field(line, "detail")):
            return f"{detail} ({processes.log(LEARNER)})"
    return ""


def logged_reason(lines: Sequence[str]) -> str:
    """Return the newest error or refusal in the lines of a log, plain or JSON; "" where there is none."""
    for line in reversed(lines):
        for event, field in REASONS:
            if event in line and (reason := _field(line, field)):
                return reason
    return ""


def _field(line: str, name: str) -> str:
    """Return the text of a field of one log line; "" where the line does not have it."""
    try:
        if line.startswith("{"):
            return str(json.loads(line).get(name, ""))
        found = re.search(rf' {name}=("(?:[^"\\]|\\.)*"|\S+)', line)
        return "" if found is None else str(json.loads(found[1])) if found[1].startswith('"') else found[1]
    except ValueError:
        return ""
