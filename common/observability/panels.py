"""Grafana dashboards from small parts: plain dictionaries, in the JSON model that files are provisioned from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Literal

from common.observability.checks import Threshold
from common.observability.learner_metrics import RUN_INFO as RUN
from common.observability.metrics import Metric
from common.observability.promql import Scope

WIDTH = 24  # columns of Grafana's grid
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SHOWN = Scope(
    window="$__rate_interval", matchers='job=~"$job", namespace=~"$namespace", instance=~"$instance"', run='run_id=~"$run"'
)
GOOD, BAD, PLAIN = "green", "red", "text"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `limit` colours a number, or is drawn as a line; `meanings` are texts for the numbers 0, 1, ..."""

    title: str
    description: str
    queries: Mapping[str, str]  # expressions in PromQL by the legends of their series
    _: KW_ONLY
    unit: str = "short"
    kind: Literal["stat", "timeseries"] = "timeseries"
    limit: Threshold | None = None
    meanings: Sequence[str] = ()
    stacked: bool = False
    repeat: str = ""  # variable of which each chosen value has a panel
    maximum: float | None = None
    width: int = 0  # columns; 0: that of its row

    @property
    def height(self) -> int:
        """Return the rows of the grid: a number needs fewer than a curve."""
        return 5 if self.kind == "stat" else 8

    def as_json(self, number: int, x: int, y: int, width: int) -> dict[str, Any]:
        """Return the panel at its place in the grid."""
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"h": self.height, "w": width, "x": x, "y": y},
            "targets": [self._target(*query, chr(ord("A") + place)) for place, query in enumerate(self.queries.items())],
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": _STAT if self.kind == "stat" else _GRAPH,
            **({"repeat": self.repeat, "repeatDirection": "h", "maxPerRow": WIDTH // width} if self.repeat else {}),
        }

    def _target(self, legend: str, expression: str, letter: str) -> dict[str, Any]:
        now = self.kind == "stat"  # the last number of a time range would outlive the process that it is of
        named = {"refId": letter, "datasource": DATASOURCE, "legendFormat": legend}
        return named | {"expr": expression, "instant": now, "range": not now}

    def _defaults(self) -> dict[str, Any]:
        bounds = {} if self.maximum is None else {"min": 0, "max": self.maximum}
        meanings = [{"type": "value", "options": {str(n): {"text": text, "index": n} for n, text in enumerate(self.meanings)}}]
        return {
            "unit": self.unit,
            "color": {"mode": "thresholds" if self.kind == "stat" else "palette-classic"},
            "thresholds": {"mode": "absolute", "steps": _steps(self.limit, coloured=self.kind == "stat")},
            "mappings": meanings if self.meanings else [],
            "custom": {} if self.kind == "stat" else self._curve(),
            **bounds,
        }

    def _curve(self) -> dict[str, Any]:
        return {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 60 if self.stacked else 10,
            "showPoints": "never",
            "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if self.limit else "off"},
        }


_STAT = {
    "reduceOptions": {"values": False, "calcs": ["lastNotNull"], "fields": ""},
    "colorMode": "value",
    "graphMode": "none",
    "justifyMode": "auto",
    "orientation": "auto",
    "textMode": "auto",
    "percentChangeColorMode": "standard",
    "showPercentChange": False,
    "wideLayout": True,
}
_GRAPH = {
    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
    "tooltip": {"mode": "multi", "sort": "desc"},
}


def _steps(limit: Threshold | None, *, coloured: bool) -> list[dict[str, Any]]:
    """Return colours from the least value upwards; the first step has no value."""
    if limit is None:
        return [{"color": PLAIN, "value": None}]
    good = GOOD if coloured else "transparent"
    below, above = (BAD, good) if limit.below else (good, BAD)
    return [{"color": below, "value": None}, {"color": above, "value": limit.value}]


stat = partial(Panel, kind="stat", width=4)
"""Makes a panel of one number, of the end of the time range."""
share = partial(Panel, unit="percentunit", maximum=1)
"""Makes a panel of parts of a whole, from 0 to 1."""
per_second = partial(Panel, unit="ops")
"""Makes a panel of counts per second."""


@dataclass(frozen=True, slots=True)
class Row:
    """A title, and its panels from left to right."""

    title: str
    panels: Sequence[Panel]
    width: int = 8  # columns of each panel


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One page of one run. It can be narrowed to targets that export the metric `of`; `variables` are more choices by name."""

    uid: str
    title: str
    description: str
    of: Metric[Any]
    rows: Sequence[Row] = field(default_factory=tuple)
    variables: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the JSON model of Grafana."""
        return {
            "id": None,
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["rookery"],
            "schemaVersion": 39,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,  # one crosshair for all panels
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "",  # the reader's own
            "links": [_LINK],
            "annotations": {"list": [_ALERTS]},
            "templating": {"list": self._variables()},
            "panels": self._laid_out(),
        }

    def _variables(self) -> list[dict[str, Any]]:
        source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1}
        return [
            source | {"hide": 0, "includeAll": False, "multi": False, "options": [], "regex": ""},
            _variable("namespace", f"label_values({self.of}, namespace)", every=".*"),  # compose has none
            _one_of("run", f'label_values({RUN}{{namespace=~"$namespace"}}, run_id)'),
            _variable("job", f'label_values({self.of}{{namespace=~"$namespace"}}, job)'),
            _variable("instance", f'label_values({self.of}{{namespace=~"$namespace", job=~"$job"}}, instance)'),
            *(_variable(name, query) for name, query in self.variables.items()),
        ]

    def _laid_out(self) -> list[dict[str, Any]]:
        laid: list[dict[str, Any]] = []
        y = 0
        for row in self.rows:
            place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
            laid.append(
                {"id": len(laid) + 1, "type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": place}
            )
            x, y, tallest = 0, y + 1, 0
            for panel in row.panels:
                width = panel.width or row.width
                if x + width > WIDTH:
                    x, y, tallest = 0, y + tallest, 0
                laid.append(panel.as_json(len(laid) + 1, x, y, width))
                x, tallest = x + width, max(tallest, panel.height)
            y += tallest
        return laid


_LINK: Mapping[str, Any] = {
    "type": "dashboards",
    "title": "Rookery",
    "tags": ["rookery"],
    "asDropdown": False,
    "includeVars": False,  # an instance of one page is none of another's
    "keepTime": True,
    "targetBlank": False,
    "icon": "external link",
    "tooltip": "",
    "url": "",
}
_ALERTS: Mapping[str, Any] = {
    "name": "Alerts",
    "datasource": DATASOURCE,
    "enable": True,
    "iconColor": BAD,
    "expr": 'ALERTS{app="rookery", alertstate="firing", severity!="none"}',
    "titleFormat": "{{alertname}}",
    "textFormat": "{{instance}}",
    "step": "30s",
}


def _one_of(name: str, query: str) -> dict[str, Any]:
    """Return a variable with one value of a label, at first the last in the alphabet: the newest run of a preset."""
    variable = _variable(name, query) | {"includeAll": False, "multi": False, "sort": 2}  # the last first
    return {key: value for key, value in variable.items() if key not in ("allValue", "current")}


def _variable(name: str, query: str, *, every: str = ".+") -> dict[str, Any]:
    """Return a variable with the values of a label, all of which are chosen at first."""
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "definition": query,
        "refresh": 2,  # when the time range changes
        "sort": 1,
        "includeAll": True,
        "multi": True,
        "allValue": every,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
        "options": [],
        "regex": "",
    }
