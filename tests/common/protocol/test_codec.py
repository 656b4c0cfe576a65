"""Messages to frames and back: golden bytes, round trips, hostile bytes, and what they may cost."""

from __future__ import annotations

import tracemalloc
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from common.errors import DecodeError, DropReason, InternalError, ProtocolVersionError
from common.protocol import codec, limits
from common.protocol.codec import decode, encode
from common.protocol.messages import (
    MESSAGE_TYPES,
    PROTOCOL_VERSION,
    WORKER_NAME,
    Act,
    ArraySpec,
    Credit,
    Drain,
    Dropped,
    Envelope,
    Evaluation,
    Goodbye,
    Gradient,
    Hello,
    Message,
    Observe,
    Refusal,
    Reject,
    Report,
    Snapshot,
    SnapshotWanted,
    Trajectory,
    Welcome,
)

pytestmark = pytest.mark.wire

GOLDEN = Path(__file__).parent / "golden"
T, B = 3, 2

ROLLOUT = {
    "obs": np.arange((T + 1) * B * 4, dtype=np.uint8).reshape(T + 1, B, 4),
    "start": np.array([[True, True], [False, False], [False, True], [False, False]]),
    "action": np.array([[0, 1], [2, 3], [4, 5]], np.int64),
    "reward": np.array([[0.0, -1.0], [0.5, 1.0], [0.0, 21.0]], np.float32),
    "episode_return": np.zeros(0, np.float32),
}
MESSAGES: tuple[Message, ...] = (
    Hello(
        role="actor", worker="actor-0", incarnation=7, software="0.1.0", env_signature="8c1f",
        resend_from=3, completed=6144, produced=9000, welcomed=True,
    ),
    Welcome(
        index=1, generation=2, config='{"seed": 1}', env_signature="8c1f", credits=2, version=5, heartbeat_seconds=2.0,
        incarnation=7, snapshot_bytes=9000,
        schema=(
            ArraySpec(name="obs", dtype="uint8", shape=(4, 2, 4)),
            ArraySpec(name="episode_return", dtype="float32", shape=(-1,)),
        ),
    ),
    Refusal(code="environment", reason="another environment: found 8c1f, wanted 77aa", retry=False),
    Trajectory(seq=4, version=5, env_steps=6, env_steps_sent=9006, arrays=ROLLOUT),
    Gradient(seq=4, version=5, env_steps=6, env_steps_sent=9006, arrays={"gradient": np.array([1.0, -0.5], np.float32)}),
    Credit(acked=4, credits=2, version=6, rejects=(Reject(seq=3, reason="non_finite", detail="array reward at [0, 1]"),)),
    SnapshotWanted(after=-1),
    Snapshot(
        version=6, env_steps=12288, precision="bf16", layout="f00d",
        arrays={"parameters": np.array([0x3F80, 0xBF80], np.uint16)},
    ),
    Report(produced=9100, dropped=(Dropped(reason="unfinished", env_steps=94),)),
    Evaluation(
        version=6, mode="greedy",
        arrays={"episode_return": np.array([21.0], np.float32), "episode_length": np.array([1684], np.int32)},
    ),
    Goodbye(reason="SIGTERM", produced=9100, dropped=()),
    Drain(reason="solved", deadline_seconds=5.0),
    Act(number=3, arrays={"action": np.array([0, 2], np.int64)}),
    Observe(
        number=3,
        arrays={"observation": np.array([[0.5], [1.5]], np.float32), "valid": np.array([True, False])},
    ),
)  # fmt: skip
by_tag = pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.tag)


def envelope(message: Message) -> Envelope:
    """The message as one of a run."""
    return Envelope(run="pong-1", message=message)


