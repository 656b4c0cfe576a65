"""All errors of the project, by cause.

    RookeryError
    ├── ConfigError      an invalid setting, command line, environment or preset             exit code 2
    ├── ResourceError    a port, a folder, a checkpoint, a ROM that cannot be used           exit code 2
    ├── ProtocolError    an invalid message: counted and logged, and never ends the process
    │   └── DecodeError  bytes that are not a message of this protocol
    │       └── ProtocolVersionError  a message of another protocol version: answered with a Refusal
    ├── LostRankError    another rank of a learner has ended, so that this one cannot train on        exit code 1
    ├── RunChangedError  the run goes on with other settings: a worker is built anew
    └── InternalError    a broken invariant, which is a bug of the project                   exit code 1

A message is a fact, the value found, the value wanted, and what to do. Text of other processes may be part of it: characters that
a terminal would execute are escaped.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class DropReason(StrEnum):
    """Why experience (or a message) did not reach a batch. The closed list of the `reason` label."""

    DECODE = "decode"  # bytes that are no message
    SCHEMA = "schema"  # arrays of another name, dtype or shape than the run's
    NON_FINITE = "non_finite"  # NaN or infinity in a float array
    OUT_OF_RANGE = "out_of_range"  # finite numbers that training in float32 would not survive
    EPISODES = "episodes"  # returns or lengths of episodes that contradict the rewards and ends of the message
    VERSION = "version"  # acted with a policy version that was never published
    STALE = "stale"  # older than the largest policy lag the run accepts
    DUPLICATE = "duplicate"  # a re-sent message that had arrived already
    UNCREDITED = "uncredited"  # sent, or claimed as sent, beyond every window, or by a worker that has none
    GAP = "gap"  # a sequence number that never came
    UNKNOWN_SENDER = "unknown_sender"  # from a sender that has not been welcomed
    ROLLED_BACK = "rolled_back"  # trained after the checkpoint of a resume, or lost with a replaced incarnation in lockstep
    WORKER_LOST = "worker_lost"  # in flight when the worker's account was closed
    UNFINISHED = "unfinished"  # a rollout cut short by the end of its actor
    RUN_ENDED = "run_ended"  # still queued when the learner stopped


BAD_CONTENT: Final = (DropReason.DECODE, DropReason.SCHEMA, DropReason.NON_FINITE, DropReason.OUT_OF_RANGE, DropReason.EPISODES)
"""Drop reasons that lie in the content of a message: only a faulty or hostile sender causes them."""

REFUSED_EXPERIENCE: Final = tuple(reason for reason in BAD_CONTENT if reason is not DropReason.DECODE)
"""Drop reasons of experience with bad content. Bytes that cannot be decoded may be of any message and sender."""


class HandshakeFailure(StrEnum):
    """Why a connection ended before its first message. The closed list of the `reason` label."""

    KEY = "key"  # the worker's key is not among those that may connect
    LEARNER_KEY = "learner_key"  # the worker takes the learner for one that has another key
    MECHANISM = "mechanism"  # one side has keys, and the other has none
    BROKEN = "broken"  # ended or fell silent in the middle, or did not use ZeroMQ's protocol


class RookeryError(Exception):
    """Base of all errors raised on purpose: `fact: found X, wanted Y; do Z`."""

    exit_code = 1

    def __init__(self, fact: str, *, found: object = None, wanted: object = None, fix: str = "") -> None:
        """Compose the message; `found` and `wanted` are shown with `repr` unless they are strings."""
        self.fact, self.found, self.wanted, self.fix = fact, found, wanted, fix
        parts = [f"{name} {_shown(value)}" for name, value in (("found", found), ("wanted", wanted)) if value is not None]
        text = fact + (": " + ", ".join(parts) if parts else "")
        super().__init__(escape_control_characters(text + (f"; {fix}" if fix else "")))


def _shown(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def escape_control_characters(text: str) -> str:
    """Return `text` with every character that is not printable, other than a line break, as Python escapes it."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


class ConfigError(RookeryError):
    """An invalid setting or argument, refused before anything is written."""

    exit_code = 2


class ResourceError(RookeryError):
    """The machine, the disk or a file lacks a resource that the run needs."""

    exit_code = 2


class LostRankError(RookeryError):
    """Another rank of the learner has ended or hangs: this one ends too, and the launcher restarts it."""


class RunChangedError(RookeryError):
    """The learner was resumed with other settings: a worker that was built from the earlier ones is built anew."""


class ProtocolError(RookeryError):
    """An invalid message of another process, with the drop reason under which it is counted."""

    def __init__(self, reason: DropReason, fact: str, *, found: object = None, wanted: object = None, fix: str = "") -> None:
        super().__init__(fact, found=found, wanted=wanted, fix=fix)
        self.reason = reason


class DecodeError(ProtocolError):
    """Bytes that are not a message of this protocol version."""

    def __init__(self, fact: str, *, found: object = None, wanted: object = None) -> None:
        super().__init__(DropReason.DECODE, fact, found=found, wanted=wanted)


class ProtocolVersionError(DecodeError):
    """A message of another protocol version; `found` and `wanted` are the two versions."""

    def __init__(self, *, found: int, wanted: int) -> None:
        super().__init__("protocol version", found=found, wanted=wanted)


class InternalError(RookeryError):
    """A broken invariant of the project."""
