"""The slot table forgets everything, and keeps the slots apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tokenmill.worker.engine import GenerationParams
from tokenmill.worker.engine.request import Request
from tokenmill.worker.engine.slots import COLUMNS, MATRICES, SlotTable

RICH: dict[str, Any] = {
    "max_tokens": 9,
    "min_tokens": 2,
    "stop_token_ids": [5, 6],
    "stop_sequences": [[1, 2, 3], [4]],
    "ignore_eos": True,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {1: 2.0, 3: -1.0},
    "logprobs": 2,
}


def request(handle: int, **fields: Any) -> Request:
    return Request(
        handle, None, np.array([1, 2, 3], np.int32), np.array([4], np.int32), GenerationParams(**fields), 77, None
    )


def fields_of(table: SlotTable, slot: int) -> dict[str, Any]:
    return {name: getattr(table, name)[slot].tolist() for name in (*COLUMNS, *MATRICES)}


@pytest.mark.parametrize("name", COLUMNS)
def test_admit_writes_every_field_of_the_slot(name: str) -> None:
    fresh, used = SlotTable(2), SlotTable(2)
    fresh.admit(1, request(8), 3, 5)
    column = getattr(used, name)
    column[1] = not COLUMNS[name][1] if column.dtype == np.bool_ else 55
    used.admit(1, request(8), 3, 5)
    assert fields_of(used, 1) == fields_of(fresh, 1)


def test_a_rich_request_changes_every_field() -> None:
    table = SlotTable(1)
    table.admit(0, request(0, **RICH), 0, 5)
    table.computed[0] = 4
    empty = fields_of(SlotTable(1), 0)
    for name, value in fields_of(table, 0).items():
        assert value != empty[name], name


def test_retire_clears_every_field_of_the_slot_and_of_no_other() -> None:
    table, neighbour = SlotTable(3), SlotTable(3)
    for slot in range(3):
        table.admit(slot, request(slot, **RICH), slot, 5)
    for slot in (0, 2):
        neighbour.admit(slot, request(slot, **RICH), slot, 5)
    table.computed[1] = 4
    table.append(np.array([1]), np.array([6], np.int32))
    table.retire(np.array([1]))
    for slot in range(3):
        assert fields_of(table, slot) == fields_of(neighbour, slot)
    assert table.free().tolist() == [1]
    assert table.active().tolist() == [0, 2]


def test_a_slot_after_retirement_serves_a_plain_request_as_a_fresh_one_does() -> None:
    used, fresh = SlotTable(1), SlotTable(1)
    used.admit(0, request(0, **RICH), 0, 5)
    used.retire(np.array([0]))
    for table in (used, fresh):
        table.admit(0, request(1), 1, 5)
    for name in COLUMNS:
        assert getattr(used, name).tolist() == getattr(fresh, name).tolist()
    for name, (_, empty, _) in MATRICES.items():
        if name != "tokens":
            assert (getattr(used, name) == empty).all()
    assert used.output(0) == [4]


def test_a_wider_request_leaves_the_stops_of_its_neighbours_as_they_are() -> None:
    table = SlotTable(2)
    table.admit(0, request(0, stop_sequences=[[4]], stop_token_ids=[9]), 0, 5)
    table.admit(1, request(1, stop_sequences=[[7, 8], [3, 4], [2, 4]], stop_token_ids=[1, 2, 9]), 1, 5)
    kinds, matched = table.stops(np.array([0, 1]))
    assert kinds.tolist() == [3, 0]
    table.append(np.array([0, 1]), np.array([9, 8], np.int32))
    kinds, matched = table.stops(np.array([1, 0]))
    assert kinds.tolist() == [0, 2]
    table.append(np.array([1]), np.array([7], np.int32))
    table.append(np.array([1]), np.array([8], np.int32))
    kinds, matched = table.stops(np.array([1]))
    assert (kinds.tolist(), matched.tolist()) == ([3], [0])


def test_the_context_doubles_up_to_the_limit_of_the_model() -> None:
    table = SlotTable(1, max_context=150)
    table.admit(0, request(0), 0, 5)
    widths = set()
    for token in range(146):
        table.append(np.array([0]), np.array([token], np.int32))
        widths.add(table.tokens.shape[1])
    assert widths == {64, 128, 150}
    assert table.length[0] == 150
    assert table.output(0) == [4, *range(146)]
