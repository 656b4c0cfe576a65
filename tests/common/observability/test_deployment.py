"""Rates, shares and the bottleneck between two scrapes."""

import math

import pytest

from common.observability.bottleneck import Kind
from common.observability.deployment import JOBS, Service, ServiceSample, compare, role_of
from common.observability.env_metrics import ENV_WORKER_METRICS, POLICY_SERVER_METRICS
from common.observability.learner_metrics import ENV_STEPS_TRAINED, LEDGER_ENV_STEPS, METRICS, WORKERS_CONNECTED
from common.observability.worker_metrics import ACTOR_ENV_STEPS as ENV_STEPS
from common.observability.worker_metrics import ACTOR_METRICS, EVALUATOR_METRICS
from common.observability.worker_metrics import ACTOR_POLICY_LAG as POLICY_LAG
from common.observability.worker_metrics import ACTOR_POLICY_VERSION as POLICY_VERSION
from common.observability.worker_metrics import ACTOR_RECONNECTS as RECONNECTS

pytestmark = pytest.mark.pure


def reading(role="actor", at=100.0, **samples):
    """One scrape: `name=value`, or `name={label: value}`."""
    found = {}
    for name, value in samples.items():
        full = name if name.startswith("process_") else f"rookery_{role}_{name}"
        for label, number in (value if isinstance(value, dict) else {"": value}).items():
            found[full, label] = number
    return ServiceSample(at=at, role=role, samples=found)


def service(before, after):
    """The actor between two scrapes, ten seconds apart."""
    (found,) = compare({"one": reading(**before)}, {"one": reading(at=110.0, **after)}).services
    return found


def test_counters_become_growth_and_rates():
    """The ordinary case."""
    actor = service({"env_steps_total": 1000}, {"env_steps_total": 1500})
    assert (actor.seconds, actor.grew(ENV_STEPS), actor.rate(ENV_STEPS)) == (10.0, 500, 50.0)


def test_a_process_that_began_again_has_counted_from_zero():
    """An actor was killed and replaced within the window: its rate is low, not negative, and it is said."""
    actor = service(
        {"env_steps_total": 1000, "process_start_time_seconds": 5.0},
        {"env_steps_total": 200, "process_start_time_seconds": 105.0},
    )
    assert actor.grew(ENV_STEPS) == 200
    assert actor.restarted
    assert not service({"process_start_time_seconds": 5.0}, {"process_start_time_seconds": 5.0}).restarted
    assert not service({}, {"env_steps_total": 1}).restarted  # elsewhere than on Linux nobody knows


def test_what_a_service_does_not_have_is_unknown_and_does_not_grow():
    """An older release lacks a metric: no figure, no exception."""
    actor = service({"env_steps_total": 1}, {"env_steps_total": 1})
    assert math.isnan(actor.now(POLICY_VERSION))
    assert (actor.grew(RECONNECTS), actor.shares, actor.rate(RECONNECTS)) == (0.0, {}, 0.0)


def test_phases_are_shares_of_the_window_alone():
    """An hour of waiting before does not count."""
    actor = service(
        {"phase_seconds_total": {"env": 10.0, "credit_wait": 3600.0}},
        {"phase_seconds_total": {"env": 18.0, "credit_wait": 3602.0}},
    )
    assert actor.shares == {"env": 0.8, "credit_wait": 0.2}


def test_a_summary_gives_the_mean_of_the_window():
    """Two messages of lag 4 each came after a hundred without."""
    learner = service(
        {"policy_lag_versions_sum": 0.0, "policy_lag_versions_count": 100.0},
        {"policy_lag_versions_sum": 8.0, "policy_lag_versions_count": 102.0},
    )
    assert learner.mean(POLICY_LAG) == 4.0
    assert math.isnan(service({}, {}).mean(POLICY_LAG))


def test_a_new_service_has_nothing_to_compare_and_a_worker_that_was_taken_away_is_no_fault():
    """A Prometheus forgets a target that is gone, and knows a new one only now. A learner that is gone is a fault."""
    old, new, learner = reading(env_steps_total=1), reading(at=110.0, env_steps_total=1), reading(role="learner")
    fleet = compare({"old": old, "learner": learner}, {"new": new})
    assert [(one.name, one.measured, one.after.unreachable) for one in fleet.services] == [
        ("learner", False, "it is gone"), ("new", False, ""),
    ]  # fmt: skip
    assert fleet.actors == []


def test_a_service_is_known_by_what_it_exports():
    """An address says nothing of the role."""
    assert role_of({("node_cpu_seconds_total", "0"): 1.0, ("rookery_build_info", "1"): 1.0}) == ""
    metrics = {
        "learner": METRICS, "actor": ACTOR_METRICS, "policy-server": POLICY_SERVER_METRICS, "evaluator": EVALUATOR_METRICS,
        "env-worker": ENV_WORKER_METRICS,
    }  # fmt: skip
    assert {job: role_of({(metric.name, ""): 1.0 for metric in exported}) for job, exported in metrics.items()} == JOBS


