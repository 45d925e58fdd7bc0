"""A live view of a queue: what waits, what runs in each slot of each worker, how fast tokens come, what went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tokenmill.producer.info import notices, waiting_line
from tokenmill.producer.workplace import open_broker
from tokenmill.shared.broker import Broker, QueueInfo, WorkerInfo
from tokenmill.shared.errors import BrokerUnreachableError

CELL_WIDTH = 10  # "9.9s  120 "
SILENT_MS = 3000  # a worker renews once a second
ERRORS = {
    "finished_error": "failed",
    "finished_deadline": "ran out of time",
    "reclaimed": "taken from silent workers",
    "suspected": "suspected of crashing workers",
    "fenced": "late writes dropped",
    "full": "refused by the full queue",
    "script_errors": "script errors",
}


@dataclass(slots=True)
class View:
    """The last look at a queue, and what is needed to tell what has changed."""

    queue: str
    address: str
    info: QueueInfo | None = None
    first_stats: dict[str, int] = field(default_factory=dict)
    away_since: float | None = None

    def update(self, info: QueueInfo) -> None:
        """Take a new look."""
        if self.info is None:
            self.first_stats = info.stats
        workers = sorted(info.workers, key=lambda worker: worker.name)  # else each renewal would move them
        self.info, self.away_since = info._replace(workers=workers), None

    def lines(self, now: float, *, width: int, height: int | None = None) -> Group:
        """The view as lines, with the slots drawn small, or workers left out, where ``height`` lines are too few."""
        head = [Text(f"queue {self.queue} at {self.address}", style="bold")]
        if self.away_since is not None:
            away = f"the broker has been away for {now - self.away_since:.0f} s; trying again until it is back"
            head.append(Text(away, style="bold red"))
        if self.info is None:
            return Group(*head)
        head += [_summary(self.info), *(Text(line, style="yellow") for line in notices(self.queue, self.info))]
        errors = _errors(self.info.stats, self.first_stats)
        room = None if height is None else height - len(head) - 1
        parts = [*head, *_workers(self.info.workers, width, room), errors]
        for part in parts:
            part.no_wrap, part.overflow = True, "ellipsis"
        return Group(*parts)


def show_top(redis: str | None, queue: str, *, interval_s: float, once: bool) -> None:
    """Watch a queue until Ctrl-C; a single look where ``once`` is asked for, or where nobody can watch."""
    broker = open_broker(redis, queue)
    console = Console(highlight=False)
    view = View(queue, broker.address)
    if once or not console.is_terminal:
        view.update(broker.info())
        console.print(view.lines(time.monotonic(), width=console.width), soft_wrap=True)
        return
    watch(broker, view, console, interval_s=interval_s)


def watch(
    broker: Broker,
    view: View,
    console: Console,
    *,
    interval_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Draw one look after the other on the whole terminal until Ctrl-C; a broker that goes away is waited for."""
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    view.update(broker.info())
                except BrokerUnreachableError:
                    view.away_since = clock() if view.away_since is None else view.away_since
                live.update(view.lines(clock(), width=console.width, height=console.height), refresh=True)
                sleep(interval_s)
    except KeyboardInterrupt:
        pass


def _summary(info: QueueInfo) -> Text:
    slots = sum(int(worker.status.get("slots", 0)) for worker in info.workers)
    busy = sum(worker.busy for worker in info.workers)
    rate = sum(_rate(worker) for worker in info.workers)
    parts = [waiting_line(info), f"{info.running} running", f"{busy} of {slots} slots busy", f"{rate:.0f} tok/s"]
    return Text(" · ".join(parts))


def _errors(stats: dict[str, int], first: dict[str, int]) -> Text:
    """Counters of what went wrong since the queue began, and how many of those since the view was opened."""
    parts = []
    for counter, what in ERRORS.items():
        if total := stats.get(counter, 0):
            new = total - first.get(counter, 0)
            parts.append(f"{total} {what}" + (f" (+{new})" if new > 0 else ""))
    return Text("errors: " + (", ".join(parts) or "none"), style="red" if parts else "")


def _workers(workers: Sequence[WorkerInfo], width: int, room: int | None) -> list[Text]:
    """The workers in as many lines as there is room for."""
    if not workers:
        return [Text("no worker is alive", style="bold red")]
    large = [line for worker in workers for line in (_title(worker), *_cells(worker, width))]
    if room is None or len(large) <= room:
        return large
    small = [_title(worker).append("  ").append_text(_blocks(worker)) for worker in workers]
    if len(small) > room:
        shown = max(room - 1, 0)
        small[shown:] = [Text(f"… and {len(small) - shown} more workers: make the terminal higher", style="dim")]
    return small


def _title(worker: WorkerInfo) -> Text:
    status = worker.status
    title = Text.assemble(
        (worker.name, "cyan"), f"  {status.get('state', '?')}  {worker.busy}/{status.get('slots', '?')}"
    )
    title.append(f"  {_rate(worker):.0f} tok/s")
    if worker.age_ms > SILENT_MS:
        title.append(f"  silent for {worker.age_ms / 1000:.0f} s", style="bold red")
    return title


def _cells(worker: WorkerInfo, width: int) -> list[Text]:
    """A cell for each slot, as many in a line as fit: age of the request and its output tokens."""
    cells = [_cell(cell, worker.age_ms) for cell in worker.status.get("cells", [])]
    per_line = max((width + 1) // CELL_WIDTH, 1)
    rows = [cells[first : first + per_line] for first in range(0, len(cells), per_line)]
    return [Text("│", style="dim").join(row) for row in rows]


def _cell(cell: Sequence[int] | None, since_ms: int) -> Text:
    if cell is None:
        return Text("·".center(CELL_WIDTH - 1), style="dim")
    age_ms, tokens = cell
    text = f"{_age((age_ms + since_ms) / 1000):>4} {_count(tokens):>4}"
    return Text(text, style="black on green" if tokens else "black on yellow")


def _blocks(worker: WorkerInfo) -> Text:
    """A character for each slot: it decodes, has no output yet, or is free."""
    cells: list[Any] = worker.status.get("cells", [])
    return Text("".join("·" if cell is None else "█" if cell[1] else "░" for cell in cells), style="green")


def _age(seconds: float) -> str:
    """A duration in four characters."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    for unit, length in (("s", 1), ("m", 60), ("h", 3600)):
        if seconds < 100 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def _count(number: int) -> str:
    return str(number) if number < 10_000 else f"{number // 1000}k"


def _rate(worker: WorkerInfo) -> float:
    return float(worker.status.get("output_tokens_per_s", 0.0))
