"""The one parser of endpoints, `tcp://host:port`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

MAX_PORT = 65_535
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "[::]": "[::1]", "::": "[::1]", "": "127.0.0.1"}  # noqa: S104


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Host and port of a TCP address. An IPv6 host keeps its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """True where only this machine reaches the endpoint. A name other than localhost may belong to any machine."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False


def parse_endpoint(text: str, *, min_port: int = 0) -> Endpoint:
    """Return the endpoint written as `tcp://host:port`, with a port in `min_port`..65535.

    Raises ValueError with the form that is wanted.
    """
    scheme, _, address = text.partition("://")
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plain = host and not set(host) & set(":/[] ")
    # ZeroMQ would take a port over 65535 modulo 65536.
    if scheme == "tcp" and (bracketed or plain) and port.isdecimal() and min_port <= int(port) <= MAX_PORT:
        return Endpoint(host, int(port))
    raise ValueError(f"tcp://host:port with a port in {min_port}..{MAX_PORT}, such as tcp://127.0.0.1:5700")


def parse_endpoints(text: str) -> list[Endpoint]:
    """Return the endpoints written as `tcp://host:port`, several separated by commas: one for each rank of a learner.

    Raises ValueError with the form that is wanted.
    """
    return [parse_endpoint(part.strip()) for part in text.split(",")]


def connectable_host(bound: str) -> str:
    """Return the host by which this machine reaches a socket that is bound to the interface `bound`."""
    return _ANY_HOST.get(bound, bound)
