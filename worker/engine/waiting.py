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

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, handle: int) -> bool:
        return handle in self._requests

    def handles(self) -> list[int]:
        """Handles in the order of arrival."""
        return list(self._requests)

    def push(self, request: Request) -> None:
        """Add a request."""
        key = 0.0 if self._key is None else float(self._key(request))
        heapq.heappush(self._heap, (key, request.handle))
        self._requests[request.handle] = request

    def pop(self) -> Request:
        """Take the next request; the queue must not be empty."""
        while True:
            _, handle = heapq.heappop(self._heap)
            if handle in self._requests:
                return self._requests.pop(handle)

    def remove(self, handle: int) -> Request:
        """Take one request out of its turn; its heap entry is skipped when it comes up."""
        request = self._requests.pop(handle)
        if not self._requests:
            self._heap.clear()
        return request
