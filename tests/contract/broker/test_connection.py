"""Waiting, errors that a person can read, and brokers in trouble: full, restarted, of another layout, not there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tokenmill.shared.broker import Broker, Checkpoint, connect
from tokenmill.shared.embedded import EmbeddedBroker
from tokenmill.shared.errors import BrokerUnreachableError, TokenmillError, UsageError

from .driver import LEASE_MS, TTL_MS, Worker, body, done


def test_peek_moves_nothing_and_takes_nothing(broker: Broker, client: Any) -> None:
    assert broker.peek(0) is False
    for name in ("a", "b"):
        broker.enqueue(name, body(name))
    assert [broker.peek(1), broker.peek(0)] == [True, True]
    assert client.lrange(broker.keys.requests, 0, -1) == [body("a"), body("b")]


def test_every_idle_worker_is_woken_by_one_push(broker: Broker) -> None:
    woken: list[bool] = []
    idle = [threading.Thread(target=lambda: woken.append(broker.peek(2))) for _ in range(8)]
    for thread in idle:
        thread.start()
    broker.enqueue("a", body("a"))
    for thread in idle:
        thread.join()
    assert woken == [True] * 8


def test_peek_sees_what_waits_to_be_resumed(broker: Broker, worker: Worker) -> None:
    broker.enqueue("a", body("a"))
    claim = worker.claim_one()
    broker.release("w", [("a", claim.fence)])
    assert broker.peek(0.01) is True


def test_any_number_of_readers_get_the_reply_and_its_expiry_stays(broker: Broker, client: Any, worker: Worker) -> None:
    broker.enqueue("a", body("a"))
    claim = worker.claim_one()
    got: list[bytes | None] = []
    readers = [threading.Thread(target=lambda: got.append(broker.wait_reply("a", 5))) for _ in range(4)]
    for reader in readers:
        reader.start()
    worker.finish(claim)
    for reader in readers:
        reader.join()
    assert got == [f"a {claim.fence}".encode()] * 4
    assert broker.wait_reply("a", 0) == got[0]
    assert 0 < client.pttl(broker.keys.reply("a")) <= TTL_MS


def test_a_reply_that_does_not_come_is_none_in_time(broker: Broker) -> None:
    assert broker.wait_reply("nobody", 0.05) is None


def test_a_token_reader_waits_for_the_next_entry(broker: Broker, worker: Worker) -> None:
    broker.enqueue("a", body("a"), stream=True)
    claim = worker.claim_one()
    assert broker.read_tokens("a", block_ms=10) == []
    got: list[Any] = []
    reader = threading.Thread(target=lambda: got.extend(broker.read_tokens("a", block_ms=2000)))
    reader.start()
    worker.exchange(checkpoints=[Checkpoint("a", claim.fence, 0, [1], "x")])
    reader.join()
    assert [(entry.start, entry.token_ids, entry.text) for entry in got] == [(0, [1], "x")]


def test_scripts_survive_a_broker_that_forgot_them(broker: Broker, client: Any, worker: Worker) -> None:
    broker.enqueue("a", body("a"))
    client.script_flush()
    assert worker.claim_one().id == "a"


@pytest.fixture
def full(broker: Broker, client: Any, worker: Worker) -> Iterator[Worker]:
    """A worker of a broker at maxmemory, with "a" (which streams) running and "b" waiting."""
    for name in ("a", "b"):
        broker.enqueue(name, body(name), stream=name == "a")
    worker.slots = 1
    worker.claim_one()
    client.config_set("maxmemory", "1mb")
    yield worker
    client.config_set("maxmemory", "0")


def test_a_full_broker_refuses_only_enqueue(broker: Broker, full: Worker) -> None:
    with pytest.raises(TokenmillError, match=r"at 127\.0\.0\.1:\d+ is full \(maxmemory\)"):
        broker.enqueue("c", body("c"))
    [(name, fence)] = full.exchange(slots=0).owned.items()

    assert broker.register("w2", "toy", lease_ms=LEASE_MS) == "toy"  # it takes workers to empty a full queue
    assert full.exchange(checkpoints=[Checkpoint(name, fence, 0, [1], "x")]).checkpoints == [1]
    assert broker.renew("w", [(name, fence)], lease_ms=LEASE_MS, status=b"{}") == []
    assert broker.reclaim(limit=1, lease_ms=LEASE_MS, reply_ttl_ms=TTL_MS) == 0
    assert broker.release("w", [(name, fence)]) == 1
    again = full.claim_one()
    assert full.exchange(done(again, start=1)).finished == [1]
    assert broker.peek(0.01) is False  # "b" went to the freed slot
    assert broker.wait_reply("a", 1) == f"a {again.fence}".encode()
    assert broker.read_tokens("a")[-1].end == "stop"
    assert broker.info().running == 1


def test_a_full_broker_is_watched_by_looking_now_and_then(broker: Broker, full: Worker) -> None:
    assert broker.peek(1) is True
    assert broker.wait_reply("nobody", 0.06) is None


def test_a_queue_says_which_layout_it_has(broker: Broker, client: Any) -> None:
    broker.enqueue("a", body("a"))
    assert client.hget(broker.keys.meta, "layout") == b"2"


@pytest.mark.parametrize("call", ["enqueue", "claim", "renew"])
def test_a_queue_of_another_layout_is_refused(call: str, broker: Broker, client: Any, worker: Worker) -> None:
    broker.enqueue("a", body("a"))
    client.hset(broker.keys.meta, "layout", "0")
    calls: dict[str, Any] = {
        "enqueue": lambda: broker.enqueue("b", body("b")),
        "claim": worker.claim,
        "renew": lambda: broker.renew("w", [], lease_ms=LEASE_MS, status=b"{}"),
    }
    with pytest.raises(TokenmillError, match=r"has layout 0, this tokenmill knows 2: use another queue"):
        calls[call]()
    assert client.keys(f"{broker.keys.meta.removesuffix('meta')}own:*") == []


@pytest.mark.parametrize("request_id", ["", "two words", "a{b}", "x" * 129, "é"])
def test_an_id_that_cannot_be_is_refused_before_it_is_sent(request_id: str, broker: Broker) -> None:
    with pytest.raises(UsageError, match="request id"):
        broker.enqueue(request_id, b"{}")


def test_a_request_over_the_limit_is_refused_before_it_is_sent(client: Any) -> None:
    with pytest.raises(UsageError, match="request a: 101 bytes, more than 100"):
        Broker(client, "q", max_payload_bytes=100).enqueue("a", b"x" * 101)


def test_an_unreachable_broker_is_one_line_with_host_and_port_and_no_secret() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, but it does not listen
        port = nobody.getsockname()[1]
        broker = Broker(connect(f"redis://user:hunter2@127.0.0.1:{port}/0"), "q")
        with pytest.raises(BrokerUnreachableError, match=rf"no broker at 127\.0\.0\.1:{port}: ") as error:
            broker.peek(0.1)
    assert "\n" not in str(error.value)
    for text in (str(error.value), repr(broker), repr(broker._redis)):
        assert "hunter2" not in text


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://user:hunter2@host", "redis://:hunter2@host:99999"])
def test_a_url_that_cannot_be_is_a_usage_error_without_the_password(url: str) -> None:
    with pytest.raises(UsageError, match="redis://HOST:PORT/DB") as error:
        connect(url)
    assert "hunter2" not in str(error.value)


def test_a_lost_answer_is_never_resent_by_the_library() -> None:
    """A server that reads a command and hangs up: it must be asked once."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while len(asked) < 2:
                connection, _ = listener.accept()
                with connection:
                    while (data := connection.recv(65536)) and b"RPUSH" not in data:
                        connection.sendall(b"+OK\r\n" * data.count(b"*"))
                    asked.append(data)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        client = connect(f"redis://127.0.0.1:{listener.getsockname()[1]}/0")
        with pytest.raises(redis.ConnectionError):
            client.rpush("list", "once")
        with pytest.raises(redis.ConnectionError):
            client.rpush("list", "twice")
        server.join()
    assert [b"once" in asked[0], b"twice" in asked[1], len(asked)] == [True, True, 2]


