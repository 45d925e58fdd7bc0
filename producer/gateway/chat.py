"""Chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from tokenmill.producer.gateway.dialect import Body, Positive, Usage
from tokenmill.producer.gateway.errors import BadRequest
from tokenmill.producer.gateway.logprobs import ChatLogprobs, chat_logprobs
from tokenmill.shared.protocol import Reply
from tokenmill.shared.settings import DEFAULTS


class TextPart(Struct, forbid_unknown_fields=True):
    """A part of a message; there is no other kind than text."""

    type: Literal["text"]
    text: str


class ChatMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn of a chat; an answer of the API may be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None  # accepted; the models' templates have no names
    refusal: None = None
    annotations: list[Any] | None = None


class ChatBody(Body, kw_only=True, forbid_unknown_fields=True):
    """What is asked of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    metadata: dict[str, str] | None = None  # accepted, and kept nowhere
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None
    store: Any = None
    service_tier: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "store": (None, False),
        "service_tier": (None, "auto", "default"),
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "response_format": (None, {"type": "text"}),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "reasoning_effort": (None, "none"),
        "verbosity": (None,),
        "web_search_options": (None,),
    }


class AnswerMessage(Struct, kw_only=True):
    """The turn that the model has written."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Struct, kw_only=True):
    """One of the ``n`` answers."""

    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length"]
    logprobs: ChatLogprobs | None


class ChatCompletion(Struct, kw_only=True):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Chat:
    """The dialect of chats."""

    body = ChatBody
    prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def prompts(self, body: ChatBody) -> list[dict[str, Any]]:
        """One conversation."""
        return [{"messages": [_message(message) for message in body.messages]}]

    def params(self, body: ChatBody) -> dict[str, Any]:
        """Without a limit an answer goes on until it ends by itself or the context is full."""
        if body.top_logprobs and not body.logprobs:
            raise BadRequest("`top_logprobs` needs `logprobs`: true", param="top_logprobs")
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise BadRequest("give `max_completion_tokens` or `max_tokens`, not both", param="max_tokens")
        params: dict[str, Any] = {"max_tokens": body.max_completion_tokens or body.max_tokens or DEFAULTS.max_context}
        return {**params, "logprobs": body.top_logprobs or 0} if body.logprobs else params

    def choice(self, body: ChatBody, index: int, reply: Reply) -> dict[str, Any]:
        """One choice of a whole answer."""
        choice: dict[str, Any] = msgspec.to_builtins(
            ChatChoice(
                index=index,
                message=AnswerMessage(content=reply.text),
                finish_reason=reply.finish_reason,  # type: ignore[arg-type]
                logprobs=chat_logprobs(reply.logprobs),
            )
        )
        return choice

    def first(self, index: int) -> dict[str, Any]:
        """Who speaks."""
        return self._piece(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """More text."""
        return self._piece(index, {"content": text})

    def last(self, body: ChatBody, index: int, reply: Reply) -> dict[str, Any]:
        """Why it ended; with logprobs the whole text, too."""
        if reply.logprobs is None:
            return {**self._piece(index, {}), "finish_reason": reply.finish_reason}
        logprobs = msgspec.to_builtins(chat_logprobs(reply.logprobs))
        piece = self._piece(index, {"content": reply.text})
        return {**piece, "finish_reason": reply.finish_reason, "logprobs": logprobs}

    def _piece(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}


def _message(message: ChatMessage) -> dict[str, str]:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return {"role": "system" if message.role == "developer" else message.role, "content": text}
