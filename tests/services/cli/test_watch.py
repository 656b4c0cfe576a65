"""The questions put to the services of a run, with the answers given by hand."""

from types import SimpleNamespace

import pytest

from services.cli import watch as watch_module
from services.cli.watch import Watch

pytestmark = pytest.mark.service

URLS = {"learner": "http://learner", "actor-0": "http://actor-0", "actor-1": "http://actor-1"}


@pytest.fixture
def world(monkeypatch):
    """Answers by address: `status` is the learner's, `phases` the seconds that each service has spent; None: it is away."""
    world = SimpleNamespace(status=None, phases={}, now=0.0)

    def metrics(url):
        name = url.removeprefix("http://")
        role = name.partition("-")[0]
        spent = world.phases.get(name)
        return spent and {(f"rookery_{role}_phase_seconds_total", phase): seconds for phase, seconds in spent.items()}

    monkeypatch.setattr(watch_module, "fetch_status", lambda _: world.status)
    monkeypatch.setattr(watch_module, "fetch_metrics", metrics)
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: world.now)
    return world


def test_before_the_learner_answers_the_run_is_starting(world):
    """The first seconds: Python imports, nobody listens."""
    assert Watch(URLS).ask().phase == "starting"


def test_what_the_learner_leaves_open_is_no_error(world):
    """Before the first episode and the first update most figures are null."""
    world.status = {"phase": "training", "mean100": None, "policy_lag": None, "last_evaluation": None, "env_steps": 0}
    status = Watch(URLS).ask()
    assert (status.phase, status.mean100, status.policy_lag.mean) == ("training", None, None)


def test_while_the_learner_is_restarted_its_last_figures_stay(world):
    """Somebody killed the learner: the panel shows where the run stood, and that the learner is away."""
    watch = Watch(URLS)
    world.status = {"phase": "training", "env_steps": 5000}
    watch.latest = watch.ask()
    world.status = None
    assert (watch.ask().phase, watch.ask().env_steps) == ("learner away", 5000)


@pytest.mark.parametrize("answer", [{"env_steps": "many"}, {"policy_lag": 3}, {"queue": []}])
def test_a_stranger_that_answers_for_the_learner_changes_nothing(world, answer):
    """Another program took the port while the learner was away, and speaks JSON too: the view keeps what it knows."""
    watch = Watch(URLS)
    world.status = {"phase": "training", "env_steps": 5000}
    watch.latest = watch.ask()
    world.status = answer
    assert watch.ask() == watch.latest


def test_the_bottleneck_is_that_of_the_last_seconds_not_of_the_whole_run(world):
    """An hour of training ended in starvation a while ago: what counts is now, over all actors, even if one is away."""
    watch = Watch(URLS)
    world.status = {"phase": "training"}
    for second in range(30):
        world.now = float(second)
        world.phases = {
            "learner": {"wait": 0.9 * second, "train": 3600.0 + 0.1 * second},
            "actor-0": {"env": 0.8 * second, "act": 0.2 * second, "credit_wait": 1800.0},
        }
        status = watch.ask()
    assert status.bottleneck.startswith("actor-bound: the learner waits 90 %")
    assert "80 % in the environment" in status.bottleneck


def test_the_thread_asks_until_the_run_ends(monkeypatch):
    """The view reads `latest` while the questions go on behind it."""
    watch, asked = Watch(URLS), []
    monkeypatch.setattr(watch_module, "PERIOD", 0.0)
    monkeypatch.setattr(watch, "ask", lambda: asked.append(1) or watch.latest)
    with watch:
        while len(asked) < 3:
            watch._ended.wait(0.001)
    watch._thread.join(10)
    assert not watch._thread.is_alive()
