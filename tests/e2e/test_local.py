"""The private pool: what it does with workers that cannot start, crash, or talk."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from tokenmill.shared.errors import ModelLoadError, TokenmillError, UsageError
from tokenmill.shared.local import LocalPool
from tokenmill.shared.subprocesses import BACKOFF_S, MAX_CRASHES

from ..waiting import alive, eventually


class Clock:
    """Moves on by a whole backoff with every look, so that nothing has to be waited for."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += BACKOFF_S
        return self.now


def pool(code: str, *, workers: int = 2) -> LocalPool:
    """A pool whose workers run this Python code."""

    def argv(*_: str) -> Sequence[str]:
        return [sys.executable, "-c", code]

    return LocalPool(workers=workers, slots=1, model="toy", queue="q", argv=argv, clock=Clock())


@pytest.mark.parametrize(("code", "error"), [(2, UsageError), (4, ModelLoadError)])
def test_a_worker_that_cannot_start_ends_the_wait_with_its_own_error(code: int, error: type[TokenmillError]) -> None:
    refuse = f"import sys; print('tokenmill: error: this is why', file=sys.stderr); sys.exit({code})"
    with pool(refuse) as stillborn, pytest.raises(error, match=r"^this is why$"):
        stillborn.wait_ready()


def test_workers_that_keep_crashing_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    given_up = pytest.raises(TokenmillError, match="no worker stays alive; the last one said: boom")
    with pool("import sys; sys.exit('boom')", workers=1) as crashing, given_up:
        crashing.wait_ready()
    told = [record.message for record in caplog.records if "ended: exit code 1 (boom)" in record.message]
    assert len(told) == MAX_CRASHES
    assert told[0].endswith("starting it again")
    assert told[-1].endswith("it crashed too often and stays down")


def test_what_workers_say_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pool("import sys, time; print('careful', file=sys.stderr, flush=True); time.sleep(60)") as talking:
        said: list[str] = []

        def both_spoke() -> bool:
            talking.check()
            said.extend(capsys.readouterr().err.splitlines())
            return len(said) == 2

        eventually(both_spoke)
    assert sorted(said) == ["worker 1: careful", "worker 2: careful"]


def test_the_pool_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.shared.local.STOP_GRACE_S", 0.1)
    with pool("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)") as stubborn:
        pids = stubborn.pids
        assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


def test_an_error_in_the_block_ends_the_pool_too() -> None:
    pids: list[int] = []

    def interrupted() -> None:
        with pool("import time; time.sleep(60)") as working:
            pids.extend(working.pids)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)
