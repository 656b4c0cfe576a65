"""The learning page: which claims a run bears out, and which runs are shown. Training itself is not tested here."""

import json
import os
import re
import signal
import statistics
import subprocess
from types import SimpleNamespace

import pytest

from benchmarks import learning
from benchmarks.learning import CLAIMS, PAGE, RESULTS, ROWS, Claim, fingerprint, keep, kept, page, row_of, shown, tree
from benchmarks.tables import TABLES, is_current
from common.config.load import as_yaml, find_preset, load_settings, preset_header, preset_names
from services.cli.train.exit_with_parent import wrapper

pytestmark = pytest.mark.pure

LEDGER = {"produced": 100, "trained": 90, "queued": 0, "in_flight": 0, "dropped": {"stale": 10}}


def summary(**changes):
    """Of a run that solved CartPole."""
    result = {
        "last_evaluation": {"mean": 500.0, "episodes": 10, "version": 10},
        "ledger": LEDGER,
        "policy_lag": {"mean": 1.0},
        "target": {"mean100": 475},
    }
    result |= {"seed": 1, "solved_at": {"env_steps": 400, "wall_seconds": 3.0}, "mean100": 476.0}
    return result | {"env_steps": 500, "learner_updates": 10, "wall_seconds": 6.0, "env_steps_per_second": 83.3} | changes


def row(preset="cartpole-a3c", curve=(), **changes):
    """As `record` keeps it."""
    about = {"note": "", "machine": "2 cores", "commit": "abc", "date": "2026-11-21"}
    return row_of(summary(**changes), curve, preset=preset, overrides=()) | about


def point(env_steps, mean="", evaluation=""):
    """A row of the learning curve."""
    return {"env_steps": str(env_steps), "episode_return_mean": str(mean), "evaluation_return": str(evaluation)}


@pytest.mark.parametrize(("solved_at", "holds"), [({"env_steps": 500_000}, True), ({"env_steps": 500_001}, False), (None, False)])
def test_a_target_counts_within_its_budget(solved_at, holds):
    """One env step later is not within it."""
    assert Claim("cartpole-a3c", mean100=475, env_steps=500_000).holds(row(solved_at=solved_at)) == holds


def test_solving_an_easier_target_proves_nothing():
    """A preset with a lower target than the claim ends too early."""
    assert not Claim("cartpole-a3c", mean100=476, env_steps=500_000).holds(row())


@pytest.mark.parametrize(
    ("scores", "holds"),
    [
        ([(50_000, 3_100), (110_000, 5_000)], True),
        ([(50_000, 3_100), (60_000, 2_900), (110_000, 5_000)], False),  # the last one before the mark counts
        ([(60_050, 3_100), (120_050, 5_000)], True),  # 50 env steps an update: the budget ends with the batch that fills it
        ([(60_051, 3_100), (110_000, 5_000)], False),
        ([(50_000, 3_100)], False),  # 5,000 was never reached
        ([], False),
    ],
)
def test_evaluations_count_by_their_env_steps(scores, holds):
    """Not the best of them, and none that came later."""
    claim = Claim("halfcheetah", evaluations=((60_000, 3_000.0), (120_000, 5_000.0)))
    curve = [point(at, evaluation=score) for at, score in scores]
    assert claim.holds(row("halfcheetah", curve)) == holds


def test_the_page_shows_the_newest_run_of_each_seed_of_the_present_preset(tmp_path):
    """Runs of an older preset or with other settings stay in the file and are not shown."""
    path = tmp_path / "learning.jsonl"
    old, new = row(mean100=475.11), row(mean100=475.22)
    other, changed = row(mean100=475.33) | {"settings": "of long ago"}, row(mean100=475.44) | {"overrides": ["run.seed=1"]}
    failed = row(mean100=12.34, seed=2, solved_at=None)
    for one in (old, new, other, changed, failed):
        keep(path, one)
    assert [json.loads(line) for line in path.read_text().splitlines()] == kept(path)
    text = page(kept(path))
    assert "475.22" in text
    assert not any(shown in text for shown in ("475.11", "475.33", "475.44"))
    assert "| 2 | **no** |" in text
    assert "Holds for 1 of 2 seeds; seed 3 not run, median" in text
    assert "Holds for 1 of 1 seeds; seed 1 not run; seed 2 not run, median" in page([row(seed=3)])
    assert "Holds for 3 of 3 seeds, median" in page([row(seed=seed) for seed in (1, 2, 3)])


