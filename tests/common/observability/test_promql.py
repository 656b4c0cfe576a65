"""The PromQL of recording rules and panels, computed by Prometheus from given series."""

from __future__ import annotations

import itertools

import pytest
import yaml

from common.observability.bottleneck import Kind, find_bottleneck
from common.observability.promql import BOTTLENECKS, Scope, versions_behind
from common.observability.rules import BOTTLENECK, LEARNER_CPU_LOST, ON_THE_WIRE
from tests.common.observability.helpers import COMMITTED, ROOT, needs_promtool, promtool

pytestmark = pytest.mark.service

SHARES = (0.0, 0.1, 0.15, 0.5, 1.0)  # exact as whole seconds of a minute
HERE = ROOT / "tests" / "common" / "observability"


def test_a_scope_narrows_every_series_and_never_leaves_braces_empty():
    """A panel without one of the matchers shows another run's values."""
    narrow = Scope(window="1m", matchers='job=~"$job"')
    assert narrow.rate("x_total", 'phase="wait"') == 'rate(x_total{phase="wait", job=~"$job"}[1m])'
    assert Scope(window="5m").series("x") == "x"


@needs_promtool
def test_the_recording_rules_have_the_values_worked_out_by_hand(tmp_path):
    """Rates, learner capacity and the number of actors that would be right, for two runs beside one another."""
    assert promtool("test", "rules", "recording.yaml", folder=HERE)[0] == 0, promtool(
        "test", "rules", "recording.yaml", folder=HERE
    )[1]


@needs_promtool
def test_an_evaluator_without_a_policy_is_no_version_behind(tmp_path):
    versions = {"learner": 5000, "evaluator-0": 4990, "evaluator-1": -1}
    series = [
        {"series": f'rookery_{name.split("-")[0]}_policy_version{{instance="{name}"}}', "values": f"{version}x5"}
        for name, version in versions.items()
    ]
    expected = {"expr": versions_behind(Scope(window="1m")), "eval_time": "2m"}
    expected["exp_samples"] = [{"labels": '{instance="evaluator-0"}', "value": 10}]
    document = {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [expected]}]}
    (tmp_path / "behind.yaml").write_text(yaml.safe_dump(document))
    code, said = promtool("test", "rules", "behind.yaml", folder=tmp_path)
    assert code == 0, said


@needs_promtool
def test_prometheus_finds_the_bottleneck_that_the_live_view_finds(tmp_path):
    """The rule stands twice, in Python and in PromQL: over a grid of shares, and without actors, both say the same."""
    waits = itertools.product(SHARES, (*SHARES, None), (0.4, 0.5), (1.0,), (1.0,))
    cores = itertools.product((0.0, 0.5), (0.0, 0.5, None), (0.4,), (0.25, 1.0), (0.25, 1.0))
    policies = itertools.product((0.1, 0.15), (0.0, 0.5, None), (0.5,), (1.0,), (0.25, 1.0), (0.4, 0.5))
    cases = [case(*shares) for shares in {*waits, *cores}] + [case(*shares, stale=stale) for *shares, stale in policies]
    cases.append(case(0.0, 0.0, 0.4, 0.25, 1.0, all_reduce=0.75))
    cases += [case(waits, held, 0.5, 1.0, 1.0, connected=2) for waits in SHARES for held in SHARES]
    cases += [
        case(waits, held, wire, 1.0, 1.0, cut_off=True) for waits, held, wire in itertools.product(SHARES, SHARES, (0.0, 0.5))
    ]
    cases += [case(0.5, 0.0, 0.4, 1.0, gets, threads=8) for gets in (0.5, 0.75, 0.9)]
    document = {"rule_files": [str(COMMITTED / "rules.yml")], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(document))
    code, said = promtool("test", "rules", "grid.yaml", folder=tmp_path)
    assert code == 0, said


@needs_promtool
def test_a_learner_whose_process_uses_several_cores_lacks_none(tmp_path):
    """On a GPU the CPU time is that of all threads, and may exceed the time of the loop."""
    expected = {"expr": str(LEARNER_CPU_LOST), "eval_time": "8m", "exp_samples": [{"labels": str(LEARNER_CPU_LOST), "value": 0}]}
    document = {"rule_files": [str(COMMITTED / "rules.yml")], "evaluation_interval": "1m"}
    document["tests"] = [case(0.5, None, 0.0, 1.5, 1.0) | {"promql_expr_test": [expected]}]
    (tmp_path / "several.yaml").write_text(yaml.safe_dump(document))
    code, said = promtool("test", "rules", "several.yaml", folder=tmp_path)
    assert code == 0, said


