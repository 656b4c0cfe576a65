"""Alerts and recording rules, tested by Prometheus's own tool."""

from __future__ import annotations

import pytest
import yaml

from common.observability.checks import CHECKS
from common.observability.checks.base import RUNBOOKS
from common.observability.deployment import JOBS, ServiceSample, compare
from common.observability.env_metrics import ENV_WORKER_METRICS, OWN_POLICY_SERVER_METRICS
from common.observability.learner_metrics import METRICS
from common.observability.metrics import LOOP_OVERDUE
from common.observability.rules import RECORDING_RULES, groups
from common.observability.worker_metrics import ACTOR_METRICS, EVALUATOR_METRICS
from tests.common.observability.helpers import COMMITTED, DASHBOARDS, ROOT, metrics_in, needs_promtool, promtool, queries

pytestmark = pytest.mark.service

CASES = ROOT / "tests" / "common" / "observability" / "alerts"
FROM_THE_CLIENT = {"up", "process_start_time_seconds", "process_resident_memory_bytes", "process_cpu_seconds_total"}

ALERTS = [check for check in CHECKS if check.promql]
each_alert = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)


def cases(alert):
    """The tests of one alert."""
    return yaml.safe_load((CASES / f"{alert.name}.yaml").read_text(encoding="utf-8"))["tests"]


@needs_promtool
def test_promtool_finds_nothing_to_say(tmp_path):
    """The rule file is one that Prometheus loads."""
    code, said = promtool("check", "rules", "--lint=all", "--lint-fatal", COMMITTED / "rules.yml", folder=tmp_path)
    assert code == 0, said
    assert f"{len(ALERTS) + len(RECORDING_RULES)} rules found" in said
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"rule_files": [str(COMMITTED / "rules.yml")]}))
    code, said = promtool("check", "config", "prometheus.yml", folder=tmp_path)
    assert code == 0, said


@needs_promtool
@each_alert
def test_an_alert_fires_where_it_should_and_nowhere_else(alert, tmp_path):
    """Each case is a stretch of a run's life, written out."""
    code, said = promtool("test", "rules", CASES / f"{alert.name}.yaml", folder=tmp_path)
    assert code == 0, said


@each_alert
def test_an_alert_has_a_case_that_fires_and_one_that_is_silent(alert):
    """One that was never seen to fire is a hope, one that was never seen silent a nuisance. The watchdog is never silent."""
    asked = [asked for case in cases(alert) for asked in case["alert_rule_test"]]
    assert {asked["alertname"] for asked in asked} == {alert.name}
    fires = {bool(asked.get("exp_alerts")) for asked in asked}
    assert fires == ({True} if alert.name == "Watchdog" else {True, False})


@needs_promtool
@pytest.mark.parametrize(
    ("alert", "clause"),
    [(alert, clause) for alert in ALERTS for clause in alert.only],
    ids=lambda part: getattr(part, "name", None),
)
def test_every_condition_of_an_alert_is_needed(alert, clause, tmp_path):
    """Without it, one of the alert's silent cases fires. A condition that no case needs may be wrong unseen."""
    rule = alert.as_rule()
    rule["expr"] = rule["expr"].replace(f"\n{clause}", "")
    alone = {"groups": groups([rule])}
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(alone))
    document = yaml.safe_load((CASES / f"{alert.name}.yaml").read_text(encoding="utf-8")) | {"rule_files": ["rules.yml"]}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(document))
    code, said = promtool("test", "rules", "cases.yaml", folder=tmp_path)
    assert code == 1, said
    assert "got:[\n            0:" in said


@each_alert
def test_an_alert_leads_to_what_to_do(alert):
    """An alert has a heading to read, and a number."""
    rule = alert.as_rule()
    assert {"summary", "description", "runbook"} == set(rule["annotations"])
    assert rule["annotations"]["runbook"] == f"docs/{RUNBOOKS}#{alert.name.lower()}"
    assert f"\n### {alert.name}\n" in (ROOT / "docs" / RUNBOOKS).read_text(encoding="utf-8")


COUNTERS = ("_total", "_sum", "_count")


def services(learner, *actors):
    """Values of the learner and of each actor: growth per second of counters, of others the value itself."""
    trains = {"rookery_learner_training": 1}
    return {"learner": trains | learner} | {f"actor-{number}": actor for number, actor in enumerate(actors)}


def finds(check, values):
    """How many times the doctor finds this check, in a minute of these values."""
    before, after = {}, {}
    for service, metrics in values.items():
        for seconds, scrape in ((0, before), (60, after)):
            samples = {}
            for name, value in metrics.items():
                metric, _, label = name.partition("{")
                growing = metric.endswith(COUNTERS)
                samples[metric, label.partition('"')[2].rstrip('"}')] = float(value * seconds if growing else value)
            scrape[service] = ServiceSample(at=float(seconds), role=service.partition("-")[0], samples=samples)
    return len(list(check.predicate(compare(before, after))))


