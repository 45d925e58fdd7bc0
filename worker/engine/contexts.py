"""Contexts: in which context of the model a request is computed, and what those of earlier requests still hold."""

from __future__ import annotations

from typing import Final

import numpy as np

from .model import CachingModel, Model
from .slots import Int32, Int64, SlotTable

_ROOM_TO_GROW: Final = 16  # tokens for which every running request must find memory when another is admitted
_WORTH_WAITING: Final = 16  # tokens in common with a request in prefill for which a later one waits


def contexts_for(model: Model, table: SlotTable) -> Contexts:
    """The contexts that suit the model: of its own, if it has any, else one for each slot."""
    return CachingContexts(model, table) if isinstance(model, CachingModel) else Contexts(table)


class Contexts:
    """One context for each slot, of the same number: nothing is kept, and memory is the model's own concern."""

    n_reused = 0

    def __init__(self, table: SlotTable) -> None:
        self._table = table

    def fit(self, n_tokens: int) -> bool:
        """Whether there is memory for one more request, which has so many tokens by now."""
        return True

    def take(self, slot: int) -> int:
        """The number of an empty context for a request that is being admitted."""
        return slot

    def ready(self) -> Int64:
        """Slots whose tokens may be computed now."""
        return self._table.active()

    def begin(self, slots: Int64) -> bool:
        """Before these slots are computed: see what need not be; True if there is less to compute now."""
        return False

    def make_room(self, slots: Int64, lengths: Int64) -> bool:
        """Find memory for so many more tokens of these slots; False if there is none."""
        return True

    def park(self, slots: Int64) -> None:
        """Keep what is computed of requests that leave their slots."""

    def clear(self, slots: Int64) -> None:
        """Keep nothing of requests whose computation failed."""


