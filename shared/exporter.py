"""What a process tells whoever watches it: metrics, liveness and readiness, over HTTP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from tokenmill.shared.errors import UsageError

Check = Callable[[], str | None]
"""None where all is well, else the reason why it is not, in one line."""
Page = Callable[[], bytes]
"""The body of a page of JSON."""


class Exporter:
    """A small server of ``/metrics``, ``/livez`` and ``/readyz``, and further pages of JSON, in threads of its own.

    A check that fails answers 503 with its reason. Port 0 takes a free one; UsageError where none can be had.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str,
        port: int,
        live: Check = lambda: None,
        ready: Check = lambda: None,
        pages: Mapping[str, Page] | None = None,
    ) -> None:
        self._metrics = make_wsgi_app(registry)
        self._checks = {"/livez": live, "/readyz": ready}
        self._pages = dict(pages or {})
        try:
            self._server = make_server(host, port, self._answer, _server_class(host), _SilentHandler)
        except OSError as error:
            raise UsageError(f"no metrics on {host}:{port}: {error.strerror}; choose another --metrics-port") from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="exporter", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            answer: Iterable[bytes] = self._metrics(environ, start_response)
            return answer
        if path in self._checks:
            reason = self._checks[path]()
            return _text(start_response, "503 Service Unavailable" if reason else "200 OK", reason or "ok")
        if path in self._pages:
            start_response("200 OK", [("Content-Type", "application/json")])
            return [self._pages[path]()]
        known = ", ".join(["/metrics", *self._checks, *self._pages])
        return _text(start_response, "404 Not Found", f"there is no {path}; there are {known}")


def _text(start_response: Callable[..., Any], status: str, line: str) -> list[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{line}\n".encode()]


def _server_class(host: str) -> type[WSGIServer]:
    """A server of the address family that the host needs."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return type("_Server", (ThreadingWSGIServer,), {"address_family": family, "daemon_threads": True})


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (its name in the library)
        """Say nothing: scrapes come every few seconds."""
