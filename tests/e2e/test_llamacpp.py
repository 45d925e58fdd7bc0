"""A worker process whose model llama.cpp computes."""

from __future__ import annotations

import signal

from tokenmill.worker.models.registry import smollm2_path

from ..unit.models.backends import needs_llamacpp
from .workplace import DEADLINE_S, Workplace, wait_for

pytestmark = needs_llamacpp()
PROMPTS = ["The capital of France is", "Once upon a time", "One, two, three, four,"]
MESSAGES = [{"role": "user", "content": "Say hello."}]


def answers(workplace: Workplace, slots: int) -> list[str]:
    worker = workplace.start(f"llamacpp:{smollm2_path()}", "--slots", str(slots))
    ids = [workplace.client.submit(prompt, max_tokens=12) for prompt in PROMPTS]
    ids.append(workplace.client.submit(messages=MESSAGES, max_tokens=12))
    texts = [workplace.client.wait(request_id, DEADLINE_S).text for request_id in ids]
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(DEADLINE_S) == 0
    assert "computing with llama.cpp" in workplace.said(worker)
    assert "llama_" not in workplace.said(worker)
    wait_for(lambda: not workplace.registered())
    return texts


def test_it_answers_alike_with_one_slot_and_with_many(workplace: Workplace) -> None:
    alone = answers(workplace, 1)
    assert "Paris" in alone[0]
    assert answers(workplace, 4) == alone