def fires(check, values, number):
    """The test in which Prometheus finds the condition of an alert so many times among these values."""
    series = [
        {
            "series": f'{name.rstrip("}") + ", " if "{" in name else name + "{"}instance="{service}"}}',
            "values": f"0+{60 * value:g}x20" if name.partition("{")[0].endswith(COUNTERS) else f"{value:g}x20",
        }
        for service, metrics in values.items()
        for name, value in metrics.items()
    ]
    found = [{"labels": "{}", "value": number}] if number else []
    asked = {"expr": f"count({check.expression})", "eval_time": "15m", "exp_samples": found}
    return {"name": f"{values}", "interval": "1m", "input_series": series, "promql_expr_test": [asked]}


LAGS = [
    services({
        "rookery_learner_policy_lag_versions_sum": 2 * lag,
        "rookery_learner_policy_lag_versions_count": 2,
        "rookery_learner_policy_lag_limit_versions": limit,
    })
    for limit in (20, 200)
    for lag in (0, 0.45 * limit, 0.55 * limit, 0.95 * limit, limit)
]  # fmt: skip
STEPS, PHASE = "rookery_actor_env_steps_total", "rookery_actor_phase_seconds_total"
PACES = [
    services(
        {},
        *[{STEPS: 100, "rookery_actor_connected": 1}] * 3,
        {
            STEPS: pace,
            "rookery_actor_connected": connected,
            f'{PHASE}{{phase="credit_wait"}}': waits,
            f'{PHASE}{{phase="env"}}': 1 - waits,
        },
    )
    for pace in (0, 40, 60)
    for waits in (0.0, 0.1, 0.2)
    for connected in (0, 1)
]

MISSING, HELD = "rookery_policy_server_missing_rows_total", "rookery_policy_server_env_workers"
ROWS = [
    services({}, {STEPS: steps}, {STEPS: steps, MISSING: missing, HELD: held})
    for steps, missing, held in ((200, 0, 2), (199, 1, 2), (196, 4, 2), (100, 100, 1), (0, 0, 0))
]

ACTORS = 'rookery_learner_workers_connected{role="actor"}'
RANKS = [
    services({"rookery_learner_ranks": ranks, ACTORS: first}) | {"learner-1": {"rookery_learner_ranks": ranks, ACTORS: second}}
    for ranks, first, second in ((2, 2, 0), (2, 0, 2), (2, 1, 1), (2, 0, 0), (1, 1, 0))
]


@needs_promtool
@pytest.mark.parametrize(
    ("name", "cases"),
    [("PolicyLagHigh", LAGS), ("ActorStraggler", PACES), ("EnvWorkersMissing", ROWS), ("RankWithoutActors", RANKS)],
    ids=["PolicyLagHigh", "ActorStraggler", "EnvWorkersMissing", "RankWithoutActors"],
)
def test_an_alert_fires_where_the_doctor_has_a_finding(name, cases, tmp_path):
    (check,) = (check for check in CHECKS if check.name == name)
    found = [finds(check, values) for values in cases]
    assert set(found) == {0, 1}
    tests = [fires(check, values, number) for values, number in zip(cases, found, strict=True)]
    document = {"rule_files": [str(COMMITTED / "rules.yml")], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(document))
    code, said = promtool("test", "rules", "cases.yaml", folder=tmp_path)
    assert code == 0, said


def test_rules_and_panels_read_only_what_the_services_export():
    """A metric that is renamed leaves an alert that can never fire, and a panel that stays empty."""
    declared = [LOOP_OVERDUE, *METRICS, *ACTOR_METRICS, *OWN_POLICY_SERVER_METRICS, *ENV_WORKER_METRICS, *EVALUATOR_METRICS]
    parts = {f"{metric.name}_{part}" for metric in declared if metric.type == "summary" for part in ("sum", "count")}
    known = {metric.name for metric in declared} | parts
    expressions = [*(rule.expression for rule in RECORDING_RULES), *(alert.expression for alert in ALERTS)]
    expressions += [query for dashboard in DASHBOARDS.values() for query in queries(dashboard)]
    read = set().union(*map(metrics_in, expressions))
    assert read - known - FROM_THE_CLIENT - {str(rule) for rule in RECORDING_RULES} == set()
    assert len(read & known) > 20


def test_a_recorded_figure_comes_after_those_it_reads():
    """Prometheus computes a group from top to bottom: the other way round a figure is a minute late."""
    names = [rule.name for rule in RECORDING_RULES]
    for number, rule in enumerate(RECORDING_RULES):
        assert metrics_in(rule.expression) & set(names) <= set(names[:number])


def test_every_service_of_the_rules_is_scraped_by_compose():
    scraped = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert [job["job_name"] for job in scraped] == [*JOBS]
