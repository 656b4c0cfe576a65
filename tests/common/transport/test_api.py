"""Tests of the limit of messages without experience, at its edges."""

from __future__ import annotations

import pytest

from common.transport.api import (
    IGNORED_SECONDS,
    LIMIT_INTERVAL_SECONDS,
    LIMIT_MESSAGES,
    MESSAGES_FOR_EXPERIENCE,
    ConnectionLimit,
)

pytestmark = pytest.mark.pure


def test_a_connection_is_ignored_once_it_is_over_the_limit_and_read_again_later():
    """Others are not."""
    limit = ConnectionLimit()
    assert not limit.ignores(b"flooder", 5.0)
    *counted, last = [limit.count(b"flooder", 5.0) for _ in range(LIMIT_MESSAGES + 1)]
    assert (counted, last.event) == ([None] * LIMIT_MESSAGES, "connection_ignored")
    assert limit.ignores(b"flooder", 5.0)
    assert not limit.ignores(b"worker", 5.0)
    assert limit.ignores(b"flooder", 5.0 + IGNORED_SECONDS - 0.1)
    assert not limit.ignores(b"flooder", 5.0 + IGNORED_SECONDS + LIMIT_INTERVAL_SECONDS)


def test_a_connection_within_the_limit_is_never_ignored():
    """However long it goes on."""
    limit = ConnectionLimit()
    for second in range(5):
        now = second * LIMIT_INTERVAL_SECONDS
        assert not limit.ignores(b"worker", now)
        assert not any(limit.count(b"worker", now) for _ in range(LIMIT_MESSAGES))


def test_a_window_that_is_sent_again_is_no_flood():
    """Hundreds of duplicates at once, of a worker whose connection was lost."""
    limit = ConnectionLimit(window=400)
    assert not any(limit.count(b"worker", 0.5) for _ in range(LIMIT_MESSAGES + 400))
    assert limit.count(b"worker", 0.5).fields["limit"] == LIMIT_MESSAGES + 400


def test_a_connection_that_sends_much_experience_may_send_as_many_requests():
    """A small network has a thousand updates a second, and an actor requests a policy for each of its rollouts."""
    limit = ConnectionLimit()
    for _ in range(10 * LIMIT_MESSAGES):
        limit.count_experience(b"actor")
        assert not any(limit.count(b"actor", 0.5) for _ in range(MESSAGES_FOR_EXPERIENCE))
    assert not any(limit.count(b"actor", 0.5) for _ in range(LIMIT_MESSAGES))
    assert limit.count(b"actor", 0.5)
