"""One line of a batch's input, and of its output: OpenAI's formats."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tokenmill.producer.gateway.errors import ApiError
from tokenmill.producer.gateway.openai import to_requests, to_response
from tokenmill.producer.request import explain
from tokenmill.shared.protocol import Reply, StrictRequest


class BadLineError(Exception):
    """The line is none of a batch; the message says why."""


class Line(msgspec.Struct, kw_only=True):
    """A request of a batch, under a name that is its own within the batch."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class LineError(msgspec.Struct, kw_only=True):
    """Why a line has no answer."""

    code: str
    message: str


class LineResponse(msgspec.Struct, kw_only=True):
    """What the gateway would have answered."""

    status_code: int
    request_id: str
    body: dict[str, Any]


class Outcome(msgspec.Struct, kw_only=True):
    """One line of the output, or of the errors."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None

    @property
    def failed(self) -> bool:
        """Whether it belongs to the errors."""
        return self.error is not None or self.response is None or self.response.status_code >= 400

    @property
    def problem(self) -> str:
        """Why it failed, in one line."""
        if self.error is not None:
            return self.error.message
        return str(self.response.body["error"]["message"]) if self.response is not None else ""


_lines = msgspec.json.Decoder(Line)
_outcomes = msgspec.json.Decoder(Outcome)


def parse_line(raw: bytes) -> Line:
    """Read one line; raises BadLineError."""
    try:
        return _lines.decode(raw)
    except msgspec.ValidationError as error:
        raise BadLineError(explain(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLineError(f"not JSON: {error}") from None


def parse_outcome(raw: bytes) -> Outcome:
    """Read one line of a part of the output."""
    return _outcomes.decode(raw)


class Task:
    """A line on its way: the requests that it makes, with ids that a second run makes again."""

    def __init__(self, raw: bytes, request_id: str) -> None:
        self.request_id = request_id
        self.requests: list[StrictRequest] = []
        self._line = parse_line(raw)
        self._problem: ApiError | None = None
        try:
            requests = to_requests(self._line.url, self._line.body, request_id=request_id)
        except ApiError as error:
            self._problem = error
        else:
            self.requests = [msgspec.structs.replace(request, priority="low", stream=False) for request in requests]

    def outcome(self, replies: Sequence[Reply]) -> Outcome:
        """The line's answer, or what went wrong."""
        try:
            if self._problem is not None:
                raise self._problem
            body = to_response(
                self._line.url, self._line.body, replies, answer_id=self.request_id, created=int(time.time())
            )
        except ApiError as error:
            return self._outcome(error.status, error.body())
        return self._outcome(200, body)

    def abandoned(self, code: str, message: str) -> Outcome:
        """The line will not be answered."""
        error = LineError(code=code, message=message)
        return Outcome(id=self.request_id, custom_id=self._line.custom_id, response=None, error=error)

    def _outcome(self, status: int, body: dict[str, Any]) -> Outcome:
        response = LineResponse(status_code=status, request_id=self.request_id, body=body)
        return Outcome(id=self.request_id, custom_id=self._line.custom_id, response=response, error=None)
