"""The learning claims: presets trained from nothing with several seeds, each run a line that stays, all of them one page.

    python -m benchmarks.learning cartpole-dqn pong-dqn --seeds 1 2 3 --note "nothing else ran"
    python -m benchmarks.learning --render

Every run is appended to results/learning.jsonl as it ends, read from its own summary.json and learning_curve.csv; so hours of
runs are done piece by piece, on any machine. results/learning.md shows those of the presets as they are now. A preset with
changed settings has no rows there until it is run again; its older rows stay in the file.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from common.config.load import ENV_PREFIX, find_preset
from common.models.arithmetic import CPU, native
from common.runtime.run_directory import RunDirectory
from services.cli.series.run import is_finished
from services.cli.train import exit_with_parent

RESULTS = Path(__file__).parent / "results"
ROWS, PAGE = "learning.jsonl", "learning.md"
COLUMNS = (
    "seed", "holds", "env steps", "minutes", "mean100", "greedy evaluation", "env steps/s", "policy lag", "ledger", "date",
    "commit",
)  # fmt: skip
WRITTEN = ("benchmarks/results", "docs/results.md")  # by benchmarks, also between the runs of one command
SEEDS = (1, 2, 3)
CURVE_POINTS = 60  # of each run's curve that are kept
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Claim:
    """The score that a preset reaches: mean100 within a budget of env steps or at its end, or greedy evaluations at env steps."""

    preset: str
    mean100: float | None = None
    env_steps: int = 0
    at_end: bool = False  # mean100 is that of the whole budget, not the first that reaches the target
    evaluations: tuple[tuple[int, float], ...] = ()  # (by env steps, at least)

    def words(self) -> str:
        """Return the claim as a sentence of the page."""
        if self.mean100 is not None:
            when = "at the end of" if self.at_end else "within"
            return f"mean of 100 training episodes >= {self.mean100:,g} {when} {self.env_steps:,} env steps"
        return ", ".join(f"greedy evaluation >= {score:,g} by {steps:,} env steps" for steps, score in self.evaluations)

    def holds(self, row: Row) -> bool:
        """Return whether this run reaches the score. Of several evaluations before the mark the last one counts, not the best."""
        if self.mean100 is not None and self.at_end:
            return bool(row["env_steps"] >= self.env_steps and row["mean100"] >= self.mean100)
        if self.mean100 is not None:
            at = row["solved_at"]
            return at is not None and row["target"] == self.mean100 and at["env_steps"] <= self.env_steps
        return all(self._by(row, steps) >= score for steps, score in self.evaluations)

    @staticmethod
    def _by(row: Row, steps: int) -> float:
        rollout = row["env_steps"] / max(1, row["learner_updates"])  # a budget ends with the batch that fills it
        scores: list[float] = [score for at, score in row["evaluations"] if at <= steps + rollout]
        return scores[-1] if scores else float("-inf")


CLAIMS = (
    Claim("cartpole", mean100=475, env_steps=100_000),
    Claim("cartpole-a3c", mean100=475, env_steps=500_000),
    Claim("cartpole-a3c-grad", mean100=475, env_steps=500_000),
    Claim("cartpole-impala", mean100=475, env_steps=500_000),
    Claim("cartpole-dqn", mean100=475, env_steps=100_000),
    Claim("cartpole-pqn", mean100=475, env_steps=120_000),
    Claim("acrobot", mean100=-100, env_steps=200_000),
    Claim("taxi", mean100=7.5, env_steps=100_000),
    Claim("minigrid-doorkey", mean100=0.96, env_steps=250_000),
    Claim("popgym-repeat", mean100=0.9, env_steps=300_000),
    Claim("cartpole-jax", mean100=475, env_steps=2_000_000),
    Claim("tmaze", mean100=0.99, env_steps=400_000),
    Claim("tmaze-dqn", mean100=0.99, env_steps=300_000),
    Claim("tmaze-impala", mean100=0.99, env_steps=1_000_000),
    Claim("cartpole-velocity-free", mean100=475, env_steps=300_000),
    Claim("vizdoom-basic", mean100=80, env_steps=150_000),
    Claim("spread", evaluations=((1_500_000, -14.0),)),
    Claim("lunarlander", mean100=200, env_steps=1_500_000),
    Claim("mountaincar", mean100=-110, env_steps=500_000),
    Claim("mountaincar-continuous", mean100=90, env_steps=300_000),
    Claim("pendulum", mean100=-200, env_steps=200_000),
    # CleanRL's means at 1 M env steps, ppo_continuous_action.py.
    Claim("halfcheetah-ppo", mean100=1_443, env_steps=1_000_000, at_end=True),
    Claim("hopper", mean100=2_383, env_steps=1_000_000, at_end=True),
    Claim("walker2d", mean100=2_288, env_steps=1_000_000, at_end=True),
    Claim("pong", mean100=18, env_steps=1_100_000),
    Claim("pong-lstm", mean100=18, env_steps=1_500_000),
    Claim("pong-dqn", mean100=18, env_steps=800_000),
    Claim("pong-pqn", mean100=18, env_steps=1_000_000),
    Claim("pong-impala", mean100=18, env_steps=5_000_000),
    Claim("pong-a3c", mean100=18, env_steps=5_000_000),
    Claim("pong-a3c-grad", mean100=18, env_steps=5_000_000),
    Claim("pendulum-td3", evaluations=((20_000, -170.0),)),
    Claim("pendulum-sac", evaluations=((20_000, -170.0),)),
    # CleanRL's means at 1 M env steps, sac_continuous_action.py.
    Claim("halfcheetah-sac", mean100=9_635, env_steps=1_000_000, at_end=True),
    Claim("hopper-sac", mean100=2_310, env_steps=1_000_000, at_end=True),
    Claim("halfcheetah", evaluations=((120_000, 5_000.0),)),
    Claim("breakout", mean100=100, env_steps=5_000_000),
    Claim("breakout-pqn", mean100=385, env_steps=10_000_000),
    Claim("spaceinvaders", mean100=350, env_steps=1_000_000),
)


def main() -> int:
    """Train and keep the rows, or only render the page; exit code 1 where a run left no row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="settings changed for all runs")
    parser.add_argument("--note", default="", help="what else the machine did meanwhile; stands on the page")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of learning.jsonl and learning.md")
    parser.add_argument("--render", action="store_true", help="write the page only")
    options = parser.parse_args()
    if not (options.presets or options.render):
        parser.error("name presets, or --render")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave no run and no folder behind
    failed = 0
    for preset in options.presets:
        for seed in options.seeds:
            row = record(preset, seed, options.set, note=options.note, curves=options.results)
            if row is None:
                failed += 1
                sys.stderr.write(
                    f"{preset}, seed {seed}: no row is kept, because the run ended before its target and its budget\n"
                )
            else:
                keep(options.results / ROWS, row)
    text = page(kept(options.results / ROWS))
    (options.results / PAGE).write_text(text)
    print(text)
    return 1 if failed else 0


