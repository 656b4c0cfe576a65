"""The figures in PromQL, worked out by Prometheus itself from series that are written out."""

from __future__ import annotations

import itertools

import pytest
import yaml

from common.monitoring.figures import BOTTLENECKS, Scope
from common.monitoring.rules import BOTTLENECK
from common.runtime.bottleneck import Kind, find_bottleneck
from tests.common.monitoring.helpers import COMMITTED, ROOT, needs_promtool, promtool

pytestmark = pytest.mark.service

SHARES = (0.0, 0.1, 0.15, 0.5, 1.0)  # exact as whole seconds of a minute
HERE = ROOT / "tests" / "common" / "monitoring"


def test_a_scope_narrows_every_series_and_never_leaves_braces_empty():
    """A panel that forgets one matcher shows another run's figures."""
    narrow = Scope(window="1m", matchers='job=~"$job"')
    assert narrow.rate("x_total", 'phase="wait"') == 'rate(x_total{phase="wait", job=~"$job"}[1m])'
    assert Scope(window="5m").series("x") == "x"


@needs_promtool
def test_the_recorded_figures_are_what_they_say(tmp_path):
    """Rates, appetite and the number of actors that would be right, for two runs beside one another."""
    assert promtool("test", "rules", "figures.yaml", folder=HERE)[0] == 0, promtool("test", "rules", "figures.yaml", folder=HERE)[
        1
    ]


@needs_promtool
def test_prometheus_finds_the_bottleneck_that_the_live_view_finds(tmp_path):
    """The rule stands twice, in Python and in PromQL: over a grid of shares, and without actors, both say the same."""
    cases = [case(waits, held, wire) for waits, held, wire in itertools.product(SHARES, (*SHARES, None), (0.4, 0.5))]
    document = {"rule_files": [str(COMMITTED / "rules.yml")], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(document))
    code, said = promtool("test", "rules", "grid.yaml", folder=tmp_path)
    assert code == 0, said


def case(waits, held, wire):
    """One run: its learner waits, its actors are held up, its messages are on the wire for these shares of each minute."""
    given = {f'rookery_learner_phase_seconds_total{{phase="{name}"}}': share for name, share in pair("wait", waits).items()}
    if held is not None:
        given |= {
            f'rookery_actor_phase_seconds_total{{phase="{name}"}}': share for name, share in pair("credit_wait", held).items()
        }
        given |= {"rookery_actor_unacknowledged_seconds_total": 1, "rookery_learner_queue_seconds_total": 1 - wire}
    actors = {} if held is None else {"credit_wait": held, "env": 1 - held}
    kind = find_bottleneck(learner={"wait": waits, "train": 1 - waits}, actors=actors, wire=wire).kind
    return {
        "name": f"learner {waits}, actors {held}, wire {wire}: {kind}",
        "interval": "1m",
        "input_series": [{"series": name, "values": f"0+{60 * share:g}x10"} for name, share in given.items()],
        "promql_expr_test": [
            {
                "expr": BOTTLENECK,
                "eval_time": "8m",
                "exp_samples": [{"labels": BOTTLENECK, "value": BOTTLENECKS.index(kind)}],
            }
        ],
    }


def pair(waiting, share):
    """Parts of the time: waiting, and at work."""
    return {waiting: share, {"wait": "train", "credit_wait": "env"}[waiting]: 1 - share}


@needs_promtool
def test_nothing_is_said_of_a_learner_that_has_done_nothing(tmp_path):
    """A verdict before the first second would be made up."""
    still = {"series": 'rookery_learner_phase_seconds_total{phase="wait"}', "values": "0x10"}
    asked = {"expr": BOTTLENECK, "eval_time": "8m", "exp_samples": []}
    document = {
        "rule_files": [str(COMMITTED / "rules.yml")],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": [still], "promql_expr_test": [asked]}],
    }
    (tmp_path / "still.yaml").write_text(yaml.safe_dump(document))
    code, said = promtool("test", "rules", "still.yaml", folder=tmp_path)
    assert code == 0, said


def test_every_verdict_has_its_number():
    """A verdict that is added without a number would show as an empty panel; unknown is no series at all."""
    assert {*BOTTLENECKS, Kind.UNKNOWN} == set(Kind)
    assert BOTTLENECKS[0] is Kind.BALANCED
