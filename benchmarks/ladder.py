"""The ladder: Pong's frames per second from one textbook DQN to this system, one change at a time.

Run `python -m benchmarks.ladder` on an idle machine (about 10 minutes). It measures all rungs and writes
benchmarks/results/ladder.md, docs/images/ladder.svg and the table in docs/results.md. The minutes until Pong is solved are
those recorded in benchmarks/results/learning.jsonl.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.learning import RESULTS, ROWS, kept, machine, newest
from benchmarks.part_costs import warm_up
from benchmarks.pipeline import running
from benchmarks.textbook_dqn import FRAME_SKIP, Program, env_steps_per_second
from benchmarks.throughput import NO_EVALUATOR
from common.config.load import load_settings
from common.runtime.machine import cores

ROOT = Path(__file__).parents[1]
TABLE, PICTURE, PAGE = RESULTS / "ladder.md", ROOT / "docs/images/ladder.svg", ROOT / "docs/results.md"
MARKS = ("<!-- ladder: written by python -m benchmarks.ladder -->", "<!-- end of ladder -->")
LINKS = """\
![Emulator frames per second of each rung](images/ladder.svg)

From one textbook DQN to this system, one change at a time: `python -m benchmarks.ladder`;
[how it was measured](../benchmarks/results/ladder.md).

"""
SAME_WORK = (  # the network, images and samples per env step of the rungs below it, in pong-dqn
    *("env.height=84", "env.width=84", "env.crop=[0,0]", "model.conv=[[32,8,4],[64,4,2],[64,3,1]]", "model.hidden=[512]"),
    *("model.normalize_observation=false", "algorithm.dueling=false", "algorithm.double=false", "algorithm.n_step=1"),
    *("algorithm.minibatch=256", "algorithm.samples_per_insert=32", "algorithm.precision=fp32", "actor.precision=fp32"),
    *("algorithm.replay_capacity=20_000", "algorithm.warmup=1_000", f"learner.torch_threads={cores()}"),
)


HEAD = """\
# The ladder: from one textbook DQN to this system

    python -m benchmarks.ladder

Each rung keeps the changes of the rungs above it. The grey rungs of the picture are one short program
([textbook_dqn.py](../textbook_dqn.py)). They and the first rung of Rookery train one network (84x84, Mnih et al. 2015) on 32
samples for each env step. The last two rungs are presets that need less work to solve Pong: smaller images and networks, 12
samples for each env step in `pong-dqn`, and 2 of PPO in `pong`. Frames are those of the emulator, four for each env step; they
are counted when the env step has been trained on, after the warm-up and without an evaluator. The time to solve Pong
is that of the runs of whole presets in [learning.md](learning.md), from the start of the learner; the other rungs were not run
until they solved it. Gradient steps take most of the time of the grey rungs, so faster acting shows little there: between
runs the last of them gave 159 to 258 frames/s.
"""


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung: a textbook program, or a preset of this system with changed settings."""

    change: str
    program: Program | None = None
    preset: str = ""
    overrides: tuple[str, ...] = ()

    @property
    def whole_preset(self) -> bool:
        """Return whether the rung is a preset as it is, for which learning.jsonl may have runs."""
        return bool(self.preset) and not self.overrides


RUNGS = (
    Rung("DQN in one process, one environment", Program()),
    Rung("no gradients while acting", Program(no_grad=True)),
    Rung("8 environments, one step on 256 samples", Program(no_grad=True, envs=8)),
    Rung("acting and training apart", Program(no_grad=True, envs=8, apart=True)),
    Rung("tuned wrappers", Program(games="tuned", no_grad=True, envs=8, apart=True)),
    Rung("emulation in a vector environment", Program(games="vector", no_grad=True, envs=8, apart=True)),
    Rung("Rookery, same network and samples", preset="pong-dqn", overrides=SAME_WORK),
    Rung("Rookery, preset pong-dqn", preset="pong-dqn"),
    Rung("Rookery, preset pong", preset="pong"),
)


