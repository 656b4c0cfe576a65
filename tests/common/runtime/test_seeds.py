"""One seed per run, a stream of its own for everybody."""

from __future__ import annotations

from itertools import product

import pytest

from common.runtime.process import derive_seed

pytestmark = pytest.mark.pure


WRITTEN = [135624621, 1532878506, 1195804554]  # seeds of the environments of actor 1 in runs 0, 1 and 2**31 - 1


def test_no_two_streams_of_a_run_meet():
    """Two actors that played the same episodes would be one actor at twice the cost; so would a restarted one."""
    places = product(("model", "environment", "policy"), ("learner", "actor", "evaluator", "evaluate"), range(20), range(5))
    seeds = [
        derive_seed(1, purpose, role=role, index=index, generation=generation) for purpose, role, index, generation in places
    ]
    assert len(set(seeds)) == len(seeds)


def test_a_seed_is_the_same_on_every_machine():
    """Written out, because a run is repeated elsewhere, and by later releases."""
    assert [derive_seed(seed, "environment", role="actor", index=1) for seed in (0, 1, 2**31 - 1)] == WRITTEN


def test_every_seed_is_one_that_gymnasium_and_torch_take():
    """Below 2**31, whatever the run's seed."""
    for seed in (0, 1, 2**31 - 1):
        for index in range(100):
            assert 0 <= derive_seed(seed, "policy", role="actor", index=index) < 2**31


def test_no_two_environments_of_a_run_are_seeded_alike():
    """Environment b of an actor begins with its seed + b: the ranges of 64 actors with 64 environments each stay apart."""
    for run in range(5):
        firsts = [
            derive_seed(run, "environment", role=role, index=index) for role in ("actor", "evaluator") for index in range(64)
        ]
        assert len({first + b for first in firsts for b in range(64)}) == len(firsts) * 64


def test_another_seed_is_another_run():
    """Seeds 1, 2 and 3 are three experiments: no stream of one is a stream of another."""
    places = list(product(("environment", "policy"), ("actor", "evaluator"), range(20)))
    seeds = [derive_seed(run, purpose, role=role, index=index) for run in range(1, 6) for purpose, role, index in places]
    assert len(set(seeds)) == len(seeds)
