"""The verdict on a run: what was lost, answered twice, answered wrongly or left behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from tokenmill.shared.protocol import Reply

from .evidence import Evidence
from .workload import GoodRequest

# All other keys are empty at the end, and so gone, or have an expiry; the table of them is in the scripts' README.
_MAY_LAST = {"stats", "meta", "dead"}
_INNOCENTS = 5000  # good requests, of which one may be blamed for what the harness has done


class Answer(msgspec.Struct):
    """What is compared of a reply; the control posts less of it."""

    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    usage: dict[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Findings by check; a check that found nothing is not there."""

    findings: dict[str, list[str]]

    @property
    def ok(self) -> bool:
        return not self.findings

    def count(self, check: str) -> int:
        """How much one check has found."""
        return len(self.findings.get(check, []))


def audit(evidence: Evidence) -> Verdict:
    """Run all checks."""
    found = {name: list(check(evidence)) for name, check in CHECKS.items()}
    return Verdict({name: findings for name, findings in found.items() if findings})


def _lost(evidence: Evidence) -> Iterator[str]:
    yield from sorted(evidence.accepted.keys() - evidence.replies.keys())


def _duplicated(evidence: Evidence) -> Iterator[str]:
    """More than one reply, ever: on the key now, among the pushes that the server told, by the broker's own count."""
    for request_id, bodies in evidence.replies.items():
        posted = max(len(bodies), evidence.posted.get(request_id, 0))
        if posted != 1:
            yield f"{request_id}: {posted} replies"
    finished = sum(count for name, count in evidence.stats.items() if name.startswith("finished_"))
    if not evidence.config.control and finished != len(evidence.replies):
        yield f"{finished} requests finished, {len(evidence.replies)} have a reply"


def _invented(evidence: Evidence) -> Iterator[str]:
    """Replies to requests that nobody has made."""
    known = {toxic.id for toxic in (*evidence.toxic, *evidence.perhaps_toxic)} | evidence.accepted.keys()
    yield from sorted(evidence.replies.keys() - known)


def _wrong(evidence: Evidence) -> Iterator[str]:
    """Replies that differ from those of an undisturbed worker."""
    for request_id, request in evidence.accepted.items():
        if request.expected is None:
            continue
        for body in evidence.replies.get(request_id, [])[:1]:
            got = msgspec.json.decode(body, type=Answer)
            expected = msgspec.json.decode(msgspec.json.encode(request.expected), type=Answer)
            if evidence.config.control:
                expected = Answer(expected.text)
            fine = got == expected or got.finish_reason == "error"
            if not (fine or _may_end_early(evidence, request, got, expected)):
                yield f"{request_id}: {got} instead of {expected}"


def _may_end_early(evidence: Evidence, request: GoodRequest, got: Answer, expected: Answer) -> bool:
    """Whether it was cancelled or late, and what there is of it is right."""
    ids = got.token_ids or []
    right = expected.text.startswith(got.text) and (expected.token_ids or [])[: len(ids)] == ids
    cancelled = got.finish_reason == "cancelled" and request.id in evidence.cancelled
    return right and (cancelled or (got.finish_reason == "deadline" and request.times_out))


def _cancelled(evidence: Evidence) -> Iterator[str]:
    """Requests that nobody had begun when they were cancelled, and that were answered otherwise."""
    for request_id, answer in evidence.cancelled.items():
        for body in evidence.replies.get(request_id, [])[:1]:
            got = msgspec.json.decode(body, type=Answer)
            if answer in ("cancelled", "remembered") and got.finish_reason != "cancelled":
                yield f"{request_id}: cancelled (the broker said {answer}), but {got}"


def _blamed(evidence: Evidence) -> Iterator[str]:
    """Good requests that were answered with an error: a harness that kills at random cannot avoid all of them."""
    blamed = innocents(evidence)
    if len(blamed) > math.ceil(len(evidence.accepted) / _INNOCENTS):
        yield from blamed


def innocents(evidence: Evidence) -> list[str]:
    """Good requests that were answered with an error."""
    return [
        f"{request_id}: {bodies[0].decode()[:300]}"
        for request_id, bodies in evidence.replies.items()
        if request_id in evidence.accepted and b'"finish_reason":"error"' in bodies[0]
    ]


def _streams(evidence: Evidence) -> Iterator[str]:
    """Readers that saw something else than the reply: a piece twice, a gap, another reply."""
    for request, text, reply in evidence.seen:
        if text is not None and text != reply.text:
            yield f"{request.id}: read {text!r}, the reply says {reply.text!r}"
        if [reply] != [msgspec.json.decode(body, type=Reply) for body in evidence.replies.get(request.id, [])]:
            yield f"{request.id}: the reader got another reply than the one that is there"
    unread = {r.id for r in evidence.accepted.values() if r.streams} - {seen.request.id for seen in evidence.seen}
    yield from (f"{request_id}: the reader never came to the end" for request_id in sorted(unread))


def _toxic(evidence: Evidence) -> Iterator[str]:
    """Hostile payloads that did not end as they should."""
    for toxic in evidence.toxic:
        bodies = evidence.replies.get(toxic.id, [])
        error = bool(bodies) and b'"finish_reason":"error"' in bodies[0]
        if error != ("error" in toxic.ending):
            yield f"{toxic.id}: {toxic.payload[:80]!r} has {bodies} for a reply, and should end as {toxic.ending}"
    letters = sum("dead letter" in toxic.ending for toxic in evidence.toxic)
    most = letters + len(innocents(evidence)) + sum("dead letter" in toxic.ending for toxic in evidence.perhaps_toxic)
    if not letters <= evidence.dead_letters <= most and evidence.dead_letters < 1000:
        yield f"{evidence.dead_letters} dead letters instead of {letters} to {most}"


def _left(evidence: Evidence) -> Iterator[str]:
    """Keys that last, and are not meant to."""
    yield from (f"{name} is left, without an expiry" for name in evidence.lasting if name not in _MAY_LAST)
    yield from (f"{name} is not 0" for name in evidence.unbalanced)
    if errors := evidence.stats.get("script_errors", 0):
        yield f"{errors} script errors"


def _problems(evidence: Evidence) -> Iterator[str]:
    yield from evidence.problems


CHECKS: dict[str, Callable[[Evidence], Iterator[str]]] = {
    "lost": _lost,
    "duplicated": _duplicated,
    "invented": _invented,
    "wrong": _wrong,
    "cancelled": _cancelled,
    "blamed": _blamed,
    "streams": _streams,
    "toxic": _toxic,
    "left": _left,
    "problems": _problems,
}
