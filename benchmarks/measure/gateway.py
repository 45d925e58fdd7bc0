"""Thousands of HTTP callers that wait at the same time, and what the gateway adds."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, suppress
from http import HTTPStatus

import aiohttp
import redis

from benchmarks.result import Result, Table
from benchmarks.samples import percentile, significant
from benchmarks.settings import TOY, Backend, Bench
from benchmarks.system import QUEUE, System
from tokenmill.shared.errors import TokenmillError

TOKENS, SLOTS, STEP_MS = 16, 128, 20
START_S = 30.0
ABOUT = (
    "All callers open a connection of their own to the gateway and send a completion at the same time; a worker on "
    f"the toy model ({SLOTS} slots, {STEP_MS} ms a step) answers {TOKENS} tokens each. Added is a caller's time beyond "
    "what the request took from enqueue to reply (`openai-processing-ms`): HTTP in and out, the enqueue, the way of "
    "the reply, and the processor that callers, gateway, broker and worker share."
)


def measure(bench: Bench) -> Result:
    result = Result("gateway", "Callers that wait at the gateway", ABOUT)
    callers = bench.size(2000, 50)
    _allow_files(3 * callers + 100)
    model = Backend(TOY, f"toy:delay_ms={STEP_MS}")
    with ExitStack() as stack:
        system = stack.enter_context(System(model, slots=SLOTS, threads=1))
        before = _connections(system.url)
        url = _gateway(stack, system.url)
        spans = asyncio.run(_ask_at_once(url, callers))
        connections = _connections(system.url) - before
    if not spans:
        raise TokenmillError("the gateway answered nobody")
    added = [whole - processing for whole, processing in spans]
    figures = [percentile([whole for whole, _ in spans], 50), *(percentile(added, share) for share in (50, 99))]
    row = [f"{callers:,}", f"{len(spans):,}", *map(significant, figures), str(connections)]
    titles = ["callers", "answered", "whole, p50", "added, p50", "added, p99", "connections to the broker"]
    result.tables.append(Table("Milliseconds:", titles, [row]))
    answered = f"{len(spans):,} of {callers:,}"
    result.require("callers that wait at the same time and are answered", "all", answered, len(spans) == callers)
    return result


async def _ask_at_once(url: str, callers: int) -> list[tuple[float, float]]:
    """For each answer: milliseconds that its caller waited, and those from enqueue to reply."""
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http:
        async with http.get("/v1/models") as answer:
            [model] = (await answer.json())["data"]
        body = {"model": model["id"], "prompt": "x", "max_tokens": TOKENS, "ignore_eos": True}

        async def ask() -> tuple[float, float] | None:
            begin = time.perf_counter()
            async with http.post("/v1/completions", json=body) as answer:
                await answer.read()
                if answer.status != HTTPStatus.OK:
                    return None
            return (time.perf_counter() - begin) * 1000, float(answer.headers["openai-processing-ms"])

        return [span for span in await asyncio.gather(*(ask() for _ in range(callers))) if span is not None]


def _gateway(stack: ExitStack, broker: str) -> str:
    """Start a gateway; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "tokenmill.shared.cli", "-q", "serve", "--redis", broker, "--queue", QUEUE]
    process = subprocess.Popen([*command, "--port", str(port), "--max-pending", "0"])
    stack.callback(process.wait)
    stack.callback(process.terminate)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_S
    while True:
        with suppress(OSError), urllib.request.urlopen(f"{url}/readyz"):  # noqa: S310 (a URL of our own)
            return url
        if process.poll() is not None or time.monotonic() > deadline:
            raise TokenmillError("the gateway did not start")
        time.sleep(0.05)


def _connections(broker: str) -> int:
    with redis.Redis.from_url(broker) as client:
        return len(client.client_list())


def _allow_files(n: int) -> None:
    """Let this process and those it starts have so many files open, as far as they may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < n:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(n, hard), hard))
