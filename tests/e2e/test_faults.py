"""One fault at a time between real workers and a real broker: both go on unaided, and the text stays the same."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenmill.producer.client import Client
from tokenmill.shared.broker import connect
from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.settings import DEFAULTS
from tokenmill.worker.commands import run_worker
from tokenmill.worker.signals import StopSignal

from ..chaos import proxy as proxies
from ..chaos.proxy import Fault, Proxy
from ..chaos.server import Server, embedded_binary
from .workplace import DEADLINE_S, SLOW_TOY, Workplace, long_request, wait_for


def _port(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    proxy = Proxy(_port(url), seed=1)
    proxy.start()
    yield proxy
    proxy.stop()


Start = Callable[..., None]


class _Stop(StopSignal):
    """Asks one worker to drain."""

    def ask(self) -> None:
        self._handle()


@pytest.fixture
def start(workplace: Workplace) -> Iterator[Start]:
    """Run a whole worker in a thread, which starts at once; for all that needs no process of its own.

    Name the fixture after those of the broker, so that the worker still has one when it drains.
    """
    running: list[tuple[_Stop, threading.Thread]] = []

    def start(url: str = workplace.url, queue: str = workplace.queue, **settings: Any) -> None:
        stop = _Stop()
        given = {"model": SLOW_TOY, "lease_ms": 600, "queue": queue, **settings}
        worker = threading.Thread(target=run_worker, args=(url, dataclasses.replace(DEFAULTS, **given), stop))
        worker.start()
        running.append((stop, worker))

    yield start
    for stop, worker in running:
        stop.ask()
        worker.join(DEADLINE_S)
        assert not worker.is_alive()


def _through(proxy: Proxy) -> str:
    """The broker behind the proxy; a silent connection is given up after a second instead of five."""
    return f"{proxy.url}?socket_timeout=1"


@pytest.mark.parametrize("fault", ["swallow", "cut", "late"])
def test_a_running_request_outlives_lost_packets(
    fault: Fault, workplace: Workplace, proxy: Proxy, start: Start, undisturbed: str
) -> None:
    start(_through(proxy))
    request_id = long_request(workplace, stream=True)
    for part in (20, 60, 100):
        wait_for(lambda part=part: workplace.tokens(request_id) > part)  # type: ignore[misc]
        proxy.strike(fault, 1.0)
    assert workplace.client.wait(request_id, DEADLINE_S).text == undisturbed
    assert proxy.hits[fault] >= 3
    entries = workplace.broker.read_tokens(request_id)
    assert "".join(entry.text for entry in entries) == undisturbed


def test_a_half_open_connection_is_given_up(workplace: Workplace, proxy: Proxy, start: Start, undisturbed: str) -> None:
    start(_through(proxy))
    request_id = long_request(workplace)
    wait_for(lambda: workplace.tokens(request_id))
    proxy.strike("half_open", 1.0)
    wait_for(lambda: proxy.hits["half_open"])
    assert workplace.client.wait(request_id, DEADLINE_S).text == undisturbed
    assert workplace.client.generate("mill", timeout=DEADLINE_S).error is None


def test_a_slow_broker_does_not_slow_decoding_down(
    workplace: Workplace, proxy: Proxy, start: Start, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxies, "_DELAY_S", (0.2, 0.2))
    start(_through(proxy), lease_ms=5000)
    wait_for(workplace.registered)
    proxy.strike("delay", 1.0)
    reply = workplace.client.wait(long_request(workplace, stream=True), DEADLINE_S)
    assert (reply.text, reply.deliveries) == (undisturbed, 1)
    assert proxy.hits["delay"] >= 1
    assert reply.e2e_ms is not None
    assert reply.e2e_ms < 200 * 200 / 2  # waiting for the broker at each of the 200 tokens would take twice that


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Server]:
    """A broker that writes every command to its file before it answers, and that can be killed and started again."""
    server = Server(embedded_binary(), tmp_path, "always", seed=os.getpid())
    server.start()
    server.wait_ready()
    yield server
    server.kill()


def test_a_broker_restart_costs_neither_the_worker_nor_the_client_its_request(
    durable: Server, start: Start, tmp_path: Path, undisturbed: str
) -> None:
    workplace = Workplace(durable.url, tmp_path)
    start(workplace.url, workplace.queue)
    request_id = long_request(workplace)
    wait_for(lambda: workplace.tokens(request_id))
    durable.kill()
    durable.start()
    durable.wait_ready()
    reply = workplace.client.wait(request_id, DEADLINE_S)
    assert (reply.text, reply.deliveries) == (undisturbed, 1)
    assert workplace.client.generate("mill", timeout=DEADLINE_S).error is None


def test_a_full_broker_lets_running_work_end_and_takes_new_work_when_it_has_room(
    workplace: Workplace, start: Start, undisturbed: str
) -> None:
    start()
    request_id = long_request(workplace)
    wait_for(lambda: workplace.tokens(request_id))
    admin: Any = connect(workplace.url)
    admin.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(TokenmillError, match="full"):
            workplace.broker.enqueue("late", b'{"id":"late","prompt":"mill"}')
        assert workplace.client.wait(request_id, DEADLINE_S).text == undisturbed
    finally:
        admin.config_set("maxmemory", "0")
    admin.close()
    assert workplace.client.generate("mill", timeout=DEADLINE_S).error is None


def test_idle_connections_that_the_broker_closes_are_opened_again(workplace: Workplace, start: Start) -> None:
    """A long silence in two seconds: the broker drops every connection that was idle for one."""
    start(model="toy")
    assert workplace.client.generate("before", timeout=DEADLINE_S).error is None
    ours: Any = workplace.broker._redis
    watcher: Any = connect(workplace.url)
    idle = ours.client_id()
    watcher.config_set("timeout", "1")
    try:
        wait_for(lambda: idle not in [int(other["id"]) for other in watcher.client_list()])
        assert workplace.client.generate("after", timeout=DEADLINE_S).error is None
    finally:
        watcher.config_set("timeout", "0")
        watcher.close()


def test_a_worker_stopped_while_it_waits_in_an_empty_queue_takes_nothing_with_it(workplace: Workplace) -> None:
    sleeper = workplace.start("toy")
    wait_for(lambda: _blocked(workplace))
    os.kill(sleeper.pid, signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)  # until it has stopped
    request_id = workplace.client.submit("mill")
    workplace.start("toy")
    assert workplace.client.wait(request_id, DEADLINE_S).deliveries == 1
    os.kill(sleeper.pid, signal.SIGCONT)
    replies = [workplace.client.generate(f"mill {number}", timeout=DEADLINE_S) for number in range(5)]
    assert {reply.deliveries for reply in replies} == {1}
    assert sleeper.poll() is None


def _blocked(workplace: Workplace) -> bool:
    """Whether a connection blocks on a list."""
    blocked: Any = workplace.broker._redis.info("clients")
    return int(blocked["blocked_clients"]) > 0


def test_a_step_of_ten_leases_of_pure_computing_keeps_its_request(workplace: Workplace) -> None:
    source = """
