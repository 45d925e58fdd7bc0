"""Payloads that no worker may choke on, and how each of them has to end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .counted_worker import POISON

Ending = Literal["dead letter", "dead letter and error", "error"]


@dataclass(frozen=True, slots=True)
class Toxic:
    """One hostile push; only one with a readable id can be answered."""

    id: str
    payload: bytes
    ending: Ending


def draw_toxic(rng: random.Random, number: int) -> Toxic:
    """One of the known kinds, under an id of its own."""
    request_id = f"toxic{number:05d}"
    make, ending = rng.choice(_KINDS)
    return Toxic(request_id, make(request_id, rng), ending)


def poison(number: int) -> Toxic:
    """A request that ends every worker that begins it."""
    request_id = f"poison{number:05d}"
    return Toxic(request_id, _with(request_id, prompt=chr(POISON)), "dead letter and error")


def _with(request_id: str, **fields: object) -> bytes:
    return json.dumps({"id": request_id, "prompt": "x", **fields}).encode()


_Make = Callable[[str, random.Random], bytes]
_KINDS: list[tuple[_Make, Ending]] = [
    (lambda i, r: b"\xff\xfe" + r.randbytes(200), "dead letter"),
    (lambda i, r: b"", "dead letter"),
    (lambda i, r: b"null", "dead letter"),
    (lambda i, r: json.dumps([i]).encode(), "dead letter"),
    (lambda i, r: json.dumps({"id": {"a": i}, "prompt": "x"}).encode(), "dead letter"),
    (lambda i, r: json.dumps({"id": f"{i} {{}}", "prompt": "x"}).encode(), "dead letter"),
    (lambda i, r: b"[" * 5_000, "dead letter"),
    (lambda i, r: b'{"id":"%s","prompt":' % i.encode(), "dead letter and error"),
    (lambda i, r: b'{"id":"%s","prompt":%s}' % (i.encode(), b"[" * 2000 + b"]" * 2000), "dead letter and error"),
    (lambda i, r: _with(i, prompt="x" * r.choice((300_000, 2_000_000))), "dead letter and error"),
    (lambda i, r: b'{"id":"%s","prompt":"\xc3\x28"}' % i.encode(), "error"),
    (lambda i, r: _with(i, prompt={"text": "x"}), "error"),
    (lambda i, r: _with(i, prompt=""), "error"),
    (lambda i, r: _with(i, prompt="x" * 5_000), "error"),
    (lambda i, r: _with(i, max_tokens=-1), "error"),
    (lambda i, r: _with(i, max_tokens=10**400), "error"),
    (lambda i, r: _with(i, temperature="hot"), "error"),
    (lambda i, r: b'{"id":"%s","prompt":"x","temperature":NaN}' % i.encode(), "error"),
    (lambda i, r: _with(i, logit_bias={"first": 1}), "error"),
    (lambda i, r: _with(i, prompt=[1, 2, 300]), "error"),
]
