"""What a Grafana panel is made of: a few words for the JSON that Grafana reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

COLUMNS, HEIGHT = 24, 8
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A graph over time, a heatmap or a number: ``queries`` are (PromQL, legend)."""

    title: str
    about: str  # what it shows, and what to do when it looks bad
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    limit: float | None = None  # from here on it is bad, and drawn red
    stacked: bool = False
    most: float | None = None  # of the axis

    def as_json(self, number: int, x: int, y: int) -> Json:
        """The panel at a place of the grid."""
        return {
            "id": number,
            "title": self.title,
            "description": self.about,
            "type": self.kind,
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": HEIGHT},
            "targets": [self._target(letter, *query) for letter, query in zip("ABCDEFGH", self.queries, strict=False)],
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": _OPTIONS[self.kind],
        }

    def _target(self, letter: str, expression: str, legend: str) -> Json:
        target = {"refId": letter, "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
        return {**target, "format": "heatmap"} if self.kind == "heatmap" else target

    def _defaults(self) -> Json:
        steps: list[Json] = [{"color": "green", "value": None}]
        if self.limit is not None:
            steps.append({"color": "red", "value": self.limit})
        custom: Json = {}
        if self.kind == "timeseries":
            custom = {
                "lineWidth": 1,
                "fillOpacity": 20 if self.stacked else 5,
                "showPoints": "never",
                "spanNulls": False,
            }
            custom["stacking"] = {"mode": "normal" if self.stacked else "none", "group": "A"}
            custom["thresholdsStyle"] = {"mode": "off" if self.limit is None else "dashed"}
        defaults: Json = {"unit": self.unit, "min": 0, "custom": custom}
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        return defaults if self.most is None else {**defaults, "max": self.most}


_OPTIONS: dict[str, Json] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 64},
        "yAxis": {"unit": "short"},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": False},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
    },
}


@dataclass(frozen=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """Rows under each other, and the variables that their queries use: (name, PromQL of its values)."""

    uid: str
    title: str
    about: str
    variables: Sequence[tuple[str, str]]
    rows: Sequence[Row]
    links: Sequence[Json] = field(default_factory=tuple)
    annotations: Sequence[tuple[str, str, str]] = ()  # (name, PromQL, text)

    def as_json(self) -> Json:
        """What Grafana reads from a file."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.about,
            "tags": ["tokenmill"],
            "editable": False,
            "schemaVersion": 39,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "links": list(self.links),
            "annotations": {"list": [self._annotation(*annotation) for annotation in self.annotations]},
            "templating": {"list": [_DATASOURCE_VARIABLE, *(_variable(*variable) for variable in self.variables)]},
            "panels": self._panels(),
        }

    def _annotation(self, name: str, expression: str, text: str) -> Json:
        return {
            "name": name,
            "datasource": DATASOURCE,
            "enable": True,
            "iconColor": "orange",
            "expr": expression,
            "titleFormat": name,
            "textFormat": text,
            "step": "15s",
        }

    def _panels(self) -> list[Json]:
        """Rows and panels, from left to right and from top to bottom."""
        panels: list[Json] = []
        y = 0
        for row in self.rows:
            place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
            heading = {"id": len(panels) + 1, "type": "row", "title": row.title, "collapsed": False, "panels": []}
            panels.append({**heading, "gridPos": place})
            x, y = 0, y + 1
            for panel in row.panels:
                if x + panel.width > COLUMNS:
                    x, y = 0, y + HEIGHT
                panels.append(panel.as_json(len(panels) + 1, x, y))
                x += panel.width
            y += HEIGHT
        return panels


_DATASOURCE_VARIABLE = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variable(name: str, expression: str) -> Json:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": expression, "refId": name},
        "definition": expression,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }
