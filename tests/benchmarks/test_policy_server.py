"""The benchmark of policy servers without its processes: its runs and its page. Speed is not tested."""

import pytest

from benchmarks import policy_server

pytestmark = pytest.mark.service


@pytest.mark.parametrize(
    ("way", "actors", "workers"), list(zip(policy_server.WAYS, (2, 1, 2), (0, 2, 1), strict=True)), ids=("actors", "one", "two")
)
def test_every_way_steps_the_same_number_of_environments(watched, way, actors, workers):
    runs = watched(policy_server)
    assert policy_server.measured(way, seconds=2.0) == 100.0
    (run,) = runs
    assert (run.settings.actor.count, run.settings.policy_server.workers) == (actors, workers)
    assert run.settings.actor.count * run.settings.env.num_envs == 16


def test_the_page_compares_medians_with_the_actors():
    text = policy_server.report({"two actors": [100.0, 90.0, 300.0], "one policy server": [120.0]})
    assert "| one policy server | 120 | 120 | 1.20 |" in text
