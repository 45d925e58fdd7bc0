"""The tokenizer of a GGUF file, whatever its kind, by llama.cpp."""

from __future__ import annotations

import ctypes

from tokenmill.worker.models.chat import ChatTemplate, Messages, one_of
from tokenmill.worker.models.llamacpp.library import llama
from tokenmill.worker.models.llamacpp.weights import Weights

_PIECE_BYTES = 64  # enough for nearly all tokens


class LlamaCppTokenizer:
    """Vocabulary and chat template of a model file."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights  # which hold the vocabulary
        self._vocab = weights.vocab
        special = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNKNOWN  # never in plain text
        attributes = {i: llama.llama_vocab_get_attr(self._vocab, i) for i in range(weights.vocab_size)}
        self._control = {self._text(i): i for i, attribute in attributes.items() if attribute & special}
        self._strips_left = {i for i in self._control.values() if attributes[i] & llama.LLAMA_TOKEN_ATTR_LSTRIP}
        self._strips_right = {i for i in self._control.values() if attributes[i] & llama.LLAMA_TOKEN_ATTR_RSTRIP}
        self._any_control = one_of(self._control)
        first = llama.llama_vocab_bos(self._vocab)
        self._prefix = [int(first)] if llama.llama_vocab_get_add_bos(self._vocab) and first >= 0 else []
        named = {"bos_token": first, "eos_token": llama.llama_vocab_eos(self._vocab)}
        source = llama.llama_model_chat_template(weights.model, None)
        self._chat = ChatTemplate(
            None if source is None else source.decode(),
            {name: self._text(token_id) for name, token_id in named.items() if token_id >= 0},
            self._control,
            of=str(weights.path),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt; the text of control tokens in it is ordinary text."""
        return self._prefix + self._tokenize(text)

    def render_chat(self, messages: Messages) -> str:
        """The conversation through the file's own template, up to the start of the answer."""
        return self._chat.render(messages)

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation; control tokens come from the template only, never from a message."""
        ids: list[int] = []
        parts = self._chat.split(messages, self._any_control)
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self._control[part])
            elif part := self._stripped(part, parts[i - 1 : i], parts[i + 1 : i + 2]):
                ids += self._tokenize(part)
        return ids if ids[: len(self._prefix)] == self._prefix else self._prefix + ids

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the UTF-8 text; control tokens add nothing."""
        size = _PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = llama.llama_token_to_piece(self._vocab, token_id, buffer, size, 0, False)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def _stripped(self, text: str, before: list[str], after: list[str]) -> str:
        """Text without the space that the special tokens around it swallow."""
        if any(self._control[token] in self._strips_right for token in before):
            text = text.lstrip()
        if any(self._control[token] in self._strips_left for token in after):
            text = text.rstrip()
        return text

    def _tokenize(self, text: str) -> list[int]:
        """Token ids of text without control tokens, and without what llama.cpp might put around it."""
        data = text.encode()
        size = len(data) + 1  # bytes, and the space that SentencePiece puts before them
        while True:
            ids = (ctypes.c_int32 * size)()
            n = llama.llama_tokenize(self._vocab, data, len(data), ids, size, False, False)
            if n >= 0:
                return list(ids[:n])
            size = -n

    def _text(self, token_id: int) -> str:
        return str(llama.llama_vocab_get_text(self._vocab, token_id).decode(errors="replace"))
