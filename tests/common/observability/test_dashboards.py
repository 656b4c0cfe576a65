"""The dashboards by the rules of Grafana's own dashboard linter, and for a reader."""

from __future__ import annotations

import re

import pytest

from common.observability.checks import CHECKS, WAITING
from common.observability.checks.base import CPU_LOST, ON_THE_WIRE
from common.observability.panels import Panel
from tests.common.observability.helpers import DASHBOARDS, SERIES, metrics_in, panels, queries

pytestmark = pytest.mark.pure

VARIABLE = {"type": "prometheus", "uid": "${datasource}"}
UNITS = {"short", "none", "percentunit", "bytes", "Bps", "ops", "s", "bool_yes_no"}  # of Grafana's list, those in use

each_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=lambda dashboard: dashboard["uid"])


def variables(dashboard):
    """The template variables by name."""
    return {variable["name"]: variable for variable in dashboard["templating"]["list"]}


@each_dashboard
def test_the_data_source_is_a_variable(dashboard):
    """It is chosen at import; a uid of the author's own Prometheus, or an import prompt, works nowhere else."""
    chosen = variables(dashboard)["datasource"]
    assert (chosen["type"], chosen["query"], chosen["label"]) == ("datasource", "prometheus", "Data source")
    assert "__inputs" not in dashboard


@each_dashboard
@pytest.mark.parametrize(("name", "every"), [("job", ".+"), ("instance", ".+"), ("namespace", ".*")])
def test_jobs_and_instances_can_be_chosen(dashboard, name, every):
    """All of them at first; compose has no namespaces, so that none must match as well."""
    variable = variables(dashboard)[name]
    assert (variable["type"], variable["datasource"], variable["label"]) == ("query", VARIABLE, name.capitalize())
    assert (variable["multi"], variable["includeAll"], variable["allValue"]) == (True, True, every)
    assert variable["current"]["value"] == ["$__all"]


@each_dashboard
def test_choices_come_from_label_values_and_follow_the_time_range(dashboard):
    """The processes of last week are not those of today."""
    for variable in variables(dashboard).values():
        if variable["type"] == "query":
            label = {"run": "run_id", "scalar": "name"}.get(variable["name"], variable["name"])
            assert re.fullmatch(rf"label_values\(rookery_\w+(\{{.*\}})?, {label}\)", variable["query"]["query"])
            assert variable["refresh"] == 2


@each_dashboard
def test_every_panel_and_query_uses_the_chosen_data_source(dashboard):
    """One that does not shows another Prometheus than its neighbours."""
    for panel in panels(dashboard):
        assert panel["datasource"] == VARIABLE
        assert all(target["datasource"] == VARIABLE for target in panel["targets"])


@each_dashboard
def test_every_panel_has_a_title_of_its_own_a_description_and_a_query(dashboard):
    """A curve without a word is a riddle, and an empty panel a worse one."""
    titles = [panel["title"] for panel in panels(dashboard)]
    assert all(titles)
    assert len(set(titles)) == len(titles)
    for panel in panels(dashboard):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@each_dashboard
def test_every_panel_has_a_unit(dashboard):
    """12000000 is a riddle; 12 MB is not."""
    assert {panel["fieldConfig"]["defaults"]["unit"] for panel in panels(dashboard)} <= UNITS


@each_dashboard
def test_every_series_is_narrowed_to_the_choice(dashboard):
    """A panel that ignores the choice of run, job, namespace or instance lies about it."""
    for query in queries(dashboard):
        found = SERIES.findall(query)
        assert found, query
        assert any(metric == "rookery_run_info" for metric, *_ in found), query
        for metric, matchers, _ in found:
            if metric == "rookery_run_info":
                assert matchers == '{run_id=~"$run"}'
                continue
            for name in ("job", "namespace", "instance"):
                assert f'{name}=~"${name}"' in matchers, f"{metric} in {query}"


@each_dashboard
def test_a_rate_is_taken_over_the_interval_that_grafana_works_out(dashboard):
    """A fixed one is empty where Prometheus scrapes seldom, and blind where one zooms out."""
    for query in queries(dashboard):
        assert {window for _, _, window in SERIES.findall(query) if window} <= {"[$__rate_interval]"}


@each_dashboard
def test_a_counter_is_shown_as_a_rate(dashboard):
    """Its total since some restart means nothing."""
    for query in queries(dashboard):
        for match in SERIES.finditer(query):
            if match[1].endswith(("_total", "_sum", "_count")):
                assert query[: match.start()].endswith(("rate(", "increase(")), query


