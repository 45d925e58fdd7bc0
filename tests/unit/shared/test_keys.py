"""Key names: one hash tag for all keys of a queue."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from tokenmill.shared import lua
from tokenmill.shared.errors import UsageError
from tokenmill.shared.keys import Keys

NAMES = st.from_regex(r"[A-Za-z0-9_.:-]{1,128}", fullmatch=True)


def all_keys(queue: str, name: str) -> list[str]:
    keys = Keys(queue)
    of_name: list[Callable[[str], str]] = [keys.request, keys.reply, keys.tokens, keys.replies, keys.idem, keys.own]
    return [*keys.shared, *(make(name) for make in (*of_name, keys.worker))]


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
        "tm:{default}:requests:high",
        "tm:{default}:requests",
        "tm:{default}:requests:low",
        "tm:{default}:resume",
        "tm:{default}:suspects",
        "tm:{default}:leases",
        "tm:{default}:deadlines",
        "tm:{default}:workers",
        "tm:{default}:solo",
        "tm:{default}:request:x",
        "tm:{default}:reply:x",
        "tm:{default}:tokens:x",
        "tm:{default}:replies:x",
        "tm:{default}:idem:x",
        "tm:{default}:own:x",
        "tm:{default}:worker:x",
    ]


@pytest.mark.parametrize("queue", ["", "{", "a}b", "two words", "x" * 129, "line\n", "é"])
def test_a_queue_name_that_would_break_the_hash_tag_is_refused(queue: str) -> None:
    with pytest.raises(UsageError, match=re.escape("queue name")):
        Keys(queue)


def documentation() -> str:
    return (files("tokenmill.shared") / "scripts" / "README.md").read_text(encoding="utf-8")


def test_the_documentation_lists_every_key() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", documentation().split("\n## Keys")[1], re.MULTILINE)
    listed = [re.sub(":<[a-z]+>", ":x", key) for row in rows for key in re.findall("`([^`]+)`", row)]
    assert sorted(listed) == sorted(key.removeprefix("tm:{q}:") for key in all_keys("q", "x"))


def test_the_documentation_grants_every_command_of_the_scripts() -> None:
    roles = re.findall(r"^\| [a-z]+ \| (`[^|]+) \| `(\+[^`]+)` \|", documentation(), re.MULTILINE)
    assert len(roles) == 3
    for scripts, granted in roles:
        for script in re.findall("`([a-z]+)`", scripts):
            used = re.findall(r"redis\.call\('([A-Z]+)'", lua.source(script).decode())
            assert {f"+{command.lower()}" for command in used} <= set(granted.split())
