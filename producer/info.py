"""The state of a queue and its workers, for people and as JSON."""

from __future__ import annotations

from typing import Any

import click
import msgspec
from rich import box
from rich.console import Console, Group
from rich.table import Table

from tokenmill.producer.workplace import open_broker
from tokenmill.shared.broker import QueueInfo, WorkerInfo


def show_info(redis: str | None, queue: str, *, as_json: bool) -> None:
    """Print what the broker says about the queue."""
    broker = open_broker(redis, queue)
    info = broker.info()
    if as_json:
        click.echo(msgspec.json.encode({"queue": queue, "broker": broker.address, **as_dict(info)}))
    else:
        Console(soft_wrap=True, highlight=False).print(as_text(queue, info))


def as_dict(info: QueueInfo) -> dict[str, Any]:
    """The info as JSON values; a worker's status stands beside its name."""
    workers = [
        {**worker.status, "name": worker.name, "age_ms": worker.age_ms, "busy": worker.busy} for worker in info.workers
    ]
    return {**info._asdict(), "workers": workers}


def as_text(queue: str, info: QueueInfo) -> Group:
    """The info as a line, a table of workers, and the counters."""
    age = "" if info.oldest_age_ms is None else f" (the oldest for {info.oldest_age_ms / 1000:.1f} s)"
    resume = f", {info.resume} of them begun before" if info.resume else ""
    lines = [f"queue {queue}: {info.waiting} waiting{age}{resume}, {info.running} running"]
    parts = [*lines, _workers(info.workers) if info.workers else "no worker is alive"]
    if info.stats:
        parts.append("since the queue began: " + ", ".join(f"{n} {name}" for name, n in sorted(info.stats.items())))
    return Group(*parts)


def _workers(workers: list[WorkerInfo]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("worker", "state", "model"):
        table.add_column(column)
    for column in ("busy / slots", "requests", "output tokens", "last seen"):
        table.add_column(column, justify="right")
    for worker in workers:
        status = worker.status
        table.add_row(
            worker.name,
            str(status.get("state", "?")),
            str(status.get("model", "?")),
            f"{worker.busy} / {status.get('slots', '?')}",
            str(status.get("requests", "?")),
            str(status.get("output_tokens", "?")),
            f"{worker.age_ms / 1000:.1f} s ago",
        )
    return table