@each_dashboard
def test_it_can_be_provisioned_and_found_again(dashboard):
    """From a file Grafana takes the uid as it is; with an id it would overwrite somebody else's dashboard."""
    assert re.fullmatch(r"rookery-[a-z]+", dashboard["uid"])
    assert (dashboard["id"], dashboard["editable"], dashboard["timezone"]) == (None, False, "")
    assert dashboard["title"].startswith("Rookery / ")
    assert dashboard["tags"] == ["rookery"]
    assert (dashboard["time"], dashboard["refresh"]) == ({"from": "now-30m", "to": "now"}, "10s")


@each_dashboard
def test_it_belongs_to_the_others(dashboard):
    """One crosshair over all curves, links to the other pages, and marks where alerts fired."""
    assert dashboard["graphTooltip"] == 1
    assert [link["tags"] for link in dashboard["links"]] == [["rookery"]]
    (alerts,) = dashboard["annotations"]["list"]
    assert alerts["expr"].startswith('ALERTS{app="rookery"')
    assert alerts["datasource"] == VARIABLE


@each_dashboard
def test_colours_and_lines_are_the_limits_of_the_alerts(dashboard):
    """A panel that is red where no alert fires, or the reverse, is worse than none."""
    limits = {
        limit.value for limit in (WAITING, ON_THE_WIRE, CPU_LOST, *(check.threshold for check in CHECKS if check.threshold))
    }
    for panel in panels(dashboard):
        _, *steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert {step["value"] for step in steps} <= limits, panel["title"]


@each_dashboard
def test_no_panel_lies_over_another_or_beyond_the_edge(dashboard):
    """Grafana would move them, and the page would look another way than it was meant."""
    taken = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_first_row_answers_the_five_questions():
    """The first row shows at once whether anything is wrong."""
    row, *rest = DASHBOARDS["dashboards/rookery-overview.json"]["panels"]
    first = [panel["title"] for panel in rest if panel["gridPos"]["y"] == 1]
    assert row["type"] == "row"
    assert first[:5] == [
        "Mean return of 100 episodes", "Emulator frames per second", "Bottleneck", "Policy lag", "Env steps dropped",
    ]  # fmt: skip
    assert sum(panel["gridPos"]["w"] for panel in rest if panel["gridPos"]["y"] == 1) == 24


def test_the_verdict_is_shown_in_words():
    """A number from 0 to 5 would have to be looked up."""
    (verdict,) = [panel for panel in panels(DASHBOARDS["dashboards/rookery-overview.json"]) if panel["title"] == "Bottleneck"]
    (mapping,) = verdict["fieldConfig"]["defaults"]["mappings"]
    words = [mapping["options"][str(number)]["text"] for number in range(6)]
    assert words == ["balanced", "learner-bound", "actor-bound", "credit-bound", "network-bound", "cpu-starved"]


def test_the_time_left_is_the_learners_own_estimate():
    """Another estimate would differ from that of `rookery top` in a warm-up, and near a target or a wall-clock budget."""
    (panel,) = [panel for panel in panels(DASHBOARDS["dashboards/rookery-overview.json"]) if panel["title"] == "Time left"]
    assert metrics_in(panel["targets"][0]["expr"]) - {"rookery_run_info"} == {"rookery_learner_time_left_seconds"}


@each_dashboard
def test_one_run_is_shown(dashboard):
    """Sums are by namespace: two runs of one Prometheus without namespaces would be one line."""
    run = variables(dashboard)["run"]
    assert (run["multi"], run["includeAll"]) == (False, False)


def test_each_scalar_of_an_algorithm_has_a_scale_of_its_own():
    """A learning rate of 3e-4 beside a norm of 0.5 is a flat line."""
    dashboard = DASHBOARDS["dashboards/rookery-learner.json"]
    (panel,) = [panel for panel in panels(dashboard) if "training_metric" in panel["targets"][0]["expr"]]
    assert (panel["title"], panel["repeat"]) == ("$scalar", "scalar")
    assert variables(dashboard)["scalar"]["multi"]


def test_a_panel_has_all_its_queries_under_names_of_their_own():
    panel = Panel("Title", "Description.", {str(number): f"vector({number})" for number in range(12)})
    targets = panel.as_json(1, 0, 0, 8)["targets"]
    assert [target["legendFormat"] for target in targets] == [str(number) for number in range(12)]
    assert len({target["refId"] for target in targets}) == 12
