"""The metrics of the evaluator as a scrape sees them."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.evaluator.metrics import PHASES, EvaluatorMetrics

pytestmark = pytest.mark.service

SERIES_BUDGET = 60


def series(metrics):
    """{(name, label values): value} of a scrape."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)")
def test_promtool_finds_nothing_to_say():
    """Names, units and help texts as Prometheus wants them, before and after the first readings."""
    metrics = EvaluatorMetrics()
    metrics.policy_lag.observe(3)
    metrics.phases.enter(PHASES[0])
    checked = subprocess.run(["promtool", "check", "metrics"], input=metrics.render(), capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_the_series_stay_within_their_budget():
    """A thousand actors times this is what Prometheus has to hold."""
    metrics = EvaluatorMetrics()
    assert len(series(metrics)) <= SERIES_BUDGET


def test_every_label_value_is_there_before_anything_happened():
    """Rates and alerts over them are right from the first scrape."""
    read = series(EvaluatorMetrics())
    for declared in EvaluatorMetrics().declared:
        for values in declared.labels.values():
            for value in values:
                assert (declared.name, value) in read
    for phase in PHASES:
        assert read["rookery_evaluator_phase_seconds_total", phase] == 0


def test_the_phases_sum_to_the_wall_time():
    """No second is lost or counted twice."""
    now = [5.0]
    metrics = EvaluatorMetrics(clock=lambda: now[0])
    for number, phase in enumerate(PHASES, start=1):
        metrics.phases.enter(phase)
        now[0] += number
    read = series(metrics)
    assert sum(value for key, value in read.items() if key[0] == "rookery_evaluator_phase_seconds_total") == now[0] - 5.0


def test_every_help_text_is_a_sentence():
    """Whoever reads the page in a browser has nothing else to go by."""
    for declared in EvaluatorMetrics().declared:
        assert declared.help[0].isupper() or declared.help[0].isdigit()
        assert declared.help.endswith(".")
