"""Published comparisons: presets trained for the whole budget of a published result, and that result beside ours.

    python -m benchmarks.tables atari mujoco control memory --seeds 1 2 3 --parallel 2
    python -m benchmarks.tables --render

The first command runs what is missing in the lists below. Ctrl-C saves the runs that are under way, and the same command
continues them, on another day too. Each run that spends its budget becomes a line of results/learning.jsonl. Both commands
write the tables in docs/results.md from these lines, and a report with the curves of the run directories.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from benchmarks.learning import RESULTS, ROWS, SEEDS, Row, ended, fingerprint, keep, kept, machines, not_run, older_policy, tree
from common.algorithms.sections import ReplaySection
from common.config.layers import dotted
from common.config.load import load_settings
from common.errors import ConfigError, RookeryError
from common.runtime.run_directory import RunDirectory
from services.cli.compare.report import report
from services.cli.compare.runs import RunData, compared_settings, read_run, read_runs
from services.cli.series.run import TrainProcesses, is_finished, train_arguments, train_processes
from services.cli.train.view import number

ROOT = Path(__file__).parents[1]
PAGE, RUNS = ROOT / "docs/results.md", ROOT / "runs/tables"
MARKS = ("<!-- tables: written by python -m benchmarks.tables -->\n", "<!-- end of tables -->")
TITLES = {"mujoco": "MuJoCo"}  # others are written as they are typed
COLUMNS = ("run", "algorithm", "env steps", "mean100 of each seed", "their mean", "published", "greedy evaluations", "minutes")
HEAD = """\
mean100: mean return of the last 100 training episodes when the whole budget is spent. Greedy evaluations are of the last policy,
or say that they are not. Published results are of the same algorithm and of the same task, in an earlier version where the source
names one. Images, networks and variants of the algorithm are those of the preset: its DQN is double and takes several steps, the
published is plain. Commit and date of each run are in [learning.jsonl](../benchmarks/results/learning.jsonl); PPO on MuJoCo is of
code before decision 44.
"""


class Source(NamedTuple):
    """The publication of results, and the protocol by which they were measured."""

    name: str
    address: str
    protocol: str


CLEANRL = Source(
    "CleanRL",
    "https://docs.cleanrl.dev",
    "mean over three seeds of the returns of training episodes at the end of the budget; Atari `NoFrameskip-v4`, MuJoCo `-v4`",
)
CLEANRL_PQN = Source(
    "CleanRL's PQN",
    "https://docs.cleanrl.dev/rl-algorithms/pqn",
    "as CleanRL, on EnvPool's `-v5` games; Q(lambda) goes on over lost lives",
)
CLEANRL_SAC = Source("CleanRL's SAC", "https://docs.cleanrl.dev/rl-algorithms/sac", "as CleanRL, MuJoCo `-v2`, Humanoid `-v4`")
ZOO = Source(
    "RL Baselines3 Zoo",
    "https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md",
    "one run; mean return of the trained policy, deterministic except in Atari, to be compared with our greedy evaluations",
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A preset, the budget of a published result of the same algorithm on the same task, and the result."""

    preset: str
    env_steps: int
    published: float | None = None
    source: Source | None = None
    changes: tuple[str, ...] = ()  # of the preset's settings, such as another environment

    @property
    def overrides(self) -> list[str]:
        """Return the settings on the command line: the whole budget is spent, whatever the score is."""
        return [*self.changes, "target.mean100=null", "target.evaluation=null", f"target.env_steps={self.env_steps}"]

    def runs(self, rows: Sequence[Row]) -> dict[int, Row]:
        """Return the newest run of each of `SEEDS` that spent this budget; `rows` has the oldest first.

        A seed without a run with `overrides` has that of the preset alone, where its own budget is the same and no seed of it
        ended at its target: else seeds would be chosen by their failure.
        """
        whole = self._by_seed(filter(self._spent, rows), self.overrides)
        settings = load_settings(preset=self.preset, environ={}).settings
        if not self.changes and settings.target.env_steps == self.env_steps:
            alone = self._by_seed(rows, [])
            if not any(seed in SEEDS and row["solved_at"] is not None and is_current(row) for seed, row in alone.items()):
                whole = {seed: row for seed, row in alone.items() if self._spent(row)} | whole
        return {seed: whole[seed] for seed in SEEDS if seed in whole}

    def _by_seed(self, rows: Iterable[Row], overrides: list[str]) -> dict[int, Row]:
        return {row["seed"]: row for row in rows if row["preset"] == self.preset and row["overrides"] == overrides}

    def _spent(self, row: Row) -> bool:
        return row["env_steps"] >= self.env_steps and row["mean100"] is not None


