"""Key names: one hash tag for all keys of a queue."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from tokenmill.shared.errors import UsageError
from tokenmill.shared.keys import Keys

NAMES = st.from_regex(r"[A-Za-z0-9_.:-]{1,128}", fullmatch=True)


def all_keys(queue: str, name: str) -> list[str]:
    keys = Keys(queue)
    of_name: list[Callable[[str], str]] = [keys.request, keys.reply, keys.tokens, keys.own, keys.worker]
    return [*keys.shared, *(make(name) for make in of_name)]


@given(queue=NAMES, name=NAMES)
def test_all_keys_of_a_queue_are_distinct_and_share_one_cluster_slot(queue: str, name: str) -> None:
    keys = all_keys(queue, name)
    assert len(set(keys)) == len(keys)
    assert {key_slot(key.encode()) for key in keys} == {key_slot(queue.encode())}


def test_keys_are_spelt_as_the_documentation_spells_them() -> None:
    assert all_keys("default", "x") == [
        "tm:{default}:meta",
        "tm:{default}:stats",
        "tm:{default}:dead",
        "tm:{default}:requests",
        "tm:{default}:resume",
        "tm:{default}:leases",
        "tm:{default}:workers",
        "tm:{default}:request:x",
        "tm:{default}:reply:x",
        "tm:{default}:tokens:x",
        "tm:{default}:own:x",
        "tm:{default}:worker:x",
    ]


@pytest.mark.parametrize("queue", ["", "{", "a}b", "two words", "x" * 129, "line\n", "é"])
def test_a_queue_name_that_would_break_the_hash_tag_is_refused(queue: str) -> None:
    with pytest.raises(UsageError, match=re.escape("queue name")):
        Keys(queue)


def test_the_documentation_lists_every_key() -> None:
    table = (files("tokenmill.shared") / "scripts" / "README.md").read_text(encoding="utf-8").split("\n## Keys")[1]
    listed = re.findall(r"^\| `([a-z]+)(?::<[a-z]+>)?` \|", table, re.MULTILINE)
    assert sorted(listed) == sorted(key.split(":")[2] for key in all_keys("q", "x"))
