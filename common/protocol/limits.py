"""Every limit of the wire, each with its reason. Senders keep them too, so that no receiver refuses a message for them.

Sizes are in bytes. They are facts of the protocol, the same for all runs, and hence no settings.
"""

from __future__ import annotations

from typing import Final

from common.units import KIB, MIB

HEADER_BYTES: Final = 64 * KIB
"""Part 0 of a message. The largest honest header is a Welcome with the configuration, some KiB; checked before it is read."""

HEADER_VALUES: Final = 1024
"""Values in a header, map keys too; the 64 arrays of a full message take 800. One byte of msgpack can become 60 of Python."""

HEADER_CONTAINERS: Final = 256
"""Maps and lists in a header, and therefore the depth of nesting. A map of one entry is 3 bytes and 184 of Python."""

STRING_BYTES: Final = 32 * KIB
"""One string in a header, in UTF-8. The run's configuration is the longest; one wide character makes all of them 4 bytes."""

DECODE_FLOOR_BYTES: Final = 96 * KIB
"""Bytes that decoding may allocate beyond four times its input: the two counts above at their worst, which a test measures."""

INTEGER_MAX: Final = 2**63 - 1
"""Largest integer field: what an int64, and every other language's integer, can hold."""

INCARNATION_MAX: Final = 2**62
"""Largest incarnation that a worker may choose, far above any clock in nanoseconds: the learner can always name a larger one."""

SLOWEST_LINK: Final = 500_000.0
"""Bytes per second of the slowest link. While a large message crosses, no other arrives: the connection is not lost for that."""

UNKNOWN_BYTES: Final = 12_000_000
"""Bytes that a first policy is taken to have, for the time in which it crosses, where the Welcome came before any policy."""

REWARD_MAX: Final = 10_000_000
"""Largest absolute reward. With gamma 0.99 an error of a value reaches 2e9; times an observation of OBSERVATION_MAX that is a
gradient of 2e15, and the squares of 10^7 such gradients add up to 4e37, which float32 still holds."""

OBSERVATION_MAX: Final = 1_000_000
"""Largest absolute value in an observation, a continuous action or the state of a memory."""

ARRAYS: Final = 64
"""Arrays in one message; a trajectory has about a dozen."""

ARRAY_RANK: Final = 8
"""Dimensions of one array; [T, B, *frame] has four."""

ARRAY_NAME_BYTES: Final = 64
"""Name of one array: it reaches logs and error sentences."""

WORKER_NAME_BYTES: Final = 128
"""Name of a worker: it reaches logs and error sentences. A host name (64), a process id and a prefix fit."""

FREE_LENGTH: Final = 1 << 20
"""A dimension that the schema leaves to the sender (-1): no rollout ends a million episodes."""

EVALUATION_EPISODES: Final = 1 << 15
"""Episodes of one evaluation: the 10,000 that settings allow, rounded up to as many of each agent."""

ARRAY_BYTES: Final = 256 * MIB
"""One array: 64 million float32 parameters, or 256 steps of 128 environments of 84x84. The sockets refuse more."""

MESSAGE_BYTES: Final = 512 * MIB
"""All arrays of one message together."""
