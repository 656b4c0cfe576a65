"""The evaluator's benchmark without its processes: which runs it watches, and its figures on given windows."""

import pytest

from benchmarks import evaluator
from benchmarks.evaluator import Pair, benchmark, report
from benchmarks.pipeline import TRAINED, Window
from common.observability.deployment import EVALUATOR, LEARNER

pytestmark = pytest.mark.pure


def test_runs_are_measured_with_and_without_an_evaluator_in_turns(watched):
    """The order of the second pair is the other one, all runs are warm, and the evaluators play."""
    runs = watched(evaluator)
    pairs = benchmark("cartpole", ("algorithm.epochs=1",), repeats=2, seconds=1.0)
    assert [run.settings.evaluator.enabled for run in runs] == [False, True, True, False]
    assert [run.settings.evaluator.every_seconds for run in runs[1:3]] == [1.0, 1.0]
    assert all(run.settings.algorithm.epochs == 1 and run.warm >= run.settings.scale.batch_env_steps for run in runs)
    assert all(run.stepping for run in runs)
    for pair in pairs:
        assert EVALUATOR in pair.beside.growth
        assert EVALUATOR not in pair.without.growth
    assert "cost of the evaluator: 0.0%" in report(pairs)
    assert "its share of the core time: 16.7%" in report(pairs)


def test_a_replay_memory_is_warm_before_a_run_is_watched(watched):
    """Before its first gradient step a run is much faster, and the cost of the evaluator would be another one."""
    runs = watched(evaluator)
    benchmark("cartpole-dqn", (), repeats=1, seconds=1.0)
    assert all(run.warm == run.settings.algorithm.warmup + 8 * run.settings.scale.batch_env_steps for run in runs)


def test_the_cost_is_the_part_of_the_throughput_that_is_lost():
    """By hand: 950 env steps/s beside an evaluator instead of 1,000 alone are five percent."""
    alone = Window(seconds=1.0, growth={LEARNER: {TRAINED: 1000.0}})
    beside = Window(seconds=2.0, growth={LEARNER: {TRAINED: 1900.0}})
    assert Pair(without=alone, beside=beside).cost == pytest.approx(0.05)


def test_the_share_is_the_evaluators_part_of_all_core_time():
    """By hand: 0.1 of 2 core seconds."""
    spent = {LEARNER: 1.0, "actor-0": 0.9, EVALUATOR: 0.1}
    beside = Window(seconds=1.0, growth={child: {"process_cpu_seconds_total": seconds} for child, seconds in spent.items()})
    assert Pair(without=beside, beside=beside).share == pytest.approx(0.05)
