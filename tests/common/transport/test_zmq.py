"""ROUTER and DEALER over loopback: real sockets, real losses, no sleeps."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from common.errors import ConfigError, DecodeError, HandshakeFailure, ResourceError
from common.protocol.codec import decode
from common.runtime.process import allow_descriptors
from common.transport import zmq as adapter
from common.transport import zmq_socket
from common.transport.zmq import ZmqServer, ZmqWorker
from common.units import MIB
from tests.common.transport import zmtp
from tests.common.transport.ends import ANY_PORT, SOON, TICK, greet, own_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.wire


@pytest.fixture
def learner() -> Iterator[ZmqServer]:
    """A learner on a free port."""
    with closing(ZmqServer(ANY_PORT)) as end:
        yield end


@pytest.fixture
def worker(learner: ZmqServer) -> Iterator[ZmqWorker]:
    """A worker of that learner, not necessarily connected yet."""
    with closing(ZmqWorker(learner.endpoint)) as end:
        yield end


def until(holds: Callable[[], Any], end: ZmqWorker | ZmqServer) -> Any:
    """The first true answer; between two attempts `end` waits for messages, of which there must be none."""
    deadline = time.monotonic() + SOON
    while not (answer := holds()):
        assert time.monotonic() < deadline
        assert end.receive(TICK) is None
    return answer


def test_messages_cross_in_order_both_ways(learner: ZmqServer, worker: ZmqWorker) -> None:
    """A worker speaks, the learner answers by the route it came from."""
    route = greet(learner, worker)
    assert worker.send([b"one", b"", b"body"])
    assert worker.send([b"two"])
    assert learner.receive(SOON) == (route, [b"one", b"", b"body"])
    assert learner.receive(SOON) == (route, [b"two"])
    assert learner.send(route, [b"answer", b"more"])
    assert worker.receive(SOON) == [b"answer", b"more"]
    assert learner.receive(0.0) is None


@pytest.mark.parametrize(
    ("bind", "bound"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("*", "0.0.0.0"), ("[::1]", "[::1]")]
)
def test_loopback_has_an_address_of_each_kind_and_a_name(bind: str, bound: str) -> None:
    """An address without keys may be a number or a name; the wildcard stays one."""
    if bind == "[::1]":
        with socket.socket(socket.AF_INET6) as probe:
            try:
                probe.bind(("::1", 0))
            except OSError:
                pytest.skip("no IPv6 here")
    with closing(ZmqServer(f"tcp://{bind}:0")) as learner:
        host, _, port = learner.endpoint.removeprefix("tcp://").rpartition(":")
        assert host == bound
        for name in {bound.replace("0.0.0.0", "127.0.0.1"), "[::1]" if bind == "[::1]" else "localhost"}:
            with closing(ZmqWorker(f"tcp://{name}:{port}")) as worker:
                greet(learner, worker)


NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
NONSENSE = {
    "no greeting": b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(64),  # ZeroMQ stops, without an event
    "no such word": NULL_GREETING + b"\x04\x06\x05HELLO",  # an event, and it stops
    "half a READY": NULL_GREETING + b"\x04\x0b\x05READY\x0bSock",  # it stops, without an event
}


@pytest.mark.parametrize("answer", NONSENSE)
def test_a_worker_asks_again_whatever_it_was_answered(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program has the learner's port for a while."""
    monkeypatch.setattr(adapter, "RECONNECT_SECONDS", 0.1)
    monkeypatch.setattr(adapter, "LOST_SECONDS", 0.1)
    endpoint = own_endpoint()
    with socket.create_server(("127.0.0.1", int(endpoint.rpartition(":")[2]))) as other:
        worker = ZmqWorker(endpoint)
        with other.accept()[0] as caller:
            caller.sendall(NONSENSE[answer])
            caller.shutdown(socket.SHUT_WR)
            while caller.recv(4096):  # until it hangs up
                pass
    with closing(worker), closing(ZmqServer(endpoint)) as learner:
        greet(learner, worker)


def test_a_large_frame_is_not_copied_on_its_way_out_of_zeromq(learner: ZmqServer, worker: ZmqWorker) -> None:
    """A rollout arrives as a view of ZeroMQ's buffer, small frames as bytes of their own; both are what was sent."""
    greet(learner, worker)
    large, small = bytes(range(256)) * 4096, b"x" * 100
    assert worker.send([b"h", memoryview(large), small])
    _, frames = learner.receive(SOON)
    assert [type(frame) for frame in frames] == [bytes, memoryview, bytes]
    assert [bytes(frame) for frame in frames] == [b"h", large, small]


def test_the_endpoint_names_the_port_that_was_bound(learner: ZmqServer) -> None:
    """Port 0 in tests and benchmarks: many learners at once on one machine."""
    assert learner.endpoint.startswith("tcp://127.0.0.1:")
    assert int(learner.endpoint.rpartition(":")[2]) > 0


