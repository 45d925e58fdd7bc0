"""``tokenmill worker`` that writes down every call of its model: ``… timed_worker TRACE WORKER-OPTIONS``.

TRACE becomes a NumPy file of one line per call: its begin and end on the clock that all processes share, rows, and
tokens.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    _, trace, *options = sys.argv
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy is imported here, before the worker can say so
    import numpy as np

    from tokenmill.shared.cli import main as tokenmill
    from tokenmill.worker import models

    calls: list[tuple[float, float, int, int]] = []
    load = models.load_model

    def load_timed(*args: Any, **kwargs: Any) -> models.LoadedModel:
        loaded = load(*args, **kwargs)
        forward = loaded.model.forward

        def timed(batch: Any) -> Any:
            begin = time.perf_counter()
            answer = forward(batch)
            calls.append((begin, time.perf_counter(), len(batch), len(batch.tokens)))
            return answer

        loaded.model.forward = timed  # type: ignore[method-assign]
        return loaded

    models.load_model = load_timed
    sys.argv = ["tokenmill", "worker", *options]
    try:
        tokenmill()
    finally:
        with Path(trace).open("wb") as file:
            np.save(file, np.array(calls, float).reshape(-1, 4))


if __name__ == "__main__":
    main()
