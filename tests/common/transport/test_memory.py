"""The in-memory transport: what the services' tests stand on must itself behave like a network."""

from __future__ import annotations

import threading

import pytest

from common.errors import ResourceError
from tests.support.memory import MemoryHub

pytestmark = pytest.mark.wire

NOW = 0.0
SOON = 1000.0  # a deadline, beyond that of the test itself: never reached when all is well


def test_messages_cross_in_order_both_ways() -> None:
    """A worker speaks, the learner answers by the route it came from."""
    hub = MemoryHub()
    learner, worker = hub.bind(), hub.connect()
    assert worker.send([b"one", b"body"])
    assert worker.send([b"two"])
    route, first = learner.receive(NOW)
    assert first == [b"one", b"body"]
    assert learner.receive(NOW) == (route, [b"two"])
    assert learner.send(route, [b"answer"])
    assert worker.receive(NOW) == [b"answer"]
    assert learner.endpoint.startswith("memory://")


def test_a_sent_buffer_may_be_reused_by_its_owner() -> None:
    """An actor writes the next rollout into the same memory; the learner must not see it change."""
    hub = MemoryHub()
    learner, worker = hub.bind(), hub.connect()
    rollout = bytearray(b"first")
    worker.send([memoryview(rollout)])
    rollout[:] = b"later"
    assert learner.receive(NOW)[1] == [b"first"]


def test_a_worker_started_before_the_learner_connects_when_it_comes() -> None:
    """Actors may start first: they can send nothing, and need no restart."""
    hub = MemoryHub()
    worker = hub.connect()
    assert not worker.send([b"early"])
    assert worker.receive(NOW) is None
    hub.connect().close()
    learner = hub.bind()
    assert worker.send([b"hello"])
    assert learner.receive(NOW)[1] == [b"hello"]


def test_a_full_queue_refuses_instead_of_growing() -> None:
    """With a stuck learner memory stays bounded, and `send` returns False; the same for a stuck worker."""
    hub = MemoryHub(capacity=2)
    learner, worker = hub.bind(), hub.connect()
    assert [worker.send([b"x"]) for _ in range(3)] == [True, True, False]
    route, _ = learner.receive(NOW)
    assert worker.send([b"x"])
    assert [learner.send(route, [b"y"]) for _ in range(3)] == [True, True, False]


def test_a_cut_connection_loses_what_was_under_way_and_comes_back_by_a_new_route() -> None:
    """A network that breaks: both queues are lost, sends fail until it heals, and the learner sees an unknown route."""
    hub = MemoryHub()
    learner, worker = hub.bind(), hub.connect()
    worker.send([b"hello"])
    old, _ = learner.receive(NOW)
    worker.send([b"lost"])
    learner.send(old, [b"lost"])
    hub.disconnect(worker)
    assert not worker.send([b"x"])
    assert not learner.send(old, [b"x"])
    assert learner.receive(NOW) is None
    assert worker.receive(NOW) is None
    hub.reconnect(worker)
    assert worker.send([b"again"])
    new, frames = learner.receive(NOW)
    assert (frames, new != old) == ([b"again"], True)
    assert not learner.send(old, [b"x"])


def test_a_learner_that_restarts_finds_its_workers_again() -> None:
    """Kill -9 of the learner: workers keep running, and their transport reconnects by itself."""
    hub = MemoryHub()
    first, worker = hub.bind(), hub.connect()
    worker.send([b"unread"])
    first.close()
    first.close()
    assert not worker.send([b"x"])
    assert first.receive(NOW) is None
    second = hub.bind()
    assert second.receive(NOW) is None
    assert worker.send([b"hello"])
    assert second.receive(NOW)[1] == [b"hello"]


def test_a_worker_that_stays_cut_off_does_not_meet_the_new_learner() -> None:
    """A partition outlives a restart of the learner."""
    hub = MemoryHub()
    hub.bind().close()
    worker = hub.connect()
    hub.disconnect(worker)
    hub.bind()
    assert not worker.send([b"x"])
    hub.reconnect(worker)
    assert worker.send([b"x"])


def test_what_a_closing_worker_sent_still_arrives() -> None:
    """Goodbye is the last message before the close: the ledger needs it."""
    hub = MemoryHub()
    learner, worker = hub.bind(), hub.connect()
    worker.send([b"goodbye"])
    worker.close()
    worker.close()
    route, frames = learner.receive(NOW)
    assert frames == [b"goodbye"]
    assert not learner.send(route, [b"late"])
    assert not worker.send([b"late"])
    assert worker.receive(SOON) is None


def test_workers_take_turns() -> None:
    """One actor with a full queue does not starve the others."""
    hub = MemoryHub()
    learner, busy, quiet = hub.bind(), hub.connect(), hub.connect()
    for _ in range(3):
        busy.send([b"busy"])
    quiet.send([b"quiet"])
    assert [learner.receive(NOW)[1][0] for _ in range(4)] == [b"busy", b"quiet", b"busy", b"busy"]


def test_two_learners_cannot_hold_one_endpoint() -> None:
    """A second learner on the same port is refused with a sentence."""
    hub = MemoryHub()
    hub.bind()
    with pytest.raises(ResourceError, match="endpoint in use: found memory://learner"):
        hub.bind()


@pytest.mark.parametrize("end", ["learner", "worker"])
@pytest.mark.parametrize("what", ["wake", "close"])
def test_a_waiting_receive_returns_at_once(end: str, what: str) -> None:
    """SIGTERM reaches another thread while the I/O thread waits for messages."""
    hub = MemoryHub()
    ends = {"learner": hub.bind(), "worker": hub.connect()}
    got = []
    waiter = threading.Thread(daemon=True, target=lambda: got.append(ends[end].receive(SOON)))
    waiter.start()
    getattr(ends[end], what)()
    waiter.join(SOON)
    assert got == [None]


def test_a_wake_is_not_lost_when_nobody_waits_yet() -> None:
    """The wake comes just before the wait: the next empty receive returns at once, a message is not passed over."""
    hub = MemoryHub()
    learner, worker = hub.bind(), hub.connect()
    learner.wake()
    worker.send([b"x"])
    assert learner.receive(SOON)[1] == [b"x"]
    assert learner.receive(SOON) is None


def test_a_message_ends_a_wait_in_another_thread() -> None:
    """The common case: the I/O thread sleeps until an actor sends."""
    hub = MemoryHub()
    learner, worker = hub.bind(), hub.connect()
    got = []
    waiter = threading.Thread(daemon=True, target=lambda: got.append(learner.receive(SOON)[1]))
    waiter.start()
    worker.send([b"x"])
    waiter.join(SOON)
    assert got == [[b"x"]]
