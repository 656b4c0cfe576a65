"""Tests of lockstep in the learner's session: where a new incarnation continues, its credits, and rolled back env steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.errors import DropReason
from common.protocol import events as e
from common.protocol.events import RefusalCode
from common.protocol.messages import ACTOR_STATE, Credit, Refusal, Welcome
from tests.common.protocol.test_learner_side import ARRAYS, SCHEMA, Learner, items, of, refusal

pytestmark = pytest.mark.pure


def learner(share: int = 1) -> Learner:
    """One of a run in lockstep with two actors."""
    return Learner(credits=share, batch=2 * share, max_actors=2, lockstep=True)


def state(number: int) -> dict[str, Any]:
    """Return the arrays of a message with the actor's state `number`; 0 gives an empty state."""
    return {"arrays": ARRAYS | {ACTOR_STATE: np.full(3 if number else 0, number, np.uint8)}}


@pytest.fixture(autouse=True)
def _schema(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = (*SCHEMA, *(type(SCHEMA[0])(name=ACTOR_STATE, dtype="uint8", shape=(-1,)),))
    monkeypatch.setattr("tests.common.protocol.test_learner_side.SCHEMA", schema)


def welcomed(side: Learner, name: str = "a", **hello: Any) -> Welcome:
    """Return the one Welcome."""
    (message,) = of(Welcome, side.greet(name, **hello), name.encode())
    return message


def handed(message: Welcome) -> list[int]:
    """Return the state in a Welcome."""
    return message.arrays[ACTOR_STATE].tolist() if ACTOR_STATE in message.arrays else []


def train(side: Learner, *seqs: int, **sender: Any) -> list[e.Instruction]:
    """In lockstep a message leaves the queue when it was trained on."""
    out = side.handle(e.Taken(items=items(*seqs, **sender)))
    return out + side.handle(e.Completed(items=items(*seqs, **sender)))


def test_one_actor_too_many_is_refused_with_the_setting_that_is_the_limit() -> None:
    """In lockstep `learner.max_actors` admits none beyond `actor.count`."""
    side = learner()
    for name in "ab":
        welcomed(side, name)
    (answer,) = of(Refusal, side.greet("c"), b"c")
    assert answer.reason == "the run has its 2 actors; raise actor.count to admit another"


def test_a_slot_without_a_message_begins_as_its_first_holder_did() -> None:
    """Killed in its first rollout: the streams of random numbers are those of the first process."""
    side = learner()
    assert (welcomed(side).generation, handed(welcomed(side, incarnation=2))) == (0, [])
    assert welcomed(side, incarnation=3).generation == 0


def test_an_incarnation_continues_after_the_newest_message_of_its_slot_also_under_another_name() -> None:
    """Trained on or waiting: it will be trained on."""
    side = learner()
    welcomed(side)
    side.send(0, **state(1))
    assert handed(welcomed(side, incarnation=2)) == [1, 1, 1]
    train(side, 0)
    side.send(0, **state(2))
    welcomed(side, "b")
    side.send(0, "b", **state(7))
    side.tick(11.0)
    assert handed(welcomed(side, "c")) in ([2, 2, 2], [7, 7, 7])


def test_a_message_of_the_one_before_holds_the_credit_of_its_successor_until_it_is_trained_on() -> None:
    """With two messages a batch, one of which came: a second credit would be for a rollout by a policy that is old by then."""
    side = learner(share=2)
    assert welcomed(side).credits == 2
    side.send(0, **state(1))
    assert welcomed(side, incarnation=2).credits == 1
    side.send(0, **state(2))
    out = side.handle(e.Taken(items=(*items(0), *items(0, incarnation=2))))
    (credit,) = of(Credit, out)
    assert credit.credits == 2


def test_a_connection_that_was_lost_does_not_make_a_new_incarnation() -> None:
    """The same learner knows it, and goes on with what it sends again."""
    side = learner()
    welcomed(side)
    side.send(0, **state(1))
    assert of(Welcome, side.greet(welcomed=True))


def test_a_resumed_learner_takes_no_incarnation_of_the_one_before_it_and_counts_what_that_made() -> None:
    """The actor was two rollouts ahead of the checkpoint; its next incarnation goes on from the message that was trained on."""
    side = learner()
    welcomed(side)
    side.send(0, **state(1))
    train(side, 0)
    side.send(1, **state(2))  # in the queue: not part of the checkpoint
    later = learner()
    later.side.saved.load_state_dict(side.side.saved.state_dict())
    out = later.greet(welcomed=True, resend_from=1, completed=4, produced=13)
    assert refusal(out) == (RefusalCode.FORGOTTEN, True)
    assert later.books["dropped"] == {DropReason.ROLLED_BACK: 9}
    assert later.books["in_flight"] == 0
    assert refusal(later.greet(welcomed=True, resend_from=1, completed=4, produced=13)) == (RefusalCode.FORGOTTEN, True)
    assert later.books["dropped"] == {DropReason.ROLLED_BACK: 9}
    again = welcomed(later, incarnation=2)
    assert (handed(again), again.credits) == ([1, 1, 1], 1)


def test_what_an_incarnation_made_that_no_checkpoint_knows_is_counted_too() -> None:
    """Replaced after the checkpoint, and ahead of it."""
    later = learner()
    assert refusal(later.greet(incarnation=5, welcomed=True, produced=8, completed=8, resend_from=2)) == (
        RefusalCode.FORGOTTEN,
        True,
    )
    assert (later.books["produced"], later.books["dropped"]) == (8, {DropReason.ROLLED_BACK: 8})
    assert welcomed(later, incarnation=6).index == 0


@pytest.mark.parametrize(("before", "after", "continues"), [(1, 2, True), (0, 0, False), (1, 0, False)])
def test_the_first_message_of_an_incarnation_says_whether_it_goes_on(before: int, after: int, *, continues: bool) -> None:
    """It cannot where its predecessor had no state to hand over, and did not where it has none itself though it was given one."""
    side = learner()
    welcomed(side)
    side.send(0, **state(before))
    train(side, 0)
    welcomed(side, incarnation=2)
    (admitted,) = [i for i in side.send(0, **state(after)) if isinstance(i, e.Experience)]
    assert admitted.continues == continues


def test_a_state_that_cannot_be_read_is_noted_once() -> None:
    """The note comes at the first message, so that a user of lockstep sees it from the start."""
    side = learner()
    welcomed(side)
    notes = [i.event for seq in range(2) for i in [*side.send(seq, **state(0)), *train(side, seq)] if isinstance(i, e.LogEvent)]
    assert notes == ["actor_state_unreadable"]


def test_a_dropped_message_is_no_state_to_resume_from() -> None:
    """Messages that were not trained on are not in the weights of the checkpoint."""
    side = learner()
    welcomed(side)
    side.send(0, **state(1))
    train(side, 0)
    side.send(1, **state(2))
    side.handle(e.Taken(items=items(1)))
    side.handle(e.Completed(items=items(1), reason=DropReason.RUN_ENDED))
    assert side.side.saved.state_dict()["actor_states"][0]["actor"].tolist() == [1, 1, 1]
