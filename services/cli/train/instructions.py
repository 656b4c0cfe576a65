"""Instructions that the supervisor of `rookery train` returns, the outcomes of a run, and the names of its children."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from common.observability.deployment import ACTOR, ENV_WORKER, EVALUATOR, LEARNER

CONFIG_EXIT_CODE = 2
ENDED_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)  # exit codes of one that does not handle the signal
NOT_STARTED = 126  # as a shell reports it: the child has no process, because none could be made


# --- instructions ---


@dataclass(frozen=True, slots=True)
class Start:
    """Start the child; with `resume` the learner continues from its newest checkpoint."""

    child: str
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send SIGTERM to the child."""

    child: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL to the process group of the child."""

    child: str


@dataclass(frozen=True, slots=True)
class ReportCrash:
    """Show the error of a child that crashed and will be restarted."""

    child: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class ReportRefusal:
    """Show why the learner refused experience: `messages` since the last report, while it accepts other experience."""

    messages: int


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Show why the run fails, and the end of the child's log."""

    child: str
    reason: str
    exit_code: int


Report: TypeAlias = ReportCrash | ReportRefusal | ReportFailure
Instruction: TypeAlias = Start | Terminate | Kill | Report


class Outcome(StrEnum):
    """End of the run as its processes show it; the learner's summary has whether the target was reached."""

    RUNNING = "running"
    FINISHED = "finished"  # the learner ended by itself
    STOPPED = "stopped"  # on request, and the learner saved its state
    REFUSED = "refused"  # a child refused a setting
    FAILED = "failed"
    KILLED = "killed"  # on a second request, before the learner had saved its state


# --- names ---


def actor_names(actors: int) -> list[str]:
    """Return the names of `actors` actors in the order in which they start."""
    return [f"{ACTOR}-{number}" for number in range(actors)]


def env_worker_names(actor: int, env_workers: int) -> list[str]:
    """Return the names of the env workers of one policy server."""
    return [f"{ENV_WORKER}-{actor}-{number}" for number in range(env_workers)]


def rank_names(ranks: int) -> list[str]:
    """Return the names of the ranks of the learner; rank 0 is `LEARNER` itself."""
    return [LEARNER, *(f"{LEARNER}-{rank}" for rank in range(1, ranks))]


def child_names(*, ranks: int, evaluator: bool, actors: int, env_workers: int) -> list[str]:
    """Return the names of all children in the order in which they start; each actor with `env_workers` is a policy server."""
    workers = [name for actor in range(actors) for name in env_worker_names(actor, env_workers)]
    return [*rank_names(ranks), *([EVALUATOR] if evaluator else []), *actor_names(actors), *workers]


def describe_exit(code: int) -> str:
    """Return `exit code 1`, or `signal 9` for a negative code."""
    if code == NOT_STARTED:
        return "its process could not be started"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
