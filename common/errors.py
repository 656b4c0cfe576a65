"""Every error of the project, split by whose fault it is.

    RookeryError
    ├── ConfigError      the user's: a setting, a command line, an environment, a preset      exit code 2
    ├── ResourceError    the machine's: a port, a folder, a checkpoint, a missing ROM         exit code 2
    ├── PeerError        the other side's: costs a counter and a log line, never the process
    │   └── DecodeError  bytes that are not a message of this protocol
    │       └── ProtocolVersionError  a message of another protocol version: answered with a Refusal
    └── InternalError    ours: a broken invariant, worth a bug report                         exit code 1

A message is a fact, the value found, the value wanted, and what to do about it.
"""

from __future__ import annotations

from enum import StrEnum


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
    UNCREDITED = "uncredited"  # sent beyond every window, or by a peer that has none
    GAP = "gap"  # a sequence number that never came
    STRANGER = "stranger"  # from a peer that has not been welcomed
    ROLLED_BACK = "rolled_back"  # trained on after the checkpoint from which the learner resumed
    PEER_LOST = "peer_lost"  # reported as produced by a peer that then died
    UNFINISHED = "unfinished"  # a rollout cut short by the end of its actor
    RUN_ENDED = "run_ended"  # still queued when the learner stopped


class RookeryError(Exception):
    """Base of all errors raised on purpose: `fact: found X, wanted Y; do Z`."""

    exit_code = 1

    def __init__(self, fact: str, *, found: object = None, wanted: object = None, fix: str = "") -> None:
        """Compose the one-line message; `found` and `wanted` are shown with `repr` unless they are strings."""
        self.fact, self.found, self.wanted, self.fix = fact, found, wanted, fix
        parts = [f"{name} {_shown(value)}" for name, value in (("found", found), ("wanted", wanted)) if value is not None]
        text = fact + (": " + ", ".join(parts) if parts else "")
        super().__init__(text + (f"; {fix}" if fix else ""))


def _shown(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


class ConfigError(RookeryError):
    """The user asked for something that cannot be: refused before anything is written."""

    exit_code = 2


class ResourceError(RookeryError):
    """The machine, the disk or a file does not give what the run needs."""

    exit_code = 2


class PeerError(RookeryError):
    """The other side broke the protocol. Carries the drop reason that is counted."""

    def __init__(self, reason: DropReason, fact: str, *, found: object = None, wanted: object = None, fix: str = "") -> None:
        """As `RookeryError`, with the `reason` under which the message is counted."""
        super().__init__(fact, found=found, wanted=wanted, fix=fix)
        self.reason = reason


class DecodeError(PeerError):
    """Bytes that are not a message of this protocol version."""

    def __init__(self, fact: str, *, found: object = None, wanted: object = None) -> None:
        """Always counted under `DropReason.DECODE`."""
        super().__init__(DropReason.DECODE, fact, found=found, wanted=wanted)


class ProtocolVersionError(DecodeError):
    """A message of another protocol version; `found` and `wanted` are the two versions."""

    def __init__(self, *, found: int, wanted: int) -> None:
        """One sentence that serves as the reason of a Refusal too."""
        super().__init__("protocol version", found=found, wanted=wanted)


class InternalError(RookeryError):
    """A broken invariant of our own."""
