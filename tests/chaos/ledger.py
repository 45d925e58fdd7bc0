"""What the harness has promised itself: the requests that were accepted, and what readers saw of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from tokenmill.shared.protocol import Reply

from .toxic import Toxic
from .workload import GoodRequest


class Seen(NamedTuple):
    """What one reader got: the pieces of a stream joined (None: it only waited), and the reply."""

    request: GoodRequest
    text: str | None
    reply: Reply


class Ledger:
    """Filled by producers, readers and disturbances, each in its own thread; read by the audit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._accepted: dict[str, GoodRequest] = {}
        self._owed: dict[str, None] = {}
        self._cancelled: dict[str, str | None] = {}
        self._toxic: list[Toxic] = []
        self._unsure: list[Toxic] = []
        self._seen: list[Seen] = []
        self._problems: list[str] = []

    def accept(self, request: GoodRequest) -> None:
        """The broker has said yes: from here on a reply is owed."""
        with self._lock:
            self._accepted[request.id] = request
            self._owed[request.id] = None

    def cancel(self, request_id: str, answer: str | None) -> None:
        """A request is being cancelled; None before the broker has answered."""
        with self._lock:
            self._cancelled[request_id] = answer or self._cancelled.get(request_id)

    def accept_toxic(self, toxic: Toxic, *, sure: bool) -> None:
        """A hostile payload was pushed; not ``sure`` when the broker's answer was lost."""
        with self._lock:
            (self._toxic if sure else self._unsure).append(toxic)

    def see(self, seen: Seen) -> None:
        """A reader has come to the end of a request."""
        with self._lock:
            self._seen.append(seen)

    def complain(self, problem: str) -> None:
        """Something happened that must not happen."""
        with self._lock:
            self._problems.append(problem)

    def answered(self, ids: Sequence[str]) -> None:
        """These have a reply."""
        with self._lock:
            for request_id in ids:
                self._owed.pop(request_id, None)

    @property
    def accepted(self) -> dict[str, GoodRequest]:
        with self._lock:
            return dict(self._accepted)

    @property
    def owed(self) -> list[str]:
        """Ids of accepted requests that had no reply when somebody last looked."""
        with self._lock:
            return list(self._owed)

    @property
    def cancelled(self) -> dict[str, str | None]:
        """What the broker answered to each cancel; None: that answer was lost."""
        with self._lock:
            return dict(self._cancelled)

    @property
    def toxic(self) -> tuple[list[Toxic], list[Toxic]]:
        """The hostile payloads: pushed for sure, and perhaps."""
        with self._lock:
            return list(self._toxic), list(self._unsure)

    @property
    def seen(self) -> list[Seen]:
        with self._lock:
            return list(self._seen)

    @property
    def problems(self) -> list[str]:
        with self._lock:
            return list(self._problems)
