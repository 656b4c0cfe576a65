"""Polls of the services of a run, with answers written out."""

import threading
from types import SimpleNamespace

import pytest

from common.observability.learner_metrics import MESSAGES_DROPPED
from common.observability.worker_metrics import EVALUATOR_EPISODES_PLAYING
from services.cli.train import status as status_module
from services.cli.train.status import StatusPoller

pytestmark = pytest.mark.service

URLS = {"learner": "http://learner", "actor-0": "http://actor-0", "actor-1": "http://actor-1"}


@pytest.fixture
def world(monkeypatch):
    """Answers by address: `status` is the learner's, `phases` the seconds that each service has spent; None: no answer."""
    world = SimpleNamespace(status=None, others={}, refused={}, phases={}, now=0.0)

    def metrics(url):
        name = url.removeprefix("http://")
        if name in world.refused:
            return {(MESSAGES_DROPPED.name, "non_finite"): world.refused[name]}
        if name == "evaluator":
            return {(EVALUATOR_EPISODES_PLAYING.name, ""): 7.0}
        role = name.partition("-")[0]
        spent = world.phases.get(name)
        updates = {("rookery_learner_updates_total", ""): world.now} if role == "learner" else {}
        return spent and updates | {(f"rookery_{role}_phase_seconds_total", phase): seconds for phase, seconds in spent.items()}

    monkeypatch.setattr(
        status_module, "fetch_status", lambda url: world.status if url == URLS["learner"] else world.others.get(url)
    )
    monkeypatch.setattr(status_module, "fetch_metrics", metrics)
    monkeypatch.setattr(status_module.time, "monotonic", lambda: world.now)
    return world


def test_before_the_learner_answers_the_run_is_starting(world):
    """The first seconds: Python imports, nobody listens."""
    assert StatusPoller(URLS).poll().phase == "starting"


@pytest.mark.parametrize(("urls", "playing"), [({"evaluator": "http://evaluator"}, 7), ({}, 0)])
def test_the_episodes_that_the_evaluator_still_plays_are_in_the_status(world, urls, playing):
    world.status = {"phase": "evaluating"}
    assert StatusPoller(URLS | urls).poll().episodes_playing == playing


def test_what_the_learner_leaves_open_is_no_error(world):
    """Before the first episode and the first update most values are null."""
    world.status = {"phase": "training", "mean100": None, "policy_lag": None, "last_evaluation": None, "env_steps": 0}
    status = StatusPoller(URLS).poll()
    assert (status.phase, status.mean100, status.policy_lag.mean) == ("training", None, None)


def test_while_the_learner_is_restarted_its_last_values_stay(world):
    """The learner was killed: the panel shows where the run stood, and that the learner is unreachable."""
    poller = StatusPoller(URLS)
    world.status = {"phase": "training", "env_steps": 5000}
    poller.latest = poller.poll()
    world.status = None
    assert (poller.poll().phase, poller.poll().env_steps) == ("learner unreachable", 5000)


@pytest.mark.parametrize("phase", ["stopping", "finished"])
def test_a_learner_that_ends_as_it_should_is_not_unreachable(world, phase):
    """Its HTTP port closes before its process ends."""
    poller = StatusPoller(URLS)
    world.status = {"phase": phase, "env_steps": 5000}
    poller.latest = poller.poll()
    world.status = None
    assert poller.poll().phase == phase


@pytest.mark.parametrize("answer", [{"env_steps": "many"}, {"policy_lag": 3}, {"queue": []}])
def test_another_program_that_answers_for_the_learner_changes_nothing(world, answer):
    """Another program took the port while the learner was down, and answers with JSON too: the view keeps what it knows."""
    poller = StatusPoller(URLS)
    world.status = {"phase": "training", "env_steps": 5000}
    poller.latest = poller.poll()
    world.status = answer
    assert poller.poll() == poller.latest


