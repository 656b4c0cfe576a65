"""A real Prometheus beside a real run: it has an answer for every panel, rule and alert, and for `rookery top` and `doctor`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from common.observability.checks import CHECKS
from common.observability.rules import RECORDING_RULES
from tests.common.observability.helpers import COMMITTED, DASHBOARDS, queries
from tests.ports import free_ports
from tests.system.conftest import Http, Service

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian package prometheus)"),
]

SCRAPE_SECONDS = 1
ALERTS = [check for check in CHECKS if check.promql]
CHOSEN = {
    "$__rate_interval": f"{10 * SCRAPE_SECONDS}s",
    "$job": ".+",
    "$namespace": ".*",
    "$instance": ".+",
    "$run": ".+",
    "$scalar": ".+",
}


class Prometheus(Http):
    """One that scrapes a run of this machine every second, and evaluates our rules as often."""

    def __init__(self, folder: Path, jobs: dict[str, list[int]]) -> None:
        """`jobs`: the metrics ports of each."""
        (port,) = free_ports(1)
        super().__init__(port)
        every = f"{SCRAPE_SECONDS}s"
        scraped = [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
            for job, ports in jobs.items()
        ]
        config = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "rule_files": [str(COMMITTED / "rules.yml")],
            "scrape_configs": scraped,
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        own = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                ["prometheus", *own, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=subprocess.STDOUT
            )

    def series(self, expression: str) -> list[dict[str, object]]:
        """Return the present result of an expression; fails where Prometheus rejects it."""
        code, body = self.get("/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
        assert code == 200, f"{expression}\n{body.decode()}"
        return json.loads(body)["data"]["result"]

    def rules(self) -> list[dict[str, object]]:
        """Every rule as Prometheus sees it, its health and its alerts included."""
        groups = json.loads(self.get("/api/v1/rules")[1])["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


@pytest.fixture
def scraped(colony, wait) -> Iterator[tuple[Service, Prometheus]]:
    """A run that trains, and a Prometheus that has heard of each of its services."""
    run = colony.train("policy_server.workers=1")
    base = int(run.http.url.rpartition(":")[2])
    jobs = {"learner": [base], "evaluator": [base + 1], "actor": [base + 2, base + 3], "env-worker": [base + 4, base + 5]}
    server = Prometheus(colony.folder, jobs)
    try:
        wait(lambda: server.get("/-/ready")[0] == 200, "Prometheus is ready")
        wait(lambda: sum(float(s["value"][1]) for s in server.series("up")) == 6, "all six targets are up")
        yield run, server
    finally:
        server.process.terminate()
        server.process.wait()


def chosen(expression: str) -> str:
    """Return the expression that Grafana sends with the default choices."""
    for variable, value in CHOSEN.items():
        expression = expression.replace(variable, value)
    return expression


def asked() -> list[str]:
    """Every expression that must give at least one series while a run is well."""
    panels = [query for dashboard in DASHBOARDS.values() for query in queries(dashboard)]
    variables = [variable for dashboard in DASHBOARDS.values() for variable in dashboard["templating"]["list"]]
    choices = [re.fullmatch(r"label_values\((.*), \w+\)", v["definition"])[1] for v in variables if v["type"] == "query"]
    compared = [alert.promql for alert in ALERTS if alert.condition or alert.threshold]
    return sorted({chosen(expression) for expression in [*panels, *choices, *map(str, RECORDING_RULES), *compared]})


def test_everything_that_is_asked_of_a_run_has_an_answer(scraped, wait, said):
    """A panel that says "No data", and an alert over a series that does not exist, look like health.

    Beside that: Prometheus evaluates every rule without an error, of a run that is well only the watchdog speaks, and
    `rookery top` and `doctor` know the run by the address of its Prometheus, the one that a user of a cluster has.
    """
    run, prometheus = scraped
    missing = set(asked())
    assert len(missing) > 60

    def answered() -> bool:
        missing.difference_update([expression for expression in missing if prometheus.series(expression)])
        return not missing

    try:
        wait(answered, "every expression has a series")
    except AssertionError:
        pytest.fail("no series for:\n" + "\n".join(sorted(missing)))
    for expression in [dashboard["annotations"]["list"][0]["expr"] for dashboard in DASHBOARDS.values()]:
        prometheus.series(expression)
    for alert in ALERTS:
        prometheus.series(alert.expression)
    wait(lambda: all(rule["health"] == "ok" for rule in prometheus.rules()), "every rule was evaluated")
    firing = {rule["name"] for rule in prometheus.rules() if any(a["state"] == "firing" for a in rule.get("alerts", []))}
    assert firing == {"Watchdog"}

    base = int(run.http.url.rpartition(":")[2])
    old = "rookery_learner_updates_total offset 5s > 0"
    wait(lambda: prometheus.series(old), "Prometheus has seen it train for five seconds")
    commands = "doctor --seconds 4 --prometheus", "top --once --prometheus"

    def complete() -> bool:
        (code, words), (shown, table) = said(*(f"{line} {prometheus.url}" for line in commands))
        print(words, table)  # noqa: T201 - shown with a failure
        head = words.partition("\n")[0]
        measured = f"learner 127.0.0.1:{base}" in head and re.search(r", over [1-9]\d* s", head)
        judged = code in {0, 1} and re.search(r"(-bound|-starved|balanced)\b", words)
        return measured and judged and shown == 0 and f"actor 127.0.0.1:{base + 3}" in table and "mean100" in table

    wait(complete, "table and verdict are of the whole run")  # Prometheus gives up a scrape after a second
    ((code, line),) = said(f"doctor --prometheus {run.http.url}")
    assert (code, line.count("\n")) == (2, 1)
    assert "no Prometheus answers there" in line
