"""`python -m common.observability`: write rules, dashboards, and the tables between two comments of three pages of docs/."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError, DropReason
from common.observability import env_metrics, learner_metrics, worker_metrics
from common.observability.checks import CHECKS, WAITING, Check
from common.observability.checks.base import CPU_LOST, ON_THE_WIRE, STALE
from common.observability.checks.learner import COPY_AGE
from common.observability.checks.processes import WARM_UP
from common.observability.dashboards import DASHBOARDS
from common.observability.deployment import JOBS
from common.observability.metrics import Metric
from common.observability.rules import RECORDING_RULES, groups

FOLDER = Path("k8s/components/monitoring")
HEAD = "# Written by `make monitoring` from common/observability. Change it there.\n"


def files(*, docs: str = "") -> dict[str, str]:
    """Return the text of every generated file by its name within the folder; `docs` is the address of docs/, "" for none."""
    rules = {"groups": groups(check.as_rule(docs=docs) for check in CHECKS if check.promql)}
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "rookery", "labels": {"app.kubernetes.io/name": "rookery", "app.kubernetes.io/part-of": "rookery"}},
        "spec": rules,
    }
    return {
        "rules.yml": HEAD + _yaml(rules),
        "prometheusrule.yaml": HEAD + _yaml(resource),
        **{f"dashboards/{dashboard.uid}.json": json.dumps(dashboard.as_json(), indent=2) + "\n" for dashboard in DASHBOARDS},
    }


class _Dumper(yaml.SafeDumper):
    """Text of several lines stays readable."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _yaml(document: Mapping[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10_000)


def main(argv: Sequence[str] = ()) -> int:
    """Replace the files; exit code 2 where this is not the root of the repository."""
    parser = argparse.ArgumentParser(prog="python -m common.observability", description=__doc__)
    parser.add_argument("--docs", default="", metavar="URL", help="address of docs/, for the runbook_url of each alert")
    try:
        _write(docs=parser.parse_args(argv).docs)
    except ConfigError as error:
        print(f"python -m common.observability: error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


def _write(*, docs: str) -> None:
    if not FOLDER.is_dir():
        raise ConfigError("no folder to write into", found=str(Path.cwd()), wanted=f"one with {FOLDER}", fix="start it there")
    for name, text in files(docs=docs).items():
        path = FOLDER / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for page in PAGES:
        page.write_text(generated(page.read_text(encoding="utf-8")), encoding="utf-8")


# --- tables of docs/ ---

PAGES = (Path("docs/metrics.md"), Path("docs/monitoring.md"), Path("docs/doctor.md"))
_PART = re.compile(r"(?P<begin><!-- generated: (?P<name>[\w ]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown; `|` within a cell is escaped."""
    lines = [tuple(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    lines.insert(1, ("---",) * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _metrics(metrics: Iterable[Metric[Any]]) -> str:
    rows = ((f"`{metric.name}`", metric.type, _labels(metric), metric.help) for metric in metrics)
    return table(("name", "type", "labels", "meaning"), rows)


def _labels(metric: Metric[Any]) -> str:
    return ", ".join(f"`{label}`{_values(tuple(values))}" for label, values in metric.labels.items())


def _values(values: tuple[str, ...]) -> str:
    if not values:
        return ""
    return " ([drop reasons](#drop-reasons))" if values == tuple(DropReason) else f" ({', '.join(values)})"


def _dashboards() -> str:
    rows = (
        (
            dashboard.title.removeprefix("Rookery / ") if number == 0 else "",
            row.title,
            "; ".join(panel.title for panel in row.panels),
        )
        for dashboard in DASHBOARDS
        for number, row in enumerate(dashboard.rows)
    )
    return table(("dashboard", "row", "panels"), rows)


def _checks() -> str:
    rows = (
        (f"[{check.name}](#{check.name.lower()})", check.sentence, _alert(check), "yes" if check.predicate else "")
        for check in CHECKS
    )
    return table(("check", "meaning", "alert", "`rookery doctor`"), rows)


def _alert(check: Check) -> str:
    minutes = check.lasting.removesuffix("m")
    after = "at once" if minutes == "0" else f"after {minutes} minute{'s' if minutes != '1' else ''}"
    return f"{check.severity}, {after}" if check.promql else ""


def _thresholds() -> str:
    reached = [("bottleneck: a side waits", WAITING), ("bottleneck: the network", ON_THE_WIRE), ("bottleneck: policies", STALE)]
    limits = [("bottleneck: CPU", CPU_LOST)]
    limits += [(check.name, check.threshold) for check in CHECKS if check.threshold]
    limits += [("MemoryGrowing: age of the process", WARM_UP), ("UploadFailing: age of the copy", COPY_AGE)]
    rows = [(name, f"`>= {limit.value:g}`", limit.unit, limit.why) for name, limit in reached]  # as `find_bottleneck` compares
    rows += [(name, f"`{limit.comparison}`", limit.unit, limit.why) for name, limit in limits]
    return table(("of", "bad is", "unit", "why"), rows)


def _runbooks() -> str:
    return "\n".join(f"### {check.name}\n{_alert(check) or 'doctor'}. *{check.sentence}.*\n\n{check.runbook}" for check in CHECKS)


PARTS: Mapping[str, Callable[[], str]] = {
    "metrics of the learner": lambda: _metrics(learner_metrics.METRICS),
    "metrics of an actor": lambda: _metrics(worker_metrics.ACTOR_METRICS),
    "metrics of an evaluator": lambda: _metrics(worker_metrics.EVALUATOR_METRICS),
    "metrics of a policy server": lambda: _metrics(env_metrics.OWN_POLICY_SERVER_METRICS),
    "metrics of an env worker": lambda: _metrics(env_metrics.ENV_WORKER_METRICS),
    "services": lambda: table(
        ("`job`", "its metrics begin with"), ((f"`{job}`", f"`rookery_{role}_`") for job, role in JOBS.items())
    ),
    "dashboards": _dashboards,
    "recording rules": lambda: table(("name", "meaning"), ((f"`{rule}`", rule.help) for rule in RECORDING_RULES)),
    "checks": _checks,
    "thresholds": _thresholds,
    "runbooks": _runbooks,
    "findings": lambda: table(
        ("finding", "meaning"), ((f"`{check.name}`", check.sentence) for check in CHECKS if check.predicate)
    ),
}


def generated(page: str) -> str:
    """Return a page with its generated parts as the code has them now. Raises `ConfigError` for a part of an unknown name."""

    def part(found: re.Match[str]) -> str:
        if found["name"] not in PARTS:
            raise ConfigError("no such generated part", found=found["name"], wanted=f"one of {', '.join(PARTS)}")
        return f"{found['begin']}\n{PARTS[found['name']]()}\n{found['end']}"

    return _PART.sub(part, page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
