"""Every transition, repeated, dropped and late, against the reference model; and proof that the test would notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tokenmill.shared import lua
from tokenmill.shared.errors import TokenmillError

from .machine import TOPICS, LifeCycle

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
    "another body under the same key": ("sha1 == key_sha1 and 'duplicate' or 'conflict'", "'duplicate'"),
    "suspects among the others": ("and SUSPECTS or RESUME, id)", "and RESUME or RESUME, id)"),
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


def run_all(machines: dict[str, type[LifeCycle]]) -> None:
    for machine in machines.values():
        run_state_machine_as_test(machine, settings=settings(max_examples=40, **COMMON))


@pytest.mark.parametrize("server_url", ["valkey"], indirect=True)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_machine_notices_a_forgotten_rule(
    mutant: str, machines: dict[str, type[LifeCycle]], mutate: Callable[[str, str], None]
) -> None:
    mutate(*MUTANTS[mutant])
    with pytest.raises((AssertionError, LookupError, ValueError, TokenmillError)):
        run_all(machines)
