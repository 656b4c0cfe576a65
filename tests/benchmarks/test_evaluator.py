"""The evaluator's benchmark at a tiny size: both kinds of run are measured. What the evaluator costs is not tested."""

import pytest

from benchmarks.evaluator import Pair, benchmark, report
from benchmarks.pipeline import TRAINED, Window
from services.cli.supervisor import EVALUATOR, LEARNER

pytestmark = pytest.mark.system


def test_a_run_is_measured_with_and_without_its_evaluator():
    """One pair on CartPole: only one of the two runs has an evaluator, and both train."""
    (pair,) = benchmark("cartpole", ("algorithm.epochs=1",), repeats=1, seconds=1.0)
    assert EVALUATOR in pair.beside.growth
    assert EVALUATOR not in pair.without.growth
    assert min(pair.beside.trained_per_second, pair.without.trained_per_second) > 0.0
    assert "share of the core time" in report([pair])


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
