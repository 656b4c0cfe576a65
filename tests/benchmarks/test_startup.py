"""The benchmark of starts without its processes: its table of given figures."""

import pytest

from benchmarks.startup import COMMAND, CORE_TIME, OTHER, STARTS, STEP, table
from common.observability.deployment import LEARNER

pytestmark = pytest.mark.pure


def test_the_table_has_the_least_and_the_median_of_each_figure_and_the_sum_of_core_times():
    """By hand: 1 + 2 and 3 + 4 core seconds are 3 at least and 5 in the median."""
    starts = [
        {(COMMAND, CORE_TIME): 1.0, (LEARNER, CORE_TIME): 2.0, (LEARNER, STARTS): 0.5, ("actor-0", STEP): 4.0, (OTHER, ""): 0.25},
        {(COMMAND, CORE_TIME): 3.0, (LEARNER, CORE_TIME): 4.0, (LEARNER, STARTS): 0.7, ("actor-0", STEP): 6.0, (OTHER, ""): 0.75},
    ]
    _, _, command, learner, actor, total = table(starts).splitlines()
    assert command == "| rookery train |  |  |  |  |  | 1.00 / 2.00 |"
    assert learner == "| learner | 0.50 / 0.60 |  |  |  |  | 2.00 / 3.00 |"
    assert actor == "| actor-0 |  |  |  | 4.00 / 5.00 |  |  |"
    assert total.startswith("core time of all: 3.00 / 5.00; other cores busy: 0.50 of ")
