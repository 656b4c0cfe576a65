"""The metrics of all services as a scrape shows them, and the message kinds that both ends of the wire count."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.errors import DropReason
from common.observability import learner_metrics as learner
from common.observability.env_metrics import (
    ENV_WORKER_METRICS,
    ENV_WORKER_PHASES,
    ENV_WORKER_RECEIVED,
    ENV_WORKER_SENT,
    OWN_POLICY_SERVER_METRICS,
    POLICY_SERVER_METRICS,
    EnvWorkerStats,
    PolicyServerStats,
)
from common.observability.learner_stats import IntakeStats, LearnerStats
from common.observability.metrics import Exporter, Phases, run_labels
from common.observability.worker_metrics import (
    ACTOR_METRICS,
    ACTOR_PHASES,
    EVALUATOR_METRICS,
    EVALUATOR_PHASES,
    ActorStats,
    EvaluatorStats,
    LinkStats,
)
from common.protocol.messages import MESSAGE_TYPES

pytestmark = pytest.mark.service

SERVICES = {  # metrics, state, phases, and the most series that Prometheus shall hold for one process
    "learner": (learner.METRICS, LearnerStats, learner.PHASES, 150),
    "actor": (ACTOR_METRICS, ActorStats, ACTOR_PHASES, 65),
    "evaluator": (EVALUATOR_METRICS, EvaluatorStats, EVALUATOR_PHASES, 60),
    "env_worker": (ENV_WORKER_METRICS, EnvWorkerStats, ENV_WORKER_PHASES, 40),
}
each_service = pytest.mark.parametrize("service", SERVICES)


def series(metrics, state):
    """{(name, label values): value} of a scrape."""
    families = text_string_to_metric_families(Exporter(metrics, lambda: state).render().decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)")
@each_service
def test_promtool_accepts_a_scrape(service):
    """Names, units and help texts as Prometheus wants them."""
    metrics, new, phases, _ = SERVICES[service]
    state = new()
    if hasattr(state, "policy_lag"):
        state.policy_lag.observe(3)
    state.phases.enter(phases[0])
    page = Exporter(metrics, lambda: state).render()
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


@each_service
def test_the_series_stay_within_their_budget(service):
    """Prometheus holds a thousand actors times this number."""
    metrics, new, _, budget = SERVICES[service]
    state = new()
    if service == "learner":  # the one label with values of the algorithm
        state.training_metrics = {f"loss_{number}": number for number in range(20)}
    assert len(series(metrics, state)) <= budget


@each_service
def test_every_label_value_is_exported_from_the_start(service):
    """Rates and alerts are right from the first scrape."""
    metrics, new, phases, _ = SERVICES[service]
    read = series(metrics, new())
    for metric in metrics:
        for values in metric.labels.values():
            for value in values:
                assert (metric.name, value) in read
    for phase in phases:
        assert read[f"rookery_{service}_phase_seconds_total", phase] == 0


@each_service
def test_the_phases_sum_to_the_wall_time(service):
    """No second is lost or counted twice."""
    metrics, new, phases, _ = SERVICES[service]
    now = [5.0]
    state = replace(new(), phases=Phases(phases, clock=lambda: now[0]))
    for number, phase in enumerate(phases, start=1):
        state.phases.enter(phase)
        now[0] += number
    read = series(metrics, state)
    assert sum(value for key, value in read.items() if key[0] == f"rookery_{service}_phase_seconds_total") == now[0] - 5.0


@each_service
def test_every_help_text_is_a_sentence(service):
    """A help text is also the row of docs/metrics.md."""
    for metric in SERVICES[service][0]:
        assert metric.help[0].isupper() or metric.help[0].isdigit()
        assert metric.help.endswith(".")
        assert "|" not in metric.help


@each_service
def test_names_are_unique_and_say_the_service(service):
    """A name that stands twice would be exported twice."""
    names = [metric.name for metric in SERVICES[service][0]]
    assert len(set(names)) == len(names)
    assert names[:2] == ["rookery_build_info", "rookery_run_info"]
    assert all(name.startswith(f"rookery_{service}_") for name in names[2:])


def test_every_message_kind_is_counted_at_both_ends():
    """A message type that is added must be counted by its sender and by its receiver."""
    counted = {*learner.SENT, *learner.RECEIVED, *ENV_WORKER_SENT, *ENV_WORKER_RECEIVED}
    assert counted == {message.tag for message in MESSAGE_TYPES}


LINK = LinkStats(
    sent=Counter(hello=2), received=Counter(welcome=2), reconnects=1, connected=True, unacknowledged=2, window=3,
    unacknowledged_seconds=2.5,
)  # fmt: skip


@pytest.mark.parametrize("service", ["actor", "evaluator"])
def test_a_workers_scrape_shows_its_loop_and_its_connection(service):
    """Each counter is the loop's own, in env steps and in emulator frames."""
    metrics, new, *_ = SERVICES[service]
    state = replace(new(), env_steps=10, frame_skip=4, episodes=4, version=5, link=LINK)
    expected = {("env_steps_total",): 10, ("env_frames_total",): 40, ("episodes_total",): 4, ("policy_version",): 5}
    expected |= {("messages_sent_total", "hello"): 2, ("messages_received_total", "welcome"): 2}
    expected |= {("reconnects_total",): 1, ("connected",): 1}
    if service == "actor":
        state.returns.extend([6.0, 8.0])
        state.dropped[DropReason.UNFINISHED] = 3
        expected |= {("episode_return_mean",): 7.0, ("queue_depth",): 2, ("queue_capacity",): 3}
        expected |= {("env_steps_dropped_total", "unfinished"): 3, ("unacknowledged_seconds_total",): 2.5}
    else:
        state.evaluations, state.return_means, state.playing = 1, {"greedy": 7.0}, 6
        expected |= {("episode_return_mean", "greedy"): 7.0, ("evaluations_total",): 1, ("episodes_playing",): 6}
    read = series(metrics, state)
    for (name, *labels), value in expected.items():
        assert read[f"rookery_{service}_{name}", *labels] == value, name


