"""Claims in, checkpoints and replies out, with a model that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tokenmill.shared.broker import Claim, Finish
from tokenmill.worker.engine.model import CallableModel
from tokenmill.worker.models import LoadedModel
from tokenmill.worker.runner import Output, Runner

from ..engine.fakes import CachingFakeModel

END = 256  # a token without text, as an end-of-sequence token is


class ByteTokenizer:
    """One token a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        raise ValueError("this model has no chat template: use `prompt`")

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode(self.render_chat(messages))

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < END else b""


def says(lines: dict[str, str]) -> Any:
    """A model_next that answers each prompt with its line, then ends."""
    scripts = {prompt: [*answer.encode(), END] for prompt, answer in lines.items()}

    def model_next(prefixes: list[list[int]]) -> list[int]:
        tokens = []
        for prefix in prefixes:
            prompt = next(p for p in sorted(scripts, key=len, reverse=True) if bytes(prefix[: len(p)]) == p.encode())
            tokens.append(scripts[prompt][len(prefix) - len(prompt)])
        return tokens

    return model_next


def runner(lines: dict[str, str], **options: Any) -> Runner:
    model = CallableModel(says(lines))
    model.eos_token_ids = (END,)
    loaded = LoadedModel(model=model, tokenizer=ByteTokenizer(), name="scripted", fingerprint="scripted")
    return Runner(loaded, **{"worker": "w", "slots": 4, "max_step_tokens": 64, "checkpoint_tokens": 4, **options})


def claim(request_id: str, fence: int = 1, token_ids: Sequence[int] = (), **payload: Any) -> Claim:
    return Claim(
        id=request_id,
        fence=fence,
        payload=json.dumps({"id": request_id, **payload}).encode(),
        deliveries=1,
        queue_ms=10,
        age_ms=12,
        token_ids=list(token_ids),
        text=bytes(token_ids).decode(errors="ignore"),
    )


def run(subject: Runner) -> Output:
    """Step until nothing runs."""
    whole = Output()
    for _ in range(1000):
        if not len(subject):
            return whole
        output = subject.step()
        whole.replies += output.replies
        whole.checkpoints += output.checkpoints
    raise AssertionError("the requests never ended")


def body(reply: Finish) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(reply.body)
    return decoded


def answer(subject: Runner, *claims: Claim) -> list[dict[str, Any]]:
    rejected = [reply for c in claims if (reply := subject.admit(c))]
    return [body(reply) for reply in rejected + run(subject).replies]


def test_a_request_ends_at_the_end_token_which_counts_but_is_not_shown() -> None:
    [reply] = answer(runner({"hi": "hello"}), claim("a", prompt="hi"))
    assert (reply["text"], reply["finish_reason"], reply["stop_reason"]) == ("hello", "stop", END)
    assert reply["usage"] == {"prompt_tokens": 2, "output_tokens": 6}


def test_a_stop_string_ends_the_row_and_is_named() -> None:
    subject = runner({"hi": "one##two"})
    [reply] = answer(subject, claim("a", prompt="hi", stop=["##", "zz"]))
    assert (reply["text"], reply["finish_reason"], reply["stop_reason"]) == ("one", "stop", "##")
    assert reply["usage"]["output_tokens"] == 5
    assert subject.step().replies == []


def test_a_stop_string_on_the_last_allowed_token_is_a_stop() -> None:
    [reply] = answer(runner({"hi": "one##two"}), claim("a", prompt="hi", stop="##", max_tokens=5))
    assert reply["finish_reason"] == "stop"


def test_the_last_token_allowed_ends_by_length() -> None:
    [reply] = answer(runner({"hi": "one##two"}), claim("a", prompt="hi", max_tokens=3))
    assert (reply["text"], reply["finish_reason"]) == ("one", "length")
    assert "stop_reason" not in reply


def test_a_stop_token_is_shown_only_if_asked_for() -> None:
    lines = {"hi": "one#two"}
    [without] = answer(runner(lines), claim("a", prompt="hi", stop_token_ids=[ord("#")]))
    [with_it] = answer(runner(lines), claim("a", prompt="hi", stop_token_ids=[ord("#")], include_stop=True))
    assert (without["text"], with_it["text"]) == ("one", "one#")


