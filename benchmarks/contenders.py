"""Everybody who serves the workload, each from its own start to its last reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import llama_cpp
from benchmarks.environments import MODEL_HOST, RQ_LLAMA, STREAMER, Environment
from benchmarks.settings import TOY, Backend, Bench
from benchmarks.system import System
from benchmarks.workload import Work, workload
from tokenmill.shared.embedded import EmbeddedBroker
from tokenmill.shared.settings import DEFAULTS
from tokenmill.worker.models.registry import smollm2_path

Rate = Callable[[Sequence[Work]], float]
"""Serves some requests, and says how many output tokens it made per second."""

SERVER_SLOTS = (8, 16, 32, 64)
STATIC_SLOTS = 32  # what both packages' examples use
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to serve the workload."""

    name: str
    setting: str
    requests: int  # how many of the workload it is given: the slow ones get fewer, rates are per token
    rate: Rate


def ours(bench: Bench, backend: Backend, requests: int, slots: int) -> Contender:
    """One Tokenmill worker process, with everything that a producer goes through."""

    def rate(work: Sequence[Work]) -> float:
        with System(backend, slots=slots, threads=bench.threads) as system:
            return system.serve(work).rate

    return Contender(_own_name(backend), f"{slots} slots, {bench.threads} threads", requests, rate)


def llama_server(bench: Bench, model: Path, kind: str, requests: int, slots: int) -> Contender:
    """llama.cpp's server with continuous batching, its default; one process, asked over HTTP."""

    def rate(work: Sequence[Work]) -> float:
        with llama_cpp.server(model, slots=slots, threads=bench.threads, folder=bench.peers) as server:
            return server.serve(work)

    return Contender(f"llama-server, {kind}", f"{slots} slots, {bench.threads} threads", requests, rate)


def rq_llama(bench: Bench, model: Path, requests: int) -> Contender:
    """RQ with llama-cpp-python, one job at a time."""
    setting = f"one job after another, {bench.threads} threads"
    program = _program(bench, RQ_LLAMA, "rq_llama", {"model": str(model), "threads": bench.threads})
    return Contender("RQ + llama-cpp-python", setting, requests, program)


def static(bench: Bench, backend: Backend, requests: int) -> list[Contender]:
    """Batches that are begun together and end together, over our own model."""
    named = DEFAULTS.backend if backend.name == TOY else backend.name
    model = f"gguf:{smollm2_path()}" if backend.model == "smollm2" else backend.model  # they have no weights package
    config = {"spec": model, "backend": named, "threads": bench.threads, "slots": STATIC_SLOTS}
    setting = f"{STATIC_SLOTS} at a time, over the {_own_name(backend)} model"
    return [
        Contender("service-streamer", setting, requests, _program(bench, STREAMER, "streamer_static", config)),
        Contender("batch-inference", setting, requests, _program(bench, MODEL_HOST, "host_static", config)),
    ]


def _own_name(backend: Backend) -> str:
    return f"tokenmill {backend.name}"


def _program(bench: Bench, environment: Environment, program: str, config: dict[str, object]) -> Rate:
    def rate(work: Sequence[Work]) -> float:
        environment.versions(bench.peers)
        warm_up = [[request.prompt, WARM_UP_TOKENS] for request in workload(8, seed=0)]
        requests = [[request.prompt, request.n_output] for request in work]
        with EmbeddedBroker() as broker:
            took = environment.run(program, bench.peers, url=broker.url, warm_up=warm_up, work=requests, **config)
        return float(took["tokens"] / took["seconds"])

    return rate