FRAMES = ("env.height=84", "env.width=64", "env.max_episode_frames=108000")
"""The frames of `spaceinvaders`, for games with smaller objects than Breakout; longest game as published."""
SMALL = (*FRAMES, "model.conv=[[16,8,4],[32,4,2]]", "model.hidden=[256]")
"""The frames and the network of `spaceinvaders`."""
NETWORK = ("model.conv=[[32,8,4],[64,4,2],[64,3,1]]", "model.hidden=[512]")
"""The published network (Mnih et al. 2015)."""
NATURE = (*NETWORK, "algorithm.epochs=2")
"""The same, and half the published epochs, which two cores train in two hours."""

TABLES = {
    "atari": (
        Comparison("pong", 10_000_000, 20.36, CLEANRL),
        Comparison("pong-dqn", 10_000_000, 20.25, CLEANRL),
        Comparison("pong-pqn", 10_000_000, 20.5, CLEANRL_PQN),
        Comparison("breakout", 10_000_000, 414.66, CLEANRL),
        Comparison("breakout-pqn", 10_000_000, 385, CLEANRL_PQN),
        Comparison("breakout-pqn", 10_000_000, 385, CLEANRL_PQN, ("env.height=84", "env.width=64", "env.crop=[11,5]", *NATURE)),
        Comparison("breakout-pqn", 10_000_000, 1_325, CLEANRL_PQN, ("env.id=ALE/SpaceInvaders-v5", "env.crop=[0,0]", *SMALL)),
        Comparison(
            "breakout-pqn", 10_000_000, 1_325, CLEANRL_PQN, ("env.id=ALE/SpaceInvaders-v5", "env.crop=[0,0]", *FRAMES, *NATURE)
        ),
        Comparison(
            "breakout-pqn",
            10_000_000,
            1_325,
            CLEANRL_PQN,
            ("env.id=ALE/SpaceInvaders-v5", "env.crop=[0,0]", *FRAMES, *NATURE, "algorithm.dueling=true"),
        ),
        Comparison(
            "breakout-pqn",
            10_000_000,
            1_325,
            CLEANRL_PQN,
            (
                *("env.id=ALE/SpaceInvaders-v5", "env.crop=[0,0]", *FRAMES, *NATURE),
                *("algorithm.q_lambda=0.9", "algorithm.epsilon=0.001"),
            ),
        ),
        Comparison(
            "breakout-pqn",
            10_000_000,
            1_325,
            CLEANRL_PQN,
            (
                *("env.id=ALE/SpaceInvaders-v5", "env.crop=[0,0]", "env.height=84", "env.width=84"),
                *("env.max_episode_frames=108000", *NETWORK, "algorithm.epochs=1", "algorithm.epsilon=0.001"),
            ),
        ),
        Comparison("breakout-pqn", 10_000_000, 2_299, CLEANRL_PQN, ("env.id=ALE/MsPacman-v5", "env.crop=[0,14]", *SMALL)),
        Comparison(
            "breakout-pqn", 10_000_000, 2_299, CLEANRL_PQN, ("env.id=ALE/MsPacman-v5", "env.crop=[0,14]", *FRAMES, *NATURE)
        ),
    ),
    "mujoco": (
        Comparison("halfcheetah", 1_000_000, 9_583, CLEANRL),
        Comparison("halfcheetah", 1_000_000, 3_135, CLEANRL, ("env.id=Hopper-v5",)),
        Comparison("halfcheetah", 1_000_000, 4_058, CLEANRL, ("env.id=Walker2d-v5",)),
        Comparison("halfcheetah", 1_000_000, 5_035, CLEANRL, ("env.id=Humanoid-v5",)),
        Comparison("halfcheetah-sac", 1_000_000, 9_635, CLEANRL_SAC),
        Comparison("halfcheetah-sac", 1_000_000, 9_635, CLEANRL_SAC, ("algorithm.critic_learning_rate=null",)),
        Comparison("hopper-sac", 1_000_000, 2_310, CLEANRL_SAC),
        Comparison("halfcheetah-sac", 1_000_000, 3_591, CLEANRL_SAC, ("env.id=Walker2d-v5",)),
        Comparison("halfcheetah-sac", 1_000_000, 4_996, CLEANRL_SAC, ("env.id=Humanoid-v5",)),
        Comparison("halfcheetah-ppo", 1_000_000, 1_443, CLEANRL),
        Comparison("hopper", 1_000_000, 2_383, CLEANRL),
        Comparison("walker2d", 1_000_000, 2_288, CLEANRL),
    ),
    "control": (
        Comparison("cartpole", 500_000, 490, CLEANRL),
        Comparison("cartpole-dqn", 500_000, 488.7, CLEANRL),
        Comparison("acrobot", 1_000_000, -73.5, ZOO),
        Comparison("mountaincar", 1_000_000, -110.4, ZOO),
        Comparison("lunarlander", 1_000_000, 242, ZOO),
        Comparison("pendulum", 100_000, -172, ZOO),
        Comparison("pendulum-td3", 20_000, -152, ZOO),
        Comparison("pendulum-sac", 20_000, -157, ZOO),
    ),
    "memory": (
        Comparison("pong-lstm", 10_000_000, 19.78, CLEANRL),
        Comparison("popgym-repeat", 500_000),
        Comparison("tmaze", 400_000),
        Comparison("cartpole-velocity-free", 300_000),
    ),
}


