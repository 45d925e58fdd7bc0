"""Chat templates: a conversation as text, in which control tokens come from the template only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenmill.shared.errors import ModelLoadError

Messages = Sequence[Mapping[str, str]]

_NONCHARACTERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]  # Unicode keeps these free for a program's own marks


class ChatTemplate:
    """The Jinja template of a model file; it may be hostile, so it runs in a sandbox.

    ``named`` are tokens that templates call by name, such as ``bos_token``; ``control`` those whose text must not mean
    them where it stands in a message. Raises ``ModelLoadError`` for a broken template; ``source`` None is none.
    """

    def __init__(self, source: str | None, named: Mapping[str, str], control: Iterable[str], *, of: str) -> None:
        self._named = named
        self._any_control = one_of(control)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = None if source is None else environment.from_string(source)
        except TemplateError as error:
            raise ModelLoadError(f"{of}: the chat template is broken: {error}") from error

    def render(self, messages: Messages) -> str:
        """The conversation as text. Raises ``ValueError`` without a template, or where it refuses the messages."""
        if self._template is None:
            raise ValueError("this model has no chat template; send a plain prompt")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._named)
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def split(self, messages: Messages, special: re.Pattern[str]) -> list[str]:
        """The conversation in turns of text and special tokens, beginning and ending with text.

        ``special`` matches the special tokens, those of ``control`` among them.
        """
        guard = next((c for c in _NONCHARACTERS if not any(c in message["content"] for message in messages)), None)
        if guard is None:
            raise ValueError("the messages contain all the noncharacters from U+FDD0 to U+FDEF; leave one out")
        guarded = [
            {**m, "content": self._any_control.sub(lambda found: guard.join(found[0]), m["content"])} for m in messages
        ]
        parts = special.split(self.render(guarded))
        parts[::2] = [text.replace(guard, "") for text in parts[::2]]
        return parts


def one_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches, and splits by, any of the tokens; the longest wins."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _refuse(message: str) -> None:
    """What templates call to reject a conversation."""
    raise TemplateError(message)
