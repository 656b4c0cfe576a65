"""What the metrics of the services must say alike: both ends of the wire count the same kinds of message."""

from __future__ import annotations

import pytest

from common.wire.messages import MESSAGE_TYPES
from services.actor import metrics as actor
from services.evaluator import metrics as evaluator
from services.learner import metrics as learner

pytestmark = pytest.mark.pure


def test_what_one_side_sends_the_other_counts_as_received():
    """A message type that is added must be counted at both ends."""
    assert set(learner.RECEIVED) == set(actor.SENT) | set(evaluator.SENT)
    assert set(learner.SENT) == set(actor.RECEIVED) == set(evaluator.RECEIVED)
    assert set(learner.SENT) | set(learner.RECEIVED) == {message.tag for message in MESSAGE_TYPES}
