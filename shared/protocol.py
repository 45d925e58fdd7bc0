"""The wire format: what a producer pushes and what a worker answers, as msgspec structs (JSON).

The descriptions make the tables of ``docs/protocol.md`` and its JSON Schema (``make docs``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, UnsetType

Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
StopString = Annotated[str, Meta(min_length=1)]
FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
Priority = Literal["high", "normal", "low"]


def _means(description: str, **limits: Any) -> Meta:
    return Meta(description=description, **limits)


class SamplingParams(Struct, kw_only=True, omit_defaults=True):
    """How one request is sampled and when it stops. The defaults are greedy decoding of up to 128 tokens."""

    max_tokens: Annotated[int, _means("Output tokens at most.", ge=1, lt=2**31)] = 128
    min_tokens: Annotated[int, _means("Nothing stops the output before so many tokens.", ge=0, lt=2**31)] = 0
    temperature: Annotated[float, _means("Spread of the sampling; 0 is greedy.", ge=0, le=100)] = 0.0
    top_k: Annotated[int, _means("Sample from so many most likely tokens; 0 keeps all.", ge=0, lt=2**31)] = 0
    top_p: Annotated[float, _means("Sample from the likeliest tokens that make up this share.", gt=0, le=1)] = 1.0
    min_p: Annotated[float, _means("Leave out tokens less likely than this share of the likeliest.", ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[
        float, _means("Divide the logits of tokens seen in prompt or output by this; 1 changes nothing.", gt=0, le=100)
    ] = 1.0
    presence_penalty: Annotated[
        float, _means("Subtract this from the logits of tokens in the output.", ge=-100, le=100)
    ] = 0.0
    frequency_penalty: Annotated[float, _means("The same, once for each time it is there.", ge=-100, le=100)] = 0.0
    logit_bias: Annotated[
        dict[str, Annotated[float, Meta(ge=-100, le=100)]],
        _means("Token id (as a string) to what is added to its logit.", max_length=1024),
    ] = {}
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None,
        _means("Log probabilities of the output, with so many alternatives a token."),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None, _means("Makes sampling repeatable, in any batch.")
    ] = None
    stop: Annotated[
        StopString | Annotated[list[StopString], Meta(max_length=64)],
        _means("Strings that end the output, which is given without them."),
    ] = []
    stop_token_ids: Annotated[
        list[TokenId], _means("Tokens that end the output, beside the model's.", max_length=64)
    ] = []
    ignore_eos: Annotated[bool, _means("Go on past the model's own end of text.")] = False
    include_stop: Annotated[bool, _means("Keep what matched at the end of the output.")] = False


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn of a chat."""

    role: Annotated[Literal["system", "user", "assistant"], _means("Whose turn it is.")]
    content: Annotated[str, _means("What was said.")]


class Request(SamplingParams, kw_only=True, omit_defaults=True):
    """One request on the queue: an id, a prompt (or messages) and any sampling field, in one flat JSON object.

    A prompt of token ids is answered with token ids. Workers ignore fields that they do not know, so that older workers
    can serve newer producers; producers refuse them (``StrictRequest``).
    """

    id: Annotated[Id, _means("Single-use while its reply is kept; the reply is found by it.")]
    prompt: Annotated[str | list[TokenId] | UnsetType, _means("Text, or token ids, to go on with.")] = msgspec.UNSET
    messages: Annotated[list[Message] | UnsetType, _means("A chat instead of a prompt.")] = msgspec.UNSET
    stream: Annotated[bool, _means("Publish output tokens as they are made, on `tokens:ID`.")] = False
    priority: Annotated[Priority, _means("Whose turn comes more often. Of a bare push the list counts, not this.")] = (
        "normal"
    )
    timeout_ms: Annotated[
        Annotated[int, Meta(ge=1, lt=2**53)] | None,
        _means("End with what there is so long after enqueue; of a bare push, after its claim."),
    ] = None
    reply_to: Annotated[Id | None, _means("Add the id to the stream `replies:NAME` of this name when it ends.")] = None
    idempotency_key: Annotated[
        Id | None, _means("The same request under the same key is one. Ignored in a bare push: its id does that.")
    ] = None

    def __post_init__(self) -> None:
        if (self.prompt is msgspec.UNSET) == (self.messages is msgspec.UNSET):
            raise ValueError("give either `prompt` or `messages`")
        if not (self.prompt or self.messages):
            raise ValueError("the prompt is empty")
        if self.min_tokens > self.max_tokens:
            raise ValueError("`min_tokens` is larger than `max_tokens`")
        if self.stream and self.logprobs is not None:
            raise ValueError("`logprobs` come with the whole reply only: leave out `stream`")


