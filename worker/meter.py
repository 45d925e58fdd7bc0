"""What a worker measures of itself: numbers noted in passing by the loop, and added up when somebody asks."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import numpy as np

from tokenmill.shared.protocol import FinishReason

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
POWERS_OF_TWO = tuple(1 << exponent for exponent in range(13))
_PENDING = 8192  # values noted before they are added up although nobody asks


class Distribution:
    """A histogram whose values are noted by one thread, for a tenth of a microsecond each, and added up by others."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.array(bounds, float)
        self._counts = np.zeros(len(bounds) + 1, np.int64)  # the last is of values above all bounds
        self._sum = 0.0
        self._noted: deque[float] = deque()
        self._adding = threading.Lock()

    def note(self, values: Iterable[float]) -> None:
        """Take some values."""
        self._noted.extend(values)
        if len(self._noted) > _PENDING:
            self._add_up()

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum of all values."""
        with self._adding:
            self._add_up_locked()
            counts, total = self._counts.cumsum().tolist(), self._sum
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return list(zip(bounds, counts, strict=True)), total

    def _add_up(self) -> None:
        with self._adding:
            self._add_up_locked()

    def _add_up_locked(self) -> None:
        values = np.array([self._noted.popleft() for _ in range(len(self._noted))])
        if len(values):
            buckets = np.searchsorted(self._bounds, values)
            self._counts += np.bincount(buckets, minlength=len(self._counts))
            self._sum += float(values.sum())


class Meter:
    """Distributions of one worker's steps and requests; durations in seconds. The loop's thread notes, others read."""

    def __init__(self) -> None:
        self.busy_seconds = 0.0  # rows times the duration of their step, summed
        self.finished: Counter[FinishReason] = Counter()
        self.step_seconds = Distribution(SECONDS)
        self.step_rows = Distribution(POWERS_OF_TWO)
        self.step_tokens = Distribution(POWERS_OF_TWO)
        self.queue_seconds = Distribution(SECONDS)
        self.first_token_seconds = Distribution(SECONDS)
        self.inter_token_seconds = Distribution(SECONDS)
        self.e2e_seconds = Distribution(SECONDS)
        self.prompt_tokens = Distribution(POWERS_OF_TWO)
        self.output_tokens = Distribution(POWERS_OF_TWO)

    def note_claim(self, queue_seconds: float, prompt_tokens: int) -> None:
        """A request was taken in, so long after it was enqueued."""
        self.queue_seconds.note((queue_seconds,))
        self.prompt_tokens.note((prompt_tokens,))

    def note_step(self, seconds: float, *, rows: int, tokens: int) -> None:
        """A step computed so many rows and tokens."""
        self.busy_seconds += seconds * rows
        self.step_seconds.note((seconds,))
        self.step_rows.note((rows,))
        self.step_tokens.note((tokens,))

    def note_reply(self, finish_reason: FinishReason, e2e_seconds: float, output_tokens: int) -> None:
        """A request was answered, so long after it was enqueued."""
        self.finished[finish_reason] += 1
        self.e2e_seconds.note((e2e_seconds,))
        self.output_tokens.note((output_tokens,))
