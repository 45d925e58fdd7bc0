"""What every route works with: the queue, its workers, and who may ask for how much."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from litestar import Request

from tokenmill.producer.aio import AsyncClient
from tokenmill.producer.gateway.callers import Caller, Callers
from tokenmill.producer.gateway.crew import Crew
from tokenmill.producer.gateway.errors import ApiError
from tokenmill.producer.gateway.quotas import Quotas
from tokenmill.shared import calls
from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.protocol import Reply, StrictRequest

T = TypeVar("T")
Call = Request[Caller, Any, Any]

SEND_S = 5.0  # how long a broker that is away is waited for before a call is refused
CLIENT_GONE = 499  # nobody reads the answer


class Desk:
    """One gateway's side of one queue. ``timeout_s`` is how long a caller may wait for a whole answer."""

    def __init__(self, client: AsyncClient, callers: Callers, quotas: Quotas, *, timeout_s: float) -> None:
        self.client = client
        self.callers = callers
        self.quotas = quotas
        self.crew = Crew(client.broker)
        self.timeout_s = timeout_s
        self._background: set[asyncio.Task[Any]] = set()

    async def send(self, requests: Sequence[StrictRequest]) -> list[str]:
        """Enqueue all or none; the ids that answer them. A full queue is not waited for."""
        ids: list[str] = []
        try:
            for request in requests:
                ids.append(await self.client.send(request, when_full="raise", timeout=SEND_S))
        except BaseException:
            self.cancel_later(ids)
            raise
        return ids

    async def replies(self, ids: Sequence[str], requests: Sequence[StrictRequest]) -> list[Reply]:
        """The replies to all, in their order; ApiError 504 when one takes too long."""
        waits = (
            self.client.wait(request_id, self.timeout_s, request=msgspec.structs.replace(request, id=request_id))
            for request_id, request in zip(ids, requests, strict=True)
        )
        return list(await asyncio.gather(*waits))

    async def while_there(self, call: Call, work: Coroutine[Any, Any, T]) -> T:
        """What the work brings, unless the caller goes away before: then it is cancelled, and ApiError 499."""
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(call))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return await task
            raise ApiError(CLIENT_GONE, "the caller went away", code="client_gone")
        finally:
            for either in (task, gone):
                either.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    def cancel_later(self, ids: Sequence[str]) -> None:
        """Cancel requests whose answer nobody will read, in the background."""
        if ids:
            self.run_later(self._cancel(list(ids)))

    def run_later(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do something that outlives the call."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def aclose(self) -> None:
        """Finish what runs in the background, and close the connections."""
        for task in self._background:
            if task.get_name() == ENDLESS:
                task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.client.aclose()

    async def _cancel(self, ids: list[str]) -> None:
        broker = self.client.broker
        with suppress(TokenmillError):
            await broker.all([calls.cancel(broker.keys, request_id) for request_id in ids])


ENDLESS = "endless"
"""Name of a background task that need not be finished before the gateway stops."""


def with_key(requests: Sequence[StrictRequest], caller: Caller, key: str | None) -> list[StrictRequest]:
    """The requests under the caller's idempotency key, if the call has one."""
    if key is None:
        return list(requests)
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    return [
        msgspec.structs.replace(request, idempotency_key=caller.own(f"{digest}.{i}"))
        for i, request in enumerate(requests)
    ]


async def _gone(call: Call) -> None:
    while (await call.receive())["type"] != "http.disconnect":
        pass
