"""Every transition, repeated, dropped and late, against the reference model; and proof that the test would notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tokenmill.shared import lua
from tokenmill.shared.errors import TokenmillError

from .machine import TOPICS, LifeCycle

# The same examples in every run. No shrinking: a failure prints its 40 steps, and shrinking them takes minutes.
SCRIPTS = ("enqueue", "cancel", "exchange", "renew", "reclaim", "release", "configure", "empty", "requeue", "register")

COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    "derandomize": True,
    "phases": [Phase.generate],
    "stateful_step_count": 40,
}


@pytest.fixture
def machines(client: Any) -> dict[str, type[LifeCycle]]:
    return {topic: type("LifeCycle", (LifeCycle,), {"client": client, "topic": topic}) for topic in TOPICS}


@pytest.mark.parametrize("topic", TOPICS)
def test_the_broker_does_what_the_model_says(topic: str, machines: dict[str, type[LifeCycle]]) -> None:
    run_state_machine_as_test(machines[topic], settings=settings(max_examples=25, **COMMON))


FENCED = """  if request.fence ~= fence then
    count('fenced')
    return 0
  end
"""
FINISHED = "  if request.state ~= 'running' then return 1 end\n"

# A rule forgotten: what a script says, what it says without the rule.
MUTANTS = {
    "finish without the fence": (FENCED + FINISHED + "  -- A gap", FINISHED + "  -- A gap"),
    "checkpoint without the fence": (FENCED + FINISHED + "  return append", FINISHED + "  return append"),
    "tokens appended after a gap": ("if start ~= known then return -1 - known end", ""),
    "no deduplication": (
        "if known.state == 'waiting' and known.sha1 == sha1 and not known.deliveries then",
        "if known.sha1 == sha1 then",
    ),
    "another body than the accepted one": (
        "known.state == 'waiting' and known.sha1 == sha1 and not",
        "known.state == 'waiting' and not",
    ),
    "more claims than slots": ("free = slots - held", "free = slots"),
    "finished but owned": ("    on_members('ZREM', own_key(owner), ids)\n", ""),
    "given back but owned": (
        "  redis.call('ZREM', own_key(request.worker), id)\n  local reason",
        "  local reason",
    ),
    "finished but leased": ("    on_members('ZREM', LEASES, ids)\n", ""),
    "renew without the fence": (
        "if request.state == 'running' and request.fence == fence then",
        "if request.state == 'running' then",
    ),
    "release without the fence": (
        "request.state ~= 'running' or request.fence ~= fence then return 0",
        "request.state ~= 'running' then return 0",
    ),
    "a reply for ever": ("redis.call('PEXPIRE', reply_key(id), integer(ttl))", ""),
    "a conflict taken for a duplicate": ("known.sha1 == sha1 and 'duplicate' or 'conflict'", "'duplicate'"),
    "a cancelled request's tokens still queued": ("    dequeue(request)\n    local left", "    local left"),
    "a claimed request's tokens still queued": ("    dequeue(known)\n", ""),
    "finished but due": ("if request.due then redis.call('ZREM', DEADLINES, id) end", ""),
    "suspects among the others": ("and SUSPECTS or RESUME, id)", "and RESUME or RESUME, id)"),
    "emptied without a reply": ("  request.payload = payload\n  end_early(id, request, 'cancelled', ttl)\n", ""),
    "new claims beside unseen ones": ("if not answer_again() then claim_new() end", "answer_again() claim_new()"),
    "new requests before resumed ones": (
        "  claim_from(RESUME, claim_resumed)\n  claim_in_turns(tonumber(meta.turn or 0))",
        "  claim_in_turns(tonumber(meta.turn or 0))\n  claim_from(RESUME, claim_resumed)",
    ),
    "nobody woken for what goes back": ("SUSPECTS or RESUME, id)\n  poke()", "SUSPECTS or RESUME, id)"),
}
# Rules of priorities, limits, keys, models and suspension, which only the topic of lists is about.
MUTANTS_OF_LISTS = {
    "another body under the same key": ("sha1 == key_sha1 and 'duplicate' or 'conflict'", "'duplicate'"),
    "a free turn to low before normal": ("{}, { HIGH, REQUESTS, LOW }, 0,", "{}, { HIGH, LOW, REQUESTS }, 0,"),
    "a run of turns although others wait": ("waiting[list] == total and", "waiting[list] > 0 and"),
    "high requests among the normal ones": (
        "'RPUSH', list, payload)\n  waiting",
        "'RPUSH', REQUESTS, payload)\n  waiting",
    ),
    "nobody woken for high requests": ("if priority ~= 'normal' then poke() end\n", ""),
    "any model at any time": ("if present and present ~= fingerprint and in_use() then return present end", ""),
    "another model while requests wait": ("others > 0 or depth() > 0 or", "others > 0 or"),
    "begun although suspended": ("if meta.suspended or free <= 0", "if free <= 0"),
    "suspended for ever": ("redis.call('HDEL', META, ARGV[i])", "redis.call('HSET', META, ARGV[i], '0')"),
    "only the normal list emptied": (
        "for _, list in ipairs({ HIGH, REQUESTS, LOW }) do drain(",
        "for _, list in ipairs({ REQUESTS }) do drain(",
    ),
}


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch, client: Any) -> Iterator[Callable[[str, str], None]]:
    """Run the scripts with one piece of their text replaced."""
    whole = lua.source

    def mutate(text: str, mutation: str) -> None:
        assert any(whole(name).decode().count(text) == 1 for name in SCRIPTS), "the mutant's text is gone"
        monkeypatch.setattr(lua, "source", lambda name: whole(name).replace(text.encode(), mutation.encode()))
        lua._sha1.cache_clear()
        for name in SCRIPTS:
            client.script_load(lua.source(name))  # a mutant that does not compile proves nothing

    yield mutate
    monkeypatch.undo()
    lua._sha1.cache_clear()


def run(machines: dict[str, type[LifeCycle]], topics: Sequence[str]) -> None:
    for topic in topics:
        run_state_machine_as_test(machines[topic], settings=settings(max_examples=120, **COMMON))


@pytest.mark.long  # how soon a mutant is met depends on the clock of the broker: now and then, not in so many examples
@pytest.mark.parametrize("server_url", ["valkey"], indirect=True)
@pytest.mark.parametrize("mutant", [*MUTANTS, *MUTANTS_OF_LISTS])
def test_the_machine_notices_a_forgotten_rule(
    mutant: str, machines: dict[str, type[LifeCycle]], mutate: Callable[[str, str], None]
) -> None:
    mutate(*(MUTANTS | MUTANTS_OF_LISTS)[mutant])
    with pytest.raises((AssertionError, LookupError, ValueError, TokenmillError)):
        run(machines, ["lists"] if mutant in MUTANTS_OF_LISTS else TOPICS)
