"""Claimed payload → what the batcher is given: decode, check, tokenise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from tokenmill.shared.protocol import Request
from tokenmill.worker.engine import GenerationParams, Model
from tokenmill.worker.models.tokenizer import Tokenizer

_decoder = msgspec.json.Decoder(Request)


class RejectedError(Exception):
    """This request cannot be served; the message is for the one who sent it."""

    def __init__(self, code: Literal["invalid_request", "context_length"], message: str) -> None:
        super().__init__(message)
        self.code: Literal["invalid_request", "context_length"] = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Intake:
    """A request in the engine's terms."""

    request: Request
    prompt: list[int]
    params: GenerationParams
    stop: tuple[str, ...]


def take_in(payload: bytes, model: Model, tokenizer: Tokenizer | None) -> Intake:
    """Decode and check one payload; raises RejectedError with a line for its sender."""
    request = _decode(payload)
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if stop and tokenizer is None:
        raise RejectedError("invalid_request", "this model has no tokenizer: use `stop_token_ids` instead of `stop`")
    prompt = _tokenise(request, tokenizer)
    if not prompt:
        raise RejectedError("invalid_request", "the prompt is empty")
    if model.max_context is not None and len(prompt) >= model.max_context:
        raise RejectedError(
            "context_length",
            f"the prompt has {len(prompt)} tokens and leaves no room for output: the context holds {model.max_context}",
        )
    return Intake(request=request, prompt=prompt, params=_params(request), stop=stop)


def _decode(payload: bytes) -> Request:
    try:
        return _decoder.decode(payload)
    except RecursionError:
        raise RejectedError("invalid_request", "the request is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RejectedError("invalid_request", str(error)) from None


def _tokenise(request: Request, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(request.prompt, list):
        return request.prompt
    if tokenizer is None:
        raise RejectedError("invalid_request", "this model has no tokenizer: give the prompt as a list of token ids")
    if isinstance(request.prompt, str):
        return tokenizer.encode(request.prompt)
    if request.messages is msgspec.UNSET:
        raise RejectedError("invalid_request", "give either `prompt` or `messages`")
    try:
        return tokenizer.encode_chat([{"role": m.role, "content": m.content} for m in request.messages])
    except ValueError as error:
        raise RejectedError("invalid_request", str(error)) from None


def _params(request: Request) -> GenerationParams:
    try:
        logit_bias = {int(token): bias for token, bias in request.logit_bias.items()}
    except ValueError:
        raise RejectedError("invalid_request", "`logit_bias` needs token ids as keys") from None
    return GenerationParams(
        stop_token_ids=tuple(request.stop_token_ids),
        logit_bias=logit_bias,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logprobs=request.logprobs,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
        include_stop=request.include_stop,
    )
