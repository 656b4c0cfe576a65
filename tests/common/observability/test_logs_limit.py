"""Tests of the limit on lines that a remote party causes: the lines written, and the count of all others."""

import pytest

from common.observability.logs import BURST, INTERVAL_SECONDS, LINES_PER_SECOND, LeftOut, LogLimit

pytestmark = pytest.mark.pure


def test_a_sender_has_one_line_an_interval_and_the_rest_is_counted():
    """And so has another sender, and another event of the same one."""
    limit = LogLimit()
    assert [limit.admit("refused", "a", at) for at in (0.0, 1.0, 2.0)] == [True, False, False]
    assert limit.admit("refused", "b", 3.0)
    assert limit.admit("left", "a", 3.0)
    assert limit.ended(9.9) == []
    assert limit.ended(INTERVAL_SECONDS) == [LeftOut(kind="refused", lines=2, seconds=INTERVAL_SECONDS)]
    assert limit.ended(INTERVAL_SECONDS) == []
    assert limit.admit("refused", "a", INTERVAL_SECONDS)


def test_many_senders_share_what_an_event_may_write_and_only_those_with_a_line_are_remembered():
    """A flood on new connections: each message has a sender of its own."""
    limit, written, counted = LogLimit(), 0, 0
    for number in range(60_000):
        at = number / 1000
        counted += sum(left_out.lines for left_out in limit.ended(at))
        written += limit.admit("refused", number, at)
    counted += sum(left_out.lines for left_out in limit.ended(60.0, every=True))
    assert written + counted == 60_000
    assert BURST <= written <= BURST + 60 * LINES_PER_SECOND
    assert limit.admit("left", "somebody else", 60.0), "one event does not take the lines of another"
    assert sum(len(state.seen) for state in limit._kinds.values()) <= BURST


def test_a_burst_after_silence_is_written():
    """All actors of a run arrive at once, twice."""
    limit = LogLimit()
    for at in (0.0, 1000.0):
        limit.ended(at)
        assert all(limit.admit("welcome", actor, at) for actor in range(BURST))
        assert not limit.admit("welcome", BURST, at)
