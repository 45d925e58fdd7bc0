"""The table of scripts/README.md, cell by cell, on a real server."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest

from tokenmill.shared.broker import Broker, Checkpoint, Claim

from .driver import LEASE_MS, Worker, body, done

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
        if push is None:
            return "nothing"
        stats = self.broker.info().stats
        return "refused" if "finished_error" in stats else "dropped" if self._dropped(stats) == 1 else "lost"

    @staticmethod
    def _dropped(stats: dict[str, int]) -> int:
        return stats.get("duplicates", 0) + stats.get("dead_letters", 0)

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
    "exchange: claim": lambda t: t.claim(),
    "exchange: claim after a bare push": lambda t: t.claim(body(ID)),
    "exchange: claim after a broken push": lambda t: t.claim(BROKEN),
    "exchange: checkpoint": lambda t: t.checkpoint(t.held),
    "exchange: checkpoint, stale fence": lambda t: t.checkpoint(t.stale()),
    "exchange: finish": lambda t: t.finish(t.held),
    "exchange: finish, stale fence": lambda t: t.finish(t.stale()),
    "renew": lambda t: t.renew(),
    "reclaim after the lease": lambda t: t.reclaim_lapsed(),
    "release": lambda t: t.release(),
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