def test_a_worker_may_start_before_the_learner() -> None:
    """Actors come up first: nothing is queued for nobody, and they connect when the learner comes."""
    endpoint = own_endpoint()
    with closing(ZmqWorker(endpoint)) as worker:
        assert not worker.send([b"early"])
        with closing(ZmqServer(endpoint)) as learner:
            greet(learner, worker)
            assert learner.receive(0.0) is None


def test_a_restarted_learner_finds_its_workers_again_on_the_same_port() -> None:
    """A learner killed: sends fail meanwhile, the worker reconnects by itself, by a new route, and nothing old arrives."""
    endpoint = own_endpoint()
    with closing(ZmqServer(endpoint)) as first, closing(ZmqWorker(endpoint)) as worker:
        old = greet(first, worker)
        first.close()
        until(lambda: not worker.send([b"into the void"]), worker)
        with closing(ZmqServer(endpoint)) as second:
            new = greet(second, worker, b"hello again")
            assert not second.send(old, [b"x"]) or old == new
            assert second.send(new, [b"welcome"])
            assert worker.receive(SOON) == [b"welcome"]


def test_a_learner_that_reopens_has_new_connections_and_nothing_of_the_old_ones(learner: ZmqServer, worker: ZmqWorker) -> None:
    """The stored data is freed; the port, the handshake counts and a wake from another thread stay."""
    endpoint, route = learner.endpoint, greet(learner, worker)
    with zmtp.dial(endpoint) as unfinished:
        unfinished.sendall(zmtp.GREETING[:20])
    until(lambda: learner.handshakes.failed, learner)
    failed = learner.handshakes.failed.total()
    assert worker.send([b"old"])
    assert learner._socket.poll(SOON * 1000)
    learner.reopen()
    assert learner.endpoint == endpoint
    assert learner.receive(0.0) is None

    def came_anew() -> bool:
        arrived = worker.send([b"new"]) and learner.receive(TICK)
        return bool(arrived) and arrived[0] != route and arrived[1] == [b"new"]

    until(came_anew, worker)
    assert learner.handshakes.failed.total() == failed
    learner.wake()
    while (again := learner.receive(SOON)) is not None:  # on a busy machine it was sent more than once
        assert again[1] == [b"new"]


