"""OpenAI's official client, unmodified, against the gateway on the real model."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tokenmill.worker.models import load_model

from ..e2e.workplace import Workplace, wait_for
from .conftest import Gateway

MODEL = "smollm2"
CHAT: list[Any] = [{"role": "user", "content": "Name three colours."}]
# Characters of several bytes and of several code points, and a prompt that ends within one.
TEXTS = [
    "🙂🙃🙂🙃🙂",
    "日本語の文章を続けてください。日本",
    "e\u0301a\u0308o\u0302 e\u0301a\u0308",
    "naïve café — “quoted” 🇫🇷",
]


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=5, temperature=0)
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 5)


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_completion_tokens=20, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.object == "chat.completion"


def test_several_prompts_and_choices_in_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["One plus one is", "The sky is"], n=2, max_tokens=4, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    again = client.completions.create(model=MODEL, prompt=["One plus one is", "The sky is"], n=2, max_tokens=4, seed=3)
    assert [choice.text for choice in answer.choices] == [choice.text for choice in again.choices]


def test_a_seed_makes_a_sample_repeatable_and_another_seed_another(client: openai.OpenAI) -> None:
    texts = {
        seed: {
            client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=16, temperature=1.5, seed=seed)
            .choices[0]
            .message.content
            for _ in range(2)
        }
        for seed in (1, 2)
    }
    assert len(texts[1]) == len(texts[2]) == 1
    assert texts[1] != texts[2]


@pytest.mark.parametrize("text", TEXTS)
def test_the_deltas_of_a_stream_are_the_text(client: openai.OpenAI, text: str) -> None:
    wanted: dict[str, Any] = {"model": MODEL, "prompt": text, "max_tokens": 24, "temperature": 1.2, "seed": 5}
    whole = client.completions.create(**wanted).choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**wanted, stream=True)]
    assert "".join(pieces) == whole


def test_a_prompt_that_ends_within_a_character_goes_on_in_a_stream_as_in_one_piece(client: openai.OpenAI) -> None:
    tokens = load_model("smollm2", slots=1, max_context=64, backend="numpy").tokenizer
    assert tokens is not None
    prompt = tokens.encode("Smile: 🙂")[:-1]
    assert b"".join(map(tokens.token_bytes, prompt)).decode(errors="ignore") != "Smile: 🙂"
    wanted: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**wanted).choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**wanted, stream=True)]
    assert "".join(pieces) == whole


def test_a_stop_string_that_straddles_tokens_is_nowhere_in_a_stream(client: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {"model": MODEL, "prompt": "1, 2, 3, 4, 5,", "max_tokens": 40, "temperature": 0}
    free = client.completions.create(**wanted).choices[0].text
    stop = free[9:14]  # begins and ends within tokens
    whole = client.completions.create(**wanted, stop=[stop])
    pieces = list(client.completions.create(**wanted, stop=[stop], stream=True))
    assert whole.choices[0].text == free[: free.index(stop)]
    assert "".join(chunk.choices[0].text for chunk in pieces) == whole.choices[0].text
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_a_stream_of_a_chat_says_who_speaks_why_it_ends_and_what_it_took(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=12, temperature=0)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content


def test_a_stream_of_several_choices_mixes_them_and_ends_each(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=CHAT, n=3, max_tokens=6, seed=1, stream=True)
    ended, texts = [], {0: "", 1: "", 2: ""}
    for chunk in stream:
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ended += [choice.index] if choice.finish_reason else []
    assert sorted(ended) == [0, 1, 2]
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, n=3, max_tokens=6, seed=1)
    assert list(texts.values()) == [choice.message.content for choice in whole.choices]


def test_logprobs_of_a_chat_add_up_to_its_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    [choice] = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    spelt = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert spelt.decode() == choice.message.content
    for entry in choice.logprobs.content:
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert len(entry.top_logprobs) == 3


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=4, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == answer.choices[0].text
    assert all(value <= 0 for value in logprobs.token_logprobs or [])


def test_the_models_are_those_of_the_workers(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="no model `gpt`"):
        client.models.retrieve("gpt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 9}, "temperature"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_is_not_supported_is_a_400_that_names_it(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=CHAT, **fields)
    assert caught.value.param == param


def test_a_prompt_longer_than_the_context_is_a_400_also_of_a_stream(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt=[7] * 3000, max_tokens=4, stream=stream)
        assert caught.value.code == "context_length_exceeded"


def test_a_wrong_key_is_a_401(gateway: Gateway) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="no-such-key-at-all", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    client.close()


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is `smollm2`"):
        client.completions.create(model="gpt", prompt="x")


def test_a_timeout_of_the_call_is_a_504(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(
            model=MODEL, prompt="x", max_tokens=2000, extra_body={"timeout_ms": 100, "ignore_eos": True}
        )
    assert caught.value.status_code == 504


def test_one_idempotency_key_is_one_generation_for_each_caller(gateway: Gateway, workplace: Workplace) -> None:
    def ask(client: openai.OpenAI, prompt: str) -> str:
        return client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=8, extra_headers={"Idempotency-Key": "k-1"}
        ).id

    alice, bob = gateway.client("alice"), gateway.client("bob")
    assert ask(alice, "once") == ask(alice, "once")
    assert ask(bob, "once") != ask(alice, "once")
    with pytest.raises(openai.ConflictError):
        ask(alice, "another")
    alice.close()
    bob.close()


def test_a_client_that_goes_away_cancels_its_request(client: openai.OpenAI, workplace: Workplace) -> None:
    def cancelled() -> int:
        return workplace.broker.info().stats.get("finished_cancelled", 0)

    before = cancelled()
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(
            model=MODEL, prompt="x", max_tokens=2000, extra_body={"ignore_eos": True}, timeout=0.3
        )
    wait_for(lambda: cancelled() == before + 1)
    with client.completions.create(
        model=MODEL, prompt="x", max_tokens=2000, extra_body={"ignore_eos": True}, stream=True
    ) as stream:
        next(iter(stream))
    wait_for(lambda: cancelled() == before + 2)


def test_every_answer_has_a_request_id_of_its_own_or_the_callers(client: openai.OpenAI) -> None:
    answer = client.models.with_raw_response.list(extra_headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt")
    assert caught.value.request_id
