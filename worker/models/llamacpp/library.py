"""The library llama.cpp, through the low-level bindings of llama-cpp-python, and its log."""

from __future__ import annotations

import logging
import re

from llama_cpp import llama_cpp as llama

__all__ = ["complaint", "listen", "llama"]

_log = logging.getLogger(__name__)
_DEBUG, _ERROR = 1, 4  # ggml_log_level

_line = ""  # that is not complete yet
_errors: list[str] = []


def listen() -> None:
    """Forget what llama.cpp has complained of before."""
    _errors.clear()


def complaint() -> str:
    """What llama.cpp has complained of since ``listen``, for errors of our own.

    That is its first line: those that follow only say what could not be done because of it.
    """
    return _errors[0] if _errors else "it does not say why"


def _take(level: int, text: bytes, data: object) -> None:
    """Pass the lines of llama.cpp's log on to ours, where ``-v`` shows them; those for its developers are too many."""
    global _line
    if level == _DEBUG:
        return
    *lines, _line = (_line + text.decode(errors="replace")).split("\n")
    for line in lines:
        if level == _ERROR:
            _errors.append(re.sub(r"^\w+: ", "", line.strip()))  # without the name of a function
        _log.debug("%s", line)


_callback = llama.llama_log_callback(_take)  # llama.cpp keeps a pointer to it
llama.llama_log_set(_callback, None)
llama.llama_backend_init()
