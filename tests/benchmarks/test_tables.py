"""The tables of published comparisons: what is run, continued, refused and written. Nothing is trained here."""

import csv
import json
from contextlib import contextmanager

import pytest

from benchmarks import tables
from benchmarks.learning import RESULTS, ROWS, keep, kept
from benchmarks.tables import CLEANRL, MARKS, Comparison, missing, render
from common.config.load import as_yaml, load_settings
from common.runtime.run_directory import RunDirectory
from services.cli.app import parse_arguments

pytestmark = pytest.mark.service

TINY = {
    "control": (Comparison("cartpole", 2_000, 490.0, CLEANRL), Comparison("taxi", 600)),
    "mujoco": (Comparison("hopper", 1_000_000, 2_383.0, CLEANRL),),
}
LEDGER = {"produced": 100, "trained": 90, "queued": 0, "in_flight": 0, "dropped": {"stale": 10}}


class Trainer:
    """In place of `rookery train`: a run spends `share` of its budget whenever it is begun or continued."""

    def __init__(self):
        self.calls, self.stopped, self.environ, self.share = [], False, {}, 0.5

    def train(self, argv, *, log):
        options = parse_arguments(argv)
        self.calls.append((options.names, log))
        directory = RunDirectory(tables.Path(options.run_dir))
        if not options.resume:
            directory.path.mkdir(parents=True)
            settings = load_settings(preset=options.names[0], overrides=options.overrides, environ=self.environ).settings
            directory.config.write_text(as_yaml(settings))
        settings = load_settings(preset=str(directory.config), environ={}).settings
        before = json.loads(directory.summary.read_text())["env_steps"] if directory.summary.is_file() else 0
        summary = {"seed": settings.run.seed, "solved_at": None, "solved": False, "ledger": LEDGER, "policy_lag": {"mean": 1.0}}
        summary |= {"env_steps": before + int(self.share * settings.target.env_steps), "learner_updates": 3, "wall_seconds": 60.0}
        summary |= {"mean100": 12.5, "env_steps_per_second": 5.0, "last_evaluation": {"mean": 33.25, "version": 3}}
        summary["target"] = settings.target.model_dump()
        directory.summary.write_text(json.dumps(summary))
        with directory.learning_curve_csv.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["env_steps", "wall_seconds", "episode_return_mean", "evaluation_return"])
            rows.writerow([summary["env_steps"], 60.0, 12.5, 33.25])
        return 0


@pytest.fixture
def trainer(monkeypatch):
    """Trains in place of processes; the tables are two tiny ones."""
    fake = Trainer()

    @contextmanager
    def train_processes():
        yield fake

    monkeypatch.setattr(tables, "TABLES", TINY)
    monkeypatch.setattr(tables, "train_processes", train_processes)
    return fake


@pytest.fixture
def command(tmp_path):
    """Run the command in a folder of its own; its page has text before and after the tables."""
    page = tmp_path / "results.md"
    page.write_text(f"before\n{MARKS[0]}old\n{MARKS[1]}\nafter\n")
    places = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "learning.jsonl"), "--page", str(page)]
    return lambda *words: tables.main([*words, *places])


def row(preset="hopper", seed=1, overrides=(), **changes):
    """As learning.jsonl has it, of a run by the preset's settings of today."""
    about = {"preset": preset, "seed": seed, "overrides": list(overrides), "env_steps": 1_000_000, "mean100": 2_500.0}
    about |= {
        "settings": tables.fingerprint(preset, list(overrides)),
        "wall_seconds": 120.0,
        "last_evaluation": None,
        "solved_at": None,
    }
    return about | {"learner_updates": 7, "machine": "2 cores", "note": ""} | changes


def names(jobs):
    return [job.name for job in jobs]


def test_the_first_seed_of_every_table_comes_first(trainer):
    assert names(missing(["control", "mujoco"], [1, 3], [])) == [
        *("cartpole-2000-s1", "taxi-600-s1", "hopper-1000000-s1"),
        *("cartpole-2000-s3", "taxi-600-s3", "hopper-1000000-s3"),
    ]


