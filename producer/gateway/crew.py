"""The workers behind the gateway: whether any is alive, and which model they run."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from tokenmill.producer.gateway.errors import ApiError, RetryLater
from tokenmill.shared import calls
from tokenmill.shared.async_broker import AsyncBroker

_FRESH_S = 1.0  # how long a look is good for
_RETRY_S = 5.0


class Crew:
    """Looks at the broker once a second at most, however many ask."""

    def __init__(self, broker: AsyncBroker) -> None:
        self._broker = broker
        self._models: list[str] = []
        self._looked_at = -_FRESH_S
        self._looking = asyncio.Lock()

    async def models(self) -> list[str]:
        """The models of the workers that are alive."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if now - self._looked_at >= _FRESH_S:
                names = await self._broker.call(calls.workers(self._broker.keys))
                found = await self._broker.all([calls.worker_status(self._broker.keys, name) for name in names])
                self._models = sorted({_model(status) for status in found if status is not None})
                self._looked_at = now
            return self._models

    async def check(self, model: str) -> None:
        """Raise ApiError 503 if no worker is alive, and 404 if none has that model."""
        models = await self.models()
        if not models:
            raise RetryLater(503, "no worker is alive: try again later", _RETRY_S, code="no_worker")
        if model not in models:
            known = ", ".join(f"`{name}`" for name in models)
            raise ApiError(404, f"no model `{model}`; there is {known}", param="model", code="model_not_found")


def _model(status: bytes) -> str:
    said: dict[str, Any] = msgspec.json.decode(status)
    return str(said.get("model"))
