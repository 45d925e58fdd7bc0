"""What both of OpenAI's ways to ask have in common: the fields of a body, and the requests that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from tokenmill.producer.gateway.errors import BadRequest, failure
from tokenmill.producer.request import check_request, explain
from tokenmill.shared.errors import UsageError
from tokenmill.shared.protocol import Reply, StrictRequest, TokenId

MOST_CHOICES = 128  # of one call
_SEEDS = 2**64

Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1)]
Natural = Annotated[int, Meta(ge=0, lt=2**31)]
Positive = Annotated[int, Meta(ge=1, lt=2**31)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """How a stream is sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted; nothing is obfuscated


class Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chats share; null is the default. The last ones are Tokenmill's own."""

    model: str
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=64)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # accepted: callers are told apart by their keys
    min_tokens: Natural | None = None
    top_k: Natural | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    include_stop: bool | None = None
    priority: Literal["normal", "low"] | None = None
    timeout_ms: Annotated[int, Meta(ge=1, lt=2**53)] | None = None

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields of OpenAI's that are refused, with the values that ask for nothing."""


_SAME_NAME = (
    *("top_p", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "top_k", "min_p"),
    *("repetition_penalty", "stop_token_ids", "ignore_eos", "include_stop", "priority", "timeout_ms"),
)
_TEMPERATURE = 1.0  # OpenAI's default

B = TypeVar("B", bound=Body)


class Usage(Struct, kw_only=True):
    """Tokens of one call, all its choices together; a prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Dialect(Protocol[B]):
    """One way to ask: how a body becomes prompts, and a reply a choice. Everything else is the same for both."""

    body: type[B]
    prefix: str  # of the ids of answers
    object: str  # the name of an answer
    chunk_object: str  # of a piece of a streamed one

    def prompts(self, body: B) -> list[dict[str, Any]]:
        """The prompts of one call, each as the fields of a request."""

    def params(self, body: B) -> dict[str, Any]:
        """The fields of every request that only this way of asking has."""

    def choice(self, body: B, index: int, reply: Reply) -> dict[str, Any]:
        """One choice of a whole answer."""

    def first(self, index: int) -> dict[str, Any] | None:
        """The choice that begins a stream, if there is one."""

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """The choice of a stream that brings more text."""

    def last(self, body: B, index: int, reply: Reply) -> dict[str, Any]:
        """The choice that ends a stream."""


def parse(kind: type[Body], raw: Any) -> Any:
    """The body of that kind; raises BadRequest."""
    try:
        body = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise blame(explain(error)) from None
    return supported(body)


def supported(body: B) -> B:
    """The body, if it asks for nothing that is not there; raises BadRequest."""
    for name, harmless in body.UNSUPPORTED.items():
        if getattr(body, name) not in harmless:
            raise BadRequest(f"`{name}` is not supported", param=name, code="unsupported_parameter")
    return body


def blame(problem: str) -> BadRequest:
    """The refusal for what ``explain`` says of a body."""
    if problem.startswith("unknown field `"):
        name = problem.removeprefix("unknown field `").rstrip("`")
        return BadRequest(f"unknown parameter: `{name}`", param=name, code="unknown_parameter")
    field, colon, _ = problem.partition(": ")
    if colon and "`" not in field:
        return BadRequest(problem, param=field)
    if "missing required field `" in problem:
        return BadRequest(problem, param=problem.split("`")[1], code="missing_required_parameter")
    return BadRequest(problem)


def requests_of(dialect: Dialect[Any], body: Body, request_id: str) -> list[StrictRequest]:
    """The requests that one call makes: ``n`` for each prompt, a prompt's choices one after the other."""
    prompts, n = dialect.prompts(body), body.n or 1
    if len(prompts) * n > MOST_CHOICES:
        raise BadRequest(f"{len(prompts)} prompts with n={n} are more than {MOST_CHOICES} choices", param="n")
    params = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    params["temperature"] = _TEMPERATURE if body.temperature is None else body.temperature
    params |= dialect.params(body)
    ids = [request_id] if len(prompts) * n == 1 else [f"{request_id}.{i}" for i in range(len(prompts) * n)]
    return [
        _request({"id": ids[i], **prompts[i // n], **params, "stream": _streams(body, params), **_seed(body, i % n)})
        for i in range(len(ids))
    ]


def answer_of(
    dialect: Dialect[Any], body: Body, replies: Sequence[Reply], *, answer_id: str, created: int
) -> dict[str, Any]:
    """The whole answer to one call; raises the ApiError of the first reply that is none."""
    for reply in replies:
        if (problem := failure(reply)) is not None:
            raise problem
    return {
        "id": f"{dialect.prefix}{answer_id}",
        "object": dialect.object,
        "created": created,
        "model": body.model,
        "choices": [dialect.choice(body, i, reply) for i, reply in enumerate(replies)],
        "usage": msgspec.to_builtins(usage_of(body, replies)),
    }


def usage_of(body: Body, replies: Sequence[Reply]) -> Usage:
    """What one call took."""
    prompt = sum(reply.usage.prompt_tokens for reply in replies[:: body.n or 1])
    output = sum(reply.usage.output_tokens for reply in replies)
    return Usage(prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output)


def _streams(body: Body, params: dict[str, Any]) -> bool:
    """Logprobs come with whole replies only, so a stream that asks for them is sent when it is complete."""
    return bool(body.stream) and params.get("logprobs") is None


def _seed(body: Body, choice: int) -> dict[str, int]:
    """The first choice has the seed itself; the next ones have the next ones."""
    return {} if body.seed is None else {"seed": (body.seed + choice + _SEEDS // 2) % _SEEDS - _SEEDS // 2}


def _request(fields: dict[str, Any]) -> StrictRequest:
    try:
        return check_request(fields)
    except UsageError as error:
        raise blame(str(error)) from None