class Job(NamedTuple):
    """One run that a table lacks."""

    comparison: Comparison
    seed: int

    @property
    def name(self) -> str:
        """Return the name of its directory."""
        changed = [change.partition("=")[2].replace("/", "-") for change in self.comparison.changes]
        return "-".join([self.comparison.preset, *changed, str(self.comparison.env_steps), f"s{self.seed}"])

    @property
    def overrides(self) -> list[str]:
        """Return all settings on its command line; a replay memory is saved, for the day on which the run goes on."""
        algorithm = load_settings(preset=self.comparison.preset, environ={}).settings.algorithm
        saved = ["checkpoint.replay=true"] if isinstance(algorithm, ReplaySection) else []
        return [*self.comparison.overrides, *saved, f"run.seed={self.seed}"]

    def require_same_settings(self, path: Path) -> None:
        """Raise `ConfigError` where the run in `path` has other settings than it would begin with today."""
        settings = load_settings(preset=self.comparison.preset, overrides=self.overrides, environ={}).settings
        run = RunData(path=path, settings=dotted(settings.model_dump(mode="json")), curve=[], summary={}, command="")
        wanted = compared_settings(run)
        found = compared_settings(read_run(path))
        if differ := [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]:
            raise ConfigError(
                f"{path} was made by other settings than those of {self.comparison.preset} today",
                found=", ".join(f"{key}={found.get(key)}" for key in differ),
                wanted=", ".join(f"{key}={wanted.get(key)}" for key in differ),
                fix="delete it to begin anew",
            )


def missing(names: Sequence[str], seeds: Sequence[int], rows: Sequence[Row]) -> list[Job]:
    """Return the runs to do: the first seed in all tables, then the next. A seed whose run had other settings is missing too."""
    compared = [(seed, comparison) for seed in seeds for name in names for comparison in TABLES[name]]
    return [Job(comparison, seed) for seed, comparison in compared if not is_current(comparison.runs(rows).get(seed))]


def is_current(row: Row | None) -> bool:
    """Return whether there is a run, made by the present text of its preset and the same settings on its command line."""
    return row is not None and row["settings"] == fingerprint(row["preset"], row["overrides"])


def run(jobs: Sequence[Job], trainer: TrainProcesses, *, runs: Path, results: Path, parallel: int, note: str) -> int:
    """Do the jobs, those begun before from their checkpoints, and keep the rows of those that end; return how many did not.

    Raises `ConfigError`, before any begins, where one was begun with other settings.
    """
    runs.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        if RunDirectory(runs / job.name).begun:
            job.require_same_settings(runs / job.name)

    def do(job: Job) -> bool:
        path, preset, code, commits = runs / job.name, job.comparison.preset, 0, runs / f"{job.name}.commits"
        if not is_finished(path, overrides=job.overrides, environ={}):
            if trainer.stopped:
                return False
            begun = RunDirectory(path).begun
            print(f"{job.name}: {'continues' if begun else 'begins'}", flush=True)
            log = runs / f"{job.name}.log" if parallel > 1 else None
            with commits.open("a" if begun else "w") as file:  # it may go on by other code
                file.write(f"{tree()}\n")
            code = trainer.train(train_arguments(preset, job.overrides, (), path), log=log)
        if not is_finished(path, overrides=job.overrides, environ={}):
            print(f"{job.name}: not finished, exit code {code}", flush=True)
            return False
        job.require_same_settings(path)  # ROOKERY_ variables may have changed some
        commit = ", ".join(dict.fromkeys(commits.read_text().split())) if commits.exists() else "unknown"
        keep(results, ended(RunDirectory(path), preset, job.comparison.overrides, exit_code=code, note=note, commit=commit))
        return True

    with ThreadPoolExecutor(parallel) as pool:
        return list(pool.map(do, jobs)).count(False)


