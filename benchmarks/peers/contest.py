"""What the programs that serve the workload share: ``PROGRAM CONFIG.json`` prints seconds and output tokens."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

Requests = Sequence[Sequence[Any]]  # [prompt, output tokens] each


def config() -> dict[str, Any]:
    """The config that the command line names."""
    loaded: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return loaded


def contest(serve: Callable[[Requests], Sequence[int]], warm_up: Requests, work: Requests) -> None:
    """Serve a little, then all; ``serve`` returns the number of tokens made for each."""
    serve(warm_up)
    start = time.perf_counter()
    made = serve(work)
    seconds = time.perf_counter() - start
    if list(made) != [wanted for _, wanted in work]:
        raise SystemExit(f"made {sum(made)} tokens instead of {sum(wanted for _, wanted in work)}")
    print(json.dumps({"seconds": seconds, "tokens": sum(made)}), flush=True)


@contextmanager
def worker(work: Callable[..., None], *args: Any) -> Iterator[None]:
    """A worker process for as long as the block runs; the program fails with it, instead of waiting for its replies."""
    process = get_context("spawn").Process(target=work, args=args, daemon=True)
    process.start()
    over = threading.Event()

    def watch() -> None:
        process.join()
        if not over.is_set():
            os._exit(1)  # why, the worker has said

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        process.kill()
        process.join()
