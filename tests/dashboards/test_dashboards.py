"""Every query of every panel, variable and annotation answers, and every metric is looked at by one."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grafana.build import DASHBOARDS
from grafana.panels import COLUMNS, HEIGHT

from .conftest import ROOT, Prometheus

FOLDER = ROOT / "grafana/dashboards"
ALERTS = (ROOT / "grafana/prometheus/alerts.yaml").read_text()
DEADLINE_S = 60.0
LOADED = {name: json.loads((FOLDER / name).read_text()) for name in DASHBOARDS}
SUFFIXES = re.compile(r"_(bucket|sum|count|created)$")
# A metric of ours, by the whole of its name.
OURS = re.compile(r"\btokenmill_\w+")


def queries(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Where each query stands, and the query."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield f"{panel['title']}: {target['legendFormat']}", target["expr"]
    for annotation in dashboard["annotations"]["list"]:
        yield f"annotation {annotation['name']}", annotation["expr"]


QUERIES = [(name, *query) for name, dashboard in LOADED.items() for query in queries(dashboard)]
VARIABLES = [
    (dashboard["title"], variable["definition"])
    for dashboard in LOADED.values()
    for variable in dashboard["templating"]["list"]
    if variable["type"] == "query"
]


def eventually(look: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not look():
        assert time.monotonic() < deadline, "no data in time"
        time.sleep(0.2)


def filled_in(expression: str) -> str:
    """An expression as Grafana sends it, with all values chosen."""
    return expression.replace("$__rate_interval", "20s").replace("$queue", ".*").replace("$worker", ".*")


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_files_are_what_the_code_makes(name: str) -> None:
    assert LOADED[name] == DASHBOARDS[name].as_json(), "run `make dashboards`"


@pytest.mark.parametrize("dashboard", LOADED.values(), ids=LOADED)
def test_panels_do_not_overlap_and_say_what_to_do(dashboard: dict[str, Any]) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        of_panel = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & of_panel
        assert place["x"] + place["w"] <= COLUMNS
        cells |= of_panel
        assert panel["type"] == "row" or (len(panel["description"]) > 20 and place["h"] == HEIGHT)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.mark.parametrize(("dashboard", "place", "expression"), QUERIES, ids=[f"{q[0]} {q[1]}" for q in QUERIES])
def test_a_query_answers_with_numbers(prometheus: Prometheus, dashboard: str, place: str, expression: str) -> None:
    if place == "annotation Suspended":
        expression = expression.replace("== 1", "== 0")  # what is drawn while it is; the metric answers otherwise too

    def numbers() -> bool:
        values = prometheus.values(filled_in(expression))
        return bool(values) and not any(math.isnan(value) for value in values)

    eventually(numbers)


@pytest.mark.parametrize(("dashboard", "definition"), VARIABLES)
def test_a_variable_has_values(prometheus: Prometheus, dashboard: str, definition: str) -> None:
    match = re.fullmatch(r"label_values\((.+), (\w+)\)", definition)
    assert match is not None
    selector, label = match.groups()
    eventually(lambda: prometheus.ask(f"label/{label}/values", **{"match[]": filled_in(selector)}))


def metrics_in(text: str) -> set[str]:
    return {SUFFIXES.sub("", name) for name in OURS.findall(text)}


def test_no_metric_is_unknown_and_none_is_looked_at_by_nobody(prometheus: Prometheus) -> None:
    eventually(lambda: prometheus.values("tokenmill_slots") and prometheus.values("tokenmill_broker_up"))
    exposed: set[str] = set()
    for target in prometheus.ask("targets", state="active")["activeTargets"]:
        with urllib.request.urlopen(target["scrapeUrl"], timeout=10) as page:
            exposed |= metrics_in(re.sub(r"^#.*$|\{.*$", "", page.read().decode(), flags=re.MULTILINE))
    looked_at = metrics_in(" ".join(expression for _, _, expression in QUERIES) + ALERTS)
    assert looked_at - exposed == set()
    assert exposed - looked_at == set()


def test_alerts_ask_for_metrics_that_answer(prometheus: Prometheus) -> None:
    groups = prometheus.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert rules
    eventually(
        lambda: all(rule["health"] == "ok" for group in prometheus.ask("rules")["groups"] for rule in group["rules"])
    )
    for metric in set(re.findall(r"\b(?:tokenmill|redis)_\w+", ALERTS)):
        eventually(lambda metric=metric: prometheus.values(metric))  # type: ignore[misc]


def test_alerts_fire_when_they_should(prometheus: Prometheus) -> None:
    rules = ROOT / "grafana/prometheus/alerts_test.yaml"
    done = subprocess.run(["promtool", "test", "rules", rules], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