def test_a_prompt_of_token_ids_is_answered_with_token_ids() -> None:
    [reply] = answer(runner({"hi": "yo"}), claim("a", prompt=[104, 105]))
    assert (reply["token_ids"], reply["text"]) == ([121, 111], "yo")


def test_checkpoints_come_every_few_tokens_and_the_rest_with_the_reply() -> None:
    subject = runner({"hi": "0123456789"})
    subject.admit(claim("a", fence=7, prompt="hi"))
    output = run(subject)
    assert [(c.id, c.fence, c.start, c.text) for c in output.checkpoints] == [("a", 7, 0, "0123"), ("a", 7, 4, "4567")]
    assert body(output.replies[0])["text"] == "0123456789"


def test_a_stream_gets_every_token_at_once_and_its_chunks_join_to_the_text() -> None:
    subject = runner({"hi": "hé🙂!"})
    subject.admit(claim("a", prompt="hi", stream=True))
    output = run(subject)
    assert [c.start for c in output.checkpoints] == list(range(len(output.checkpoints)))
    joined = "".join(c.text for c in output.checkpoints) + output.replies[0].text
    assert joined == body(output.replies[0])["text"] == "hé🙂!"


@pytest.mark.parametrize("known", range(9))
def test_a_resumed_request_goes_on_where_its_checkpoint_ends(known: int) -> None:
    text = "ab##cé##"
    token_ids = list(text.encode())[:known]
    subject = runner({"hi": text})
    [reply] = answer(subject, claim("a", token_ids=token_ids, prompt="hi", stop="é##"))
    assert (reply["text"], reply["stop_reason"]) == ("ab##c", "é##")
    assert reply["usage"]["output_tokens"] == 9
    assert ("ttft_ms" in reply) == (known == 0)


def test_a_rewound_request_sends_again_what_the_broker_lost() -> None:
    subject = runner({"hi": "0123456789"})
    subject.admit(claim("a", prompt="hi"))
    for _ in range(5):
        subject.step()
    subject.rewind("a", 2)
    [again] = subject.checkpoint_all()
    assert (again.start, again.text) == (2, "234")


def test_what_another_worker_owns_is_dropped_without_a_reply() -> None:
    subject = runner({"hi": "hello", "yo": "ok"})
    subject.admit(claim("a", fence=1, prompt="hi"))
    subject.admit(claim("b", fence=2, prompt="yo"))
    subject.keep_only({"a": 9, "b": 2})
    assert [body(r)["id"] for r in run(subject).replies] == ["b"]


@pytest.mark.parametrize("reason", ["cancelled", "deadline"])
def test_a_request_ended_from_outside_is_answered_with_its_output_so_far(reason: Any) -> None:
    subject = runner({"hi": "hello", "yo": "okay"})
    subject.admit(claim("a", fence=5, prompt="hi"))
    subject.admit(claim("b", prompt="yo"))
    subject.step()
    subject.step()
    assert subject.end("a", 4, reason) == []
    [reply] = subject.end("a", 5, reason)
    assert (body(reply)["finish_reason"], body(reply)["text"]) == (reason, "he")
    assert subject.end("a", 5, reason) == []
    assert [body(r)["text"] for r in run(subject).replies] == ["okay"]


def test_a_dropped_request_may_come_back_with_a_new_fence() -> None:
    subject = runner({"hi": "hello"})
    subject.admit(claim("a", fence=1, prompt="hi"))
    subject.step()
    subject.drop("a", 1)
    subject.admit(claim("a", fence=2, prompt="hi"))
    subject.drop("a", 1)
    [reply] = run(subject).replies
    assert (reply.fence, body(reply)["text"]) == (2, "hello")


