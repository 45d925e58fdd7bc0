"""The gateway as an application: routes, callers, errors, and the pages that probes ask for."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from litestar import Litestar, MediaType, Request, Response, Router, get
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.middleware import AbstractAuthenticationMiddleware, AuthenticationResult, DefineMiddleware
from litestar.types import ASGIApp, ControllerRouterHandler, Message, Receive, Scope, Send

from tokenmill.producer.batches.office import Office
from tokenmill.producer.gateway import batch_routes, file_routes, generation, job_routes
from tokenmill.producer.gateway.desk import Desk
from tokenmill.producer.gateway.dialect import blame
from tokenmill.producer.gateway.errors import ApiError, as_api_error
from tokenmill.producer.gateway.jobs import Jobs
from tokenmill.producer.gateway.specification import OPENAPI, declare_streams
from tokenmill.producer.request import explain
from tokenmill.shared import calls
from tokenmill.shared.errors import TokenmillError

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")
_OPEN = ("/livez", "/readyz", "/docs")  # no key is asked for
FILES: tuple[ControllerRouterHandler, ...] = (
    file_routes.upload_file,
    file_routes.list_files,
    file_routes.show_file,
    file_routes.read_file,
    file_routes.delete_file,
)
ROUTES: tuple[ControllerRouterHandler, ...] = (
    generation.list_models,
    generation.show_model,
    generation.complete,
    generation.chat,
    job_routes.begin_job,
    job_routes.show_job,
    job_routes.follow_job,
    job_routes.cancel_job,
    batch_routes.create_batch,
    batch_routes.list_batches,
    batch_routes.show_batch,
    batch_routes.cancel_batch,
)


def make_app(make_desk: Callable[[], Desk], office: Office, *, max_body_bytes: int, max_upload_bytes: int) -> Litestar:
    """The application; its desk is made when the event loop runs."""

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        app.state.desk = desk = make_desk()
        app.state.jobs = Jobs(desk)
        app.state.office = office
        yield
        await desk.aclose()

    files = Router("/", route_handlers=FILES, request_max_body_size=max_upload_bytes)
    app = Litestar(
        [*ROUTES, files, live, ready],
        dependencies={name: Provide(_part(name), sync_to_thread=False) for name in ("desk", "jobs", "office")},
        exception_handlers={HTTPException: _http_error, Exception: _error},
        lifespan=[lifespan],
        middleware=[_with_request_id, DefineMiddleware(_Keys)],
        openapi_config=OPENAPI,
        request_max_body_size=max_body_bytes,
        logging_config=None,
    )
    declare_streams(app)
    return app


@get("/livez", media_type=MediaType.TEXT, include_in_schema=False)
async def live() -> str:
    """The event loop turns."""
    return "ok\n"


@get("/readyz", media_type=MediaType.TEXT, include_in_schema=False)
async def ready(desk: Desk) -> str:
    """The broker answers."""
    await desk.client.broker.call(calls.ping())
    return "ok\n"


def _part(name: str) -> Callable[[State], Any]:
    def part(state: State) -> Any:
        return state[name]

    return part


class _Keys(AbstractAuthenticationMiddleware):
    """Whose key a call has, and whether that caller may call now."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(_OPEN):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def authenticate_request(self, connection: ASGIConnection[Any, Any, Any, Any]) -> AuthenticationResult:
        desk: Desk = connection.app.state.desk
        caller = desk.callers.find(connection.headers.get("authorization"))
        desk.quotas.count_call(caller)
        return AuthenticationResult(user=caller, auth=None)


def _with_request_id(app: ASGIApp) -> ASGIApp:
    """Answer with the caller's x-request-id, or a new one, by which the log names the call."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope["state"]["request_id"] = request_id.decode()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        await app(scope, receive, send_named)

    return call


def _http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[Any]:
    """The framework's refusals in our words."""
    if isinstance(error.__cause__, msgspec.ValidationError):
        return _answer(blame(explain(ValueError(str(error.__cause__).replace("`$.data", "`$")))))
    first: dict[str, str] = error.extra[0] if isinstance(error.extra, list) and error.extra else {}
    message = first.get("message", error.detail)
    return _answer(ApiError(error.status_code, message, param=first.get("key"), headers=error.headers))


def _error(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    answer = as_api_error(error)
    if not isinstance(error, ApiError | TokenmillError):
        log.error("call %s failed", request.scope["state"].get("request_id"), exc_info=error)
    return _answer(answer)


def _answer(error: ApiError) -> Response[Any]:
    return Response(error.body(), status_code=error.status, headers=error.headers, media_type=MediaType.JSON)