def test_the_bottleneck_is_that_of_the_last_seconds_not_of_the_whole_run(world):
    """An hour of training ended with a waiting learner a while ago: what counts is now, over all actors that answer."""
    poller = StatusPoller(URLS)
    world.status = {"phase": "training"}
    for second in range(30):
        world.now = float(second)
        world.phases = {
            "learner": {"wait": 0.9 * second, "train": 3600.0 + 0.1 * second},
            "actor-0": {"env": 0.8 * second, "act": 0.2 * second, "credit_wait": 1800.0},
        }
        status = poller.poll()
    assert status.bottleneck.startswith("actor-bound: the learner waits 90 %")
    assert "80 % in the environment" in status.bottleneck


RANKS = {"learner": "http://learner", "learner-1": "http://learner-1", "actor-0": "http://actor-0"}


def of_rank(trained, *, refused=0):
    """The answer of one rank, which has refused so many messages of 8 env steps."""
    dropped = {"non_finite": 8 * refused}
    ledger = {"produced": trained + 8 * refused, "trained": trained, "queued": 0, "in_flight": 0, "dropped": dropped}
    return {"phase": "training", "workers": {"actor": 1}, "queue": {"depth": 0, "capacity": 4}, "ledger": ledger}


def test_a_rank_that_does_not_answer_for_a_moment_keeps_its_part_of_the_sums(world):
    """A sum that falls and grows again would count as experience that was accepted."""
    poller = StatusPoller(RANKS)
    world.status, world.others = of_rank(100), {"http://learner-1": of_rank(60)}
    assert poller.poll().ledger.accepted == 160
    world.status, world.others = of_rank(120), {}
    status = poller.poll()
    assert (status.ledger.accepted, status.workers["actor"], status.queue.capacity) == (180, 2, 8)
    world.others = {"http://learner-1": {"another": "program"}}
    assert poller.poll().ledger.accepted == 180


def test_the_policy_lag_is_that_of_the_env_steps_of_all_ranks(world):
    """Rank 0 has no actors, or those that are faster."""
    poller = StatusPoller(RANKS)
    none = {"min": None, "mean": None, "max": None}
    other = of_rank(300) | {"policy_lag": {"min": 2, "mean": 4.0, "max": 9}}
    world.status, world.others = of_rank(0) | {"policy_lag": none}, {"http://learner-1": other}
    assert poller.poll().policy_lag.model_dump() == {"min": 2, "mean": 4.0, "max": 9}
    world.status = of_rank(100) | {"policy_lag": {"min": 0, "mean": 0.0, "max": 1}}
    assert poller.poll().policy_lag.model_dump() == {"min": 0, "mean": 3.0, "max": 9}
    world.status, world.others["http://learner-1"] = of_rank(0) | {"policy_lag": none}, of_rank(0)
    assert poller.poll().policy_lag.mean is None


def test_refusals_of_all_ranks_are_in_the_status_also_while_one_does_not_answer(world):
    """Rank 0 refuses nothing, and all experience of rank 1's actors is refused."""
    poller = StatusPoller(RANKS)
    world.status, world.others = of_rank(100), {"http://learner-1": of_rank(0, refused=5)}
    world.refused = {"learner": 0, "learner-1": 5}
    assert poller.poll().refused_messages == 5
    world.refused = {"learner": 2}
    assert poller.poll().refused_messages == 7


def test_a_page_that_no_parser_foresaw_does_not_end_the_thread(world, monkeypatch):
    """A page of brackets alone ends in a RecursionError; the next poll has the learner again."""
    asked = threading.Event()

    def fetch(_):
        if not asked.is_set():
            asked.set()
            raise RecursionError
        return {"phase": "training", "env_steps": 5000}

    monkeypatch.setattr(status_module, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(status_module, "fetch_status", fetch)
    answered = threading.Event()
    poll = StatusPoller.poll

    def poll_and_say(poller):
        status = poll(poller)
        answered.set()
        return status

    monkeypatch.setattr(StatusPoller, "poll", poll_and_say)
    with StatusPoller({"learner": URLS["learner"]}):
        assert answered.wait(60.0)


def test_the_thread_asks_until_the_run_ends(monkeypatch):
    """The view reads `latest` while the questions go on behind it."""
    poller, asked = StatusPoller(URLS), []
    monkeypatch.setattr(status_module, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(poller, "poll", lambda: asked.append(1) or poller.latest)
    with poller:
        while len(asked) < 3:
            poller._ended.wait(0.001)
    poller._thread.join(120)
    assert not poller._thread.is_alive()
