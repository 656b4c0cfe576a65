"""The learning claims: a preset trained from nothing with several seeds, one after the other, as a table.

    python -m benchmarks.learning pong cartpole --seeds 1 2 3

Every row is read from the run's own summary.json. The machine should be idle: wall-clock time is part of the claim.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = ("seed", "solved", "minutes", "env steps", "mean100", "greedy evaluation", "env steps/s", "lag mean", "ledger")


def main() -> None:
    """Train, print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=["pong", "cartpole"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--out", type=Path, help="folder for one PRESET.md each, such as benchmarks/results")
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="settings changed for all runs")
    options = parser.parse_args()
    for preset in options.presets:
        with tempfile.TemporaryDirectory() as folder:
            summaries = [train(preset, seed, Path(folder) / str(seed), options.set) for seed in options.seeds]
        text = table(preset, summaries, options.set)
        print(text)
        if options.out:
            (options.out / f"{preset}.md").write_text(text)


def train(preset: str, seed: int, run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """One run of the command that the table names; its summary."""
    words = [sys.executable, "-m", "services.cli", "train", preset, *overrides, "--seed", str(seed), "--run-dir", str(run_dir)]
    code = subprocess.run(words, check=False, stdout=sys.stderr).returncode
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary | {"exit_code": code}


def table(preset: str, summaries: Sequence[dict[str, Any]], overrides: Sequence[str] = ()) -> str:
    """The results as Markdown, nothing rounded up."""
    command = " ".join(["rookery train", preset, *overrides, "--seed SEED"])
    lines = [f"# {preset}", "", f"`{command}`, one run after the other, on {machine()}.", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_row(summary)) + " |" for summary in summaries]
    minutes = statistics.median(summary["wall_seconds"] for summary in summaries) / 60
    solved = sum(summary["solved"] for summary in summaries)
    lines += ["", f"Solved: {solved} of {len(summaries)}. Median wall-clock: {minutes:.2f} minutes, from the command to its end,"]
    lines += ["start-up, checkpoints and the evaluation of the final policy included. mean100 is the mean raw return of the"]
    lines += ["last 100 training episodes; the greedy evaluation plays 10 whole episodes with the final policy."]
    return "\n".join(lines) + "\n"


def _row(summary: dict[str, Any]) -> list[str]:
    evaluation, ledger = summary["last_evaluation"], summary["ledger"]
    accounted = ledger["trained"] + ledger["queued"] + ledger["in_flight"] + sum(ledger["dropped"].values())
    return [
        str(summary["seed"]),
        "yes" if summary["solved"] else "no",
        f"{summary['wall_seconds'] / 60:.2f}",
        f"{summary['env_steps']:,}",
        f"{summary['mean100']:.2f}",
        f"{evaluation['mean']:.2f} (policy {evaluation['version']})" if evaluation else "none",
        f"{summary['env_steps_per_second']:,.0f}",
        f"{summary['policy_lag']['mean']}",
        "balances" if accounted == ledger["produced"] else f"off by {ledger['produced'] - accounted}",
    ]


def machine() -> str:
    """What ran it, in words."""
    models = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return f"{os.cpu_count()} cores ({models[0] if models else platform.machine()}), no GPU, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
