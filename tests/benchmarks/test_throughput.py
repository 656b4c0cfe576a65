"""The throughput benchmark at a tiny size: its figures mean what they say. How fast anything is, is not tested."""

import multiprocessing

import pytest

from benchmarks.parts import Parts, Worker
from benchmarks.pipeline import Window
from benchmarks.throughput import Result, account, benchmark, report
from common.runtime.config import load
from common.runtime.cpu import cores
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
    text = report(result) + account(result.parts[0], result.windows[0], actors=2)
    for words in ("env steps/s = ", "frames/s", "sampled", "env only", "pipeline / floor", "cores busy"):
        assert words in text


@pytest.mark.parametrize("name", ["cartpole-a3c-grad", "cartpole-dqn", "pendulum-td3"])
def test_parts_of_every_kind_of_learner_can_be_measured(name):
    """Gradients made by actors, a replay memory past its warm-up, continuous actions: each has its own cost of training."""
    settings = load(preset=name, overrides=("algorithm.warmup=256",) * ("grad" not in name), environ={}).settings
    measured = multiprocessing.Queue()
    Worker(settings, seconds=0.05, barrier=multiprocessing.Barrier(1), results=measured)()
    assert min(measured.get()) > 0.0


def test_the_floor_is_cores_over_the_sum_of_costs():
    """By hand: parts of 100, 150, 50 and 200 us leave each core 2,000 env steps/s.

    1,500 on each are three quarters. 625 us of all processes for the 500 us of the parts are four fifths.
    """
    parts = Parts(env=1e-4, act=1.5e-4, make=0.5e-4, train=2e-4, trainer=2e-4)
    assert parts.floor(actors=100) == pytest.approx(min(2000 * cores(), 5000))
    trained = 1.5 * parts.floor(actors=100)
    growth = {LEARNER: {"rookery_learner_env_steps_trained_total": trained, "process_cpu_seconds_total": 6.25e-4 * trained}}
    window = Window(seconds=2.0, growth=growth)
    result = Result(parts=[parts], windows=[window], frame_skip=4, actors=100)
    assert result.ratio == pytest.approx(0.75)
    assert result.core_time == pytest.approx(0.8)


def test_the_floor_is_no_higher_than_one_learner_or_the_actors_allow():
    """By hand: training alone takes a millisecond of the one learner; in the other case acting takes one of the one actor."""
    assert Parts(env=1e-9, act=1e-9, make=1e-9, train=1e-3, trainer=1e-3).floor(actors=8) == pytest.approx(1000)
    assert Parts(env=5e-4, act=4e-4, make=1e-4, train=1e-9, trainer=1e-9).floor(actors=1) == pytest.approx(1000)


def test_a_partner_in_training_shares_the_cores_and_not_the_learners_own_process():
    """By hand: 2 ms in two processes leave the first one 1,000 env steps/s, and each core 500."""
    floor = Parts(env=1e-9, act=1e-9, make=1e-9, train=2e-3, trainer=1e-3).floor(actors=8)
    assert floor == pytest.approx(min(1000, 500 * cores()), rel=1e-5)
