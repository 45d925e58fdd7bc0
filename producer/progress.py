"""Progress of many requests on stderr: a live bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from tokenmill.producer.jsonl import Size
from tokenmill.shared.broker import WorkerInfo

RATE_WINDOW_S = 5.0  # workers report about once a second
PLAIN_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where the work stands."""

    done: int
    total: int
    tokens_per_s: float  # output tokens over the last seconds
    busy: int  # slots with a request in them
    slots: int
    eta_s: float | None  # None before the first token and after the last reply

    def __str__(self) -> str:
        return f"{self.done}/{self.total} done · {self.flow}"

    @property
    def flow(self) -> str:
        """Rate, busy slots and time left, in one line."""
        left = "" if self.eta_s is None else f" · {_duration(self.eta_s)} left"
        return f"{self.tokens_per_s:.0f} tok/s · {self.busy}/{self.slots} slots busy{left}"


class Answered(Protocol):
    """What has been answered so far; a Feed is one."""

    answered: int
    answered_tokens: int
    answered_max_tokens: int


class Meter:
    """Turns what the workers report into a snapshot; a worker that starts again counts from zero again."""

    def __init__(self, size: Size, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = size
        self._clock = clock
        self._started = clock()
        self._tokens = 0
        self._reported: dict[str, int] = {}  # worker → output tokens when last seen
        self._samples: deque[tuple[float, int]] = deque([(self._started, 0)])

    def measure(self, done: Answered, workers: Sequence[WorkerInfo]) -> Snapshot:
        """The state after so many replies, with the workers as they are now."""
        now = self._clock()
        for worker in workers:
            tokens = int(worker.status.get("output_tokens", 0))
            # What a worker did before it was first seen belongs to other work.
            self._tokens += max(0, tokens - self._reported.get(worker.name, tokens))
            self._reported[worker.name] = tokens
        self._samples.append((now, self._tokens))
        while len(self._samples) > 2 and self._samples[1][0] <= now - RATE_WINDOW_S:
            self._samples.popleft()
        since, before = self._samples[0]
        rate = (self._tokens - before) / (now - since) if now > since else 0.0
        return Snapshot(
            done=done.answered,
            total=self._size.requests,
            tokens_per_s=rate,
            busy=sum(worker.busy for worker in workers),
            slots=sum(int(worker.status.get("slots", 0)) for worker in workers),
            eta_s=self._eta_s(done, rate, now - self._started),
        )

    def _eta_s(self, done: Answered, rate: float, elapsed_s: float) -> float | None:
        """The lower of two guesses: by requests (wrong when the long ones come first), and by tokens (when many stop
        early)."""
        left = self._size.requests - done.answered
        if not left:
            return None
        guesses = []
        if done.answered:
            guesses.append(elapsed_s * left / done.answered)
        if rate:
            begun = self._tokens - done.answered_tokens  # of requests that still run
            guesses.append(max(0, self._size.max_tokens - done.answered_max_tokens - begun) / rate)
        return min(guesses, default=None)


class Display(Protocol):
    """Shows snapshots while it is entered."""

    def show(self, snapshot: Snapshot) -> None:
        """Show this one."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...


def display(total: int, *, quiet: bool = False) -> Display:
    """The display that fits the stderr of this process."""
    console = Console(stderr=True)
    if quiet:
        return NoDisplay()
    return LiveDisplay(total, console) if console.is_terminal else PlainDisplay(console)


class NoDisplay:
    """Shows nothing."""

    def show(self, snapshot: Snapshot) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class PlainDisplay(NoDisplay):
    """A line every few seconds, for logs and pipes, and one for the end."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._next = clock() + PLAIN_INTERVAL_S
        self._ended = False

    def show(self, snapshot: Snapshot) -> None:
        """Print a line if the last one is old enough, or everything is done."""
        if self._ended or (self._clock() < self._next and snapshot.done < snapshot.total):
            return
        self._ended = snapshot.done == snapshot.total
        self._next = self._clock() + PLAIN_INTERVAL_S
        self._console.print(str(snapshot), markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """A bar that stays in place."""

    def __init__(self, total: int, console: Console) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[flow]}"))
        self._bar = Bar(*columns, console=console)
        self._task = self._bar.add_task("", total=total, flow="")

    def show(self, snapshot: Snapshot) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=snapshot.done, flow=snapshot.flow)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest} s"
