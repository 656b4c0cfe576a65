"""Tests of attacks on the process of a learner: each learner here is a process of its own, since it could abort."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.common.transport import zmtp

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.wire

LEARNER = """
import sys
from common.transport.zmq import ZmqServer

learner = ZmqServer("tcp://127.0.0.1:0", linger=0.0)
print(learner.endpoint, flush=True)
for order in sys.stdin:
    if order == "close\\n":
        break
    while learner.receive(0.1) is not None:
        pass
    print("read", flush=True)
learner.close()
"""


@contextlib.contextmanager
def learner() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A learner in a process, which reads when it gets a line and ends when its input does; and its endpoint."""
    words = [sys.executable, "-c", LEARNER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def order(process: subprocess.Popen[str], line: str) -> str:
    """Return the learner's answer to a line; empty where it has ended."""
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline() if line == "read" else ""


def test_a_sender_that_floods_and_vanishes_does_not_abort_the_learner() -> None:
    """More messages than any high-water mark had room for, a PING behind them, and a reset before the learner reads."""
    with learner() as (process, endpoint):
        client = zmtp.connect(endpoint)
        client.sendall(zmtp.part(b"x", more=False) * 100 + zmtp.PING)
        zmtp.connect(endpoint).close()  # ZeroMQ has one thread: it has read the flood when it answers here
        zmtp.reset(client)
        zmtp.connect(endpoint).close()  # and seen the reset
        assert order(process, "read") == "read\n", process.wait()
        order(process, "close")
        assert process.wait() == 0
