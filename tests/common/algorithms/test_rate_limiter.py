"""The law of the rate limiter under random timing."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.algorithms.off_policy import RateLimiter

pytestmark = pytest.mark.pure

ROUNDING = 1e-6


laws = st.fixed_dictionaries(
    {"samples_per_insert": st.floats(0.01, 100.0), "minibatch_size": st.integers(1, 512), "warm_up": st.integers(0, 3_000)}
)


@given(laws, st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_the_ratio_stays_in_its_band_and_nothing_waits_for_ever(law: Any, actors: int, credits_each: int, seed: int) -> None:
    """At each moment someone can go on, and the samples drawn are those paid for, within the stated band: 10,000 timings.

    Actors send while they have credits; a learner inserts one message, then draws its sample budget, in portions.
    """
    for timing in range(10):
        play(RateLimiter(**law), actors, credits_each, Random(seed + timing))


def play(limiter: RateLimiter, actors: int, credits_each: int, chance: Random) -> None:
    """One run with random sizes of messages, in random order."""
    credit, queue, largest = [credits_each] * actors, deque[tuple[int, int]](), 0
    for _ in range(chance.randrange(1, 60)):
        able = [actor for actor in range(actors) if credit[actor]]
        works = limiter.sample_budget > 0 or bool(queue)
        assert able or works, "deadlock"
        if works and (not able or chance.random() < 0.6):
            if limiter.sample_budget:
                limiter.minibatches += chance.randint(1, limiter.sample_budget)
            else:
                actor, largest = queue.popleft()
                limiter.env_steps += largest
                credit[actor] += 1  # it left the queue
        else:
            actor = chance.choice(able)
            credit[actor] -= 1
            queue.append((actor, chance.choice([0, 1, chance.randrange(400)])))
        paid = limiter.samples_per_insert * max(0, limiter.env_steps - limiter.warm_up)
        drawn = limiter.minibatches * limiter.minibatch_size
        under_way = limiter.samples_per_insert * largest if limiter.sample_budget else 0.0
        assert paid - limiter.minibatch_size - under_way - ROUNDING < drawn <= paid + ROUNDING


@given(laws, st.lists(st.integers(0, 100_000), max_size=20))
def test_after_an_update_the_measured_ratio_is_the_one_asked_for(law: Any, inserts: list[int]) -> None:
    """However much came at once; a minibatch that is not fully paid for is not drawn."""
    limiter = RateLimiter(**law)
    for env_steps in inserts:
        limiter.env_steps += env_steps
        limiter.minibatches += limiter.sample_budget
        assert limiter.sample_budget == 0
        paying = limiter.env_steps - limiter.warm_up
        if paying > 0:
            lacking = limiter.samples_per_insert - limiter.ratio
            assert -ROUNDING < lacking < limiter.minibatch_size / paying + ROUNDING
        else:
            assert limiter.ratio == 0.0


def test_the_warm_up_pays_for_nothing() -> None:
    """Of the insert that ends it only what is beyond it counts."""
    limiter = RateLimiter(samples_per_insert=2.0, minibatch_size=10, warm_up=100)
    limiter.env_steps += 99
    assert limiter.sample_budget == 0
    limiter.env_steps += 11
    assert limiter.sample_budget == 2


@given(laws, st.integers(0, 100_000))
def test_a_restored_limiter_has_the_same_budget(law: Any, env_steps: int) -> None:
    """No new warm-up, no minibatch twice; by another ratio nothing for what came before."""
    first, second = RateLimiter(**law), RateLimiter(**law)
    first.env_steps += env_steps
    first.minibatches += first.sample_budget // 2
    second.load_state_dict(first.state_dict())
    assert (second.sample_budget, second.ratio) == (first.sample_budget, first.ratio)
    other = RateLimiter(**law | {"samples_per_insert": 2 * law["samples_per_insert"]})
    other.load_state_dict(first.state_dict())
    assert other.sample_budget == 0
    assert other.env_steps == first.env_steps
