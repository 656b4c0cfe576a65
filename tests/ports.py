"""Ports for the processes that a test starts. No two processes of the tests are given the same one at a time."""

from __future__ import annotations

import itertools
import os
import random
import socket

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
SHARE = 10_000 // max(20, WORKERS)  # ports of each process of pytest-xdist
FIRST = 10_000 + WORKER * SHARE  # below the ports of `services.cli.train.ports` and of the kernel
ROOM = 40  # ports among which `rookery train` searches in a test
_next = itertools.count(random.randrange(SHARE))  # two runs of the tests at once seldom begin with the same


def free_ports(count: int) -> list[int]:
    """Return `count` consecutive ports on which no process listens, others than the last times."""
    found: list[int] = []
    for _ in range(2 * SHARE):
        port = FIRST + next(_next) % SHARE
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                found = []
                continue
        found = [*found, port] if not found or port == found[-1] + 1 else [port]
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} free ports in a row from {FIRST} on")
