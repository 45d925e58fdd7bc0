"""Worker processes on a real broker: answers, drains, deaths and zombies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import msgspec
import pytest
import redis

from tokenmill.shared.protocol import Reply

from .workplace import DEADLINE_S, Workplace, long_request, wait_for


def test_a_bare_push_is_answered_on_the_reply_key_by_the_real_model(workplace: Workplace) -> None:
    workplace.start("smollm2")
    raw = redis.Redis.from_url(workplace.url)
    prefix = f"tm:{{{workplace.queue}}}:"
    raw.rpush(prefix + "requests", '{"id":"a","prompt":"The capital of France is","max_tokens":5}')
    key = prefix + "reply:a"
    reply = msgspec.json.decode(raw.blmove(key, key, 30, "LEFT", "LEFT"), type=Reply)  # type: ignore[arg-type]
    assert "Paris" in reply.text
    assert reply.finish_reason == "length"
    assert raw.ttl(key) > 0
    raw.close()


def test_a_drain_finishes_what_runs_and_leaves_no_trace(workplace: Workplace, undisturbed: str) -> None:
    worker = workplace.start()
    request_id = long_request(workplace)
    wait_for(lambda: workplace.tokens(request_id))
    worker.send_signal(signal.SIGTERM)
    assert workplace.client.wait(request_id, DEADLINE_S).text == undisturbed
    assert worker.wait(DEADLINE_S) == 0
    assert workplace.broker.info().workers == []


def test_a_second_signal_leaves_the_rest_to_another_worker(workplace: Workplace, undisturbed: str) -> None:
    first = workplace.start()
    request_id = long_request(workplace)
    wait_for(lambda: workplace.tokens(request_id))
    first.send_signal(signal.SIGTERM)
    # Two signals at once would be one: the kernel does not count them.
    wait_for(lambda: workplace.broker.info().workers[0].status["state"] == "draining")
    first.send_signal(signal.SIGTERM)
    assert first.wait(DEADLINE_S) == 0
    assert workplace.broker.info().resume == 1
    done = workplace.tokens(request_id)
    assert 0 < done < 200
    second = workplace.start("toy")
    reply = workplace.client.wait(request_id, DEADLINE_S)
    assert (reply.text, reply.deliveries) == (undisturbed, 2)
    wait_for(lambda: workplace.broker.info().workers[0].status["output_tokens"] == 200 - done)
    second.terminate()


def test_a_stream_survives_sigkill_without_a_repeated_or_missing_character(
    workplace: Workplace, undisturbed: str
) -> None:
    victim = workplace.start()
    request_id = long_request(workplace, stream=True)
    stream = workplace.client.read(request_id, timeout=DEADLINE_S)
    pieces = []
    for piece in stream:
        pieces.append(piece)
        if len(pieces) == 10:
            victim.kill()
            workplace.start("toy")
    assert "".join(pieces) == stream.reply.text == undisturbed
    assert stream.reply.deliveries == 2


def test_a_worker_stopped_past_its_lease_wakes_up_as_a_harmless_zombie(workplace: Workplace, undisturbed: str) -> None:
    zombie = workplace.start()
    request_id = long_request(workplace)
    wait_for(lambda: workplace.tokens(request_id))
    os.kill(zombie.pid, signal.SIGSTOP)
    workplace.start("toy")
    reply = workplace.client.wait(request_id, DEADLINE_S)
    os.kill(zombie.pid, signal.SIGCONT)
    wait_for(lambda: all(w.busy == w.status["busy"] == 0 for w in workplace.broker.info().workers))
    assert (reply.text, reply.deliveries) == (undisturbed, 2)
    assert workplace.broker.info().stats["finished_length"] == 1


def test_a_worker_ends_when_the_process_that_started_it_is_killed(workplace: Workplace) -> None:
    command = workplace.command("toy")
    script = "import os, subprocess, sys; subprocess.run([*sys.argv[1:], '--parent-pid', str(os.getpid())])"
    parent = subprocess.Popen([sys.executable, "-c", script, *command], start_new_session=True)
    wait_for(workplace.registered)
    parent.kill()
    parent.wait()
    wait_for(lambda: not workplace.registered())


def module(workplace: Workplace, source: str) -> str:
    (workplace.folder / "black_box.py").write_text(source)
    return "black_box:model_next"


def until_mended(misbehave: str) -> str:
    """A black box that misbehaves until ``mend`` is called."""
    return f"""
