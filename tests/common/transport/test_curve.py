"""Keys: the files, and the connections that they allow. Sockets are real, over loopback; nothing sleeps."""

from __future__ import annotations

import contextlib
import os
import re
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq
from zmq.auth import create_certificates, load_certificate

from common.errors import ConfigError, HandshakeFailure, ResourceError
from common.transport import curve, zmq_socket
from common.transport import zmq as adapter
from common.transport.api import FAILURES_LOG_SECONDS, Handshakes
from common.transport.curve import ServerKeys, WorkerKeys, make
from common.transport.zmq import ZmqServer, ZmqWorker
from tests.common.transport import zmtp
from tests.common.transport.ends import ANY_PORT, SOON, TICK, greet, own_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.wire


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of a learner and of two workers. `other` is another deployment's."""
    made = tmp_path_factory.mktemp("keys")
    make(made, ["worker", "second"])
    make(made / "other", ["worker"])
    return made


@pytest.fixture
def keys(folder: Path) -> ServerKeys:
    """The learner's."""
    return ServerKeys.of(str(folder / "learner"))


@pytest.fixture
def own(folder: Path) -> WorkerKeys:
    """A worker's that may connect."""
    return WorkerKeys.of(str(folder / "worker"))


def changed(keys: WorkerKeys, **fields: bytes) -> WorkerKeys:
    """The same keys but for some."""
    return WorkerKeys(**{name: getattr(keys, name) for name in ("public", "secret", "server")} | fields)


def until(holds: Callable[[], bool], learner: ZmqServer, worker: ZmqWorker) -> int:
    """Poll both ends until `holds`; return the number of messages that the worker could send. None may arrive."""
    deadline, sent = time.monotonic() + SOON, 0
    while not holds():
        assert time.monotonic() < deadline
        sent += worker.send([b"intruder"])
        worker.receive(TICK)
        assert learner.receive(TICK) is None
    return sent


# -- files ---------------------------------------------------------------------------------------------------------------


def test_each_folder_holds_what_its_owner_needs_and_no_other_secret(tmp_path: Path) -> None:
    """The files for an actor's machine must not allow it to pose as the learner."""
    before = os.umask(0)  # the most permissive umask
    try:
        written = make(tmp_path, ["worker", "lab"])
    finally:
        os.umask(before)
    assert {str(path.relative_to(tmp_path)) for path in written} == {
        *("learner/learner.key_secret", "learner/worker.key", "learner/lab.key"),
        *("worker/worker.key_secret", "worker/learner.key", "lab/worker.key_secret", "lab/learner.key"),
    }
    modes = {path.name: path.stat().st_mode & 0o777 for path in written}
    assert modes == {"learner.key_secret": 0o600, "worker.key_secret": 0o600} | dict.fromkeys(
        ("worker.key", "lab.key", "learner.key"), 0o644
    )
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o700}
    learner, lab = ServerKeys.of(str(tmp_path / "learner")), WorkerKeys.of(str(tmp_path / "lab"))
    assert lab.server == learner.public
    assert learner.allowed == {"lab": lab.public, "worker": WorkerKeys.of(str(tmp_path / "worker")).public}


def test_the_files_are_those_of_zeromqs_own_tools(tmp_path: Path) -> None:
    """Keys may come from elsewhere, and go elsewhere."""
    make(tmp_path / "ours", ["worker"])
    public, secret = load_certificate(tmp_path / "ours" / "worker" / "worker.key_secret")
    assert zmq.curve_public(secret) == public
    assert load_certificate(tmp_path / "ours" / "learner" / "worker.key") == (public, None)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("learner", "worker"):
        create_certificates(theirs, name)
        (theirs / f"{name}.key_secret").chmod(0o400)
    assert WorkerKeys.of(str(theirs)).server == ServerKeys.of(str(theirs)).public


def test_more_workers_are_added_and_nothing_is_overwritten(tmp_path: Path) -> None:
    """A second `rookery keys` on the folder must not revoke keys in use."""
    make(tmp_path, ["worker"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"never overwritten: found .*/worker, wanted a new name"):
        make(tmp_path, ["new", "worker"])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    make(tmp_path, ["new"])
    assert {path: path.read_bytes() for path in before} == before
    assert WorkerKeys.of(str(tmp_path / "new")).public in ServerKeys.of(str(tmp_path / "learner")).allowed.values()


@pytest.mark.parametrize("name", ["", "learner", "../worker", "a/b", ".hidden", "-x", "a b", "x" * 65])
def test_a_name_that_would_lead_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    """A name becomes a folder and a file."""
    with pytest.raises(ConfigError, match="no name for a worker's folder"):
        make(tmp_path, [name])
    assert list(tmp_path.iterdir()) == []


def test_keys_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "keys").write_text("")
    with pytest.raises(ResourceError, match=r"key cannot be written: found .* at .*keys"):
        make(tmp_path / "keys", ["worker"])


