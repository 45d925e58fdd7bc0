"""No-op jobs through one arq worker; it looks for jobs every half second unless told otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker
from tally import main, tally, url

MAX_JOBS, POLL_S = 100, 0.01


async def noop(context: dict[str, Any]) -> None:
    tally.count()


def enqueue(jobs: int) -> None:
    async def fill() -> None:
        pool = await create_pool(RedisSettings.from_dsn(url()))
        for _ in range(jobs):
            await pool.enqueue_job("noop")

    asyncio.run(fill())


def work() -> None:
    asyncio.set_event_loop(asyncio.new_event_loop())
    settings = RedisSettings.from_dsn(url())
    Worker([noop], redis_settings=settings, max_jobs=MAX_JOBS, poll_delay=POLL_S, log_results=False).run()


if __name__ == "__main__":
    main(enqueue, work)
