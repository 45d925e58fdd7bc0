"""OpenAI's bodies ↔ requests and replies, with no HTTP in between: the gateway and batches of files share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenmill.producer.gateway.chat import Chat
from tokenmill.producer.gateway.completions import Completions
from tokenmill.producer.gateway.dialect import Dialect, answer_of, parse, requests_of
from tokenmill.producer.gateway.errors import ApiError, BadRequest
from tokenmill.shared.protocol import Reply, StrictRequest

__all__ = ["CHAT", "COMPLETIONS", "DIALECTS", "ApiError", "BadRequest", "to_requests", "to_response"]

CHAT, COMPLETIONS = Chat(), Completions()
DIALECTS: dict[str, Dialect[Any]] = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETIONS}


def to_requests(url: str, body: Any, *, request_id: str) -> list[StrictRequest]:
    """The requests that a body for this URL makes, one per choice; raises BadRequest with the parameter to blame.

    A single one has ``request_id``, several have ``request_id.0``, ``request_id.1``, …
    """
    dialect = _dialect(url)
    return requests_of(dialect, parse(dialect.body, body), request_id)


def to_response(url: str, body: Any, replies: Sequence[Reply], *, answer_id: str, created: int) -> dict[str, Any]:
    """The body of the answer, from the replies to all requests in their order; ``created`` in seconds since 1970.

    Raises the ApiError (``status``, ``body()``) of the first reply that failed.
    """
    dialect = _dialect(url)
    return answer_of(dialect, parse(dialect.body, body), replies, answer_id=answer_id, created=created)


def _dialect(url: str) -> Dialect[Any]:
    if url not in DIALECTS:
        raise BadRequest(f"no such endpoint: {url}; use {' or '.join(DIALECTS)}", param="url")
    return DIALECTS[url]
