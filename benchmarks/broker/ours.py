"""Our side of the broker benchmark: tiny requests through one worker process, and what each of them costs."""

from __future__ import annotations

import math
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from benchmarks.broker.meters import Cost, Moment, answered, broker_cpu_s, fresh, used
from tokenmill.shared import lua
from tokenmill.shared.broker import Broker, Finish
from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.subprocesses import worker_argv

QUEUE = "bench"
PIPELINE = 500  # pushes sent together
WARM_UP = 0.05  # share of the requests before the measurement begins
WINDOW, SWEEP = 2_000, 250  # requests outstanding, and replies looked for at a time, when they are streamed in
POLL_S = 0.005
DEADLINE_S = 300.0
PAYLOAD_BYTES, REPLY_BYTES = 450, 400
LEASE_MS, REPLY_TTL_MS = 10_000, 3_600_000


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that all want the same."""

    requests: int
    tokens: int = 1  # output tokens of each
    streamed: bool = False  # their tokens are published one by one
    bare: bool = False  # enqueued by RPUSH alone, instead of by the enqueue script

    def payload(self, number: int, prompt: str = "Hi") -> bytes:
        """The JSON of one request."""
        stream = ',"stream":true' if self.streamed else ""
        head = f'{{"id":"{request_id(number)}","prompt":"{prompt}","max_tokens":{self.tokens}'
        return f'{head},"ignore_eos":true{stream}}}'.encode()


def request_id(number: int) -> str:
    """Ids as long as a producer's."""
    return f"request-{number:08d}"


def fill(broker: Broker, client: redis.Redis, load: Load, first: int, last: int, prompt: str = "Hi") -> None:
    """Enqueue some of the requests, in pipelines."""
    if not load.bare:
        client.script_load(lua.source("enqueue"))
    for start in range(first, last, PIPELINE):
        pushes: Any = client.pipeline(transaction=False)
        for number in range(start, min(start + PIPELINE, last)):
            payload = load.payload(number, prompt)
            if load.bare:
                pushes.rpush(broker.keys.requests, payload)
            else:
                push: list[str | bytes | int] = [
                    request_id(number),
                    payload,
                    int(load.streamed),
                    "normal",
                    0,
                    0,
                    "",
                    "",
                    0,
                ]
                lua.run(pushes, "enqueue", broker.keys.shared, push)
        pushes.execute()


def enqueue_us(url: str, load: Load) -> float:
    """Processor time of the broker per enqueue."""
    client = fresh(url)
    before = broker_cpu_s(client)
    fill(Broker(client, QUEUE), client, load, 0, load.requests)
    return (broker_cpu_s(client) - before) / load.requests * 1e6


def serve(url: str, load: Load, slots: int) -> Cost:
    """One worker on a full queue."""
    client = fresh(url)
    broker = Broker(client, QUEUE)
    fill(broker, client, load, 0, load.requests)
    with worker_process(url, slots) as worker:
        wait_until(worker, lambda: answered(broker, client) >= load.requests * WARM_UP)
        before = Moment.now(broker, client, worker.pid)
        wait_until(worker, lambda: answered(broker, client) >= load.requests)
        after = Moment.now(broker, client, worker.pid)
    check_replies(broker, load)
    return after.since(before)


def stream_in(url: str, load: Load, slots: int) -> float:
    """Requests per second from this process to one worker and back: pushed in pipelines, every reply read."""
    client = fresh(url)
    broker = Broker(client, QUEUE)
    with worker_process(url, slots) as worker:
        wait_until(worker, lambda: any(w.status.get("state") == "running" for w in broker.info().workers))
        outstanding: deque[int] = deque()
        pushed, start = 0, time.perf_counter()
        while pushed < load.requests or outstanding:
            if pushed < load.requests and len(outstanding) + PIPELINE <= WINDOW:
                last = min(pushed + PIPELINE, load.requests)
                fill(broker, client, load, pushed, last)
                outstanding.extend(range(pushed, last))
                pushed = last
            oldest = [outstanding.popleft() for _ in range(min(SWEEP, len(outstanding)))]
            replies = broker.read_replies([request_id(number) for number in oldest])
            outstanding.extendleft(
                [number for number, reply in zip(oldest, replies, strict=True) if reply is None][::-1]
            )
            check_alive(worker)
        return load.requests / (time.perf_counter() - start)


def memory(url: str, requests: int, slots: int) -> dict[str, float]:
    """Bytes of broker memory per request in each state, with its payload and its reply."""
    load = Load(requests)
    padding = "x" * (PAYLOAD_BYTES - len(load.payload(0, "")))
    figures: dict[str, float] = {}
    for name, way in (("waiting, bare push", Load(requests, bare=True)), ("waiting, enqueued", load)):
        client = fresh(url)
        broker = Broker(client, QUEUE)
        client.script_load(lua.source("exchange"))
        empty = used(client)
        fill(broker, client, way, 0, requests, padding)
        figures[name] = (used(client) - empty) / requests
    workers = [f"worker-{n}" for n in range(math.ceil(requests / slots))]
    finishes = {worker: _claim_all(broker, worker, slots) for worker in workers}
    figures["running"] = (used(client) - empty) / requests
    for worker, finished in finishes.items():
        broker.exchange(worker, slots=0, ack=2**62, lease_ms=LEASE_MS, reply_ttl_ms=REPLY_TTL_MS, finished=finished)
    figures["finished, reply kept"] = (used(client) - empty) / requests
    return figures


def _claim_all(broker: Broker, worker: str, slots: int) -> list[Finish]:
    answer = broker.exchange(worker, slots=slots, ack=0, lease_ms=LEASE_MS, reply_ttl_ms=REPLY_TTL_MS)
    return [Finish(claim.id, claim.fence, "length", b"x" * REPLY_BYTES, 0, [], "") for claim in answer.claims]


def check_replies(broker: Broker, load: Load) -> None:
    """Every request has its reply."""
    for first in range(0, load.requests, PIPELINE):
        ids = [request_id(number) for number in range(first, min(first + PIPELINE, load.requests))]
        if None in broker.read_replies(ids):
            raise TokenmillError("a request has no reply")


@contextmanager
def worker_process(url: str, slots: int) -> Iterator[subprocess.Popen[bytes]]:
    """A ``tokenmill worker`` with the toy model."""
    arguments = ["-q", "--redis", url, "--queue", QUEUE, "--model", "toy", "--slots", str(slots)]
    worker = subprocess.Popen(worker_argv(*arguments), stderr=subprocess.PIPE)
    try:
        yield worker
    finally:
        worker.terminate()
        worker.communicate()


def wait_until(worker: subprocess.Popen[bytes], done: Callable[[], bool]) -> None:
    """Poll a condition while the worker lives."""
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        check_alive(worker)
        if time.monotonic() > deadline:
            raise TokenmillError(f"the worker was not done within {DEADLINE_S:.0f} s")
        time.sleep(POLL_S)


def check_alive(worker: subprocess.Popen[bytes]) -> None:
    """Raise with the last words of a worker that ended."""
    if worker.poll() is not None:
        said = worker.communicate()[1].decode(errors="replace").strip().splitlines()
        raise TokenmillError(f"the worker ended: {said[-1] if said else worker.returncode}")
