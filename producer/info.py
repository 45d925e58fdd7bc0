"""The state of a queue and its workers, for people and as JSON."""

from __future__ import annotations

from typing import Any

import click
import msgspec
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

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
    """The info as a few lines, a table of workers, and the counters."""
    lines = [f"queue {queue}: {waiting_line(info)}, {info.running} running", *notices(queue, info)]
    if info.model:
        lines.append(f"model: {info.model}")
    parts = [Text(line) for line in lines]
    counters = "since the queue began: " + ", ".join(f"{n} {name}" for name, n in sorted(info.stats.items()))
    workers = [_workers(info.workers), _savings(info.workers)] if info.workers else ["no worker is alive"]
    return Group(*parts, *workers, *([counters] if info.stats else []))


def notices(queue: str, info: QueueInfo) -> list[str]:
    """What is out of the ordinary, a line each."""
    lines = []
    if info.suspended:
        lines.append(f"suspended: no worker begins anything until `tokenmill queue resume --queue {queue}`")
    if info.max_depth:
        lines.append(f"limit: {info.max_depth} waiting requests")
    if info.max_queued_tokens:
        lines.append(f"limit: {info.max_queued_tokens} queued tokens, {info.queued_tokens} are queued")
    if info.dead:
        lines.append(f"dead letters: {info.dead}, see `tokenmill dead list --queue {queue}`")
    return lines


def waiting_line(info: QueueInfo) -> str:
    """How much waits, how long, and of which kinds."""
    age = "" if info.oldest_age_ms is None else f" (the oldest for {info.oldest_age_ms / 1000:.1f} s)"
    kinds = [
        (info.high, "of high priority"),
        (info.low, "of low priority"),
        (info.resume, "begun before"),
        (info.suspects, "suspected of crashing workers"),
    ]
    return f"{info.waiting} waiting{age}" + "".join(f", {count} {what}" for count, what in kinds if count)


def _savings(workers: list[WorkerInfo]) -> str:
    reused, preempted = (
        sum(int(worker.status.get(name, 0)) for worker in workers) for name in ("reused_tokens", "preemptions")
    )
    return f"since these workers started: {reused} prompt tokens reused, {preempted} preemptions"


def _workers(workers: list[WorkerInfo]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1))  # fits into 80 columns
    for column in ("worker", "state", "model"):
        table.add_column(column)
    for column in ("busy", "requests", "tokens", "tok/s", "seen ago"):
        table.add_column(column, justify="right")
    for worker in workers:
        status = worker.status
        table.add_row(
            worker.name,
            str(status.get("state", "?")),
            str(status.get("model", "?")),
            f"{worker.busy} / {status.get('slots', '?')}",
            *(str(status.get(name, "?")) for name in ("requests", "output_tokens", "output_tokens_per_s")),
            f"{worker.age_ms / 1000:.1f} s",
        )
    return table
