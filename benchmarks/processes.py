"""Functions in a process of their own, whose maths libraries have one thread, as in a worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_THREADS = "OPENBLAS_NUM_THREADS"  # read once, when NumPy is imported


class Process:
    """Calls functions in one other process, which keeps what they cache."""

    def __init__(self, executor: ProcessPoolExecutor) -> None:
        self._executor = executor

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._executor.submit(function, *args, **kwargs).result()


@contextmanager
def process() -> Iterator[Process]:
    """One more process; our models divide their work themselves."""
    before: Any = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    executor = ProcessPoolExecutor(1, get_context("spawn"))
    try:
        executor.submit(os.getpid).result()  # it starts now, with this environment
    finally:
        del os.environ[_THREADS]
        if before is not None:
            os.environ[_THREADS] = before
    with executor:
        yield Process(executor)
