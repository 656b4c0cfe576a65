"""The scaling benchmark at a tiny size: its environment and its page. Speed is not tested."""

import pytest

from benchmarks import scaling
from benchmarks.pipeline import CPU, TRAINED, Window
from common.observability.deployment import LEARNER

pytestmark = pytest.mark.service


def test_a_run_has_the_actors_asked_for_on_the_environment_that_sleeps(watched):
    runs = watched(scaling)
    window = scaling.measured(3, seconds=2.0)
    (run,) = runs
    assert (run.settings.actor.count, run.settings.env.entry_point) == (3, "benchmarks.scaling:SleepingEnv")
    assert window.trained_per_second == 100.0


def test_the_page_multiplies_by_the_smallest_number_of_actors():
    windows = {n: Window(seconds=2.0, growth={LEARNER: {TRAINED: 2 * rate, CPU: 1.0}}) for n, rate in ((2, 96.0), (32, 1440.0))}
    text = scaling.report(windows)
    assert "| 2 | 96 | 2.0 | 0.50 of" in text
    assert "| 32 | 1,440 | 30.0 | 0.50 of" in text
    assert "| 90% |" in text


def test_an_episode_ends_with_its_length(monkeypatch):
    monkeypatch.setattr(scaling, "STEP", 0.0)
    env = scaling.SleepingEnv()
    env.reset(seed=1)
    ends = [env.step(0)[2] for _ in range(scaling.EPISODE)]
    assert ends == [False] * (scaling.EPISODE - 1) + [True]
