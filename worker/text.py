"""Output tokens → text: incremental detokenisation and stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class TextStream:
    """The text of one request, token by token.

    A delta is held back while it could be the start of a stop string or an unfinished UTF-8 character, so deltas never
    have to be taken back: joined, with the one of ``finish``, they are the final text. The state is a function of the
    tokens pushed, so that replaying the tokens of a checkpoint brings it back.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self.stop_reason: str | None = None  # the stop string that matched
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._n_tokens = 0
        self._held = ""

    def push(self, token_id: int) -> str:
        """Take one output token and return the text that is now certain; ``stop_reason`` is set if it was the last."""
        self._n_tokens += 1
        return self._advance(self._decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        """Return what was held back; a character that was never completed becomes U+FFFD."""
        if self.stop_reason is not None:
            return ""
        last = self._advance(self._decode(b"", True))
        held, self._held = self._held, ""
        return last + held

    def _advance(self, new: str) -> str:
        if not self._stop:
            return new
        seen = len(self._held)
        text = self._held + new
        if self._n_tokens >= self._min_tokens and (match := self._first_match(text, seen)):
            start, end = match
            self.stop_reason = text[start:end]
            self._held = ""
            return text[: end if self._include_stop else start]
        certain = len(text) - self._possible_stop(text)
        self._held = text[certain:]
        return text[:certain]

    def _first_match(self, text: str, seen: int) -> tuple[int, int] | None:
        """The stop string that is completed first, beyond the characters already seen; of two, the longer one."""
        found = []
        for stop in self._stop:
            start = text.find(stop, max(0, seen + 1 - len(stop)))
            if start >= 0:
                found.append((start + len(stop), start))
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
