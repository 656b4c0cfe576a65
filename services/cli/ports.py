"""Addresses for one run on one machine, so that several runs can go side by side and a restarted learner keeps its own."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack

from common.errors import ResourceError

# Below the range from which Linux and macOS take the ports of outgoing connections: an actor that tries again and again
# to reach a learner that is down could otherwise be given that very port, connect to itself, and keep the learner out.
FIRST_PORT, LAST_PORT = 20_000, 32_000
ANY_HOST = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "[::]": "[::1]", "::": "[::1]", "": "127.0.0.1"}  # noqa: S104


def free_ports(count: int, *, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports that nobody listens on now; held together while they are sought, so that none comes twice."""
    found: list[int] = []
    start, span = secrets.randbelow(LAST_PORT - FIRST_PORT), LAST_PORT - FIRST_PORT
    with ExitStack() as held:
        for offset in range(span):
            if len(found) == count:
                break
            candidate = held.enter_context(socket.socket())
            try:
                candidate.bind((host, FIRST_PORT + (start + offset) % span))
            except OSError:
                continue
            found.append(candidate.getsockname()[1])
    if len(found) < count:
        raise ResourceError("no free ports", found=len(found), wanted=f"{count} in {FIRST_PORT}..{LAST_PORT}")
    return found


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def reachable(host: str) -> str:
    """The address under which this machine reaches what is bound to `host`."""
    return ANY_HOST.get(host, host)
