"""The best policy of a run, by the mean return of a greedy evaluation. Its checkpoint holds the policy alone.

A policy is several versions old when its evaluation arrives. The session keeps the last snapshot that it sent to each evaluator,
which is the one that the evaluator plays, and hands it over with the evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from common.models.snapshot import to_tensor
from common.protocol.events import Evaluated
from common.runtime.checkpoint_files import POLICY, Checkpoint


def better_policy(evaluated: Evaluated, best: Mapping[str, Any] | None, *, run_id: str) -> Checkpoint | None:
    """Return the checkpoint of the evaluated policy where its mean greedy return is higher than that of `best`, else None.

    Of equal returns the newer policy wins: a few perfect episodes of an early one may be luck. The facts of the policy are in
    `counters["best"]`, as the record has them. None also where the session does not know the policy any more.
    """
    evaluation, played = evaluated.message, evaluated.snapshot
    if evaluation.mode != "greedy" or played is None:
        return None
    returns = evaluation.arrays["episode_return"]
    mean = round(float(returns.mean(dtype=np.float64)), 3)
    if best is not None and (mean, played.version) <= (best["mean"], best["version"]):
        return None
    facts = {"version": played.version, "mean": mean, "episodes": len(returns), "env_steps": played.env_steps}
    return Checkpoint(
        run_id=run_id,
        version=played.version,
        env_steps=played.env_steps,
        architecture=played.layout,
        counters={"best": facts},
        state={POLICY: to_tensor(played.arrays["parameters"])},
    )


def facts_of(checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    """Return the facts in a checkpoint of `better_policy`; None without one."""
    return None if checkpoint is None else dict(checkpoint.counters["best"])