@pytest.mark.parametrize(
    ("payload", "code", "word"),
    [
        (b"not json", "invalid_request", "JSON"),
        (b'{"id":"x"}', "invalid_request", "prompt"),
        (b'{"id":"x","prompt":""}', "invalid_request", "empty"),
        (b'{"id":"x","prompt":7}', "invalid_request", "prompt"),
        (b'{"id":"x","prompt":"hi","max_tokens":-1}', "invalid_request", "max_tokens"),
        (b'{"id":"x","prompt":"hi","max_tokens":1e400}', "invalid_request", "max_tokens"),
        (b'{"id":"x","prompt":"hi","temperature":1}', "invalid_request", "temperature"),
        (b'{"id":"x","prompt":"hi","logit_bias":{"one":1}}', "invalid_request", "logit_bias"),
        (b'{"id":"x","prompt":[104,-1]}', "invalid_request", "prompt"),
        (b'{"id":"x","prompt":"hi","stop":[""]}', "invalid_request", "stop"),
        (b'{"id":"x","prompt":"hi\xff"}', "invalid_request", ""),
        (b'{"id":"x","messages":[{"role":"user","content":"hi"}]}', "invalid_request", "template"),
        (b'{"id":"x","messages":[{"role":"wizard","content":"hi"}]}', "invalid_request", "role"),
        (b'{"id":"x","prompt":' + b"[" * 5000, "invalid_request", ""),
    ],
)
def test_bad_input_gets_a_reply_that_says_why_and_harms_nobody(payload: bytes, code: str, word: str) -> None:
    subject = runner({"hi": "hello"})
    subject.admit(claim("good", prompt="hi"))
    bad = Claim(id="x", fence=3, payload=payload, deliveries=1, queue_ms=0, age_ms=0, token_ids=[], text="")
    reply = subject.admit(bad)
    assert reply is not None
    assert (reply.id, reply.fence, reply.finish_reason) == ("x", 3, "error")
    assert body(reply)["error"]["code"] == code
    assert word in body(reply)["error"]["message"]
    assert "\n" not in body(reply)["error"]["message"]
    assert [body(r)["text"] for r in run(subject).replies] == ["hello"]


def test_unknown_fields_of_a_newer_producer_are_tolerated() -> None:
    [reply] = answer(runner({"hi": "hello"}), claim("a", prompt="hi", newer={"field": [1]}))
    assert reply["text"] == "hello"


def test_a_prompt_as_long_as_the_context_is_refused() -> None:
    subject = runner({"hi": "hello"})
    subject._model.max_context = 2
    [reply] = answer(subject, claim("a", prompt="hi"))
    assert reply["error"]["code"] == "context_length"


def test_totals_count_what_was_done() -> None:
    subject = runner({"hi": "hello", "yo": "ok"})
    answer(subject, claim("a", prompt="hi"), claim("b", prompt="yo"), claim("c", prompt=""))
    totals = subject.totals
    assert (totals.requests, totals.prompt_tokens, totals.output_tokens) == (3, 4, 9)
    assert (totals.steps, totals.row_steps) == (6, 9)


def test_totals_count_reused_tokens_and_only_steps_that_compute() -> None:
    model = CachingFakeModel(vocab_size=300, eos_token_ids=())
    loaded = LoadedModel(model=model, tokenizer=ByteTokenizer(), name="fake", fingerprint="fake")
    subject = Runner(loaded, worker="w", slots=1, max_step_tokens=None, checkpoint_tokens=4)
    for name in ("a", "b"):
        answer(subject, claim(name, prompt="x" * 21, max_tokens=1))
    assert (subject.totals.reused_tokens, subject.totals.preemptions, subject.totals.steps) == (20, 0, 2)
    subject.admit(claim("c", prompt="x"))
    subject.end("c", 1, "cancelled")
    subject.step()
    assert subject.totals.steps == 2


def test_a_preemption_is_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = CachingFakeModel(vocab_size=300, eos_token_ids=(), n_blocks=16, max_context=60)
    loaded = LoadedModel(model=model, tokenizer=ByteTokenizer(), name="fake", fingerprint="fake")
    subject = Runner(loaded, worker="w", slots=3, max_step_tokens=None, checkpoint_tokens=4)
    replies = answer(subject, *(claim(name, prompt=name, max_tokens=50) for name in "abc"))
    assert [reply["usage"]["output_tokens"] for reply in replies] == [50] * 3
    assert subject.totals.preemptions > 1
    assert [record.message for record in caplog.records if "--kv-memory-mib" in record.message] == [
        "memory for keys and values is short: younger requests wait until older ones end; "
        "raise --kv-memory-mib, or lower --slots"
    ]


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


