"""RQ's SimpleWorker on our own model, one job after another: ``… simple_rq_worker URL QUEUE MODEL BACKEND THREADS``."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from benchmarks.settings import Backend
from benchmarks.stepping import loaded
from tokenmill.worker.engine import ContinuousBatcher
from tokenmill.worker.models import LoadedModel

JOB = "benchmarks.simple_rq_worker.generate"


@cache
def model() -> LoadedModel:
    """The model, loaded before the first job."""
    _, _, _, model, backend, threads = sys.argv
    return loaded(Backend(backend, model), int(threads), 1)


def generate(prompt: str, *, max_tokens: int) -> int:
    """A job: generate so many tokens, alone; returns how many there are."""
    tokenizer = model().tokenizer
    assert tokenizer is not None
    batcher = ContinuousBatcher(model().model, 1, max_step_tokens="auto")
    batcher.submit(tokenizer.encode(prompt), max_tokens=max_tokens, ignore_eos=True)
    [finished] = batcher.run()
    return len(finished.output)


def main() -> None:
    import redis
    from rq import Queue, SimpleWorker
    from rq.serializers import JSONSerializer

    model()
    client: Any = redis.Redis.from_url(sys.argv[1])
    queue = Queue(sys.argv[2], connection=client, serializer=JSONSerializer)
    SimpleWorker([queue], connection=client, serializer=JSONSerializer).work(logging_level="ERROR")


if __name__ == "__main__":
    main()
