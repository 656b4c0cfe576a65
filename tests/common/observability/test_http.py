"""The HTTP port of a service, over loopback."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest

from common.errors import ResourceError
from common.observability import http as ours
from common.observability.health import Health
from tests.ports import free_ports

pytestmark = pytest.mark.service


@pytest.fixture
def health(clock):
    """Healthy until the test's clock says otherwise."""
    return Health(deadline=10.0, clock=clock)


@pytest.fixture(autouse=True)
def time(monkeypatch):
    """The time of the server's deadlines, which only the test moves: `time.now += 1.0`."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(ours, "time", clock)
    return clock


@pytest.fixture
def server(health):
    """A server as a service has it, with two pages that fail."""
    routes = {"/status": lambda: {"phase": "training"}, "/broken": lambda: 1 // 0, "/nan": lambda: float("nan")}
    with ours.HttpServer(
        host="127.0.0.1", port=0, metrics=lambda: b"eggs_total 1\n", health=health, json_routes=routes
    ) as server:
        yield server


def ask(server, path, method="GET"):
    """(status, content type, body)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type"), response.read().decode()
    finally:
        connection.close()


def test_metrics_come_as_prometheus_wants_them(server):
    """A scrape, with and without a query string."""
    expected = (200, "text/plain; version=0.0.4; charset=utf-8", "eggs_total 1\n")
    assert ask(server, "/metrics") == expected
    assert ask(server, "/metrics?name[]=eggs_total") == expected


def test_healthz_turns_503_with_the_reason_when_the_loop_hangs(server, health, clock):
    """The liveness probe of Kubernetes, and the reader of its event."""
    assert ask(server, "/healthz") == (200, "text/plain; charset=utf-8", "ok\n")
    health.tick(doing="trains")
    clock.now += 42.0
    status, _, body = ask(server, "/healthz")
    assert (status, body) == (503, "loop has not ticked for 42.0 s while it trains; wanted every 10 s\n")


def test_readyz_says_why_not(server, health):
    """The readiness probe while a checkpoint loads."""
    assert ask(server, "/readyz")[::2] == (503, "starting\n")
    health.ready()
    assert ask(server, "/readyz")[::2] == (200, "ok\n")


def test_a_json_route_shows_what_its_callable_returns(server):
    """The learner's /status."""
    status, kind, body = ask(server, "/status")
    assert (status, kind, json.loads(body)) == (200, "application/json", {"phase": "training"})


@pytest.mark.parametrize("path", ["/broken", "/nan"])
def test_a_page_that_fails_is_a_500_and_the_server_goes_on(server, path):
    """A bug in one page must not take the probes away."""
    assert ask(server, path)[0] == 500
    assert ask(server, "/metrics")[0] == 200


def test_an_unknown_path_names_the_known_ones(server):
    """Somebody tries the root in a browser."""
    status, _, body = ask(server, "/")
    assert status == 404
    assert "/metrics, /healthz, /readyz, /status" in body


def test_nothing_can_be_posted(server):
    """The port only shows."""
    assert ask(server, "/metrics", method="POST")[0] == 501


def test_a_port_in_use_is_an_error_that_says_what_to_do(server, health):
    """Two learners on one machine with one configuration."""
    with pytest.raises(ResourceError, match=rf"in use: found 127.0.0.1:{server.port}, wanted a free port; set metrics.port"):
        ours.HttpServer(host="127.0.0.1", port=server.port, metrics=bytes, health=health)


def test_a_port_is_checked_as_it_would_be_served_and_left_free(server):
    """Before a run begins, a port that cannot be bound gives the same error."""
    with pytest.raises(ResourceError, match=rf"in use: found 127.0.0.1:{server.port}"):
        ours.check_port("127.0.0.1", server.port)
    (port,) = free_ports(1)  # that of the server may be another process's as soon as it is closed
    for _ in range(2):
        ours.check_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.7", "not a host"])
def test_an_address_that_is_not_ours_is_an_error_that_says_what_to_do(health, host):
    """A typo in metrics.host."""
    with pytest.raises(ResourceError, match=r"wanted an address of this machine; set metrics\.host"):
        ours.HttpServer(host=host, port=0, metrics=bytes, health=health)


def test_the_url_can_be_opened_whatever_the_family(health):
    """An IPv6-only cluster."""
    try:
        server = ours.HttpServer(host="::1", port=0, metrics=bytes, health=health)
    except ResourceError:
        pytest.skip("this machine has no IPv6 loopback")
    with server:
        assert server.url == f"http://[::1]:{server.port}"


