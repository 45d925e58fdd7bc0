"""Scripts are sent by hash, and loaded where the broker has lost them."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import NoScriptError

from tokenmill.shared import lua


class ForgetfulRedis:
    """Loses its scripts a number of times, as a broker that restarts does."""

    def __init__(self, losses: int) -> None:
        self.losses = losses
        self.loads = 0

    def evalsha(self, *call: Any) -> Any:
        if self.losses:
            self.losses -= 1
            raise NoScriptError("NOSCRIPT No matching script")
        return call[1:]

    def script_load(self, source: bytes) -> None:
        self.loads += 1


@pytest.mark.parametrize("losses", [0, 1, 2])
def test_a_script_that_was_lost_is_loaded_again(losses: int) -> None:
    client = ForgetfulRedis(losses)
    assert lua.run(client, "renew", ["k"], [1, "two"]) == (1, "k", 1, "two")  # type: ignore[arg-type]
    assert client.loads == losses


def test_a_broker_that_never_keeps_a_script_is_an_error() -> None:
    with pytest.raises(NoScriptError):
        lua.run(ForgetfulRedis(99), "renew", [], [])  # type: ignore[arg-type]
