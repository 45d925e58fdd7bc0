"""Requests as producers check and send them: what is wrong is found here, before the queue, and told in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenmill.shared.broker import Broker
from tokenmill.shared.errors import BrokerFullError, TokenmillError, UsageError
from tokenmill.shared.protocol import StrictRequest
from tokenmill.shared.settings import DEFAULTS

_BYTES_PER_TOKEN = 4  # of text, roughly: producers have no tokenizer
_BROKER_FULL_RETRY_S = 1.0  # a broker at maxmemory does not say when it will have room


class IdInUseError(UsageError):
    """The id, or the idempotency key, belongs to another request, or to one whose reply is gone."""


class QueueFullError(TokenmillError):
    """The queue, or its whole broker, takes no more for now; ``retry_after`` says in how many seconds to try again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def check_request(fields: Mapping[str, Any]) -> StrictRequest:
    """The request that the fields of one JSON object make; raises UsageError."""
    try:
        request = msgspec.convert(fields, StrictRequest)
    except msgspec.ValidationError as error:
        raise UsageError(explain(error)) from None
    size = len(encode(request))
    if size > DEFAULTS.max_payload_bytes:
        raise UsageError(f"the request has {size:,} bytes; the limit is {DEFAULTS.max_payload_bytes:,}")
    return request


def encode(request: StrictRequest) -> bytes:
    """The request as it travels."""
    return msgspec.json.encode(request)


def send(broker: Broker, request: StrictRequest) -> str:
    """Put the request on the queue, once however often it is sent; returns the id whose reply answers it.

    That is its own id, but under a known idempotency key the first request's. Raises IdInUseError and QueueFullError.
    """
    try:
        answer = broker.enqueue(
            request.id,
            encode(request),
            stream=request.stream,
            priority=request.priority,
            timeout_ms=request.timeout_ms,
            cost=cost(request),
            idempotency_key=request.idempotency_key,
        )
    except BrokerFullError as error:
        raise QueueFullError(f"{error}; try again in {_BROKER_FULL_RETRY_S:g} s", _BROKER_FULL_RETRY_S) from error
    if answer.status == "full":
        retry_after = answer.retry_after_ms / 1000
        raise QueueFullError(
            f"the queue is full ({answer.depth} requests and {answer.queued_tokens} tokens are waiting): "
            f"try again in {retry_after:g} s",
            retry_after,
        )
    if answer.status == "conflict" and answer.id != request.id:
        raise IdInUseError(f"idempotency_key: another request was sent under `{request.idempotency_key}`")
    if answer.status == "conflict":
        raise IdInUseError(f"id: another request has the id `{request.id}` already; choose another one")
    if (
        answer.status == "duplicate"
        and answer.state not in ("waiting", "running")
        and broker.read_replies([answer.id]) == [None]
    ):
        raise IdInUseError(f"id: request `{answer.id}` was answered before and its reply is gone; choose another id")
    return answer.id


def cost(request: StrictRequest) -> int:
    """Tokens that a request may take, prompt and output, guessed where only a tokenizer would know."""
    if isinstance(request.messages, list):
        prompt = sum(len(message.content.encode()) for message in request.messages) // _BYTES_PER_TOKEN
    elif isinstance(request.prompt, str):
        prompt = len(request.prompt.encode()) // _BYTES_PER_TOKEN
    else:
        prompt = len(request.prompt) if isinstance(request.prompt, list) else 0
    return prompt + request.max_tokens


def explain(error: Exception) -> str:
    """One line for a decoding error, the field first: ``max_tokens: expected `int` >= 1``."""
    what, _, where = str(error).partition(" - at `$")
    what = what.removeprefix("Object contains ")
    field = where.removesuffix("`").removeprefix(".")
    return f"{field}: {what[0].lower()}{what[1:]}" if field else what[0].lower() + what[1:]
