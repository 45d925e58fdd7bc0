"""Completions: ``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from tokenmill.producer.gateway.dialect import Body, Usage
from tokenmill.producer.gateway.logprobs import CompletionLogprobs, completion_logprobs
from tokenmill.shared.protocol import Reply, TokenId

_MAX_TOKENS = 16  # OpenAI's default

TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


class CompletionBody(Body, kw_only=True, forbid_unknown_fields=True):
    """What is asked of ``/v1/completions``: a prompt is text or token ids; several are a list of them."""

    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: Any = None
    best_of: Any = None
    suffix: Any = None

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "echo": (None, False),
        "best_of": (None, 1),
        "suffix": (None, ""),
    }

    def __post_init__(self) -> None:
        if isinstance(self.prompt, list) and len({type(part) for part in self.prompt}) > 1:
            raise ValueError("`prompt` mixes texts and token ids: give a text, token ids, or a list of one of them")


class CompletionChoice(Struct, kw_only=True, omit_defaults=True):
    """One answer to one of the prompts; to token ids with the token ids of the output."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: CompletionLogprobs | None
    token_ids: list[int] | None = None


class Completion(Struct, kw_only=True):
    """The answer of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Completions:
    """The dialect of completions."""

    body = CompletionBody
    prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def prompts(self, body: CompletionBody) -> list[dict[str, Any]]:
        """A list of numbers is one prompt, any other list several."""
        several = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
        return [{"prompt": prompt} for prompt in (body.prompt if several else [body.prompt])]

    def params(self, body: CompletionBody) -> dict[str, Any]:
        """Limits and logprobs."""
        params: dict[str, Any] = {"max_tokens": body.max_tokens or _MAX_TOKENS}
        return params if body.logprobs is None else {**params, "logprobs": body.logprobs}

    def choice(self, body: CompletionBody, index: int, reply: Reply) -> dict[str, Any]:
        """One choice of a whole answer."""
        choice: dict[str, Any] = msgspec.to_builtins(
            CompletionChoice(
                index=index,
                text=reply.text,
                finish_reason=reply.finish_reason,  # type: ignore[arg-type]
                logprobs=completion_logprobs(reply.logprobs),
                token_ids=reply.token_ids,
            )
        )
        return choice

    def first(self, index: int) -> None:
        """Nothing: a completion begins with its text."""

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """More text."""
        return {"index": index, "text": text, "finish_reason": None, "logprobs": None}

    def last(self, body: CompletionBody, index: int, reply: Reply) -> dict[str, Any]:
        """Why it ended; with logprobs the whole text, too."""
        if reply.logprobs is None:
            return {**self.piece(index, ""), "finish_reason": reply.finish_reason}
        logprobs = msgspec.to_builtins(completion_logprobs(reply.logprobs))
        return {**self.piece(index, reply.text), "finish_reason": reply.finish_reason, "logprobs": logprobs}
