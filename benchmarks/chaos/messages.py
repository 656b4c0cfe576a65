"""Hostile messages for a learner's port, each kind one function of a seeded generator, from message parts to message parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgpack
import numpy as np

from common.protocol import codec
from common.protocol.limits import HEADER_BYTES, INTEGER_MAX
from common.protocol.messages import (
    PROTOCOL_VERSION,
    Arrays,
    ArraySpec,
    Dropped,
    Envelope,
    Goodbye,
    Hello,
    Message,
    Report,
    SnapshotWanted,
    Trajectory,
)

Frames: TypeAlias = Sequence[bytes]
_FREE = 3  # rows of an array whose length the sender chooses


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The facts of the run that a flooder takes from its own Welcome."""

    run: str = ""
    schema: tuple[ArraySpec, ...] = ()


def hello(chance: random.Random, target: Target) -> Frames:
    """Return a Hello that uses a connected worker's name with a huge incarnation, in either role."""
    message = Hello(
        role=chance.choice(("actor", "evaluator")),
        worker=chance.choice(("actor-0", "actor-1", "evaluator")),
        incarnation=chance.choice((INTEGER_MAX, INTEGER_MAX - 1, 2**62)),
        software="flooder",
        env_signature="",
        resend_from=chance.choice((0, 1, 2**40)),
        completed=chance.choice((0, 2**40)),
        produced=chance.choice((0, 2**40)),
    )
    return encode(target, message)


def trajectory(chance: random.Random, target: Target) -> Frames:
    """Return experience by the run's schema that no environment made; some of it NaN or absurdly large."""
    arrays: Arrays = {spec.name: _array(chance, spec) for spec in target.schema}
    valid = arrays.get("valid")
    message = Trajectory(
        seq=chance.choice((0, 1, chance.randrange(1000), 2**40)),
        version=chance.choice((0, 1, chance.randrange(100), 2**40)),
        env_steps=int(np.count_nonzero(valid)) if valid is not None else 64,
        env_steps_sent=chance.choice((64, 640, 2**40)),
        arrays=arrays,
    )
    return encode(target, message)


def counters(chance: random.Random, target: Target) -> Frames:
    """Return a Report or Goodbye with counters far above the true ones."""
    dropped = (Dropped(reason=chance.choice(("unfinished", "x" * 100)), env_steps=2**40),)
    message: Message = Report(produced=2**41, dropped=dropped)
    if chance.random() < 0.1:  # noqa: PLR2004
        message = Goodbye(reason="\x1b[2J" * 10, produced=2**41, dropped=dropped)
    return encode(target, message)


def mutated(chance: random.Random, target: Target) -> Frames:
    """Return a message of any kind with some bytes changed, cut or repeated."""
    frames = [bytearray(frame) for frame in chance.choice((hello, trajectory, counters, wanted))(chance, target)]
    for _ in range(chance.randrange(1, 5)):
        frame = chance.choice(frames)
        place = chance.randrange(len(frame) + 1)
        change = chance.randrange(4)
        if change == 0:
            frame[place : place + 1] = chance.randbytes(1)
        elif change == 1:
            del frame[place:]
        elif change == 2:  # noqa: PLR2004
            frame[place:place] = chance.randbytes(chance.randrange(9))
        else:
            frames.append(bytearray(frame[:place]))
    return [bytes(frame) for frame in frames]


_BOMBS = (
    b"\x81" * HEADER_BYTES,
    b"\x91" * (HEADER_BYTES - 1) + b"\xc0",
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    msgpack.packb({"v": PROTOCOL_VERSION, "tag": "hello", "run": "x" * 30_000}),
    msgpack.packb({str(number): {} for number in range(2000)}),
    b"GET / HTTP/1.1\r\n\r\n",
)


def bomb(chance: random.Random, _: Target) -> Frames:
    """Return a header that would become much larger, or nest deeply, if it were unpacked without a limit; or random bytes."""
    return [chance.choice((*_BOMBS, chance.randbytes(200)))]


def wanted(_: random.Random, target: Target) -> Frames:
    """Return a request for a snapshot; the sender may have closed its connection before the snapshot comes."""
    return encode(target, SnapshotWanted(after=-1))


KINDS: tuple[Callable[[random.Random, Target], Frames], ...] = (hello, trajectory, counters, mutated, bomb, wanted)
WEIGHTS = (2, 3, 1, 4, 2, 1)
REPLAYED = 0.1  # share of messages that are sent a second time, to the bit


def flood(chance: random.Random, target: Callable[[], Target]) -> Iterator[Frames]:
    """Yield hostile messages without end; the same seed and targets give the same messages."""
    sent: list[Frames] = []
    while True:
        if sent and chance.random() < REPLAYED:
            yield chance.choice(sent)
            continue
        frames = chance.choices(KINDS, WEIGHTS)[0](chance, target())
        if len(sent) < 1000:  # noqa: PLR2004
            sent.append(frames)
        yield frames


def own_hello(target: Target, name: str) -> Frames:
    """Return an honest actor's first greeting, which a learner answers with the run's schema."""
    message = Hello(
        role="actor", worker=name, incarnation=1, software="flooder", env_signature="", resend_from=0, completed=0, produced=0
    )
    return encode(target, message)


def encode(target: Target, message: Message) -> Frames:
    """Return the parts of a message of the target's run."""
    return [bytes(frame) for frame in codec.encode(Envelope(run=target.run, message=message))]


def _array(chance: random.Random, spec: ArraySpec) -> np.ndarray:
    shape = tuple(_FREE if size < 0 else size for size in spec.shape)
    array = np.zeros(shape, spec.dtype)
    if spec.dtype == "bool":
        array[...] = spec.name == "valid"
    elif array.dtype.kind == "f" and array.size:
        array.flat[chance.randrange(array.size)] = chance.choice((0.0, 1.0, 3e38, float("nan"), float("inf")))
    return array


def learned(target: Target, frames: Sequence[bytes]) -> Target:
    """Return the target, extended by the facts about the run that an answer of the learner contains."""
    try:
        envelope = codec.decode(frames)
    except Exception:  # noqa: BLE001  an unreadable answer contains no facts
        return target
    schema = getattr(envelope.message, "schema", ())
    return replace(target, run=envelope.run, schema=schema or target.schema)
