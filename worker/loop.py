"""One worker process: wires the runner to the broker by an exchange and leases, until told to stop."""

from __future__ import annotations

import logging
import time

from tokenmill.shared.broker import Broker, Checkpoint, Exchanged, Finish
from tokenmill.shared.errors import BrokerUnreachableError
from tokenmill.shared.settings import Settings
from tokenmill.worker.engine import ModelSickError
from tokenmill.worker.exchange import Exchange
from tokenmill.worker.leases import Leases, Pulse
from tokenmill.worker.models import LoadedModel
from tokenmill.worker.monitor import Monitor
from tokenmill.worker.runner import Runner
from tokenmill.worker.signals import StopSignal

log = logging.getLogger(__name__)

EXIT_DONE, EXIT_MODEL_SICK = 0, 4
REFILL_WAIT_S = 0.005  # how long a step with free slots waits for the broker: little beside a step
HAND_OVER_S = 5.0  # how long the broker has to take the last replies and checkpoints


class Worker:
    """A process's one loop: take what the broker answered, run a step, post what it produced."""

    def __init__(
        self,
        broker: Broker,
        loaded: LoadedModel,
        settings: Settings,
        *,
        name: str,
        stop: StopSignal,
        monitor: Monitor,
    ) -> None:
        self._broker = broker
        self._settings = settings
        self._name = name
        self._model = loaded.name
        self._stop = stop
        self._pulse = Pulse()
        self._runner = Runner.of(loaded, settings, worker=name)
        self._exchange = Exchange(
            broker,
            name,
            slots=settings.slots,
            lease_ms=settings.lease_ms,
            reply_ttl_ms=settings.reply_ttl_ms,
            block_s=settings.block_s,
        )
        self._leases = Leases(
            broker,
            name,
            owned=lambda: self._exchange.owned,
            status=lambda: monitor.status(self._runner, loaded.name),
            pulse=self._pulse,
            lease_ms=settings.lease_ms,
            reply_ttl_ms=settings.reply_ttl_ms,
            stall_timeout_s=settings.stall_timeout_s,
        )
        monitor.watch(self._runner, self._pulse, self._leases, model=loaded.name)

    def run(self) -> int:
        """Work until told to stop; returns the exit code. Raises BrokerUnreachableError if the broker is away now."""
        self._leases.start()
        self._exchange.start()
        log.info("worker %s is ready: model %s, %d slots", self._name, self._model, self._settings.slots)
        try:
            while not self._stop.requested:
                self._turn()
            self._drain()
        except ModelSickError as error:
            log.error("the model fails on every request (%s): giving %d of them back", error, len(self._runner))
            return EXIT_MODEL_SICK
        finally:
            self._hand_over()
        return EXIT_DONE

    def _turn(self) -> None:
        block_s, hold_s = self._settings.block_s, self._runner.hold_s
        if hold_s or not len(self._runner):
            answers = self._exchange.await_work(min(hold_s or block_s, block_s))
        else:
            answers = self._exchange.collect(REFILL_WAIT_S if len(self._runner) < self._settings.slots else 0.0)
        for answer, checkpoints in answers:
            self._take(answer, checkpoints)
        ended = self._end_lost()
        with self._pulse:
            output = self._runner.step()
        replies = ended + output.replies
        room = 0 < len(self._runner) < self._settings.slots and not self._runner.hold_s
        if replies or output.checkpoints or room:
            self._exchange.post(replies, output.checkpoints)

    def _take(self, answer: Exchanged, checkpoints: list[Checkpoint]) -> None:
        self._runner.keep_only(answer.owned)
        for checkpoint, result in zip(checkpoints, answer.checkpoints, strict=True):
            if result < 0:
                self._runner.rewind(checkpoint.id, -1 - result)
        if rejected := [reply for claim in answer.claims if (reply := self._runner.admit(claim))]:
            self._exchange.post(rejected, [])

    def _end_lost(self) -> list[Finish]:
        """Go by what the renewals told: end what was cancelled or is late, drop what others own."""
        replies = []
        for lost in self._leases.take_lost():
            if lost.why == "fenced":
                self._runner.drop(lost.id, lost.fence)
            else:
                replies += self._runner.end(lost.id, lost.fence, lost.why)
        return replies

    def _drain(self) -> None:
        """Claim nothing more, and finish what ends within the grace period."""
        self._runner.draining = True
        self._exchange.claim_no_more()
        deadline = time.monotonic() + self._settings.drain_grace_s
        log.info("draining: %d requests run, up to %.0f s", len(self._runner), self._settings.drain_grace_s)
        while len(self._runner) and not self._stop.urgent and time.monotonic() < deadline:
            self._turn()

    def _hand_over(self) -> None:
        """Checkpoint what still runs and leave it to other workers, free of charge."""
        self._exchange.claim_no_more()
        self._exchange.post([], self._runner.checkpoint_all())
        taken = self._exchange.close(HAND_OVER_S)
        self._leases.stop()
        try:
            released = self._broker.release(self._name, list(self._exchange.owned.items()))
        except BrokerUnreachableError as error:
            log.warning("%s; what still ran goes to other workers when its lease ends", error)
        else:
            log.info("stopped%s; %d requests left to other workers", "" if taken else " in a hurry", released)
