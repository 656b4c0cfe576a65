"""The one HTTP port of a service: GET /metrics, /healthz, /readyz, and what JSON a service adds.

One thread serves all connections, one request each, without waiting for any of them. What a client can take is bounded:
the bytes of its request, the time from its connection to the last byte of its answer, and one of `MAX_CONNECTIONS` places.
When all places are taken, the oldest connection is closed for the newest: a probe that sends its request at once is
answered, however many clients send theirs a byte at a time.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from threading import Event, Thread
from typing import Self, TypeAlias

from common.errors import ResourceError
from common.runtime.health import Answer, Health
from common.runtime.logs import EventLog
from common.units import KIB, Seconds

REQUEST_SECONDS: Seconds = 5.0  # from the connection to the last byte of the answer
MAX_REQUEST_BYTES = 8 * KIB  # of a request line and its headers
MAX_CONNECTIONS = 64
BACKLOG = 128  # connections that the kernel keeps until they are accepted
POLL_SECONDS: Seconds = 0.1  # how long closing may take, and how late a deadline may be noticed

JsonRoute: TypeAlias = Callable[[], object]
Page: TypeAlias = tuple[HTTPStatus, str, bytes]  # status, content type, body

TEXT = "text/plain; charset=utf-8"
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"

_log = EventLog(__name__)


class HttpServer:
    """Serves from its own thread from construction until `close`. Also a context manager."""

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
        self._routes: dict[str, Callable[[], Page]] = {
            "/metrics": lambda: (HTTPStatus.OK, EXPOSITION, metrics()),
            "/healthz": lambda: _probe(health.liveness()),
            "/readyz": lambda: _probe(health.readiness()),
            **{path: _json(source) for path, source in (json_routes or {}).items()},
        }
        self._listener = _bind(host, port)
        self._host, self._port = self._listener.getsockname()[:2]
        self._connections: dict[int, _Connection] = {}  # by descriptor, the oldest first
        self._closing = Event()
        self._thread = Thread(target=self._serve, name="http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that was really bound."""
        return int(self._port)

    @property
    def url(self) -> str:
        """Where it answers, without a path."""
        host = str(self._host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def close(self) -> None:
        """Stop listening and close the connections that are open. May be called twice."""
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the thread ---

    def _serve(self) -> None:
        with DefaultSelector() as selector, self._listener:
            selector.register(self._listener, EVENT_READ)
            while not self._closing.is_set():
                for key, _ in selector.select(POLL_SECONDS):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.fd in self._connections:  # else it was closed in this round, for a newer one
                        self._go_on(selector, self._connections[key.fd])
                now = time.monotonic()
                for connection in [each for each in self._connections.values() if each.deadline <= now]:
                    self._drop(selector, connection)
            for connection in list(self._connections.values()):
                self._drop(selector, connection)

    def _accept(self, selector: DefaultSelector) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client has gone already
            return
        except OSError:  # this process has no descriptor left: the listener stays readable until one is free
            self._closing.wait(POLL_SECONDS)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            self._drop(selector, next(iter(self._connections.values())))
        client.setblocking(False)
        connection = _Connection(client, deadline=time.monotonic() + REQUEST_SECONDS)
        self._connections[client.fileno()] = connection
        selector.register(client, EVENT_READ)
        self._go_on(selector, connection)  # a client that sends its request at once needs no second round

    def _go_on(self, selector: DefaultSelector, connection: _Connection) -> None:
        """Read or write what can be, without waiting; close the connection when nothing is left to do."""
        try:
            if not connection.answer:
                request = connection.read()
                if request is None:
                    return
                connection.answer = memoryview(_response(self._page(request)))
                selector.modify(connection.socket, EVENT_WRITE)
            if connection.write():
                self._drop(selector, connection)
        except BlockingIOError:
            pass
        except OSError as error:  # a client that hangs up early is everyday life
            _log.debug("http_connection_lost", error=error)
            self._drop(selector, connection)

    def _drop(self, selector: DefaultSelector, connection: _Connection) -> None:
        del self._connections[connection.socket.fileno()]
        selector.unregister(connection.socket)
        with suppress(OSError):
            connection.socket.shutdown(socket.SHUT_WR)
        connection.socket.close()

    def _page(self, request: bytes) -> Page:
        if len(request) > MAX_REQUEST_BYTES:
            return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, TEXT, f"wanted at most {MAX_REQUEST_BYTES} bytes\n".encode()
        match request.partition(b"\n")[0].decode("latin-1").split():
            case ["GET", target, _]:
                return self._routed(target.partition("?")[0])
            case [_, _, _]:
                return HTTPStatus.NOT_IMPLEMENTED, TEXT, b"wanted GET\n"
        return HTTPStatus.BAD_REQUEST, TEXT, b"wanted a request line such as GET /metrics HTTP/1.1\n"

    def _routed(self, path: str) -> Page:
        route = self._routes.get(path)
        if route is None:
            known = ", ".join(self._routes)
            return HTTPStatus.NOT_FOUND, TEXT, f"nothing here; try {known}\n".encode()
        try:
            return route()
        except Exception as error:  # noqa: BLE001  a page that fails must not look like a service that is down
            _log.bug("http_page_failed", error=error, sender=path)
            return HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, f"{path}: {type(error).__name__}\n".encode()


@dataclass(slots=True)
class _Connection:
    """One client: the bytes of its request so far, then those of the answer that are still to be sent."""

    socket: socket.socket
    deadline: Seconds
    request: bytearray = field(default_factory=bytearray)
    answer: memoryview = field(default_factory=lambda: memoryview(b""))

    def read(self) -> bytes | None:
        """The request once its headers have ended, or are too long; None before. Raises `OSError` at a hang-up."""
        received = self.socket.recv(MAX_REQUEST_BYTES)
        if not received:
            raise ConnectionResetError(errno.ECONNRESET, "the client hung up before its request ended")
        self.request += received
        ended = b"\r\n\r\n" in self.request or b"\n\n" in self.request
        return bytes(self.request) if ended or len(self.request) > MAX_REQUEST_BYTES else None

    def write(self) -> bool:
        """Send what the client takes now; whether that was the last of it."""
        self.answer = self.answer[self.socket.send(self.answer) :]
        return not self.answer


def check_port(host: str, port: int) -> None:
    """Raises the `ResourceError` that a server there would raise now. Nothing is served."""
    _bind(host, port).close()


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        raise ResourceError(
            "the port for metrics is in use" if taken else f"cannot listen for metrics ({error.strerror or error})",
            found=f"{host}:{port}",
            wanted="a free port" if taken else "an address of this machine",
            fix="set metrics.port to another one (0: any free), or end what listens there"
            if taken
            else "set metrics.host and metrics.port",
        ) from error
    return listener


def _response(page: Page) -> bytes:
    status, content_type, body = page
    head = f"HTTP/1.0 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


def _probe(answer: Answer) -> Page:
    return (HTTPStatus.OK if answer.ok else HTTPStatus.SERVICE_UNAVAILABLE), TEXT, f"{answer.sentence}\n".encode()


def _json(source: JsonRoute) -> Callable[[], Page]:
    # NaN is no JSON: better a 500 that is noticed than a page that half of the clients cannot read.
    return lambda: (HTTPStatus.OK, "application/json", json.dumps(source(), allow_nan=False).encode() + b"\n")
