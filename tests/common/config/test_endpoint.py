"""The parser of endpoints."""

import pytest

from common.config.endpoint import Endpoint, connectable_host, parse_endpoint

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:5700", "127.0.0.1", 5700),
        ("tcp://[::]:1", "[::]", 1),
        ("tcp://*:80", "*", 80),
        ("tcp://learner.rookery.svc:65535", "learner.rookery.svc", 65535),
    ],
)
def test_an_endpoint_is_parsed_and_written_again(text, host, port):
    """IPv6 addresses hold colons too."""
    endpoint = parse_endpoint(text)
    assert endpoint == Endpoint(host, port)
    assert str(endpoint) == f"{endpoint}" == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost:5700",
        "tcp://:5700",
        "tcp://host",
        "tcp://host:",
        "tcp://host:65536",
        "tcp://a b:1",
        "tcp://::1:5700",
        "ipc://x:1",
    ],
)
def test_text_that_is_no_endpoint_is_refused(text):
    with pytest.raises(ValueError, match=r"tcp://host:port with a port in 0\.\.65535"):
        parse_endpoint(text)


def test_a_port_to_connect_to_is_at_least_1():
    assert parse_endpoint("tcp://host:0").port == 0
    with pytest.raises(ValueError, match=r"1\.\.65535"):
        parse_endpoint("tcp://host:0", min_port=1)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.3.2.1", True), ("localhost", True), ("[::1]", True), ("0.0.0.0", False), ("learner", False), ("[fe80::1]", False)],
)
def test_only_addresses_of_this_machine_are_loopback(host, loopback):
    assert Endpoint(host, 5700).loopback is loopback


@pytest.mark.parametrize(
    ("bound", "host"), [("0.0.0.0", "127.0.0.1"), ("*", "127.0.0.1"), ("[::]", "[::1]"), ("10.0.0.7", "10.0.0.7")]
)
def test_a_socket_bound_to_every_interface_is_reached_on_loopback(bound, host):
    """0.0.0.0 is an address to bind to, and not one to connect to."""
    assert connectable_host(bound) == host
