"""Text ↔ token ids: the Tokenizer protocol, and the tokenizer and chat template of a GGUF file."""

from __future__ import annotations

from typing import Protocol

from gguf import TokenType
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer

from tokenmill.shared.errors import ModelLoadError
from tokenmill.worker.models.chat import ChatTemplate, Messages, one_of
from tokenmill.worker.models.gguf_file import GgufFile


class Tokenizer(Protocol):
    """What the text layer asks of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt; the text of control tokens in it is ordinary text."""
        ...

    def render_chat(self, messages: Messages) -> str:
        """The conversation as the model was trained to read it, up to the start of its answer.

        Raises ``ValueError`` where the model has no chat template or the template refuses the messages.
        """
        ...

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation; control tokens come from the template only, never from a message."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the UTF-8 text; control tokens add nothing."""
        ...


_LLAMA3_CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


class GgufTokenizer:
    """The byte-level BPE vocabulary of a GGUF file, with its chat template."""

    def __init__(self, file: GgufFile) -> None:
        vocabulary: list[str] = file.require("tokenizer.ggml.tokens")
        types: list[int] = file.require("tokenizer.ggml.token_type")
        self._bpe = _byte_level_bpe(file, vocabulary)
        self._control = {vocabulary[i] for i, kind in enumerate(types) if kind == TokenType.CONTROL}
        user_defined = {vocabulary[i] for i, kind in enumerate(types) if kind == TokenType.USER_DEFINED}
        self._ids = {token: i for i, token in enumerate(vocabulary)}
        self._any_user_defined = one_of(user_defined)
        self._any_special = one_of(self._control | user_defined)
        self._bytes = [self._spelled(token, token in user_defined) for token in vocabulary]
        self._prefix = _prefix(file)
        named = {f"{name}_token": vocabulary[i] for name, i in _named(file).items()}
        source = file.get("tokenizer.chat_template", None)
        self._chat = ChatTemplate(source, named, self._control, of=str(file.path))

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt; the text of control tokens in it is ordinary text."""
        return self._prefix + self._encode_parts(self._any_user_defined.split(text))

    def render_chat(self, messages: Messages) -> str:
        """The conversation through the file's own template, up to the start of the answer."""
        return self._chat.render(messages)

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation; control tokens come from the template only, never from a message."""
        ids = self._encode_parts(self._chat.split(messages, self._any_special))
        return ids if ids[: len(self._prefix)] == self._prefix else self._prefix + ids

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the UTF-8 text; control tokens add nothing."""
        return self._bytes[token_id]

    def _encode_parts(self, parts: list[str]) -> list[int]:
        """Token ids of what a splitter left: text and special tokens in turn."""
        ids: list[int] = []
        for i, part in enumerate(parts):
            ids += [self._ids[part]] if i % 2 else self._bpe.encode(part, add_special_tokens=False).ids
        return ids

    def _spelled(self, token: str, user_defined: bool) -> bytes:
        if token in self._control:
            return b""
        if user_defined:
            return token.encode()
        return b"".join(_BYTES.get(char) or char.encode() for char in token)


def _named(file: GgufFile) -> dict[str, int]:
    """The tokens that chat templates call by name."""
    found = {name: file.get(f"tokenizer.ggml.{name}_token_id", None) for name in ("bos", "eos")}
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def _prefix(file: GgufFile) -> list[int]:
    # Files of the Llama 3 vocabulary want the first token without saying so.
    add = file.get("tokenizer.ggml.add_bos_token", file.get("tokenizer.ggml.pre", None) == "llama-bpe")
    return [file.require("tokenizer.ggml.bos_token_id")] if add else []


def _byte_level_bpe(file: GgufFile, vocabulary: list[str]) -> BpeTokenizer:
    """Merges as in the file, on text cut the way its model was trained."""
    if (kind := file.require("tokenizer.ggml.model")) != "gpt2":
        raise ModelLoadError(f"{file.path} has a tokenizer of type {kind!r}; only 'gpt2' (byte-level BPE) is supported")
    cuts: dict[str, list[pre_tokenizers.PreTokenizer]] = {
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "llama-bpe": [
            pre_tokenizers.Split(Regex(_LLAMA3_CUTS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }
    if (name := file.require("tokenizer.ggml.pre")) not in cuts:
        raise ModelLoadError(f"{file.path} cuts text by the rules {name!r}; supported are {', '.join(cuts)}")
    merges = [(left, right) for left, right in (merge.split(" ") for merge in file.require("tokenizer.ggml.merges"))]
    tokenizer = BpeTokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(vocabulary)},
            merges=merges,
            ignore_merges=name == "llama-bpe",  # a whole word of the vocabulary is one token, however it would merge
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts[name])
    return tokenizer


def _byte_alphabet() -> dict[str, bytes]:
    """How byte-level BPE spells bytes as printable characters (GPT-2's ``bytes_to_unicode``, turned round)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): bytes([byte]) for byte in printable}
    return spelled | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
