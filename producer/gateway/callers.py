"""Who calls: a name for each API key. Ids, idempotency keys and limits are a caller's own."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from tokenmill.producer.gateway.errors import ApiError
from tokenmill.shared.errors import UsageError

_NAME = re.compile(r"[a-z0-9-]{1,32}")
_LEAST_KEY = 16  # characters


@dataclass(frozen=True, slots=True)
class Caller:
    """One who has a key; without keys there is a single caller."""

    name: str

    def own(self, request_id: str) -> str:
        """An id that no other caller's can be."""
        return f"{self.name}.{request_id}"


class Callers:
    """The callers by their keys; without any, everybody is the same caller."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._keys = [(Caller(name), key.encode()) for name, key in keys.items()]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``NAME:KEY``, separated by commas or on lines of their own; ``#`` begins a comment line."""
        keys: dict[str, str] = {}
        lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
        for entry in (entry.strip() for line in lines for entry in line.split(",")):
            if not entry:
                continue
            name, _, key = entry.partition(":")
            if not _NAME.fullmatch(name) or name in keys:
                raise UsageError("API keys are NAME:KEY, each NAME once and of a-z 0-9 - (32 at most)")
            if len(key) < _LEAST_KEY:
                raise UsageError(f"the API key of {name} is shorter than {_LEAST_KEY} characters: make a longer one")
            keys[name] = key
        return cls(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, authorization: str | None) -> Caller:
        """The caller of an ``Authorization: Bearer KEY`` header; raises ApiError 401.

        All keys are compared whole, so that the time it takes tells nothing about them.
        """
        if not self._keys:
            return Caller("anyone")
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip().encode()
        found = [caller for caller, known in self._keys if hmac.compare_digest(known, given)]
        if scheme.lower() != "bearer" or not found:
            raise ApiError(
                401,
                "no valid API key: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found[0]
