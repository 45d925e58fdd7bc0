"""Memory for keys and values that the system gives page by page as it is written, and takes back."""

from __future__ import annotations

import logging
import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tokenmill.shared.errors import ModelLoadError

_log = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
PARKED_CONTEXTS = 64
"""Contexts of retired requests that a backend can keep beside those of its slots, for requests that begin alike."""


class LazyMemory:
    """An array of zeros in which untouched pages take no memory.

    NumPy's own arrays ask for huge pages, and a few tokens of each context would commit all of them (3.7 GB instead of
    0.9 GB for 32 contexts of 100 tokens); ``huge_pages`` is for memory that is written from the front. Raises
    ``ModelLoadError`` where the system refuses even the addresses.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32, *, huge_pages: bool = False) -> None:
        n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        # Without NORESERVE, Linux refuses to map more than the machine has, however little of it will be written.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._memory = mmap.mmap(-1, n_bytes, flags=flags)
        except (MemoryError, OSError, OverflowError):
            raise ModelLoadError(
                f"the system refuses {n_bytes / 2**30:.1f} GiB of addresses for keys and values; "
                "lower --slots or --max-context"
            ) from None
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        self.array: NDArray[Any] = np.frombuffer(self._memory, dtype).reshape(shape)

    def release(self, start: int, end: int) -> None:
        """Give the bytes from ``start`` to ``end``, both multiples of ``PAGE``, back to the system; they read as zeros.

        Where the system has no such call, they stay: a later write takes no further memory.
        """
        if end > start and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)


def affordable(max_context: int, capacity: int, kv_memory_mib: int) -> int:
    """The longest context that the memory can hold, if not as long as wished."""
    if capacity == 0:
        raise ModelLoadError(f"{kv_memory_mib} MiB cannot hold the keys and values of one token; raise --kv-memory-mib")
    if capacity < max_context:
        _log.warning(
            "contexts are %d tokens long instead of %d: more do not fit into %d MiB; raise --kv-memory-mib for longer",
            *(capacity, max_context, kv_memory_mib),
        )
    return min(max_context, capacity)
