"""No-op jobs through RQ's SimpleWorker, which runs one job after another in its own process."""

from __future__ import annotations

from redis import Redis
from rq import Queue, SimpleWorker
from tally import main, tally, url

CHUNK = 500


def noop() -> None:
    tally.count()


def enqueue(jobs: int) -> None:
    queue = Queue(connection=Redis.from_url(url()))
    for first in range(0, jobs, CHUNK):
        queue.enqueue_many([Queue.prepare_data("rq_noop.noop") for _ in range(first, min(first + CHUNK, jobs))])


def work() -> None:
    connection = Redis.from_url(url())
    SimpleWorker([Queue(connection=connection)], connection=connection).work(logging_level="WARNING")


if __name__ == "__main__":
    main(enqueue, work)
