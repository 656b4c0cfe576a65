"""Cost of a resume for a run that learns from a replay memory, with the memory in its checkpoints and without.

    python -m benchmarks.resume --seeds 1 2 3 --out benchmarks/results

CartPole by DQN trains for some thousand env steps; then all processes are killed (SIGKILL). The run resumes twice from copies
of the same directory: with `checkpoint.replay=true`, and with false, where the memory starts empty.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.killed import LIMIT, services
from benchmarks.learning import machine
from common.units import EnvSteps, Seconds

PRESET = "cartpole-dqn"
KILLED_AT: EnvSteps = 10_000  # env steps
MORE: EnvSteps = 5_000  # env steps after the resume
SOON: EnvSteps = 400  # after the resume, and less than the warm-up of the preset, which is 1,000
LOOK: Seconds = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStatus:
    """The learner's status after one update."""

    env_steps: EnvSteps
    mean100: float
    replay: EnvSteps  # env steps in the memory that can be drawn
    gradient_steps: int  # in this update

    @classmethod
    def of(cls, status: dict[str, Any]) -> UpdateStatus | None:
        """Return the fields of the learner's status; None before the first update of a process."""
        training = status.get("training") or {}
        if "replay_env_steps" not in training or status.get("mean100") is None:
            return None
        replay, steps = int(training["replay_env_steps"]), int(training["gradient_steps"])
        return cls(env_steps=status["env_steps"], mean100=status["mean100"], replay=replay, gradient_steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The measurement of one seed with one setting of `checkpoint.replay`."""

    seed: int
    replay: bool
    before: UpdateStatus  # the last status before the kill
    after: Sequence[UpdateStatus]

    @property
    def without_gradient(self) -> EnvSteps:
        """Return the env steps collected between the resume and the first gradient step."""
        first = next((status for status in self.after if status.gradient_steps), self.after[-1])
        return max(0, first.env_steps - self.after[0].env_steps)


def train(run_dir: Path, *, seed: int, replay: bool, until: EnvSteps) -> list[UpdateStatus]:
    """Run until this many env steps were trained on, then kill all processes; return the status after each update."""
    overrides = (
        f"run.seed={seed}",
        "checkpoint.every_seconds=0.5",
        f"checkpoint.replay={str(replay).lower()}",
        "target.mean100=null",
    )
    statuses: list[UpdateStatus] = []
    deadline = time.monotonic() + LIMIT
    with services(PRESET, run_dir, overrides, actors=1) as group:
        while not statuses or statuses[-1].env_steps < until:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {until} env steps in {LIMIT:g} s; see {run_dir}-*.log")
            seen = UpdateStatus.of(group.status())
            if seen is not None and (not statuses or seen.env_steps != statuses[-1].env_steps):
                statuses.append(seen)
            time.sleep(LOOK)
    return statuses


def measured(seed: int) -> Iterator[Resumed]:
    """Measure one seed with both settings."""
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "killed"
        before = train(first, seed=seed, replay=True, until=KILLED_AT)[-1]
        for replay in (True, False):
            copy = first.with_name(f"replay-{replay}")
            shutil.copytree(first, copy)
            after = train(copy, seed=seed, replay=replay, until=KILLED_AT + MORE)
            yield Resumed(seed=seed, replay=replay, before=before, after=after)
            shutil.rmtree(copy)


def report(rows: Sequence[Resumed]) -> str:
    """Return the page in Markdown."""
    lines = ["# Resume with a replay memory", ""]
    lines += [
        f"`{PRESET}` on {machine()}: trained for {KILLED_AT:,} env steps, then everything killed (SIGKILL). The run goes on"
    ]
    lines += ["from copies of the same directory with the memory of its newest checkpoint and without."]
    lines += ["`python -m benchmarks.resume` repeats it.", ""]
    lines += ["| seed | checkpoint.replay | mean100 before | right after | "]
    lines[-1] += f"{MORE:,} env steps later | memory before, right after, {SOON} env steps later | "
    lines[-1] += "env steps seen without a gradient step |"
    lines += ["|" + "---|" * 7]
    for row in rows:
        first, last = row.after[0], row.after[-1]
        soon = next(status for status in row.after if status.env_steps >= first.env_steps + SOON)
        memory = ", ".join(f"{status.replay:,}" for status in (row.before, first, soon))
        means = [f"{status.mean100:.1f}" for status in (row.before, first, last)]
        cells = [str(row.seed), str(row.replay).lower(), *means, memory, f"{row.without_gradient:,}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the page, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, help="folder for resume.md, such as benchmarks/results")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave no process behind
    rows = []
    for seed in options.seeds:
        for row in measured(seed):
            print(seed, row.replay, row.before, row.after[0], row.after[-1], row.without_gradient, flush=True)
            rows.append(row)
    print(text := report(rows))
    if options.out:
        (options.out / "resume.md").write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
