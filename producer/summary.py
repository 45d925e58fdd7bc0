"""What a run amounted to: rates, waiting times, how full the slots were, and how the requests ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.table import Table

from tokenmill.shared.broker import WorkerInfo
from tokenmill.shared.protocol import Reply


@dataclass
class Tally:
    """Adds up replies; keeps three numbers of each, not its text."""

    output_tokens: int = 0
    prompt_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    error_codes: Counter[str] = field(default_factory=Counter)
    queue_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    e2e_ms: list[float] = field(default_factory=list)

    def add(self, reply: Reply) -> None:
        """Count one reply."""
        self.output_tokens += reply.usage.output_tokens
        self.prompt_tokens += reply.usage.prompt_tokens
        self.finish_reasons[reply.finish_reason] += 1
        if reply.error is not None:
            self.error_codes[f"{reply.error.code}: {reply.error.message}"] += 1
        for times, value in (
            (self.queue_ms, reply.queue_ms),
            (self.ttft_ms, reply.ttft_ms),
            (self.e2e_ms, reply.e2e_ms),
        ):
            if value is not None:
                times.append(value)

    @property
    def replies(self) -> int:
        """How many replies there were."""
        return self.finish_reasons.total()

    @property
    def failure(self) -> str | None:
        """One line when some requests failed: how many, and the commonest reason."""
        failed = self.finish_reasons["error"]
        if not failed:
            return None
        reason, count = self.error_codes.most_common(1)[0]
        which = "the reason" if count == failed else f"the commonest reason ({count})"
        return f"{failed} of {self.replies} requests failed; {which}: {reason}"

    def line(self, seconds: float) -> str:
        """The run in one line."""
        rate = self.output_tokens / seconds if seconds else 0.0
        return f"{self.replies} replies, {self.output_tokens} output tokens in {seconds:.1f} s ({rate:.0f} tok/s)"

    def table(self, seconds: float, workers: Sequence[WorkerInfo]) -> Table:
        """The run as a table of two columns."""
        table = Table(show_header=False, title="Summary", title_justify="left")
        rows = {
            "requests": f"{self.replies}",
            "tokens": f"{self.prompt_tokens} prompt, {self.output_tokens} output",
            "time": f"{seconds:.1f} s",
            "output rate": f"{self.output_tokens / seconds:.0f} tok/s" if seconds else "?",
            "queue time p50 / p95": percentiles(self.queue_ms),
            "TTFT p50 / p95": percentiles(self.ttft_ms),
            "E2E latency p50 / p95": percentiles(self.e2e_ms),
            "slot occupancy": occupancy(workers),
            "finish reasons": ", ".join(f"{count} {reason}" for reason, count in self.finish_reasons.most_common()),
        }
        for name, value in rows.items():
            table.add_row(name, value)
        return table


def percentiles(times_ms: Sequence[float]) -> str:
    """Median and 95th percentile in seconds, as text."""
    if not times_ms:
        return "?"
    p50, p95 = np.percentile(times_ms, [50, 95]) / 1000
    return f"{p50:.2f} s / {p95:.2f} s"


def occupancy(workers: Sequence[WorkerInfo]) -> str:
    """Share of the slots that had a request in them, averaged over the steps of all workers, as text."""
    offered = sum(int(w.status.get("steps", 0)) * int(w.status.get("slots", 0)) for w in workers)
    used = sum(int(w.status.get("row_steps", 0)) for w in workers)
    return f"{used / offered:.0%}" if offered else "?"
