"""The threads of one model: they take the work of a step in portions, from shared counters.

A step is a sequence of phases, and a phase a number of portions. Whoever is free takes the next one; a phase is over
when all are done, and nobody waits for a thread that holds none: beside another busy process, the system may put any
thread aside for milliseconds. Who finds nothing to take spins for some microseconds, then sleeps until the phase is
over, so that the system can move a thread with work to the processor that this frees.

Counters carry the number of their step in the upper half. A thread that wakes up too late, in whatever phase of an old
step, finds other numbers and has nothing to do.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numpy.typing import NDArray

from tokenmill.worker.models.fast.kernel import intrinsic, kernel
from tokenmill.worker.models.fast.packing import aligned
from tokenmill.worker.models.fast.vector import I64, Emitter

_STEP, _SLEEPERS, _N_THREADS, _PHASES = 0, 64, 128, 192  # offsets in bytes, a cache line each
_TAKEN, _DONE = 0, 8  # offsets in the line of a phase
_SPINS = 1000  # of about 50 cycles each
_SYS_FUTEX, _WAIT, _WAKE = 202, 128, 129  # x86-64; private to the process


@intrinsic
def _atomic_load(context, address):
    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.intp), generate


@intrinsic
def _fetch_add(context, address, amount):
    """Add to a shared word; returns what it was before."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.intp, types.int64), generate


@intrinsic
def _compare_exchange(context, address, expected, new):
    """Write ``new`` if the word is as expected; returns what it was before."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        pair = builder.cmpxchg(pointer, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 0)

    return types.int64(types.intp, types.int64, types.int64), generate


@intrinsic
def _pause(context):
    def generate(context, builder, signature, arguments):
        Emitter(builder).call("llvm.x86.sse2.pause", ir.VoidType(), ())
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _futex(context, address, operation, value):
    """Sleep while the lower half of a word is ``value``, or wake that many sleepers."""

    def generate(context, builder, signature, arguments):
        call = ir.FunctionType(I64, [I64], var_arg=True)
        function = builder.module.globals.get("syscall") or ir.Function(builder.module, call, "syscall")
        builder.call(function, (I64(_SYS_FUTEX), *arguments, I64(0), I64(0), I64(0)))
        return context.get_dummy_value()

    return types.void(types.intp, types.int64, types.int64), generate


@kernel
def current_step(team):
    """The number of the step that is open."""
    return _atomic_load(team + _STEP)


def phase(work: Any) -> Any:
    """Make a kernel of the kernel ``work(first, last, *arguments)``, for some of a phase's items, that threads share.

    It is called with (team, step, number of the phase, items, tokens of the step, *arguments), by every thread, and
    returns when all items are done. Small steps have few portions, because handing one to another processor costs as
    much as their work: a few tenths of a microsecond. Large ones have many, so that threads end together however they
    are disturbed.
    """

    @kernel
    def share(team, step, number, n_items, n_tokens, *arguments):
        n_threads = _atomic_load(team + _N_THREADS)
        per_thread = 1 if n_threads == 1 else max(1, min(n_tokens // 8, 8))
        size = max(1, -(-n_items // (n_threads * per_thread)))
        n_portions = -(-n_items // size)
        line = team + _PHASES + 64 * number
        n_done = 0
        portion = _take(line + _TAKEN, step, n_portions)
        while portion >= 0:
            work(portion * size, min(portion * size + size, n_items), *arguments)
            n_done += 1
            portion = _take(line + _TAKEN, step, n_portions)
        over = (step << 32) + n_portions
        if n_done > 0 and _fetch_add(line + _DONE, n_done) + n_done == over and _atomic_load(team + _SLEEPERS) > 0:
            _futex(line + _DONE, _WAKE, 1 << 30)
        _wait(team, step, line + _DONE, over)

    return share


@kernel
def _take(address, step, n):
    """The next of ``n`` portions, or -1 when none is left or the step is over."""
    first = step << 32
    taken = _atomic_load(address)
    while taken >> 32 == step and taken < first + n:
        before = _compare_exchange(address, taken, taken + 1)
        if before == taken:
            return taken - first
        taken = before
    return -1


@kernel
def _wait(team, step, address, over):
    spins = 0
    done = _atomic_load(address)
    while done >> 32 == step and done < over:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _fetch_add(team + _SLEEPERS, 1)
            _futex(address, _WAIT, done & 0xFFFFFFFF)
            _fetch_add(team + _SLEEPERS, -1)
        done = _atomic_load(address)


Work = Callable[[int, int], Any]
"""A thread's part of a step: it gets the address of the team's counters and its own number, and shares
its phases."""


class Team:
    """``n_threads`` threads, the caller's among them, that run one function together."""

    def __init__(self, n_threads: int, n_phases: int, work: Work) -> None:
        self._words: NDArray[np.int64] = aligned((_PHASES // 8 + 8 * n_phases,), np.int64)
        self._words[_N_THREADS // 8] = n_threads
        self._counters = self._words[_PHASES // 8 :].reshape(n_phases, 8)[:, :2]
        self._work = work
        self._calls = [queue.SimpleQueue[bool]() for _ in range(1, n_threads)]
        for number, calls in enumerate(self._calls, start=1):
            arguments = (calls, work, self._words, number)
            threading.Thread(target=_help, args=arguments, name=f"kernels-{number}", daemon=True).start()
        weakref.finalize(self, _dismiss, self._calls)

    def run(self) -> None:
        """One step; returns when all its phases are over."""
        step = int(self._words[_STEP // 8]) + 1
        self._counters[:] = step << 32
        self._words[_STEP // 8] = step  # last: a late helper must not see it beside old counters
        for calls in self._calls:
            calls.put(True)
        self._work(self._words.ctypes.data, 0)


def _help(calls: queue.SimpleQueue[bool], work: Work, words: NDArray[np.int64], number: int) -> None:
    """What a helper does all its life; it holds no reference to its team, which may therefore be forgotten."""
    while calls.get():
        work(words.ctypes.data, number)


def _dismiss(helpers: list[queue.SimpleQueue[bool]]) -> None:
    for calls in helpers:
        calls.put(False)
