"""Rows of environments: an env worker sends those of a `Transition` in an Observe, and a policy server joins them.

All environments reset in the step after an end (next_step), so the last observation of an episode is in its own row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.envs.leaves import Array, action_mask, check_observations, components_allowed
from common.envs.spec import EnvSpec
from common.envs.vector import Transition
from common.errors import DropReason, ProtocolError
from common.protocol.env_side import SlotRows
from common.protocol.env_slots import Ended
from common.protocol.messages import Arrays, ArraySpec

FLAGS = ("terminated", "truncated", "valid", "start", "life_lost")


def observe_schema(env: EnvSpec, *, rows: int) -> tuple[ArraySpec, ...]:
    """Return the arrays of an Observe of `rows` environments (R), each as `common.envs.vector.Transition` has it."""
    frame, dtype = env.observation_shape, env.observation_dtype
    return (
        ArraySpec(name="observation", dtype=dtype, shape=(rows, *frame)),
        ArraySpec(name="reward", dtype="float32", shape=(rows,)),
        *(ArraySpec(name=name, dtype="bool", shape=(rows,)) for name in FLAGS),
    )


def check_observe(env: EnvSpec, arrays: Arrays, ended: Ended | None) -> Ended:
    """Return which rows have ended after an Observe, of which the schema has been checked before.

    `ended` is what the Observe before returned; None: this one answers an Act to begin, and its observations alone count.

    Raises `ProtocolError` where an observation has a value outside its space, where no action may be chosen on it, and for a row
    that cannot follow the one before. The learner would refuse the whole rollout, with the rows of all env workers.
    """
    over = np.zeros(len(arrays["valid"]), np.bool_) if ended is None else _over(arrays, ended)
    check_observations("observation", env, arrays["observation"])
    if env.action_mask:
        nothing = ~over & ~components_allowed(env.action.choices, action_mask(env, arrays["observation"])).all(axis=1)
        if nothing.any():
            found, wanted = f"a mask of zeros in row {nothing.argmax()}", "an allowed action in each row that is acted on"
            raise ProtocolError(DropReason.SCHEMA, "action mask of an Observe", found=found, wanted=wanted)
    return over


def _over(arrays: Arrays, ended: Ended) -> Ended:
    valid, start, life_lost = arrays["valid"], arrays["start"], arrays["life_lost"]
    ends = arrays["terminated"] | arrays["truncated"]
    idle = ends | life_lost | (arrays["reward"] != 0)
    wrong = (valid == ended) | (start & ~ended) | (~valid & idle) | (life_lost & ends)
    if wrong.any():
        row = int(wrong.argmax())
        found = ", ".join(f"{name} {arrays[name][row]}" for name in ("reward", *FLAGS))
        if ended[row]:
            fact, wanted = f"row {row} of an Observe, after an end", "valid False, reward 0, no end and no lost life"
        else:
            fact, wanted = f"row {row} of an Observe, within an episode", "valid True, start False, no lost life at an end"
        raise ProtocolError(DropReason.SCHEMA, fact, found=found, wanted=wanted)
    return (ended & ~start) | ends


def act_schema(env: EnvSpec, *, rows: int) -> tuple[ArraySpec, ...]:
    """Return the arrays of an Act that asks for an env step."""
    return (ArraySpec(name="action", dtype=env.action.dtype, shape=(rows, *env.action.shape)),)


def first_row(observation: Array) -> dict[str, Array]:
    """Return the arrays of an Observe with the first observations [R, *frame] of new episodes: no env step, as a reset row."""
    no = np.zeros(len(observation), np.bool_)
    flags = dict.fromkeys(FLAGS, no) | {"start": ~no}
    return {"observation": observation, "reward": np.zeros(len(observation), np.float32), **flags}


def row_of(transition: Transition) -> dict[str, Array]:
    """Return the arrays of an Observe for a step of environments that reset in the next step. Copies."""
    return {name: getattr(transition, name).copy() for name in ("observation", "reward", *FLAGS)}


class RowJoiner:
    """Joins the rows of all slots to one `Transition` of B environments. For missing rows the last observation stands."""

    def __init__(self, env: EnvSpec, num_envs: int) -> None:
        self.observation = np.zeros((num_envs, *env.observation_shape), env.observation_dtype)

    def join(self, parts: Sequence[SlotRows]) -> Transition:
        """Return the row of all environments; its arrays are overwritten by the next call."""
        num_envs = len(self.observation)
        flags = {name: np.zeros(num_envs, np.bool_) for name in FLAGS}
        reward = np.zeros(num_envs, np.float32)
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
        return Transition(
            observation=self.observation,
            reward=reward,
            final_index=np.zeros(0, np.int32),
            final_observation=self.observation[:0].copy(),
            **flags,
        )
