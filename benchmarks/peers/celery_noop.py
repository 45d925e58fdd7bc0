"""No-op jobs through one Celery worker with the solo pool, results kept in Redis."""

from __future__ import annotations

from celery import Celery
from tally import main, tally, url

PREFETCH = 100

app = Celery("noop", broker=url(), backend=url())
app.conf.update(worker_prefetch_multiplier=PREFETCH, worker_redirect_stdouts=False)


@app.task(name="noop")
def noop() -> None:
    tally.count()


def enqueue(jobs: int) -> None:
    for _ in range(jobs):
        noop.delay()


def work() -> None:
    quiet = ["--loglevel=ERROR", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main(["--quiet", "worker", "--pool=solo", *quiet])


if __name__ == "__main__":
    main(enqueue, work)