def test_closing_frees_the_port_and_ends_the_thread(health):
    """A learner that is restarted at once on the same port."""
    (port,) = free_ports(1)
    server = ours.HttpServer(host="127.0.0.1", port=port, metrics=bytes, health=health)
    server.close()
    server.close()
    assert not any(thread.name == "http" for thread in threading.enumerate())
    with ours.HttpServer(host="127.0.0.1", port=port, metrics=bytes, health=health) as again:
        assert again.url == f"http://127.0.0.1:{port}"


def test_a_connection_ends_with_its_answer(server):
    """A client that asks for keep-alive gets none: no connection outlives its scrape."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n")
        assert client.makefile("rb").read().endswith(b"eggs_total 1\n")


def connected(server):
    """A raw connection to the server, for a request that http.client would not send."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=120)


def test_a_client_that_sends_nothing_is_closed_at_the_deadline(server, time):
    """A port scanner, or a scraper on a machine that died."""
    with connected(server) as client:
        assert ask(server, "/healthz")[0] == 200  # connections are taken in order
        time.now += ours.REQUEST_SECONDS
        assert client.recv(1) == b""


def test_a_client_that_drips_is_closed_at_the_deadline_of_its_whole_request(server, time):
    """A byte now and then is no reason to keep a connection."""
    with connected(server) as client:
        for _ in range(4):
            client.sendall(b"G")
            assert ask(server, "/healthz")[0] == 200
            time.now += ours.REQUEST_SECONDS / 4
        with suppress(ConnectionResetError):  # where a byte was not read yet
            assert client.recv(1) == b""
    assert ask(server, "/healthz")[0] == 200


def test_a_client_that_reads_too_slowly_is_closed_at_the_deadline(health, time):
    """A page larger than the buffers of both kernels, and a scraper that stops in the middle: others are answered meanwhile."""
    size = 32_000_000
    with (
        ours.HttpServer(host="127.0.0.1", port=0, metrics=lambda: bytes(size), health=health) as server,
        connected(server) as slow,
    ):
        slow.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert slow.recv(1) == b"H"
        assert ask(server, "/healthz")[0] == 200
        time.now += ours.REQUEST_SECONDS
        for _ in range(2):  # deadlines are looked at after each connection that is taken
            assert ask(server, "/healthz")[0] == 200
        received = 1
        with suppress(ConnectionResetError):
            while part := slow.recv(1_000_000):
                received += len(part)
        assert received < size


def test_a_large_page_arrives_whole(health):
    """More than one write: the rest is sent when the client has read."""
    page = bytes(range(256)) * 100_000
    with ours.HttpServer(host="127.0.0.1", port=0, metrics=lambda: page, health=health) as server, connected(server) as client:
        client.sendall(b"GET /metrics HTTP/1.1\n\n")
        assert client.makefile("rb").read().endswith(page)


@pytest.mark.parametrize("clients", [16, 64, 200])
def test_probes_are_answered_while_clients_drip(server, clients):
    """Sixteen sockets that sent a byte a second made a cluster restart the pod: its liveness probes found no place."""
    with ExitStack() as stack:
        dripping = [stack.enter_context(connected(server)) for _ in range(clients)]
        for _ in range(10):
            for client in dripping:
                with suppress(OSError):  # closed for a newer one
                    client.send(b"G")
            assert ask(server, "/healthz")[0] == 200
            assert len(server._server._deadlines) <= ours.MAX_CONNECTIONS


def test_the_oldest_connection_makes_room_for_the_newest(server):
    """Those that came later keep their places."""
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(server)) for _ in range(ours.MAX_CONNECTIONS)]
        assert ask(server, "/metrics")[0] == 200
        assert silent[0].recv(1) == b""
        silent[1].sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert silent[1].makefile("rb").read().endswith(b"eggs_total 1\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nCookie: " + b"x" * 70_000, b"431"),
        (b"GET /metrics HTTP/1.1\r\n" + b"Cookie: x\r\n" * 101, b"431"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"501"),
    ],
)
def test_requests_that_are_too_long_or_no_get_are_refused(server, request_, status):
    """Headers without end, another method."""
    with connected(server) as client:
        client.sendall(request_)
        assert client.recv(12) == b"HTTP/1.0 " + status
    assert ask(server, "/metrics")[0] == 200


def test_many_scrapes_at_once_are_all_answered(server):
    """Prometheus, a dashboard and a probe."""
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(ask(server, "/metrics")[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 8


def test_a_client_that_hangs_up_early_leaves_no_noise(server, capfd):
    """As `curl | head` does."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.sendall(b"GET /met")
    assert ask(server, "/metrics")[0] == 200
    assert capfd.readouterr().err == ""