def render(rows: Sequence[Row]) -> str:
    """Return all tables as Markdown. Raises `ConfigError` where a run was made by another text of its preset than today's."""
    lines = [HEAD]
    for name, comparisons in TABLES.items():
        found = [comparison.runs(rows) for comparison in comparisons]
        runs = [row for each in found for row in each.values()]
        for row in runs:
            if not is_current(row):
                fact = (
                    f"table {name}: {row['preset']}, seed {row['seed']}, was run with other settings than the preset's of today"
                )
                wanted = fingerprint(row["preset"], row["overrides"])
                raise ConfigError(fact, found=row["settings"], wanted=wanted, fix=f"run python -m benchmarks.tables {name}")
        lines += [
            f"### {TITLES.get(name, name.capitalize())}",
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|" + "---|" * len(COLUMNS),
        ]
        lines += ["| " + " | ".join(_cells(*each)) + " |" for each in zip(comparisons, found, strict=True)]
        for source in dict.fromkeys(comparison.source for comparison in comparisons if comparison.source):
            lines += ["", f"[{source.name}]({source.address}): {source.protocol}."]
        if runs:
            lines += ["", f"Machine: {machines(runs)}."]
        lines.append("")
    return "\n".join(lines)


def _cells(comparison: Comparison, runs: dict[int, Row]) -> list[str]:
    settings = load_settings(preset=comparison.preset, environ={}).settings
    about = [f"`{' '.join([comparison.preset, *comparison.changes])}`", settings.algorithm.name, f"{comparison.env_steps:,}"]
    source = f" ({comparison.source.name})" if comparison.source else ""
    published = "none found" if comparison.published is None else number(comparison.published) + source
    if not runs:
        return [*about, "not run", "", published, "", ""]
    scores = [row["mean100"] for row in runs.values()]
    greedy = ", ".join(_greedy(row) for row in runs.values())
    minutes = ", ".join(f"{row['wall_seconds'] / 60:.1f}" for row in runs.values())
    return [*about, ", ".join(map(number, scores)) + not_run(runs), number(statistics.mean(scores)), published, greedy, minutes]


def _greedy(row: Row) -> str:
    last = row["last_evaluation"]
    return number(last["mean"]) + older_policy(row) if last else "none"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then write tables and report. Return 1 where a run failed, 2 where settings differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help=f"some of {', '.join(TABLES)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, choices=SEEDS)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, each with all its processes")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the run directories and of report.html")
    parser.add_argument("--results", type=Path, default=RESULTS / ROWS, help="file of the kept runs")
    parser.add_argument("--page", type=Path, default=PAGE, help="page that the tables are written to")
    parser.add_argument("--note", default="", help="what else the machine did meanwhile; stands below the tables")
    parser.add_argument("--render", action="store_true", help="write the page and the report only")
    options = parser.parse_args(argv)
    if bool(options.tables) == options.render or not set(options.tables) <= TABLES.keys():
        parser.error(f"name some of {', '.join(TABLES)}, or --render alone")
    try:
        jobs = missing(options.tables, options.seeds, kept(options.results))
        with train_processes() as trainer:
            places = {"runs": options.runs, "results": options.results}
            unfinished = run(jobs, trainer, **places, parallel=options.parallel, note=options.note)
        if any(RunDirectory(path).begun for path in options.runs.iterdir()):
            report(
                read_runs([options.runs]), out=options.runs / "report.html", now=datetime.now().astimezone(), stdout=sys.stdout
            )
        text = render(kept(options.results))
    except RookeryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    before, _, rest = options.page.read_text().partition(MARKS[0])
    options.page.write_text(before + MARKS[0] + text + MARKS[1] + rest.partition(MARKS[1])[2])
    return 1 if unfinished and not trainer.stopped else 0


if __name__ == "__main__":
    raise SystemExit(main())