def record(preset: str, seed: int, overrides: Sequence[str], *, note: str, curves: Path) -> Row | None:
    """Train once and return the row of the run; None where the run was stopped, or failed, before its target and its budget.

    The curve of a claim on a single seed is drawn into the folder `curves`.
    """
    commit, settings = tree(), fingerprint(preset, overrides)  # the preset may be edited during the run
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder) / "run")
        try:
            code = train(preset, seed, directory.path, overrides)["exit_code"]
        except FileNotFoundError:  # it has no summary
            return None
        if not is_finished(directory.path, overrides=(), environ={}):
            return None
        if preset.startswith("breakout") and not overrides and directory.learning_curve_png.is_file():
            shutil.copy(directory.learning_curve_png, curves / f"{preset}-{seed}.png")
        return {**ended(directory, preset, overrides, exit_code=code, note=note, commit=commit), "settings": settings}


def ended(directory: RunDirectory, preset: str, overrides: Sequence[str], *, exit_code: int, note: str, commit: str) -> Row:
    """Return the row of a run that has ended, from its files; `overrides` are those that it had, but for its seed.

    `commit` is the `tree` before the run.
    """
    with directory.learning_curve_csv.open(newline="") as file:
        curve = list(csv.DictReader(file))
    now = datetime.now(UTC).date().isoformat()
    about = {"exit_code": exit_code, "note": note, "machine": machine(), "commit": commit, "date": now}
    summary = json.loads(directory.summary.read_text())
    return row_of(summary, curve, preset=preset, overrides=overrides) | about


