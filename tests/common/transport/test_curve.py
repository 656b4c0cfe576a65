"""Keys: the files, who comes in with which, and who does not. The wire is real, over loopback; nothing sleeps."""

from __future__ import annotations

import contextlib
import os
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq
from zmq.auth import create_certificates, load_certificate

from common.errors import ConfigError, ResourceError
from common.transport import curve
from common.transport import zmq as adapter
from common.transport.api import TELL_SECONDS, Failure, Handshakes
from common.transport.curve import LearnerKeys, PeerKeys, make
from common.transport.zmq import ZmqLearner, ZmqPeer
from tests.common.transport import zmtp

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.wire

ANY_PORT = "tcp://127.0.0.1:0"
SOON = 1000.0  # a deadline, beyond that of the test itself: never reached when all is well
TICK = 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of a learner and of two peers. `other` is another deployment's."""
    made = tmp_path_factory.mktemp("keys")
    make(made, ["peer", "second"])
    make(made / "other", ["peer"])
    return made


@pytest.fixture
def keys(folder: Path) -> LearnerKeys:
    """The learner's."""
    return LearnerKeys.of(str(folder / "learner"))


@pytest.fixture
def own(folder: Path) -> PeerKeys:
    """A peer's that may connect."""
    return PeerKeys.of(str(folder / "peer"))


def changed(keys: PeerKeys, **fields: bytes) -> PeerKeys:
    """The same keys but for some."""
    return PeerKeys(**{name: getattr(keys, name) for name in ("public", "secret", "learner")} | fields)


def greet(learner: ZmqLearner, peer: ZmqPeer, word: bytes = b"hello") -> bytes:
    """Send one message as soon as there is a connection; the route it came by."""
    deadline = time.monotonic() + SOON
    while not peer.send([word]):
        assert time.monotonic() < deadline
        peer.receive(TICK)
        assert learner.receive(TICK) is None
    route, frames = learner.receive(SOON)
    assert frames == [word]
    return route


def until(holds: Callable[[], bool], learner: ZmqLearner, peer: ZmqPeer) -> int:
    """Both look after their connections until `holds`; messages the peer could send meanwhile. None may arrive."""
    deadline, sent = time.monotonic() + SOON, 0
    while not holds():
        assert time.monotonic() < deadline
        sent += peer.send([b"intruder"])
        peer.receive(TICK)
        assert learner.receive(TICK) is None
    return sent


# -- files ---------------------------------------------------------------------------------------------------------------


def test_each_folder_holds_what_its_owner_needs_and_no_other_secret(tmp_path: Path) -> None:
    """What is copied to an actor's machine must not let anybody play the learner."""
    before = os.umask(0)  # who has opened everything to everybody
    try:
        written = make(tmp_path, ["peer", "lab"])
    finally:
        os.umask(before)
    assert {str(path.relative_to(tmp_path)) for path in written} == {
        *("learner/learner.key_secret", "learner/peer.key", "learner/lab.key"),
        *("peer/peer.key_secret", "peer/learner.key", "lab/peer.key_secret", "lab/learner.key"),
    }
    modes = {path.name: path.stat().st_mode & 0o777 for path in written}
    assert modes == {"learner.key_secret": 0o600, "peer.key_secret": 0o600} | dict.fromkeys(
        ("peer.key", "lab.key", "learner.key"), 0o644
    )
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o700}
    learner, lab = LearnerKeys.of(str(tmp_path / "learner")), PeerKeys.of(str(tmp_path / "lab"))
    assert lab.learner == learner.public
    assert learner.allowed == {lab.public, PeerKeys.of(str(tmp_path / "peer")).public}


def test_the_files_are_those_of_zeromqs_own_tools(tmp_path: Path) -> None:
    """Keys may come from elsewhere, and go elsewhere."""
    make(tmp_path / "ours", ["peer"])
    public, secret = load_certificate(tmp_path / "ours" / "peer" / "peer.key_secret")
    assert zmq.curve_public(secret) == public
    assert load_certificate(tmp_path / "ours" / "learner" / "peer.key") == (public, None)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("learner", "peer"):
        create_certificates(theirs, name)
        (theirs / f"{name}.key_secret").chmod(0o400)
    assert PeerKeys.of(str(theirs)).learner == LearnerKeys.of(str(theirs)).public