@pytest.mark.parametrize(
    ("found", "is_missing"),
    [
        (row(), False),  # a claim on the whole budget of the preset is the same run
        (row(env_steps=999_999), True),  # it reached its target before
        (row(overrides=TINY["mujoco"][0].overrides), False),
        (row(overrides=["model.hidden=[8]"]), True),
        (row(seed=2), True),
        (row("walker2d"), True),
        (row(settings="of long ago"), True),
    ],
)
def test_a_run_counts_by_preset_seed_budget_and_settings(trainer, found, is_missing):
    assert names(missing(["mujoco"], [1], [found])) == ["hopper-1000000-s1"] * is_missing


def test_a_claim_on_another_budget_than_the_tables_is_no_run_of_it():
    (comparison,) = (each for each in tables.TABLES["control"] if each.preset == "cartpole")
    assert comparison.runs([row("cartpole", env_steps=comparison.env_steps)]) == {}


def test_no_run_of_a_preset_with_a_target_is_chosen_because_it_failed():
    """Those that reached it ended early: with them, the runs that the table would have are the failed ones."""
    (comparison,) = TINY["mujoco"]
    whole = row(overrides=comparison.overrides, mean100=4_100.0)
    failed, other, solved = row(), row(seed=2), row(seed=2, env_steps=900_000, solved_at={"env_steps": 900_000})
    crashed = row(seed=2, env_steps=50_000)
    assert comparison.runs([failed, other]) == {1: failed, 2: other}
    assert comparison.runs([failed, solved]) == {}
    assert comparison.runs([failed, crashed]) == comparison.runs([failed, solved | {"settings": "of then"}]) == {1: failed}
    assert comparison.runs([failed, solved | {"seed": 9}]) == {1: failed}
    assert comparison.runs([whole, failed, other]) == {1: whole, 2: other}
    assert comparison.runs([whole, failed, solved]) == {1: whole}


def test_what_was_interrupted_continues_and_what_ended_is_kept_once(trainer, command, tmp_path, capsys):
    assert command("control", "--seeds", "1") == 1
    assert kept(tmp_path / "learning.jsonl") == []
    assert "cartpole-2000-s1: not finished" in capsys.readouterr().out
    assert command("control", "--seeds", "1", "--parallel", "2", "--note", "alone") == 0
    assert command("control", "--seeds", "1") == 0
    begun, continued = ([names for names, _ in trainer.calls[start : start + 2]] for start in (0, 2))
    assert (begun, continued) == ([["cartpole"], ["taxi"]], [[], []])  # a preset names what begins
    assert len(trainer.calls) == 4
    assert [call[-1] for call in trainer.calls[:2]] == [None, None]
    assert {call[-1].name for call in trainer.calls[2:]} == {"cartpole-2000-s1.log", "taxi-600-s1.log"}
    rows = kept(tmp_path / "learning.jsonl")
    assert sorted((each["preset"], each["env_steps"], each["note"]) for each in rows) == [
        ("cartpole", 2_000, "alone"),
        ("taxi", 600, "alone"),
    ]
    assert (tmp_path / "runs/report.html").is_file()


def test_a_row_names_the_code_of_each_start_of_its_run(trainer, command, tmp_path, monkeypatch):
    """One that went on by other code was kept as a run of the last alone."""
    for commit in ("first", "second", "third"):
        monkeypatch.setattr(tables, "tree", lambda commit=commit: commit)
        (tmp_path / "learning.jsonl").unlink(missing_ok=True)
        command("control", "--seeds", "1")
    assert [row["commit"] for row in kept(tmp_path / "learning.jsonl")] == ["first, second"] * 2


def test_a_run_that_ended_without_being_kept_is_not_done_again(trainer, command, tmp_path):
    for _ in range(2):
        command("control", "--seeds", "1")
    (tmp_path / "learning.jsonl").unlink()
    assert command("control", "--seeds", "1") == 0
    assert len(trainer.calls) == 4
    assert len(kept(tmp_path / "learning.jsonl")) == 2


def test_no_run_begins_after_a_stop(trainer, command, tmp_path):
    trainer.stopped = True
    assert command("control") == 0
    assert trainer.calls == []
    assert "not run" in (tmp_path / "results.md").read_text()


