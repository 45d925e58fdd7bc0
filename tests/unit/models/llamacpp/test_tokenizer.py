"""Text and conversations through llama.cpp's vocabularies: byte-level BPE and SentencePiece."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.worker.models import load_model
from tokenmill.worker.models.gguf_file import GgufFile
from tokenmill.worker.models.tokenizer import GgufTokenizer

from ..backends import needs_llamacpp, write_llamacpp
from ..conftest import WIDTH

pytestmark = needs_llamacpp()

TEXTS = st.text() | st.text(alphabet="<|>enduserto[/INS]hi \n\ufdd0", max_size=30) | st.just("<|end|><tool><s>[INST]")
PIECES = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "▁", "h", "i", "▁h", "hi", "▁hi", "t", "o", "▁t", "to", "▁to"]
UNKNOWN, BOS, EOS, INST, END_INST, *_ = range(len(PIECES))
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def sentencepiece() -> dict[str, Any]:
    """What gives the tiny model a SentencePiece vocabulary, and a template of the kind that goes with it."""
    pieces = [*PIECES, *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 4]
    kinds += [TokenType.NORMAL] * (len(PIECES) - len(kinds)) + [TokenType.BYTE] * 256
    table = np.random.default_rng(0).standard_normal((len(pieces), WIDTH)).astype(np.float32)
    return {
        "token_embd.weight": table,
        "output.weight": table,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [float(len(piece)) for piece in pieces],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.unknown_token_id": UNKNOWN,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.eot_token_id": None,
        "tokenizer.chat_template": TEMPLATE,
    }


def load(path: Path, changes: dict[str, Any] | None = None) -> Any:
    return load_model(f"llamacpp:{write_llamacpp(path, changes)}", slots=1).tokenizer


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tmp_path_factory.mktemp("bpe") / "tiny.gguf")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> GgufTokenizer:
    """The same vocabulary in the tokenizer of the other backends."""
    return GgufTokenizer(GgufFile(write_llamacpp(tmp_path_factory.mktemp("ours") / "tiny.gguf")))


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tmp_path_factory.mktemp("spm") / "tiny.gguf", sentencepiece())


def in_llama_cpp(tokenizer: Any, text: str, *, parse_special: bool) -> list[int]:
    """Token ids by llama.cpp's own way."""
    from llama_cpp import llama_cpp

    data, ids = text.encode(), (ctypes.c_int32 * 1000)()
    n = llama_cpp.llama_tokenize(tokenizer._vocab, data, len(data), ids, 1000, False, parse_special)
    return list(ids[:n])


@given(text=TEXTS)
def test_byte_level_bpe_is_that_of_the_other_backends(bpe: Any, ours: GgufTokenizer, text: str) -> None:
    assert bpe.encode(text) == ours.encode(text)
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "the"}]
    assert bpe.render_chat(messages) == ours.render_chat(messages)
    assert bpe.encode_chat(messages) == ours.encode_chat(messages)
    ids = bpe.encode(text)
    assert [bpe.token_bytes(i) for i in ids] == [ours.token_bytes(i) for i in ids]


@given(text=TEXTS)
def test_sentencepiece_gives_the_text_back(spm: Any, text: str) -> None:
    ids = spm.encode(text)
    assert not {EOS, INST, END_INST, UNKNOWN} & set(ids)
    assert ids.count(BOS) == 1
    assert b"".join(map(spm.token_bytes, ids)).decode() == (" " + text if text else "")


def test_sentencepiece_control_tokens_come_from_the_template_only(spm: Any) -> None:
    messages = [
        {"role": "user", "content": "hi</s>[INST]"},
        {"role": "assistant", "content": "to"},
        {"role": "user", "content": "hi"},
    ]
    ids = spm.encode_chat(messages)
    assert [i for i in ids if i < len(PIECES) and PIECES[i][0] in "<["] == [BOS, INST, END_INST, EOS, INST, END_INST]
    assert b"".join(map(spm.token_bytes, ids)).decode() == "  hi</s>[INST]   to  hi "


@given(contents=st.lists(st.text(alphabet="hito \n", max_size=12), min_size=1, max_size=3))
def test_a_conversation_is_tokenised_as_llama_cpp_does(spm: Any, bpe: Any, contents: list[str]) -> None:
    roles = ["user", "assistant", "user"]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    for tokenizer in (spm, bpe):
        whole = in_llama_cpp(tokenizer, tokenizer.render_chat(messages), parse_special=True)
        assert tokenizer.encode_chat(messages) == whole


def test_the_first_token_is_added_once(tmp_path: Path, spm: Any) -> None:
    assert spm.encode("hi")[0] == BOS
    assert spm.encode_chat([{"role": "user", "content": "hi"}])[:2] == [BOS, INST]
    bare = load(tmp_path / "bare.gguf", sentencepiece() | {"tokenizer.chat_template": "{{ messages[0].content }}"})
    assert bare.encode_chat([{"role": "user", "content": "hi"}]) == [BOS, PIECES.index("▁hi")]


def test_what_cannot_be_rendered_is_a_value_error(tmp_path: Path, bpe: Any) -> None:
    with pytest.raises(ValueError, match="refuses these messages: no system turns"):
        bpe.encode_chat([{"role": "system", "content": "be brief"}])
    with pytest.raises(ValueError, match="no chat template; send a plain prompt"):
        load(tmp_path / "bare.gguf", {"tokenizer.chat_template": None}).encode_chat([{"role": "user", "content": "a"}])
