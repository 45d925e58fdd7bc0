"""RQ with llama-cpp-python: one worker process that runs one job, one prompt, at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

from contest import Requests, config, contest, worker
from llama_cpp import Llama
from redis import Redis
from rq import Queue, SimpleWorker

CONTEXT = 512
REPLY_S = 600


@cache
def model() -> Llama:
    threads = int(os.environ["THREADS"])
    path = os.environ["MODEL"]
    return Llama(path, n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False)


def generate(prompt: str, n_output: int) -> tuple[int, str]:
    """Greedy, EOS ignored; the number of tokens made, and their text."""
    llama = model()
    tokens: list[int] = []
    llama.reset()
    for token in llama.generate(llama.tokenize(prompt.encode()), temp=0.0):
        tokens.append(token)
        if len(tokens) == n_output:
            break
    return len(tokens), llama.detokenize(tokens).decode(errors="replace")


def work(url: str) -> None:
    connection = Redis.from_url(url, socket_timeout=None)
    SimpleWorker([Queue(connection=connection)], connection=connection).work(logging_level="WARNING")


def serve(queue: Queue, requests: Requests) -> Sequence[int]:
    jobs = queue.enqueue_many([Queue.prepare_data("rq_llama.generate", tuple(request)) for request in requests])
    return [job.latest_result(timeout=REPLY_S).return_value[0] for job in jobs]


def main() -> None:
    given = config()
    os.environ.update(MODEL=given["model"], THREADS=str(given["threads"]))
    queue = Queue(connection=Redis.from_url(given["url"], socket_timeout=None))  # its reads wait for replies
    with worker(work, given["url"]):
        contest(lambda requests: serve(queue, requests), given["warm_up"], given["work"])


if __name__ == "__main__":
    main()