def frames_per_second(rung: Rung, seconds: float) -> float:
    """Run a rung; return the emulator frames per second of trained env steps."""
    if rung.program is not None:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as fresh:  # no rung inherits threads or memory of another
            return FRAME_SKIP * fresh.submit(env_steps_per_second, rung.program, seconds).result()
    overrides = (*rung.overrides, NO_EVALUATOR)
    settings = load_settings(preset=rung.preset, overrides=overrides, environ={}).settings
    with running(rung.preset, overrides) as run:
        run.wait_until_trained(warm_up(settings) + 4 * settings.scale.batch_env_steps)
        return settings.env.frame_skip * run.watch(seconds).trained_per_second


def solved(rung: Rung) -> tuple[str, str]:
    """Return the minutes of the runs on the page of learning that solved Pong, and the command; "not run" without one."""
    if not rung.whole_preset:
        return "not run", ""
    rows = newest(kept(RESULTS / ROWS), rung.preset)
    minutes = [row["wall_seconds"] / 60 for row in rows if row["solved_at"]]
    if not minutes:
        return "not run", ""
    return (
        f"{min(minutes):.1f} to {max(minutes):.1f} min, {len(minutes)} of {len(rows)} runs",
        f"`make learning PRESETS={rung.preset}`",
    )


def table(rates: Sequence[float]) -> str:
    """Return the rungs as a Markdown table."""
    lines = ["| change | frames/s | of the first | Pong ≥ 18 | command |", "|---|---|---|---|---|"]
    for rung, rate in zip(RUNGS, rates, strict=True):
        lines.append("| " + " | ".join((rung.change, f"{rate:,.0f}", f"{rate / rates[0]:,.1f}x", *solved(rung))) + " |")
    return "\n".join(lines)


def picture(rates: Sequence[float], path: Path) -> None:
    """Write bars of all rungs as SVG, the same bytes for the same rates."""
    mpl.rcParams.update({"svg.hashsalt": "ladder", "font.size": 9})
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.add_subplot()
    colours = ["#9aa5b1" if rung.program is not None else "#2f6f9f" for rung in RUNGS]
    bars = axes.barh([rung.change for rung in RUNGS], rates, color=colours)
    axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=4)
    axes.set(xscale="log", xlim=(min(rates) / 2, max(rates) * 2), xlabel="emulator frames per second trained on (log scale)")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def conditions(seconds: float, loads: Sequence[float]) -> str:
    """Return the sentences on machine, day and length; a busy machine is named."""
    text = f"{machine()}; {datetime.now(UTC):%Y-%m-%d}, {seconds:g} s a rung. "
    if max(loads) <= 1.5 * cores() + 1:  # the load of one rung is still counted before the next
        return text + "The machine was idle otherwise."
    loaded = f"load {min(loads):.0f} to {max(loads):.0f} on {cores()} cores"
    return f"{text}**The machine was busy** ({loaded}): do not quote these rates."


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all rungs; write page, picture and the table in docs/results.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=45.0, help="of each rung, after warming up")
    asked = parser.parse_args(argv)
    rates, loads = [], []
    for rung in RUNGS:
        loads.append(os.getloadavg()[0])
        rates.append(frames_per_second(rung, asked.seconds))
        print(f"{rates[-1]:10,.0f} frames/s  {rung.change}", flush=True)
    written = f"{conditions(asked.seconds, loads)}\n\n{table(rates)}\n"
    notes = [f"    {rung.change}: {rung.preset} {' '.join(rung.overrides)}" for rung in RUNGS if rung.preset]
    TABLE.write_text("\n".join([HEAD, written, "The last rungs are runs of `rookery train`:", "", *notes, ""]))
    picture(rates, PICTURE)
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    PAGE.write_text(f"{before}{MARKS[0]}\n{LINKS}{written}{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
