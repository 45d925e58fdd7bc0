"""Waiting for any number of requests at once: their ids, as they end, and their tokens come over one blocking read."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from tokenmill.producer.client import FINISHED, ReplyGoneError
from tokenmill.producer.outage import Outage
from tokenmill.producer.request import IdInUseError, QueueFullError, send_async
from tokenmill.shared import calls
from tokenmill.shared.async_broker import AsyncBroker
from tokenmill.shared.calls import token_entry
from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.protocol import Reply, StrictRequest
from tokenmill.shared.records import TokenEntry

SWEEP_S = 1.0  # between two looks at everything that is waited for
SWEEP_SHARE = 0.05  # of the time goes into those looks at most
LOOK = 500  # requests in one round trip

_decoder = msgspec.json.Decoder(Reply)


class Waiter:
    """One who waits for the reply to a request; with ``after`` also for its tokens from that entry on.

    With its ``request`` a waiter outlasts a broker that has forgotten it: it is sent again.
    """

    def __init__(self, request_id: str, request: StrictRequest | None = None, after: str | None = None) -> None:
        self.request_id = request_id
        self.request = request
        self.position = after
        self.entries: list[TokenEntry] = []  # arrived, not yet taken
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.news = asyncio.Event()  # entries, or the reply
        self.reply.add_done_callback(lambda _: self.news.set())

    def take(self) -> list[TokenEntry]:
        """The entries that have arrived since the last call."""
        taken, self.entries = self.entries, []
        return taken

    def add(self, entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> None:
        """Take entries that are new to this waiter."""
        for entry in entries:
            if self.position is not None and _order(entry[0].decode()) > _order(self.position):
                self.entries.append(token_entry(*entry))
                self.position = self.entries[-1].entry_id
                self.news.set()


class Inbox:
    """Delivers replies and token entries to waiters. Requests enqueued with ``reply_to=inbox.name`` are announced.

    Nothing depends on the announcement: every id is looked at when its waiter comes, and in a sweep every second.
    """

    def __init__(self, broker: AsyncBroker, name: str, outage: Outage) -> None:
        self.name = name
        self._broker = broker
        self._outage = outage
        self._announcements = broker.keys.replies(name)
        self._announced = "0-0"
        self._waiters: defaultdict[str, list[Waiter]] = defaultdict(list)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._deaf = False  # in a blocking read that nobody has cut short: it knows no stream that came later

    def __len__(self) -> int:
        return sum(map(len, self._waiters.values()))

    async def join(self, waiter: Waiter) -> None:
        """Begin to wait, with a look at what is there already."""
        self._waiters[waiter.request_id].append(waiter)
        self._keep_running("read", self._read)
        self._keep_running("sweep", self._sweep)
        if waiter.position is not None and self._deaf:
            self._deaf = False
            with suppress(TokenmillError):  # the read ends by itself as well
                await self._broker.all(calls.poke(self._broker.keys, self.name))
        await self.look([waiter.request_id])

    def leave(self, waiter: Waiter) -> None:
        """Wait no longer."""
        self._take_out(waiter)
        if not waiter.reply.cancel() and not waiter.reply.cancelled():
            waiter.reply.exception()  # or the loop would complain that nobody looked

    async def look(self, request_ids: Iterable[str]) -> None:
        """Look how these requests are, and deliver the replies of those that have ended."""
        ids = list(request_ids)
        keys = self._broker.keys
        states = await self._insist([calls.state(keys, request_id) for request_id in ids])
        ended = {request_id: state for request_id, state in zip(ids, states, strict=True) if state in FINISHED}
        missing = await self._fetch(ended)
        for request_id in missing:
            self._fail(request_id, ReplyGoneError(request_id, ended[request_id]))
        for request_id, state in zip(ids, states, strict=True):
            if state is None:
                await self._send_again(request_id)

    async def rest(self, waiter: Waiter) -> list[TokenEntry]:
        """What the token stream has after the waiter's last entry; all of it, since the reply is there."""
        position = waiter.position or "0-0"
        waiter.position = None  # it hears of no more
        [entries] = await self._insist([calls.tokens(self._broker.keys, waiter.request_id, position)])
        return [*waiter.take(), *entries]

    async def aclose(self) -> None:
        """End; whoever waits is cancelled."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for waiter in [waiter for waiters in self._waiters.values() for waiter in waiters]:
            self.leave(waiter)

    def _keep_running(self, name: str, work: Any) -> None:
        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(self._guard(work()))

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """What no repetition mends is told to everybody who waits."""
        try:
            await work
        except Exception as error:
            for request_id in list(self._waiters):
                self._fail(request_id, error)

    async def _read(self) -> None:
        """Read announcements and token streams, for as long as somebody waits."""
        while self._waiters:
            positions = {self._announcements: self._announced, **self._positions()}
            self._deaf = True
            streams = await self._outage.insist(partial(self._broker.read_streams, positions))
            self._deaf = False
            announced: list[str] = []
            for key, entries in streams:
                if key == self._announcements:
                    self._announced = entries[-1][0].decode()
                    announced = [fields[b"id"].decode() for _, fields in entries if b"id" in fields]
                else:
                    for waiter in self._waiters.get(key.removeprefix(self._broker.keys.tokens("")), ()):
                        waiter.add(entries)
            await self._fetch(request_id for request_id in announced if request_id in self._waiters)

    def _positions(self) -> dict[str, str]:
        """The token streams that are read, and from where on."""
        return {
            self._broker.keys.tokens(request_id): min(positions, key=_order)
            for request_id, waiters in self._waiters.items()
            if (positions := [waiter.position for waiter in waiters if waiter.position is not None])
        }

    async def _sweep(self) -> None:
        """Look at everything every now and then, the more rarely the longer it takes."""
        loop = asyncio.get_running_loop()
        pause_s = SWEEP_S
        while self._waiters:
            await asyncio.sleep(pause_s)
            began = loop.time()
            ids = list(self._waiters)
            for first in range(0, len(ids), LOOK):
                await self.look(ids[first : first + LOOK])
            pause_s = max(SWEEP_S, (loop.time() - began) / SWEEP_SHARE)

    async def _fetch(self, request_ids: Iterable[str]) -> list[str]:
        """Deliver the replies that are there; returns the ids of those that are not."""
        ids = list(request_ids)
        bodies = await self._insist([calls.reply(self._broker.keys, request_id) for request_id in ids])
        for request_id, body in zip(ids, bodies, strict=True):
            if body is not None:
                reply = _decoder.decode(body)
                for waiter in self._waiters.get(request_id, ()):
                    if not waiter.reply.done():
                        waiter.reply.set_result(reply)
        return [request_id for request_id, body in zip(ids, bodies, strict=True) if body is None]

    async def _send_again(self, request_id: str) -> None:
        """The broker does not know an id: what was accepted under it, it has lost with its last second."""
        for waiter in list(self._waiters.get(request_id, ())):
            if waiter.request is None or waiter.reply.done():
                continue
            try:
                reply_id = await self._outage.insist(partial(send_async, self._broker, waiter.request))
            except QueueFullError:
                continue  # the next sweep tries again
            except IdInUseError as error:
                self._fail(request_id, error)
            else:
                self._move(waiter, reply_id)

    def _move(self, waiter: Waiter, request_id: str) -> None:
        """Under a forgotten idempotency key the request has another id now."""
        if self._take_out(waiter):
            waiter.request_id = request_id
            self._waiters[request_id].append(waiter)

    def _take_out(self, waiter: Waiter) -> bool:
        waiters = self._waiters.get(waiter.request_id, [])
        if waiter not in waiters:
            return False
        waiters.remove(waiter)
        if not waiters:
            del self._waiters[waiter.request_id]
        return True

    def _fail(self, request_id: str, error: Exception) -> None:
        for waiter in self._waiters.get(request_id, ()):
            if not waiter.reply.done():
                waiter.reply.set_exception(error)

    async def _insist(self, together: list[calls.Call[Any]]) -> list[Any]:
        return await self._outage.insist(partial(self._broker.all, together))


def _order(entry_id: str) -> tuple[int, int]:
    """Stream entries in order: their ids are no text to compare."""
    time_ms, _, number = entry_id.partition("-")
    return int(time_ms), int(number or 0)