def test_a_learner_that_reopens_waits_for_its_port(learner: ZmqServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process took the port first; if it keeps the port, that is the same error as at the start."""
    monkeypatch.setattr(adapter, "REBIND_SECONDS", 0.2)
    learner._shut()
    with socket.create_server(("127.0.0.1", int(learner.endpoint.rpartition(":")[2]))):
        learner._open()
        with pytest.raises(ResourceError, match="cannot listen"):
            learner.reopen()
    learner.reopen()


def test_a_thousand_half_open_connections_leave_others_served_and_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port scan, or worse: half of the connections send nothing, half of them half a greeting."""
    allow_descriptors()
    monkeypatch.setitem(zmq_socket.MILLISECONDS, zmq.HANDSHAKE_IVL, 500)
    with closing(ZmqServer(ANY_PORT)) as learner, contextlib.ExitStack() as silent:
        for number in range(1000):
            client = silent.enter_context(zmtp.dial(learner.endpoint))
            client.sendall(zmtp.GREETING[: 32 * (number % 2)])
        with closing(ZmqWorker(learner.endpoint)) as worker:
            greet(learner, worker)
        until(lambda: learner.handshakes.failed[HandshakeFailure.BROKEN] >= 1000, learner)  # the worker's own may be late as well


def test_a_route_that_never_was_or_is_gone_is_an_answer_not_a_silence(learner: ZmqServer, worker: ZmqWorker) -> None:
    """ROUTER would drop such messages without a word."""
    assert not learner.send(b"nobody", [b"x", b"y"])
    route = greet(learner, worker)
    worker.close()
    until(lambda: not learner.send(route, [b"x"]), learner)


def test_a_goodbye_sent_before_the_close_arrives(learner: ZmqServer) -> None:
    """The last message of a clean end carries counters: the linger is for it."""
    worker = ZmqWorker(learner.endpoint, linger=SOON)
    route = greet(learner, worker)
    assert worker.send([b"goodbye"])
    worker.close()
    assert learner.receive(SOON) == (route, [b"goodbye"])


def test_a_closed_end_does_nothing_more(learner: ZmqServer, worker: ZmqWorker) -> None:
    """Shutdown code may close twice, and a loop may look once more."""
    route = greet(learner, worker)
    for end in (learner, worker):
        end.close()
        end.close()
        end.wake()
        assert end.receive(SOON) is None
    assert not worker.send([b"x"])
    assert not learner.send(route, [b"x"])


def test_an_unreachable_learner_does_not_hold_up_the_close() -> None:
    """SIGTERM of an actor without a learner: the linger has nothing to wait for."""
    ZmqWorker(own_endpoint(), linger=SOON * 10).close()


def test_a_frame_over_the_limit_costs_its_sender_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker announces 10 GB: ZeroMQ closes its connection before a byte is stored; others and its next messages are served."""
    with monkeypatch.context() as patch:
        patch.setitem(zmq_socket.OPTIONS, zmq.MAXMSGSIZE, 1000)
        learner = ZmqServer(ANY_PORT)
    with closing(learner), closing(ZmqWorker(learner.endpoint)) as loud, closing(ZmqWorker(learner.endpoint)) as calm:
        calm_route, loud_route = greet(learner, calm), greet(learner, loud)
        assert loud.send([b"h", b"x" * 1001])
        until(lambda: not learner.send(loud_route, [b"x"]), learner)
        assert calm.send([b"still here"])
        assert learner.receive(SOON) == (calm_route, [b"still here"])
        while (received := learner.receive(TICK)) is None:  # a message on a connection whose end the worker has not seen is lost
            loud.receive(TICK)
            loud.send([b"back"])
        route, frames = received
        assert frames == [b"back"]
        assert route != loud_route


def test_a_message_of_endless_frames_is_cut_and_refused(learner: ZmqServer) -> None:
    """Ten thousand tiny frames in one message are not collected: the codec sees that they are too many."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.connect(learner.endpoint)
        raw.send_multipart([b"x"] * 10_000)
        raw.send_multipart([b"next"])
        _, frames = learner.receive(SOON)
        assert len(frames) < 100
        with pytest.raises(DecodeError):
            decode(frames)
        assert learner.receive(SOON)[1] == [b"next"]


def test_a_receiver_that_does_not_read_fills_buffers_and_is_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is stopped meets the high-water mark: False, not memory without end."""
    monkeypatch.setitem(zmq_socket.OPTIONS, zmq.SNDHWM, 1)
    with closing(ZmqServer(ANY_PORT, linger=0.0)) as learner, zmtp.connect(learner.endpoint) as stopped:
        stopped.sendall(zmtp.part(b"hello", more=False))
        route, _ = learner.receive(SOON)
        frame = bytes(4 << 20)
        sent = 0
        while learner.send(route, [b"h", frame]):
            sent += 1
            assert sent < 100


def test_a_worker_hands_over_its_window_at_once(learner: ZmqServer, worker: ZmqWorker) -> None:
    """After a loss it sends all that it keeps, and a refusal would count as another loss."""
    greet(learner, worker)
    body = bytes(1 << 14)
    assert all(worker.send([b"one", body]) for _ in range(5_000))


def test_a_worker_that_hears_nothing_connects_anew(
    learner: ZmqServer, worker: ZmqWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy holds the connection, and its other half is dead."""
    route = greet(learner, worker)
    assert worker.receive(TICK) is None
    assert greet(learner, worker) == route
    monkeypatch.setattr(adapter, "SILENT_SECONDS", 0.1)
    worker.expect(0)
    assert learner.send(route, [b"the last"])
    assert worker.receive(SOON) == [b"the last"]

    def came_anew() -> bool:
        arrived = worker.send([b"hello"]) and learner.receive(TICK)
        return bool(arrived) and arrived[0] != route

    until(came_anew, worker)


def test_a_large_message_has_its_time_to_cross(learner: ZmqServer, worker: ZmqWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link of 10 Mbit/s would otherwise be cut before each large message has arrived."""
    route = greet(learner, worker)
    monkeypatch.setattr(adapter, "SILENT_SECONDS", 0.0)
    worker.expect(1000 * MIB)
    assert learner.send(route, [b"the last"])
    assert worker.receive(SOON) == [b"the last"]
    assert worker.receive(0.3) is None
    assert greet(learner, worker) == route


def test_old_versions_of_zeromqs_protocol_are_refused(learner: ZmqServer) -> None:
    """A routing id of version 2 that arrives while the socket closes aborts the process."""
    with zmtp.dial(learner.endpoint) as client:
        client.sendall(zmtp.GREETING_2 + zmtp.ROUTING_ID_2 + zmtp.part(b"hello", more=False))
        with contextlib.suppress(ConnectionError):
            while client.recv(4096):
                pass
    assert learner.receive(TICK) is None


def test_a_message_broken_off_by_a_lost_connection_does_not_swallow_the_next(learner: ZmqServer) -> None:
    """After a connection is lost in the middle of a message, ZeroMQ drops the rest of it, if the rest is sent."""
    worker = ZmqWorker(learner.endpoint)
    real = worker._socket
    offered = []

    class Breaking:
        closed = False

        def send(self, frame: bytes, flags: int, **_: object) -> None:
            offered.append((frame, bool(flags & zmq.SNDMORE)))
            if frame == b"2":
                raise zmq.Again
            if frame == b"4":
                raise zmq.ZMQError(zmq.EFAULT)

    worker._socket = Breaking()
    assert not worker.send([b"1", b"2", b"3"])
    assert offered == [(b"1", True), (b"2", True), (b"3", False)]
    with pytest.raises(zmq.ZMQError):  # what nobody expects is not called a loss
        worker.send([b"4"])
    worker._socket = real
    worker.close()


@pytest.mark.parametrize("end", ["learner", "worker"])
def test_a_wake_ends_a_wait_in_another_thread(learner: ZmqServer, worker: ZmqWorker, end: str) -> None:
    """SIGTERM reaches the main thread while the I/O thread waits for messages."""
    waiting = {"learner": learner, "worker": worker}[end]
    got = []
    waiter = threading.Thread(daemon=True, target=lambda: got.append(waiting.receive(SOON)))
    waiter.start()
    waiting.wake()
    waiter.join(SOON)
    assert got == [None]


def test_wakes_before_the_wait_are_one_wake(learner: ZmqServer) -> None:
    """A wake just before the wait is not lost, and many of them do not pile up or block."""
    for _ in range(5_000):
        learner.wake()
    assert learner.receive(SOON) is None
    assert not dict(learner._poller.poll(0))


def test_a_wake_does_not_hide_a_message(learner: ZmqServer, worker: ZmqWorker) -> None:
    """Both at once: the message comes first, the wake after it."""
    greet(learner, worker)
    worker.send([b"x"])
    assert learner._poller.poll(SOON * 1000)
    learner.wake()
    assert learner.receive(SOON)[1] == [b"x"]
    assert learner.receive(SOON) is None


def test_a_port_in_use_is_refused_with_what_to_do(learner: ZmqServer) -> None:
    """A second run on the same machine."""
    with pytest.raises(ResourceError, match=rf"cannot listen: found {learner.endpoint}: .*in use; stop what uses it, or choose"):
        ZmqServer(learner.endpoint)


@pytest.mark.parametrize(
    "endpoint",
    ["", "127.0.0.1:5700", "tcp://127.0.0.1", "tcp://:x", "udp//x", "tcp://127.0.0.1:99999", "tcp://a b:1", "tcp://h:-1"],
)
@pytest.mark.parametrize("end", [ZmqServer, ZmqWorker])
def test_a_bad_endpoint_is_the_users_error(end: type, endpoint: str) -> None:
    """A typing mistake in `--learner` ends with one line, not a traceback."""
    with pytest.raises(ConfigError, match="wanted tcp://host:port"):
        end(endpoint)


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    """`learner.bind` names an interface that is not here."""
    with pytest.raises(ResourceError, match=r"cannot listen: found tcp://192\.0\.2\.1:5700"):
        ZmqServer("tcp://192.0.2.1:5700")


BOUNDS = ("LINGER", "SNDHWM", "MAXMSGSIZE", "HANDSHAKE_IVL", "TCP_MAXRT")


@pytest.mark.parametrize("name", [*BOUNDS, "TCP_KEEPALIVE", "RECONNECT_IVL_MAX", "CONNECT_TIMEOUT", "IMMEDIATE", "BACKLOG"])
def test_nothing_is_left_without_a_bound(learner: ZmqServer, worker: ZmqWorker, name: str) -> None:
    """ZeroMQ's defaults are no limit (0 or -1) for most of these."""
    ends = {"RECONNECT_IVL_MAX": [worker], "CONNECT_TIMEOUT": [worker], "IMMEDIATE": [worker], "BACKLOG": [learner]}.get(
        name, [learner, worker]
    )
    assert all(end._socket.getsockopt(getattr(zmq, name)) > 0 for end in ends)


def test_a_learner_of_this_machine_is_tried_more_often(worker: ZmqWorker) -> None:
    """Its workers are few, and wait for it at each start of `rookery train`."""
    with closing(ZmqWorker("tcp://192.0.2.1:5700")) as elsewhere:
        longest = [end._socket.getsockopt(zmq.RECONNECT_IVL_MAX) for end in (worker, elsewhere)]
    assert longest[0] < longest[1]


@pytest.mark.parametrize("name", ["RCVHWM", "HEARTBEAT_IVL"])
def test_nothing_is_set_by_which_libzmq_aborts(learner: ZmqServer, worker: ZmqWorker, name: str) -> None:
    """A heartbeat follows on a lost connection whose input was stopped: see decision 24."""
    assert [end._socket.getsockopt(getattr(zmq, name)) for end in (learner, worker)] == [0, 0]