@pytest.mark.parametrize(
    ("name", "role", "title"),
    [
        ("actor-0", "actor", "actor-0"),
        ("10.0.0.7:9100", "learner", "learner 10.0.0.7:9100"),
        ("10.0.0.7:9100", "env_worker", "env worker 10.0.0.7:9100"),
        ("10.0.0.7:9100", "", "10.0.0.7:9100"),
    ],
)
def test_a_title_names_the_role_once(name, role, title):
    """Names of a run contain it, addresses do not, and that of a service that never answered is not known."""
    assert Service(name=name, role=role, before=ServiceSample(at=0.0), after=ServiceSample(at=0.0)).title == title


def waiting(*, queued, under_way, actors=2, connected=2):
    """A run in which both sides wait; `under_way` seconds of each actor's messages, `queued` of all in the queue."""
    learner = {"phase_seconds_total": {"wait": 6.0, "train": 4.0}, "queue_seconds_total": queued, "updates_total": 9}
    actor = {"phase_seconds_total": {"credit_wait": 5.0, "env": 5.0}, "unacknowledged_seconds_total": under_way}
    names = [f"actor-{number}" for number in range(actors)]
    before = {"learner": reading("learner", phase_seconds_total={"wait": 0.0, "train": 0.0}, queue_seconds_total=0.0)}
    before |= {
        name: reading(phase_seconds_total={"credit_wait": 0.0, "env": 0.0}, unacknowledged_seconds_total=0.0) for name in names
    }
    after = {"learner": reading("learner", at=110.0, workers_connected={"actor": connected}, **learner)}
    return compare(before, after | {name: reading(at=110.0, **actor) for name in names})


def test_what_is_not_in_the_queue_is_on_the_wire():
    """Two actors with ten message-seconds each under way, of which the queue had two."""
    assert waiting(queued=2.0, under_way=10.0).wire == 0.9
    assert waiting(queued=2.0, under_way=10.0).bottleneck.kind is Kind.NETWORK
    assert waiting(queued=19.0, under_way=10.0).bottleneck.kind is Kind.CREDIT
    assert waiting(queued=25.0, under_way=10.0).wire == 0.0  # the two were not asked at the same moment


def test_while_some_actors_are_unknown_so_is_the_wire():
    """The queue holds messages of the third actor too, which was not scraped: no share can be computed."""
    some = waiting(queued=2.0, under_way=10.0, connected=3)
    assert math.isnan(some.wire)
    assert some.bottleneck.kind is Kind.CREDIT_OR_NETWORK
    assert "2 of 3 connected actors are measured" in some.bottleneck.sentence


def test_without_a_message_under_way_no_share_of_it_is_on_the_wire():
    still = waiting(queued=2.0, under_way=0.0)
    assert math.isnan(still.wire)
    assert still.bottleneck.kind is Kind.CREDIT


def stepping(learner, *actors):
    """A run over ten seconds: values of the learner, and of each actor, at both ends."""
    ends = []
    for end in (0, 1):
        values = {"learner": reading("learner", at=100.0 + 10 * end, **{name: pair[end] for name, pair in learner.items()})}
        for number, actor in enumerate(actors):
            values[f"actor-{number}"] = reading(at=100.0 + 10 * end, **{name: pair[end] for name, pair in actor.items()})
        ends.append(values)
    return compare(*ends)


WAITS = {"phase_seconds_total": ({"wait": 0.0, "train": 0.0}, {"wait": 6.0, "train": 4.0}), "policy_version": (100, 120)}
PLAYS = {
    "phase_seconds_total": ({"env": 0.0}, {"env": 10.0}), "env_steps_total": (0, 900),
    "messages_sent_total": ({"trajectory": 0.0}, {"trajectory": 7.0}),
}  # fmt: skip
NEW, OLD = PLAYS | {"policy_version": (99, 119)}, PLAYS | {"policy_version": (99, 99)}


def test_the_bottleneck_is_the_network_where_new_policies_do_not_reach_half_of_the_actors():
    """`rookery doctor`, `rookery top` and the live view show this property."""
    assert stepping(WAITS, NEW, OLD).bottleneck.kind is Kind.NETWORK
    assert [actor.name for actor in stepping(WAITS, NEW, OLD).stale_actors] == ["actor-1"]
    assert stepping(WAITS, NEW, NEW, OLD).bottleneck.kind is Kind.ACTOR


LOST = {
    "connected": (1, 0), "phase_seconds_total": ({"credit_wait": 0.0}, {"credit_wait": 10.0}),
    "unacknowledged_seconds_total": (0.0, 20.0), "computing_cpu_seconds_total": (0.0, 0.0),
}  # fmt: skip


