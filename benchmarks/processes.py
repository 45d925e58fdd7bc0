"""Functions in a process of their own, whose maths libraries have the threads that they have in a worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_THREADS = {"OPENBLAS_NUM_THREADS": "1", "GOMP_SPINCOUNT": "300"}  # read once, when the libraries are loaded


class Process:
    """Calls functions in one other process, which keeps what they cache."""

    def __init__(self, executor: ProcessPoolExecutor) -> None:
        self._executor = executor

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._executor.submit(function, *args, **kwargs).result()


@contextmanager
def process() -> Iterator[Process]:
    """One more process; our models divide their work themselves."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(_THREADS)
    executor = ProcessPoolExecutor(1, get_context("spawn"))
    try:
        executor.submit(os.getpid).result()  # it starts now, with this environment
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
    with executor:
        yield Process(executor)