def test_each_machine_is_named_once_with_all_that_ran_beside():
    """A list with the machine before each note hides whether there is a second one."""
    first, second = row() | {"note": "idle"}, row(seed=2) | {"note": "tests ran beside it"}
    text = page([first, second, row(seed=3) | {"machine": "4 cores"}])
    assert "Machine: 2 cores; idle / tests ran beside it. 4 cores." in text


@pytest.mark.parametrize(("env_steps", "rows"), [(60, 0), (500_000, 1)])
def test_a_run_that_was_stopped_is_not_kept(env_steps, rows, tmp_path, monkeypatch):
    def train(preset, seed, run_dir, overrides):
        run_dir.mkdir()
        (run_dir / "config.yaml").write_text(as_yaml(load_settings(preset=preset, overrides=overrides, environ={}).settings))
        (run_dir / "summary.json").write_text(json.dumps(summary(seed=seed, env_steps=env_steps, solved_at=None)))
        (run_dir / "learning_curve.csv").write_text("env_steps,episode_return_mean,evaluation_return\n")
        return {"exit_code": 0}  # as of a run that finished

    monkeypatch.setattr(learning, "train", train)
    monkeypatch.setattr("sys.argv", ["learning", "cartpole-a3c", "--seeds", "1", "--results", str(tmp_path)])
    assert learning.main() == 1 - rows
    assert len(kept(tmp_path / ROWS)) == rows
    with pytest.raises(SystemExit, match="143"):  # the run is not left to itself at SIGTERM
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)


def test_a_run_that_never_began_is_not_kept(tmp_path, monkeypatch):
    """Its command would be killed with the benchmark."""
    commands = []

    def refused(command, **_):
        commands.append(command)
        return SimpleNamespace(returncode=2)

    monkeypatch.setattr(learning, "tree", lambda: "abc")
    monkeypatch.setattr("subprocess.run", refused)
    assert learning.record("cartpole", 1, [], note="", curves=tmp_path) is None
    assert [command[: len(wrapper())] for command in commands] == [wrapper()]


@pytest.mark.parametrize(("overrides", "pictures"), [([], ["breakout-1.png"]), (["algorithm.epochs=1"], [])])
def test_a_row_has_the_commit_before_its_run_and_its_picture_is_of_the_preset(overrides, pictures, tmp_path, monkeypatch):
    commits = iter(["before", "after"])

    def train(preset, seed, run_dir, overrides):
        next(commits)
        run_dir.mkdir()
        (run_dir / "summary.json").write_text(json.dumps(summary(seed=seed)))
        (run_dir / "learning_curve.csv").write_text("env_steps,episode_return_mean,evaluation_return\n")
        (run_dir / "learning_curve.png").write_bytes(b"curve")
        return {"exit_code": 0}

    monkeypatch.setattr(learning, "tree", lambda: next(commits))
    monkeypatch.setattr(learning, "train", train)
    monkeypatch.setattr(learning, "is_finished", lambda *_, **__: True)
    assert learning.record("breakout", 1, overrides, note="", curves=tmp_path)["commit"] == "before"
    assert [path.name for path in tmp_path.iterdir()] == pictures


def test_a_row_has_the_settings_before_its_run(tmp_path, monkeypatch):
    """The page showed a run as one of the present settings that had those of before an edit of its preset."""
    before = fingerprint("cartpole-a3c")

    def train(preset, seed, run_dir, overrides):
        run_dir.mkdir()
        (run_dir / "summary.json").write_text(json.dumps(summary(seed=seed)))
        (run_dir / "learning_curve.csv").write_text("env_steps,episode_return_mean,evaluation_return\n")
        monkeypatch.setattr(learning, "find_preset", lambda _: find_preset("cartpole"))  # as edited meanwhile
        return {"exit_code": 0}

    monkeypatch.setattr(learning, "train", train)
    monkeypatch.setattr(learning, "is_finished", lambda *_, **__: True)
    row = learning.record("cartpole-a3c", 1, [], note="", curves=tmp_path)
    assert (row["settings"], shown(row)) == (before, False)


