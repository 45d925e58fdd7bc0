"""No-op jobs through one taskiq receiver over a Redis list, results kept in Redis."""

from __future__ import annotations

import asyncio

from tally import main, tally, url
from taskiq.api import run_receiver_task
from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend

CONCURRENCY = 100
RESULT_TTL_S = 3600

broker = ListQueueBroker(url()).with_result_backend(RedisAsyncResultBackend(url(), result_ex_time=RESULT_TTL_S))


@broker.task(task_name="noop")
async def noop() -> None:
    tally.count()


def enqueue(jobs: int) -> None:
    async def fill() -> None:
        await broker.startup()
        for _ in range(jobs):
            await noop.kiq()
        await broker.shutdown()

    asyncio.run(fill())


def work() -> None:
    async def serve() -> None:
        await broker.startup()
        await run_receiver_task(broker, max_async_tasks=CONCURRENCY)

    asyncio.run(serve())


if __name__ == "__main__":
    main(enqueue, work)
