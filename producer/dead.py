"""Dead letters, for people and as JSON. What was pushed may be any bytes: no terminal gets them as they are."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokenmill.shared.broker import Broker, DeadLetter
from tokenmill.shared.errors import TokenmillError

_WHY_NOT = {
    "gone": "there is no such dead letter",
    "cut": "it was too large to be kept whole",
    "in use": "its id waits, runs or was answered meanwhile",
}


def letters(broker: Broker) -> Iterator[DeadLetter]:
    """All dead letters, the oldest first."""
    after = None
    while some := broker.dead_letters(after=after):
        yield from some
        after = some[-1].entry_id


def print_list(broker: Broker, *, as_json: bool) -> None:
    """Print all dead letters, without what was pushed."""
    if as_json:
        for letter in letters(broker):
            click.echo(msgspec.json.encode(_as_dict(letter)))
        return
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("id", "died", "request", "why"):
        table.add_column(column, overflow="fold")
    table.add_column("bytes", justify="right")
    for letter in letters(broker):
        cells = (letter.entry_id, f"{_died(letter):%Y-%m-%d %H:%M:%S}", letter.id or "?", letter.why, str(letter.size))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    Console(highlight=False).print(table if table.rows else "no dead letters")


def print_letter(broker: Broker, entry_id: str, *, as_json: bool) -> None:
    """Print one dead letter with what was pushed; raises TokenmillError if it is not there."""
    letter = broker.dead_letter(entry_id)
    if letter is None:
        raise TokenmillError(_problem(entry_id, "gone"))
    payload = letter.payload.decode(errors="backslashreplace")
    if as_json:
        click.echo(msgspec.json.encode({**_as_dict(letter), "payload": payload}))
        return
    rest = letter.size - len(letter.payload)
    click.echo(f"request: {printable(letter.id) or '?'}")
    click.echo(f"died:    {_died(letter):%Y-%m-%d %H:%M:%S} UTC")
    click.echo(f"why:     {printable(letter.why)}")
    click.echo(f"payload: {letter.size} bytes" + (f", of which the last {rest} were not kept" if rest else ""))
    click.echo(printable(payload))


def requeue_letter(broker: Broker, entry_id: str) -> str | None:
    """Send one dead letter again; why that was impossible, or None."""
    outcome = broker.requeue_dead(entry_id)
    return None if outcome == "ok" else _problem(entry_id, outcome)


def printable(text: str) -> str:
    """The text with every control character spelled out, so that it cannot steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _problem(entry_id: str, outcome: str) -> str:
    return f"dead letter {entry_id}: {_WHY_NOT.get(outcome, outcome)}"


def _as_dict(letter: DeadLetter) -> dict[str, Any]:
    died = _died(letter).isoformat(timespec="milliseconds")
    return {"id": letter.entry_id, "died": died, "request": letter.id, "why": letter.why, "size": letter.size}


def _died(letter: DeadLetter) -> datetime:
    """An entry of a stream begins with the milliseconds at which it was added."""
    return datetime.fromtimestamp(int(letter.entry_id.partition("-")[0]) / 1000, UTC)
