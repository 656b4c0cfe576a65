"""The autoscaling of actors: what its queries say, that a change of load settles, and that a lost Prometheus changes nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import pairwise
from math import floor

import pytest
import yaml

from tests.k8s.cluster import Autoscaler, Run
from tests.k8s.manifests import K8S

pytestmark = pytest.mark.service

(SCALED,) = yaml.safe_load_all((K8S / "components" / "autoscaling-keda" / "actor.yaml").read_text())
SPEC = SCALED["spec"]
QUERIES = {trigger["name"]: trigger["metadata"]["query"] for trigger in SPEC["triggers"]}
WAITING = 0.15


def capacity(rates):
    """The query of that name, as `test_the_queries_say_what_the_simulation_takes_them_for` holds it to be."""
    if rates["learner"] is None or not rates["actors"]:
        return None
    trained, waits = rates["learner"]
    made, worked = (sum(each) for each in zip(*((made, 1 - waited) for made, waited in rates["actors"]), strict=True))
    return trained / max(1 - waits, 0.01) / (made / worked) if made else None


def waiting(rates):
    """Likewise."""
    if rates["learner"] is None or not rates["actors"]:
        return None
    held = sum(waited for _, waited in rates["actors"]) / len(rates["actors"])
    return (floor(1.1 * rates["connected"]) + 1) * (rates["learner"][1] >= WAITING) * (held < WAITING)


def simulated(*, demand, supply, minutes, start_seconds=45, replicas=1, blind=lambda _: False):
    """Replicas at each second. `blind(second)`: Prometheus is away."""
    run = Run(capacity=demand, supply=supply, start_seconds=start_seconds, replicas=replicas)
    scaler = Autoscaler(manifest=SPEC, queries=[capacity, waiting])
    assert [trigger["name"] for trigger in SPEC["triggers"]] == ["capacity", "waiting"]
    history = []
    for now in range(minutes * 60):
        run.second(now)
        if now % 15 == 7 and now > 60:
            nothing = {"learner": None, "actors": [], "connected": 0}
            rates = nothing if blind(now) else run.rates(now)
            run.scale(scaler.decide(rates, len(run.actors), now), now)
        history.append(len(run.actors))
    return history


def reversals(history):
    """Return how many times the direction of change reversed."""
    moves = [after - before for before, after in pairwise(history) if after != before]
    return sum((one > 0) != (other > 0) for one, other in pairwise(moves))


# Env steps/s as measured on one core each: what a learner trains (benchmarks/results/throughput.md), what an actor makes alone.
MEASURED = {
    "pong-nature": (1e6 / 499, 1e6 / (312 + 154)),
    "pong-impala": (1e6 / 69, 1e6 / (393 + 73)),
    "pong-a3c": (1e6 / 78, 1e6 / (305 + 58)),
    "pong-dqn": (1e6 / 2813, 1e6 / (332 + 78)),
}


@pytest.mark.parametrize(("learner", "actor"), MEASURED.values(), ids=MEASURED)
@pytest.mark.parametrize("factor", [1.0, 3.0, 0.4])
def test_a_step_in_load_settles_within_one_replica_in_ten_minutes(learner, actor, factor):
    """The learner becomes three times as fast, or less than half as fast, in the middle of a run."""

    def demand(now):
        return learner * (factor if now >= 20 * 60 else 1.0)

    history = simulated(demand=demand, supply=actor, minutes=40)
    low, high = SPEC["minReplicaCount"], SPEC["maxReplicaCount"]
    for moment, load in ((20 * 60 - 1, 1.0), (30 * 60, factor)):
        best = min(max(learner * load / actor, low), high)
        assert all(abs(replicas - best) <= 1.0 for replicas in history[moment : moment + (1 if load == 1.0 else 600)]), (
            best,
            history[moment],
        )
    assert reversals(history[: 20 * 60]) <= 2
    assert reversals(history[20 * 60 :]) <= 2


@pytest.mark.parametrize("start_seconds", [10, 120])
def test_pods_that_start_slowly_are_not_asked_for_twice(start_seconds):
    """An image is pulled, an environment is built: what was asked for is on its way."""
    history = simulated(demand=lambda _: 10_000, supply=1_000, minutes=30, start_seconds=start_seconds)
    assert max(history) <= 11
    assert abs(history[-1] - 10) <= 1


@pytest.mark.parametrize("replicas", range(SPEC["minReplicaCount"], SPEC["maxReplicaCount"]))
def test_a_learner_that_waits_gets_more_actors_whatever_their_number(replicas):
    """Its capacity is unknown, as in the warm-up of a replay memory."""
    scaler = Autoscaler(manifest=SPEC, queries=[lambda _: None, waiting])
    rates = {"learner": (450, 0.5), "actors": [(450 / replicas, 0.0)] * replicas, "connected": replicas}
    assert scaler.decide(rates, replicas, now=0) > replicas


def test_without_prometheus_nothing_changes():
    """Half an hour away, in the middle of a run and at its start."""
    away = simulated(demand=lambda _: 8_000, supply=1_000, minutes=60, blind=lambda now: 20 * 60 <= now < 50 * 60)
    assert len(set(away[20 * 60 : 50 * 60])) == 1
    assert abs(away[-1] - 8) <= 1
    assert set(simulated(demand=lambda _: 8_000, supply=1_000, minutes=10, replicas=3, blind=lambda _: True)) == {3}


def test_a_learner_that_stalls_keeps_its_actors():
    """It writes a large checkpoint for two minutes: neither trained nor waited."""
    history = simulated(demand=lambda now: 1e-6 if 1200 <= now < 1320 else 6_000, supply=1_000, minutes=40)
    assert abs(history[-1] - 6) <= 1
    assert reversals(history) <= 2


@pytest.mark.parametrize(
    ("rates", "wanted"),
    [
        ({"trained": 900, "wait": 0.1, "actors": [(450, 0.0), (450, 0.0)]}, {"capacity": 1000 / 450, "waiting": 0}),
        ({"trained": 1000, "wait": 0.5, "actors": [(500, 0.0), (500, 0.0)]}, {"capacity": 4.0, "waiting": 3}),
        ({"trained": 10_000, "wait": 0.5, "actors": [(500, 0.0)] * 20}, {"capacity": 40.0, "waiting": 23}),
        ({"trained": 1000, "wait": 0.0, "actors": [(250, 0.5)] * 4}, {"capacity": 2.0, "waiting": 0}),
        ({"trained": 1000, "wait": 0.4, "actors": [(250, 0.5)] * 4}, {"capacity": 1000 / 0.6 / 500, "waiting": 0}),
        # Two more are refused, because there are as many as `learner.max_actors`: their loops did not begin.
        (
            {"trained": 1000, "wait": 0.5, "actors": [(500, 0.0), (500, 0.0)], "refused": 2},
            {"capacity": 4.0, "waiting": 3},
        ),
        # One more lost its learner, and waits for it.
        ({"trained": 1000, "wait": 0.5, "actors": [(500, 0.0), (500, 0.0)], "lost": 1}, {"capacity": 4.0, "waiting": 3}),
        # A replay memory fills: env steps cost no gradient steps.
        ({"trained": 900, "wait": 0.9, "actors": [(450, 0.0), (450, 0.0)], "samples_per_insert": 0}, {"waiting": 3}),
        (
            {"trained": 900, "wait": 0.1, "actors": [(450, 0.0), (450, 0.0)], "samples_per_insert": 1},
            {"capacity": 1000 / 450, "waiting": 0},
        ),
    ],
)
def test_the_queries_say_what_the_simulation_takes_them_for(tmp_path, rates, wanted):
    """By promtool, on series with these rates."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on this machine")
    learner = 'namespace="rookery", instance="learner"'
    series = [
        _counter(f"rookery_learner_env_steps_trained_total{{{learner}}}", rates["trained"]),
        _counter(f'rookery_learner_phase_seconds_total{{{learner}, phase="wait"}}', rates["wait"]),
        {"series": f'rookery_learner_workers_connected{{{learner}, role="actor"}}', "values": f"{len(rates['actors'])}x20"},
    ]
    for number, (made, waited) in enumerate(rates["actors"]):
        actor = f'namespace="rookery", instance="actor-{number}"'
        series.append(_counter(f"rookery_actor_env_steps_total{{{actor}}}", made))
        series.append(_counter(f'rookery_actor_phase_seconds_total{{{actor}, phase="credit_wait"}}', waited))
        series.append(_counter(f'rookery_actor_phase_seconds_total{{{actor}, phase="env"}}', 1 - waited))
    for number in range(rates.get("lost", 0)):
        actor = f'namespace="rookery", instance="lost-{number}"'
        series.append(_counter(f'rookery_actor_phase_seconds_total{{{actor}, phase="credit_wait"}}', 1.0))
        series.append({"series": f"rookery_actor_connected{{{actor}}}", "values": "0x20"})
    for number in range(rates.get("refused", 0)):
        actor = f'namespace="rookery", instance="refused-{number}"'
        series.append(_counter(f"rookery_actor_env_steps_total{{{actor}}}", 0))
    if "samples_per_insert" in rates:
        scalar = f'rookery_learner_training_metric{{{learner}, name="samples_per_insert"}}'
        series.append({"series": scalar, "values": f"{rates['samples_per_insert']}x20"})
    expected = [
        {
            "expr": f"abs(({query}) - {wanted.get(name, 0)}) < bool 1e-6",
            "eval_time": "5m",
            "exp_samples": [{"labels": "{}", "value": 1}] if name in wanted else [],
        }
        for name, query in QUERIES.items()
    ]
    text = {
        "rule_files": [],
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": series, "promql_expr_test": expected}],
    }
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps(text))
    ran = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    numbers = {"actors": rates["actors"], "learner": (rates["trained"], rates["wait"]), "connected": len(rates["actors"])}
    simulation = {"capacity": capacity, "waiting": waiting}
    assert {name: simulation[name](numbers) for name in wanted} == pytest.approx(wanted)


def _counter(series, per_second):
    return {"series": series, "values": f"0+{per_second * 15:g}x20"}
