"""Test of a sender that never finishes its message beside an honest actor: over ZeroMQ, with real sessions."""

from __future__ import annotations

import contextlib
import gc
import time
from contextlib import closing

import pytest

from common.protocol.learner_side import LearnerSide
from common.protocol.worker_side import Identity, WorkerSide
from common.runtime.machine import MemoryGuard, anonymous_bytes
from common.transport.link import Link
from common.transport.zmq import ZmqServer, ZmqWorker
from services.learner.intake import Intake
from tests.common.transport import zmtp
from tests.services.learner.conftest import DEADLINE, STEPS, session_config, trajectory
from tests.services.learner.test_intake import assert_balances, policy

pytestmark = pytest.mark.wire

MIB = 2**20
ROOM = 512 * MIB  # memory that this process may still take: it reserves half, and glibc keeps at most 64 MiB of each arena


def limited_to(room: int) -> MemoryGuard:
    """A guard in a container that has `room` bytes left, after what earlier tests left behind was freed."""
    gc.collect()
    MemoryGuard().freed()
    limit = anonymous_bytes() + room
    return MemoryGuard(available=lambda: max(0, limit - anonymous_bytes()))


def test_an_unfinished_message_frees_memory_and_costs_no_experience() -> None:
    """Its sender is cut off with all others; the actor greets again and re-sends, and every env step is trained on once."""
    notes = []
    transport = ZmqServer("tcp://127.0.0.1:0", linger=0.0)
    session = LearnerSide(session_config(batch=1))
    intake = Intake(transport=transport, session=session, clock=time.monotonic, log_event=notes.append, memory=limited_to(ROOM))
    identity = Identity(role="actor", name="actor-0", incarnation=1, software="test")
    worker = ZmqWorker(transport.endpoint)
    link = Link(transport=worker, session=WorkerSide(identity), clock=time.monotonic, log_event=notes.append)
    intake.start()
    intake.publish(policy(0))
    offered = trained = 0
    deadline = time.monotonic() + DEADLINE
    with closing(intake), closing(worker):
        while not link.has_credit:  # an actor that has not greeted is not cut off, and its first greeting is no reconnect
            assert time.monotonic() < deadline
            link.service(0.01)
        attacker = zmtp.connect(transport.endpoint)
        attacker.settimeout(DEADLINE)  # a part that is given up half-way would be followed by bytes that end the connection
        with attacker:
            while not intake.stats.reconnects or trained < offered or offered < 50:
                assert time.monotonic() < deadline
                with contextlib.suppress(OSError):  # cut off
                    attacker.sendall(zmtp.part(bytes(MIB), more=True))
                link.service(0.001)
                if link.has_credit and (offered < 50 or intake.stats.sockets_reopened == 0):
                    link.offer(trajectory())
                    offered += 1
                    link.count(offered * STEPS, {})
                items = intake.take(1, 0.0)
                intake.complete(items)
                trained += len(items)
        intake.update_stats()
        while intake.stats.ledger["produced"] < offered * STEPS:
            link.service(0.01)
            intake.update_stats()
        stats = intake.stats
    assert_balances(stats)
    assert stats.ledger["trained"] == offered * STEPS == trained * STEPS
    assert sum(stats.ledger["dropped"].values()) == 0
    assert stats.reconnects == stats.sockets_reopened
    reopened = [note.fields for note in notes if note.event == "socket_reopened"]
    assert len(reopened) == stats.sockets_reopened
    assert reopened[0]["freed_mib"] > ROOM / MIB / 8
