"""The Lua scripts of the broker: read from ``scripts/``, sent by hash, loaded where the broker has lost them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

import redis

# What is put in front of each script, and no more than it needs: every call makes all functions anew.
_PRELUDE = ("_prelude",)
_LIVES = (*_PRELUDE, "_lives")
_ENDINGS = (*_LIVES, "_endings")
_PUSHES = (*_ENDINGS, "_pushes")
_SHARED = {
    "cancel": _ENDINGS,
    "configure": _PRELUDE,
    "empty": _PUSHES,
    "enqueue": _LIVES,
    "exchange": _PUSHES,
    "reclaim": _ENDINGS,
    "register": _PRELUDE,
    "release": _ENDINGS,
    "renew": _PRELUDE,
    "requeue": _PRELUDE,
}
_SCRIPT = b"local function script()\n%send\nlocal answer = script()\nwrite_counts()\nreturn answer\n"
LOADS = 3  # the broker may restart, and forget, between a load and the call


@cache
def source(name: str) -> bytes:
    """Text of one script as the broker gets it: what it shares with others, then its own file as a function."""
    folder = files("tokenmill.shared") / "scripts"
    shared = [(folder / f"{part}.lua").read_bytes() for part in _SHARED[name]]
    return b"".join(shared) + _SCRIPT % (folder / f"{name}.lua").read_bytes()


@cache
def _sha1(name: str) -> str:
    return hashlib.sha1(source(name), usedforsecurity=False).hexdigest()


def run(client: redis.Redis, name: str, keys: Iterable[str], args: Iterable[str | bytes | int]) -> Any:
    """Run a script in one round trip, or three after the broker has lost it: every script may be sent again."""
    keys = tuple(keys)
    return send(client, name, (len(keys), *keys, *args))


def send(client: redis.Redis, name: str, call: tuple[Any, ...]) -> Any:
    """The same, with the number of keys, the keys and the arguments in one tuple."""
    for _ in range(LOADS):
        try:
            return client.evalsha(_sha1(name), *call)
        except redis.exceptions.NoScriptError:
            client.script_load(source(name))
    return client.evalsha(_sha1(name), *call)


def command(name: str, call: tuple[str | bytes | int, ...]) -> tuple[str | bytes | int, ...]:
    """The command that runs a script which the broker has."""
    return ("EVALSHA", _sha1(name), *call)
