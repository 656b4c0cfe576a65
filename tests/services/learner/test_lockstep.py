"""Which messages make a round, in which order, and what shows that another run need not have had the same."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config.schema import Settings
from common.config.sections import ActorSettings, LearnerSettings, RunSettings
from common.protocol.events import Experience, WorkerKey
from services.learner.lockstep import Lockstep

pytestmark = pytest.mark.pure


def item(index, seq, *, version=0, incarnation=7, continues=True):
    """A message of the actor at a place."""
    key = WorkerKey(name=f"a{index}", incarnation=incarnation)
    arrays = {"reward": np.zeros(1, np.float32)}
    return Experience(worker=key, index=index, continues=continues, seq=seq, version=version, env_steps=1, arrays=arrays)


def names(items):
    """Place and number of each."""
    return [(item.index, item.seq) for item in items]


def test_settings_say_whose_messages_make_a_round():
    """Batches of 4 with 3 actors: two of each, and none where nobody asked for lockstep."""
    parts = {"learner": LearnerSettings(batch=4), "actor": ActorSettings(count=3)}
    assert Lockstep.of(Settings(run=RunSettings(mode="lockstep"), **parts)) == Lockstep(actors=3, share=2)
    assert Lockstep.of(Settings(**parts)) is None


@given(st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False), st.sampled_from([0, 1, 2]))
def test_a_round_does_not_depend_on_the_order_of_arrival(actors, share, random, surplus):
    """Any interleaving of actors that each send in order: the round is the same, by place and number, and is as expected."""
    lockstep = Lockstep(actors=actors, share=share)
    coming = {index: [item(index, n) for n in range(share + surplus)] for index in range(actors)}
    queue = []
    while any(coming.values()):
        queue.append(coming[random.choice([index for index, left in coming.items() if left])].pop(0))
        if lockstep.choose(queue[:-1]):
            assert lockstep.choose(queue) == lockstep.choose(queue[:-1])
    chosen = lockstep.choose(queue)
    assert names(chosen) == [(index, n) for index in range(actors) for n in range(share)]
    assert lockstep.broken(chosen, 0) == ""


def test_a_round_waits_for_every_actor():
    """Much of one is not a little of all."""
    lockstep = Lockstep(actors=2, share=2)
    assert lockstep.choose([]) == []
    assert lockstep.choose([item(0, 0), item(0, 1), item(0, 2), item(0, 3), item(1, 0)]) == []


def test_a_round_does_not_wait_for_a_slot_without_a_holder():
    """Resumed with two actors of three, which kept their places 0 and 2: the run goes on."""
    lockstep = Lockstep(actors=2, share=1)
    assert names(lockstep.choose([item(2, 8), item(0, 5)])) == [(0, 5), (2, 8)]


def after_three_updates(*, share=1):
    """Return the lockstep after messages of two actors, of the versions 0 to 2, were trained on."""
    lockstep = Lockstep(actors=2, share=share)
    for version in range(3):
        batch = [item(index, version * share + n, version=version) for index in range(2) for n in range(share)]
        assert lockstep.broken(batch, version) == ""
    return lockstep


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (item(1, 0, version=3, incarnation=8, continues=False), "actor 1 was replaced: found no state to go on from"),
        (item(1, 1, version=3, incarnation=8), "actor 1 lost experience: found message 1, wanted 0"),
        (item(1, 4, version=3), "actor 1 lost experience: found message 4, wanted 3"),
        (item(1, 3, version=2), "actor 1 acted by an older policy: found 2, wanted 3"),
    ],
)
def test_the_reason_for_broken_lockstep_is_logged(second, why):
    """Replaced by a process that could not go on, a message lost, or a policy missed: any of them, in any actor."""
    assert after_three_updates().broken([item(0, 3, version=3), second], 3).startswith(why)


def test_an_actor_that_goes_on_where_the_one_before_it_stopped_breaks_nothing():
    """Replaced between two messages of one batch; a resumed learner, which knows of no message, begins with new processes too."""
    lockstep = after_three_updates(share=2)
    batch = [item(0, 6, version=3), item(0, 7, version=3), item(1, 6, version=3), item(1, 0, version=3, incarnation=8)]
    assert lockstep.broken(batch, 3) == ""
    assert names(lockstep.streams(batch, 3)) == [(0, 6), (0, 7), (1, 6), (1, 7)]
    resumed = Lockstep(actors=2, share=1)
    batch = [item(0, 0, version=9, incarnation=8), item(1, 0, version=9, incarnation=8)]
    assert resumed.broken(batch, 9) == ""
    assert names(resumed.streams(batch, 9)) == [(0, 9), (1, 9)]


def joined(lockstep, version, batch):
    """The messages of slot 1 of a round: which number, and whether it follows the one before it."""
    lockstep.broken(batch, version)
    return [(message.seq, message.stream) for message in lockstep.streams(batch, version) if message.index == 1]


def test_streams_show_where_experience_does_not_follow():
    """A replay memory must not join rows across a gap, also inside a round, or at the resume of a learner that had one before."""
    lockstep, places = after_three_updates(share=2), []
    rounds = [[6, 7], [8, 10], [11, 12]]  # message 9 of slot 1 is lost
    for version, numbers in enumerate(rounds, start=3):
        batch = [item(0, 2 * version + n, version=version) for n in range(2)]
        places += joined(lockstep, version, batch + [item(1, number, version=version) for number in numbers])
    for resumed in (6, 7):  # each process begins without a state to go on from
        batch = [item(index, n, version=resumed, incarnation=resumed, continues=False) for index in range(2) for n in range(2)]
        places += joined(Lockstep(actors=2, share=2), resumed, batch)
    follows = [there == here and seq == before + 1 for (before, here), (seq, there) in itertools.pairwise(places)]
    assert follows == [True, True, False, True, True, False, True, False, True]


def test_a_gap_is_seen_where_its_message_is_dropped_as_stale():
    """Message 6 of slot 1 is too old for the round, with or without another that was lost before it."""
    for numbers in ([6, 7], [7, 8]):
        lockstep, places = after_three_updates(share=2), []
        batch = [item(1, number, version=3) for number in numbers]
        lockstep.broken(batch, 3)
        places = [message.stream for message in lockstep.streams(batch[1:], 3)]
        assert places != [("slot 1", 0)]
        assert joined(lockstep, 4, [item(1, numbers[1] + 1, version=4)])[0][1] == places[0]