def train(preset: str, seed: int, run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run the command that the page names; return its summary.

    Raises `FileNotFoundError` where the run failed before it had one.
    """
    words = [*exit_with_parent.wrapper(), sys.executable, "-m", "services.cli", "train", preset, *overrides]
    words += ["--seed", str(seed), "--run-dir", str(run_dir)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}  # they would change the run
    code = subprocess.run(words, check=False, stdout=sys.stderr, env=environ).returncode
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary | {"exit_code": code}


def row_of(
    summary: Mapping[str, Any], curve: Sequence[Mapping[str, str]], *, preset: str, overrides: Sequence[str]
) -> dict[str, Any]:
    """Return the row of a run: facts of its summary, its thinned curve, and its greedy evaluations by env steps."""
    ledger = summary["ledger"]
    accounted = ledger["trained"] + ledger["queued"] + ledger["in_flight"] + sum(ledger["dropped"].values())
    facts = (
        "seed",
        "solved_at",
        "env_steps",
        "learner_updates",
        "wall_seconds",
        "mean100",
        "last_evaluation",
        "env_steps_per_second",
    )
    trained = [point for point in curve if point["episode_return_mean"]]
    thin = trained[:: max(1, len(trained) // CURVE_POINTS)]
    return {
        "preset": preset,
        "settings": fingerprint(preset, overrides),
        "overrides": list(overrides),
        "target": summary["target"]["mean100"],
        **{name: summary[name] for name in facts},
        "policy_lag": summary["policy_lag"]["mean"],
        "unaccounted": ledger["produced"] - accounted,
        "evaluations": [
            [int(point["env_steps"]), float(point["evaluation_return"])] for point in curve if point["evaluation_return"]
        ],
        "curve": [[int(point["env_steps"]), round(float(point["episode_return_mean"]), 2)] for point in thin],
    }


def keep(path: Path, row: Row) -> None:
    """Append a line in one write: two benchmarks may end at the same time."""
    line = (json.dumps(row) + "\n").encode()
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def kept(path: Path) -> list[Row]:
    """Return all rows, the oldest first."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def shown(row: Row) -> bool:
    """Return whether a run was one of the present settings of its preset."""
    return not row["overrides"] and row["settings"] == fingerprint(row["preset"])


def newest(rows: Iterable[Row], preset: str) -> list[Row]:
    """Return the newest run of each seed of the present preset, by seed; `rows` has the oldest first."""
    by_seed = {row["seed"]: row for row in rows if row["preset"] == preset and shown(row)}
    return [by_seed[seed] for seed in sorted(by_seed)]


def fingerprint(preset: str, overrides: Sequence[str] = ()) -> str:
    """Return a hash of the settings of a preset, comments left out."""
    text = json.dumps([yaml.safe_load(find_preset(preset).text), list(overrides)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def page(rows: Iterable[Row]) -> str:
    """Return the page: every claim with the newest run of each seed of the present preset."""
    lines = [
        "# Learning",
        "",
        "Runs of `rookery train PRESET --seed SEED`, kept and rendered by `python -m benchmarks.learning PRESET --seeds 1 2 3`;",
        "raw rows, curves included: [learning.jsonl](learning.jsonl). Nothing is rounded up. Minutes are wall-clock from the",
        "start of the learner's process, seconds after the command, to the end of its last evaluation, checkpoints included;",
        "their median is of all runs. mean100: mean raw return of the last 100 training episodes. A greedy evaluation plays",
        "whole episodes, as many as stand behind it, with the last policy; those of an older one are marked. Env",
        "steps/s: from the first update on, start-up left out; of most rows before 2026-11-23 over the whole run. Only runs of",
        "the presets' present settings are shown, by the code of their commit. PPO before 2026-11-24 normalised values another",
        "way ([decision 44](../../docs/decisions/0044-units-of-values-follow-the-returns.md)). Some commits are of before the",
        "history of this repository.",
    ]
    kept_rows = list(rows)
    for claim in CLAIMS:
        runs = newest(kept_rows, claim.preset)
        lines += ["", f"## {claim.preset}", "", f"Claim: {claim.words()}.", ""]
        lines += _section(claim, runs) if runs else ["No run of the present settings is kept."]
    return "\n".join(lines) + "\n"


def _section(claim: Claim, runs: Sequence[Row]) -> list[str]:
    held = sum(claim.holds(row) for row in runs)
    minutes = statistics.median(row["wall_seconds"] for row in runs) / 60
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cells(claim, row)) + " |" for row in runs]
    left = not_run(row["seed"] for row in runs)
    lines += ["", f"Holds for {held} of {len(runs)} seeds{left}, median {minutes:.1f} minutes. Machine: {machines(runs)}."]
    if claim.evaluations:
        lines += ["", "Greedy evaluations, as reported (env steps trained on by then: score):", ""]
        lines += [
            f"- seed {row['seed']}: " + ", ".join(f"{at:,}: {score:,.1f}" for at, score in row["evaluations"]) for row in runs
        ]
    if claim.preset.startswith("breakout"):
        lines += ["", *(f"![Seed {row['seed']}]({claim.preset}-{row['seed']}.png)" for row in runs)]
    return lines


def _cells(claim: Claim, row: Row) -> list[str]:
    evaluation = row["last_evaluation"]
    return [
        str(row["seed"]),
        "yes" if claim.holds(row) else "**no**",
        f"{row['env_steps']:,}",
        f"{row['wall_seconds'] / 60:.2f}",
        f"{row['mean100']:.2f}",
        f"{evaluation['mean']:.2f} ({evaluation['episodes']}){older_policy(row)}" if evaluation else "none",
        f"{row['env_steps_per_second']:,.0f}",
        f"{row['policy_lag']}",
        "balances" if row["unaccounted"] == 0 else f"off by {row['unaccounted']}",
        row["date"],
        row["commit"],
    ]


def not_run(seeds: Iterable[int]) -> str:
    """Return which of `SEEDS` are not among these, as it stands behind the others; "" where all are."""
    run = set(seeds)
    return "".join(f"; seed {seed} not run" for seed in SEEDS if seed not in run)


def older_policy(row: Row) -> str:
    """Return the mark of a run whose last evaluation is not of its last policy; "" where it is.

    An evaluator that did not end its games within a minute of the end of the run has the result of an older policy.
    """
    return "" if row["last_evaluation"]["version"] == row["learner_updates"] else " (not of the last policy)"


def machines(rows: Iterable[Row]) -> str:
    """Return the machines of `rows`, each once, and what else they did in one of the runs or another."""
    notes: dict[str, set[str]] = {}
    for row in rows:
        notes.setdefault(row["machine"], set()).update([row["note"]] if row["note"] else [])
    return ". ".join(name + (f"; {' / '.join(sorted(found))}" if found else "") for name, found in sorted(notes.items()))


def machine() -> str:
    """Return one line about this machine: cores, CPU model, GPU, Python."""
    models = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    model = models[0] if models else platform.machine()
    lacks = "" if native("bf16", CPU) == "bf16" else ", without bfloat16"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores ({model}{lacks}), {gpu}, Python {platform.python_version()}"


def tree(root: Path = RESULTS.parents[1]) -> str:
    """Return the short hash of this tree, with + where more than its results was changed; "unknown" outside a checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{path}" for path in WRITTEN))
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    raise SystemExit(main())