def test_rows_and_pages_that_benchmarks_write_do_not_change_the_tree(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # of a hook: the repository that is committed to
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)  # which may ask for signatures, or short hashes

    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=x", "-c", "user.email=x@x", *words], cwd=tmp_path, check=True, capture_output=True
        )

    assert tree(tmp_path) == "unknown"
    paths = [tmp_path / name for name in ("benchmarks/results/learning.jsonl", "docs/results.md", "benchmarks/learning.py")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("before")
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    for path in paths[:2]:
        path.write_text("after")
    clean = tree(tmp_path)
    paths[2].write_text("after")
    assert re.fullmatch("[0-9a-f]{7,}", clean)
    assert tree(tmp_path) == f"{clean}+"


def test_an_evaluation_of_an_older_policy_than_the_last_is_marked():
    older = row(seed=2, last_evaluation={"mean": 400.0, "episodes": 10, "version": 9})
    text = page([row(), older])
    assert "| 500.00 (10) |" in text
    assert "| 400.00 (10) (not of the last policy) |" in text


def test_the_page_is_what_the_kept_runs_give():
    """Nothing in it is written by hand: `python -m benchmarks.learning --render` writes it."""
    assert (RESULTS / PAGE).read_text() == page(kept(RESULTS / ROWS))


@pytest.mark.parametrize(
    ("mean100", "env_steps", "holds"), [(2_383, 1_000_000, True), (2_382, 1_000_000, False), (3_000, 999_999, False)]
)
def test_a_score_at_the_end_needs_the_whole_budget(mean100, env_steps, holds):
    claim = Claim("hopper", mean100=2_383, env_steps=1_000_000, at_end=True)
    assert claim.holds(row("hopper", mean100=mean100, env_steps=env_steps, solved_at=None)) == holds


# Presets of hours a seed: 10 M env steps of Breakout, or a million gradient steps. Their runs are those of the tables.
OF_TABLES = {"breakout-pqn", "halfcheetah-sac", "hopper-sac"}


def runs_of(name, rows):
    """The newest run of each seed by the present text of a preset."""
    if name not in OF_TABLES:
        return {one["seed"]: one for one in rows if one["preset"] == name and shown(one)}
    (comparison,) = (each for table in TABLES.values() for each in table if (each.preset, each.changes) == (name, ()))
    return {seed: one for seed, one in comparison.runs(rows).items() if is_current(one)}


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_says_how_many_seeds_reach_its_score(name):
    """Its header, from which `rookery presets` is made, agrees with the runs that are kept and with the page of results."""
    assert re.search(rf"(?<![\w-]){name}(?![\w-])", (RESULTS.parents[1] / "docs" / "results.md").read_text())
    measured = preset_header(find_preset(name)).measured
    if measured.startswith("speed alone, "):
        assert name not in {claim.preset for claim in CLAIMS}
        return
    runs = runs_of(name, kept(RESULTS / ROWS))
    held = sum(claim.holds(one) for claim in CLAIMS if claim.preset == name for one in runs.values())
    assert len(runs) >= (1 if name in OF_TABLES else 3)
    minutes = statistics.median(one["wall_seconds"] for one in runs.values()) / 60
    stated = re.match(rf"{held} of {len(runs)} seeds, (\S+) min\b", measured)[1]
    assert stated in {f"{minutes:.1f}", f"{minutes:.0f}"}


def test_steps_that_are_not_accounted_for_are_shown():
    """The ledger is part of what a run proves."""
    assert "| balances |" in page([row()])
    assert "| off by 7 |" in page([row(ledger=LEDGER | {"produced": 107})])


def test_a_fingerprint_is_of_settings_not_of_words():
    """Other presets and overrides have others."""
    assert len({fingerprint("cartpole"), fingerprint("pong"), fingerprint("pong", ["run.seed=2"])}) == 3
