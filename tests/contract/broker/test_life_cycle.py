"""Every transition, repeated, dropped and late, against the reference model; and proof that the test would notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tokenmill.shared import lua
from tokenmill.shared.errors import TokenmillError

from .machine import LifeCycle

# The same examples in every run. No shrinking: a failure prints its 40 steps, and shrinking them takes minutes.
SCRIPTS = ("enqueue", "cancel", "exchange", "renew", "reclaim", "release", "configure", "empty", "requeue")

COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    "derandomize": True,
    "phases": [Phase.generate],
    "stateful_step_count": 40,
}


@pytest.fixture
def machine(client: Any) -> type[LifeCycle]:
    return type("LifeCycle", (LifeCycle,), {"client": client})


def test_the_broker_does_what_the_model_says(machine: type[LifeCycle]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=80, **COMMON))


FENCED = """  if request.fence ~= fence then
    count('fenced')
    return 0
  end
"""
FINISHED = "  if request.state ~= 'running' then return 1 end\n"

# A rule forgotten: what a script says, what it says without the rule.
MUTANTS = {
    "finish without the fence": (FENCED + FINISHED + "  -- A gap", FINISHED + "  -- A gap"),
    "finish by a fence of another state": (FINISHED + "  -- A gap", "  -- A gap"),
    "checkpoint without the fence": (FENCED + FINISHED + "  return append", FINISHED + "  return append"),
    "tokens appended twice": ("if start + total <= known and (total > 0 or text == '') then return 1 end", ""),
    "tokens appended after a gap": ("if start ~= known then return -1 - known end", ""),
    "no deduplication": (
        "if known.state == 'waiting' and known.sha1 == sha1 and not known.deliveries then",
        "if known.sha1 == sha1 then",
    ),
    "another body than the accepted one": (
        "known.state == 'waiting' and known.sha1 == sha1 and not",
        "known.state == 'waiting' and not",
    ),
    "a push begins a request that was begun before": (" and not known.deliveries then", " then"),
    "no ack": ("if #unseen == 0 then claim_new() end", "claim_new()"),
    "more claims than slots": ("free = slots - held", "free = slots"),
    "requests before resume": (
        "claim_from(RESUME, claim_resumed)\n  claim_in_turns(tonumber(meta.turn or 0))",
        "claim_in_turns(tonumber(meta.turn or 0))\n  claim_from(RESUME, claim_resumed)",
    ),
    "finished but owned": ("  redis.call('ZREM', own_key(request.worker), id)\n  finish(", "  finish("),
    "given back but owned": (
        "  redis.call('ZREM', own_key(request.worker), id)\n  local reason",
        "  local reason",
    ),
    "given back with its fence": ("'state', 'waiting', 'fence', '0')", "'state', 'waiting')"),
    "finished but leased": (
        "  redis.call('ZREM', LEASES, id)\n  redis.call('ZREM', own_key(request.worker), id)\n  finish(",
        "  redis.call('ZREM', own_key(request.worker), id)\n  finish(",
    ),
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
    "always the turn of the high ones": ("TURNS[(turn + taken) % #TURNS + 1]", "TURNS[1]"),
    "a poke counted as waiting": ("== POKE then total = total - 1 end", "== POKE then end"),
    "no poke": ("if priority ~= 'normal' then poke() end", ""),
    "a cancelled request's tokens still queued": ("    dequeue(request)\n    local left", "    local left"),
    "a claimed request's tokens still queued": ("    dequeue(known)\n", ""),
    "cancelled but waiting": ("    redis.call('LREM', RESUME, 1, id)\n", ""),
    "a husk taken for a duplicate": ("if known.husk and known.sha1 == sha1 then", "if false then"),
    "an unknown id's cancel forgotten": ("cancelled = known.cancelled }", "}"),
    "an enqueue that its cancel overtook": ("if known.cancelled then -- before it came", "if false then"),
    "a cancelled request resumed": (
        "  if reason then return end_early(id, request, reason, ttl) end\n  redis.call",
        "  redis.call",
    ),
    "an overdue request begun": ("  if reason then return end_early(id, request, reason, ttl) end\n  fence", "  fence"),
    "finished but due": ("if request.due then redis.call('ZREM', DEADLINES, id) end", ""),
    "a deadline that ends what runs": (
        "if request.state ~= 'waiting' then return false end\n  end_waiting",
        "end_waiting",
    ),
    "full for the only request": ("max_tokens > 0 and queued_tokens > 0 and", "max_tokens > 0 and"),
    "never full": ("if is_full() then", "if false then"),
    "another body under the same key": ("sha1 == key_sha1 and 'duplicate' or 'conflict'", "'duplicate'"),
    "progress charged": ("> tonumber(request.claimed_tokens or 0)", "> math.huge"),
    "suspects among the others": ("and SUSPECTS or RESUME, id)", "and RESUME or RESUME, id)"),
    "two workers empty for suspects": ("if holder and holder ~= worker then return alone end", ""),
    "company for a suspect": ("local alone = held == 1 and", "local alone = false and"),
    "a suspect joins the others": ("  if held == 0 then\n    free = 1", "  if true then\n    free = 1"),
    "buried with its first crash alone": (">= CRASHES_ALONE_BEFORE_DEAD", ">= 1"),
    "begun while suspended": ("if meta.suspended then return end", ""),
    "emptied without a reply": ("  request.payload = payload\n  end_early(id, request, 'cancelled', ttl)\n", ""),
    "requeued while it runs": ("then return 'in use' end", "then end"),
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


@pytest.mark.parametrize("server_url", ["valkey"], indirect=True)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_machine_notices_a_forgotten_rule(
    mutant: str, machine: type[LifeCycle], mutate: Callable[[str, str], None]
) -> None:
    mutate(*MUTANTS[mutant])
    with pytest.raises((AssertionError, LookupError, ValueError, TokenmillError)):
        run_state_machine_as_test(machine, settings=settings(max_examples=300, **COMMON))
