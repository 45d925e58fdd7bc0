"""The exchange with the broker: one thread that carries replies and checkpoints out and claims in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from tokenmill.shared.broker import Broker, Checkpoint, Exchanged, Finish
from tokenmill.shared.errors import BrokerUnreachableError

log = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.002, 0.1
SHORTEST_PEEK_S = 0.001


class Exchange:
    """Posts what a step produced and brings back what the worker owns, so that a slow broker never stops decoding.

    The loop's thread calls ``post`` once a step and ``collect`` before the next; ``await_work`` instead of both while
    it has nothing to run. A call that failed is repeated unchanged until the broker answers: its script is repeatable.
    """

    def __init__(
        self, broker: Broker, worker: str, *, slots: int, lease_ms: int, reply_ttl_ms: int, block_s: float
    ) -> None:
        self.owned: dict[str, int] = {}  # id → fence: what the worker runs, or has ended; replaced, never changed
        self._broker = broker
        self._worker = worker
        self._slots = slots
        self._most_finished = (slots + 1) // 2  # in one exchange
        self._lease_ms = lease_ms
        self._reply_ttl_ms = reply_ttl_ms
        self._block_s = block_s
        self._ack = 0  # the highest fence received
        self._changed = threading.Condition()
        self._finished: list[Finish] = []
        self._checkpoints: list[Checkpoint] = []
        self._answers: list[tuple[Exchanged, list[Checkpoint]]] = []
        self._posted = 0  # exchanges asked for
        self._answered = 0
        self._hungry_s = 0.0  # the loop has nothing to run for so long: wait at the broker for a request
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)

    def start(self) -> None:
        """Begin to exchange."""
        self._thread.start()

    def post(self, finished: Sequence[Finish], checkpoints: Sequence[Checkpoint]) -> None:
        """Ask for one exchange that carries these; returns at once."""
        with self._changed:
            self._finished += finished
            self._checkpoints += checkpoints
            self._posted += 1
            self._changed.notify_all()

    def collect(self, timeout_s: float) -> list[tuple[Exchanged, list[Checkpoint]]]:
        """The answers, each with the checkpoints it is about, once all posts are answered or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._answered >= self._posted or self._failure, timeout_s)
            return self._take_answers()

    def await_work(self, timeout_s: float) -> list[tuple[Exchanged, list[Checkpoint]]]:
        """Wait at the broker for a request; the answers, or none when the time is up."""
        with self._changed:
            self._hungry_s = timeout_s
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._answers or self._failure, timeout_s)
            self._hungry_s = 0.0
            return self._take_answers()

    def claim_no_more(self) -> None:
        """From now on only carry out."""
        self._slots = 0

    def close(self, timeout_s: float) -> bool:
        """Carry out what was posted, then stop; False if the broker did not take it in time."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._answered >= self._posted or self._failure, timeout_s)
            self._stopping.set()
            self._changed.notify_all()
        self._thread.join(self._block_s + LAST_RETRY_S)
        return bool(done) and self._failure is None

    def _take_answers(self) -> list[tuple[Exchanged, list[Checkpoint]]]:
        if self._failure is not None:
            raise self._failure
        answers, self._answers = self._answers, []
        return answers

    def _run(self) -> None:
        pause_s = 0.0
        try:
            while not self._stopping.is_set():
                if self._next_is_idle():
                    pause_s = self._fetch(pause_s)
                else:
                    pause_s = 0.0
                    self._carry()
        except BaseException as failure:  # the loop's thread raises it
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _next_is_idle(self) -> bool:
        """Wait until there is something to do; whether it is waiting for a request."""
        with self._changed:
            self._changed.wait_for(lambda: self._posted > self._answered or self._hungry_s or self._stopping.is_set())
            return self._posted <= self._answered

    def _carry(self) -> None:
        """One exchange for what was posted by now, with the replies of at most half of the slots.

        Of short requests, which all end in the same step, half are then computed while the broker takes the others.
        """
        with self._changed:
            finished, self._finished = self._finished[: self._most_finished], self._finished[self._most_finished :]
            checkpoints, self._checkpoints = self._checkpoints, []
            posted = None if self._finished else self._posted
        answer = self._exchange(finished, checkpoints)
        if answer is not None:
            self._deliver(answer, self._still_owned(answer, finished), checkpoints, posted)

    def _fetch(self, pause_s: float) -> float:
        """Wait for a request at the broker and claim; returns the pause to make after claims that brought nothing.

        Of many idle workers that one request wakes, one gets it. A list that stays full without giving anything would
        otherwise make the others spin.
        """
        if self._is_interrupted(pause_s) or not self._peek():
            return 0.0
        answer = self._exchange([], [])
        if answer is not None:
            owned = self._still_owned(answer, [])
            if owned != self.owned:
                self._deliver(answer, owned, [], None)
                return 0.0
        return min(max(pause_s * 2, FIRST_PAUSE_S), LAST_PAUSE_S)

    def _is_interrupted(self, pause_s: float) -> bool:
        """Wait; whether there was something better to do before the time was up."""
        with self._changed:
            return self._changed.wait_for(lambda: self._posted > self._answered or self._stopping.is_set(), pause_s)

    def _still_owned(self, answer: Exchanged, finished: Sequence[Finish]) -> dict[str, int]:
        """What the worker has of what the broker says that it owns.

        A broker that has lost its last moments may have lost a reply: its request has to lapse, not to be renewed.
        """
        held = self.owned | {claim.id: claim.fence for claim in answer.claims}
        for done in finished:
            if held.get(done.id) == done.fence:
                del held[done.id]
        return {request_id: fence for request_id, fence in answer.owned.items() if held.get(request_id) == fence}

    def _deliver(
        self, answer: Exchanged, owned: dict[str, int], checkpoints: list[Checkpoint], posted: int | None
    ) -> None:
        self._ack = max([self._ack, *(claim.fence for claim in answer.claims)])
        with self._changed:
            self.owned = owned
            self._hungry_s = 0.0  # else this thread would look for more before the loop has seen what there is
            self._answers.append((answer, checkpoints))
            if posted is not None:
                self._answered = posted
            self._changed.notify_all()

    def _peek(self) -> bool:
        try:
            return self._broker.peek(min(max(self._hungry_s, SHORTEST_PEEK_S), self._block_s))
        except BrokerUnreachableError:
            return True  # the exchange that follows says so, and retries

    def _exchange(self, finished: list[Finish], checkpoints: list[Checkpoint]) -> Exchanged | None:
        """Exchange, again and again until the broker answers; None when told to stop."""
        retry_s = FIRST_RETRY_S
        lost_at: float | None = None
        while True:
            try:
                answer = self._broker.exchange(
                    self._worker,
                    slots=self._slots,
                    ack=self._ack,
                    lease_ms=self._lease_ms,
                    reply_ttl_ms=self._reply_ttl_ms,
                    finished=finished,
                    checkpoints=checkpoints,
                )
            except BrokerUnreachableError as error:
                if lost_at is None:
                    lost_at = time.monotonic()
                    log.warning("%s; retrying, nothing is lost meanwhile", error)
                if self._stopping.wait(retry_s):
                    return None
                retry_s = min(retry_s * 2, LAST_RETRY_S)
            else:
                if lost_at is not None:
                    log.warning("the broker is back after %.1f s", time.monotonic() - lost_at)
                return answer
