"""`tokenmill worker` whose toy model counts its output tokens in a file that outlives SIGKILL, and dies of poison."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.shared.cli import main
from tokenmill.worker.engine import Batch
from tokenmill.worker.models.toy import ToyModel

COUNTER = "CHAOS_COUNTER"  # environment name of the file: one int64
POISON = 0  # a prompt with this byte ends every worker that begins it
POISONED = 66  # exit code


def count_generated(counter: NDArray[np.int64]) -> None:
    """From now on, add every output token that any toy model computes to ``counter[0]``, and die of poison."""
    forward = ToyModel.forward

    def counted(model: ToyModel, batch: Batch) -> Any:
        if (batch.tokens == POISON).any():
            os._exit(POISONED)
        logits = forward(model, batch)
        counter[0] += len(logits)
        return logits

    ToyModel.forward = counted  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    count_generated(np.memmap(os.environ[COUNTER], np.int64, "r+", shape=(1,)))
    main()
