"""A batch of 50,000 lines takes hardly more memory than one of 2,000."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from ..e2e.workplace import wait_for
from .conftest import Bureau, line

MOST_GROWTH_MIB = 40


def peak_mib(pid: int) -> float:
    """Most memory that a process has had resident; 0 for one that has gone."""
    with suppress(OSError):
        if found := re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
            return int(found[1]) / 1024
    return 0.0


def children(process: subprocess.Popen[str]) -> list[int]:
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    return []


@pytest.mark.long
def test_memory_does_not_follow_the_lines(bureau: Bureau, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        bureau.workplace.start("toy", "--slots", "128")
    worker = bureau.start()
    peaks = {}
    for n in (2_000, 50_000):
        batch_id = bureau.submit([line(i, max_tokens=2) for i in range(n)])
        peak = 0.0

        def look(batch_id: str = batch_id) -> bool:
            nonlocal peak
            peak = max([peak, *map(peak_mib, children(worker))])
            return bureau.find(batch_id).ended

        wait_for(look, 600)
        assert bureau.find(batch_id).counts.completed == n
        peaks[n] = peak
    with capsys.disabled():
        told = ", ".join(f"{n:,} lines {peak:.0f} MiB" for n, peak in peaks.items())
        print(f"\npeak resident memory of the jobs of a batch: {told}")
    assert peaks[50_000] - peaks[2_000] < MOST_GROWTH_MIB
