"""What callers rely on: stops, limits, cancels, callbacks, admission and the reports of each step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mypy import api as mypy

from tokenmill.worker.engine import Batch, ContinuousBatcher, Finished, GenerationParams, ModelNext

from .fakes import EOS, FakeModel, generate

EXAMPLE = """
batcher = ContinuousBatcher(model_next, capacity=8)
batcher.submit(prompt=[1, 2, 3], max_tokens=64, stop_sequences=[[13, 13]], callback=print)
batcher.run()
"""
TYPED = """
from tokenmill.worker.engine import ContinuousBatcher
def model_next(prefixes: list[list[int]]) -> list[int]: return [len(prefix) for prefix in prefixes]
"""


def saying(*script: int) -> ModelNext:
    """A model that says the script after a prompt of one token."""
    return lambda prefixes: [script[len(prefix) - 1] for prefix in prefixes]


def counting(prefixes: list[list[int]]) -> list[int]:
    return [prefix[-1] + 1 for prefix in prefixes]


def finish(model: Any, prompt: list[int] | None = None, **fields: Any) -> Finished:
    batcher = ContinuousBatcher(model, capacity=1)
    batcher.submit(prompt or [1], **fields)
    [finished] = batcher.run()
    return finished


def test_the_five_line_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(EXAMPLE, {"ContinuousBatcher": ContinuousBatcher, "model_next": counting})  # noqa: S102
    assert "output=[4, 5, 6" in capsys.readouterr().out


def test_the_five_line_example_passes_the_type_checker(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    example = tmp_path / "example.py"
    example.write_text(TYPED + EXAMPLE)
    out, err, status = mypy.run(["--config-file", str(pytestconfig.rootpath / "pyproject.toml"), str(example)])
    assert status == 0, out + err


@pytest.mark.parametrize(
    ("script", "fields", "output", "n_generated", "stop_reason"),
    [
        ((5, 6, 7), {"stop_token_ids": [7]}, [5, 6], 3, 7),
        ((5, 6, 7), {"stop_token_ids": [9, 7], "include_stop": True}, [5, 6, 7], 3, 7),
        ((1, 1, 1, 2), {"stop_sequences": [[1, 1, 2]]}, [1], 4, [1, 1, 2]),
        ((1, 1, 1, 2), {"stop_sequences": [[1, 1, 2]], "include_stop": True}, [1, 1, 1, 2], 4, [1, 1, 2]),
        ((3, 4, 5), {"stop_sequences": [[9], [4, 5], [5]]}, [3], 3, [4, 5]),
        ((3, 4, 5), {"stop_sequences": [[5], [4, 5]]}, [3, 4], 3, [5]),
        ((3, 4, 5), {"stop_sequences": [[4, 5]], "stop_token_ids": [5]}, [3, 4], 3, 5),
        ((3, 4, 5), {"stop_sequences": [[4, 5]], "max_tokens": 3}, [3], 3, [4, 5]),
        ((5, 5, 5, 5), {"stop_token_ids": [5], "min_tokens": 3}, [5, 5], 3, 5),
        ((5, 6, 5, 6), {"stop_sequences": [[5, 6]], "min_tokens": 3}, [5, 6], 4, [5, 6]),
    ],
)
def test_a_stop_ends_the_output_and_is_left_out_unless_asked_for(
    script: tuple[int, ...], fields: dict[str, Any], output: list[int], n_generated: int, stop_reason: Any
) -> None:
    finished = finish(saying(*script), **fields)
    assert (finished.output, finished.n_generated) == (output, n_generated)
    assert (finished.finish_reason, finished.stop_reason) == ("stop", stop_reason)


def test_a_stop_sequence_never_reaches_into_the_prompt() -> None:
    finished = finish(counting, [4, 5], stop_sequences=[[5, 6], [4, 5, 6], [6, 7]])
    assert (finished.output, finished.stop_reason) == ([], [6, 7])


def test_max_tokens_is_a_length_even_before_min_tokens_are_free_of_stops() -> None:
    finished = finish(saying(5, 5), stop_token_ids=[5], min_tokens=2, max_tokens=2)
    assert (finished.output, finished.finish_reason) == ([5], "stop")
    finished = finish(saying(5, 6), max_tokens=2)
    assert (finished.output, finished.finish_reason, finished.stop_reason) == ([5, 6], "length", None)


def test_eos_comes_before_a_stop_token_and_can_be_ignored() -> None:
    class Ends(FakeModel):
        def forward(self, batch: Batch) -> Any:
            return np.full(int(batch.complete.sum()), EOS)

    assert finish(Ends()).stop_reason == EOS
    assert finish(Ends(), ignore_eos=True, max_tokens=3).output == [EOS] * 3
    assert finish(Ends(), ignore_eos=True, stop_token_ids=[EOS]).finish_reason == "stop"
    assert finish(Ends(), include_stop=True, min_tokens=2).output == [EOS, EOS]


def test_a_full_context_ends_the_output() -> None:
    finished = finish(FakeModel(max_context=6), [1, 2, 3], ignore_eos=True)
    assert (finished.n_generated, finished.finish_reason, finished.stop_reason) == (3, "length", "context")
    finished = finish(FakeModel(max_context=6), [1, 2, 3], ignore_eos=True, max_tokens=3)
    assert (finished.n_generated, finished.finish_reason, finished.stop_reason) == (3, "length", None)


@pytest.mark.parametrize(
    ("output", "fields", "expected"),
    [
        ([4, 5], {"max_tokens": 2}, ([4, 5], "length", None)),
        ([4, 5], {"max_tokens": 1}, ([4, 5], "length", None)),
        ([4, 5], {"stop_token_ids": [5]}, ([4], "stop", 5)),
        ([4, 5], {"stop_sequences": [[4, 5]], "include_stop": True}, ([4, 5], "stop", [4, 5])),
        ([4, 0], {}, ([4], "stop", 0)),
        ([4, 5, 6, 7, 7], {"ignore_eos": True}, ([4, 5, 6, 7, 7], "length", "context")),
    ],
)
def test_a_resumed_request_that_has_ended_already_finishes_without_the_model(
    output: list[int], fields: dict[str, Any], expected: Any
) -> None:
    model = FakeModel(max_context=6)
    finished = finish(model, [1, 2], output=output, **fields)
    assert (finished.output, finished.finish_reason, finished.stop_reason) == expected
    assert finished.n_generated == len(output)
    assert not model.calls


def test_a_request_resumed_to_its_end_leaves_its_slot_to_the_next_one_in_the_same_step() -> None:
    batcher = ContinuousBatcher(FakeModel(), capacity=1)
    batcher.submit([1], output=[4], max_tokens=1)
    batcher.submit([1], output=[4], max_tokens=1)
    last = batcher.submit([1], max_tokens=5, ignore_eos=True)
    step = batcher.step()
    assert len(step.finished) == 2
    assert step.handles.tolist() == [last]


BAD_SUBMISSIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "the prompt is empty"),
    ({"prompt": [1, 8]}, "prompt: 8 is not a token id of this model (0 to 7)"),
    ({"prompt": [-1]}, "prompt: -1 is not"),
    ({"prompt": [2**70]}, "prompt must be a flat list"),
    ({"prompt": [1.5]}, "prompt must be a flat list of integer token ids"),
    ({"prompt": ["a"]}, "prompt must be a flat list"),
    ({"prompt": [[1], [2, 3]]}, "prompt must be a flat list"),
    ({"prompt": [[1, 2]]}, "prompt must be a flat list"),
    ({"prompt": [1] * 20}, "the prompt has 20 tokens and leaves no room in a context of 20"),
    ({"output": [9]}, "output: 9 is not"),
    ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, not 0"),
    ({"max_tokens": 2**31}, "max_tokens must be"),
    ({"max_tokens": "5"}, "max_tokens must be"),
    ({"max_tokens": True}, "max_tokens must be"),
    ({"min_tokens": -1}, "min_tokens must be an integer of at least 0"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens (3) must not exceed max_tokens (2)"),
    ({"stop_token_ids": [8]}, "stop_token_ids: 8 is not"),
    ({"stop_token_ids": 3}, "stop_token_ids must be a list"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids must have at most 256 entries, not 257"),
    ({"stop_sequences": [[]]}, "a stop sequence must not be empty"),
    ({"stop_sequences": [[1, 8]]}, "stop_sequences: 8 is not"),
    ({"stop_sequences": ["ab"]}, "stop_sequences must be a flat list"),
    ({"stop_sequences": [3]}, "stop_sequences a list of such lists"),
    ({"stop_sequences": [[1]] * 65}, "stop_sequences must have at most 64 entries"),
    ({"stop_sequences": [[1] * 257]}, "a stop sequence must have at most 256 entries"),
    ({"temperature": -0.1}, "temperature must be a number of at least 0, not -0.1"),
    ({"temperature": float("nan")}, "temperature must be"),
    ({"temperature": float("inf")}, "temperature must be"),
    ({"temperature": "hot"}, "temperature must be"),
    ({"top_k": -1}, "top_k must be an integer of at least 0"),
    ({"top_p": 0}, "top_p must be a number above 0 and at most 1, not 0"),
    ({"top_p": 1.1}, "top_p must be"),
    ({"min_p": 1.1}, "min_p must be a number from 0 to 1"),
    ({"min_p": -0.1}, "min_p must be"),
    ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0"),
    ({"presence_penalty": float("inf")}, "presence_penalty must be a finite number"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty must be a finite number"),
    ({"logit_bias": {8: 1.0}}, "logit_bias: 8 is not"),
    ({"logit_bias": {1: float("inf")}}, "logit_bias of token 1 must be a finite number"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias must have at most 1024 entries"),
    ({"logprobs": -1}, "logprobs must be an integer of at least 0"),
    ({"seed": 1.5}, "seed must be an integer, not 1.5"),
    ({"params": GenerationParams(), "max_tokens": 2}, "give params or fields of it, not both: max_tokens"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_SUBMISSIONS)
def test_a_request_that_cannot_be_served_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    batcher = ContinuousBatcher(FakeModel(gives_logits=True, max_context=20), capacity=2)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        batcher.submit(**{"prompt": [1], **fields})
    assert message in str(caught.value)
    assert batcher.idle


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5},
        {"top_k": 1},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {1: 1.0}},
        {"logprobs": 0},
    ],
)
def test_a_model_without_logits_refuses_parameters_that_need_them(fields: dict[str, Any]) -> None:
    batcher = ContinuousBatcher(counting, capacity=1)
    with pytest.raises(ValueError, match=f"^{next(iter(fields))} needs logits, and this model gives only tokens$"):
        batcher.submit([1], **fields)


def test_a_limit_that_leaves_prefill_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_step_tokens \(4\) must be above the capacity \(4\)"):
        ContinuousBatcher(counting, capacity=4, max_step_tokens=4)
    with pytest.raises(ValueError, match="capacity must be at least 1, not 0"):
        ContinuousBatcher(counting, capacity=0)


def test_a_model_whose_eos_is_not_in_its_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eos_token_ids: 8 is not a token id of this model \(0 to 7\)"):
        ContinuousBatcher(FakeModel(eos_token_ids=(8,)), capacity=1)


def test_by_default_a_request_is_greedy_and_stops_at_eos_or_128_tokens() -> None:
    assert GenerationParams() == GenerationParams(
        max_tokens=128,
        min_tokens=0,
        stop_token_ids=(),
        stop_sequences=(),
        ignore_eos=False,
        include_stop=False,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias={},
        logprobs=None,
        seed=None,
    )


def test_parameters_keep_their_own_copy_of_what_the_caller_may_change() -> None:
    sequences = [[2, 3]]
    batcher = ContinuousBatcher(counting, capacity=1)
    batcher.submit([1], stop_sequences=sequences)
    sequences[0].append(9)
    sequences.append([2])
    [finished] = batcher.run()
    assert (finished.output, finished.stop_reason) == ([], [2, 3])


def test_a_step_reports_its_tokens_rows_and_ends() -> None:
    batcher = ContinuousBatcher(counting, capacity=2)
    first = batcher.submit([1, 2, 3], max_tokens=2, request_id="same")
    second = batcher.submit([7], max_tokens=1, request_id="same")
    third = batcher.submit([9], max_tokens=1)
    assert (batcher.waiting(), batcher.running()) == ([first, second, third], [])
    step = batcher.step()
    assert (step.n_rows, step.n_tokens, step.logprobs) == (2, 4, {})
    assert dict(zip(step.handles.tolist(), step.tokens.tolist(), strict=True)) == {first: 4, second: 8}
    assert [(f.handle, f.request_id, f.output) for f in step.finished] == [(second, "same", [8])]
    assert (batcher.waiting(), batcher.running()) == ([third], [first])
    assert (batcher.n_waiting, batcher.n_running, batcher.free_slots, batcher.idle) == (1, 1, 1, False)
    step = batcher.step()
    assert (step.n_rows, step.n_tokens) == (2, 2)
    assert batcher.idle


def test_a_step_without_requests_calls_no_model() -> None:
    model = FakeModel()
    step = ContinuousBatcher(model, capacity=2).step()
    assert (len(step.handles), len(step.tokens), step.finished, step.n_rows, step.n_tokens) == (0, 0, [], 0, 0)
    assert not model.calls


def test_cancelled_requests_end_in_the_next_step_with_what_they_have() -> None:
    batcher = ContinuousBatcher(counting, capacity=1)
    running, waiting, kept = (batcher.submit([i], request_id=i, max_tokens=9) for i in (10, 20, 30))
    batcher.step()
    assert batcher.cancel(running, "stop", "###")
    assert batcher.cancel(running, "deadline")
    assert batcher.cancel(waiting, "deadline")
    assert batcher.n_running == 1
    step = batcher.step()
    assert step.finished == [
        Finished(running, 10, [11], 1, "stop", "###"),
        Finished(waiting, 20, [], 0, "deadline"),
    ]
    assert step.handles.tolist() == [kept]
    assert not batcher.cancel(running)
    assert not batcher.cancel(99)


def test_a_cancelled_resumed_request_keeps_its_earlier_output() -> None:
    batcher = ContinuousBatcher(counting, capacity=1)
    handle = batcher.submit([1], output=[2, 3])
    batcher.cancel(handle)
    assert batcher.run() == [Finished(handle, None, [2, 3], 2, "cancelled")]


def test_a_request_cancelled_during_the_model_call_gets_no_token_from_it() -> None:
    cancelled: list[int] = []
    model = FakeModel(before=lambda batch: [batcher.cancel(handle) for handle in cancelled])
    batcher = ContinuousBatcher(model, capacity=3)
    handles = [batcher.submit([i], ignore_eos=True) for i in (1, 2, 3)]
    cancelled.append(handles[1])
    step = batcher.step()
    assert step.handles.tolist() == [handles[0], handles[2]]
    assert [(f.handle, f.finish_reason, f.output) for f in step.finished] == [(handles[1], "cancelled", [])]
    assert batcher.free_slots == 1


def test_a_callback_that_raises_is_logged_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def broken(finished: Finished) -> None:
        raise RuntimeError("the caller's bug")

    seen: list[Finished] = []
    batcher = ContinuousBatcher(counting, capacity=2)
    batcher.submit([1], max_tokens=1, request_id="a", callback=broken)
    batcher.submit([1], max_tokens=1, request_id="b", callback=seen.append)
    with caplog.at_level(logging.WARNING, logger="tokenmill.engine"):
        finished = batcher.run()
    assert [f.request_id for f in finished] == ["a", "b"]
    assert [f.request_id for f in seen] == ["b"]
    assert "the callback of request 'a' failed" in caplog.text


def test_a_callback_may_submit_cancel_and_step() -> None:
    batcher = ContinuousBatcher(counting, capacity=2)
    nested: list[Finished] = []

    def again(finished: Finished) -> None:
        assert not batcher.cancel(finished.handle)
        assert batcher.cancel(other)
        batcher.submit([5], max_tokens=1, request_id="nested")
        nested.extend(batcher.step().finished)

    batcher.submit([1], max_tokens=1, callback=again)
    other = batcher.submit([1], max_tokens=50, request_id="other")
    outer = batcher.run()
    assert [f.finish_reason for f in outer] == ["length"]
    assert {f.request_id: f.finish_reason for f in nested} == {"other": "cancelled", "nested": "length"}
    assert batcher.idle


def test_waiting_requests_are_admitted_by_the_key_and_then_by_arrival() -> None:
    order: list[Any] = []
    record: Callable[[Finished], None] = lambda finished: order.append(finished.request_id)  # noqa: E731
    batcher = ContinuousBatcher(counting, capacity=1, admission_key=lambda request: -request.params.max_tokens)
    for name, n in [("a", 2), ("b", 9), ("c", 2), ("d", 5), ("e", 9)]:
        batcher.submit([1], max_tokens=n, request_id=name, callback=record)
    dropped = batcher.submit([1], max_tokens=100, request_id="f", callback=record)
    batcher.cancel(dropped)
    batcher.run()
    assert order == ["f", "b", "e", "d", "a", "c"]


def shapes(model: FakeModel) -> list[list[tuple[int, int, int, bool]]]:
    """Of every call the rows: context, start, length, complete."""
    return [
        list(zip(b.contexts.tolist(), b.starts.tolist(), b.lengths.tolist(), b.complete.tolist(), strict=True))
        for b in model.calls
    ]


def test_half_of_what_decoding_leaves_is_for_the_oldest_prefill_and_the_rest_for_the_shortest() -> None:
    model = FakeModel(vocab_size=100)
    batcher = ContinuousBatcher(model, capacity=4, max_step_tokens=7)
    for prompt in ([1], [2] * 9, [3] * 4, [4] * 2):
        batcher.submit(prompt, max_tokens=9, ignore_eos=True)
    for _ in range(4):
        batcher.step()
    assert shapes(model) == [
        [(0, 0, 1, True), (1, 0, 3, False), (2, 0, 1, False), (3, 0, 2, True)],
        [(0, 1, 1, True), (3, 2, 1, True), (1, 3, 3, False), (2, 1, 2, False)],
        [(0, 2, 1, True), (2, 3, 1, True), (3, 3, 1, True), (1, 6, 3, True)],
        [(0, 3, 1, True), (1, 9, 1, True), (2, 4, 1, True), (3, 4, 1, True)],
    ]


def test_a_later_admission_to_a_lower_slot_is_younger_prefill() -> None:
    model = FakeModel(vocab_size=100)
    batcher = ContinuousBatcher(model, capacity=2, max_step_tokens=4)
    batcher.submit([1], max_tokens=1)
    batcher.submit([2] * 9, max_tokens=1)
    batcher.submit([3] * 9, max_tokens=1)
    batcher.step()
    batcher.step()
    assert [(b.contexts.tolist(), b.lengths.tolist()) for b in model.calls] == [([0, 1], [1, 3]), ([1], [4])]


@pytest.mark.parametrize(("n_decode", "expected"), [(0, 128), (1, 12), (7, 24), (31, 72), (63, 136)])
def test_an_automatic_limit_lets_a_long_prompt_slow_decoding_down_twice(n_decode: int, expected: int) -> None:
    model = FakeModel(vocab_size=100)
    batcher = ContinuousBatcher(model, capacity=64, max_step_tokens="auto")
    for _ in range(n_decode):
        batcher.submit([1], max_tokens=9, ignore_eos=True)
    batcher.submit([2] * 1500, max_tokens=1)
    assert batcher.step().n_tokens == expected


def test_long_outputs_outgrow_the_first_width_of_the_context() -> None:
    model = FakeModel(max_context=300)
    finished = finish(model, [1] * 70, max_tokens=200, ignore_eos=True)
    alone = generate(model, [1] * 70, [], GenerationParams(max_tokens=200, ignore_eos=True))
    assert finished.output == alone.output
    assert finished.n_generated == 200


def test_requests_without_a_seed_draw_one_from_the_given_generator() -> None:
    def outputs(seed: int) -> list[list[int]]:
        model = FakeModel(vocab_size=1000, gives_logits=True)
        batcher = ContinuousBatcher(model, capacity=2, rng=np.random.default_rng(seed))
        for _ in range(2):
            batcher.submit([1], max_tokens=8, temperature=9.0, ignore_eos=True)
        return [f.output for f in sorted(batcher.run(), key=lambda f: f.handle)]

    assert outputs(1) == outputs(1)
    assert outputs(1) != outputs(2)
    assert outputs(1)[0] != outputs(1)[1]
