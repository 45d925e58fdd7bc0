"""What can go wrong, one function each.

A disturbance begins something and answers at once; it answers False when it cannot happen just now, and is then tried
again. To add one, write the function and give it a rate: the plan, the counts and the options take it from the table.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import redis

from tokenmill.producer.client import Client
from tokenmill.producer.request import IdInUseError
from tokenmill.shared.errors import TokenmillError

from .arena import Action, Arena
from .proxy import FAULTS, Fault
from .toxic import Toxic, draw_toxic, poison
from .workload import GoodRequest

Strike = Callable[[Arena], bool]

_FULL = 1024 * 1024  # bytes: less than any server needs for itself


class Disturbance(NamedTuple):
    per_minute: float
    strike: Strike


def signal_worker(number: signal.Signals, arena: Arena) -> bool:
    """SIGKILL, or SIGTERM for a drain: the supervisor starts the worker again."""
    victims = arena.workers.victims()
    if victims:
        arena.workers.signal(arena.rng.choice(victims), number)
    return bool(victims)


def stop_worker(leases: tuple[float, float], arena: Arena) -> bool:
    """SIGSTOP, and SIGCONT after so many leases (from, to)."""
    victims = arena.workers.victims()
    if not victims:
        return False
    victim = arena.rng.choice(victims)
    arena.workers.signal(victim, signal.SIGSTOP)
    # Should another life have begun by then, SIGCONT does nothing to it.
    arena.later(arena.rng.uniform(*leases) * arena.lease_s, lambda: arena.workers.signal(victim, signal.SIGCONT))
    return True


def restart_broker(arena: Arena) -> bool:
    """SIGKILL the server, and start it again on what it has written; some outages outlast a lease."""
    if not arena.server.is_up or not _answers(arena):
        return False
    arena.server.kill()
    arena.later(arena.rng.uniform(0.1, 2.0) * arena.lease_s, arena.server.start)
    return True


def fill_memory(arena: Arena) -> bool:
    """maxmemory far below what is in use, for a while: every write that needs memory is refused."""
    with suppress(redis.RedisError):
        arena.direct.config_set("maxmemory", _FULL)
        arena.later(arena.rng.uniform(0.3, 2.0), partial(_free_memory, arena))
        return True
    return False


def fail_network(fault: Fault, arena: Arena) -> bool:
    """A fault in some of the connections of workers, producers and readers."""
    arena.proxy.strike(fault, arena.rng.choice((0.05, 0.2, 0.5)))
    return True


def send_again(arena: Arena) -> bool:
    """An accepted request once more, by a bare push or a client, soon or long after the first time."""
    known = list(arena.ledger.accepted.values())
    if not known:
        return False
    return _send(arena, arena.rng.choice(known[-50:] if arena.rng.random() < 0.5 else known))


def send_under_known_key(arena: Arena) -> bool:
    """An accepted request under another id and its idempotency key: the client is given the first id."""
    known = [request for request in arena.ledger.accepted.values() if "idempotency_key" in request.fields]
    if not known:
        return False
    request = arena.rng.choice(known)
    try:
        given = Client(arena.broker).submit(id=f"{request.id}-again", when_full="raise", **request.fields)
    except TokenmillError:
        return False
    if given != request.id:
        arena.ledger.complain(f"{request.id}: its idempotency key gave {given}")
    return True


def send_conflicting(arena: Arena) -> bool:
    """Another body under the id of a request that a client has enqueued: the first one counts."""
    known = [request for request in arena.ledger.accepted.values() if request.way == "submit"]
    if not known:
        return False
    request = arena.rng.choice(known[-50:])
    other = dataclasses.replace(request, fields={**request.fields, "prompt": "something else", "max_tokens": 3})
    other.fields.pop("messages", None)
    return _send(arena, other)


def cancel_request(arena: Arena) -> bool:
    """A request that waits or runs, or one that is finished."""
    known = arena.ledger.owed if arena.rng.random() < 0.8 else list(arena.ledger.accepted)
    if not known:
        return False
    request_id = arena.rng.choice(known)
    arena.ledger.cancel(request_id, None)
    try:
        arena.ledger.cancel(request_id, arena.broker.cancel(request_id))
    except TokenmillError:
        return False
    return True


def suspend_queue(arena: Arena) -> bool:
    """For a while workers begin nothing."""
    try:
        arena.broker.suspend()
    except TokenmillError:
        return False
    arena.later(arena.rng.uniform(0.3, 2.0), partial(_insist, arena, arena.broker.resume))
    return True


def limit_queue(arena: Arena) -> bool:
    """For a while the queue takes a few requests at a time: clients come back, bare pushes pass."""
    try:
        arena.broker.set_limits(arena.rng.randint(1, 8), arena.rng.choice((0, 200)))
    except TokenmillError:
        return False
    arena.later(arena.rng.uniform(0.3, 2.0), partial(_insist, arena, partial(arena.broker.set_limits, 0, 0)))
    return True


def push_toxic(arena: Arena) -> bool:
    """A payload that is no request, or a request that cannot be served."""
    return _push(arena, draw_toxic(arena.rng, arena.next_number()))


def push_poison(arena: Arena) -> bool:
    """A request that ends every worker that begins it, until it is given up."""
    return _push(arena, poison(arena.next_number()))


def _push(arena: Arena, toxic: Toxic) -> bool:
    try:
        arena.direct.rpush(arena.broker.keys.requests, toxic.payload)
    except redis.ResponseError:  # refused: maxmemory
        return False
    except redis.RedisError:
        arena.ledger.accept_toxic(toxic, sure=False)
        return False
    arena.ledger.accept_toxic(toxic, sure=True)
    return True


DISTURBANCES: dict[str, Disturbance] = {
    "kill": Disturbance(16, partial(signal_worker, signal.SIGKILL)),
    "drain": Disturbance(3, partial(signal_worker, signal.SIGTERM)),
    "stop": Disturbance(6, partial(stop_worker, (1.2, 4.0))),
    "pause": Disturbance(3, partial(stop_worker, (0.1, 0.8))),
    "restart": Disturbance(1.2, restart_broker),
    "memory": Disturbance(1, fill_memory),
    **{fault: Disturbance(3, partial(fail_network, fault)) for fault in FAULTS if fault != "half_open"},
    "half_open": Disturbance(1, partial(fail_network, "half_open")),
    "again": Disturbance(30, send_again),
    "conflict": Disturbance(6, send_conflicting),
    "cancel": Disturbance(20, cancel_request),
    "suspend": Disturbance(1, suspend_queue),
    "limit": Disturbance(1, limit_queue),
    "key": Disturbance(6, send_under_known_key),
    "toxic": Disturbance(20, push_toxic),
    "poison": Disturbance(1, push_poison),
}


def calm(arena: Arena) -> None:
    """Undo what lasts."""
    arena.workers.wake()
    arena.proxy.heal()
    if not arena.server.is_up:
        arena.server.start()
    arena.server.wait_ready()
    arena.direct.config_set("maxmemory", 0)
    arena.broker.resume()
    arena.broker.set_limits(0, 0)


def _insist(arena: Arena, action: Action) -> None:
    try:
        action()
    except TokenmillError:
        arena.later(0.1, partial(_insist, arena, action))


def _free_memory(arena: Arena) -> None:
    # When the broker is down, it comes back without a limit.
    with suppress(redis.RedisError):
        arena.direct.config_set("maxmemory", 0)


def _send(arena: Arena, request: GoodRequest) -> bool:
    try:
        if arena.rng.random() < 0.5:
            arena.direct.rpush(request.list_in(arena.broker.keys), request.payload())
        else:
            Client(arena.broker).submit(id=request.id, when_full="raise", **request.fields)
    except IdInUseError:
        return True  # that is the answer to another body
    except (redis.RedisError, TokenmillError):
        return False
    return True


def _answers(arena: Arena) -> bool:
    try:
        return bool(arena.direct.ping())
    except redis.RedisError:
        return False
