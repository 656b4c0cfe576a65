"""The throughput benchmark at a tiny size: its figures mean what they say. How fast anything is, is not tested."""

import pytest

from benchmarks.parts import Parts, cores
from benchmarks.pipeline import Window
from benchmarks.throughput import Result, account, benchmark, report
from services.cli.supervisor import LEARNER

pytestmark = pytest.mark.system

TINY = ("env.num_envs=2", "rollout.length=8", "algorithm.minibatch=16", "learner.credits=1", "actor.count=2")


@pytest.fixture(scope="module")
def result():
    """One repetition with the small network."""
    return benchmark("pong", TINY, repeats=1, seconds=1.0, part_seconds=0.2)


def test_parts_and_pipeline_are_measured_in_one_run(result):
    """`make bench` on any machine: each part costs something, and the pipeline trains on what its actors sample."""
    (parts,), (window,) = result.parts, result.windows
    assert min(parts) > 0.0
    assert window.trained_per_second > 0.0
    assert 0.3 < window.sampled_per_second / window.trained_per_second < 3.0  # credits hold them together
    assert set(window.growth) == {LEARNER, "actor-0", "actor-1"}
    assert result.frame_skip == 4


def test_each_process_accounts_for_its_phases(result):
    """Who asks where the time went finds every phase of every process, the busiest among them not at zero."""
    (window,) = result.windows
    assert set(window.phases(LEARNER)) == {"wait", "collate", "train", "publish", "checkpoint"}
    assert set(window.phases("actor-0")) == {"env", "act", "experience", "encode", "credit_wait", "snapshot"}
    assert window.phases(LEARNER)["train"] > 0.0
    assert all(seconds >= 0.0 for seconds in window.cpu_seconds().values())


def test_the_report_shows_all_four_units(result):
    """What goes into the table of results."""
    text = report(result) + account(result.parts[0], result.windows[0])
    for words in ("env steps/s = ", "frames/s", "sampled", "env only", "pipeline / floor", "cores busy"):
        assert words in text


def test_the_floor_is_cores_over_the_sum_of_costs():
    """By hand: parts of 100, 200 and 200 us leave each core 2,000 env steps/s; a pipeline of 1,500 on each is three quarters."""
    parts = Parts(env=1e-4, act=2e-4, train=2e-4)
    assert parts.floor == pytest.approx(2000 * cores())
    growth = {LEARNER: {"rookery_learner_env_steps_trained_total": 3000.0 * cores()}}
    window = Window(seconds=2.0, growth=growth)
    assert Result(parts=[parts], windows=[window], frame_skip=4).ratio == pytest.approx(0.75)