def case(waits, held, wire, learner_gets, actors_get, *, stale=0.0, all_reduce=0.0, connected=1, cut_off=False, threads=1):
    """One run: its learner waits, its actors are held up, its messages are on the wire for these shares of each minute.

    Of the rest of the minute, in which they compute, learner and actors get these shares of a core. New policies do not reach the
    share `stale` of the actors. For the share `all_reduce` the learner waits for its other ranks. Of `connected` actors one is
    scraped; where `cut_off`, another that has no learner is scraped too. A process uses the CPU time of `threads` loops.
    """
    given = {f'rookery_learner_phase_seconds_total{{phase="{name}"}}': share for name, share in pair("wait", waits).items()}
    given |= {"rookery_learner_computing_cpu_seconds_total": learner_gets * (1 - waits)}
    given |= {"rookery_learner_all_reduce_seconds_total": all_reduce}
    if held is not None:
        cpu = actors_get * (1 - held)
        given |= {"rookery_actor_computing_cpu_seconds_total": cpu, 'process_cpu_seconds_total{job="actor"}': threads * cpu}
        given |= {
            f'rookery_actor_phase_seconds_total{{phase="{name}"}}': share for name, share in pair("credit_wait", held).items()
        }
        given |= {"rookery_actor_unacknowledged_seconds_total": 1, "rookery_learner_queue_seconds_total": 1 - wire}
    actors = {} if held is None else {"credit_wait": held, "act": 1 - held}
    lost = {"learner_cpu_lost": (1 - learner_gets) * (1 - waits) - all_reduce}
    if held is not None:
        lost["actors_cpu_lost"] = (1 / actors_get - 1) * min(1, threads * actors_get) * (1 - held)
    stale = 0.0 if held is None else stale
    lost |= {"wire": wire, "unmeasured": "1 of 2" if connected > 1 else ""}
    kind = find_bottleneck(learner={"wait": waits, "train": 1 - waits}, actors=actors, stale=stale, **lost).kind
    series = [{"series": name, "values": f"0+{60 * share:g}x10"} for name, share in given.items()]
    series.append({"series": 'rookery_learner_workers_connected{role="actor"}', "values": f"{connected}x10"})
    if cut_off:
        other = {
            'rookery_actor_phase_seconds_total{phase="credit_wait", ': "0+60x10",
            "rookery_actor_unacknowledged_seconds_total{": "0+120x10",
        }
        other |= {"rookery_actor_connected{": "0x10"}
        series += [{"series": f'{name}instance="other"}}', "values": values} for name, values in other.items()]
    return {
        "name": f"learner {waits}, actors {held}, {connected}, wire {wire}, cores {learner_gets}, {actors_get}, {stale}: {kind}",
        "interval": "1m",
        "input_series": series if held is None else series + versions(stale),
        "promql_expr_test": [
            {
                "expr": str(BOTTLENECK),
                "eval_time": "8m",
                "exp_samples": [{"labels": str(BOTTLENECK), "value": BOTTLENECKS.index(kind)}],
            }
        ],
    }


def versions(stale):
    """The policy versions of the learner and of ten actors, of which the share `stale` keeps its first version."""
    series = {"rookery_learner_policy_version": "100+20x10"}
    for number in range(10):
        labels = f'instance="actor-{number}"'
        series[f"rookery_actor_policy_version{{{labels}}}"] = "99x10" if number < 10 * stale else "99+20x10"
        series[f'rookery_actor_messages_sent_total{{kind="trajectory", {labels}}}'] = "0+6x10"
    return [{"series": name, "values": values} for name, values in series.items()]


def pair(waiting, share):
    """Parts of the time: waiting, and at work."""
    return {waiting: share, {"wait": "train", "credit_wait": "act"}[waiting]: 1 - share}


@needs_promtool
def test_nothing_is_said_of_a_learner_that_has_done_nothing(tmp_path):
    """A verdict before the first second would be made up."""
    still = {"series": 'rookery_learner_phase_seconds_total{phase="wait"}', "values": "0x10"}
    asked = {"expr": str(BOTTLENECK), "eval_time": "8m", "exp_samples": []}
    document = {
        "rule_files": [str(COMMITTED / "rules.yml")],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": [still], "promql_expr_test": [asked]}],
    }
    (tmp_path / "still.yaml").write_text(yaml.safe_dump(document))
    code, said = promtool("test", "rules", "still.yaml", folder=tmp_path)
    assert code == 0, said


@needs_promtool
@pytest.mark.parametrize(("minute", "known"), [(8, False), (11, False), (14, True)])
def test_a_start_of_another_learner_leaves_no_bottleneck_and_no_wire_in_its_window(minute, known, tmp_path):
    """In minute 7 another learner process began; messages were on the wire for half of the time before and after."""
    given = case(0.5, 0.5, 0.5, 1.0, 1.0)
    for series in given["input_series"]:
        series["values"] = series["values"].replace("x10", "x20")
    given["input_series"].append({"series": 'process_start_time_seconds{job="learner"}', "values": "1000x6 1420x20"})
    values = {str(BOTTLENECK): BOTTLENECKS.index(Kind.NETWORK), str(ON_THE_WIRE): 0.5}
    given["promql_expr_test"] = [
        {"expr": name, "eval_time": f"{minute}m", "exp_samples": [{"labels": name, "value": value}] if known else []}
        for name, value in values.items()
    ]
    document = {"rule_files": [str(COMMITTED / "rules.yml")], "evaluation_interval": "1m", "tests": [given]}
    (tmp_path / "restart.yaml").write_text(yaml.safe_dump(document))
    code, said = promtool("test", "rules", "restart.yaml", folder=tmp_path)
    assert code == 0, said


def test_every_verdict_has_its_number():
    """A verdict that is added without a number would show as an empty panel; unknown is no series at all."""
    assert {*BOTTLENECKS, Kind.UNKNOWN} == set(Kind)
    assert BOTTLENECKS[0] is Kind.BALANCED
