"""The lockstep claim: two runs of one seed end with the same weights, to the bit, while the machine is loaded at random.

    python -m benchmarks.lockstep --out benchmarks/results
    python -m benchmarks.lockstep --kills 20 --out benchmarks/results

Each case runs twice beside processes that take CPU time at random; only the first run has an evaluator. With `--kills` the second
run is one in which learner and actors are killed that often at random moments (SIGKILL). Exit code 1 where two hashes differ,
where a run did not train, or ended before it was killed so often.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.killed import run_killed, services
from benchmarks.learning import machine, train
from common.runtime.run_directory import RunDirectory
from common.units import Seconds

SEED = 1
LOCKSTEP = "run.mode=lockstep"
BURST: Seconds = 1.0  # longest time for which a burner works, or rests


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A preset and settings that are run twice."""

    preset: str
    actors: int
    overrides: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the overrides of the command."""
        return (LOCKSTEP, f"actor.count={self.actors}", *self.overrides)


CASES = [
    *(Case(preset="cartpole", actors=actors) for actors in (1, 3)),
    *(Case(preset="pong", actors=actors, overrides=("target.env_steps=50_000",)) for actors in (1, 3)),
]


KILLED_CASES = [
    Case(preset="cartpole", actors=2, overrides=("target.mean100=null", "target.env_steps=300_000")),  # no end before all kills
    Case(preset="pendulum-td3", actors=2, overrides=("target.env_steps=12_000", "checkpoint.replay=true")),
]
SAVE_OFTEN = "checkpoint.every_seconds=0.5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A case and the summaries of its two runs."""

    case: Case
    summaries: Sequence[dict[str, Any]]
    kills: Mapping[str, int] = field(default_factory=dict)  # in the second run

    @property
    def agree(self) -> bool:
        """Return whether the runs trained, and ended reproducibly with equal weights."""
        hashes = {summary["parameters_sha256"] for summary in self.summaries}
        trained = all(summary["reproducible"] and summary["learner_updates"] for summary in self.summaries)
        return len(hashes) == 1 and None not in hashes and trained


def run_twice(case: Case) -> Pair:
    """Both runs, one after the other, on a machine that has other work."""
    summaries = []
    with tempfile.TemporaryDirectory() as folder, loaded():
        for evaluator in ("true", "false"):
            settings = (*case.settings, f"evaluator.enabled={evaluator}")
            summaries.append(train(case.preset, SEED, Path(folder) / evaluator, settings))
    return Pair(case=case, summaries=summaries)


def run_killed_beside(case: Case, kills: int) -> Pair:
    """Run once undisturbed and once with kills, both without an evaluator."""
    overrides = (*case.settings, f"run.seed={SEED}", SAVE_OFTEN)
    summaries, killed = [], Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for times in (0, kills):
            run_dir = Path(folder) / f"kills-{times}"
            with services(case.preset, run_dir, overrides, actors=case.actors) as group:
                killed = run_killed(group, times, seed=SEED)
            summaries.append(json.loads(RunDirectory(run_dir).summary.read_text()))
            shown = {name: summaries[-1][name] for name in ("parameters_sha256", "reproducible", "ledger")}
            print(case.preset, dict(killed), shown, flush=True)
    return Pair(case=case, summaries=summaries, kills=killed)


@contextmanager
def loaded() -> Iterator[None]:
    """Keep the machine busy at random: a process for each core works and rests by turns, for random times."""
    stop = multiprocessing.Event()
    burners = [multiprocessing.Process(target=_burn, args=(stop,), daemon=True) for _ in range(os.cpu_count() or 1)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        stop.set()
        for burner in burners:
            burner.join()


def _burn(stop: Any) -> None:
    chance = random.Random(os.urandom(8))  # noqa: S311 - different each time is the purpose
    while not stop.wait(chance.uniform(0.0, BURST)):
        until = time.monotonic() + chance.uniform(0.0, BURST)
        while time.monotonic() < until:
            pass


def report(pairs: Sequence[Pair]) -> str:
    """Return the page in Markdown."""
    agree = sum(pair.agree for pair in pairs)
    lines = ["# Lockstep", "", f"Each line twice with seed {SEED} on {machine()}, while {os.cpu_count()} processes worked and"]
    lines += ["rested at random; an evaluator played in the first of the two only. `make lockstep` repeats it.", ""]
    lines += ["| command | updates | env steps | minutes | lag | SHA-256 of the final parameters | equal |", "|" + "---|" * 7]
    lines += [_row(pair) for pair in pairs]
    lines += ["", f"{agree} of {len(pairs)} pairs agree bit for bit."]
    return "\n".join(lines) + "\n"


def killed_report(pairs: Sequence[Pair]) -> str:
    """Return the page of the runs with killed processes."""
    lines = ["# Lockstep whose processes are killed", ""]
    lines += [f"Each line twice with seed {SEED} on {machine()}: left alone, and with learner and actors killed"]
    lines += ["(SIGKILL) at random moments and started again at once. Figures of both runs, where they differ."]
    lines += ["`python -m benchmarks.lockstep --kills 20` repeats it."]
    lines += ["", "| command | kills | updates | env steps | minutes | rolled back | SHA-256 of the final parameters | equal |"]
    lines += ["|" + "---|" * 8]
    for pair in pairs:
        kills = ", ".join(f"{number} x {kind}" for kind, number in sorted(pair.kills.items()))
        cells = _row(pair).strip("| ").split(" | ")
        rolled_back = ", ".join(f"{run['ledger']['dropped']['rolled_back']:,}" for run in pair.summaries)
        lines.append(f"| {' | '.join([cells[0], kills, *cells[1:4], rolled_back, *cells[5:]])} |")
    return "\n".join(lines) + "\n"


def _row(pair: Pair) -> str:
    def both(values: Sequence[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    runs = pair.summaries
    cells = [
        f"`rookery train {pair.case.preset} {' '.join(pair.case.settings)}`",
        both([f"{run['learner_updates']:,}" for run in runs]),
        both([f"{run['env_steps']:,}" for run in runs]),
        both([f"{run['wall_seconds'] / 60:.2f}" for run in runs]),
        both([f"{run['policy_lag']['max']}" for run in runs]),
        both([f"`{str(run['parameters_sha256'])[:16]}`" for run in runs]),
        "yes" if pair.agree else "NO",
    ]
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases, print the page, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the page, such as benchmarks/results")
    parser.add_argument("--kills", type=int, default=0, help="compare a run that is left alone with one of so many kills")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave no process behind
    if options.kills:
        pairs = [run_killed_beside(case, options.kills) for case in KILLED_CASES]
        text, page = killed_report(pairs), "lockstep-killed.md"
    else:
        pairs = [run_twice(case) for case in CASES]
        text, page = report(pairs), "lockstep.md"
    print(text)
    if options.out:
        (options.out / page).write_text(text)
    return 0 if all(pair.agree and sum(pair.kills.values()) >= options.kills for pair in pairs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
