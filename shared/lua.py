"""The Lua scripts of the broker: read from ``scripts/``, sent by hash, loaded where the broker has lost them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

import redis

_SHARED = ("_prelude", "_endings", "_pushes")
_LOADS = 3  # the broker may restart, and forget, between a load and the call


@cache
def source(name: str) -> bytes:
    """Text of one script as the broker gets it: what all scripts share, then the script's own file."""
    folder = files("tokenmill.shared") / "scripts"
    return b"".join((folder / f"{part}.lua").read_bytes() for part in (*_SHARED, name))


@cache
def _sha1(name: str) -> str:
    return hashlib.sha1(source(name), usedforsecurity=False).hexdigest()


def run(client: redis.Redis, name: str, keys: Iterable[str], args: Iterable[str | bytes | int]) -> Any:
    """Run a script in one round trip, or three after the broker has lost it: every script may be sent again."""
    keys = tuple(keys)
    call: Any = (_sha1(name), len(keys), *keys, *args)
    for _ in range(_LOADS):
        try:
            return client.evalsha(*call)
        except redis.exceptions.NoScriptError:
            client.script_load(source(name))
    return client.evalsha(*call)
