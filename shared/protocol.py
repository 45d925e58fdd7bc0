"""The wire format: what a producer pushes and what a worker answers, as msgspec structs (JSON)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, UnsetType

Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
Priority = Literal["high", "normal", "low"]


class SamplingParams(Struct, kw_only=True, omit_defaults=True):
    """How one request is sampled and when it stops. The defaults are greedy decoding of up to 128 tokens."""

    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] = 128
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0  # 0 is greedy
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] = 0  # 0 keeps all
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] = {}
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None  # alternatives reported beside each output token
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: (
        Annotated[str, Meta(min_length=1)] | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=64)]
    ) = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = []
    ignore_eos: bool = False
    include_stop: bool = False  # keep what matched at the end of the output


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class Request(SamplingParams, kw_only=True, omit_defaults=True):
    """One request on the queue: an id, a prompt (or messages) and any sampling field, in one flat JSON object.

    A prompt of token ids is answered with token ids. Workers ignore fields that they do not know, so that older workers
    can serve newer producers; producers refuse them (``StrictRequest``).
    """

    id: Id
    prompt: str | list[TokenId] | UnsetType = msgspec.UNSET
    messages: list[Message] | UnsetType = msgspec.UNSET
    stream: bool = False  # publish output tokens on the request's token stream as they are made
    priority: Priority = "normal"
    timeout_ms: Annotated[int, Meta(ge=1, lt=2**53)] | None = None  # from enqueue to its reply; a bare push: from claim
    reply_to: Id | None = None  # a name of the producer's: the id appears on the stream `replies:<name>` when it ends
    idempotency_key: Id | None = None  # heeded by enqueue; a bare push is known by its id alone

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

    prompt_tokens: int
    output_tokens: int


class TopLogprob(Struct, kw_only=True, omit_defaults=True):
    """Natural-log probability of one token; its ``bytes`` stand beside the text where they are no whole characters."""

    token_id: int
    text: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob, kw_only=True, omit_defaults=True):
    """An output token, and the most likely ones in its place."""

    top: list[TopLogprob]


class ReplyError(Struct, kw_only=True):
    """Why a request failed: a code to branch on and a line to read."""

    code: Literal["invalid_request", "context_length", "model_error", "crashed", "internal"]
    message: str


class Reply(Struct, kw_only=True, omit_defaults=True):
    """The one terminal answer to a request; durations in milliseconds since it was enqueued (or first seen)."""

    id: str
    finish_reason: FinishReason
    text: str
    usage: Usage
    stop_reason: int | str | None = None  # what matched: a token id, a stop string, or "context" when it was full
    token_ids: list[int] | None = None
    logprobs: list[TokenLogprob] | None = None
    error: ReplyError | None = None
    queue_ms: float | None = None  # until a worker first claimed it
    ttft_ms: float | None = None  # until its first output token
    e2e_ms: float | None = None  # until this reply
    worker: str | None = None
    deliveries: int = 1  # claims it took; more than one after a crash or a drain


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
