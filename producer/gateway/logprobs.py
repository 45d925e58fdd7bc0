"""Log probabilities in OpenAI's two forms: a list of objects for chats, parallel lists for completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from msgspec import Struct

from tokenmill.shared.protocol import TokenLogprob, TopLogprob


class ChatTopLogprob(Struct, kw_only=True):
    """One alternative."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatTopLogprob, kw_only=True):
    """One output token; joined, the ``bytes`` of all are the text, also where a character spans tokens."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    """The output tokens of a choice of a chat."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, kw_only=True):
    """The output tokens of a choice of a completion, one element for each in every list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]  # characters of the output before the token


def chat_logprobs(logprobs: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
    """As chats have them."""
    if logprobs is None:
        return None
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=entry.text,
                logprob=entry.logprob,
                bytes=_bytes(entry),
                top_logprobs=[
                    ChatTopLogprob(token=other.text, logprob=other.logprob, bytes=_bytes(other)) for other in entry.top
                ],
            )
            for entry in logprobs
        ]
    )


def completion_logprobs(logprobs: Sequence[TokenLogprob] | None) -> CompletionLogprobs | None:
    """As completions have them. A token that is no whole character is written ``bytes:\\xe2\\x82``, as OpenAI does."""
    if logprobs is None:
        return None
    any_top = any(entry.top for entry in logprobs)
    return CompletionLogprobs(
        tokens=[_name(entry) for entry in logprobs],
        token_logprobs=[entry.logprob for entry in logprobs],
        top_logprobs=[{_name(other): other.logprob for other in entry.top} for entry in logprobs] if any_top else None,
        text_offset=_offsets(logprobs),
    )


def _bytes(entry: TopLogprob) -> list[int]:
    return entry.bytes if entry.bytes is not None else list(entry.text.encode())


def _name(entry: TopLogprob) -> str:
    return entry.text if entry.bytes is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.bytes)


def _offsets(logprobs: Sequence[TokenLogprob]) -> list[int]:
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    offsets, length = [], 0
    for entry in logprobs:
        offsets.append(length)
        length += len(decode(bytes(_bytes(entry))))
    return offsets
