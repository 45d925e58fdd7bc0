"""When a broker counts as away, and when as back."""

from __future__ import annotations

import asyncio

import pytest

from tokenmill.producer.outage import Outage
from tokenmill.shared.errors import BrokerUnreachableError


def test_an_answer_to_what_was_asked_before_the_broker_went_away_does_not_bring_it_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    outage = Outage(lambda: now)
    outage.over()

    async def asked_before() -> str:
        nonlocal now
        now = 1.0  # meanwhile another call fails
        outage.pause_s(BrokerUnreachableError("away"))
        return "answer"

    with caplog.at_level("WARNING", logger="tokenmill"):
        assert asyncio.run(outage.insist(asked_before)) == "answer"
        assert outage.error is not None
        now = 2.0
        outage.over(began=1.5)
    assert outage.error is None
    assert [message.split(";")[0] for message in caplog.messages] == ["away", "the broker is back after 1.0 s"]