def assert_same(found: Envelope, wanted: Envelope) -> None:
    """Equal in every field and its type, and in every bit of every array."""
    assert (found.run, type(found.message)) == (wanted.run, type(wanted.message))
    for field in fields(wanted.message):
        one, other = getattr(found.message, field.name), getattr(wanted.message, field.name)
        if field.name != "arrays":
            assert one == other
            assert type(one) is type(other)
            continue
        assert list(one) == list(other)
        for name in other:
            assert (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
            assert one[name].tobytes() == other[name].tobytes()


def header_of(frames: list[Any]) -> dict[str, Any]:
    """The header as any msgpack library shows it."""
    return msgpack.unpackb(frames[0])


def with_header(frames: list[Any], **changes: object) -> list[Any]:
    """The same message with entries of its header replaced."""
    return [msgpack.packb(header_of(frames) | changes), *frames[1:]]


# Golden bytes.


def test_every_message_type_has_a_golden_file() -> None:
    """A new message cannot be forgotten: the list of samples is the list of messages."""
    assert [type(message) for message in MESSAGES] == list(MESSAGE_TYPES)


@by_tag
def test_bytes_on_the_wire_are_those_of_the_golden_file(message: Message) -> None:
    """Two releases talk to one another: bytes may only change with intent.

    To regenerate on purpose: delete the files, run this test (it writes them and fails), look at the change, commit it.
    Format: every frame as its length, 8 bytes little-endian, and its bytes.
    """
    path = GOLDEN / f"{message.tag}.bin"
    data = b"".join(len(frame).to_bytes(8, "little") + bytes(frame) for frame in encode(envelope(message)))
    if not path.exists():
        path.write_bytes(data)
        pytest.fail(f"{path} was missing and is written now: look at it and commit it")
    assert data == path.read_bytes()


@by_tag
def test_golden_files_are_understood(message: Message) -> None:
    """A worker of the release that wrote these bytes is understood by this one."""
    data, frames = (GOLDEN / f"{message.tag}.bin").read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        frames.append(data[8 : 8 + size])
        data = data[8 + size :]
    assert_same(decode(frames), envelope(message))


# Round trips.


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of one kind of field."""
    if is_dataclass(hint):
        return st.builds(hint, **{name: values(kind) for name, kind in get_type_hints(hint).items()})
    if get_args(hint):
        return st.lists(values(get_args(hint)[0]), max_size=4).map(tuple)
    return {
        int: st.integers(0, limits.INTEGER_MAX),
        float: st.floats(0, allow_infinity=False),
        bool: st.booleans(),
        str: st.text(max_size=40),
    }[hint]


arrays_of_any_kind = st.dictionaries(
    st.sampled_from(["obs", "reward", "parameters", "x"]),
    st.tuples(
        st.sampled_from(["bool", "uint8", "uint16", "int32", "int64", "float16", "float32", "float64"]),
        st.lists(st.integers(0, 4), max_size=4),
    ).map(lambda kind: np.ones(kind[1], kind[0])),
)


def any_message() -> st.SearchStrategy[Message]:
    """Messages of every type with any content."""

    def build(cls: type[Message]) -> st.SearchStrategy[Message]:
        hints = {f.name: get_type_hints(cls)[f.name] for f in fields(cls) if f.name != "arrays"}
        contents = {name: values(hint) for name, hint in hints.items()}
        if cls is Hello:
            contents["worker"] = st.from_regex(WORKER_NAME, fullmatch=True)
        return st.builds(cls, arrays=arrays_of_any_kind, **contents)

    return st.one_of(*map(build, MESSAGE_TYPES))


@given(st.text(max_size=40), any_message())
def test_what_is_decoded_is_what_was_encoded(run: str, message: Message) -> None:
    """Every message with any content: names in any script, empty arrays, scalars, numbers up to the limits."""
    sent = Envelope(run=run, message=message)
    assert_same(decode([bytes(frame) for frame in encode(sent)]), sent)


def test_arrays_cross_without_a_copy_and_are_read_only() -> None:
    """14 MB of frames per rollout: nothing is copied on the way out or in, and nobody can write to what was received."""
    frames = encode(envelope(MESSAGES[3]))
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), ROLLOUT["obs"])
    message = decode(frames).message
    assert np.shares_memory(message.arrays["obs"], ROLLOUT["obs"])
    with pytest.raises(ValueError, match="read-only"):
        message.arrays["reward"][0, 0] = 1.0
    with pytest.raises(TypeError):
        message.arrays["reward"] = 1


def test_an_unknown_field_of_a_newer_worker_is_ignored() -> None:
    """A worker of a later release adds a field, at the top and inside a list: this one goes on."""
    credit = MESSAGES[5]
    frames = encode(envelope(credit))
    rejects = [entry | {"colour": [1, {}]} for entry in header_of(frames)["rejects"]]
    assert_same(decode(with_header(frames, future={"a": None}, rejects=rejects)), envelope(credit))


def test_a_missing_field_takes_its_default_and_no_arrays_are_none() -> None:
    """A worker of an earlier release does not know a field that was added with a default."""
    fields_ = {"v": PROTOCOL_VERSION, "tag": "credit", "run": "r", "acked": 1, "credits": 2, "version": 3}
    assert decode([msgpack.packb(fields_)]).message == Credit(acked=1, credits=2, version=3)


def test_no_field_hides_behind_the_keys_of_the_header() -> None:
    assert not {field.name for cls in MESSAGE_TYPES for field in fields(cls)} & {"v", "tag", "run"}


# Refusals, each with its sentence.


def test_another_protocol_version_is_told_apart_and_names_both() -> None:
    """A learner of another release answers with a sentence: `Refusal(code="protocol")`."""
    frames = with_header(encode(envelope(MESSAGES[0])), v=9, tag="howdy", role=None)
    with pytest.raises(ProtocolVersionError, match=f"protocol version: found 9, wanted {PROTOCOL_VERSION}") as caught:
        decode(frames)
    assert (caught.value.found, caught.value.wanted, caught.value.reason) == (9, PROTOCOL_VERSION, DropReason.DECODE)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"v": None}, "header.v: found None, wanted an integer"),
        ({"v": True}, "header.v: found True"),
        ({"tag": "howdy"}, "message tag: found 'howdy', wanted hello, welcome"),
        ({"tag": 3}, "header.tag: found 3, wanted a string"),
        ({"run": b"r"}, "header.run: found b'r', wanted a string"),
        ({"seq": -1}, "trajectory.seq: found -1, wanted an integer from 0"),
        ({"seq": 1.0}, "trajectory.seq: found 1.0"),
        ({"seq": True}, "trajectory.seq: found True"),
        ({"seq": 2**63}, "trajectory.seq: found 9223372036854775808"),
        ({"arrays": {}}, "header.arrays: found {}, wanted a list"),
        ({"arrays": []}, "parts of arrays: found 5, wanted 0 as declared"),
        ({"arrays": [1] * 5}, "declaration of an array: found 1, wanted"),
        ({"arrays": [["obs", "uint8"]] * 5}, "declaration of an array"),
        ({"arrays": [["obs", 8, [1]]] * 5}, "declaration of an array"),
        ({"arrays": [["obs", "uint8", [4, 2, 4]]] * 5}, "name of an array twice: found 'obs'"),
    ],
)
def test_a_wrong_header_is_refused_with_a_sentence(changes: dict[str, object], sentence: str) -> None:
    """A worker with a bug: its operator reads what was found and what was wanted."""
    with pytest.raises(DecodeError, match=sentence):
        decode(with_header(encode(envelope(MESSAGES[3])), **changes))


@by_tag
def test_a_missing_field_is_refused_by_name(message: Message) -> None:
    frames = encode(envelope(message))
    found = header_of(frames)
    name = next(field.name for field in fields(message) if field.name != "arrays")
    del found[name]
    with pytest.raises(DecodeError, match=f"{message.tag}.{name}: found nothing, wanted a value"):
        decode([msgpack.packb(found), *frames[1:]])


def test_no_frames_and_wrong_numbers_of_frames_are_refused() -> None:
    """Frames lost or added on the way."""
    frames = encode(envelope(MESSAGES[3]))
    for wrong in ([], frames[:1], frames[:-1], [*frames, b""], frames[1:]):
        with pytest.raises(DecodeError):
            decode(wrong)


def test_a_message_larger_than_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many arrays within their own limits still may not add up to everything the machine has."""
    frames = encode(envelope(MESSAGES[3]))
    monkeypatch.setattr(codec, "MESSAGE_BYTES", 100)
    with pytest.raises(DecodeError, match="bytes of the message: found 112, wanted at most 100"):
        decode(frames)
    with pytest.raises(InternalError, match="message too large"):
        encode(envelope(MESSAGES[3]))


def test_an_array_larger_than_its_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "ARRAY_BYTES", 20)
    with pytest.raises(InternalError, match="message too large"):
        encode(envelope(MESSAGES[3]))


