"""Requests as producers check them: everything that is wrong is found here, before the queue, and told in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenmill.shared.broker import Broker
from tokenmill.shared.errors import UsageError
from tokenmill.shared.protocol import StrictRequest
from tokenmill.shared.settings import DEFAULTS


class IdInUseError(UsageError):
    """The id belongs to another request, or to one that was answered and whose reply is gone."""


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


def send(broker: Broker, request: StrictRequest) -> None:
    """Put the request on the queue, once however often it is sent; raises IdInUseError."""
    status, state, _ = broker.enqueue(request.id, encode(request), stream=request.stream)
    if status == "conflict":
        raise IdInUseError(f"id: another request has the id `{request.id}` already; choose another one")
    if status == "duplicate" and state not in ("waiting", "running") and broker.read_replies([request.id]) == [None]:
        raise IdInUseError(f"id: request `{request.id}` was answered before and its reply is gone; choose another id")


def explain(error: Exception) -> str:
    """One line for a decoding error, the field first: ``max_tokens: expected `int` >= 1``."""
    what, _, where = str(error).partition(" - at `$")
    what = what.removeprefix("Object contains ")
    field = where.removesuffix("`").removeprefix(".")
    return f"{field}: {what[0].lower()}{what[1:]}" if field else what[0].lower() + what[1:]
