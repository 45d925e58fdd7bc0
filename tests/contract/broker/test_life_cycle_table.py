"""The table of scripts/README.md, cell by cell, on a real server."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest

from tokenmill.shared.broker import Broker, Checkpoint, Claim

from .driver import LEASE_MS, Worker, body, done, pull_deadline

ID = "r1"
BROKEN = b'{"id": "r1", "prompt": '


def _table() -> list[tuple[str, str, str, str]]:
    """(call, state before, state after, answer) of every cell."""
    text = (files("tokenmill.shared") / "scripts" / "README.md").read_text(encoding="utf-8")
    lines = text.split("## Life of a request")[1].split("\n## ")[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    cells = [(row[0], *pair) for row in rows for pair in zip(head[1:], row[1:], strict=True)]
    return [(call, before, *after_and_answer(cell)) for call, before, cell in cells]


def after_and_answer(cell: str) -> tuple[str, str]:
    after, _, answer = cell.partition(", ")
    return after, answer


class Table:
    """Brings one request into a state, makes one call, and tells state and answer in the table's words."""

    def __init__(self, broker: Broker, client: Any, lapse: Callable[..., None], reclaim: Callable[..., int]):
        self.broker, self.client, self.lapse, self.reclaim = broker, client, lapse, reclaim
        self.worker, self.other = Worker(broker, "w"), Worker(broker, "other")
        self.held = Claim(ID, 12345, b"", 1, 0, 0, [], "")  # a delivery that never was

    def bring_to(self, state: str) -> None:
        if state == "absent":
            return
        self.broker.enqueue(ID, body(ID))
        if state in ("running", "finished"):
            self.held = self.worker.claim_one()
        if state == "finished":
            self.worker.finish(self.held)

    def state(self) -> str:
        state = self.client.hget(self.broker.keys.request(ID), "state")
        return {None: "absent", b"waiting": "waiting", b"running": "running"}.get(state, "finished")

    def enqueue(self, variant: int) -> Any:
        return self.broker.enqueue(ID, body(ID, variant)).status

    def claim(self, push: bytes | None = None) -> Any:
        if push:
            self.client.rpush(self.broker.keys.requests, push)
        if self.other.claim():
            return "claimed"
        stats = self.broker.info().stats
        if push is None or (stats.get("finished_cancelled") == 1 and self._dropped(stats) == 0):
            return "nothing"
        return "refused" if "finished_error" in stats else "dropped" if self._dropped(stats) == 1 else "lost"

    @staticmethod
    def _dropped(stats: dict[str, int]) -> int:
        return stats.get("duplicates", 0) + stats.get("dead_letters", 0)

    def enqueue_full(self) -> Any:
        self.broker.set_limits(1, 0)
        self.client.rpush(self.broker.keys.low, body("other"))
        return self.enqueue(0)

    def overdue(self) -> Table:
        if self.state() in ("waiting", "running"):
            pull_deadline(self.client, self.broker, ID)
        return self

    def cancelled(self) -> Table:
        self.broker.cancel(ID)
        return self

    def suspended(self) -> Table:
        self.broker.suspend()
        return self

    def requeue(self) -> Any:
        letter = {"why": "", "id": ID, "payload": body(ID), "size": len(body(ID))}
        return self.broker.requeue_dead(self.client.xadd(self.broker.keys.dead, letter).decode())

    def stale(self) -> Claim:
        return self.held._replace(fence=self.held.fence - 1)

    def checkpoint(self, claim: Claim) -> Any:
        return self.worker.exchange(checkpoints=[Checkpoint(ID, claim.fence, 0, [1], "x")], slots=0).checkpoints[0]

    def finish(self, claim: Claim) -> Any:
        return self.worker.exchange(done(claim), slots=0).finished[0]

    def renew(self) -> Any:
        lost = self.broker.renew("w", [(ID, self.held.fence)], lease_ms=LEASE_MS, status=b"{}")
        return lost[0].why if lost else "held"

    def reclaim_lapsed(self) -> Any:
        self.lapse()
        return self.reclaim()

    def release(self) -> Any:
        return self.broker.release("w", [(ID, self.held.fence)])


CALLS: dict[str, Callable[[Table], Any]] = {
    "enqueue, same body": lambda t: t.enqueue(0),
    "enqueue, other body": lambda t: t.enqueue(1),
    "enqueue, queue full": lambda t: t.enqueue_full(),
    "enqueue after cancel": lambda t: t.cancelled().enqueue(0),
    "cancel": lambda t: t.broker.cancel(ID),
    "exchange: claim": lambda t: t.claim(),
    "exchange: claim, queue suspended": lambda t: t.suspended().claim(),
    "exchange: claim after the deadline": lambda t: t.overdue().claim(),
    "exchange: claim after a bare push": lambda t: t.claim(body(ID)),
    "exchange: claim after a broken push": lambda t: t.claim(BROKEN),
    "exchange: claim after cancel and a bare push": lambda t: t.cancelled().claim(body(ID)),
    "exchange: checkpoint": lambda t: t.checkpoint(t.held),
    "exchange: checkpoint, stale fence": lambda t: t.checkpoint(t.stale()),
    "exchange: finish": lambda t: t.finish(t.held),
    "exchange: finish, stale fence": lambda t: t.finish(t.stale()),
    "renew": lambda t: t.renew(),
    "renew after cancel": lambda t: t.cancelled().renew(),
    "renew after the deadline": lambda t: t.overdue().renew(),
    "reclaim after the lease": lambda t: t.reclaim_lapsed(),
    "reclaim after the lease and cancel": lambda t: t.cancelled().reclaim_lapsed(),
    "reclaim after the deadline": lambda t: t.overdue().reclaim(),
    "reclaim after the lease and the deadline": lambda t: t.overdue().reclaim_lapsed(),
    "release": lambda t: t.release(),
    "release after cancel": lambda t: t.cancelled().release(),
    "empty": lambda t: t.broker.empty(),
    "requeue of a dead letter": lambda t: t.requeue(),
}


@pytest.mark.parametrize(("call", "before", "after", "answer"), _table())
def test_the_scripts_do_what_the_table_says(
    call: str,
    before: str,
    after: str,
    answer: str,
    broker: Broker,
    client: Any,
    lapse: Callable[..., None],
    reclaim: Callable[..., int],
) -> None:
    table = Table(broker, client, lapse, reclaim)
    table.bring_to(before)
    assert table.state() == before

    assert (str(CALLS[call](table)), table.state()) == (answer, after)

    replies = client.llen(broker.keys.reply(ID))
    assert replies == (1 if after == "finished" else 0)


def test_the_table_covers_every_call_and_every_state() -> None:
    cells = [(call, before) for call, before, _, _ in _table()]
    assert cells == [(call, before) for call in CALLS for before in ("absent", "waiting", "running", "finished")]
