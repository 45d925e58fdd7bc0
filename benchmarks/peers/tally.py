"""What the peers' programs share: ``PROGRAM URL enqueue N`` fills the queue, ``PROGRAM URL work N`` empties it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

WARM_UP = 0.05  # share of the jobs before the measurement begins


class Tally:
    """Counts the jobs of this process; prints seconds and processor seconds once all are done."""

    def __init__(self) -> None:
        self._done = 0
        self._first = self._last = 0

    def expect(self, jobs: int) -> None:
        """Measure from the end of the warm-up to this many jobs."""
        self._first, self._last = max(1, int(jobs * WARM_UP)), jobs

    def count(self) -> None:
        """One more job is done."""
        self._done += 1
        if self._done == self._first:
            self._start, self._cpu_start = time.perf_counter(), time.process_time()
        if self._done == self._last:
            seconds, cpu_s = time.perf_counter() - self._start, time.process_time() - self._cpu_start
            print(json.dumps({"jobs": self._last - self._first, "seconds": seconds, "worker_cpu_s": cpu_s}), flush=True)


tally = Tally()


def main(enqueue: Callable[[int], object], work: Callable[[], object]) -> None:
    """Do what the command line says; whoever started the program ends it when it has printed its figures."""
    _, _, verb, jobs = sys.argv
    if verb == "enqueue":
        enqueue(int(jobs))
    else:
        tally.expect(int(jobs))
        work()


def url() -> str:
    """The broker."""
    return sys.argv[1]
