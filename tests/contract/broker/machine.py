"""The life cycle as a hypothesis state machine: the broker beside a small model of it in plain Python.

Calls are made, made with the answer lost, never made, or made again long after. The model says what each must answer
and leave behind; the invariants look at the keys themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenmill.shared.broker import Broker, Checkpoint, Exchanged, Finish, Lost

from .driver import LEASE_MS, TTL_MS, unexpected_keys
from .model import BAD_PUSHES, IDS, UNREADABLE, Model, push_of

WORKERS = ("w1", "w2")
SLOTS = 2

_queues = itertools.count()


class LifeCycle(RuleBasedStateMachine):
    """Workers, producers and their packets against one queue."""

    client: Any  # set by whoever runs the machine

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

    @rule(request_id=st.sampled_from(IDS), variant=st.integers(0, 1), fate=fates)
    def enqueue(self, request_id: str, variant: int, fate: str) -> None:
        payload = push_of(request_id, variant)

        def call() -> None:
            answer = self.broker.enqueue(request_id, payload, stream=request_id.startswith("s"))
            expected = self.model.enqueue(request_id, payload)
            assert (answer.status, answer.state) == expected
            assert answer.depth == len(self.model.requests) + len(self.model.resume)

        self.send(call, fate)

    good_pushes = st.builds(push_of, st.sampled_from(IDS), st.integers(0, 1))
    bad_pushes = st.builds(lambda bad, name: bad % name.encode(), st.sampled_from(BAD_PUSHES), st.sampled_from(IDS))
    pushes = st.one_of(good_pushes, good_pushes, good_pushes, bad_pushes, st.sampled_from(UNREADABLE))

    @rule(payload=pushes)
    def push(self, payload: bytes) -> None:
        self.client.rpush(self.broker.keys.requests, payload)
        self.model.requests.append(payload)

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
            assert lost == [Lost(i, fence, "fenced") for i, fence in held if not self.model.holder(i, fence)]
            self.model.lapsed -= {i for i, fence in held if self.model.holder(i, fence)}

        self.send(call, fate)

    @rule(worker=st.sampled_from(WORKERS), fate=fates, data=st.data())
    def release(self, worker: str, fate: str, data: st.DataObject) -> None:
        held = data.draw(st.lists(self.some_delivery(), max_size=3))

        def call() -> None:
            expected = 0
            for request_id, fence in held:
                if self.model.holder(request_id, fence):
                    self.model.give_back(request_id)
                    expected += 1
            assert self.broker.release(worker, held) == expected

        self.send(call, fate)

    @precondition(lambda self: self.model.running())
    @rule(data=st.data())
    def lapse(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.model.running())))
        self.client.zadd(self.broker.keys.leases, {request_id: 1}, xx=True)
        self.model.lapsed.add(request_id)

    @rule(limit=st.integers(1, 3), fate=fates)
    def reclaim(self, limit: int, fate: str) -> None:
        def call() -> None:
            back = sorted(self.model.lapsed)[:limit]
            for request_id in back:
                self.model.give_back(request_id)
            assert self.broker.reclaim(limit=limit, lease_ms=LEASE_MS, reply_ttl_ms=TTL_MS) == len(back)

        self.send(call, fate)

    @precondition(lambda self: self.packets)
    @rule(data=st.data())
    def arrive_late(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.packets))()

    @invariant()
    def states_agree(self) -> None:
        keys, model = self.broker.keys, self.model
        look: Any = self.client.pipeline(transaction=False)
        look.lrange(keys.requests, 0, -1).lrange(keys.resume, 0, -1).zrange(keys.leases, 0, -1)
        for worker in WORKERS:
            look.zrange(keys.own(worker), 0, -1)
        for request_id in IDS:
            look.hget(keys.request(request_id), "state").lrange(keys.reply(request_id), 0, -1)
            look.xrange(keys.tokens(request_id))
        requests, resume, leases, *rest = look.execute()
        assert requests == model.requests
        assert names(resume) == model.resume
        assert set(names(leases)) == model.running()
        for worker, own in zip(WORKERS, rest, strict=False):
            assert names(own) == list(model.owned(worker))
            assert len(own) <= SLOTS
        seen = rest[len(WORKERS) :]
        for i, request_id in enumerate(IDS):
            self.check_request(request_id, *seen[3 * i : 3 * i + 3])

    def check_request(self, request_id: str, state: bytes | None, replies: list[bytes], stream: list[Any]) -> None:
        entry = self.model.entries.get(request_id)
        assert state == (entry.state.encode() if entry else None)
        if entry is None or entry.state in ("waiting", "running"):
            assert replies == []
        else:
            [reply] = replies  # exactly one, and never another
            assert self.replies.setdefault(request_id, reply) == reply
            assert entry.reply in (reply, b"refused")
        stored = [fields for _, fields in stream]
        if entry and entry.stream and entry.reply:
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
        for request_id in self.model.running():
            self.client.zadd(keys.leases, {request_id: 1}, xx=True)
        self.broker.reclaim(limit=100, lease_ms=LEASE_MS, reply_ttl_ms=TTL_MS)
        ack = 0
        while self.client.exists(keys.requests, keys.resume):
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


def text_of(token_ids: list[int]) -> str:
    return "".join(f"{token} " for token in token_ids)


def names(members: list[bytes]) -> list[str]:
    return [member.decode() for member in members]