LINES = dict.fromkeys("abcdef", "hello")


def patient(clock: Clock, **options: Any) -> Runner:
    return runner(LINES, **{"slots": 3, "max_wait_s": 0.5, "clock": clock, **options})


def n_started(subject: Runner) -> int:
    """Rows of the next step."""
    before = subject.totals.row_steps
    subject.step()
    return subject.totals.row_steps - before


def test_new_requests_wait_until_the_oldest_has_waited_long_enough_and_start_together() -> None:
    clock = Clock()
    subject = patient(clock)
    subject.admit(claim("1", prompt="a"))
    assert (n_started(subject), subject.hold_s > 0) == (0, True)
    clock.now += 0.4
    subject.admit(claim("2", prompt="b"))
    assert (n_started(subject), subject.hold_s > 0) == (0, True)
    clock.now += 0.1
    assert (n_started(subject), subject.hold_s > 0) == (2, False)


def test_new_requests_start_as_soon_as_they_fill_the_slots() -> None:
    subject = patient(Clock())
    for name in "abc":
        subject.admit(claim(name, prompt=name))
    assert n_started(subject) == 3


def test_without_a_wait_new_requests_start_at_once() -> None:
    subject = patient(Clock(), max_wait_s=0.0)
    subject.admit(claim("1", prompt="a"))
    assert n_started(subject) == 1


def test_what_runs_goes_on_while_new_requests_wait() -> None:
    clock = Clock()
    subject = patient(clock)
    subject.admit(claim("1", prompt="a"))
    clock.now += 1
    assert n_started(subject) == 1
    subject.admit(claim("2", prompt="b"))
    assert (n_started(subject), subject.hold_s > 0) == (1, False)
    clock.now += 0.5
    assert n_started(subject) == 2


def test_a_drain_starts_those_that_wait_at_once() -> None:
    subject = patient(Clock())
    subject.admit(claim("1", prompt="a"))
    subject.draining = True
    assert n_started(subject) == 1


@pytest.mark.parametrize("reason", ["cancelled", "deadline"])
def test_a_request_that_waits_can_be_ended_and_no_later_one_inherits_its_wait(reason: Any) -> None:
    clock = Clock()
    subject = patient(clock)
    subject.admit(claim("1", fence=5, prompt="a"))
    clock.now += 0.4
    [reply] = subject.end("1", 5, reason)
    assert (body(reply)["finish_reason"], body(reply)["text"]) == (reason, "")
    subject.step()
    assert not subject.hold_s
    subject.admit(claim("2", prompt="b"))
    clock.now += 0.4
    assert n_started(subject) == 0


def test_a_request_that_waits_has_no_checkpoint_and_can_be_dropped() -> None:
    subject = patient(Clock())
    subject.admit(claim("1", fence=5, prompt="a", token_ids=list(b"he")))
    assert (subject.step().checkpoints, subject.checkpoint_all()) == ([], [])
    subject.drop("1", 5)
    subject.step()
    assert (len(subject), subject.hold_s > 0) == (0, False)


def test_logprobs_name_their_tokens_and_spell_out_those_that_are_no_whole_characters() -> None:
    model = CachingFakeModel(vocab_size=300, gives_logits=True)
    loaded = LoadedModel(model=model, tokenizer=ByteTokenizer(), name="fake", fingerprint="fake")
    subject = Runner(loaded, worker="w", slots=1, max_step_tokens=None, checkpoint_tokens=4)
    assert subject.admit(claim("1", prompt="a", max_tokens=1, logprobs=20)) is None
    [reply] = run(subject).replies
    [entry] = body(reply)["logprobs"]
    for token in [entry, *entry["top"]]:
        raw = ByteTokenizer().token_bytes(token["token_id"])
        assert token["text"] == raw.decode(errors="replace")
        assert bytes(token.get("bytes", token["text"].encode())) == raw
    assert {"bytes" in token for token in entry["top"]} == {True, False}
