"""One chaos run from its plan to its verdict."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import redis

from tokenmill.shared.broker import Broker

from .arena import Arena
from .config import Config
from .disturbances import DISTURBANCES, calm
from .evidence import Evidence, gather
from .ledger import Ledger
from .plan import Plan, Planned, draw_plan
from .producers import Traffic
from .proxy import Proxy
from .server import Server, embedded_binary
from .watcher import Watcher
from .workers import Workers, blpop_worker, our_worker

_TICK_S = 0.02
_TRY_AGAIN_S = 0.3
_LOOK_S = 0.1  # between two looks at the replies
_GIVEN_UP_S = 3.0  # the control: without a new reply for so long, no more will come
_START_S = 30.0
_PATIENCE = 30.0  # leases that the workers get to register again


class Director:
    """Runs the plan: lets requests in, lets things go wrong, and in the end waits until all is well again."""

    def __init__(self, plan: Plan, arena: Arena, traffic: Traffic) -> None:
        self.struck: Counter[str] = Counter()  # disturbances that happened
        self._strikes = deque(plan.strikes)
        self._arena = arena
        self._traffic = traffic
        self._looked_at = 0.0
        self._answered_at = time.monotonic()

    @property
    def _hopeless(self) -> bool:
        """Whether something has broken already that no disturbance may break: what follows tells nothing more."""
        return self._arena.workers.hopeless or bool(self._arena.ledger.problems)

    def disturb(self, limit_s: float) -> None:
        """Until all requests have been sent and all disturbances have come."""
        deadline = time.monotonic() + limit_s
        while self._traffic.sending or self._strikes or not self._arena.quiet:
            if self._hopeless:
                return
            if time.monotonic() > deadline:
                self._arena.ledger.complain(f"the run did not end within {limit_s:.0f} s")
                return
            self._tick()
            while self._strikes and self._strikes[0].at <= self._traffic.progress:
                self._strike(self._strikes.popleft())

    def settle(self, limit_s: float) -> None:
        """Until every accepted request has its reply and every reader is done, or it is hopeless."""
        calm(self._arena)
        deadline = time.monotonic() + limit_s
        while self._arena.ledger.owed or self._traffic.unread:
            given_up = self._arena.config.control and time.monotonic() - self._answered_at > _GIVEN_UP_S
            if time.monotonic() > deadline or given_up or self._hopeless:
                return
            self._tick()

    def wait_for_workers(self) -> None:
        """Until all workers have registered, and nothing waits or runs: not even poison."""
        deadline = time.monotonic() + _PATIENCE * self._arena.lease_s
        while time.monotonic() < deadline:
            self._tick()
            with suppress(redis.RedisError):
                info = self._arena.broker.info()
                ready = {worker.status.get("pid") for worker in info.workers}
                if ready == set(self._arena.workers.pids) and info.waiting == info.running == 0:
                    return
        self._arena.ledger.complain("not all workers came back, or not only they are registered")

    def _tick(self) -> None:
        time.sleep(_TICK_S)
        self._arena.workers.supervise()
        self._arena.server.check()
        self._arena.do_what_is_due()
        if time.monotonic() - self._looked_at > _LOOK_S:
            self._look()

    def _strike(self, planned: Planned) -> None:
        """Let a disturbance happen, or try again soon if it cannot happen now."""
        self._arena.rng = random.Random(planned.seed)
        if DISTURBANCES[planned.name].strike(self._arena):
            self.struck[planned.name] += 1
        else:
            self._arena.later(_TRY_AGAIN_S, lambda: self._strike(planned))

    def _look(self) -> None:
        """Find out which requests have been answered."""
        self._looked_at = time.monotonic()
        owed = self._arena.ledger.owed
        with suppress(redis.RedisError):
            pipeline = self._arena.direct.pipeline(transaction=False)
            for request_id in owed:
                pipeline.exists(self._arena.broker.keys.reply(request_id))
            answered = [request_id for request_id, there in zip(owed, pipeline.execute(), strict=True) if there]
            self._arena.ledger.answered(answered)
            if answered:
                self._answered_at = time.monotonic()


def run(config: Config, folder: Path) -> Evidence:
    """Play the plan of a config against a broker of its own, which writes into ``folder``; leaves no process behind."""
    plan = draw_plan(config)
    with ExitStack() as stack:
        arena = stack.enter_context(_set_up(config, folder))
        watcher = Watcher(arena.server.connect, arena.broker.keys.reply(""))
        watcher.start()
        stack.callback(watcher.stop)
        traffic = _traffic(config, plan, arena)
        stack.callback(traffic.stop)
        director = Director(plan, arena, traffic)
        _wait_until_idle(arena)
        started = time.monotonic()
        traffic.start()
        director.disturb(config.limit_s or 3 * config.duration_s + 60)
        director.settle(config.settle_s)
        if not config.control:
            director.wait_for_workers()
        took_s = time.monotonic() - started
        traffic.stop()
        watcher.stop()
        arena.workers.leave()
        return gather(arena, struck=director.struck, posted=watcher.replies, took_s=took_s)


def _wait_until_idle(arena: Arena) -> None:
    """Until every worker waits at the broker, ours or the control's."""
    deadline = time.monotonic() + _START_S
    while arena.direct.info("clients")["blocked_clients"] < len(arena.workers):
        if time.monotonic() > deadline:
            raise RuntimeError("the workers did not start")
        time.sleep(_TICK_S)


@contextmanager
def _set_up(config: Config, folder: Path) -> Iterator[Arena]:
    """Broker, proxy and workers of a run."""
    with ExitStack() as stack:
        server = Server(config.server or embedded_binary(), folder, config.fsync, config.seed)
        stack.callback(server.kill)
        server.start()
        server.wait_ready()
        proxy = Proxy(server.port, config.seed)
        proxy.start()
        stack.callback(proxy.stop)
        workers = Workers(_worker_argv(config, proxy.url), config.workers, folder)
        stack.callback(workers.kill)
        direct = stack.enter_context(server.connect())
        broker = Broker(direct, config.queue)
        yield Arena(config, server, proxy, workers, Ledger(), direct, broker, random.Random(config.seed))


def _worker_argv(config: Config, url: str) -> list[str]:
    if config.control:
        return blpop_worker(url, config.queue, delay_ms=config.delay_ms)
    return our_worker(
        url,
        config.queue,
        slots=config.slots,
        delay_ms=config.delay_ms,
        lease_ms=config.lease_ms,
        checkpoint_tokens=config.checkpoint_tokens,
    )


def _traffic(config: Config, plan: Plan, arena: Arena) -> Traffic:
    return Traffic(
        plan.requests,
        arena.ledger,
        queue_name=config.queue,
        proxied_url=arena.proxy.url,
        connect_directly=arena.server.connect,
        per_second=config.requests / config.duration_s,
        window=config.window,
    )
