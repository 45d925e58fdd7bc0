"""Threads that compute one thing together, and sleep between two."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue

Task = Callable[[], None]


class Threads:
    """``n`` threads, the caller's among them.

    The threads of BLAS libraries spin while they wait for one another; beside another busy process each of them loses
    its processor while the others spin for it. These sleep, and the caller takes over what none has begun.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._waiting: SimpleQueue[Task | None] = SimpleQueue()
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        for _ in range(1, n):
            threading.Thread(target=_serve, args=(self._waiting, self._ended), name="model", daemon=True).start()
        weakref.finalize(self, _dismiss, self._waiting, n - 1)

    def run(self, tasks: list[Task]) -> None:
        """Run all of them; returns when all have ended, and raises what one of them raised."""
        for task in tasks[1:]:
            self._waiting.put(task)
        errors = [_attempt(tasks[0])]
        for _ in tasks[1:]:
            try:
                untouched = self._waiting.get_nowait()
            except Empty:
                errors.append(self._ended.get())
            else:
                errors.append(_attempt(untouched))
        for error in errors:
            if error is not None:
                raise error


def _attempt(task: Task | None) -> BaseException | None:
    try:
        if task is not None:
            task()
    except BaseException as error:  # its place is the caller's thread
        return error
    return None


def _serve(waiting: SimpleQueue[Task | None], ended: SimpleQueue[BaseException | None]) -> None:
    """Run tasks until dismissed; without a reference to the ``Threads``, which end with their owner."""
    while (task := waiting.get()) is not None:
        ended.put(_attempt(task))
        del task  # it may hold the owner


def _dismiss(waiting: SimpleQueue[Task | None], n: int) -> None:
    for _ in range(n):
        waiting.put(None)
