"""The throughput benchmark at a tiny size: its results are consistent. Speed is not tested."""

import multiprocessing

import pytest

from benchmarks.part_costs import PartCosts, Worker
from benchmarks.pipeline import Window
from benchmarks.throughput import Result, account, benchmark, report
from common.config.load import load_settings
from common.observability.deployment import LEARNER
from common.observability.learner_stats import PHASES
from common.runtime.machine import cores

pytestmark = pytest.mark.system

TINY = ("env.num_envs=2", "rollout.length=8", "algorithm.minibatch=16", "learner.credits=1", "actor.count=2")


@pytest.fixture(scope="module")
def result(least):
    """One repetition with the small network, over ten updates."""
    with least(320):
        return benchmark("pong", TINY, repeats=1, seconds=0.0, part_seconds=0.2)


def test_parts_and_pipeline_are_measured_in_one_run(result):
    """`make bench` on any machine: each part costs something, and the pipeline trains on what its actors sample."""
    (parts,), (window,) = result.parts, result.windows
    assert min(parts) > 0.0
    assert window.trained_per_second > 0.0
    assert window.sampled_per_second > 0.0
    assert set(window.growth) == {LEARNER, "actor-0", "actor-1"}
    assert result.frame_skip == 4


def test_each_process_accounts_for_its_phases(result):
    """Each phase of each process has a time; that of training is above zero."""
    (window,) = result.windows
    assert set(window.phases(LEARNER)) == set(PHASES)
    assert set(window.phases("actor-0")) == {"env", "act", "experience", "encode", "credit_wait", "snapshot"}
    assert window.phases(LEARNER)["train"] > 0.0
    assert all(seconds >= 0.0 for seconds in window.cpu_seconds().values())


def test_the_report_shows_all_four_units(result):
    text = report(result) + account(result.parts[0], result.windows[0], actors=2)
    for words in ("env steps/s = ", "frames/s", "sampled", "env only", "pipeline / floor", "cores busy"):
        assert words in text


@pytest.mark.parametrize("name", ["cartpole-a3c-grad", "cartpole-pqn", "cartpole-dqn", "pendulum-td3"])
def test_parts_of_every_kind_of_learner_can_be_measured(name):
    """Gradients made by actors, a replay memory past its warm-up, continuous actions: each has its own cost of training."""
    settings = load_settings(
        preset=name, overrides=("algorithm.warmup=256",) * (name in {"cartpole-dqn", "pendulum-td3"}), environ={}
    ).settings
    measured = multiprocessing.Queue()
    Worker(settings, seconds=0.05, barrier=multiprocessing.Barrier(1), results=measured)()
    assert min(measured.get()) > 0.0


def test_the_floor_is_cores_over_the_sum_of_costs():
    """By hand: parts of 100, 150, 50 and 200 us leave each core 2,000 env steps/s.

    1,500 on each are three quarters. 625 us of all processes for the 500 us of the parts are four fifths.
    """
    parts = PartCosts(env=1e-4, act=1.5e-4, make=0.5e-4, train=2e-4)
    assert parts.floor(actors=100) == pytest.approx(min(2000 * cores(), 5000))
    trained = 1.5 * parts.floor(actors=100)
    growth = {LEARNER: {"rookery_learner_env_steps_trained_total": trained, "process_cpu_seconds_total": 6.25e-4 * trained}}
    window = Window(seconds=2.0, growth=growth)
    result = Result(parts=[parts], windows=[window], frame_skip=4, actors=100)
    assert result.ratio == pytest.approx(0.75)
    assert result.core_time == pytest.approx(0.8)


def test_the_floor_is_no_higher_than_one_learner_or_the_actors_allow():
    """By hand: training alone takes a millisecond of the one learner; in the other case acting takes one of the one actor."""
    assert PartCosts(env=1e-9, act=1e-9, make=1e-9, train=1e-3).floor(actors=8) == pytest.approx(1000, rel=1e-5)
    assert PartCosts(env=5e-4, act=4e-4, make=1e-4, train=1e-9).floor(actors=1) == pytest.approx(1000, rel=1e-5)
