"""One seed per run, and from it a stream of its own for every process and purpose, reproducible and disjoint."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

Purpose: TypeAlias = Literal["model", "environment", "policy"]
_NUMBERS = {"model": 0, "environment": 1, "policy": 2, "learner": 0, "actor": 1, "evaluator": 2}


def derive(seed: int, purpose: Purpose, *, role: str, index: int = 0, generation: int = 0) -> int:
    """A seed below 2**31 for one purpose of one incarnation of one peer (O'Neill's seed_seq mixing, as in numpy)."""
    key = (_NUMBERS[role], index, generation, _NUMBERS[purpose])
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0] >> 1)
