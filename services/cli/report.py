"""How a run ended: exit code, the sentence that says so, and what to do next. Pure, but for reading the summary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from services.cli.supervisor import Outcome
from services.cli.view import clock, score

Summary = Mapping[str, Any]
"""The learner's summary.json; see docs for its fields."""


def read_summary(path: Path) -> Summary | None:
    """The learner's last words about the run; None where it left none."""
    try:
        summary: Summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary


def verdict(outcome: Outcome, summary: Summary | None, *, env_steps: int, wall_seconds: float | None) -> tuple[int, str]:
    """Exit code and sentence; `env_steps` and `wall_seconds` are the run's budgets."""
    match outcome:
        case Outcome.STOPPED if summary is None or not summary["learner_updates"]:
            return 0, "stopped on request, before anything new was learned"
        case Outcome.STOPPED:
            return 0, "stopped on request, all work saved"
        case Outcome.REFUSED:
            return 2, "not run: a setting cannot work"
        case Outcome.KILLED:
            return 130, "killed on request: what came after the last checkpoint is lost"
        case Outcome.FINISHED if summary is not None:
            return _finished(summary, env_steps, wall_seconds)
        case _:
            return 1, "failed"


def _finished(summary: Summary, env_steps: int, wall_seconds: float | None) -> tuple[int, str]:
    if summary["solved"]:
        return 0, "solved: the target was reached"
    if summary["env_steps"] >= env_steps:
        return 0, "not solved: the budget of env steps is spent"
    if wall_seconds is not None and summary["wall_seconds"] >= wall_seconds:
        return 0, "not solved: the budget of time is spent"
    return 1, "not solved: the learner ended before its target and its budget"


def closing(sentence: str, summary: Summary | None, *, run_dir: Path, resumable: bool) -> Iterator[str]:
    """The lines shown after the end."""
    yield sentence
    if summary is not None:
        time = f"{clock(summary['wall_seconds'])} ({summary['frames_per_second']:,.0f} frames/s)"
        yield f"  {summary['env_steps']:,} env steps in {time}, mean100 {score(summary['mean100'])}"
        if (last := summary.get("last_evaluation")) is not None:
            yield f"  last evaluation {score(last['mean'])} over {last['episodes']} episodes ({last['mode']})"
        if summary.get("reproducible"):
            yield f"  parameters     sha256 {summary['parameters_sha256']}: the same in every run of these settings here"
    yield f"  run directory  {run_dir}"
    if summary is not None:
        yield f"  look closer    tensorboard --logdir {run_dir}"
    if resumable:
        yield f"  go on          rookery train --resume --run-dir {run_dir}"
