"""What a run was like, as a table, and what the audit found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from .audit import Answer, Verdict
from .evidence import Evidence
from .proxy import FAULTS

_SHOWN = 10
_IN_OWN_ROWS = {"kill", "drain", "stop", "pause", "restart", "memory", *FAULTS}


def report(evidence: Evidence, verdict: Verdict) -> Iterator[str]:
    """Lines for a person."""
    config = evidence.config
    yield (
        f"seed {config.seed}, {evidence.took_s:.0f} s, {config.workers} workers of {config.slots} slots, "
        f"lease {config.lease_ms} ms, appendfsync {config.fsync}"
    )
    yield from (f"  {name:<24}{value}" for name, value in _rows(evidence))
    yield from (f"  {check:<24}{verdict.count(check):,}" for check in ("lost", "duplicated", "wrong", "blamed"))
    for check, findings in verdict.findings.items():
        yield f"FAILED {check}: {len(findings)}"
        yield from (f"    {finding}" for finding in findings[:_SHOWN])
    yield "failed" if verdict.findings else "nothing lost, nothing answered twice, nothing left behind"


def _rows(evidence: Evidence) -> Iterator[tuple[str, str]]:
    struck, stats = evidence.struck, evidence.stats
    yield "requests", f"{len(evidence.accepted):,} accepted, {len(evidence.seen):,} of them read as streams"
    yield "hostile payloads", f"{len(evidence.toxic):,}"
    yield "kills", f"{struck.get('kill', 0):,} (SIGKILL), {struck.get('drain', 0):,} drains (SIGTERM)"
    yield "stops", f"{struck.get('stop', 0):,} longer than the lease, {struck.get('pause', 0):,} shorter"
    yield "broker", f"{struck.get('restart', 0):,} restarts (SIGKILL), {struck.get('memory', 0):,} times at maxmemory"
    yield "proxy faults", _counts(evidence.network)
    yield "other disturbances", _counts({name: count for name, count in struck.items() if name not in _IN_OWN_ROWS})
    yield "workers ended by", _counts(evidence.exits)
    yield "taken back", f"{stats.get('reclaimed', 0):,} when a lease lapsed, {stats.get('released', 0):,} from drains"
    yield "fenced", f"{stats.get('fenced', 0):,} writes of workers that had lost the request"
    yield "cancelled", f"{stats.get('finished_cancelled', 0):,} of {len(evidence.cancelled):,} that were asked for"
    yield "overdue", f"{stats.get('finished_deadline', 0):,} ended at their deadline"
    yield "suspected", f"{stats.get('suspected', 0):,} after two crashes; {evidence.dead_letters:,} dead letters"
    yield "duplicates", f"{stats.get('duplicates', 0):,} pushes dropped"
    yield "refused", f"{stats.get('full', 0):,} times by a full queue"
    if not evidence.config.control:
        twice = f"{tokens_twice(evidence):,}, the bound is {tokens_bound(evidence):,}"
        yield "output tokens", f"{evidence.generated:,}; generated twice {twice}"


def tokens_twice(evidence: Evidence) -> int:
    """Output tokens that were computed and are in no reply: those of dead workers since the last checkpoint, and of
    workers that went on with what was no longer theirs."""
    answers = [msgspec.json.decode(bodies[0], type=Answer) for bodies in evidence.replies.values()]
    return evidence.generated - sum(answer.usage["output_tokens"] for answer in answers if answer.usage)


def tokens_bound(evidence: Evidence) -> int:
    """What kills alone may cost: one checkpoint interval for every slot that ran when its worker was killed."""
    return evidence.config.checkpoint_tokens * evidence.stats.get("reclaimed", 0)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()) if count) or "none"
