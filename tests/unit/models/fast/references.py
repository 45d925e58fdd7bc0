"""What the kernels compute, in plain NumPy, and memory as they see it."""

from __future__ import annotations

import numpy as np

from tokenmill.worker.models.fast.layout import GROUP, activation_bytes
from tokenmill.worker.models.fast.packing import aligned


def zeros(*shape: int, dtype: str = "f4") -> np.ndarray:
    """Zeros that begin with a cache line."""
    array: np.ndarray = aligned(shape, dtype)
    return array


def activation_rows(n: int, width: int) -> np.ndarray:
    """Room for ``n`` rows of quantised activations."""
    return zeros(n, activation_bytes(width), dtype="u1")


def quantized(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a row in groups of 32."""
    groups = values.reshape(-1, GROUP)
    scales = np.maximum(np.abs(groups).max(1), np.float32(1e-20)) / np.float32(127)
    return np.rint(groups / scales[:, None]).astype(np.int8), scales


def fields(row: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What a row of activations says: codes, scales, scaled sums, corrections."""
    codes = row[:width].view(np.int8).reshape(-1, GROUP)
    words = row[width : width + 12 * (width // GROUP)].reshape(-1, 12)
    scales, sums = words[:, :4].copy().view("f4")[:, 0], words[:, 4:8].copy().view("f4")[:, 0]
    return codes, scales, sums, words[:, 8:].copy().view("i4")[:, 0]


def attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, n_seen: int) -> np.ndarray:
    """[heads, head_dim] queries, over the first ``n_seen`` of [kv_heads, tokens, head_dim], in float64."""
    group = len(queries) // len(keys)
    out = np.empty(queries.shape)
    for head, query in enumerate(queries):
        k, v = keys[head // group, :n_seen].astype(float), values[head // group, :n_seen].astype(float)
        weights = np.exp(k @ query - (k @ query).max())
        out[head] = weights @ v / weights.sum()
    return out


def rotated(heads: np.ndarray, position: int, frequencies: np.ndarray) -> np.ndarray:
    """RoPE of [heads, head_dim], in float64."""
    n = 2 * len(frequencies)
    out = heads.astype(float)
    turned = (out[:, 0:n:2] + 1j * out[:, 1:n:2]) * np.exp(1j * position * frequencies)
    out[:, 0:n:2], out[:, 1:n:2] = turned.real, turned.imag
    return out
