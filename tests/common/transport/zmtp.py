"""A client that speaks ZeroMQ's wire protocol (ZMTP 3, mechanism NULL) itself, to send messages that no library sends."""

from __future__ import annotations

import socket
import struct
from typing import Final

GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
GREETING_2: Final = b"\xff" + bytes(7) + b"\x01\x7f\x01\x05"  # of ZMTP 2, from a DEALER
ROUTING_ID_2: Final = b"\x00\x00"  # what follows it: an empty one


def command(body: bytes) -> bytes:
    """A command of up to 255 bytes."""
    return b"\x04" + bytes([len(body)]) + body


def part(body: bytes, *, more: bool) -> bytes:
    """One part of a message; `more` says that another follows."""
    return bytes([2 | more]) + len(body).to_bytes(8, "big") + body


READY: Final = command(b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER")
PING: Final = command(b"\x04PING\x00\x00")  # asks for a PONG


def connect(endpoint: str) -> socket.socket:
    """Return a connection to a ROUTER after its handshake."""
    client = dial(endpoint)
    client.sendall(GREETING + READY)
    answered = b""
    while b"ROUTER" not in answered:
        received = client.recv(4096)
        assert received, "refused"
        answered += received
    return client


def dial(endpoint: str) -> socket.socket:
    """Return a TCP connection that has sent nothing yet."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


def reset(client: socket.socket) -> None:
    """Close the connection with a reset, as a host that vanished answers."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
