"""One claimed request on its way to its reply: text, checkpoints, times."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.shared.broker import Checkpoint, Claim, Finish
from tokenmill.shared.protocol import Cell, FinishReason, Reply, ReplyError, TokenLogprob, TopLogprob, Usage
from tokenmill.worker.engine import TokenLogprobs
from tokenmill.worker.intake import Intake
from tokenmill.worker.meter import Meter
from tokenmill.worker.models.tokenizer import Tokenizer
from tokenmill.worker.text import TextStream

_encode = msgspec.json.Encoder().encode


class RunningRequest:
    """The request behind one row of the batcher.

    A resumed request replays the tokens of its checkpoint, so that its text goes on where the last worker left it.
    """

    def __init__(
        self, claim: Claim, intake: Intake, tokenizer: Tokenizer | None, *, worker: str, now: float, meter: Meter
    ) -> None:
        self.id = claim.id
        self.fence = claim.fence
        self.stream = intake.request.stream
        self._claim = claim
        self._intake = intake
        self._tokenizer = tokenizer
        self._worker = worker
        self._meter = meter
        self._enqueued = now - claim.age_ms / 1000  # on this process's own clock
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._text = TextStream(
            tokenizer.token_bytes if tokenizer else lambda _: b"",
            intake.stop,
            min_tokens=intake.params.min_tokens,
            include_stop=intake.params.include_stop,
        )
        self._token_ids: list[int] = []
        self._deltas: list[str] = []  # one for each token id
        self._logprobs: list[TokenLogprob] = []
        self._n_output = len(claim.token_ids)
        self._n_sent = len(claim.token_ids)
        for token_id in claim.token_ids:
            self._show(token_id)

    def cell(self, now: float) -> Cell:
        """What a look at the slot shows of it."""
        return Cell(int((now - self._enqueued) * 1000), self._n_output)

    @property
    def stop_reason(self) -> str | None:
        """The stop string that the last token completed."""
        return self._text.stop_reason

    def push(self, token_id: int, logprobs: TokenLogprobs | None, *, stopped: bool, now: float) -> None:
        """Take the next output token; a stop token that matched counts as output, but is only shown if asked for."""
        self._n_output += 1
        if self._n_output == 1:  # a resumed request had its first token from another worker
            self._first_token = now
            self._meter.first_token_seconds.note((now - self._enqueued,))
        elif self._last_token is not None:
            self._meter.inter_token_seconds.note((now - self._last_token,))
        self._last_token = now
        if not stopped or self._intake.params.include_stop:
            self._show(token_id)
            if logprobs is not None:
                self._logprobs.append(self._named(logprobs))

    def checkpoint(self, every: int) -> Checkpoint | None:
        """The output since the last checkpoint, where at least ``every`` tokens are due.

        A request with logprobs has none: it would come back without those of the tokens before.
        """
        due = len(self._token_ids) - self._n_sent
        if due < every or self._intake.params.logprobs is not None:
            return None
        start = self._n_sent
        self._n_sent = len(self._token_ids)
        return Checkpoint(self.id, self.fence, start, self._token_ids[start:], "".join(self._deltas[start:]))

    def rewind(self, n_known: int) -> None:
        """The broker knows fewer tokens than were sent (it lost some): checkpoint again from there."""
        self._n_sent = min(self._n_sent, n_known)

    def finish(
        self,
        finish_reason: FinishReason,
        *,
        now: float,
        stop_reason: int | str | None = None,
        error: ReplyError | None = None,
    ) -> Finish:
        """The reply, with the output that no checkpoint carried."""
        start = self._n_sent
        tail = "".join(self._deltas[start:]) + self._text.finish()
        text = "".join(self._deltas[:start]) + tail
        if self._text.stop_reason is not None:  # completed by the flush: a character that was never finished
            finish_reason, stop_reason = "stop", self._text.stop_reason
        reply = Reply(
            id=self.id,
            finish_reason=finish_reason,
            text=text,
            usage=Usage(prompt_tokens=len(self._intake.prompt), output_tokens=self._n_output),
            stop_reason=stop_reason,
            token_ids=self._token_ids if isinstance(self._intake.request.prompt, list) else None,
            logprobs=self._logprobs if self._intake.params.logprobs is not None else None,
            error=error,
            queue_ms=self._claim.queue_ms,
            ttft_ms=self._since_enqueued(self._first_token),
            e2e_ms=self._since_enqueued(now),
            worker=self._worker,
            deliveries=self._claim.deliveries,
        )
        self._meter.note_reply(finish_reason, now - self._enqueued, self._n_output)
        chunk = (self._token_ids[start:], tail) if self.stream else ([], "")
        return Finish(self.id, self.fence, finish_reason, _encode(reply), start, *chunk)

    def _show(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        self._deltas.append(self._text.push(token_id))

    def _since_enqueued(self, moment: float | None) -> float | None:
        return None if moment is None else round((moment - self._enqueued) * 1000, 3)

    def _named(self, logprobs: TokenLogprobs) -> TokenLogprob:
        return TokenLogprob(
            **self._token(logprobs.token_id, logprobs.logprob),
            top=[TopLogprob(**self._token(*other)) for other in logprobs.top],
        )

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id) if self._tokenizer else b""
        text = raw.decode("utf-8", errors="replace")
        return {
            "token_id": token_id,
            "text": text,
            "logprob": logprob,
            "bytes": list(raw) if text.encode() != raw else None,
        }


def rejection(claim: Claim, error: ReplyError, *, worker: str) -> Finish:
    """The reply to a claimed request that never ran."""
    reply = Reply(
        id=claim.id,
        finish_reason="error",
        text=claim.text,
        usage=Usage(prompt_tokens=0, output_tokens=len(claim.token_ids)),
        error=error,
        queue_ms=claim.queue_ms,
        e2e_ms=claim.age_ms,
        worker=worker,
        deliveries=claim.deliveries,
    )
    return Finish(claim.id, claim.fence, "error", _encode(reply), len(claim.token_ids), [], "")
