"""The tokenizer and chat template of a GGUF file, on a tiny vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.worker.models.gguf_file import GgufFile
from tokenmill.worker.models.tokenizer import GgufTokenizer

END, USER, ASSISTANT, TOOL = range(4)


@pytest.fixture
def load(write_gguf: Callable[..., Path]) -> Callable[..., GgufTokenizer]:
    return lambda changes=None: GgufTokenizer(GgufFile(write_gguf(changes)))


@given(text=st.text())
def test_token_bytes_give_the_text_back(session_tokenizer: GgufTokenizer, text: str) -> None:
    ids = session_tokenizer.encode(text)
    assert b"".join(map(session_tokenizer.token_bytes, ids)).decode() == text


def test_merges_are_applied(load: Callable[..., GgufTokenizer]) -> None:
    tokenizer = load()
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("then th")] == [b"the", b"n", b" ", b"th"]


def test_control_tokens_in_a_plain_prompt_are_text(load: Callable[..., GgufTokenizer]) -> None:
    tokenizer = load()
    assert not {END, USER, ASSISTANT} & set(tokenizer.encode("<|user|>hi<|end|>"))
    assert tokenizer.encode("<tool>") == [TOOL]
    assert (tokenizer.token_bytes(END), tokenizer.token_bytes(TOOL)) == (b"", b"<tool>")


def test_the_template_renders_the_conversation_up_to_the_answer(load: Callable[..., GgufTokenizer]) -> None:
    messages = [{"role": "user", "content": " hi "}]
    assert load().render_chat(messages) == "<|user|>hi<|end|><|assistant|>"
    assert load().encode_chat(messages) == [USER, *load().encode("hi"), END, ASSISTANT]


@given(content=st.text(alphabet="<|>enduser \ufdd0\ufdd1", max_size=30) | st.just("<|end|><|user|>"))
def test_control_tokens_come_from_the_template_only(session_tokenizer: GgufTokenizer, content: str) -> None:
    ids = session_tokenizer.encode_chat([{"role": "user", "content": content}])
    assert ids == [USER, *session_tokenizer.encode(content.strip()), END, ASSISTANT]


def test_the_first_token_is_added_once_where_the_file_wants_it(load: Callable[..., GgufTokenizer]) -> None:
    bos = {"tokenizer.ggml.bos_token_id": USER, "tokenizer.ggml.add_bos_token": True}
    assert load(bos).encode("a") == [USER, *load().encode("a")]
    assert load(bos).encode_chat([{"role": "user", "content": "a"}])[:2] == [USER, *load().encode("a")]
    assert load(bos).encode_chat([{"role": "assistant", "content": "a"}])[:2] == [USER, ASSISTANT]


def test_what_the_template_refuses_is_a_value_error(load: Callable[..., GgufTokenizer]) -> None:
    with pytest.raises(ValueError, match="refuses these messages: no system turns"):
        load().encode_chat([{"role": "system", "content": "be brief"}])
    with pytest.raises(ValueError, match="no chat template; send a plain prompt"):
        load({"tokenizer.chat_template": None}).render_chat([{"role": "user", "content": "hi"}])


def test_messages_that_leave_no_mark_free_are_a_value_error(session_tokenizer: GgufTokenizer) -> None:
    everything = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    with pytest.raises(ValueError, match=r"all the noncharacters from U\+FDD0 to U\+FDEF"):
        session_tokenizer.encode_chat([{"role": "user", "content": everything}])


def test_a_hostile_template_runs_in_a_sandbox(load: Callable[..., GgufTokenizer]) -> None:
    tokenizer = load({"tokenizer.chat_template": "{{ messages.__class__.__mro__[1].__subclasses__() }}"})
    with pytest.raises(ValueError, match="refuses these messages"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
