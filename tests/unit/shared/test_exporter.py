"""Metrics and probes over HTTP."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Gauge

from tokenmill.shared.errors import UsageError
from tokenmill.shared.exporter import Exporter


def fetch(exporter: Exporter, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_are_those_of_the_registry() -> None:
    registry = CollectorRegistry()
    Gauge("depth", "Of the sea.", registry=registry).set(7)
    with Exporter(registry, host="127.0.0.1", port=0) as exporter:
        status, text = fetch(exporter, "/metrics")
    assert (status, "depth 7.0" in text) == (200, True)


def test_a_check_that_fails_is_a_503_with_its_reason() -> None:
    reasons: list[str | None] = [None, "the model is being loaded"]
    with Exporter(CollectorRegistry(), host="127.0.0.1", port=0, ready=reasons.pop) as exporter:
        assert fetch(exporter, "/readyz") == (503, "the model is being loaded\n")
        assert fetch(exporter, "/readyz") == (200, "ok\n")
        assert fetch(exporter, "/livez") == (200, "ok\n")


def test_further_pages_are_json_and_any_other_path_names_those_there_are() -> None:
    with Exporter(CollectorRegistry(), host="127.0.0.1", port=0, pages={"/targets": lambda: b"[]"}) as exporter:
        assert fetch(exporter, "/targets") == (200, "[]")
        status, line = fetch(exporter, "/")
    assert status == 404
    assert "/metrics, /livez, /readyz, /targets" in line


def test_a_port_in_use_is_one_line_with_the_next_step() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match="choose another --metrics-port"):
            Exporter(CollectorRegistry(), host="127.0.0.1", port=port)