def test_what_the_other_side_would_refuse_is_not_sent() -> None:
    """A bug of ours shows where it is, not as a refusal on another machine."""
    many = tuple(Reject(seq=i, reason="stale", detail="") for i in range(limits.HEADER_CONTAINERS))
    for message in (
        Credit(acked=1, credits=1, version=1, rejects=many),
        Drain(reason="x" * (limits.STRING_BYTES + 1), deadline_seconds=1.0),
        Drain(reason="\ud800", deadline_seconds=1.0),
        SnapshotWanted(after=2**64),
        Snapshot(version=1, env_steps=0, precision="fp32", layout="", arrays={"parameters": np.zeros(2, np.complex64)}),
        Snapshot(
            version=1, env_steps=0, precision="fp32", layout="", arrays={f"a{i}": np.zeros(1) for i in range(limits.ARRAYS + 1)}
        ),
    ):
        with pytest.raises(InternalError):
            encode(envelope(message))


# Names of workers.


@pytest.mark.parametrize("name", ["a", "_", "0", "evaluator-" + "h" * 64 + "-4194304", "pod-7.actors.svc:5700", "x" * 128])
def test_a_name_made_of_host_and_process_is_taken(name: str) -> None:
    """The default name of an actor must always be valid."""
    assert decode(with_header(encode(envelope(MESSAGES[0])), worker=name)).message.worker == name


