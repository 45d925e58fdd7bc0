"""What the gateway answers when it cannot do what was asked: a status, and a body as OpenAI's API writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.producer.client import NoReplyError, ReplyGoneError
from tokenmill.producer.request import IdInUseError, QueueFullError
from tokenmill.shared.errors import BrokerUnreachableError, UsageError
from tokenmill.shared.protocol import Reply

TOO_SLOW = "timeout"
_REPLY_ERRORS = {  # code of a reply → status, code of the answer
    "invalid_request": (400, None),
    "context_length": (400, "context_length_exceeded"),
    "model_error": (500, "model_error"),
    "crashed": (500, "crashed"),
    "internal": (500, "internal_error"),
}
_TYPES = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than the one asked for; ``status`` is that of HTTP, ``param`` the field that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """What kind of error the status is, in OpenAI's words."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(ApiError):  # noqa: N818 (HTTP's own name for it)
    """The request is not one that can be served; nothing was queued."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


class RetryLater(ApiError):  # noqa: N818
    """It may work later, after so many seconds."""

    def __init__(self, status: int, message: str, retry_after_s: float, *, code: str) -> None:
        super().__init__(status, message, code=code, headers={"Retry-After": str(max(1, round(retry_after_s)))})


def failure(reply: Reply) -> ApiError | None:
    """Why a reply is no answer; None if it is one."""
    if reply.error is not None:
        status, code = _REPLY_ERRORS[reply.error.code]
        return ApiError(status, reply.error.message, code=code)
    if reply.finish_reason == "deadline":
        return ApiError(504, "the request was not finished in time", code=TOO_SLOW)
    if reply.finish_reason == "cancelled":
        return ApiError(409, "the request was cancelled", code="cancelled")
    return None


_BROKER_RETRY_S = 5.0


def as_api_error(error: Exception) -> ApiError:
    """What is answered for an error of ours; anything unknown is a 500 that tells nothing of its cause."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return RetryLater(429, str(error), error.retry_after, code="queue_full")
        case IdInUseError():
            return ApiError(409, str(error), code="idempotency_conflict")
        case UsageError():
            return BadRequest(str(error))
        case BrokerUnreachableError():
            return RetryLater(503, "the broker is away: try again later", _BROKER_RETRY_S, code="broker_away")
        case NoReplyError():
            return ApiError(504, "the request was not finished in time", code=TOO_SLOW)
        case ReplyGoneError():
            return ApiError(410, "the reply has expired", code="reply_gone")
        case _:
            return ApiError(500, "internal error; the log of the gateway says more", code="internal_error")
