"""The arrays that an actor sends, and the checks that their schema cannot express.

T = env steps per rollout, B = environments of the actor, S = frame stack, K = any number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from common.algorithms.episode_reports import EPISODE_INDEX, TrajectoryEpisodes
from common.envs.leaves import action_mask, allowed, check_choices, check_observations
from common.envs.spec import EnvSpec
from common.errors import DropReason, ProtocolError
from common.protocol.messages import Arrays, ArraySpec, ExperienceMessage, Trajectory

MEMORY = "memory"
"""The array of states of a policy's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The experience messages of one algorithm: their type, their arrays, and two checks that raise ProtocolError."""

    message_type: type[ExperienceMessage]
    schema: tuple[ArraySpec, ...]
    check: Callable[[ExperienceMessage], None]
    """Refuses a message that fits the schema, is finite, and still cannot be trained on."""
    episodes: Callable[[], Callable[[ExperienceMessage], ExperienceMessage]]
    """Makes the check of one worker's episodes, which returns the message with verified episodes only."""


def trajectory_payload(*, env: EnvSpec, rollout: tuple[ArraySpec, ...], **_: object) -> Payload:
    """Rollouts as they were recorded, by the schema `rollout`."""
    return Payload(
        message_type=Trajectory,
        schema=rollout,
        check=lambda message: check_trajectory(env, message.arrays),
        episodes=TrajectoryEpisodes,
    )


def trajectory_schema(
    env: EnvSpec, *, length: int, num_envs: int, recorded: Sequence[ArraySpec], state_size: int = 0
) -> tuple[ArraySpec, ...]:
    """Every array of a rollout of `length` steps (T) by `num_envs` environments (B), then those that the algorithm recorded.

    `state_size` is 0 without memory. A frame of an observation of several arrays, such as one with an action mask, is their
    joined bytes (`common.envs.leaves`).
    """
    steps = (length, num_envs)
    frame, frame_dtype = env.observation_shape, env.observation_dtype
    table: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("obs", frame_dtype, (length + env.frame_stack, num_envs, *frame)),  # images: S-1 of context, then o_0 .. o_T
        ("start", "bool", (length + 1, num_envs)),  # o_t is the first observation of an episode
        ("action", env.action.dtype, (*steps, *env.action.shape)),  # a_t, chosen on o_t
        ("reward", "float32", steps),  # raw, follows a_t
        ("terminated", "bool", steps),  # the step after a_t ended the episode by its rules; so does a lost life, if asked for
        ("truncated", "bool", steps),  # the same, by a time limit
        ("valid", "bool", steps),  # False for a reset row (next_step autoreset) and a missing row: no env step, never trained on
        ("final_obs", frame_dtype, (-1, *frame)),  # [K, *frame] same_step autoreset: last observation of each truncated episode
        ("final_index", "int32", (-1,)),  # [K] t*B + b of each `final_obs`
        ("episode_return", "float32", (-1,)),  # [K] raw return of each episode that ended in this rollout
        ("episode_length", "int32", (-1,)),  # [K] its env steps
        (EPISODE_INDEX, "int32", (-1,)),  # [K] t*B + b of the row that it ended with
    )
    if state_size:  # states of the policy's memory before o_0, and after o_{T-1}
        table = (*table, (MEMORY, "float32", (2, num_envs, state_size)))
    return (*(ArraySpec(name=name, dtype=dtype, shape=shape) for name, dtype, shape in table), *recorded)


def check_trajectory(env: EnvSpec, arrays: Arrays) -> None:
    """Refuse (ProtocolError) arrays that fit the schema and still cannot be trained on: numbers that point outside.

    The shapes and dtypes must have been checked before.
    """
    action, final_index, valid = arrays["action"], arrays["final_index"], arrays["valid"]
    action = action if env.action.shape else action[..., np.newaxis]
    check_choices("action outside the action space", action, env.action.choices)
    for name in ("obs", "final_obs"):
        check_observations(name, env, arrays[name])
    if env.action_mask:
        _check_allowed(env, arrays)
    if len(final_index) != len(arrays["final_obs"]):
        found, wanted = [len(final_index)], [len(arrays["final_obs"])]
        raise ProtocolError(DropReason.SCHEMA, "final_index and final_obs of different length", found=found, wanted=wanted)
    if final_index.size and not 0 <= np.minimum.reduce(final_index) <= np.maximum.reduce(final_index) < valid.size:
        found = [int(final_index.min()), int(final_index.max())]
        raise ProtocolError(DropReason.SCHEMA, "final_index outside the rollout", found=found, wanted=f"0 to {valid.size - 1}")
    if len(np.unique(final_index)) != len(final_index):  # each costs memory and a forward pass
        once = f"each of 0 to {valid.size - 1} once at most"
        raise ProtocolError(DropReason.SCHEMA, "final_index that repeats", found=len(final_index), wanted=once)
    # Same-step autoreset shows as an end followed at once by a start; without its last observation a truncated episode
    # would bootstrap from the next one.
    if not np.count_nonzero(arrays["truncated"]):
        return
    lacking = arrays["truncated"] & ~arrays["terminated"] & valid & arrays["start"][1:]
    lacking.reshape(-1)[final_index] = False
    if lacking.any():
        raise ProtocolError(DropReason.SCHEMA, "truncated episodes without final_obs", found=int(lacking.sum()), wanted="0")


def _check_allowed(env: EnvSpec, arrays: Arrays) -> None:
    """Refuse actions that the mask of their observation forbids: their probability is 0."""
    older = len(arrays["obs"]) - len(arrays["action"]) - 1
    mask = action_mask(env, arrays["obs"][older:-1])
    forbidden = arrays["valid"] & ~allowed(env, mask, arrays["action"])
    if forbidden.any():
        raise ProtocolError(DropReason.SCHEMA, "actions that their mask forbids", found=int(forbidden.sum()), wanted="0")
