"""The governor's law under random timing."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from common.replay.governor import Governor

pytestmark = pytest.mark.pure

ROUNDING = 1e-6


laws = st.fixed_dictionaries(
    {"samples_per_insert": st.floats(0.01, 100.0), "batch": st.integers(1, 512), "warm_up": st.integers(0, 3_000)}
)


@given(laws, st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32))
@settings(max_examples=1_000, deadline=None)
def test_the_ratio_stays_in_its_band_and_nothing_waits_for_ever(law: Any, actors: int, credits_each: int, seed: int) -> None:
    """At each moment someone can go on, and the samples drawn are those paid for, within the stated band: 10,000 timings.

    Actors send while they have credits; a learner inserts one message, then draws what is owed, in portions.
    """
    for timing in range(10):
        play(Governor(**law), actors, credits_each, Random(seed + timing))


def play(governor: Governor, actors: int, credits_each: int, chance: Random) -> None:
    """One run with random sizes of messages, in random order."""
    credit, queue, largest = [credits_each] * actors, deque[tuple[int, int]](), 0
    for _ in range(chance.randrange(1, 60)):
        able = [actor for actor in range(actors) if credit[actor]]
        works = governor.owed > 0 or bool(queue)
        assert able or works, "deadlock"
        if works and (not able or chance.random() < 0.6):
            if governor.owed:
                governor.drew(chance.randint(1, governor.owed))
            else:
                actor, largest = queue.popleft()
                governor.inserted(largest)
                credit[actor] += 1  # it left the queue
        else:
            actor = chance.choice(able)
            credit[actor] -= 1
            queue.append((actor, chance.choice([0, 1, chance.randrange(400)])))
        paid = governor.samples_per_insert * max(0, governor.env_steps - governor.warm_up)
        drawn = governor.minibatches * governor.batch
        under_way = governor.samples_per_insert * largest if governor.owed else 0.0
        assert paid - governor.batch - under_way - ROUNDING < drawn <= paid + ROUNDING


@given(laws, st.lists(st.integers(0, 100_000), max_size=20))
def test_after_an_update_the_measured_ratio_is_the_one_asked_for(law: Any, inserts: list[int]) -> None:
    """However much came at once; a minibatch that is not fully paid for is not drawn."""
    governor = Governor(**law)
    for env_steps in inserts:
        governor.inserted(env_steps)
        governor.drew(governor.owed)
        assert governor.owed == 0
        paying = governor.env_steps - governor.warm_up
        if paying > 0:
            lacking = governor.samples_per_insert - governor.ratio
            assert -ROUNDING < lacking < governor.batch / paying + ROUNDING
        else:
            assert governor.ratio == 0.0


def test_the_warm_up_pays_for_nothing() -> None:
    """Of the insert that ends it only what is beyond it counts."""
    governor = Governor(samples_per_insert=2.0, batch=10, warm_up=100)
    governor.inserted(99)
    assert (governor.warm, governor.owed) == (False, 0)
    governor.inserted(11)
    assert (governor.warm, governor.owed) == (True, 2)


@pytest.mark.parametrize("asked", [{"samples_per_insert": 0.0, "batch": 1}, {"samples_per_insert": 1.0, "batch": 0}])
def test_what_could_never_be_owed_is_refused(asked: dict[str, float]) -> None:
    """A ratio of 0 would never train, and an empty minibatch would be owed for ever."""
    with pytest.raises(ConfigError):
        Governor(**asked)  # type: ignore[arg-type]


@given(laws, st.integers(0, 100_000))
def test_a_governor_that_was_saved_owes_what_it_owed(law: Any, env_steps: int) -> None:
    """No new warm-up, no minibatch twice; by another ratio nothing for what came before."""
    first, second = Governor(**law), Governor(**law)
    first.inserted(env_steps)
    first.drew(first.owed // 2)
    second.load_state_dict(first.state_dict())
    assert (second.owed, second.warm, second.ratio) == (first.owed, first.warm, first.ratio)
    other = Governor(**law | {"samples_per_insert": 2 * law["samples_per_insert"]})
    other.load_state_dict(first.state_dict())
    assert other.owed == 0
    assert other.warm == first.warm
