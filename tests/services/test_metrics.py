"""The metrics of all services as a scrape sees them, and what both ends of the wire must say alike."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.errors import DropReason
from common.session.actor_side import State
from common.wire.messages import MESSAGE_TYPES
from services.actor import metrics as actor
from services.actor.metrics import ActorMetrics
from services.evaluator import metrics as evaluator
from services.evaluator.loop import Counts
from services.evaluator.metrics import EvaluatorMetrics
from services.learner import metrics as learner
from services.learner.intake import Figures
from services.learner.metrics import LearnerMetrics

pytestmark = pytest.mark.service

SERVICES = {  # declarations, phases, and the most series that Prometheus shall hold for one process
    "learner": (LearnerMetrics, learner.PHASES, 150),
    "actor": (ActorMetrics, actor.PHASES, 60),
    "evaluator": (EvaluatorMetrics, evaluator.PHASES, 60),
}
each_service = pytest.mark.parametrize("service", SERVICES)


def series(metrics):
    """{(name, label values): value} of a scrape."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)")
@each_service
def test_promtool_finds_nothing_to_say(service):
    """Names, units and help texts as Prometheus wants them, before and after the first readings."""
    declare, phases, _ = SERVICES[service]
    metrics = declare()
    metrics.policy_lag.observe(3)
    metrics.phases.enter(phases[0])
    checked = subprocess.run(["promtool", "check", "metrics"], input=metrics.render(), capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


@each_service
def test_the_series_stay_within_their_budget(service):
    """A thousand actors times this is what Prometheus has to hold."""
    declare, _, budget = SERVICES[service]
    metrics = declare()
    if service == "learner":  # the one label whose values an algorithm chooses
        for number in range(20):
            metrics.training_metric.labels(f"loss_{number}").set(number)
    assert len(series(metrics)) <= budget


@each_service
def test_every_label_value_is_there_before_anything_happened(service):
    """Rates and alerts over them are right from the first scrape."""
    declare, phases, _ = SERVICES[service]
    metrics = declare()
    read = series(metrics)
    for declared in metrics.declared:
        for values in declared.labels.values():
            for value in values:
                assert (declared.name, value) in read
    for phase in phases:
        assert read[f"rookery_{service}_phase_seconds_total", phase] == 0


@each_service
def test_the_phases_sum_to_the_wall_time(service):
    """No second is lost or counted twice."""
    declare, phases, _ = SERVICES[service]
    now = [5.0]
    metrics = declare(clock=lambda: now[0])
    for number, phase in enumerate(phases, start=1):
        metrics.phases.enter(phase)
        now[0] += number
    read = series(metrics)
    assert sum(value for key, value in read.items() if key[0] == f"rookery_{service}_phase_seconds_total") == now[0] - 5.0


@each_service
def test_every_help_text_is_a_sentence(service):
    """Whoever reads the page in a browser has nothing else to go by."""
    for declared in SERVICES[service][0]().declared:
        assert declared.help[0].isupper() or declared.help[0].isdigit()
        assert declared.help.endswith(".")


@pytest.mark.parametrize("declare", [LearnerMetrics, ActorMetrics])
def test_every_drop_reason_is_counted(declare):
    """A reason that is added to the closed list shows up here by itself."""
    assert list(declare().env_steps_dropped) == [str(reason) for reason in DropReason]


def test_what_one_side_sends_the_other_counts_as_received():
    """A message type that is added must be counted at both ends."""
    peers = [ActorMetrics(), EvaluatorMetrics()]
    assert set(learner.RECEIVED) == {kind for peer in peers for kind in peer.messages_sent}
    assert all(set(learner.SENT) == set(peer.messages_received) for peer in peers)
    assert set(learner.SENT) | set(learner.RECEIVED) == {message.tag for message in MESSAGE_TYPES}


def link(**changes):
    """The connection of a peer that has been welcomed again once."""
    session = SimpleNamespace(reconnects=1, state=State.WELCOME, unacknowledged=2, credits=3)
    counted = {"sent": Counter(hello=2), "received": Counter(welcome=2), "unacknowledged_seconds": 2.5}
    return SimpleNamespace(session=session, **counted, **changes)


@pytest.mark.parametrize("service", ["actor", "evaluator"])
def test_a_peers_scrape_shows_what_its_loop_and_its_connection_count(service):
    """Each counter is the loop's own, in env steps and in frames, and a reading never adds twice."""
    counts = Counts(env_steps=10, episodes=4, evaluations=1, mean={"greedy": 7.0})
    loop = SimpleNamespace(
        env_steps=10, episodes=4, returns=[6.0, 8.0], version=5, dropped=Counter({DropReason.UNFINISHED: 3}), counts=counts
    )
    metrics = SERVICES[service][0]()
    metrics.on_scrape = lambda: metrics.refresh(loop, link(), 4)
    series(metrics)
    read = series(metrics)
    expected = {("env_steps_total",): 10, ("env_frames_total",): 40, ("episodes_total",): 4, ("policy_version",): 5}
    expected |= {("messages_sent_total", "hello"): 2, ("messages_received_total", "welcome"): 2}
    expected |= {("reconnects_total",): 1, ("connected",): 1}
    if service == "actor":
        expected |= {("episode_return_mean",): 7.0, ("queue_depth",): 2, ("queue_capacity",): 3}
        expected |= {("env_steps_dropped_total", "unfinished"): 3, ("unacknowledged_seconds_total",): 2.5}
    else:
        expected |= {("episode_return_mean", "greedy"): 7.0, ("evaluations_total",): 1}
    for (name, *labels), value in expected.items():
        assert read[f"rookery_{service}_{name}", *labels] == value, name


def test_the_learners_scrape_shows_the_figures_of_its_io_thread():
    """One value made by that thread at one moment: queue, ledger and traffic fit together."""
    reasons = {str(reason): 0 for reason in DropReason}
    ledger = {"produced": 60, "trained": 40, "queued": 10, "in_flight": 2, "dropped": reasons | {"stale": 8}}
    figures = Figures(
        ledger=ledger, queue_depth=2, queue_env_steps=10, queue_capacity=4, queue_seconds=7.5, actors=3, evaluators=1,
        messages_dropped=Counter(stale=1), sequence_gaps=5, reconnects=6, received=Counter(hello=7), sent=Counter(credit=8),
        bytes_received=900, bytes_sent=90, handshakes_failed=Counter(key=4),
    )  # fmt: skip
    metrics = LearnerMetrics()
    metrics.on_scrape = lambda: metrics.refresh(figures)
    series(metrics)
    read = series(metrics)
    expected = {("queue_seconds_total",): 7.5}
    expected |= {("queue_depth",): 2, ("queue_env_steps",): 10, ("queue_capacity",): 4, ("ledger_env_steps", "in_flight"): 2}
    expected |= {("env_steps_dropped_total", "stale"): 8, ("messages_dropped_total", "stale"): 1, ("sequence_gaps_total",): 5}
    expected |= {("peers_connected", "actor"): 3, ("peers_connected", "evaluator"): 1, ("reconnects_total",): 6}
    expected |= {("messages_received_total", "hello"): 7, ("messages_sent_total", "credit"): 8}
    expected |= {("handshakes_failed_total", "key"): 4, ("handshakes_failed_total", "mechanism"): 0}
    expected |= {("message_bytes_received_total",): 900, ("message_bytes_sent_total",): 90}
    for (name, *labels), value in expected.items():
        assert read[f"rookery_learner_{name}", *labels] == value, name
