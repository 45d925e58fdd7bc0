"""WaitingQueue: requests that have no slot yet, in the order of their admission."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from .request import Request

AdmissionKey = Callable[[Request], float]
"""Smallest first; e.g. ``lambda request: -request.params.max_tokens`` admits the longest first."""


class WaitingQueue:
    """First in, first out, or by ``key``; requests of equal keys keep their order."""

    def __init__(self, key: AdmissionKey | None = None) -> None:
        self._key = key
        self._requests: dict[int, Request] = {}
        self._heap: list[tuple[float, int]] = []  # (key, handle); handles grow, so they break ties by arrival
        self._returned: list[int] = []  # handles that come before all others, the last one first

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, handle: int) -> bool:
        return handle in self._requests

    def handles(self) -> list[int]:
        """Handles in the order of arrival."""
        return sorted(self._requests)

    def push(self, request: Request) -> None:
        """Add a request."""
        key = 0.0 if self._key is None else float(self._key(request))
        heapq.heappush(self._heap, (key, request.handle))
        self._requests[request.handle] = request

    def push_front(self, request: Request) -> None:
        """Give back a request that had its turn: it is the next one."""
        self._returned.append(request.handle)
        self._requests[request.handle] = request

    def peek(self) -> Request:
        """The next request; the queue must not be empty."""
        while self._returned:
            if self._returned[-1] in self._requests:
                return self._requests[self._returned[-1]]
            self._returned.pop()
        while self._heap[0][1] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0][1]]

    def pop(self) -> Request:
        """Take the next request; the queue must not be empty."""
        return self.remove(self.peek().handle)

    def remove(self, handle: int) -> Request:
        """Take one request; its entry in the order is skipped when it comes up."""
        request = self._requests.pop(handle)
        if not self._requests:
            self._heap.clear()
            self._returned.clear()
        return request
