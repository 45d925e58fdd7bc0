"""The operators' groups of the command line, ``queue`` and ``dead``; what they need is imported when they run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tokenmill.shared.errors import TokenmillError, UsageError
from tokenmill.shared.options import extra_option, option

if TYPE_CHECKING:
    from tokenmill.shared.broker import Broker

F = TypeVar("F", bound=Callable[..., Any])

_LETTER_ID = re.compile(r"\d+-\d+")


def on_a_queue(command: F) -> F:
    """Add ``--redis`` and ``--queue``."""
    return option("redis")(option("queue")(command))


def _open(redis: str | None, queue: str) -> Broker:
    from tokenmill.producer.workplace import open_broker

    return open_broker(redis, queue)


@click.group()
def queue() -> None:
    """Suspend, resume, empty or limit a queue."""


@queue.command()
@on_a_queue
def suspend(redis: str | None, queue: str) -> None:
    """Let workers begin nothing more.

    What runs goes on, and requests are still accepted.
    """
    _open(redis, queue).suspend()
    click.echo(f"queue {queue} is suspended")


@queue.command()
@on_a_queue
def resume(redis: str | None, queue: str) -> None:
    """Let workers begin requests again."""
    _open(redis, queue).resume()
    click.echo(f"queue {queue} goes on")


@queue.command()
@on_a_queue
def empty(redis: str | None, queue: str) -> None:
    """Cancel all waiting requests.

    Each gets its reply. What runs goes on.
    """
    click.echo(f"waiting requests cancelled: {_open(redis, queue).empty()}")


@queue.command()
@on_a_queue
@extra_option("max_depth", type=click.IntRange(min=0), help="Waiting requests at most; 0 is no limit.")
@extra_option("max_queued_tokens", type=click.IntRange(min=0), help="Tokens of waiting requests; 0 is no limit.")
def limits(redis: str | None, queue: str, max_depth: int | None, max_queued_tokens: int | None) -> None:
    """Show the limits of a queue, or set those that are given.

    A full queue refuses requests until there is room. Bare pushes are never refused.
    """
    broker = _open(redis, queue)
    if (max_depth, max_queued_tokens) != (None, None):
        broker.set_limits(max_depth, max_queued_tokens)
    now = broker.info()
    click.echo(f"max depth: {now.max_depth or 'none'} ({now.waiting} requests are waiting)")
    click.echo(f"max queued tokens: {now.max_queued_tokens or 'none'} ({now.queued_tokens} are queued)")


@click.group()
def dead() -> None:
    """Look at dead letters, send them again or drop them.

    A dead letter is a push that was no request, or a request that was given up. ID is the first column of the list.
    """


@dead.command("list")
@on_a_queue
@extra_option("json", is_flag=True, help="Print one JSON object a line.")
def list_letters(redis: str | None, queue: str, json: bool) -> None:
    """List the dead letters, the oldest first."""
    from tokenmill.producer.dead import print_list

    print_list(_open(redis, queue), as_json=json)


def _letter_id(_ctx: click.Context, _argument: click.Parameter, given: Any) -> Any:
    for entry_id in (given,) if isinstance(given, str) else given:
        if not _LETTER_ID.fullmatch(entry_id):
            raise UsageError(f"`{entry_id}` is no dead letter: take the id from `tokenmill dead list`")
    return given


@dead.command()
@click.argument("entry_id", metavar="ID", callback=_letter_id)
@on_a_queue
@extra_option("json", is_flag=True, help="Print it as JSON.")
def show(entry_id: str, redis: str | None, queue: str, json: bool) -> None:
    """Show a dead letter with what was pushed."""
    from tokenmill.producer.dead import print_letter

    print_letter(_open(redis, queue), entry_id, as_json=json)


def _some_or_all(command: F) -> F:
    """Add the ids and ``--all``: one of them has to be given."""
    ids = click.argument("entry_ids", metavar="[ID...]", nargs=-1, callback=_letter_id)
    return ids(extra_option("all", is_flag=True, help="Take all dead letters that are there now.")(command))


def _chosen(broker: Broker, entry_ids: tuple[str, ...], everything: bool) -> list[str]:
    from tokenmill.producer.dead import letters

    if everything == bool(entry_ids):
        raise UsageError("give the ids of dead letters, or --all")
    return [letter.entry_id for letter in letters(broker)] if everything else list(entry_ids)


@dead.command()
@_some_or_all
@on_a_queue
def requeue(entry_ids: tuple[str, ...], all: bool, redis: str | None, queue: str) -> None:  # noqa: A002 (the flag)
    """Send dead letters again, as new requests under their ids."""
    from tokenmill.producer.dead import requeue_letter

    broker = _open(redis, queue)
    chosen = _chosen(broker, entry_ids, all)
    problems = [problem for entry_id in chosen if (problem := requeue_letter(broker, entry_id))]
    click.echo(f"dead letters sent again: {len(chosen) - len(problems)}")
    if problems:
        raise TokenmillError("; ".join(problems))


@dead.command()
@_some_or_all
@on_a_queue
def drop(entry_ids: tuple[str, ...], all: bool, redis: str | None, queue: str) -> None:  # noqa: A002 (the flag)
    """Forget dead letters."""
    broker = _open(redis, queue)
    dropped = sum(broker.drop_dead(entry_id) for entry_id in _chosen(broker, entry_ids, all))
    click.echo(f"dead letters dropped: {dropped}")
