"""The batcher in the broker's terms: claims in, checkpoints and replies out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self, cast

from tokenmill.shared.broker import Checkpoint, Claim, Finish
from tokenmill.shared.protocol import Cell, FinishReason, ReplyError
from tokenmill.shared.settings import Settings
from tokenmill.worker.engine import CallableModel, ContinuousBatcher, Finished, Step, StepLimit
from tokenmill.worker.intake import RejectedError, take_in
from tokenmill.worker.meter import Meter
from tokenmill.worker.models import LoadedModel
from tokenmill.worker.running import RunningRequest, rejection

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Totals:
    """Counters since the worker started."""

    requests: int = 0  # replies made
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0  # model calls
    row_steps: int = 0  # active rows, summed over the steps
    reused_tokens: int = 0  # not computed, because an earlier request began with them
    preemptions: int = 0  # times that a running request had to give its memory to older ones


@dataclass(slots=True)
class Output:
    """What a step has for the broker."""

    replies: list[Finish] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)


class Runner:
    """Runs claimed requests in the slots of one batcher; knows neither threads nor connections.

    New requests wait for a fuller batch, up to ``max_wait_s``, or until all slots are filled, and start together; what
    runs goes on meanwhile. Without ``max_step_tokens`` the batcher keeps long prompts from holding up the others.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        worker: str,
        slots: int,
        max_step_tokens: int | None,
        checkpoint_tokens: int,
        max_wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots = slots
        self.totals = Totals()
        self.meter = Meter()
        self.draining = False  # new requests start at once
        self._model = loaded.model
        self._tokenizer = loaded.tokenizer
        self._worker = worker
        self._checkpoint_tokens = checkpoint_tokens
        self._max_wait_s = max_wait_s
        self._held_since: float | None = None  # since when the oldest of the new requests has been waiting
        self._clock = clock
        self._requests: dict[int, RunningRequest] = {}  # by the batcher's handle
        # The batcher wants room for a prefill token beside a full batch of decoding rows.
        limit: StepLimit = "auto" if max_step_tokens is None else max(max_step_tokens, slots + 1)
        self._batcher = ContinuousBatcher(loaded.model, slots, max_step_tokens=limit)

    @classmethod
    def of(cls, loaded: LoadedModel, settings: Settings, *, worker: str) -> Self:
        """A runner as the settings want it."""
        return cls(
            loaded,
            worker=worker,
            slots=settings.slots,
            max_step_tokens=settings.max_step_tokens,
            checkpoint_tokens=settings.checkpoint_tokens,
            max_wait_s=settings.max_wait_ms / 1000,
        )

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def hold_s(self) -> float:
        """Seconds for which nothing has to be computed, because all requests there are wait for a fuller batch."""
        if self._held_since is None or self._batcher.n_running or self.draining:
            return 0.0
        return max(0.0, self._held_since + self._max_wait_s - self._clock())

    @property
    def padded_tokens(self) -> int:
        """Cells that a model of rectangles has computed for nothing."""
        return self._model.n_padded if isinstance(self._model, CallableModel) else 0

    def cells(self) -> list[Cell | None]:
        """What runs in each slot; None in a free one. Any thread may ask."""
        requests, now = dict(self._requests), self._clock()
        running = (requests.get(handle) for handle in self._batcher.slots())
        return [request.cell(now) if request else None for request in running]

    def admit(self, claim: Claim) -> Finish | None:
        """Take one claim in; the reply at once if it cannot run."""
        try:
            intake = take_in(claim.payload, self._model, self._tokenizer)
            request = RunningRequest(
                claim, intake, self._tokenizer, worker=self._worker, now=self._clock(), meter=self.meter
            )
            handle = self._batcher.submit(intake.prompt, output=claim.token_ids, params=intake.params)
        except RejectedError as error:
            return self._reject(claim, ReplyError(code=error.code, message=error.message))
        except ValueError as error:
            return self._reject(claim, ReplyError(code="invalid_request", message=str(error)))
        except Exception as error:  # a bug of ours must not keep the other requests from being served
            log.exception("request %s could not be taken in", claim.id)
            return self._reject(claim, ReplyError(code="internal", message=repr(error)))
        self._requests[handle] = request
        if self._held_since is None:
            self._held_since = self._clock()
        self.totals.prompt_tokens += len(intake.prompt)
        if claim.deliveries == 1:
            self.meter.note_claim(claim.queue_ms / 1000, len(intake.prompt))
        return None

    def keep_only(self, owned: Mapping[str, int]) -> None:
        """Drop every request that is not among these (id → fence): it belongs to another worker now."""
        for handle, request in list(self._requests.items()):
            if owned.get(request.id) != request.fence:
                self._drop(handle)

    def drop(self, request_id: str, fence: int) -> None:
        """Drop one request that belongs to another worker now."""
        for handle in self._handles(request_id, fence):
            self._drop(handle)

    def end(self, request_id: str, fence: int, reason: FinishReason) -> list[Finish]:
        """End a request that was cancelled or is past its deadline: its reply, with the output so far, if it runs."""
        replies = []
        for handle in self._handles(request_id, fence):
            self._batcher.cancel(handle, reason)
            replies.append(self._requests.pop(handle).finish(reason, now=self._clock()))
        self.totals.requests += len(replies)
        return replies

    def rewind(self, request_id: str, n_known: int) -> None:
        """The broker knows only so many output tokens of a request: checkpoint again from there."""
        for request in self._requests.values():
            if request.id == request_id:
                request.rewind(n_known)

    def step(self) -> Output:
        """Run one step; raises ModelSickError when the model fails on every row."""
        if self._batcher.idle:
            return Output()
        may_start, begin = self._may_start(), self._clock()
        step = self._batcher.step(admit=may_start)
        if not self._batcher.n_waiting:
            self._held_since = None  # also where those who waited have been cancelled
        now = self._clock()
        if step.n_rows:
            self.meter.note_step(now - begin, rows=step.n_rows, tokens=step.n_tokens)
        output = Output(replies=self._advance(step, now))
        for request in self._requests.values():
            if due := request.checkpoint(1 if request.stream else self._checkpoint_tokens):
                output.checkpoints.append(due)
        self._count(output, step)
        return output

    def checkpoint_all(self) -> list[Checkpoint]:
        """What the broker does not know yet of the requests that still run."""
        return [due for request in self._requests.values() if (due := request.checkpoint(1))]

    def _may_start(self) -> bool:
        """Whether requests without a slot get one now: those that are new may have to wait for others."""
        if self._held_since is not None:
            waited = self._clock() - self._held_since >= self._max_wait_s
            if waited or self.draining or len(self._requests) >= self.slots:
                self._held_since = None
        return self._held_since is None

    def _count(self, output: Output, step: Step) -> None:
        totals = self.totals
        totals.requests += len(output.replies)
        totals.output_tokens += len(step.handles)
        totals.steps += step.n_rows > 0
        totals.row_steps += step.n_rows
        totals.reused_tokens = self._batcher.n_reused
        if self._batcher.n_preempted and not totals.preemptions:
            log.warning(
                "memory for keys and values is short: younger requests wait until older ones end; "
                "raise --kv-memory-mib, or lower --slots"
            )
        totals.preemptions = self._batcher.n_preempted

    def _advance(self, step: Step, now: float) -> list[Finish]:
        """Hand the step's tokens to their requests; the replies of those that ended."""
        replies = []
        ended = {finished.handle: finished for finished in step.finished}
        for handle, token_id in zip(step.handles.tolist(), step.tokens.tolist(), strict=True):
            request = self._requests.get(handle)
            if request is None:
                continue
            stopped = handle in ended and ended[handle].finish_reason == "stop"
            request.push(token_id, step.logprobs.get(handle), stopped=stopped, now=now)
            if request.stop_reason is not None:
                self._batcher.cancel(handle, "stop", request.stop_reason)
                replies.append(self._requests.pop(handle).finish("stop", stop_reason=request.stop_reason, now=now))
        for handle, finished in ended.items():
            if (request := self._requests.pop(handle, None)) is not None:
                replies.append(_reply(request, finished, now))
        return replies

    def _handles(self, request_id: str, fence: int) -> list[int]:
        return [h for h, request in self._requests.items() if (request.id, request.fence) == (request_id, fence)]

    def _drop(self, handle: int) -> None:
        request = self._requests.pop(handle)
        self._batcher.cancel(handle)
        log.warning("request %s belongs to another worker now: dropped", request.id)

    def _reject(self, claim: Claim, error: ReplyError) -> Finish:
        self.totals.requests += 1
        self.meter.note_reply("error", claim.age_ms / 1000, len(claim.token_ids))
        return rejection(claim, error, worker=self._worker)


def _reply(request: RunningRequest, finished: Finished, now: float) -> Finish:
    error = None if finished.error is None else ReplyError(code="model_error", message=finished.error)
    stop_reason = cast("int | str | None", finished.stop_reason)  # the wire has no stop sequences of tokens
    return request.finish(finished.finish_reason, stop_reason=stop_reason, error=error, now=now)
