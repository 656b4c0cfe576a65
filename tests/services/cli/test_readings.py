"""What two scrapes make of the time between them."""

import math

import pytest

from common.runtime.bottleneck import Kind
from services.cli.readings import Reading, Service, compare, role_of

pytestmark = pytest.mark.pure


def reading(role="actor", at=100.0, **samples):
    """One scrape: `name=value`, or `name={label: value}`."""
    found = {}
    for name, value in samples.items():
        full = name if name.startswith("process_") else f"rookery_{role}_{name}"
        for label, number in (value if isinstance(value, dict) else {"": value}).items():
            found[full, label] = number
    return Reading(at=at, role=role, samples=found)


def service(before, after):
    """The actor between two scrapes, ten seconds apart."""
    (found,) = compare({"one": reading(**before)}, {"one": reading(at=110.0, **after)}).services
    return found


def test_counters_become_growth_and_rates():
    """The ordinary case."""
    actor = service({"env_steps_total": 1000}, {"env_steps_total": 1500})
    assert (actor.seconds, actor.grew("env_steps_total"), actor.rate("env_steps_total")) == (10.0, 500, 50.0)


def test_a_process_that_began_again_has_counted_from_zero():
    """An actor was killed and replaced within the window: its rate is low, not negative, and it is said."""
    actor = service(
        {"env_steps_total": 1000, "process_start_time_seconds": 5.0},
        {"env_steps_total": 200, "process_start_time_seconds": 105.0},
    )
    assert actor.grew("env_steps_total") == 200
    assert actor.restarted
    assert not service({"process_start_time_seconds": 5.0}, {"process_start_time_seconds": 5.0}).restarted
    assert not service({}, {"env_steps_total": 1}).restarted  # elsewhere than on Linux nobody knows


def test_what_a_service_does_not_have_is_unknown_and_does_not_grow():
    """An older release lacks a metric: no figure, no exception."""
    actor = service({"env_steps_total": 1}, {"env_steps_total": 1})
    assert math.isnan(actor.now("policy_version"))
    assert (actor.grew("reconnects_total"), actor.shares, actor.rate("reconnects_total")) == (0.0, {}, 0.0)


def test_phases_are_shares_of_the_window_alone():
    """An hour of waiting before does not count."""
    actor = service(
        {"phase_seconds_total": {"env": 10.0, "credit_wait": 3600.0}},
        {"phase_seconds_total": {"env": 18.0, "credit_wait": 3602.0}},
    )
    assert actor.shares == {"env": 0.8, "credit_wait": 0.2}


def test_a_histogram_gives_the_mean_of_the_window():
    """Two messages of lag 4 each came after a hundred without."""
    learner = service(
        {"policy_lag_versions_sum": 0.0, "policy_lag_versions_count": 100.0},
        {"policy_lag_versions_sum": 8.0, "policy_lag_versions_count": 102.0},
    )
    assert learner.mean("policy_lag_versions") == 4.0
    assert math.isnan(service({}, {}).mean("policy_lag_versions"))


def test_who_comes_has_nothing_to_compare_and_who_leaves_is_silent():
    """A Prometheus forgets a target that is gone, and knows a new one only now."""
    old, new = reading(env_steps_total=1), reading(at=110.0, env_steps_total=1)
    fleet = compare({"old": old}, {"new": new})
    assert [(one.name, one.measured, one.after.silence) for one in fleet.services] == [
        ("old", False, "it is gone"), ("new", False, ""),
    ]  # fmt: skip
    assert fleet.actors == []


def test_a_service_is_known_by_what_it_exports():
    """An address says nothing of the role."""
    assert [role_of({(f"rookery_{role}_policy_version", ""): 1.0}) for role in ("learner", "actor", "evaluator")] == [
        "learner", "actor", "evaluator",
    ]  # fmt: skip
    assert role_of({("node_cpu_seconds_total", "0"): 1.0}) == ""


@pytest.mark.parametrize(
    ("name", "role", "title"),
    [
        ("actor-0", "actor", "actor-0"),
        ("10.0.0.7:9100", "learner", "learner 10.0.0.7:9100"),
        ("10.0.0.7:9100", "", "10.0.0.7:9100"),
    ],
)
def test_a_title_tells_the_role_once(name, role, title):
    """A run's own names hold it, addresses do not, and of who never answered nobody knows it."""
    assert Service(name=name, role=role, before=Reading(at=0.0), after=Reading(at=0.0)).title == title


def waiting(*, queued, under_way, actors=2, connected=2):
    """A run in which both sides wait; `under_way` seconds of each actor's messages, `queued` of all in the queue."""
    learner = {"phase_seconds_total": {"wait": 6.0, "train": 4.0}, "queue_seconds_total": queued}
    actor = {"phase_seconds_total": {"credit_wait": 5.0, "env": 5.0}, "unacknowledged_seconds_total": under_way}
    names = [f"actor-{number}" for number in range(actors)]
    before = {"learner": reading("learner", phase_seconds_total={"wait": 0.0, "train": 0.0}, queue_seconds_total=0.0)}
    before |= {
        name: reading(phase_seconds_total={"credit_wait": 0.0, "env": 0.0}, unacknowledged_seconds_total=0.0) for name in names
    }
    after = {"learner": reading("learner", at=110.0, peers_connected={"actor": connected}, **learner)}
    return compare(before, after | {name: reading(at=110.0, **actor) for name in names})


def test_what_is_not_in_the_queue_is_on_the_wire():
    """Two actors with ten message-seconds each under way, of which the queue had two."""
    assert waiting(queued=2.0, under_way=10.0).wire == 0.9
    assert waiting(queued=2.0, under_way=10.0).bottleneck.kind is Kind.NETWORK
    assert waiting(queued=19.0, under_way=10.0).bottleneck.kind is Kind.PACE
    assert waiting(queued=25.0, under_way=10.0).wire == 0.0  # the two were not asked at the same moment


def test_while_some_actors_are_unknown_so_is_the_wire():
    """The queue holds messages of the third actor too, whom nobody asked: no share can be told."""
    assert waiting(queued=2.0, under_way=10.0, connected=3).wire == 0.0
    assert waiting(queued=2.0, under_way=0.0).wire == 0.0