def test_a_policy_server_is_an_actor_with_figures_of_its_env_workers():
    state = replace(PolicyServerStats(), env_steps=10, env_workers=2, rows_waiting=4, steps=5, wait_seconds=2.5, missing_rows=3)
    state = replace(state, env_workers_lost=1, refused=2, env_sent=Counter(act=7), handshakes_failed=Counter(key=4))
    read = series(POLICY_SERVER_METRICS, state)
    assert read["rookery_actor_env_steps_total",] == 10
    expected = {("env_workers",): 2, ("rows_waiting",): 4, ("steps_total",): 5, ("wait_seconds_total",): 2.5}
    expected |= {("missing_rows_total",): 3, ("env_workers_lost_total",): 1, ("messages_refused_total",): 2}
    expected |= {("messages_sent_total", "act"): 7, ("messages_sent_total", "welcome"): 0}
    expected |= {("handshakes_failed_total", "key"): 4, ("handshakes_failed_total", "broken"): 0}
    own = {key: value for key, value in read.items() if key[0].startswith("rookery_policy_server_")}
    assert {metric.name for metric in OWN_POLICY_SERVER_METRICS} == {key[0] for key in own}
    for (name, *labels), value in expected.items():
        assert own[f"rookery_policy_server_{name}", *labels] == value, name


def test_an_env_workers_scrape_shows_its_loop_and_its_connection():
    state = EnvWorkerStats(env_steps=10, frame_skip=4, resets=2, link=LinkStats(sent=Counter(observe=3), connected=True))
    read = series(ENV_WORKER_METRICS, state)
    expected = {("env_steps_total",): 10, ("env_frames_total",): 40, ("resets_total",): 2, ("connected",): 1}
    expected |= {("messages_sent_total", "observe"): 3, ("messages_received_total", "act"): 0}
    for (name, *labels), value in expected.items():
        assert read[f"rookery_env_worker_{name}", *labels] == value, name


def test_the_learners_scrape_shows_its_loop_and_its_io_thread():
    """The counters of the I/O thread are one value of one moment: queue, ledger and traffic fit together."""
    reasons = {str(reason): 0 for reason in DropReason}
    ledger = {"produced": 60, "trained": 40, "queued": 10, "in_flight": 2, "dropped": reasons | {"stale": 8}}
    intake = IntakeStats(
        ledger=ledger, queue_depth=2, queue_capacity=4, queue_seconds=7.5, actors=3, evaluators=1,
        messages_dropped=Counter(stale=1), reconnects=6, received=Counter(hello=7), sent=Counter(credit=8),
        bytes_received=900, bytes_sent=90, handshakes_failed=Counter(key=4),
    )  # fmt: skip
    state = LearnerStats(intake=intake, env_steps_trained=40, frame_skip=4, updates=2, nonfinite_steps=3, training=True)
    read = series(learner.METRICS, state)
    expected = {("queue_seconds_total",): 7.5, ("env_frames_trained_total",): 160, ("updates_total",): 2, ("training",): 1}
    expected |= {("nonfinite_steps_total",): 3, ("queue_depth",): 2, ("queue_capacity",): 4, ("ledger_env_steps", "in_flight"): 2}
    expected |= {("env_steps_dropped_total", "stale"): 8, ("messages_dropped_total", "stale"): 1}
    expected |= {("workers_connected", "actor"): 3, ("workers_connected", "evaluator"): 1, ("reconnects_total",): 6}
    expected |= {("messages_received_total", "hello"): 7, ("messages_sent_total", "credit"): 8}
    expected |= {("handshakes_failed_total", "key"): 4, ("handshakes_failed_total", "mechanism"): 0}
    expected |= {("message_bytes_received_total",): 900, ("message_bytes_sent_total",): 90}
    for (name, *labels), value in expected.items():
        assert read[f"rookery_learner_{name}", *labels] == value, name


@each_service
def test_a_process_names_its_run_once_it_knows_it(service):
    """Dashboards select the series of one run by it. A worker has the texts from its learner, which must not be of any length."""
    metrics, new, *_ = SERVICES[service]
    state = new()
    assert not [key for key in series(metrics, state) if key[0] == "rookery_run_info"]
    state.run = run_labels(run_id="pong-7", env="ALE/Pong-v5", algorithm="x" * 10_000, seed=3)
    (key,) = [key for key in series(metrics, state) if key[0] == "rookery_run_info"]
    algorithm, *rest = key[1:5]
    assert rest == ["ALE/Pong-v5", "pong-7", "3"]
    assert len(algorithm) == 200
