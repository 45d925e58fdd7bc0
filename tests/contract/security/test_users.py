"""The users of docs/security.md: what they may, what they may not, and nothing more than they need."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from tokenmill.producer.client import Client
from tokenmill.shared.broker import Broker, connect
from tokenmill.shared.protocol import Priority, Reply

ROOT = Path(__file__).parents[3]
USERS = {
    line.split()[2]: line.split()[2:]
    for line in (ROOT / "docs/security.md").read_text().splitlines()
    if line.startswith("ACL SETUSER ") and ">" in line
}
PASSWORDS = {name: next(rule[1:] for rule in rules if rule[0] == ">") for name, rules in USERS.items()}
SCRIPT_USERS = ["producer", "worker", "operator"]


@pytest.fixture(scope="module")
def users(url: str, admin: Any) -> Callable[[str], str]:
    """The URL of a user that the document creates."""
    for rules in USERS.values():
        admin.execute_command("ACL", "SETUSER", *_rules(rules))
    admin.acl_log_reset()
    return lambda name: url.replace("redis://", f"redis://{name}:{PASSWORDS[name]}@")


def _rules(words: list[str]) -> list[str]:
    """Words as Redis takes them: a selector in parentheses is one."""
    return re.findall(r"\([^)]*\)|[^\s()]+", " ".join(words))


@pytest.fixture
def broker(users: Callable[[str], str]) -> Iterator[Callable[[str], Broker]]:
    clients = {name: connect(users(name)) for name in USERS}
    yield lambda name: Broker(clients[name], "default")
    for client in clients.values():
        client.close()


def test_a_worker_and_a_producer_do_their_whole_work(
    users: Callable[[str], str], broker: Callable[[str], Broker], admin: Any, start_worker: Callable[..., Any]
) -> None:
    worker = start_worker(users("worker"))
    client = Client(broker("producer"))
    assert client.generate("mill", timeout=20).error is None
    assert "".join(client.stream("mill", timeout=20)) == client.generate("mill", timeout=20).text
    running = client.submit("mill", max_tokens=2000, ignore_eos=True)
    assert broker("producer").cancel(running) in ("cancelled", "signalled")
    assert client.wait(running, 20).finish_reason == "cancelled"
    refused = client.submit("mill" * 1000)
    assert client.wait(refused, 20).finish_reason == "error"
    worker.stop()
    assert _denied(admin) == []


def test_a_producer_may_use_limits_priorities_deadlines_and_keys(broker: Callable[[str], Broker], admin: Any) -> None:
    producer, worker = broker("producer"), broker("worker")
    priorities: list[Priority] = ["high", "low"]
    for number, priority in enumerate(priorities):
        payload = b'{"id":"p%d","prompt":"x"}' % number
        key = f"key{number}"
        enqueued = producer.enqueue(f"p{number}", payload, priority=priority, timeout_ms=1, cost=9, idempotency_key=key)
        assert enqueued.status == "ok"
    while worker.reclaim(limit=10, lease_ms=60_000, reply_ttl_ms=60_000) or producer.info().waiting:
        pass
    assert [
        msgspec.json.decode(body or b"", type=Reply).finish_reason for body in producer.read_replies(["p0", "p1"])
    ] == [
        "deadline",
        "deadline",
    ]
    assert _denied(admin) == []


def test_an_operator_may_look_suspend_empty_and_handle_dead_letters(
    broker: Callable[[str], Broker], admin: Any
) -> None:
    operator, worker = broker("operator"), broker("worker")
    operator.set_limits(10, 1000)
    operator.suspend()
    operator.resume()
    admin.rpush(operator.keys.requests, "rubbish", "rubbish")
    worker.exchange("w", slots=1, ack=0, lease_ms=1000, reply_ttl_ms=1000)
    letters = operator.dead_letters()
    assert operator.dead_letter(letters[0].entry_id) == letters[0]
    assert operator.requeue_dead(letters[0].entry_id) == "ok"
    assert operator.empty() == 0
    assert operator.drop_dead() > 0
    assert operator.info().waiting == 0
    operator.set_limits(0, 0)
    worker.release("w", [])
    assert _denied(admin) == []


def test_a_service_may_push_and_read_its_reply_and_nothing_else(users: Callable[[str], str], admin: Any) -> None:
    with connect(users("service")) as service:
        service.rpush("tm:{default}:requests:low", "x")
        admin.delete("tm:{default}:requests:low")
        assert service.blmove("tm:{default}:reply:x", "tm:{default}:reply:x", 0.01, "LEFT", "LEFT") is None
        for command in (
            ("RPUSH", "tm:{default}:reply:x", "forged"),
            ("BLMOVE", "tm:{default}:requests", "tm:{default}:reply:x", "LEFT", "LEFT", "0.01"),
            ("LPOP", "tm:{default}:requests"),
            ("LRANGE", "tm:{default}:requests", "0", "-1"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                service.execute_command(*command)
    admin.acl_log_reset()


FORBIDDEN = [
    *["FLUSHALL", "FLUSHDB", "KEYS *", "SCAN 0", "CONFIG GET requirepass", "ACL LIST", "SHUTDOWN", "MONITOR", "INFO"],
    *["SCRIPT FLUSH", "EVAL x 0", "FUNCTION LIST", "CLIENT LIST", "DEBUG SLEEP 0", "SUBSCRIBE c", "PUBLISH c x"],
    *["REPLICAOF NO ONE", "MIGRATE h 1 k 0 1", "SWAPDB 0 1", "SELECT 1", "RENAME tm:{default}:dead tm:{default}:x"],
    *["GET tm:{other}:meta", "RPUSH tm:{other}:requests x", "DEL tm:{other}:requests", "EVALSHA x 1 tm:{other}:meta"],
    *["BLMOVE tm:{other}:reply:a tm:{other}:reply:a LEFT LEFT 1", "LINDEX tm:{default}x 0", "GET unrelated"],
]


@pytest.mark.parametrize("user", USERS)
def test_no_user_may_do_what_its_line_does_not_say(user: str, users: Callable[[str], str], admin: Any) -> None:
    answers = {command: admin.execute_command("ACL", "DRYRUN", user, *command.split()) for command in FORBIDDEN}
    assert [command for command, answer in answers.items() if b"permission" not in answer] == []


@pytest.mark.parametrize("user", SCRIPT_USERS)
def test_a_script_of_ones_own_reaches_no_other_queue(user: str, users: Callable[[str], str], admin: Any) -> None:
    admin.set("tm:{other}:meta", "secret")
    with connect(users(user)) as client:
        sha1 = client.script_load("return redis.call('GET', 'tm:{other}:meta')")
        with pytest.raises(redis.ResponseError, match=r"(?i)permission"):
            client.evalsha(sha1, 0)
    admin.delete("tm:{other}:meta")
    admin.acl_log_reset()


@pytest.mark.parametrize("user", SCRIPT_USERS)
def test_a_user_has_single_commands_that_the_scripts_or_calls_use(user: str) -> None:
    sources = "".join(path.read_text() for path in (ROOT / "shared/scripts").glob("*.lua"))
    called = {command.lower() for command in re.findall(r"redis\.call\('([A-Z]+)'", sources)}
    ours = {"blmove", "evalsha", "exists", "hgetall", "lrange", "ping", "script|load", "xdel", "xlen", "xread", "xtrim"}
    assert {rule[1:] for rule in USERS[user] if rule[0] == "+"} <= called | ours


def test_the_users_have_what_the_readme_of_the_scripts_says() -> None:
    readme = (ROOT / "shared/scripts/README.md").read_text()
    needed = {
        role: set(commands.split()) for role, commands in re.findall(r"^\| (\w+) \| `.*` \| `(\+.*)` \|$", readme, re.M)
    }
    look = set(re.search(r"Looking at a queue \(`info`\) takes `([^`]*)`", readme)[1].split())  # type: ignore[index]
    needed["producer"] |= look  # to warn when no worker is there
    assert look <= needed["operator"]
    assert {user: {rule for rule in USERS[user] if rule[0] == "+"} for user in SCRIPT_USERS} == needed


@pytest.mark.parametrize(
    ("user", "command"),
    [
        ("producer", ("enqueue", "mill", "--no-wait", "--id", "cli")),
        ("producer", ("info",)),
        ("operator", ("info", "--json")),
    ],
)
def test_the_commands_do_with_what_their_users_may(
    user: str, command: tuple[str, ...], users: Callable[[str], str], tokenmill: Callable[..., Any], admin: Any
) -> None:
    said = tokenmill(users(user), *command)
    assert (said.returncode, "error" in said.stderr) == (0, False)
    assert _denied(admin) == []


def test_a_missing_permission_is_one_line_that_names_the_command(
    users: Callable[[str], str], admin: Any, tokenmill: Callable[..., Any]
) -> None:
    said = tokenmill(users("service"), "enqueue", "mill", "--timeout", "5")
    assert said.returncode != 0
    [line] = said.stderr.splitlines()
    assert "permission" in line
    assert PASSWORDS["service"] not in line
    admin.acl_log_reset()


def _denied(admin: Any) -> list[str]:
    """What users were refused since the last look."""
    denied = [entry["object"] for entry in admin.acl_log()]
    admin.acl_log_reset()
    return denied
