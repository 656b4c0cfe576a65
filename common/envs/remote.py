"""Rows of environments: an env worker sends the arrays of a `Transition` in an Observe, and a policy server joins them.

| array | dtype | shape | meaning |
|---|---|---|---|
| observation | the environment's | [R, *frame] | as all up to `final_observation` in `common.envs.vector.Transition`, R rows |
| reward | float32 | [R] | |
| terminated, truncated, valid, start, life_lost | bool | [R] | |
| final_index | int32 | [K] | |
| final_observation | the environment's | [K, *frame] | |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.envs.leaves import check_observations
from common.envs.spec import EnvSpec
from common.envs.vector import Array, Transition
from common.errors import DropReason, ProtocolError
from common.protocol.env_side import SlotRows
from common.protocol.messages import Arrays, ArraySpec

FLAGS = ("terminated", "truncated", "valid", "start", "life_lost")


def observe_schema(env: EnvSpec, *, rows: int) -> tuple[ArraySpec, ...]:
    """Return the arrays of an Observe of `rows` environments, in the order of the table above."""
    frame, dtype = env.observation_shape, env.observation_dtype
    return (
        ArraySpec(name="observation", dtype=dtype, shape=(rows, *frame)),
        ArraySpec(name="reward", dtype="float32", shape=(rows,)),
        *(ArraySpec(name=name, dtype="bool", shape=(rows,)) for name in FLAGS),
        ArraySpec(name="final_index", dtype="int32", shape=(-1,)),
        ArraySpec(name="final_observation", dtype=dtype, shape=(-1, *frame)),
    )


def check_observe(env: EnvSpec, arrays: Arrays) -> None:
    """Raise `ProtocolError` where an observation has a value outside its space, or a row ends that is no env step.

    The schema has been checked before. The learner would refuse the rollout, with the rows of all env workers.
    """
    ended = (arrays["terminated"] | arrays["truncated"]) & ~arrays["valid"]
    if ended.any():
        found, wanted = np.flatnonzero(ended).tolist()[:8], "ends of env steps alone"
        raise ProtocolError(DropReason.SCHEMA, "ends in rows of an Observe that are not valid", found=found, wanted=wanted)
    for name in ("observation", "final_observation"):
        check_observations(name, env, arrays[name])


def act_schema(env: EnvSpec, *, rows: int) -> tuple[ArraySpec, ...]:
    """Return the arrays of an Act that asks for an env step."""
    return (ArraySpec(name="action", dtype=env.action.dtype, shape=(rows, *env.action.shape)),)


def first_row(observation: Array) -> Transition:
    """Return the row with the first observations [R, *frame] of new episodes: no env step, as a reset row."""
    no, yes = np.zeros(len(observation), np.bool_), np.ones(len(observation), np.bool_)
    return Transition(
        observation=observation,
        reward=np.zeros(len(observation), np.float32),
        terminated=no,
        truncated=no,
        valid=no,
        start=yes,
        final_index=np.zeros(0, np.int32),
        final_observation=observation[:0],
        life_lost=no,
    )


class RowJoiner:
    """Joins the rows of all slots to one `Transition` of B environments. For missing rows the last observation stands."""

    def __init__(self, env: EnvSpec, num_envs: int) -> None:
        self.observation = np.zeros((num_envs, *env.observation_shape), env.observation_dtype)

    def join(self, parts: Sequence[SlotRows]) -> Transition:
        """Return the row of all environments; its arrays are overwritten by the next call."""
        num_envs = len(self.observation)
        flags = {name: np.zeros(num_envs, np.bool_) for name in FLAGS}
        reward = np.zeros(num_envs, np.float32)
        index, final = [np.zeros(0, np.int32)], [self.observation[:0].copy()]
        for part in parts:
            if part.arrays is None:
                continue
            self.observation[part.rows] = part.arrays["observation"]
            if part.begun:
                flags["start"][part.rows] = True
                continue
            reward[part.rows] = part.arrays["reward"]
            for name in FLAGS:
                flags[name][part.rows] = part.arrays[name]
            index.append(part.arrays["final_index"] + np.int32(part.rows.start))
            final.append(part.arrays["final_observation"])
        return Transition(
            observation=self.observation,
            reward=reward,
            final_index=np.concatenate(index),
            final_observation=np.concatenate(final),
            **flags,
        )