class StrictRequest(Request, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request as producers check it: an unknown field is an error."""


class Usage(Struct, kw_only=True):
    """Tokens of one request; output tokens include a matched stop token."""

    prompt_tokens: Annotated[int, _means("Tokens of the prompt; 0 if no worker ended the request.")]
    output_tokens: Annotated[int, _means("Tokens generated, a matched stop token included.")]


class TopLogprob(Struct, kw_only=True, omit_defaults=True):
    """Natural-log probability of one token; its ``bytes`` stand beside the text where they are no whole characters."""

    token_id: Annotated[int, _means("The token.")]
    text: Annotated[str, _means("Its text.")]
    logprob: Annotated[float, _means("Natural logarithm of its probability.")]
    bytes: Annotated[list[int] | None, _means("Its UTF-8 bytes, where they are no whole characters.")] = None


class TokenLogprob(TopLogprob, kw_only=True, omit_defaults=True):
    """An output token, and the most likely ones in its place."""

    top: Annotated[list[TopLogprob], _means("The most likely tokens in its place, likeliest first.")]


class ReplyError(Struct, kw_only=True):
    """Why a request failed: a code to branch on and a line to read."""

    code: Annotated[
        Literal["invalid_request", "context_length", "model_error", "crashed", "internal"], _means("To branch on.")
    ]
    message: Annotated[str, _means("To read.")]


class Reply(Struct, kw_only=True, omit_defaults=True):
    """The one terminal answer to a request; durations in milliseconds since it was enqueued (or first seen)."""

    id: Annotated[str, _means("The request's.")]
    finish_reason: Annotated[FinishReason, _means("Why the output ended.")]
    text: Annotated[str, _means("The output, also of what ended early: all that there was.")]
    usage: Annotated[Usage, _means("Tokens read and made.")]
    stop_reason: Annotated[
        int | str | None, _means('What matched: a token id, a stop string, or "context" when that was full.')
    ] = None
    token_ids: Annotated[list[int] | None, _means("The output of a prompt of token ids.")] = None
    logprobs: Annotated[list[TokenLogprob] | None, _means("One for each output token, if asked for.")] = None
    error: Annotated[ReplyError | None, _means("What went wrong, with `finish_reason` `error`.")] = None
    queue_ms: Annotated[float | None, _means("Until a worker first claimed it.")] = None
    ttft_ms: Annotated[float | None, _means("Until its first output token; absent after a resume.")] = None
    e2e_ms: Annotated[float | None, _means("Until this reply.")] = None
    worker: Annotated[str | None, _means("Who answered; absent if no worker ended the request.")] = None
    deliveries: Annotated[int, _means("Claims it took: more than 1 after a crash or a drain, 0 if it never ran.")] = 1


class Cell(Struct, array_like=True):
    """What runs in one slot."""

    age_ms: int  # since the request was enqueued
    output_tokens: int


class WorkerStatus(Struct, kw_only=True):
    """What a worker says of itself with every renewal; counters run since it started."""

    model: str
    slots: int
    busy: int  # slots that hold a request
    state: Literal["running", "draining"]
    pid: int
    host: str
    requests: int  # replies sent
    prompt_tokens: int
    output_tokens: int
    steps: int
    row_steps: int  # active rows, summed over the steps
    reused_tokens: int = 0  # prompt tokens that were not computed, because an earlier request began with them
    preemptions: int = 0  # times that a running request had to give its memory to older ones
    metrics: str | None = None  # HOST:PORT of its /metrics
    output_tokens_per_s: float = 0.0  # since the renewal before
    cells: list[Cell | None] = []  # one for each slot