@pytest.mark.parametrize(("waits", "kind"), [(6.0, Kind.ACTOR), (0.5, Kind.BALANCED)])
def test_an_actor_that_lost_its_learner_changes_no_bottleneck(waits, kind):
    """It waits for a connection, and its messages for an acknowledgement that no network delays."""
    learner = WAITS | {"phase_seconds_total": ({"wait": 0.0, "train": 0.0}, {"wait": waits, "train": 10.0 - waits})}
    learner |= {"workers_connected": ({"actor": 1}, {"actor": 1}), "queue_seconds_total": (0.0, 1.0)}
    acts = {"phase_seconds_total": ({"act": 0.0}, {"act": 10.0}), "unacknowledged_seconds_total": (0.0, 2.0)}
    acts = NEW | acts | {"computing_cpu_seconds_total": (0.0, 8.0), "process_cpu_seconds_total": (0.0, 8.0), "connected": (1, 1)}
    alone, run = stepping(learner, acts), stepping(learner, acts, LOST)
    assert run.bottleneck == alone.bottleneck
    assert run.bottleneck.kind is kind
    assert (run.wire, run.actors_cpu_lost) == (alone.wire, alone.actors_cpu_lost) == (0.5, pytest.approx(0.2))
    other = learner | {"workers_connected": ({"actor": 2}, {"actor": 2})}  # its actor is not measured
    assert stepping(other, acts, LOST).unmeasured == "1 of 2 connected actors are measured"


@pytest.mark.parametrize(
    ("learner", "reason"),
    [
        ({"training": (0, 0)}, "the learner does not train, it starts or has ended"),
        ({}, "no env step is made, received or trained on"),
        (
            {"phase_seconds_total": ({"wait": 0.0, "checkpoint": 0.0}, {"wait": 4.7, "checkpoint": 5.3})},
            "no env step is made, received or trained on",
        ),
        ({"process_start_time_seconds": (5.0, 105.0), "updates_total": (9, 2)}, "the learner began anew within this time"),
        (
            {"messages_dropped_total": ({"non_finite": 0, "decode": 0}, {"non_finite": 1, "decode": 0}), "updates_total": (1, 2)},
            "experience is refused (non_finite); see the learner's log",
        ),
    ],
)
def test_a_run_that_does_not_train_has_no_bottleneck(learner, reason):
    assert stepping(WAITS | learner).bottleneck.sentence == f"unknown: {reason}"
    assert stepping(WAITS | {"updates_total": (1, 2)}).bottleneck.kind is Kind.ACTOR


def test_bytes_that_are_no_message_hide_no_bottleneck():
    """Any process that reaches the port may send them."""
    learner = {"updates_total": (1, 2), "messages_dropped_total": ({"decode": 0}, {"decode": 3})}
    assert stepping(WAITS | learner).bottleneck.kind is Kind.ACTOR


def test_a_rank_that_began_anew_leaves_no_bottleneck():
    """Actors counted the seconds in which it was down; the verdict would blame the network."""
    starts = {"learner-0": (5.0, 5.0), "learner-1": (5.0, 108.0)}
    facts = {"ranks": 2, "training": 1, "phase_seconds_total": {"wait": 9.0}, "updates_total": 9}
    before, after = (
        {name: reading("learner", at=at, process_start_time_seconds=start[end], **facts) for name, start in starts.items()}
        for end, at in ((0, 100.0), (1, 110.0))
    )
    assert compare(before, after).bottleneck.sentence == "unknown: the learner began anew within this time"


def test_what_one_rank_alone_has_is_known_in_any_order_of_the_ranks():
    """Rank 0 has the evaluator and the store; named last, its failed uploads were not seen."""
    ranks = {
        "first": reading("learner", ranks=2, upload_failures_total=3.0, checkpoint_interval_seconds=60.0),
        "second": reading("learner", ranks=2, upload_failures_total=0.0, checkpoint_interval_seconds=math.nan),
    }
    for order in (ranks, dict(reversed(ranks.items()))):
        found = compare(order, order).learner
        assert found.now("rookery_learner_checkpoint_interval_seconds") == 60.0
        assert found.now("rookery_learner_upload_failures_total") == 3.0


def test_a_rank_that_missed_the_first_scrape_is_part_of_the_sums_of_gauges_alone():
    def rank(at, trained):
        connected = {"workers_connected": {"actor": 2}, "ledger_env_steps": {"trained": trained}}
        return reading("learner", at=at, ranks=2, env_steps_trained_total=trained, **connected)

    for first, second in (("a", "b"), ("b", "a")):
        found = compare({first: rank(100.0, 16_000)}, {first: rank(110.0, 17_000), second: rank(110.0, 17_000)}).learner
        assert found.now(LEDGER_ENV_STEPS, "trained") == 34_000
        assert found.now(WORKERS_CONNECTED, "actor") == 4
        assert found.grew(ENV_STEPS_TRAINED) == 1000


