"""Products of weights with the columns of a step."""

from __future__ import annotations

import functools
import time
from itertools import pairwise

import numpy as np

from tokenmill.worker.models.gguf_file import Float32
from tokenmill.worker.models.threads import Threads

_SMALL = 1_000_000  # multiply-adds up to which OpenBLAS has its kernels for small matrices
_MAX_COLUMNS, _MAX_ROWS = 64, 32
_TILE = 6  # rows that these kernels take at once


class Matrix:
    """Weights ``[height, width]``, to be multiplied with feature-major activations ``[width, n]``.

    Before it multiplies, OpenBLAS packs the weights anew in every call, which at 8 to 64 columns takes as long as the
    product. With AVX-512 its kernels for small matrices read them where they lie. So, where that is faster, the
    weights are a stack of strips of a few rows, which ``np.matmul`` takes one after the other in one call: 1.2 to 1.9
    times the speed at 2 to 64 columns.
    """

    def __init__(self, weights: Float32) -> None:
        self.weights = weights

    def times(self, x: Float32, out: Float32, threads: Threads) -> None:
        """Write ``weights @ x`` into ``out``, both [rows, n]; each thread computes some rows of it."""
        if threads.n == 1:
            return _multiply(self.weights, x, out)
        parts = [slice(*ends) for ends in pairwise(_cuts(len(self.weights), threads.n))]
        threads.run([functools.partial(_multiply, self.weights[part], x, out[part]) for part in parts])
        return None


def _multiply(weights: Float32, x: Float32, out: Float32) -> None:
    height, width = weights.shape
    n = x.shape[1]
    for first in range(0, n, _MAX_COLUMNS):
        columns = slice(first, first + _MAX_COLUMNS)
        rows = _strip(height, width, min(n - first, _MAX_COLUMNS)) if strips_pay() else height
        np.matmul(weights.reshape(-1, rows, width), x[:, columns], out=out.reshape(-1, rows, n)[:, :, columns])


@functools.cache
def _cuts(height: int, n: int) -> list[int]:
    """Borders of at most ``n`` parts that divide into strips."""
    grain = 48 if height % 48 == 0 else 32
    return sorted({height, *(height * i // n // grain * grain for i in range(n))})


@functools.cache
def _strip(height: int, width: int, n: int) -> int:
    """Rows of a strip: as many as are small, in whole tiles if possible; the whole height where that is too few."""
    most = min(_SMALL // (width * n), height)
    if most == height:
        return height
    divisors = [rows for rows in range(_TILE, min(most, _MAX_ROWS) + 1) if height % rows == 0]
    return max(divisors, key=lambda rows: (rows % _TILE == 0, rows), default=height)


@functools.cache
def strips_pay() -> bool:
    """Whether strips are faster on this machine: it depends on the library under NumPy and the processor."""
    weights, x = np.ones((768, 768), np.float32), np.ones((768, 32), np.float32)
    whole, strips = (min(_seconds(weights.reshape(-1, rows, 768), x) for _ in range(7)) for rows in (768, 24))
    return strips < whole


def _seconds(weights: Float32, x: Float32) -> float:
    out = np.empty((*weights.shape[:2], x.shape[1]), np.float32)
    start = time.perf_counter()
    np.matmul(weights, x, out=out)
    return time.perf_counter() - start