import pathlib
def model_next(prefixes):
    if not pathlib.Path("mended").exists():
        {misbehave}
    return [1] * len(prefixes)
"""


def mend(workplace: Workplace) -> None:
    (workplace.folder / "mended").touch()


def test_a_sick_model_gives_everything_back_and_exits_4(workplace: Workplace) -> None:
    spec = module(workplace, until_mended("raise RuntimeError('out of order')"))
    worker = workplace.start(spec)
    request_id = workplace.client.submit([1, 2, 3])
    assert worker.wait(DEADLINE_S) == 4
    stderr = workplace.said(worker)
    assert "out of order" in stderr
    assert "Traceback" not in stderr
    assert workplace.broker.info().waiting == 1
    mend(workplace)
    workplace.start(spec)
    assert workplace.client.wait(request_id, DEADLINE_S).finish_reason == "length"


def test_a_request_that_breaks_the_model_fails_alone(workplace: Workplace) -> None:
    source = """
def model_next(prefixes):
    if any(prefix[0] == 13 for prefix in prefixes):
        raise ValueError("unlucky")
    return [prefix[-1] + 1 for prefix in prefixes]
"""
    workplace.start(module(workplace, source))
    ids = [workplace.client.submit([first], max_tokens=3) for first in (5, 13, 21)]
    replies = [workplace.client.wait(request_id, DEADLINE_S) for request_id in ids]
    assert [reply.token_ids for reply in replies] == [[6, 7, 8], [], [22, 23, 24]]
    assert replies[1].error is not None
    assert (replies[1].error.code, "unlucky" in replies[1].error.message) == ("model_error", True)


def test_a_hung_model_ends_its_worker_which_says_so(workplace: Workplace) -> None:
    spec = module(workplace, until_mended("__import__('threading').Event().wait()"))
    worker = workplace.start(spec, "--stall-timeout", "0.5")
    request_id = workplace.client.submit([1, 2, 3])
    assert worker.wait(DEADLINE_S) == 1
    assert "stall timeout" in workplace.said(worker)
    mend(workplace)
    workplace.start(spec)
    assert workplace.client.wait(request_id, DEADLINE_S).deliveries == 2


def test_a_worker_with_another_model_is_refused_while_the_queue_is_in_use(workplace: Workplace) -> None:
    first = workplace.start("toy")
    other = workplace.start_unready(module(workplace, until_mended("raise RuntimeError")))
    assert other.wait(DEADLINE_S) == 2
    assert "has the model toy" in workplace.said(other)
    first.terminate()
    first.wait(DEADLINE_S)
    assert workplace.start("black_box:model_next").poll() is None


def test_a_cancel_ends_a_running_request_with_its_text_so_far(workplace: Workplace, undisturbed: str) -> None:
    workplace.start()
    running, neighbour = long_request(workplace), long_request(workplace)
    wait_for(lambda: workplace.tokens(running))
    assert workplace.broker.cancel(running) == "signalled"
    reply = workplace.client.wait(running, DEADLINE_S)
    assert reply.finish_reason == "cancelled"
    assert 0 < len(reply.text) < 200
    assert undisturbed.startswith(reply.text)
    assert workplace.client.wait(neighbour, DEADLINE_S).text == undisturbed


def test_a_running_request_ends_at_its_deadline_with_its_text_so_far(workplace: Workplace, undisturbed: str) -> None:
    workplace.start()
    reply = workplace.client.wait(long_request(workplace, timeout_ms=700), DEADLINE_S)
    assert reply.finish_reason == "deadline"
    assert undisturbed.startswith(reply.text)


@pytest.mark.parametrize(
    ("options", "exit_code", "word"),
    [
        (["--redis", "redis://127.0.0.1:1/0"], 3, "127.0.0.1:1"),
        (["--model", "gpt9"], 4, "gpt9"),
        (["--model", "gguf:missing.gguf"], 4, "missing.gguf"),
        (["--slots", "0"], 2, "slots"),
        (["--queue", "a{b"], 2, "queue"),
    ],
)
def test_a_worker_that_cannot_start_says_why_in_one_line(
    workplace: Workplace, options: list[str], exit_code: int, word: str
) -> None:
    process = workplace.start_unready("toy", *options)
    assert process.wait(DEADLINE_S) == exit_code
    [line] = workplace.said(process).splitlines()
    assert line.startswith("tokenmill: error: ")
    assert word in line