@pytest.mark.parametrize(
    "name", ["", "..", "-rf", "a/b", "a b", "a\n", "a\x1b[2J", "r\u00f6\u00f6k", 'a"} 1', "x" * 129, "x" * 30000]
)
def test_a_name_that_is_unsafe_to_print_is_refused(name: str) -> None:
    """It goes to log lines, and may go to file names and labels: a fact, what was found, what was wanted."""
    with pytest.raises(DecodeError, match=r"^hello.worker: found .*, wanted 1 to 128 of A-Z a-z 0-9 _ . : -") as refused:
        decode(with_header(encode(envelope(MESSAGES[0])), worker=name))
    assert len(str(refused.value)) < 200


# Hostile bytes.


def outcome(frames: list[Any]) -> str:
    """The tag of the message, or that it was refused; any other exception fails the test."""
    try:
        return decode(frames).message.tag
    except DecodeError as error:
        assert len(str(error)) < 1000  # noqa: PT017  (a log line, whatever was sent)
        return "refused"


def peak_bytes(frames: list[Any]) -> int:
    """The most that decoding `frames` holds at once beyond the frames themselves."""
    outcome(frames)
    tracemalloc.start()
    try:
        outcome(frames)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def assert_affordable(frames: list[Any]) -> None:
    """The law of the limits."""
    assert peak_bytes(frames) <= 4 * sum(map(len, frames)) + limits.DECODE_FLOOR_BYTES


mutation = st.tuples(st.sampled_from(["flip", "cut", "insert", "swap", "drop", "twice"]), st.integers(0), st.binary(max_size=9))


def mutate(frames: list[bytes], kind: str, where: int, data: bytes) -> list[bytes]:
    """One change to one frame."""
    if not frames:
        return [data]
    # Half of all changes go to the header, where the decisions are.
    index = 0 if where % 2 else where // 2 % len(frames)
    frame, place = frames[index], where // 7 % (len(frames[index]) + 1)
    changed = {
        "flip": [frame[:place] + data + frame[place + len(data) :]],
        "cut": [frame[:place]],
        "insert": [frame[:place] + data + frame[place:]],
        "swap": [frame[place:] + frame[:place]],
        "drop": [],
        "twice": [frame, frame],
    }[kind]
    return frames[:index] + changed + frames[index + 1 :]


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(MESSAGES), st.lists(mutation, min_size=1, max_size=6))
def test_a_mutated_message_is_a_message_or_a_protocol_error(message: Message, mutations: list[tuple[str, int, bytes]]) -> None:
    """As from corrupted memory, a faulty worker, or an attacker with recorded traffic."""
    frames = [bytes(frame) for frame in encode(envelope(message))]
    for kind, where, data in mutations:
        frames = mutate(frames, kind, where, data)
    outcome(frames)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=150)
@given(st.data(), st.sampled_from(MESSAGES), json_like)
def test_any_value_in_any_field_is_a_message_or_a_protocol_error(data: st.DataObject, message: Message, value: object) -> None:
    """Well-formed msgpack that lies: another type, a huge number, NaN, a nested thing where a number belongs."""
    frames = encode(envelope(message))
    outcome(with_header(frames, **{data.draw(st.sampled_from(sorted(header_of(frames)))): value}))


@settings(max_examples=150)
@given(st.lists(st.binary(max_size=2000), max_size=4))
@example([b"\x81" * 5000])
@example([b"\xc1"])
def test_random_bytes_are_a_protocol_error(frames: list[bytes]) -> None:
    """Somebody connects a browser to the port."""
    assert outcome(frames) == "refused"


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.lists(st.binary(max_size=5000), max_size=3), json_like.map(lambda value: [msgpack.packb({"v": 1, "tag": value})])
    )
)
def test_decoding_anything_stays_within_four_times_the_input(frames: list[bytes]) -> None:
    """An attacker pays for every byte that the learner holds."""
    assert_affordable(frames)
