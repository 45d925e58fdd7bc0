"""One request from the command line, and its reply on stdout."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import click
import msgspec

from tokenmill.producer.client import Client, WhenFull
from tokenmill.producer.workplace import SharedQueue, open_broker
from tokenmill.shared.errors import BrokerUnreachableError, TokenmillError, UsageError
from tokenmill.shared.protocol import Reply

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Show:
    """What to print."""

    stream: bool
    no_wait: bool
    json: bool


def enqueue_text(
    text: str,
    *,
    redis: str | None,
    queue: str,
    chat: bool,
    timeout_s: float | None,
    show: Show,
    params: Mapping[str, Any],
) -> None:
    """Send the text and print what comes of it; raises TokenmillError when the request fails."""
    if show.stream + show.no_wait > 1:
        raise UsageError("--stream and --no-wait exclude each other")
    broker = open_broker(redis, queue)
    client = Client(broker)
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    started = time.monotonic()
    when_full: WhenFull = "raise" if show.no_wait else "wait"
    request_id = client.submit(**prompt, stream=show.stream, when_full=when_full, timeout=timeout_s, **params)
    if show.no_wait:
        click.echo(request_id)
        return
    SharedQueue(broker).check()
    left_s = None if timeout_s is None else timeout_s - (time.monotonic() - started)
    try:
        reply = _stream(client, request_id, left_s, show) if show.stream else client.wait(request_id, left_s)
    except KeyboardInterrupt:
        with suppress(BrokerUnreachableError):
            broker.cancel(request_id)
            _logger.warning("interrupted: request `%s` is cancelled", request_id)
        raise
    if show.json:
        click.echo(msgspec.json.encode(reply))
    elif not show.stream:
        click.echo(reply.text)
    if reply.error is not None:
        raise TokenmillError(f"the request failed ({reply.error.code}): {reply.error.message}")


def _stream(client: Client, request_id: str, timeout_s: float | None, show: Show) -> Reply:
    """Print the text as it comes; with --json one object a piece, and the reply as the last line."""
    stream = client.read(request_id, timeout=timeout_s)
    for piece in stream:
        if show.json:
            click.echo(msgspec.json.encode({"id": request_id, "text": piece}))
        else:
            click.echo(piece, nl=False)
    if not show.json:
        click.echo()
    return stream.reply