def test_the_wire_is_not_known_where_a_rank_does_not_answer():
    """The messages of its actors are in its queue."""

    def scrape(at, seconds):
        queue = {"queue_seconds_total": seconds, "workers_connected": {"actor": 1}, "ranks": 2}
        actors = {f"actor-{n}": reading(at=at, unacknowledged_seconds_total=seconds) for n in range(2)}
        return {"learner": reading("learner", at=at, **queue), "learner-1": reading("learner", at=at, **queue), **actors}

    before, after = scrape(100.0, 0.0), scrape(110.0, 10.0)
    assert compare(before, after).wire == 0.0
    del before["learner-1"], after["learner-1"]
    assert math.isnan(compare(before, after).wire)


def computing(*, learner=None, actor=None, process=0.0, all_reduce=0.0):
    """A run over ten seconds: the learner computes for 8 s, the actor for 2 s; their CPU seconds in that time are given.

    `process` is all CPU seconds of the actor, those of its environment included.
    """
    spent = {"learner": {"wait": 1.0, "train": 6.0, "publish": 2.0, "checkpoint": 1.0}, "actor": {"env": 8.0, "act": 2.0}}
    got = {"learner": learner, "actor": actor}
    before, after = {}, {}
    for role, phases in spent.items():
        cpu = {} if got[role] is None else {"computing_cpu_seconds_total": got[role], "process_cpu_seconds_total": process}
        cpu |= {"all_reduce_seconds_total": all_reduce} if role == "learner" else {}
        before[role] = reading(role, phase_seconds_total=dict.fromkeys(phases, 0.0), **dict.fromkeys(cpu, 0.0))
        after[role] = reading(role, at=110.0, phase_seconds_total=phases, **cpu)
    return compare(before, after)


def test_the_learner_waits_for_a_core_for_the_rest_of_the_time_in_which_it_computes():
    """Waiting for experience and writing a checkpoint need no core."""
    run = computing(learner=2.0)
    assert run.learner_cpu_lost == pytest.approx(0.6)
    assert run.bottleneck.kind is Kind.CPU
    assert computing(learner=7.9).bottleneck.kind is Kind.BALANCED


def test_a_rank_that_waits_for_another_waits_for_no_core():
    run = computing(learner=2.0, all_reduce=5.0)
    assert run.learner_cpu_lost == pytest.approx(0.1)
    assert run.bottleneck.kind is Kind.BALANCED


def test_a_rank_in_one_long_all_reduce_has_no_bottleneck_and_the_reason_is_named():
    spent = {"learner": {"wait": 0.0, "train": 10.0}, "actor": {"credit_wait": 10.0}}
    before = {role: reading(role, phase_seconds_total=dict.fromkeys(phases, 0.0)) for role, phases in spent.items()}
    after = {role: reading(role, at=110.0, phase_seconds_total=phases) for role, phases in spent.items()}
    after["learner"] = reading("learner", at=110.0, phase_seconds_total=spent["learner"], all_reduce_seconds_total=9.9)
    before["learner"] = reading("learner", phase_seconds_total={"wait": 0.0, "train": 0.0}, all_reduce_seconds_total=0.0)
    assert compare(before, after).bottleneck.sentence.startswith("unknown: the learner waits for another of its ranks")


def test_actors_wait_for_a_core_in_their_environments_as_often_as_while_they_compute():
    """Half a core while they compute: an environment that used 4 CPU seconds lost four more, one that slept lost none."""
    works, sleeps = computing(actor=1.0, process=5.0), computing(actor=1.0, process=1.0)
    assert works.actors_cpu_lost == pytest.approx(0.5)
    assert sleeps.actors_cpu_lost == pytest.approx(0.1)
    assert (works.bottleneck.kind, sleeps.bottleneck.kind) == (Kind.CPU, Kind.BALANCED)


def test_an_environment_with_many_threads_waits_for_no_core_where_the_loop_gets_nearly_all_of_one():
    """Eight threads of it lose ten per cent each: that is a tenth of the loop's time, not eight of them."""
    run = computing(actor=1.8, process=65.8)
    assert run.actors_cpu_lost == pytest.approx(1 / 9)
    assert run.bottleneck.kind is Kind.BALANCED


def test_a_service_that_does_not_export_its_cpu_seconds_does_not_lack_cpu():
    """A process of another release: its missing counter is not zero."""
    run = computing()
    assert math.isnan(run.learner_cpu_lost)
    assert math.isnan(run.actors_cpu_lost)
    assert run.bottleneck.kind is Kind.BALANCED
