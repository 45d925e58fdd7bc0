"""The life cycle as a hypothesis state machine: the broker beside a small model of it in plain Python.

Calls are made, made with the answer lost, never made, or made again long after. The model says what each must answer
and leave behind; the invariants look at the keys themselves.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenmill.shared.broker import Broker, Checkpoint, Exchanged, Finish, Lost

from .driver import LEASE_MS, TTL_MS, pull_deadline, unexpected_keys
from .model import BAD_PUSHES, IDS, POKE, TIMEOUT_MS, UNREADABLE, Model, has_deadline, push_of, text_of

WORKERS = ("w1", "w2")
SLOTS = 2

# What a run is about, beside workers that come and go: all at once, each rule would hide the others.
TOPICS = ("leases", "endings", "suspects", "lists")

_queues = itertools.count()


def about(*names: str) -> Callable[[Any], Any]:
    return precondition(lambda self: self.topic in names)


class LifeCycle(RuleBasedStateMachine):
    """Workers, producers and their packets against one queue."""

    client: Any  # set by whoever runs the machine
    topic: str  # so is this

    @initialize()
    def start(self) -> None:
        self.broker = Broker(self.client, f"machine{next(_queues)}")
        self.model = Model()
        self.acks = dict.fromkeys(WORKERS, 0)
        self.deliveries = [("a", 1), ("s1", 2)]  # every (id, fence) ever given, and two that never were
        self.packets: list[Callable[[], None]] = []
        self.replies: dict[str, bytes] = {}

    def send(self, call: Callable[[], Any], fate: str, answered: Callable[[Any], None] = lambda _: None) -> None:
        """Make a call that may be dropped, lose its answer, come twice, or come (again) later."""
        if fate == "dropped":
            return
        if fate == "late":
            self.packets.append(call)
            return
        answer = call()
        if fate == "twice":
            answer = call()
        if fate != "unanswered":
            answered(answer)
        self.packets.append(call)

    fates = st.sampled_from(["answered", "answered", "answered", "unanswered", "twice", "dropped", "late"])

    @rule(
        request_id=st.sampled_from(IDS),
        variant=st.integers(0, 1),
        priority=st.sampled_from(["high", "normal", "normal", "low"]),
        cost=st.sampled_from([0, 5, 20]),
        key=st.sampled_from([None, None, None, "k1", "k2"]),
        fate=fates,
    )
    def enqueue(self, request_id: str, variant: int, priority: Any, cost: int, key: str | None, fate: str) -> None:
        payload = push_of(request_id, variant)
        if self.topic != "lists":
            priority, key = "normal", None

        def call() -> None:
            expected = self.model.enqueue(request_id, variant, priority, cost, key)
            answer = self.broker.enqueue(
                request_id,
                payload,
                stream=request_id.startswith("s"),
                priority=priority,
                timeout_ms=TIMEOUT_MS if has_deadline(payload) else None,
                cost=cost,
                idempotency_key=key,
            )
            assert (answer.status, answer.state, answer.id) == expected
            assert (answer.depth, answer.queued_tokens) == (self.model.depth(), self.model.queued_tokens())

        self.send(call, fate)

    good_pushes = st.builds(push_of, st.sampled_from(IDS), st.integers(0, 1))
    bad_pushes = st.builds(lambda bad, name: bad % name.encode(), st.sampled_from(BAD_PUSHES), st.sampled_from(IDS))
    pushes = st.one_of(good_pushes, good_pushes, good_pushes, bad_pushes, st.sampled_from(UNREADABLE))

    @rule(payload=pushes, priority=st.sampled_from(["requests", "requests", "high", "low"]))
    def push(self, payload: bytes, priority: str) -> None:
        priority = priority if self.topic == "lists" else "requests"
        self.client.rpush(getattr(self.broker.keys, priority), payload)
        self.model.lists[priority].append(payload)

    @about("endings")
    @rule(request_id=st.sampled_from(IDS), fate=fates)
    def cancel(self, request_id: str, fate: str) -> None:
        def call() -> None:
            assert self.broker.cancel(request_id, reply_ttl_ms=TTL_MS) == self.model.cancel(request_id)

        self.send(call, fate)

    @rule(worker=st.sampled_from(WORKERS), slots=st.sampled_from([SLOTS, SLOTS, 1, 0]), fate=fates, data=st.data())
    def exchange(self, worker: str, slots: int, fate: str, data: st.DataObject) -> None:
        finished = data.draw(st.lists(self.finishes(), max_size=1))
        checkpoints = data.draw(st.lists(self.checkpoints(), max_size=2))
        ack = self.acks[worker]

        def call() -> Exchanged:
            answer = self.broker.exchange(
                worker,
                slots=slots,
                ack=ack,
                lease_ms=LEASE_MS,
                reply_ttl_ms=TTL_MS,
                finished=finished,
                checkpoints=checkpoints,
            )
            self.check_exchange(worker, slots, ack, finished, checkpoints, answer)
            return answer

        def answered(answer: Exchanged) -> None:
            self.acks[worker] = max([self.acks[worker], *(claim.fence for claim in answer.claims)])

        self.send(call, fate, answered)

    def check_exchange(
        self, worker: str, slots: int, ack: int, finished: list[Finish], saved: list[Checkpoint], answer: Exchanged
    ) -> None:
        model, given = self.model, {claim.id: claim.fence for claim in answer.claims}
        assert answer.checkpoints == [model.checkpoint(item) for item in saved]
        assert answer.finished == [model.finish(item) for item in finished]

        def new_fence(request_id: str) -> int:
            fence = given[request_id]
            assert fence > model.last_fence
            model.last_fence = fence
            self.deliveries.append((request_id, fence))
            return fence

        assert model.claim(worker, slots, ack, new_fence) == list(given)
        for claim in answer.claims:
            entry = model.entries[claim.id]
            assert (claim.payload, claim.deliveries, claim.fence) == (entry.body, entry.deliveries, entry.fence)
            assert (claim.token_ids, claim.text) == (entry.tokens, text_of(entry.tokens))
        assert answer.owned == model.owned(worker)

    def finishes(self) -> st.SearchStrategy[Finish]:
        def make(delivery: tuple[str, int], reason: Any, start: int, total: int) -> Finish:
            ids = tokens(delivery[1], total)
            return Finish(*delivery, reason, f"{delivery[0]} {delivery[1]}".encode(), start, ids, text_of(ids))

        reasons = st.sampled_from(["stop", "length", "error"])
        return st.builds(make, self.some_delivery(), reasons, st.integers(0, 3), st.integers(0, 2))

    def checkpoints(self) -> st.SearchStrategy[Checkpoint]:
        def make(delivery: tuple[str, int], start: int, total: int) -> Checkpoint:
            ids = tokens(delivery[1], total)
            return Checkpoint(*delivery, start, ids, text_of(ids))

        return st.builds(make, self.some_delivery(), st.integers(0, 4), st.integers(0, 3))

    def some_delivery(self) -> st.SearchStrategy[tuple[str, int]]:
        current = [(i, e.fence) for i, e in self.model.entries.items() if e.state == "running"]
        return st.sampled_from(current + self.deliveries[::-1])

    @rule(worker=st.sampled_from(WORKERS), fate=fates, data=st.data())
    def renew(self, worker: str, fate: str, data: st.DataObject) -> None:
        held = data.draw(st.lists(self.some_delivery(), max_size=3))

        def call() -> None:
            lost = self.broker.renew(worker, held, lease_ms=LEASE_MS, status=b"{}")
            whys = [(e.called_off if (e := self.model.holder(*pair)) else "fenced") for pair in held]
            assert lost == [Lost(*pair, why) for pair, why in zip(held, whys, strict=True) if why]  # type: ignore[arg-type]
            self.model.lapsed -= {i for i, fence in held if self.model.holder(i, fence)}
            self.model.workers.add(worker)

        self.send(call, fate)

    @rule(worker=st.sampled_from(WORKERS), fate=fates, data=st.data())
    def release(self, worker: str, fate: str, data: st.DataObject) -> None:
        held = data.draw(st.lists(self.some_delivery(), max_size=3))

        def call() -> None:
            assert self.broker.release(worker, held, reply_ttl_ms=TTL_MS) == self.model.release(worker, held)

        self.send(call, fate)

    @precondition(lambda self: self.model.running())
    @rule(data=st.data())
    def lapse(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.model.running())))
        self.client.zadd(self.broker.keys.leases, {request_id: 1}, xx=True)
        self.model.lapsed.add(request_id)

    @about("suspects")
    @precondition(lambda self: self.model.running())
    @rule(data=st.data())
    def blame(self, data: st.DataObject) -> None:
        """Its lease lapses, and with this crash the request is a suspect, or buried."""
        request_id = data.draw(st.sampled_from(sorted(self.model.running())))
        entry = self.model.entries[request_id]
        entry.crashes, entry.crashes_alone = (3, 1) if entry.alone else (1, 0)
        charge = {"crashes": entry.crashes, "crashes_alone": entry.crashes_alone}
        self.client.hset(self.broker.keys.request(request_id), mapping=charge)
        self.client.zadd(self.broker.keys.leases, {request_id: 1}, xx=True)
        self.model.lapsed.add(request_id)

    @about("endings")
    @precondition(lambda self: any(entry.watched for entry in self.model.entries.values()))
    @rule(data=st.data())
    def deadline_passes(self, data: st.DataObject) -> None:
        watched = [request_id for request_id, entry in self.model.entries.items() if entry.watched]
        request_id = data.draw(st.sampled_from(watched))
        pull_deadline(self.client, self.broker, request_id)
        self.model.entries[request_id].overdue = True

    @about("endings")
    @precondition(lambda self: self.model.tombstones or any(e.finished for e in self.model.entries.values()))
    @rule(data=st.data())
    def is_forgotten(self, data: st.DataObject) -> None:
        entries, keys = self.model.entries, self.broker.keys
        old = [*sorted(self.model.tombstones), *(i for i, e in entries.items() if e.finished and not e.husk)]
        if old:
            request_id = data.draw(st.sampled_from(old))
            self.client.delete(keys.request(request_id), keys.reply(request_id), keys.tokens(request_id))
            self.model.forget(request_id)
            self.replies.pop(request_id, None)

    @precondition(lambda self: self.model.solo)
    @rule()
    def solo_lapses(self) -> None:
        self.client.delete(self.broker.keys.solo)
        self.model.solo = None

    @rule(limit=st.integers(1, 3), fate=fates)
    def reclaim(self, limit: int, fate: str) -> None:
        def call() -> None:
            expected = self.model.reclaim(limit)
            assert self.broker.reclaim(limit=limit, lease_ms=LEASE_MS, reply_ttl_ms=TTL_MS) == expected

        self.send(call, fate)

    @about("lists")
    @rule(worker=st.sampled_from(WORKERS), fingerprint=st.sampled_from(["m1", "m2"]), fate=fates)
    def register(self, worker: str, fingerprint: str, fate: str) -> None:
        def call() -> None:
            expected = self.model.register(worker, fingerprint)
            assert self.broker.register(worker, fingerprint, lease_ms=LEASE_MS) == expected

        self.send(call, fate)

    @about("lists")
    @rule(suspended=st.sampled_from([False, False, False, True]))
    def suspend_or_resume(self, suspended: bool) -> None:
        (self.broker.suspend if suspended else self.broker.resume)()
        self.model.suspended = suspended

    @about("lists")
    @rule(max_depth=st.sampled_from([0, 0, 3]), max_queued_tokens=st.sampled_from([0, 0, 10]))
    def limit(self, max_depth: int, max_queued_tokens: int) -> None:
        self.broker.set_limits(max_depth, max_queued_tokens)
        self.model.limits = (max_depth, max_queued_tokens)

    @about("endings", "lists")
    @rule(sure=st.sampled_from([False, False, True]))
    def empty(self, sure: bool) -> None:
        if sure:
            assert self.broker.empty(reply_ttl_ms=TTL_MS) == self.model.empty()

    @about("endings", "suspects")
    @precondition(lambda self: self.model.dead)
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        known = [i for i, (request_id, _) in enumerate(self.model.dead) if request_id in self.model.entries]
        index = data.draw(st.sampled_from(known or range(len(self.model.dead))))
        letter = self.broker.dead_letters()[index]
        expected = self.model.requeue(index)
        assert self.broker.requeue_dead(letter.entry_id) == expected
        if expected == "ok":
            self.replies.pop(letter.id, None)
            assert self.broker.requeue_dead(letter.entry_id) == "gone"

    @precondition(lambda self: self.packets)
    @rule(data=st.data())
    def arrive_late(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.packets))()

    @invariant()
    def states_agree(self) -> None:
        keys, model = self.broker.keys, self.model
        look: Any = self.client.pipeline(transaction=False)
        for key in (keys.high, keys.requests, keys.low, keys.resume, keys.suspects):
            look.lrange(key, 0, -1)
        look.zrange(keys.leases, 0, -1).zrange(keys.deadlines, 0, -1).hmget(keys.meta, "queued_tokens", "husks")
        look.get(keys.solo)
        for worker in WORKERS:
            look.zrange(keys.own(worker), 0, -1)
        for request_id in IDS:
            look.hget(keys.request(request_id), "state").lrange(keys.reply(request_id), 0, -1)
            look.xrange(keys.tokens(request_id)).exists(keys.request(request_id))
        *lists, resume, suspects, leases, deadlines, counters, solo = (answers := look.execute())[:9]
        assert lists == list(model.lists.values())
        assert (names(resume), names(suspects)) == (model.resume, model.suspects)
        assert set(names(leases)) == model.running()
        assert set(names(deadlines)) == {i for i, e in model.entries.items() if e.watched}
        assert [int(counter or 0) for counter in counters] == [model.queued_tokens(), model.husks()]
        assert (solo and solo.decode()) == model.solo
        for worker, own in zip(WORKERS, answers[9:], strict=False):
            assert names(own) == list(model.owned(worker))
            assert len(own) <= (1 if any(model.entries[i].alone for i in names(own)) else SLOTS)
        seen = answers[9 + len(WORKERS) :]
        for i, request_id in enumerate(IDS):
            self.check_request(request_id, *seen[4 * i : 4 * i + 4])
        assert [(letter.id, letter.payload) for letter in self.broker.dead_letters()] == model.dead

    def check_request(
        self, request_id: str, state: bytes | None, replies: list[bytes], stream: list[Any], known: int
    ) -> None:
        entry = self.model.entries.get(request_id)
        assert state == (entry.state.encode() if entry else None)
        assert known == bool(entry or request_id in self.model.tombstones)
        if entry is None or not entry.finished:
            assert replies == []
        else:
            [reply] = replies  # exactly one, and never another
            assert self.replies.setdefault(request_id, reply) == reply
            if entry.reply is None:
                written = json.loads(reply)
                assert (written["finish_reason"], written["text"]) == (entry.state, entry.text)
            else:
                assert reply == entry.reply
        stored = [fields for _, fields in stream]
        if entry and entry.stream and entry.finished:
            assert stored.pop() == {b"end": state}
        joined = b",".join(fields[b"ids"] for fields in stored).decode()
        assert joined == ",".join(map(str, entry.tokens if entry else []))
        fences = [int(fields[b"fence"]) for fields in stored]
        assert fences == sorted(fences)

    def teardown(self) -> None:
        """Whatever happened, one good worker ends it: every request has its reply and nothing is left over."""
        if not hasattr(self, "broker"):
            return
        keys, last = self.broker.keys, "last"
        self.broker.resume()
        self.client.delete(keys.solo)
        for request_id in self.model.running():
            self.client.zadd(keys.leases, {request_id: 1}, xx=True)
        self.broker.reclaim(limit=100, lease_ms=LEASE_MS, reply_ttl_ms=TTL_MS)
        ack, turns = 0, 0
        while self.broker.info().waiting or self.client.lrange(keys.requests, 0, -1) not in ([], [POKE]):
            turns += 1
            assert turns < 1000, "the queue never empties"
            answer = self.last_exchange(last, ack, [])
            ended = [
                Finish(c.id, c.fence, "stop", f"{c.id} {c.fence}".encode(), len(c.token_ids), [], "")
                for c in answer.claims
            ]
            ack = max([ack, *answer.owned.values()])
            assert self.last_exchange(last, ack, ended).finished == [1] * len(ended)
        for request_id in self.model.entries:
            [reply] = self.client.lrange(keys.reply(request_id), 0, -1)
            assert self.replies.get(request_id, reply) == reply
        assert self.client.exists(keys.leases, *(keys.own(worker) for worker in (*WORKERS, last))) == 0
        assert self.client.hget(keys.stats, "script_errors") is None
        assert unexpected_keys(self.client, self.broker) == []
        self.client.delete(*self.client.scan_iter(f"{keys.meta.removesuffix('meta')}*", count=1000))

    def last_exchange(self, worker: str, ack: int, finished: list[Finish]) -> Exchanged:
        return self.broker.exchange(
            worker, slots=0 if finished else 8, ack=ack, lease_ms=LEASE_MS, reply_ttl_ms=TTL_MS, finished=finished
        )


def tokens(fence: int, total: int) -> list[int]:
    """Token ids that tell which delivery made them."""
    return [fence % 1_000_000_007] * total


def names(members: list[bytes]) -> list[str]:
    return [member.decode() for member in members]