class CachingContexts(Contexts):
    """Contexts that stay parked when their requests leave, for requests that begin with the same tokens.

    The least recently used are emptied first, when memory or numbers run out. What a context holds is known from the
    slot table while a request runs in it, and from a copy of the tokens once it is parked.
    """

    def __init__(self, model: CachingModel, table: SlotTable) -> None:
        super().__init__(table)
        n_slots = len(table.handle)
        if model.n_contexts < n_slots:
            raise ValueError(f"the model has {model.n_contexts} contexts, fewer than the capacity of {n_slots}")
        self.n_reused = 0  # tokens that did not have to be computed, since the start
        self._model = model
        for context in range(model.n_contexts):
            model.truncate(context, 0)  # of whatever an earlier batcher left there
        self._empty = list(range(model.n_contexts))[::-1]
        self._tokens = np.empty((model.n_contexts, 0), np.int32)  # [N, C] what parked contexts hold
        self._lengths = np.zeros(model.n_contexts, np.int64)  # [N] tokens of parked contexts; 0: not parked
        self._used = np.zeros(model.n_contexts, np.int64)  # [N] when a context was last parked or shared
        self._clock = 0
        self._fresh = np.zeros(n_slots, np.bool_)  # [B] whether a slot has not begun
        # A slot that has not begun waits while the slot ``_source`` has this serial and holds fewer tokens than this.
        self._source = np.zeros(n_slots, np.int64)  # [B]
        self._source_serial = np.zeros(n_slots, np.int64)  # [B]
        self._source_length = np.zeros(n_slots, np.int64)  # [B] 0: waits for nothing

    def fit(self, n_tokens: int) -> bool:
        """Whether one more request fits beside the running ones, each with room to grow; parked contexts may go."""
        running = self._table.active()
        if not len(running):
            return True
        contexts = np.append(self._table.context[running], self._spare())
        ends = np.append(self._table.length[running], n_tokens) + _ROOM_TO_GROW
        if self._table.max_context is not None:
            ends = np.minimum(ends, self._table.max_context)
        # Where not even all parked tokens would do, they stay: they may be those of the very request that waits.
        lacking = self._shortage(contexts, ends)
        return lacking <= 0 or (lacking <= int(self._lengths.sum()) and self._evict_until_fits(contexts, ends))

    def take(self, slot: int) -> int:
        """The number of an empty context."""
        self._fresh[slot] = True
        self._source_length[slot] = 0
        context = self._spare()
        self._empty.pop()
        return context

    def ready(self) -> Int64:
        """Running slots but those that wait for an older one to compute the beginning that they share."""
        table, source = self._table, self._source
        waits = (table.serial[source] == self._source_serial) & (table.computed[source] < self._source_length)
        return np.flatnonzero((table.handle >= 0) & ~(waits & self._fresh))

    def begin(self, slots: Int64) -> bool:
        """Let slots that begin share what others have computed, or wait for what others are about to compute."""
        fresh = slots[self._fresh[slots]]
        changed = False
        for slot in fresh[np.argsort(self._table.serial[fresh])].tolist():
            changed |= self._begin(slot)
        return changed

    def make_room(self, slots: Int64, lengths: Int64) -> bool:
        """Empty parked contexts until these slots can grow; False if even that is not enough."""
        return self._evict_until_fits(self._table.context[slots], self._table.computed[slots] + lengths)

    def park(self, slots: Int64) -> None:
        """Keep what is computed; a context without tokens is empty."""
        for slot in slots.tolist():
            context, length = int(self._table.context[slot]), int(self._table.computed[slot])
            self._model.truncate(context, length)  # it has more if the request was cancelled during the model call
            if not length:
                self._empty.append(context)
                continue
            if length > self._tokens.shape[1]:
                grow = self._table.tokens.shape[1] - self._tokens.shape[1]
                self._tokens = np.pad(self._tokens, ((0, 0), (0, grow)))
            self._tokens[context, :length] = self._table.tokens[slot, :length]
            self._lengths[context] = length
            self._touch(context)

    def clear(self, slots: Int64) -> None:
        """Empty the contexts: what made a request fail may be in its keys and values."""
        for context in self._table.context[slots].tolist():
            self._empty_out(context)

    def _begin(self, slot: int) -> bool:
        """Share or wait; True if the slot has less to compute in this step than it had."""
        table, serial = self._table, self._table.serial[slot]
        known = table.tokens[slot, : table.length[slot] - 1]  # the last one is to be answered, thus computed
        in_slots = _common(table.tokens, table.length, known)
        in_slots[slot] = 0
        coming = np.where(table.serial < serial, in_slots, 0)
        held = np.minimum(in_slots, table.computed)
        parked = _common(self._tokens, self._lengths, known)
        best = max(held.max(), parked.max())
        # Older slots compute all that they know, so none waits for ever: the oldest of all waits for nobody.
        if coming.max() >= best + _WORTH_WAITING:
            source = coming.argmax()
            self._source[slot], self._source_serial[slot] = source, table.serial[source]
            self._source_length[slot] = coming[source]
            return True
        self._fresh[slot] = False
        if not best:
            return False
        source = table.context[held.argmax()] if held.max() == best else parked.argmax()
        return self._share(int(source), slot, int(best))

    def _share(self, source: int, slot: int, length: int) -> bool:
        """Begin a slot with the first tokens of another context; True if the model shares any."""
        target = int(self._table.context[slot])
        if not self._evict_until_fits(np.array([target]), np.array([length]), keep=source):
            return False
        shared = self._model.share(source, target, length)
        self._table.computed[slot] = shared
        self.n_reused += shared
        self._touch(source)
        return shared > 0

    def _shortage(self, contexts: Int64, ends: Int64) -> int:
        return self._model.shortage(contexts.astype(np.int32), ends.astype(np.int32))

    def _evict_until_fits(self, contexts: Int64, ends: Int64, keep: int = -1) -> bool:
        while self._shortage(contexts, ends) > 0:
            if not self._evict(keep):
                return False
        return True

    def _evict(self, keep: int = -1) -> bool:
        """Empty the parked context that was not used for longest; False if there is none."""
        parked = np.flatnonzero(self._lengths)
        parked = parked[parked != keep]
        if not len(parked):
            return False
        self._empty_out(int(parked[self._used[parked].argmin()]))
        return True

    def _empty_out(self, context: int) -> None:
        self._model.truncate(context, 0)
        self._lengths[context] = 0
        self._empty.append(context)

    def _spare(self) -> int:
        """The number of an empty context; a free slot finds one, if need be by emptying a parked one."""
        if not self._empty:
            self._evict()
        return self._empty[-1]

    def _touch(self, context: int) -> None:
        self._clock += 1
        self._used[context] = self._clock


def _common(rows: Int32, lengths: Int64, tokens: Int32) -> Int64:
    """With how many of ``tokens`` each row ``[n, C]``, of which so many ``[n]`` count, begins ``[n]``."""
    width = min(len(tokens), rows.shape[1])
    if not width:
        return np.zeros(len(rows), np.int64)
    differ = rows[:, :width] != tokens[:width]
    common: Int64 = np.where(differ.any(axis=1), differ.argmax(axis=1), width)
    return np.minimum(common, lengths)
