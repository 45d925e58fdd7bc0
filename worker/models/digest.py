"""What tells one file of weights from another."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_HEAD_BYTES, _SAMPLE_BYTES, _SAMPLES = 4 << 20, 1 << 16, 64


def file_digest(data: NDArray[np.uint8]) -> str:
    """A digest of a file: its size, its head (metadata and vocabulary), and a sample of its weights.

    A whole digest would read many gigabytes of a large model; weights that differ, differ all over.
    """
    digest = hashlib.sha256(str(len(data)).encode())
    digest.update(data[:_HEAD_BYTES].tobytes())
    for start in np.linspace(0, max(0, len(data) - _SAMPLE_BYTES), _SAMPLES, dtype=np.int64).tolist():
        digest.update(data[start : start + _SAMPLE_BYTES].tobytes())
    return digest.hexdigest()[:16]
