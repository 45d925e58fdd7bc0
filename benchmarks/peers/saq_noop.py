"""No-op jobs through one SAQ worker."""

from __future__ import annotations

import asyncio
from typing import Any

from saq import Job, Queue, Worker
from tally import main, tally, url

CONCURRENCY = 32


async def noop(context: dict[str, Any]) -> None:
    tally.count()


def enqueue(jobs: int) -> None:
    async def fill() -> None:
        queue = Queue.from_url(url())
        await queue.connect()
        for _ in range(jobs):
            await queue.enqueue(Job("noop"))

    asyncio.run(fill())


def work() -> None:
    async def serve() -> None:
        queue = Queue.from_url(url())
        await queue.connect()
        await Worker(queue, [noop], concurrency=CONCURRENCY).start()

    asyncio.run(serve())


if __name__ == "__main__":
    main(enqueue, work)