def test_more_peers_are_added_and_nothing_is_overwritten(tmp_path: Path) -> None:
    """A second `rookery keys` on the folder must not lock out those who have their keys already."""
    make(tmp_path, ["peer"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"never overwritten: found .*/peer, wanted a new name"):
        make(tmp_path, ["new", "peer"])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    make(tmp_path, ["new"])
    assert {path: path.read_bytes() for path in before} == before
    assert PeerKeys.of(str(tmp_path / "new")).public in LearnerKeys.of(str(tmp_path / "learner")).allowed


@pytest.mark.parametrize("name", ["", "learner", "../peer", "a/b", ".hidden", "-x", "a b", "x" * 65])
def test_a_name_that_would_lead_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    """A name becomes a folder and a file."""
    with pytest.raises(ConfigError, match="no name for a peer's folder"):
        make(tmp_path, [name])
    assert list(tmp_path.iterdir()) == []


def test_keys_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "keys").write_text("")
    with pytest.raises(ResourceError, match=r"key cannot be written: found .* at .*keys"):
        make(tmp_path / "keys", ["peer"])


def test_a_folder_of_another_owner_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given to the containers' user, and another peer comes later. Whoever runs this test may look everywhere."""

    def stat(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(ResourceError, match=r"found Permission denied at .*; run it as the owner of the folder, or choose"):
        make(tmp_path / "keys", ["peer-2"])


def test_keys_without_curve_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A libzmq of the distribution's own, built without libsodium."""
    monkeypatch.setattr(zmq, "has", lambda _: False)
    for use in (
        lambda: LearnerKeys.of(str(folder / "learner")),
        lambda: PeerKeys.of(str(folder / "peer")),
        lambda: make(tmp_path, ["peer"]),
    ):
        with pytest.raises(ConfigError, match=r"keys need CURVE: found libzmq .* built without it"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_no_keys_are_asked_for_by_an_empty_name() -> None:
    """The default: nothing is encrypted."""
    assert (LearnerKeys.of(""), PeerKeys.of("")) == (None, None)


def test_a_secret_shows_in_no_text_of_an_object(keys: LearnerKeys, own: PeerKeys) -> None:
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


@pytest.mark.parametrize(("role", "kind"), [("learner", LearnerKeys), ("peer", PeerKeys)])
@pytest.mark.parametrize("what", BAD_KEYS)
def test_a_secret_key_that_cannot_be_used_is_one_line_without_the_secret(
    tmp_path: Path, role: str, kind: type, what: str
) -> None:
    """Mounted wrongly, copied by halves, left open by `cp`: said before anything is waited for."""
    make(tmp_path, ["peer"])
    path = tmp_path / role / f"{role}.key_secret"
    _, secret = load_certificate(path)
    spoil, says = BAD_KEYS[what]
    spoil(path)
    with pytest.raises(ConfigError, match=says.format(path)) as caught:
        kind.of(str(tmp_path / role))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert secret.decode() not in str(caught.value)


def test_a_secret_that_a_group_may_read_is_taken(tmp_path: Path) -> None:
    """So Kubernetes mounts it for a user who is not root: root's, of the pod's group, 0440."""
    make(tmp_path, ["peer"])
    (tmp_path / "peer" / "peer.key_secret").chmod(0o440)
    assert PeerKeys.of(str(tmp_path / "peer")) is not None


def test_a_learner_that_would_let_nobody_in_says_so(tmp_path: Path) -> None:
    """The Secret was made of one file instead of the folder."""
    make(tmp_path, ["peer"])
    (tmp_path / "learner" / "peer.key").unlink()
    with pytest.raises(ConfigError, match=r"no peer may connect: found no file \*\.key in"):
        LearnerKeys.of(str(tmp_path / "learner"))


def test_the_public_key_of_the_learner_is_needed_by_a_peer(tmp_path: Path) -> None:
    """The folder of the other role was given."""
    make(tmp_path, ["peer"])
    with pytest.raises(ConfigError, match=r"No such file or directory at .*learner/peer\.key_secret"):
        PeerKeys.of(str(tmp_path / "learner"))
    (tmp_path / "peer" / "learner.key").unlink()
    with pytest.raises(ConfigError, match=r"No such file or directory at .*peer/learner\.key,"):
        PeerKeys.of(str(tmp_path / "peer"))


# -- who comes in ----------------------------------------------------------------------------------------------------------


def test_messages_cross_both_ways_between_those_who_know_each_other(folder: Path, keys: LearnerKeys) -> None:
    """Two peers with a key each, large frames and small."""
    with closing(ZmqLearner(ANY_PORT, keys=keys)) as learner:
        for name in ("peer", "second"):
            with closing(ZmqPeer(learner.endpoint, keys=PeerKeys.of(str(folder / name)))) as peer:
                route = greet(learner, peer)
                assert learner.received_key == PeerKeys.of(str(folder / name)).public.decode()
                assert peer.send([b"h", bytes(range(256)) * 4096])
                assert [bytes(frame) for frame in learner.receive(SOON)[1]] == [b"h", bytes(range(256)) * 4096]
                assert learner.send(route, [b"answer"])
                assert peer.receive(SOON) == [b"answer"]
        assert learner.handshakes.failed.total() == 0


def strangers(own: PeerKeys) -> dict[str, tuple[PeerKeys | None, set[Failure], str]]:
    """What comes to the learner's door, how that may be counted there, and what the peer says of it."""
    public, secret = zmq.curve_keypair()
    another, _ = zmq.curve_keypair()
    either = {Failure.MECHANISM, Failure.BROKEN}  # both sides see it, and who hangs up first is chance
    return {
        "unlisted": (changed(own, public=public, secret=secret), {Failure.KEY}, f"does not allow key {public.decode()}"),
        "without": (None, either, "(--keys)"),
        "misled": (
            changed(own, learner=another),
            {Failure.LEARNER_KEY},
            "the learner may still be starting; if it is not, learner.key here may not be the learner's",
        ),
    }


@pytest.mark.parametrize("who", ["unlisted", "without", "misled"])
def test_of_a_thousand_messages_of_a_stranger_none_comes_in(keys: LearnerKeys, own: PeerKeys, who: str) -> None:
    """A key that is not allowed, no key at all, another learner's key: counted, told on both sides, and others are served."""
    theirs, counted, says = strangers(own)[who]
    with (
        closing(ZmqLearner(ANY_PORT, keys=keys)) as learner,
        closing(ZmqPeer(learner.endpoint, keys=theirs)) as stranger,
        closing(ZmqPeer(learner.endpoint, keys=own)) as peer,
    ):
        route = greet(learner, peer)
        refused = lambda: min(learner.handshakes.failed.total(), stranger.handshakes.failed.total()) >= 2  # noqa: E731
        assert until(refused, learner, stranger) == 0
        assert set(learner.handshakes.failed) <= counted
        assert says in stranger.handshakes.detail
        assert sum(stranger.send([b"intruder"]) for _ in range(1000)) == 0
        assert peer.send([b"still here"])
        assert learner.receive(SOON) == (route, [b"still here"])
        assert learner.receive(TICK) is None
        assert peer.handshakes.failed.total() == 0


def test_a_stranger_that_queues_before_it_is_refused_brings_nothing_in(
    keys: LearnerKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of another make does not wait for its connection to stand, as ours do: 1000 messages are under way at once."""
    public, secret = zmq.curve_keypair()
    monkeypatch.setattr(adapter, "ATTEND_SECONDS", 0.0)
    with closing(ZmqLearner(ANY_PORT, keys=keys)) as learner, zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.curve_publickey, raw.curve_secretkey, raw.curve_serverkey = public, secret, keys.public
        raw.connect(learner.endpoint)
        for _ in range(1000):
            raw.send(b"intruder", zmq.DONTWAIT)
        while not learner.handshakes.failed[Failure.KEY]:
            assert learner.receive(TICK) is None
        assert f"key {public.decode()} of 127.0.0.1 is not among those" in learner.handshakes.detail
        assert learner.receive(TICK) is None


def test_a_stranger_cannot_make_the_learner_store_an_unfinished_message(keys: LearnerKeys) -> None:
    """It is cut off before its first message: only a sender with a key can fill a learner's memory."""
    with closing(ZmqLearner(ANY_PORT, keys=keys)) as learner, zmtp.dial(learner.endpoint) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(zmtp.GREETING + zmtp.READY + zmtp.part(bytes(1 << 20), more=True))
            while stranger.recv(4096):
                pass
        assert learner.receive(TICK) is None


def test_a_learner_that_reopens_asks_for_keys_as_before(folder: Path, keys: LearnerKeys, own: PeerKeys) -> None:
    """Its socket is new, and so is the gate."""
    with (
        closing(ZmqLearner(ANY_PORT, keys=keys)) as learner,
        closing(ZmqPeer(learner.endpoint, keys=own)) as peer,
        closing(ZmqPeer(learner.endpoint)) as stranger,
    ):
        greet(learner, peer)
        learner.reopen()
        failed = learner.handshakes.failed.total()
        assert until(lambda: learner.handshakes.failed.total() > failed, learner, stranger) == 0
        with closing(ZmqPeer(learner.endpoint, keys=PeerKeys.of(str(folder / "second")))) as second:
            greet(learner, second)


def test_who_has_keys_does_not_speak_to_a_learner_without(own: PeerKeys) -> None:
    """Somebody else answers at the learner's address: nothing is sent to it, not even a greeting."""
    with closing(ZmqLearner(ANY_PORT)) as learner, closing(ZmqPeer(learner.endpoint, keys=own)) as peer:
        failed = lambda: learner.handshakes.failed.total() and peer.handshakes.failed.total()  # noqa: E731
        assert until(failed, learner, peer) == 0


def test_who_is_allowed_later_comes_in_by_itself(folder: Path, keys: LearnerKeys, own: PeerKeys) -> None:
    """An actor with a new key is up before the learner knows it: the learner is started again, and the actor is not."""
    narrow = LearnerKeys(public=keys.public, secret=keys.secret, allowed=frozenset({PeerKeys.of(str(folder / "second")).public}))
    with closing(ZmqLearner(ANY_PORT, keys=narrow)) as first, closing(ZmqPeer(first.endpoint, keys=own)) as peer:
        until(lambda: peer.handshakes.failed[Failure.KEY] > 0, first, peer)
        first.close()
        with closing(ZmqLearner(first.endpoint, keys=keys)) as second:
            greet(second, peer)


def test_a_learner_that_comes_back_with_its_keys_is_found_again(keys: LearnerKeys, own: PeerKeys) -> None:
    """Killed and restarted: nobody is told anything."""
    with closing(ZmqLearner(ANY_PORT, keys=keys)) as first, closing(ZmqPeer(first.endpoint, keys=own)) as peer:
        greet(first, peer)
        first.close()
        while peer.send([b"into the void"]):
            assert peer.receive(TICK) is None
        with closing(ZmqLearner(first.endpoint, keys=keys)) as second:
            route = greet(second, peer, b"hello again")
            assert second.send(route, [b"welcome"])
            assert peer.receive(SOON) == [b"welcome"]


def test_without_a_gate_nobody_comes_in(keys: LearnerKeys, own: PeerKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of ours must close the door: ZeroMQ by itself would let any key in."""
    monkeypatch.setattr(curve.Gate, "answer", lambda _: None)
    monkeypatch.setitem(adapter._MILLISECONDS, zmq.HANDSHAKE_IVL, 100)
    with closing(ZmqLearner(ANY_PORT, keys=keys)) as learner, closing(ZmqPeer(learner.endpoint, keys=own)) as peer:
        learner._poller.unregister(learner._gate.socket)
        learner._gate.close()
        assert until(lambda: peer.handshakes.failed.total() > 0, learner, peer) == 0


def test_a_learner_that_never_has_to_wait_lets_new_peers_in_too(keys: LearnerKeys, own: PeerKeys) -> None:
    """One peer keeps it busy without a pause; the gate must not be what is done when there is nothing else to do."""
    with (
        closing(ZmqLearner(ANY_PORT, keys=keys)) as learner,
        closing(ZmqPeer(learner.endpoint, keys=own)) as busy,
        closing(ZmqPeer(learner.endpoint, keys=own)) as late,
    ):
        greeted = None
        learner._wait = lambda _: False  # as if a message had been there each time
        while greeted is None or greeted[1] != [b"late"]:
            busy.send([b"busy"])
            late.send([b"late"])
            busy.receive(0.0)
            late.receive(0.0)
            greeted = learner.receive(0.0)


def test_handshakes_that_nobody_looks_at_hold_up_nobody(keys: LearnerKeys) -> None:
    """A learner loads its checkpoint while peers knock: closing waits for nothing. Whether thousands block is not shown."""
    learner = ZmqLearner(ANY_PORT, keys=keys)
    events = learner._watch._events
    with closing(ZmqPeer(learner.endpoint)) as stranger:
        while stranger.handshakes.failed.total() < 3:
            stranger.receive(TICK)
    learner.close()
    assert events.closed
    assert learner._gate.socket.closed
    learner.close()


def test_an_end_closes_in_the_middle_of_a_handshake(keys: LearnerKeys, own: PeerKeys) -> None:
    """SIGTERM just as an actor connects: nobody answers at the gate any more."""
    learner = ZmqLearner(ANY_PORT, keys=keys, linger=SOON)
    with closing(ZmqPeer(learner.endpoint, keys=own, linger=SOON)):
        assert learner._gate.socket.poll(round(SOON))
        learner.close()


# -- what is told ------------------------------------------------------------------------------------------------------------


def test_what_fails_is_told_at_once_then_seldom_and_none_is_lost() -> None:
    """A peer that is refused asks every second, for days."""
    handshakes = Handshakes()
    assert handshakes.news(0.0) is None
    handshakes.failed[Failure.KEY] += 1
    handshakes.detail = "no"
    note = handshakes.news(100.0)
    assert (note.event, note.fields, note.warning) == ("handshake_failed", {"times": 1, "detail": "no"}, True)
    handshakes.failed[Failure.BROKEN] += 2
    assert handshakes.news(100.0 + TELL_SECONDS / 2) is None
    assert handshakes.news(100.0 + TELL_SECONDS).fields["times"] == 2
    assert handshakes.news(1000.0) is None
