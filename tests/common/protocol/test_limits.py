"""The limits hold together: what one allows, another does not take away."""

from __future__ import annotations

import numpy as np
import pytest

from common.protocol import limits
from common.protocol.codec import decode, encode
from common.protocol.messages import ArraySpec, Credit, Envelope, Reject, Snapshot, Welcome

pytestmark = pytest.mark.wire

LONG_NAME = "a" * (limits.ARRAY_NAME_BYTES - 2)


def test_a_message_with_all_the_arrays_it_may_have_fits_its_header() -> None:
    """Every array at the largest rank, with the longest name."""
    arrays = {f"{LONG_NAME}{i:02}": np.zeros((1,) * limits.ARRAY_RANK, np.float32) for i in range(limits.ARRAYS)}
    envelope = Envelope(run="r" * 200, message=Snapshot(version=1, env_steps=0, precision="fp32", layout="f" * 64, arrays=arrays))
    assert len(decode(encode(envelope)).message.arrays) == limits.ARRAYS


def test_a_welcome_can_announce_all_the_arrays_that_an_experience_may_have() -> None:
    """With a configuration as long as a string may be."""
    schema = tuple(ArraySpec(name=f"{LONG_NAME}{i:02}", dtype="float32", shape=(-1, 8, 84, 84)) for i in range(limits.ARRAYS))
    welcome = Welcome(
        index=0,
        generation=0,
        config="x" * limits.STRING_BYTES,
        env_signature="",
        schema=schema,
        credits=2,
        version=0,
        heartbeat_seconds=2.0,
    )
    assert decode(encode(Envelope(run="r", message=welcome))).message.schema == schema


def test_a_credit_can_refuse_a_hundred_messages_at_once() -> None:
    """Far more than any actor has under way: a run of bad messages is answered in one piece."""
    rejects = tuple(Reject(seq=i, reason="non_finite", detail="d" * 300) for i in range(100))
    credit = Credit(acked=100, credits=4, version=9, rejects=rejects)
    assert decode(encode(Envelope(run="r", message=credit))).message == credit


def test_the_snapshot_of_a_large_network_fits_one_frame() -> None:
    """50 million float32 parameters."""
    assert 50_000_000 * 4 <= limits.ARRAY_BYTES <= limits.MESSAGE_BYTES


def test_the_largest_header_that_can_be_refused_costs_less_than_a_megabyte() -> None:
    """One bad worker, one message: what the learner may hold for a moment."""
    assert 4 * limits.HEADER_BYTES + limits.DECODE_FLOOR_BYTES < 1 << 20