import time
def model_next(prefixes):
    end = time.monotonic() + 3.2
    while time.monotonic() < end:
        sum(range(1000))
    return [7] * len(prefixes)
"""
    (workplace.folder / "busy.py").write_text(source)
    workplace.start("busy:model_next", "--lease-ms", "300")
    workplace.start("busy:model_next", "--lease-ms", "300")  # would take the request over
    reply = workplace.client.wait(workplace.client.submit([1, 2], max_tokens=1), DEADLINE_S)
    assert (reply.token_ids, reply.deliveries) == ([7], 1)


def test_a_cancelled_request_leaves_its_running_neighbour_alone(
    workplace: Workplace, start: Start, undisturbed: str
) -> None:
    start(slots=1)
    neighbour = long_request(workplace)
    wait_for(lambda: workplace.tokens(neighbour))
    queued = workplace.client.submit("mill")
    assert workplace.broker.cancel(queued) == "cancelled"
    assert workplace.client.wait(queued, 1).finish_reason == "cancelled"
    assert workplace.client.wait(neighbour, DEADLINE_S).text == undisturbed


JUMPING_CLOCK = """
import itertools, time
real, jumps = time.time, itertools.cycle([0, 3600, -3600])
time.time = lambda: real() + next(jumps)
"""


def test_the_clock_of_a_worker_may_jump_by_an_hour(
    workplace: Workplace, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python loads `sitecustomize` first: every look at this worker's wall clock is an hour away from the last one."""
    (workplace.folder / "sitecustomize.py").write_text(JUMPING_CLOCK)
    monkeypatch.setenv("PYTHONPATH", str(workplace.folder))
    workplace.start()
    reply = workplace.client.wait(long_request(workplace, timeout_ms=60_000), DEADLINE_S)
    assert (reply.text, reply.deliveries) == (undisturbed, 1)
    assert reply.e2e_ms is not None
    assert 0 < reply.e2e_ms < DEADLINE_S * 1000


def test_the_clock_of_a_client_may_jump_by_an_hour(
    workplace: Workplace, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(model="toy")
    jumps, real = itertools.cycle([0.0, 3600.0, -3600.0]), time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    client = Client(workplace.broker)
    assert client.generate("mill", timeout=DEADLINE_S, timeout_ms=60_000).error is None
    assert "".join(client.stream("mill", timeout=DEADLINE_S))
