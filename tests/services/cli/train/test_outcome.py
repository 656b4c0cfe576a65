"""The outcome of a run: exit code, result and next steps."""

import json

import pytest

from services.cli.train.instructions import Outcome
from services.cli.train.outcome import final_lines, own_end, read_summary, verdict

pytestmark = pytest.mark.service

MEAN_REMARKS = [
    ("environments_unfinished", "(3 environments have ended none)"),
    ("episodes_before_leaving", "(3 of them ended before an actor left)"),
]
SUMMARY = {
    "solved": False,
    "env_steps": 500_000,
    "learner_updates": 250,
    "wall_seconds": 125.0,
    "frames_per_second": 16_000.0,
    "mean100": 17.2,
    "last_evaluation": {"version": 9, "mode": "greedy", "mean": 18.5, "episodes": 10},
}


def judged(outcome=Outcome.FINISHED, summary=SUMMARY, worked=False, resumed=False, **changed):
    """Verdict on a run with that summary and that section `target`."""
    target = {"mean100": 475.0, "evaluation": None, "env_steps": 1_000_000, "wall_seconds": None}
    target |= {name: changed.pop(name) for name in target.keys() & changed.keys()}
    return verdict(outcome, summary and summary | changed, worked=worked, resumed=resumed, target=target)


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        ({"solved": True}, 0, "target was reached"),
        ({"env_steps": 500_000}, 0, "env steps is spent"),
        ({"wall_seconds": 120.0}, 0, "time is spent"),
        ({}, 1, "before its target and its budget"),
        ({"mean100": None}, 1, "failed: the learner ended before its budget was spent"),
        ({"summary": None}, 1, "failed: the learner ended and left no readable summary.json"),
        ({"outcome": Outcome.STOPPED}, 0, "all work saved"),
        ({"outcome": Outcome.STOPPED, "learner_updates": 0}, 0, "before the first update"),
        ({"outcome": Outcome.STOPPED, "summary": None}, 0, "before the first update"),
        ({"outcome": Outcome.STOPPED, "summary": None, "resumed": True}, 0, "the run is as its checkpoint left it"),
        ({"outcome": Outcome.STOPPED, "summary": None, "worked": True}, 1, "progress since the last checkpoint is lost"),
        ({"outcome": Outcome.REFUSED}, 2, "not run: a setting is invalid"),
        ({"outcome": Outcome.REFUSED, "worked": True}, 1, "failed: after training had begun"),
        ({"outcome": Outcome.FAILED}, 1, "failed"),
        ({"outcome": Outcome.KILLED}, 130, "is lost"),
    ],
)
def test_each_end_has_its_exit_code_and_its_sentence(case, code, words):
    """A script asks the exit code, a person reads the sentence; they never disagree."""
    found, sentence = judged(**case)
    assert found == code
    assert words in sentence


@pytest.mark.parametrize("budget", [{"env_steps": 500_000}, {"wall_seconds": 120.0}])
def test_a_spent_budget_is_called_not_solved_only_where_there_is_a_target(budget):
    _, sentence = judged(**budget, mean100=None)
    assert sentence.startswith("the budget of")
    assert judged(**budget) == (0, f"not solved: {sentence}")


@pytest.mark.parametrize(
    ("target", "scores", "ended"),
    [
        ({"mean100": 475.0, "evaluation": None}, {"mean100": 475.0, "evaluation": None}, True),
        ({"mean100": 475.0, "evaluation": None}, {"mean100": 480.0, "evaluation": None}, False),
        ({"mean100": 475.0, "evaluation": None}, {"mean100": 475.0, "evaluation": 490.0}, False),
        ({"mean100": 475.0, "evaluation": None}, {"env_steps": 9}, True),
        (None, {"mean100": 480.0, "evaluation": None}, True),  # a summary of a version that did not write its target
    ],
)
def test_a_target_that_was_reached_is_the_end_while_it_is_still_the_target(target, scores, ended):
    summary = {"solved": True} | ({"target": target} if target else {})
    assert bool(own_end(summary, scores)) == ended


