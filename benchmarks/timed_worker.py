"""``tokenmill worker`` that writes down every call of its model: ``… timed_worker TRACE WORKER-OPTIONS``.

TRACE becomes a NumPy file of one line per call: its begin and end on the clock that all processes share, rows, tokens,
and begin and end of the step that it is part of, with the admission of new requests in front.
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
    from tokenmill.worker.runner import Runner

    calls: list[tuple[float, ...]] = []
    steps: list[tuple[float, float]] = []
    load, admit, step = models.load_model, Runner.admit, Runner.step
    admitting: list[float] = []  # when it began, since the last step

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

    def admit_timed(runner: Runner, claim: Any) -> Any:
        admitting.append(time.perf_counter())
        return admit(runner, claim)

    def step_timed(runner: Runner) -> Any:
        begin, n = admitting[0] if admitting else time.perf_counter(), len(calls)
        admitting.clear()
        output = step(runner)
        steps.extend([(begin, time.perf_counter())] * (len(calls) - n))
        return output

    models.load_model = load_timed
    Runner.admit, Runner.step = admit_timed, step_timed  # type: ignore[method-assign]
    sys.argv = ["tokenmill", "worker", *options]
    try:
        tokenmill()
    finally:
        with Path(trace).open("wb") as file:
            lines = [(*call, *span) for call, span in zip(calls, steps, strict=False)]
            np.save(file, np.array(lines, float).reshape(-1, 6))


if __name__ == "__main__":
    main()