def test_a_broker_that_ends_while_a_worker_waits_is_unreachable() -> None:
    with EmbeddedBroker() as embedded:
        broker = Broker(connect(embedded.url), "q")
        failures: list[BrokerUnreachableError] = []

        def wait() -> None:
            try:
                while True:
                    broker.peek(2)
            except BrokerUnreachableError as error:
                failures.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert broker.info().waiting == 0
    waiting.join()
    assert len(failures) == 1


def test_an_answer_that_ctrl_c_left_unread_is_not_taken_for_the_next_one(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.enqueue("a", body("a"))
    send = redis.Connection.send_packed_command

    def send_and_interrupt(self: redis.Connection, *args: Any, **kwargs: Any) -> None:
        send(self, *args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(redis.Connection, "send_packed_command", send_and_interrupt)
        for call in (lambda: broker.state("a"), lambda: broker.read_replies(["a"])):
            with pytest.raises(KeyboardInterrupt):
                call()
    assert broker.read_replies(["a", "b"]) == [None, None]
    assert broker.state("a") == "waiting"


def test_ctrl_c_while_a_command_is_packed_is_only_an_interrupt(server_url: str) -> None:
    class Interrupted(int):
        def __repr__(self) -> str:  # as when the signal arrives just then
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        connect(server_url).lindex("list", Interrupted(0))