def test_the_last_lines_say_what_came_out_and_what_to_do_next(tmp_path):
    text = "\n".join(final_lines("stopped", SUMMARY, run_dir=tmp_path, go_on="rookery train --resume --run-dir R"))
    for fact in ("500,000 env steps in 0:02:05", "mean100 17.2", "18.5 over 10 episodes", str(tmp_path), "--resume --run-dir"):
        assert fact in text
    silent = "\n".join(final_lines("solved", None, run_dir=tmp_path))
    assert "--resume" not in silent


def test_a_program_that_shows_curves_is_named_where_it_has_files(tmp_path):
    assert not any("tensorboard" in line for line in final_lines("solved", SUMMARY, run_dir=tmp_path))
    (tmp_path / "tensorboard").mkdir()
    assert f"  look closer    tensorboard --logdir {tmp_path}" in final_lines("solved", SUMMARY, run_dir=tmp_path)


@pytest.mark.parametrize(("name", "remark"), MEAN_REMARKS)
@pytest.mark.parametrize("count", [3, 0])
def test_a_result_says_why_its_mean_is_one_over_short_episodes(tmp_path, count, name, remark):
    text = "\n".join(final_lines("not solved", SUMMARY | {"mean100_episodes": 100, name: count}, run_dir=tmp_path))
    assert (remark in text) == (count == 3)


@pytest.mark.parametrize(("solved", "target", "remark"), [(True, 18.6, True), (True, 18.5, False), (False, 20.0, False)])
def test_an_evaluation_below_the_target_that_training_reached_is_named(tmp_path, solved, target, remark):
    """Training episodes reach a target by luck, or because those that end first are the good ones."""
    summary = SUMMARY | {"solved": solved, "target": {"mean100": target, "evaluation": None}}
    text = "\n".join(final_lines("solved", summary, run_dir=tmp_path))
    assert ("below the target of 18.6: rookery evaluate" in text) == remark


def test_an_evaluation_just_below_the_target_has_more_digits(tmp_path):
    summary = SUMMARY | {"solved": True, "mean100": 475.04, "target": {"mean100": 475.0, "evaluation": None}}
    summary["last_evaluation"] = summary["last_evaluation"] | {"mean": 474.97}
    text = "\n".join(final_lines("solved", summary, run_dir=tmp_path))
    assert "mean100 475.04" in text
    assert "last evaluation 474.97 over" in text
    assert "below the target of 475:" in text


@pytest.mark.parametrize("final", [9, 3900])
def test_an_evaluation_that_is_not_of_the_final_policy_says_so(tmp_path, final):
    """Whole episodes may take longer than the end of a run waits for them."""
    text = "\n".join(final_lines("not solved", SUMMARY | {"version": final}, run_dir=tmp_path))
    assert ("of v9, not of the final v3900" in text) == (final == 3900)


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_run_that_can_be_repeated_shows_what_it_must_come_to_again(tmp_path, reproducible):
    """Two runs in lockstep are compared with one look; other hashes agree with nothing, and are not shown."""
    summary = SUMMARY | {"reproducible": reproducible, "parameters_sha256": "ab" * 32}
    text = "\n".join(final_lines("solved", summary, run_dir=tmp_path))
    assert ("sha256 " + "ab" * 32 in text) == reproducible


def test_what_was_lost_of_the_results_is_one_line(tmp_path):
    lines = list(final_lines("solved", SUMMARY, run_dir=tmp_path, lost="wandb did not get 7 points (LOG)"))
    assert "  lost           wandb did not get 7 points (LOG)" in lines
    lines = list(final_lines("solved", SUMMARY, run_dir=tmp_path))
    assert not [line for line in lines if line.startswith("  lost ")]


def test_a_summary_cut_short_counts_as_none(tmp_path):
    """Kill -9 while it was written."""
    assert read_summary(tmp_path / "summary.json") is None
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY)[:40])
    assert read_summary(tmp_path / "summary.json") is None
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    assert read_summary(tmp_path / "summary.json") == SUMMARY