def test_a_run_of_other_settings_is_refused_in_one_line_before_any_begins(trainer, command, tmp_path, capsys):
    trainer.environ = {"ROOKERY_ALGORITHM__GAMMA": "0.5"}  # in place of a preset that was changed since
    command("control", "--seeds", "1")
    begun = len(trainer.calls)
    assert begun == 2
    capsys.readouterr()
    assert command("control", "--seeds", "2", "1") == 2
    found = capsys.readouterr().err
    path = tmp_path / "runs/cartpole-2000-s1"
    assert found.startswith(f"error: {path} was made by other settings than those of cartpole today: found algorithm.gamma=0.5, ")
    assert found.count("\n") == 1
    assert len(trainer.calls) == begun


def test_a_run_whose_settings_a_variable_has_changed_is_not_kept(trainer, command, tmp_path, capsys):
    trainer.environ, trainer.share = {"ROOKERY_ALGORITHM__GAMMA": "0.5"}, 1.0
    assert command("control", "--seeds", "1") == 2
    assert "was made by other settings" in capsys.readouterr().err
    assert kept(tmp_path / "learning.jsonl") == []


def test_a_kept_run_of_other_settings_is_refused_in_one_line(trainer, command, tmp_path, capsys):
    before = (tmp_path / "results.md").read_text()
    keep(tmp_path / "learning.jsonl", row(seed=3, settings="long ago"))
    assert command("--render") == 2
    found = capsys.readouterr().err
    assert found.startswith("error: table mujoco: hopper, seed 3, was run with other settings than the preset's of today")
    assert found.endswith("run python -m benchmarks.tables mujoco\n")
    assert found.count("\n") == 1
    assert (tmp_path / "results.md").read_text() == before
    keep(tmp_path / "learning.jsonl", row(seed=3))  # the newest counts
    assert command("--render") == 0


def test_a_page_has_the_published_mean_beside_ours_and_says_what_was_not_run(trainer, command, tmp_path):
    for seed, mean100 in ((1, 2_500.0), (3, 1_500.0)):
        evaluation = {"mean": 3.5, "version": 8 - seed}  # the second of an older policy: its games were not over in time
        keep(tmp_path / "learning.jsonl", row(seed=seed, mean100=mean100, last_evaluation=evaluation))
    assert command("--render") == 0
    text = (tmp_path / "results.md").read_text()
    assert text.startswith(f"before\n{MARKS[0]}")
    assert text.endswith(f"{MARKS[1]}\nafter\n")
    assert "old" not in text
    means = "2,500, 1,500; seed 2 not run | 2,000 | 2,383 (CleanRL)"
    assert f"| `hopper` | ppo | 1,000,000 | {means} | 3.5, 3.5 (not of the last policy) | 2.0, 2.0 |" in text
    assert "| `cartpole` | ppo | 2,000 | not run |  | 490 (CleanRL) |  |  |" in text
    assert "| `taxi` | ppo | 600 | not run |  | none found |  |  |" in text
    assert f"[CleanRL]({CLEANRL.address}): {CLEANRL.protocol}." in text
    assert command("--render") == 0
    assert (tmp_path / "results.md").read_text() == text


@pytest.mark.parametrize("words", [[], ["atari", "--render"], ["control", "atary"]])
def test_a_slip_in_the_command_is_one_error(trainer, command, words):
    with pytest.raises(SystemExit) as ended:
        command(*words)
    assert ended.value.code == 2


def test_the_page_of_results_is_what_the_kept_runs_give():
    """Nothing in it is written by hand: `python -m benchmarks.tables --render` writes it."""
    page = (RESULTS.parents[1] / "docs" / "results.md").read_text()
    assert page.partition(MARKS[0])[2].partition(MARKS[1])[0] == render(kept(RESULTS / ROWS))


@pytest.mark.parametrize("comparison", [each for table in tables.TABLES.values() for each in table], ids=str)
def test_every_comparison_is_a_run_that_can_begin(comparison):
    settings = load_settings(preset=comparison.preset, overrides=comparison.overrides, environ={}).settings
    assert (settings.target.mean100, settings.target.evaluation) == (None, None)
    assert settings.target.env_steps == comparison.env_steps
    assert (comparison.published is None) == (comparison.source is None)
