"""ContinuousBatcher: requests go in, every step computes all running ones at once, finished ones come out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .contexts import contexts_for
from .faults import Answers, ask, check_health
from .model import Batch, Model, ModelNext, as_model
from .params import GenerationParams, token_array
from .request import Finished, FinishReason, Request, Step, StopReason, TokenLogprobs
from .sampling import sample
from .schedule import StepLimit, make_batch, schedule
from .slots import NO_TOKEN, Int64, SlotTable, Stop
from .waiting import AdmissionKey, WaitingQueue

_log = logging.getLogger("tokenmill.engine")
_SEED_MASK: Final = 2**64 - 1


class ContinuousBatcher:
    """Runs up to ``capacity`` requests at once over one model, and refills a slot in the step after it is freed.

    ``max_step_tokens`` bounds the tokens of one model call, so that long prompts never stall the others: a number above
    ``capacity``, or "auto" for as many as slow decoding rows down twofold. ``admission_key`` orders the waiting
    requests (smallest first, ties by arrival); without it they are served in the order of arrival. ``rng`` draws the
    seeds of requests that bring none.

    With a CachingModel, requests share what they begin with, and memory is found by emptying parked contexts, then by
    preemption: the youngest request goes back to the head of the queue, with its output. The oldest one gets on in
    every step and is never preempted, so each request becomes the oldest in its turn, and ends.
    """

    def __init__(
        self,
        model: Model | ModelNext,
        capacity: int,
        *,
        max_step_tokens: StepLimit = None,
        admission_key: AdmissionKey | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        if isinstance(max_step_tokens, int) and max_step_tokens <= capacity:
            raise ValueError(f"max_step_tokens ({max_step_tokens}) must be above the capacity ({capacity})")
        self._model = as_model(model)
        token_array("eos_token_ids", self._model.eos_token_ids, self._model.vocab_size)
        self._capacity = capacity
        self._max_step_tokens = max_step_tokens
        self._rng = np.random.default_rng() if rng is None else rng
        self._table = SlotTable(capacity, self._model.eos_token_ids, self._model.max_context)
        self._contexts = contexts_for(self._model, self._table)
        self._waiting = WaitingQueue(admission_key)
        self._running: dict[int, Request] = {}
        self._cancels: dict[int, tuple[FinishReason, StopReason]] = {}
        self._finished: list[tuple[Finished, Callable[[Finished], object] | None]] = []
        self._n_submitted = 0
        self._n_admitted = 0
        self._n_preempted = 0

    @property
    def free_slots(self) -> int:
        """Slots without a request."""
        return self._capacity - len(self._running)

    @property
    def n_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    @property
    def n_reused(self) -> int:
        """Tokens that did not have to be computed, because an earlier request began with them; since the start."""
        return self._contexts.n_reused

    @property
    def n_preempted(self) -> int:
        """How often a running request had to give its memory to older ones; since the start."""
        return self._n_preempted

    @property
    def idle(self) -> bool:
        """Nothing runs, nothing waits and nothing is left to report."""
        return not (self._running or self._waiting or self._finished)

    def running(self) -> list[int]:
        """Handles of the requests with a slot, in the order of admission."""
        return list(self._running)

    def slots(self) -> list[int]:
        """Handle of the request in each slot; -1 in a free one."""
        handles: list[int] = self._table.handle.tolist()
        return handles

    def waiting(self) -> list[int]:
        """Handles of the requests without a slot, in the order of arrival."""
        return self._waiting.handles()

    def submit(
        self,
        prompt: Sequence[int],
        *,
        output: Sequence[int] = (),
        request_id: Hashable = None,
        callback: Callable[[Finished], object] | None = None,
        params: GenerationParams | None = None,
        **fields: Any,
    ) -> int:
        """Queue a request and return its handle.

        ``output`` resumes a request that has generated these tokens before. ``fields`` are those of GenerationParams,
        in place of ``params``. ``callback`` gets the Finished at the end of the step in which the request ends.
        ValueError when the request cannot be served.
        """
        if params is not None and fields:
            raise ValueError(f"give params or fields of it, not both: {', '.join(fields)}")
        params = GenerationParams(**fields) if params is None else params
        params.check_model(self._model.vocab_size, self._model.gives_logits)
        tokens = token_array("prompt", prompt, self._model.vocab_size)
        if not len(tokens):
            raise ValueError("the prompt is empty")
        limit = self._model.max_context
        if limit is not None and len(tokens) >= limit:
            raise ValueError(f"the prompt has {len(tokens)} tokens and leaves no room in a context of {limit}")
        handle = self._n_submitted
        resumed = token_array("output", output, self._model.vocab_size)
        self._waiting.push(Request(handle, request_id, tokens, resumed, params, self._seed(params), callback))
        self._n_submitted += 1
        return handle

    def cancel(self, handle: int, finish_reason: FinishReason = "cancelled", stop_reason: StopReason = None) -> bool:
        """End a waiting or running request; False when there is no such request (any more).

        It takes effect at the start of the next step, or at the end of the model call under way. The first call counts.
        """
        if handle not in self._running and handle not in self._waiting:
            return False
        self._cancels.setdefault(handle, (finish_reason, stop_reason))
        return True

    def run(self) -> list[Finished]:
        """Step until nothing runs and nothing waits."""
        finished: list[Finished] = []
        while not self.idle:
            finished += self.step().finished
        return finished

    def step(self, *, admit: bool = True) -> Step:
        """Admit (unless told not to), compute one batch, give every complete row its next token, retire what ends.

        ModelSickError when the model fails on everything: no request is lost, and the call may be repeated. What had
        ended by then is reported by the next step.
        """
        self._apply_cancels()
        if admit:
            self._refill()
        slots, batch = self._plan()
        if not len(batch):
            return self._report(batch, np.empty(0, np.int64), np.empty(0, np.int32), {})
        handles = self._table.handle[slots]
        answers = self._ask(slots, batch)
        self._apply_cancels()
        # A request may have been cancelled during the call: only rows that still own their slot go on.
        owned = self._table.handle[slots] == handles
        self._table.computed[slots[owned]] += batch.lengths[owned]
        if answers.failed:
            self._retire_failed({int(slots[row]): why for row, why in answers.failed.items() if owned[row]})
        answers = answers.only(owned[answers.rows])
        return self._advance(batch, slots[answers.rows], answers)

    def _seed(self, params: GenerationParams) -> int:
        if params.seed is not None:
            return params.seed & _SEED_MASK
        return int(self._rng.integers(2**63)) if params.temperature > 0 else 0

    def _apply_cancels(self) -> None:
        cancels, self._cancels = self._cancels, {}
        for handle, (finish_reason, stop_reason) in cancels.items():
            if handle in self._waiting:
                request = self._waiting.remove(handle)
                output = request.output.tolist()
            else:
                request, slot = self._running.pop(handle), self._table.slot_of(handle)
                output = self._table.output(slot)
                self._retire(np.array([slot]))
            self._finish(request, output, len(output), finish_reason, stop_reason)

    def _refill(self) -> None:
        """Admit waiting requests until no slot is free, nothing waits, or there is no memory for the next one."""
        room = True
        while room and self._waiting and self.free_slots:
            resumed = []
            for slot in self._table.free()[: len(self._waiting)].tolist():
                room = self._contexts.fit(self._waiting.peek().n_tokens)
                if not room:
                    break
                request = self._waiting.pop()
                self._table.admit(slot, request, self._n_admitted, self._contexts.take(slot))
                self._running[request.handle] = request
                self._n_admitted += 1
                if len(request.output):
                    resumed.append(slot)
            # The last resumed token may have ended the request already; its slot is then free again.
            if resumed:
                self._retire_stopped(np.array(resumed, np.int64))

    def _plan(self) -> tuple[Int64, Batch]:
        """The slots of the next batch and the batch, for which there is memory."""
        while True:
            slots, lengths = schedule(self._table, self._contexts.ready(), self._max_step_tokens)
            if self._contexts.begin(slots):
                continue  # there is less to compute, so others can have their turn
            # The oldest request is never preempted: alone it fits, as the model promises.
            if not len(slots) or self._contexts.make_room(slots, lengths) or len(self._running) == 1:
                return slots, make_batch(self._table, slots, lengths)
            self._preempt()

    def _preempt(self) -> None:
        """Send the youngest running request back to the head of the queue."""
        slot = int(self._table.serial.argmax())
        request = self._running.pop(int(self._table.handle[slot]))
        self._waiting.push_front(replace(request, output=np.array(self._table.output(slot), np.int32)))
        self._retire(np.array([slot]))
        self._n_preempted += 1

    def _retire(self, slots: Int64) -> None:
        """Free slots; what is computed stays for requests that begin with the same tokens."""
        self._contexts.park(slots)
        self._table.retire(slots)

    def _ask(self, slots: Int64, batch: Batch) -> Answers:
        """The model's answers; failed rows are to blame, because the model can do others."""
        answers = ask(self._model, batch)
        if len(answers.failed) == len(batch):
            self._table.computed[slots[0]] = 0  # the health check empties the context
            check_health(self._model, int(batch.contexts[0]))
        return answers

    def _advance(self, batch: Batch, slots: Int64, answers: Answers) -> Step:
        """Give each answered slot its next token and retire what stops."""
        tokens = answers.best
        logprobs: dict[int, TokenLogprobs] = {}
        if self._model.gives_logits:
            tokens, logprobs = sample(answers.values, answers.best, self._table, slots)
            stuck = tokens == NO_TOKEN
            if stuck.any():
                why = "logit_bias, penalties and min_tokens leave no token to choose"
                self._retire_failed(dict.fromkeys(slots[stuck].tolist(), why))
                slots, tokens = slots[~stuck], tokens[~stuck]
        handles = self._table.handle[slots]
        by_handle = {int(self._table.handle[slot]): entry for slot, entry in logprobs.items()}
        self._table.append(slots, tokens)
        self._retire_stopped(slots)
        return self._report(batch, handles, tokens, by_handle)

    def _retire_failed(self, failed: dict[int, str]) -> None:
        """Retire slots with an error each."""
        for slot, why in failed.items():
            request, output = self._running.pop(int(self._table.handle[slot])), self._table.output(slot)
            self._finish(request, output, len(output), "error", error=why)
        slots = np.array(list(failed), np.int64)
        self._contexts.clear(slots)
        self._table.retire(slots)

    def _retire_stopped(self, slots: Int64) -> None:
        """Retire the slots whose last output token ends them."""
        kinds, matched = self._table.stops(slots)
        ended = np.flatnonzero(kinds)
        if not ended.size:
            return
        slots, kinds, matched = slots[ended], kinds[ended], matched[ended]
        handles = self._table.handle[slots]
        for slot, handle, kind, which in zip(
            *(array.tolist() for array in (slots, handles, kinds, matched)), strict=True
        ):
            request, output = self._running.pop(handle), self._table.output(slot)
            finish_reason, stop_reason, n_stop = _ending(request.params, output, kind, which)
            n_generated = len(output)
            if n_stop and not request.params.include_stop:
                del output[-n_stop:]
            self._finish(request, output, n_generated, finish_reason, stop_reason)
        self._retire(slots)

    def _finish(
        self,
        request: Request,
        output: list[int],
        n_generated: int,
        finish_reason: FinishReason,
        stop_reason: StopReason = None,
        error: str | None = None,
    ) -> None:
        self._cancels.pop(request.handle, None)
        finished = Finished(request.handle, request.request_id, output, n_generated, finish_reason, stop_reason, error)
        self._finished.append((finished, request.callback))

    def _report(
        self, batch: Batch, handles: Int64, tokens: NDArray[np.int32], logprobs: dict[int, TokenLogprobs]
    ) -> Step:
        """Call the callbacks; a callback may submit and cancel, and its exceptions are only logged."""
        ended, self._finished = self._finished, []
        for finished, callback in ended:
            if callback is not None:
                try:
                    callback(finished)
                except Exception:
                    _log.warning("the callback of request %r failed", finished.request_id, exc_info=True)
        return Step(handles, tokens, logprobs, [finished for finished, _ in ended], len(batch), len(batch.tokens))


def _ending(params: GenerationParams, output: list[int], kind: int, which: int) -> tuple[FinishReason, StopReason, int]:
    """finish_reason, stop_reason and the number of output tokens that the matched stop takes."""
    if kind == Stop.SEQUENCE:
        sequence = list(params.stop_sequences[which])
        return "stop", sequence, len(sequence)
    if kind in (Stop.EOS, Stop.TOKEN):
        return "stop", output[-1], 1
    return "length", "context" if kind == Stop.CONTEXT else None, 0
