"""The one HTTP port of a service: GET /metrics, /healthz, /readyz, and JSON pages of the service.

It implements the least of HTTP: one answer a connection, a bounded number of connections, one deadline for a whole request. When
as many are open, the oldest connection is closed for the newest: a probe that sends its request at once is answered,
while other clients send theirs a byte at a time. The loop of the service waits for none of this.
"""

from __future__ import annotations

import errno
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import TCPServer, ThreadingMixIn
from threading import Lock, Thread
from typing import Any, Self, TypeAlias

from common.errors import ResourceError
from common.observability.health import Answer, Health
from common.observability.logs import EventLog
from common.units import Seconds

REQUEST_SECONDS: Seconds = 5.0  # from the connection to the last byte of the answer
MAX_CONNECTIONS = 64  # a thread each
POLL_SECONDS: Seconds = 0.1  # how long closing may take, and how late a deadline may be noticed

JsonRoute: TypeAlias = Callable[[], object]
Page: TypeAlias = tuple[HTTPStatus, str, bytes]  # status, content type, body

TEXT = "text/plain; charset=utf-8"
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"

_log = EventLog(__name__)


class HttpServer:
    """Serves from its own threads from construction until `close`. Also a context manager."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        metrics: Callable[[], bytes],
        health: Health,
        json_routes: Mapping[str, JsonRoute] | None = None,
    ) -> None:
        """Bind `host:port` (port 0: any free one); `json_routes` maps paths such as "/status" to what they show."""
        routes: dict[str, Callable[[], Page]] = {
            "/metrics": lambda: (HTTPStatus.OK, EXPOSITION, metrics()),
            "/healthz": lambda: _probe(health.liveness()),
            "/readyz": lambda: _probe(health.readiness()),
            **{path: _json(source) for path, source in (json_routes or {}).items()},
        }
        self._server = _bind(host, port, routes)
        self._thread = Thread(target=self._server.serve_forever, args=(POLL_SECONDS,), name="http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Return the port that was bound."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Return the address of the server, without a path."""
        host = str(self._server.server_address[0])
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def close(self) -> None:
        """Stop listening; requests in hand end by themselves within their time limit. May be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    request_queue_size = 2 * MAX_CONNECTIONS

    def __init__(self, host: str, port: int, routes: Mapping[str, Callable[[], Page]]) -> None:
        self.routes = routes
        self._deadlines: dict[socket.socket, Seconds] = {}  # of the open connections, the oldest first
        self._lock = Lock()  # of `_deadlines`
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Skip what HTTPServer adds: a look-up of the host's name, which may take seconds where DNS is away."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve the connection in a thread of its own; where `MAX_CONNECTIONS` are open, the oldest connection is closed."""
        now = time.monotonic()
        with self._lock:
            if len(self._deadlines) >= MAX_CONNECTIONS:
                self._end(next(iter(self._deadlines)))
            self._deadlines[request] = now + REQUEST_SECONDS
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle one request; afterwards its connection does not count, whatever happens."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._deadlines.pop(request, None)

    def service_actions(self) -> None:
        """End the connections whose deadline has passed; `serve_forever` calls this every `POLL_SECONDS` at least."""
        now = time.monotonic()
        with self._lock:
            for request in [each for each, deadline in self._deadlines.items() if deadline <= now]:
                self._end(request)

    def _end(self, request: socket.socket) -> None:
        """Shut the connection down: the thread that reads from it or writes to it returns at once."""
        del self._deadlines[request]
        with suppress(OSError):  # the client has closed the connection already
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Print no traceback of a client that hung up or fell silent."""
        _log.debug("http_connection_lost", error=sys.exception())


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "rookery", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        status, content_type, body = self._page(path)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _page(self, path: str) -> Page:
        route = self.server.routes.get(path)
        if route is None:
            known = ", ".join(self.server.routes)
            return HTTPStatus.NOT_FOUND, TEXT, f"nothing here; try {known}\n".encode()
        try:
            return route()
        except Exception as error:  # noqa: BLE001  a page that fails must not look like a service that is down
            _log.bug("http_page_failed", error=error, sender=path)
            return HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, f"{path}: {type(error).__name__}\n".encode()

    def log_message(self, *_: object) -> None:
        """Say nothing of each scrape."""


def check_port(host: str, port: int) -> None:
    """Raises the `ResourceError` that a server there would raise now. Nothing is served."""
    _bind(host, port, {}).server_close()


def _bind(host: str, port: int, routes: Mapping[str, Callable[[], Page]]) -> _Server:
    try:
        return _Server(host, port, routes)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise ResourceError(
            "the port for metrics is in use" if taken else f"cannot listen for metrics ({error.strerror or error})",
            found=f"{host}:{port}",
            wanted="a free port" if taken else "an address of this machine",
            fix="set metrics.port to another one (0: any free), or end what listens there"
            if taken
            else "set metrics.host and metrics.port",
        ) from error


def _probe(answer: Answer) -> Page:
    return (HTTPStatus.OK if answer.ok else HTTPStatus.SERVICE_UNAVAILABLE), TEXT, f"{answer.sentence}\n".encode()


def _json(source: JsonRoute) -> Callable[[], Page]:
    # NaN is no JSON: better a 500 that is noticed than a page that half of the clients cannot read.
    return lambda: (HTTPStatus.OK, "application/json", json.dumps(source(), allow_nan=False).encode() + b"\n")
