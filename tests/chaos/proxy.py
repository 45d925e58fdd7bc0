"""A TCP proxy that loses, delays and repeats nothing by itself, but does all of it when told to."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from typing import Literal, get_args

Fault = Literal["cut", "part", "swallow", "late", "delay", "half_open"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
_CHUNK = 65536
_LATE_S = (0.1, 2.5)  # how long a late request travels
_DELAY_S = (0.05, 0.5)
_AFTERMATH_S = 0.2  # how long the upstream end stays open, so that what was sent is served


class Proxy:
    """Forwards a loopback port to the broker, from a thread of its own.

    A fault waits in a connection until its next request comes:

    - ``cut``: the request is lost, and the connection with it
    - ``part``: a part of it arrives, then the connection is lost
    - ``swallow``: it is served, and the answer is lost with the connection
    - ``late``: the connection is lost, and the request arrives afterwards, when the client has already repeated it
    - ``delay``: it and all that follows arrive later
    - ``half_open``: neither requests nor answers arrive from now on, and nobody is told
    """

    def __init__(self, upstream_port: int, seed: int) -> None:
        self.hits: Counter[str] = Counter()  # faults that came to pass
        self._upstream_port = upstream_port
        self._rng = random.Random(seed)
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def start(self) -> None:
        """Listen on a free port, ``port``."""
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result()
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def strike(self, fault: Fault, share: float) -> None:
        """Put a fault into a random share of the open connections, one at least."""
        self._loop.call_soon_threadsafe(self._strike, fault, share)

    def move(self, upstream_port: int) -> None:
        """Lead to another broker, as the address of a service does after a failover; what is connected is cut off."""
        self._upstream_port = upstream_port
        self._loop.call_soon_threadsafe(self._cut)

    def heal(self) -> None:
        """No faults any more; half-open connections are closed."""
        self._loop.call_soon_threadsafe(self._heal)

    def stop(self) -> None:
        """Close everything."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _strike(self, fault: Fault, share: float) -> None:
        links = sorted((link for link in self._links if link.fault is None), key=lambda link: link.number)
        for link in self._rng.sample(links, min(len(links), max(1, round(len(links) * share)))):
            link.fault = fault

    def _cut(self) -> None:
        for link in self._links:
            link.close()

    def _heal(self) -> None:
        for link in self._links:
            if link.fault == "half_open":
                link.close()
            link.fault = None

    async def _close(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        except OSError:
            writer.close()
            return
        link = _Link((reader, writer), upstream, self._rng, self.hits)
        self._links.add(link)
        try:
            await asyncio.gather(link.requests(), link.answers())
        except asyncio.CancelledError:
            pass  # the proxy stops; Python 3.11 complains of a connection whose task is cancelled
        finally:
            self._links.discard(link)
            link.close()


class _Link:
    """One connection through the proxy."""

    _n_links = 0

    def __init__(
        self,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        broker: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        rng: random.Random,
        hits: Counter[str],
    ) -> None:
        _Link._n_links += 1
        self.number = _Link._n_links
        self.fault: Fault | None = None
        self._from_client, self._to_client = client
        self._from_broker, self._to_broker = broker
        self._rng = rng
        self._hits = hits
        self._mute = False  # answers are thrown away
        self._delay_s = 0.0

    def close(self) -> None:
        """Close both ends."""
        self._to_client.close()
        self._to_broker.close()

    async def requests(self) -> None:
        """Forward what the client sends, until a fault or the client ends it."""
        try:
            while chunk := await self._from_client.read(_CHUNK):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                if self.fault is not None and not await self._suffer(self.fault, chunk):
                    break
                if self.fault != "half_open":
                    await self._forward(chunk)
        except OSError:
            pass
        finally:
            self.close()

    async def answers(self) -> None:
        """Forward what the broker sends, unless it is to be lost."""
        try:
            while chunk := await self._from_broker.read(_CHUNK):
                if not self._mute and self.fault != "half_open":
                    self._to_client.write(chunk)
                    await self._to_client.drain()
        except OSError:
            pass
        finally:
            if self.fault != "half_open":
                self._to_client.close()

    async def _suffer(self, fault: Fault, chunk: bytes) -> bool:
        """Let a fault happen to one request; whether the connection lives on, with the request still to be sent."""
        if fault == "half_open":
            self._hits[fault] += not self._mute
            self._mute = True
            return True
        self._hits[fault] += 1
        self.fault = None
        if fault == "delay":
            self._delay_s = self._rng.uniform(*_DELAY_S)
            return True
        self._mute = True
        if fault == "part":
            await self._forward(chunk[: self._rng.randrange(1, len(chunk) + 1)])
        elif fault == "swallow":
            await self._forward(chunk)
        elif fault == "late":
            self._to_client.close()
            await asyncio.sleep(self._rng.uniform(*_LATE_S))
            await self._forward(chunk)
        if fault != "cut":
            await asyncio.sleep(_AFTERMATH_S)
        return False

    async def _forward(self, chunk: bytes) -> None:
        self._to_broker.write(chunk)
        await self._to_broker.drain()
