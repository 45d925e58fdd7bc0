"""The broker for an event loop: what many ask for at the same time travels together over one connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import redis.asyncio
from redis.exceptions import NoScriptError

from tokenmill.shared import lua
from tokenmill.shared.calls import Call
from tokenmill.shared.connection import LONGEST_BLOCK_S, address_of, plain_errors
from tokenmill.shared.keys import Keys
from tokenmill.shared.settings import DEFAULTS

T = TypeVar("T")

_MOST_CALLS = 500  # of one round trip, or a few more: nobody waits behind thousands


class _Asked(NamedTuple):
    calls: Sequence[Call[Any]]
    answers: asyncio.Future[list[Any]]


class AsyncBroker:
    """One queue on one broker. It keeps one connection, and one more while something reads streams.

    Any call may be repeated after an error; errors are those of ``Broker``.
    """

    def __init__(self, client: redis.asyncio.Redis, queue: str = DEFAULTS.queue) -> None:
        self.keys = Keys(queue)
        self.address = address_of(client)
        self._redis = client
        self._asked: deque[_Asked] = deque()
        self._sender: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} queue {self.keys.queue!r} at {self.address}>"

    async def call(self, call: Call[T]) -> T:
        """The answer to one call."""
        [answer] = await self.all([call])
        return answer

    async def all(self, calls: Sequence[Call[T]]) -> list[T]:
        """The answers to several calls, in their order; raises the first error among them."""
        if not calls:
            return []
        asked = _Asked(calls, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())  # it starts when all that ask in this turn have asked
        return await asked.answers

    async def read_streams(
        self, positions: Mapping[str, str], block_s: float = LONGEST_BLOCK_S
    ) -> list[tuple[str, list[tuple[bytes, dict[bytes, bytes]]]]]:
        """Entries of any of the streams (key → the last entry read), waited for up to ``block_s`` (2 s at most)."""
        block_ms = max(1, int(min(block_s, LONGEST_BLOCK_S) * 1000))  # to Redis 0 is for ever
        with plain_errors(self.address, self.keys.queue):
            streams: Any = await self._redis.xread(dict(positions), block=block_ms)  # type: ignore[arg-type]
        return [(key.decode(), entries) for key, entries in streams or ()]

    async def aclose(self) -> None:
        """Close the connections; calls under way end as cancelled."""
        if self._sender is not None:
            self._sender.cancel()
            with suppress(asyncio.CancelledError):
                await self._sender
        await self._redis.aclose()

    async def _send(self) -> None:
        """Send what has been asked, round trip by round trip, until nothing is left."""
        while self._asked:
            together = self._take()
            try:
                answers = iter(await self._round_trip([call for asked in together for call in asked.calls]))
            except redis.RedisError as error:
                for asked in together:
                    self._answer(asked, [error])
            except BaseException:
                for asked in (*together, *self._asked):
                    asked.answers.cancel()
                self._asked.clear()
                raise
            else:
                for asked in together:
                    self._answer(asked, [next(answers) for _ in asked.calls])

    def _take(self) -> list[_Asked]:
        together, total = [], 0
        while self._asked and total < _MOST_CALLS:
            asked = self._asked.popleft()
            if not asked.answers.done():  # nobody waits for it any more
                together.append(asked)
                total += len(asked.calls)
        return together

    async def _round_trip(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """What the broker says to each call, an error among them; scripts that it has lost are loaded first."""
        answers = await self._pipeline([_command(call) for call in calls])
        for _ in range(lua.LOADS):
            lost = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
            if not lost:
                break
            scripts = {script for i in lost if (script := calls[i].script) is not None}
            loads = [("SCRIPT LOAD", lua.source(script)) for script in scripts]
            again = await self._pipeline([*loads, *(_command(calls[i]) for i in lost)])
            for i, answer in zip(lost, again[len(loads) :], strict=True):
                answers[i] = answer
        return answers

    async def _pipeline(self, commands: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        if not commands:
            return []
        pipeline: Any = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers

    def _answer(self, asked: _Asked, answers: list[Any]) -> None:
        if asked.answers.done():
            return
        try:
            with plain_errors(self.address, self.keys.queue):
                for answer in answers:
                    if isinstance(answer, redis.RedisError):
                        raise answer
                read = [call.read(answer) for call, answer in zip(asked.calls, answers, strict=True)]
        except Exception as error:
            asked.answers.set_exception(error)
        else:
            asked.answers.set_result(read)


def _command(call: Call[Any]) -> tuple[str | bytes | int, ...]:
    return call.command if call.script is None else lua.command(call.script, call.command)
