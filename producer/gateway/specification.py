"""What the OpenAPI document says beyond what the routes' types tell."""

from __future__ import annotations

import msgspec
from litestar import Litestar
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import Components, OpenAPIMediaType, OpenAPIResponse, Schema, SecurityScheme


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong, and the parameter to blame."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    """Every answer that is none, as OpenAI's API writes it."""

    error: ErrorDetail


_MEANINGS = {
    400: "The request is not valid, or asks for what is not supported.",
    401: "No valid API key.",
    404: "There is no such thing, or it belongs to another caller.",
    405: "The path knows other methods only.",
    409: "The idempotency key stands for another request, or the request was cancelled.",
    410: "The reply has expired.",
    413: "The body is larger than the limit.",
    429: "Too many calls or requests of this API key, or the queue is full: see Retry-After.",
    500: "The model or the gateway failed.",
    503: "No worker or no broker: see Retry-After.",
    504: "Not finished in time.",
}
ERRORS: dict[int, ResponseSpec] = {
    status: ResponseSpec(ErrorBody, description=meaning, generate_examples=False)
    for status, meaning in _MEANINGS.items()
}

OPENAPI = OpenAPIConfig(
    title="Tokenmill",
    version="1",
    path="/docs",
    description="Batched text generation behind a queue: OpenAI's completions, chats, files and batches, and jobs "
    "that are accepted at once and asked about later.",
    security=[{"apiKey": []}],
    components=Components(security_schemes={"apiKey": SecurityScheme(type="http", scheme="bearer")}),
)


def declare_streams(app: Litestar) -> None:
    """Say which answers are no JSON, or may be none, which the routes' types do not tell."""
    events = OpenAPIMediaType(schema=Schema(description="Server-sent events."))
    lines = OpenAPIMediaType(schema=Schema(description="Lines of JSON."))
    for path, item in (app.openapi_schema.paths or {}).items():
        if path.endswith("/completions") and item.post is not None and item.post.responses is not None:
            answer = item.post.responses["200"]
            if isinstance(answer, OpenAPIResponse):
                answer.content = {**(answer.content or {}), _EVENT_STREAM: events}
        for ending, content in (("/events", {_EVENT_STREAM: events}), ("/content", {_LINES: lines})):
            if path.endswith(ending) and item.get is not None and item.get.responses is not None:
                answer = item.get.responses["200"]
                if isinstance(answer, OpenAPIResponse):
                    answer.content = content


_EVENT_STREAM, _LINES = "text/event-stream", "application/jsonl"
