"""OpenAI's bodies to requests, and replies back to answers."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.producer.gateway.errors import ApiError, BadRequest
from tokenmill.producer.gateway.openai import to_requests, to_response
from tokenmill.shared.protocol import Reply, ReplyError, TokenLogprob, TopLogprob, Usage

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hi", **fields}


def reply(text: str = "yes", **fields: Any) -> Reply:
    usage = Usage(prompt_tokens=3, output_tokens=2)
    return Reply(**{"id": "a", "finish_reason": "stop", "text": text, "usage": usage, **fields})


def refused(url: str, body: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        to_requests(url, body, request_id="a")
    return caught.value


def test_a_completion_is_one_request_with_openais_defaults() -> None:
    [request] = to_requests(COMPLETIONS, completion(), request_id="a")
    assert (request.id, request.prompt, request.max_tokens, request.temperature) == ("a", "hi", 16, 1.0)


def test_a_chat_without_a_limit_goes_on_until_it_ends() -> None:
    [request] = to_requests(CHAT, chat(temperature=0), request_id="a")
    assert (request.max_tokens, request.temperature) == (2048, 0)
    assert isinstance(request.messages, list)
    assert [(message.role, message.content) for message in request.messages] == [("user", "hi")]


def test_parts_of_a_message_are_one_text_and_a_developer_is_the_system() -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]}]
    [request] = to_requests(CHAT, chat(messages=messages), request_id="a")
    assert isinstance(request.messages, list)
    assert [(message.role, message.content) for message in request.messages] == [("system", "be brief")]


def test_every_prompt_has_n_choices_of_which_each_has_a_seed_of_its_own() -> None:
    requests = to_requests(COMPLETIONS, completion(prompt=["x", "y"], n=2, seed=7), request_id="a")
    assert [(r.id, r.prompt, r.seed) for r in requests] == [
        ("a.0", "x", 7),
        ("a.1", "x", 8),
        ("a.2", "y", 7),
        ("a.3", "y", 8),
    ]


@pytest.mark.parametrize(("prompt", "prompts"), [([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]), ("x", ["x"])])
def test_a_list_of_numbers_is_one_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert [r.prompt for r in to_requests(COMPLETIONS, completion(prompt=prompt), request_id="a")] == prompts


def test_null_is_the_default_of_every_field() -> None:
    nulls = dict.fromkeys(("max_tokens", "temperature", "n", "stop", "seed", "stream", "logit_bias", "logprobs"))
    assert to_requests(CHAT, chat(**nulls), request_id="a") == to_requests(CHAT, chat(), request_id="a")


def test_a_stream_with_logprobs_is_sent_when_it_is_whole() -> None:
    [request] = to_requests(CHAT, chat(stream=True, logprobs=True, top_logprobs=3), request_id="a")
    assert (request.stream, request.logprobs) == (False, 3)
    [request] = to_requests(CHAT, chat(stream=True), request_id="a")
    assert request.stream


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (CHAT, chat(tools=[{"type": "function"}]), "tools"),
        (CHAT, chat(response_format={"type": "json_object"}), "response_format"),
        (CHAT, chat(temperature=3), "temperature"),
        (CHAT, chat(top_logprobs=2), "top_logprobs"),
        (CHAT, chat(max_tokens=1, max_completion_tokens=2), "max_tokens"),
        (CHAT, chat(nonsense=1), "nonsense"),
        (CHAT, chat(messages=[{"role": "tool", "content": "x"}]), "messages[0].role"),
        (CHAT, {"model": "m"}, "messages"),
        (COMPLETIONS, completion(echo=True), "echo"),
        (COMPLETIONS, completion(best_of=2), "best_of"),
        (COMPLETIONS, completion(n=0), "n"),
        (COMPLETIONS, completion(prompt=["x"] * 65, n=2), "n"),
        (COMPLETIONS, completion(prompt=["x", 1]), None),
        ("/v1/embeddings", {}, "url"),
    ],
)
def test_what_cannot_be_served_names_the_field_to_blame(url: str, body: Any, param: str | None) -> None:
    problem = refused(url, body)
    assert (problem.status, problem.param) == (400, param)
    assert problem.body()["error"]["type"] == "invalid_request_error"


def test_an_answer_has_its_choices_in_order_and_counts_a_prompt_once() -> None:
    answer = to_response(COMPLETIONS, completion(n=2), [reply("x"), reply("y")], answer_id="1", created=9)
    assert (answer["id"], answer["object"], answer["created"]) == ("cmpl-1", "text_completion", 9)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "x"), (1, "y")]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_logprobs_of_a_chat_spell_out_bytes_that_are_no_characters() -> None:
    top = [TopLogprob(token_id=2, text="\ufffd", logprob=-2.0, bytes=[0xE2, 0x82])]
    logprobs = [TokenLogprob(token_id=1, text="é", logprob=-0.5, top=top)]
    answer = to_response(CHAT, chat(logprobs=True), [reply(logprobs=logprobs)], answer_id="1", created=9)
    [entry] = answer["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("é", [0xC3, 0xA9])
    assert entry["top_logprobs"] == [{"token": "\ufffd", "logprob": -2.0, "bytes": [0xE2, 0x82]}]


def test_logprobs_of_a_completion_are_parallel_lists_with_offsets_in_characters() -> None:
    entries = [
        TokenLogprob(token_id=1, text="ab", logprob=-0.5, top=[]),
        TokenLogprob(token_id=2, text="\ufffd", logprob=-1.0, top=[], bytes=[0xC3]),
        TokenLogprob(token_id=3, text="\ufffd", logprob=-1.5, top=[], bytes=[0xA9]),
        TokenLogprob(token_id=4, text="c", logprob=-2.0, top=[]),
    ]
    answer = to_response(COMPLETIONS, completion(logprobs=0), [reply(logprobs=entries)], answer_id="1", created=9)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["ab", "bytes:\\xc3", "bytes:\\xa9", "c"]
    assert logprobs["text_offset"] == [0, 2, 2, 3]
    assert logprobs["top_logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"error": ReplyError(code="context_length", message="too long")}, 400, "context_length_exceeded"),
        ({"error": ReplyError(code="crashed", message="gave up")}, 500, "crashed"),
        ({"finish_reason": "deadline"}, 504, "timeout"),
        ({"finish_reason": "cancelled"}, 409, "cancelled"),
    ],
)
def test_a_reply_that_is_no_answer_is_an_error_of_the_whole_call(fields: Any, status: int, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        to_response(CHAT, chat(n=2), [reply(), reply(**fields)], answer_id="1", created=9)
    assert (caught.value.status, caught.value.code) == (status, code)
