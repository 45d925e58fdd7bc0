"""Hostile payloads: each is a dead letter or gets a reply, no worker dies, good requests between them are answered."""

from __future__ import annotations

from pathlib import Path

from .place import fuzz


def test_hostile_payloads_harm_neither_workers_nor_their_neighbours(tmp_path: Path) -> None:
    outcome = fuzz(count=4_000, seed=1, folder=tmp_path)
    assert (outcome.unaccounted, outcome.wrong, outcome.blamed_us) == ([], [], [])
    assert set(outcome.endings) == {"dead letter", "dead letter, answered", "error", "answered"}
