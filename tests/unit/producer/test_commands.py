"""The producer's verbs: what stops them before the broker, and what they print."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tokenmill.producer import batch, demo, enqueue, workplace
from tokenmill.producer.info import as_dict, as_text
from tokenmill.shared import cli
from tokenmill.shared.broker import QueueInfo, TokenEntry
from tokenmill.shared.protocol import Request

from .fakes import EMPTY_QUEUE, FakeBroker, make_error, make_reply, make_worker

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> FakeBroker:
    """The broker that ``enqueue`` talks to; it has a worker, so that nothing is warned about."""
    fake = FakeBroker()
    fake.workers = [make_worker()]
    monkeypatch.setattr(enqueue, "open_broker", lambda _redis, _queue: fake)
    monkeypatch.delenv("TOKENMILL_REDIS", raising=False)
    return fake


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.run(arguments)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("verb", [["enqueue", "Hi"], ["info"], ["worker"]])
def test_without_a_broker_the_code_is_3_and_the_line_says_how_to_name_one(
    verb: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENMILL_REDIS", raising=False)
    code, out, err = run(*verb, capsys=capsys)
    assert (code, out) == (3, "")
    assert err == "tokenmill: error: no broker is named: give --redis redis://HOST:PORT/0 or set TOKENMILL_REDIS\n"


@pytest.mark.parametrize("verb", [["enqueue", "Hi"], ["info"], ["worker", "--model", "toy"]])
def test_an_unreachable_broker_is_code_3_and_named(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(*verb, "--redis", NOWHERE, capsys=capsys)
    assert (code, out) == (3, "")
    assert err.startswith("tokenmill: error: no broker at 127.0.0.1:1")
    assert err.count("\n") == 1


def test_run_with_an_unreachable_broker_is_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "Hi"}\n')
    code, out, err = run("run", str(source), "--redis", NOWHERE, capsys=capsys)
    assert (code, out) == (3, "")
    assert "no broker at" in err


def test_a_broken_file_is_code_2_and_nothing_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a broken file must not get this far")

    monkeypatch.setattr(batch, "workplace", fail)
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Hi", "max_tokens": -4}\n')
    target = tmp_path / "out.jsonl"
    code, out, err = run("run", str(tmp_path / "in.jsonl"), "-o", str(target), capsys=capsys)
    assert (code, out) == (2, "")
    assert "in.jsonl:2: max_tokens: expected `int` >= 1" in err
    assert not target.exists()


def test_the_input_is_no_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "Hi"}\n')
    code, _, err = run("run", str(source), "-o", str(source), capsys=capsys)
    assert code == 2
    assert "is the input" in err
    assert source.read_text() == '{"prompt": "Hi"}\n'


def sent(broker: FakeBroker) -> Request:
    [request] = broker.requests()
    return request


def test_enqueue_without_waiting_prints_the_id(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("enqueue", "Hi", "--no-wait", "--id", "a", capsys=capsys) == (0, "a\n", "")
    assert sent(broker).prompt == "Hi"


def test_enqueue_sends_the_sampling_fields_that_were_given(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_TOP_K", "7")
    options = [
        "--max-tokens",
        "9",
        "--temperature",
        "0.5",
        "--seed",
        "0",
        "--stop",
        "END",
        "--stop",
        ".",
        "--ignore-eos",
    ]
    run("enqueue", "Hi", "--no-wait", *options, capsys=capsys)
    request = sent(broker)
    assert (request.max_tokens, request.temperature, request.seed, request.top_k) == (9, 0.5, 0, 7)
    assert (list(request.stop), request.ignore_eos, request.include_stop) == (["END", "."], True, False)


def test_enqueue_sends_what_the_broker_goes_by(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--priority", "high", "--timeout-ms", "1500", "--idempotency-key", "order-7"]
    run("enqueue", "Hi", "--no-wait", "--id", "a", *options, capsys=capsys)
    request = sent(broker)
    assert (request.priority, request.timeout_ms, request.idempotency_key) == ("high", 1500, "order-7")
    assert broker.options["a"]["priority"] == "high"
    assert broker.options["a"]["timeout_ms"] == 1500
    assert run("enqueue", "Hi", "--no-wait", "--id", "a", *options, capsys=capsys) == (0, "a\n", "")
    code, _, err = run("enqueue", "Ho", "--no-wait", "--id", "b", *options, capsys=capsys)
    assert code == 2
    assert err == "tokenmill: error: idempotency_key: another request was sent under `order-7`\n"


def test_enqueue_without_waiting_is_refused_by_a_full_queue_in_one_line(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.full_until = 100.0
    code, out, err = run("enqueue", "Hi", "--no-wait", capsys=capsys)
    assert (code, out) == (1, "")
    assert err.startswith("tokenmill: error: the queue is full (")
    assert err.endswith("): try again in 1.5 s\n")


def test_enqueue_waits_for_room_no_longer_than_its_timeout(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.full_until = 100.0
    code, _, err = run("enqueue", "Hi", "--timeout", "0.01", capsys=capsys)
    assert code == 1
    assert "the queue is full" in err


@pytest.mark.parametrize("options", [[], ["--stream"]])
def test_ctrl_c_cancels_the_request_that_is_waited_for(
    options: list[str], broker: FakeBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(broker, "wait_reply", interrupt)
    monkeypatch.setattr(broker, "read_tokens", interrupt)
    code, _, err = run("enqueue", "Hi", "--id", "a", *options, capsys=capsys)
    assert code == 130
    assert broker.cancelled == ["a"]
    assert "request `a` is cancelled" in err


def test_enqueue_chat_sends_a_turn_of_the_user(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    run("enqueue", "Hi", "--chat", "--no-wait", capsys=capsys)
    messages = sent(broker).messages
    assert isinstance(messages, list)
    assert [(message.role, message.content) for message in messages] == [("user", "Hi")]


def test_enqueue_reads_the_text_from_stdin(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    run("enqueue", "-", "--no-wait", capsys=capsys)
    assert sent(broker).prompt == "from a pipe"


def answering(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, reply: Any) -> None:
    """Have the broker answer as soon as something is enqueued."""
    enqueue_once = broker.enqueue

    def enqueue_and_answer(*arguments: Any, **options: Any) -> Any:
        enqueued = enqueue_once(*arguments, **options)
        broker.answer(reply)
        return enqueued

    monkeypatch.setattr(broker, "enqueue", enqueue_and_answer)


def test_enqueue_prints_the_text_or_the_reply(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(broker, monkeypatch, make_reply("a", "Hello!"))
    assert run("enqueue", "Hi", "--id", "a", capsys=capsys) == (0, "Hello!\n", "")
    code, out, _ = run("enqueue", "Hi", "--id", "a", "--json", capsys=capsys)
    assert (code, json.loads(out)["text"]) == (0, "Hello!")


def test_enqueue_stream_prints_the_pieces(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(broker, monkeypatch, make_reply("a", "Hello!"))
    texts = ("Hel", "lo!")
    broker.entries["a"] = [TokenEntry(f"{n}-0", n, [n], text, None) for n, text in enumerate(texts, start=1)]
    broker.entries["a"].append(TokenEntry("3-0", 0, [], "", "stop"))
    assert run("enqueue", "Hi", "--id", "a", "--stream", capsys=capsys) == (0, "Hello!\n", "")
    code, out, _ = run("enqueue", "Hi", "--id", "a", "--stream", "--json", capsys=capsys)
    pieces = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert pieces[:2] == [{"id": "a", "text": "Hel"}, {"id": "a", "text": "lo!"}]
    assert pieces[2]["finish_reason"] == "stop"


def test_enqueue_of_a_failing_request_is_code_1(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(broker, monkeypatch, make_error("a", "the model is out"))
    code, _, err = run("enqueue", "Hi", "--id", "a", capsys=capsys)
    assert code == 1
    assert err == "tokenmill: error: the request failed (model_error): the model is out\n"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--max-tokens", "0"], "max_tokens: expected `int` >= 1"),
        (["--stream", "--no-wait"], "--stream and --no-wait exclude each other"),
        (["--id", "no spaces"], "id: expected `str` matching"),
    ],
)
def test_enqueue_with_wrong_options_is_code_2(
    options: list[str], what: str, broker: FakeBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run("enqueue", "Hi", *options, capsys=capsys)
    assert code == 2
    assert err.startswith(f"tokenmill: error: {what}")
    assert broker.payloads == {}


def test_a_queue_without_workers_is_warned_about_once(caplog: pytest.LogCaptureFixture, broker: FakeBroker) -> None:
    broker.workers = []
    shared = workplace.SharedQueue(broker.as_broker())
    with caplog.at_level("WARNING", logger="tokenmill"):
        shared.check()
        shared.check()
    assert [record.message for record in caplog.records] == [
        "no worker is alive on queue `mine`; waiting for one: tokenmill worker --queue mine"
    ]


def test_a_suspended_queue_is_warned_about(caplog: pytest.LogCaptureFixture, broker: FakeBroker) -> None:
    broker.suspend()
    with caplog.at_level("WARNING", logger="tokenmill"):
        workplace.SharedQueue(broker.as_broker()).check()
    assert caplog.messages == ["queue `mine` is suspended; to go on: tokenmill queue resume --queue mine"]


def test_looking_after_the_workers_outlasts_an_outage(broker: FakeBroker) -> None:
    broker.away_until = 1.0
    workplace.SharedQueue(broker.as_broker()).check()


INFO = EMPTY_QUEUE._replace(
    waiting=5,
    normal=3,
    resume=2,
    running=3,
    oldest_age_ms=1500,
    workers=[make_worker("w1", busy=3, requests=17, output_tokens=400)],
    stats={"enqueued": 25, "reclaimed": 1},
)


def test_info_as_json_has_the_workers_status_beside_their_names() -> None:
    info = as_dict(INFO)
    assert info["waiting"] == 5
    assert info["stats"] == {"enqueued": 25, "reclaimed": 1}
    assert info["workers"] == [
        {
            "name": "w1",
            "age_ms": 100,
            "busy": 3,
            "state": "running",
            "model": "toy",
            "slots": 8,
            "requests": 17,
            "output_tokens": 400,
        }
    ]


def test_info_as_text_tells_the_queue_the_workers_and_the_counters() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(as_text("mine", INFO))
    text = out.getvalue()
    assert "queue mine: 5 waiting (the oldest for 1.5 s), 2 begun before, 3 running" in text
    assert "3 / 8" in text
    assert "25 enqueued, 1 reclaimed" in text


def told(info: QueueInfo) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(as_text("mine", info))
    return out.getvalue()


def test_info_fits_into_80_columns_and_tells_what_memory_saved_and_cost() -> None:
    workers = [
        make_worker(f"host:{n}:8ed231", busy=8, model="smollm2", requests=20_111, output_tokens=1_230_000)
        for n in (30142, 30143)
    ]
    for worker in workers:
        worker.status.update(output_tokens_per_s=1091.4, reused_tokens=123_456, preemptions=6)
    out = io.StringIO()
    Console(file=out, width=80).print(as_text("mine", INFO._replace(workers=workers, stats={})))
    lines = out.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[4].split()[-5:] == ["20111", "1230000", "1091.4", "0.1", "s"]
    assert lines[5] == "since these workers started: 246912 prompt tokens reused, 12 preemptions"


def test_info_says_when_no_worker_is_alive() -> None:
    assert "no worker is alive" in told(INFO._replace(workers=[], stats={}))


def test_info_tells_what_is_out_of_the_ordinary_and_only_that() -> None:
    text = told(INFO._replace(high=4, low=1, suspects=2, dead=7, suspended=True, model="toy-1", max_depth=9))
    for part in (
        "4 of high priority, 1 of low priority, 2 begun before, 2 suspected of crashing workers, 3 running",
        "dead letters: 7, see `tokenmill dead list --queue mine`",
        "until `tokenmill queue resume --queue mine`",
        "model: toy-1",
        "limit: 9 waiting requests",
    ):
        assert part in text
    usual = told(INFO)
    for word in ("priority", "suspect", "dead", "suspended", "limit", "model:"):
        assert word not in usual
    assert "limit: 500 queued tokens, 20 are queued" in told(INFO._replace(max_queued_tokens=500, queued_tokens=20))


def test_the_example_prompts_are_what_the_demo_promises() -> None:
    lines = [json.loads(line) for line in demo.example_prompts().read_text().splitlines()]
    assert len(lines) >= 24
    assert {"prompt", "messages"} <= {field for line in lines for field in line}
    assert sum("stop" in line for line in lines) >= 3
    assert sum("seed" in line and line["temperature"] > 0 for line in lines) >= 3
    assert len({line["max_tokens"] for line in lines}) >= 5
    assert sum(line["max_tokens"] for line in lines) <= 2500
