"""A real Prometheus that scrapes a real queue under load."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry

from tokenmill.shared.embedded import EmbeddedBroker
from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.exporter import Exporter
from tokenmill.shared.queue_metrics import QueueMetrics, targets

from ..e2e.workplace import Workplace

PROGRAMS = ("prometheus", "prometheus-redis-exporter", "promtool")
MODEL = """
import time
from tokenmill.worker.models.padded import PaddedModel
def rectangles(tokens, mask, positions):
    time.sleep(0.01)
    return [int(row[-1]) % 50 + 3 for row in tokens]
model_next = PaddedModel(rectangles)
"""
CONFIGURATION = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: workers
    http_sd_configs: [{{url: "http://127.0.0.1:{queue}/targets", refresh_interval: 1s}}]
  - job_name: queue
    static_configs: [{{targets: ["127.0.0.1:{queue}"]}}]
  - job_name: redis
    static_configs: [{{targets: ["127.0.0.1:{redis}"]}}]
"""
ROOT = Path(__file__).parents[2]


class Prometheus:
    """A server that scrapes every second."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def ask(self, what: str, **parameters: str) -> Any:
        """The data of one answer of its API."""
        url = f"{self._url}{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def values(self, expression: str) -> list[float]:
        """What an expression is now, one number for each series."""
        return [float(series["value"][1]) for series in self.ask("query", query=expression)["result"]]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus beside a queue on which everything happens that a panel shows."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: apt install prometheus prometheus-redis-exporter)")
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "rectangles.py").write_text(MODEL)
    with ExitStack() as stack:
        embedded = stack.enter_context(EmbeddedBroker())
        workplace = Workplace(embedded.url, folder)
        stack.callback(workplace.close)
        registry = CollectorRegistry()
        registry.register(QueueMetrics(workplace.broker))
        pages = {"/targets": lambda: targets(workplace.broker.info())}
        exporter = stack.enter_context(Exporter(registry, host="127.0.0.1", port=0, pages=pages))
        port = _start_programs(stack, folder, embedded.url, exporter.port)
        for _ in range(2):
            workplace.start("rectangles:model_next", "--slots", "4", "--metrics-port", "0")
        done = threading.Event()
        load = threading.Thread(target=_load, args=(workplace, done))
        load.start()
        stack.callback(load.join)
        stack.callback(done.set)
        yield Prometheus(port)


def _start_programs(stack: ExitStack, folder: Path, broker: str, queue_port: int) -> int:
    """Prometheus and the exporter of Redis; returns the former's port."""
    redis_port, port = _free_port(), _free_port()
    rules = ROOT / "grafana/prometheus/alerts.yaml"
    configuration = folder / "prometheus.yaml"
    configuration.write_text(CONFIGURATION.format(rules=rules, queue=queue_port, redis=redis_port))
    listen = f"127.0.0.1:{redis_port}"
    commands = [
        ["prometheus-redis-exporter", f"--redis.addr={broker}", f"--web.listen-address={listen}"],
        [
            "prometheus",
            f"--config.file={configuration}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
    ]
    for command in commands:
        with (folder / f"{command[0]}.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
    return port


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _load(workplace: Workplace, done: threading.Event) -> None:
    """All that can happen to requests, again and again: endings of every kind, refusals, crashes and drains."""
    workplace.broker.set_limits(max_depth=40)
    raw = redis.Redis.from_url(workplace.url)
    for turn in itertools.count():
        if done.wait(0.4):
            break
        with suppress(TokenmillError):
            _requests(workplace, raw, turn)
        if turn == 2:
            _end_at_work(workplace, done, subprocess.Popen.kill)
            _end_at_work(workplace, done, subprocess.Popen.terminate)
    raw.close()


def _requests(workplace: Workplace, raw: redis.Redis, turn: int) -> None:
    def submit(**fields: Any) -> str:
        return workplace.client.submit([7] * 20, when_full="raise", **{"max_tokens": 20, **fields})

    raw.rpush(workplace.broker.keys.requests, b"rubbish", f'{{"id":"bad-{turn}","prompt":"","max_tokens":0}}')
    for _ in range(2):
        submit(id=f"same-{turn}")
    submit(max_tokens=500, timeout_ms=300)
    workplace.client.cancel(submit())
    for _ in range(12):
        submit()


def _end_at_work(workplace: Workplace, done: threading.Event, end: Callable[[subprocess.Popen[str]], None]) -> None:
    """Start one more worker, and end it as soon as it has something to do."""
    worker = workplace.start("rectangles:model_next", "--slots", "4", "--drain-grace", "0.1")
    deadline = time.monotonic() + 10
    while not any(w.busy and w.status.get("pid") == worker.pid for w in workplace.broker.info().workers):
        if done.wait(0.01):
            return
        with suppress(TokenmillError):
            workplace.client.submit([7] * 20, max_tokens=100, when_full="raise")
        assert time.monotonic() < deadline, "the worker got nothing to do"
    end(worker)
