"""A worker process whose model llama.cpp computes."""

from __future__ import annotations

import signal

from tokenmill.worker.models.registry import smollm2_path

from ..unit.models.backends import needs_llamacpp
from .workplace import DEADLINE_S, Workplace

pytestmark = needs_llamacpp()


def test_it_answers_prompts_and_conversations_and_drains(workplace: Workplace) -> None:
    worker = workplace.start(f"llamacpp:{smollm2_path()}", "--slots", "2")
    hello = [{"role": "user", "content": "Say hello."}]
    ids = [
        workplace.client.submit("The capital of France is", max_tokens=5),
        workplace.client.submit(messages=hello, max_tokens=5),
        workplace.client.submit("Once upon a time", max_tokens=12, stream=True),
    ]
    paris, greeting, story = [workplace.client.wait(request_id, DEADLINE_S) for request_id in ids]
    assert "Paris" in paris.text
    assert [reply.finish_reason for reply in (paris, greeting, story)] == ["length"] * 3
    assert workplace.tokens(ids[2]) == 12
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(DEADLINE_S) == 0
    assert "computing with llama.cpp" in workplace.said(worker)
    assert "llama_" not in workplace.said(worker)  # the names of functions in llama.cpp's own log
