"""Grafana dashboards from small parts: plain dictionaries, in the JSON model that files are provisioned from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from common.monitoring.figures import Scope
from common.monitoring.thresholds import Threshold

WIDTH = 24  # columns of Grafana's grid
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SHOWN = Scope(window="$__rate_interval", matchers='job=~"$job", namespace=~"$namespace", instance=~"$instance"')
GOOD, BAD, PLAIN = "green", "red", "text"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression, and what its series are called in the legend."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. `limit` colours a number, or is drawn as a line; `words` say what numbers mean."""

    title: str
    description: str
    queries: Sequence[Query]
    unit: str
    kind: Literal["stat", "timeseries"] = "timeseries"
    limit: Threshold | None = None
    words: Sequence[str] = ()
    stacked: bool = False
    most: float | None = None
    width: int = 8

    @property
    def height(self) -> int:
        """A number needs less room than a curve."""
        return 5 if self.kind == "stat" else 8

    def as_json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """The panel in its place."""
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "targets": [_target(query, letter) for query, letter in zip(self.queries, "ABCDEFGH", strict=False)],
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": _STAT if self.kind == "stat" else _GRAPH,
        }

    def _defaults(self) -> dict[str, Any]:
        bounds = {} if self.most is None else {"min": 0, "max": self.most}
        words = [{"type": "value", "options": {str(n): {"text": word, "index": n} for n, word in enumerate(self.words)}}]
        return {
            "unit": self.unit,
            "color": {"mode": "thresholds" if self.kind == "stat" else "palette-classic"},
            "thresholds": {"mode": "absolute", "steps": _steps(self.limit, coloured=self.kind == "stat")},
            "mappings": words if self.words else [],
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
    "graphMode": "area",
    "justifyMode": "auto",
    "orientation": "auto",
    "textMode": "auto",
}
_GRAPH = {
    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
    "tooltip": {"mode": "multi", "sort": "desc"},
}


def _target(query: Query, letter: str) -> dict[str, Any]:
    return {"refId": letter, "datasource": DATASOURCE, "expr": query.expression, "legendFormat": query.legend, "range": True}


def _steps(limit: Threshold | None, *, coloured: bool) -> list[dict[str, Any]]:
    """Colours from the least value upwards; the first step has no value."""
    if limit is None:
        return [{"color": PLAIN, "value": None}]
    good = GOOD if coloured else "transparent"
    below, above = (BAD, good) if limit.below else (good, BAD)
    return [{"color": below, "value": None}, {"color": above, "value": limit.value}]


def stat(
    title: str, description: str, query: Query, *, unit: str, limit: Threshold | None = None, words: Sequence[str] = ()
) -> Panel:
    """A number, with its recent course behind it."""
    return Panel(kind="stat", title=title, description=description, queries=[query], unit=unit, limit=limit, words=words, width=4)


@dataclass(frozen=True, slots=True)
class Row:
    """A question, and the panels that answer it, from left to right."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A page. `of` is the metric whose targets it may be narrowed to."""

    uid: str
    title: str
    description: str
    of: str
    rows: Sequence[Row] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        """The whole JSON model."""
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
            source | {"hide": 0, "includeAll": False, "multi": False, "current": {}, "options": [], "regex": ""},
            _variable("namespace", f"label_values({self.of}, namespace)", every=".*"),  # compose has none
            _variable("job", f'label_values({self.of}{{namespace=~"$namespace"}}, job)'),
            _variable("instance", f'label_values({self.of}{{namespace=~"$namespace", job=~"$job"}}, instance)'),
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
                if x + panel.width > WIDTH:
                    x, y, tallest = 0, y + tallest, 0
                laid.append(panel.as_json(len(laid) + 1, x, y))
                x, tallest = x + panel.width, max(tallest, panel.height)
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


def _variable(name: str, query: str, *, every: str = ".+") -> dict[str, Any]:
    """A choice of label values; all of them unless somebody chooses."""
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