def test_a_folder_of_another_owner_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder belongs to the containers' user. The error is simulated, because root may read every folder."""

    def stat(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(ResourceError, match=r"found Permission denied at .*; run it as the owner of the folder, or choose"):
        make(tmp_path / "keys", ["worker-2"])


def test_keys_without_curve_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A libzmq of the distribution's own, built without libsodium."""
    monkeypatch.setattr(zmq, "has", lambda _: False)
    for use in (
        lambda: ServerKeys.of(str(folder / "learner")),
        lambda: WorkerKeys.of(str(folder / "worker")),
        lambda: make(tmp_path, ["worker"]),
    ):
        with pytest.raises(ConfigError, match=r"keys need CURVE: found libzmq .* built without it"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_no_keys_are_asked_for_by_an_empty_name() -> None:
    """The default: nothing is encrypted."""
    assert (ServerKeys.of(""), WorkerKeys.of("")) == (None, None)


def test_a_secret_shows_in_no_text_of_an_object(keys: ServerKeys, own: WorkerKeys) -> None:
    """A traceback or a log line may show any object."""
    for one in (keys, own):
        assert one.secret.decode() not in f"{one!r} {one}"


BAD_KEYS = {
    "nothing there": (lambda path: path.unlink(), "key cannot be read: found No such file or directory at {}, wanted"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "key cannot be read: found Is a directory at {}"),
    "open to others": (lambda path: path.chmod(0o604), "open to others: {}: found mode 0604, wanted 0600.*chmod 600"),
    "open to a group that may write": (lambda path: path.chmod(0o660), "found mode 0660"),
    "no key": (lambda path: path.write_bytes(b"\x00\xff secret stuff"), "file is no key: found {}, wanted a line"),
    "a line that is no assignment": (lambda path: path.write_text('public-key: "abc"'), "file is no key: found {}"),
    "half a line": (lambda path: path.write_text("secret-key"), "file is no key: found {}"),
    "a short key": (lambda path: path.write_text('public-key = "abcde"\nsecret-key = "abcde"'), "file is no key: found {}"),
    "no characters of a key": (lambda path: path.write_text(f'public-key = "{"~" * 40}"'), "file is no key: found {}"),
    "a number too large": (lambda path: path.write_text(f'public-key = "{"#" * 40}"'), "file is no key: found {}"),
    "a public key alone": (
        lambda path: path.write_text(f'public-key = "{zmq.curve_keypair()[0].decode()}"'),
        "no secret key in {}: found a public key alone",
    ),
    "two halves of two keys": (
        lambda path: path.write_text(
            f'public-key = "{zmq.curve_keypair()[0].decode()}"\nsecret-key = "{zmq.curve_keypair()[1].decode()}"'
        ),
        "no secret key in {}: found none, or one that is not of the public key beside it",
    ),
}


@pytest.mark.parametrize(("role", "kind"), [("learner", ServerKeys), ("worker", WorkerKeys)])
@pytest.mark.parametrize("what", BAD_KEYS)
def test_a_secret_key_that_cannot_be_used_is_one_line_without_the_secret(
    tmp_path: Path, role: str, kind: type, what: str
) -> None:
    """Mounted wrongly, copied by halves, left open by `cp`: said before anything is waited for."""
    make(tmp_path, ["worker"])
    path = tmp_path / role / f"{role}.key_secret"
    _, secret = load_certificate(path)
    spoil, says = BAD_KEYS[what]
    spoil(path)
    with pytest.raises(ConfigError, match=says.format(re.escape(str(path)))) as caught:
        kind.of(str(tmp_path / role))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert secret.decode() not in str(caught.value)


def test_a_secret_that_a_group_may_read_is_taken(tmp_path: Path) -> None:
    """Kubernetes mounts it so for a user other than root: root's, of the pod's group, 0440."""
    make(tmp_path, ["worker"])
    (tmp_path / "worker" / "worker.key_secret").chmod(0o440)
    assert WorkerKeys.of(str(tmp_path / "worker")) is not None


def test_a_learner_without_allowed_keys_is_an_error(tmp_path: Path) -> None:
    """The Secret was made of one file instead of the folder."""
    make(tmp_path, ["worker"])
    (tmp_path / "learner" / "worker.key").unlink()
    with pytest.raises(ConfigError, match=r"no worker may connect: found no file \*\.key in"):
        ServerKeys.of(str(tmp_path / "learner"))


def test_the_learners_own_public_key_allows_no_worker(tmp_path: Path) -> None:
    """ZeroMQ's tools write it beside the secret."""
    create_certificates(tmp_path, "learner")
    (tmp_path / "learner.key_secret").chmod(0o600)
    with pytest.raises(ConfigError, match=r"no worker may connect: found no file \*\.key in .* other than learner\.key"):
        ServerKeys.of(str(tmp_path))
    create_certificates(tmp_path, "worker")
    assert list(ServerKeys.of(str(tmp_path)).allowed) == ["worker"]


def test_the_public_key_of_the_learner_is_needed_by_a_worker(tmp_path: Path) -> None:
    """The folder of the other role was given."""
    make(tmp_path, ["worker"])
    with pytest.raises(ConfigError, match=r"No such file or directory at .*learner/worker\.key_secret"):
        WorkerKeys.of(str(tmp_path / "learner"))
    (tmp_path / "worker" / "learner.key").unlink()
    with pytest.raises(ConfigError, match=r"No such file or directory at .*worker/learner\.key,"):
        WorkerKeys.of(str(tmp_path / "worker"))


# -- connections ----------------------------------------------------------------------------------------------------------


def test_messages_cross_both_ways_between_ends_with_each_others_keys(folder: Path, keys: ServerKeys) -> None:
    """Two workers with a key each, large frames and small."""
    with closing(ZmqServer(ANY_PORT, keys=keys)) as learner:
        for name in ("worker", "second"):
            with closing(ZmqWorker(learner.endpoint, keys=WorkerKeys.of(str(folder / name)))) as worker:
                route = greet(learner, worker)
                assert learner.received_key == WorkerKeys.of(str(folder / name)).public.decode()
                assert worker.send([b"h", bytes(range(256)) * 4096])
                assert [bytes(frame) for frame in learner.receive(SOON)[1]] == [b"h", bytes(range(256)) * 4096]
                assert learner.send(route, [b"answer"])
                assert worker.receive(SOON) == [b"answer"]
        assert learner.handshakes.failed.total() == 0


def unknown_senders(own: WorkerKeys) -> dict[str, tuple[WorkerKeys | None, set[HandshakeFailure], str]]:
    """Return, by kind: keys of a refused worker, the reasons it may be counted under, and its log detail."""
    public, secret = zmq.curve_keypair()
    another, _ = zmq.curve_keypair()
    either = {HandshakeFailure.MECHANISM, HandshakeFailure.BROKEN}  # both sides see it, and either may close first
    return {
        "unlisted": (changed(own, public=public, secret=secret), {HandshakeFailure.KEY}, f"does not allow key {public.decode()}"),
        "without": (None, either, "(--keys)"),
        "misled": (
            changed(own, server=another),
            {HandshakeFailure.LEARNER_KEY},
            "the learner may still be starting; if it is not, learner.key here may not be that of the learner",
        ),
    }


@pytest.mark.parametrize("kind", ["unlisted", "without", "misled"])
def test_of_a_thousand_messages_of_an_unknown_sender_none_arrives(keys: ServerKeys, own: WorkerKeys, kind: str) -> None:
    """A key that is not allowed, no key at all, another learner's key: counted, logged on both sides, and others are served."""
    theirs, counted, says = unknown_senders(own)[kind]
    with (
        closing(ZmqServer(ANY_PORT, keys=keys)) as learner,
        closing(ZmqWorker(learner.endpoint, keys=theirs)) as unknown,
        closing(ZmqWorker(learner.endpoint, keys=own)) as worker,
    ):
        route = greet(learner, worker)
        refused = lambda: min(learner.handshakes.failed.total(), unknown.handshakes.failed.total()) >= 2  # noqa: E731
        assert until(refused, learner, unknown) == 0
        assert set(learner.handshakes.failed) <= counted
        assert says in unknown.handshakes.detail
        assert sum(unknown.send([b"intruder"]) for _ in range(1000)) == 0
        assert worker.send([b"still here"])
        assert learner.receive(SOON) == (route, [b"still here"])
        assert learner.receive(TICK) is None
        assert worker.handshakes.failed.total() == 0


@pytest.mark.parametrize("kind", ["unlisted", "without", "misled"])
def test_a_worker_pauses_after_a_failed_handshake(
    keys: ServerKeys, own: WorkerKeys, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ itself would connect again ten times a second where the learner's key is another."""
    monkeypatch.setattr(adapter, "RECONNECT_SECONDS", 3600.0)
    monkeypatch.setattr(adapter, "LOST_SECONDS", 3600.0)
    monkeypatch.setattr(zmq_socket, "POLL_MONITOR_SECONDS", 0.0)
    theirs, _, _ = unknown_senders(own)[kind]
    with closing(ZmqServer(ANY_PORT, keys=keys)) as learner, closing(ZmqWorker(learner.endpoint, keys=theirs)) as unknown:
        until(lambda: unknown.handshakes.failed.total() > 0, learner, unknown)
        unknown.receive(TICK)
        failed = unknown.handshakes.failed.total()
        for _ in range(30):
            learner.receive(TICK)
            unknown.receive(TICK)
        assert unknown.handshakes.failed.total() == failed


def test_messages_queued_before_a_refusal_do_not_arrive(keys: ServerKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of another make does not wait for its connection to stand, as ours do: 1000 messages are under way at once."""
    public, secret = zmq.curve_keypair()
    monkeypatch.setattr(zmq_socket, "POLL_MONITOR_SECONDS", 0.0)
    with closing(ZmqServer(ANY_PORT, keys=keys)) as learner, zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.curve_publickey, raw.curve_secretkey, raw.curve_serverkey = public, secret, keys.public
        raw.connect(learner.endpoint)
        for _ in range(1000):
            raw.send(b"intruder", zmq.DONTWAIT)
        while not learner.handshakes.failed[HandshakeFailure.KEY]:
            assert learner.receive(TICK) is None
        assert f"key {public.decode()} of 127.0.0.1 is not among those" in learner.handshakes.detail
        assert learner.receive(TICK) is None


def test_an_unknown_sender_cannot_make_the_learner_store_an_unfinished_message(keys: ServerKeys) -> None:
    """The connection is closed before its first message: only a sender with a key can fill a learner's memory."""
    with closing(ZmqServer(ANY_PORT, keys=keys)) as learner, zmtp.dial(learner.endpoint) as unknown:
        with contextlib.suppress(ConnectionError):
            unknown.sendall(zmtp.GREETING + zmtp.READY + zmtp.part(bytes(1 << 20), more=True))
            while unknown.recv(4096):
                pass
        assert learner.receive(TICK) is None


def test_a_learner_that_reopens_asks_for_keys_as_before(folder: Path, keys: ServerKeys, own: WorkerKeys) -> None:
    """Its socket is new, and so is the `ZapAuthenticator`."""
    with (
        closing(ZmqServer(ANY_PORT, keys=keys)) as learner,
        closing(ZmqWorker(learner.endpoint, keys=own)) as worker,
        closing(ZmqWorker(learner.endpoint)) as unknown,
    ):
        greet(learner, worker)
        learner.reopen()
        failed = learner.handshakes.failed.total()
        assert until(lambda: learner.handshakes.failed.total() > failed, learner, unknown) == 0
        with closing(ZmqWorker(learner.endpoint, keys=WorkerKeys.of(str(folder / "second")))) as second:
            greet(learner, second)


def test_a_worker_with_keys_sends_nothing_to_a_learner_without(own: WorkerKeys) -> None:
    """Another program may answer at the learner's address."""
    with closing(ZmqServer(ANY_PORT)) as learner, closing(ZmqWorker(learner.endpoint, keys=own)) as worker:
        failed = lambda: learner.handshakes.failed.total() and worker.handshakes.failed.total()  # noqa: E731
        assert until(failed, learner, worker) == 0


def test_a_worker_allowed_later_connects_by_itself(folder: Path, keys: ServerKeys, own: WorkerKeys) -> None:
    """An actor with a new key starts before the learner allows it: the learner is restarted, and the actor is not."""
    narrow = ServerKeys(public=keys.public, secret=keys.secret, allowed={"second": WorkerKeys.of(str(folder / "second")).public})
    with closing(ZmqServer(own_endpoint(), keys=narrow)) as first, closing(ZmqWorker(first.endpoint, keys=own)) as worker:
        until(lambda: worker.handshakes.failed[HandshakeFailure.KEY] > 0, first, worker)
        first.close()
        with closing(ZmqServer(first.endpoint, keys=keys)) as second:
            greet(second, worker)


def test_a_learner_that_comes_back_with_its_keys_is_found_again(keys: ServerKeys, own: WorkerKeys) -> None:
    """The learner is killed and restarted; no worker restarts."""
    with closing(ZmqServer(own_endpoint(), keys=keys)) as first, closing(ZmqWorker(first.endpoint, keys=own)) as worker:
        greet(first, worker)
        first.close()
        while worker.send([b"into the void"]):
            assert worker.receive(TICK) is None
        with closing(ZmqServer(first.endpoint, keys=keys)) as second:
            route = greet(second, worker, b"hello again")
            assert second.send(route, [b"welcome"])
            assert worker.receive(SOON) == [b"welcome"]


def test_without_an_authenticator_no_worker_connects(keys: ServerKeys, own: WorkerKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours must refuse all: ZeroMQ by itself would accept any key."""
    monkeypatch.setattr(curve.ZapAuthenticator, "answer", lambda _: None)
    monkeypatch.setitem(zmq_socket.MILLISECONDS, zmq.HANDSHAKE_IVL, 100)
    with closing(ZmqServer(ANY_PORT, keys=keys)) as learner, closing(ZmqWorker(learner.endpoint, keys=own)) as worker:
        learner._poller.unregister(learner._authenticator.socket)
        learner._authenticator.close()
        assert until(lambda: worker.handshakes.failed.total() > 0, learner, worker) == 0


def test_a_learner_that_never_waits_accepts_new_workers_too(keys: ServerKeys, own: WorkerKeys) -> None:
    """One worker keeps it busy without a pause; authentication must not depend on idle time."""
    with (
        closing(ZmqServer(ANY_PORT, keys=keys)) as learner,
        closing(ZmqWorker(learner.endpoint, keys=own)) as busy,
        closing(ZmqWorker(learner.endpoint, keys=own)) as late,
    ):
        greeted = None
        learner._wait = lambda _: False  # as if a message had been there each time
        while greeted is None or greeted[1] != [b"late"]:
            busy.send([b"busy"])
            late.send([b"late"])
            busy.receive(0.0)
            late.receive(0.0)
            greeted = learner.receive(0.0)


def test_unread_handshake_events_do_not_delay_the_close(keys: ServerKeys) -> None:
    """A learner loads its checkpoint while workers reconnect: closing waits for nothing. Tested with three events."""
    learner = ZmqServer(ANY_PORT, keys=keys)
    events = learner._monitor._events
    with closing(ZmqWorker(learner.endpoint)) as unknown:
        while unknown.handshakes.failed.total() < 3:
            unknown.receive(TICK)
    learner.close()
    assert events.closed
    assert learner._authenticator.socket.closed
    learner.close()


def test_an_end_closes_in_the_middle_of_a_handshake(keys: ServerKeys, own: WorkerKeys) -> None:
    """SIGTERM just as an actor connects: the ZAP request gets no answer any more."""
    learner = ZmqServer(ANY_PORT, keys=keys, linger=SOON)
    with closing(ZmqWorker(learner.endpoint, keys=own, linger=SOON)):
        assert learner._authenticator.socket.poll(SOON * 1000)
        learner.close()


# -- log events --------------------------------------------------------------------------------------------------------------


def test_failures_are_logged_at_once_then_seldom_and_all_are_counted() -> None:
    """A refused worker reconnects every second, for days."""
    handshakes = Handshakes()
    assert handshakes.handshake_failures(0.0) is None
    handshakes.failed[HandshakeFailure.KEY] += 1
    handshakes.detail = "no"
    note = handshakes.handshake_failures(100.0)
    assert (note.event, note.fields, note.warning) == ("handshake_failed", {"times": 1, "detail": "no"}, True)
    handshakes.failed[HandshakeFailure.BROKEN] += 2
    assert handshakes.handshake_failures(100.0 + FAILURES_LOG_SECONDS / 2) is None
    assert handshakes.handshake_failures(100.0 + FAILURES_LOG_SECONDS).fields["times"] == 2
    assert handshakes.handshake_failures(1000.0) is None
