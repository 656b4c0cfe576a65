"""Check that the episodes a worker reports follow from the rewards and ends that it sent: a forged return would end the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import DropReason, ProtocolError
from common.protocol.messages import Arrays, ExperienceMessage

EPISODE_INDEX = "episode_index"
"""The array of t*B + b of the rows that reported episodes of a trajectory end with, in order."""

EPISODE_ENV = "episode_env"
"""The array of the environments of reported episodes: sent with gradients, and added to trajectories that were checked."""

_REPORTS = ("episode_return", "episode_length", EPISODE_INDEX)

RETURN_ABSOLUTE, RETURN_RELATIVE = 1e-3, 1e-6
"""Tolerance between a reported return and the sum of its rewards: one is rounded to float32, both were added in some order."""


class TrajectoryEpisodes:
    """Check of the trajectories of one worker.

    Call it with each trajectory that is otherwise valid, in order of `seq`. An episode is checked where all of its
    rows were received, for which B sums are kept between messages. An episode whose beginning was not received is removed from
    the message, because its return cannot be verified. An episode that missing rows cut off is not reported: see `_reported`.
    """

    def __init__(self) -> None:
        self._following = -1  # number of the message that continues the sums
        self._whole: NDArray[np.bool_] = np.zeros(0, np.bool_)  # [B]: the running episode was received from its beginning
        self._lengths: NDArray[np.int64] = np.zeros(0, np.int64)  # [B]: env steps of it so far
        self._returns: NDArray[np.float64] = np.zeros(0)  # [B]: rewards of it so far

    def __call__(self, message: ExperienceMessage) -> ExperienceMessage:
        """Return the message with the episodes received whole, and the environment of each.

        Raises `ProtocolError` where its report contradicts its rows.
        """
        arrays, valid, reward = message.arrays, message.arrays["valid"], message.arrays["reward"]
        if message.seq == self._following and _only_continues(arrays):
            self._lengths = self._lengths + len(valid)
            self._returns = self._returns + np.add.reduce(reward, 0, np.float64)
        else:
            self._begin(message)
            lengths = self._lengths + valid.cumsum(0)
            returns = self._returns + reward.cumsum(0, np.float64)
            cut_off = _cut_off(arrays)
            reported = _reported(arrays, cut_off)
            t, env = np.nonzero(reported | cut_off)
            length, total, whole = _of_each_end(env, lengths[t, env], returns[t, env], self._whole)
            ended = reported[t, env]
            _require_true(arrays, length[ended], total[ended], whole[ended])
            self._carry(t, env, lengths, returns)
            message = _kept(message, env[ended], whole[ended])
        self._following = message.seq + 1
        return message

    def _begin(self, message: ExperienceMessage) -> None:
        """Set the sums to those before the first row: continued from the last message, or 0 where this one does not follow it."""
        valid, start = message.arrays["valid"], message.arrays["start"]
        begins, missing = start[0] | ~valid[0], ~valid[0] & ~start[1]  # [B] in the first row
        if message.seq != self._following:
            self._whole = begins
            self._lengths, self._returns = np.zeros(len(begins), np.int64), np.zeros(len(begins))
        elif (begins & ~missing & (self._lengths > 0)).any():
            raise _contradiction("an episode begins", found="the one before it was not reported", wanted="a report of each end")
        self._whole, self._lengths, self._returns = self._whole | missing, self._lengths * ~missing, self._returns * ~missing

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return the sums of the running episodes, [B] each."""
        return {"whole": self._whole.copy(), "lengths": self._lengths.copy(), "returns": self._returns.copy()}

    def go_on(self, state: Mapping[str, NDArray[Any]], seq: int) -> None:
        """Restore `state_dict` of another check: message `seq` continues its sums."""
        self._following = seq
        self._whole, self._lengths, self._returns = (np.array(state[name]) for name in ("whole", "lengths", "returns"))

    def _carry(self, t: NDArray[Any], env: NDArray[Any], lengths: NDArray[np.int64], returns: NDArray[np.float64]) -> None:
        """Reset the sums of each of `env` where an episode ended at row `t` (ascending); continue those of the others."""
        self._lengths, self._returns = lengths[-1].copy(), returns[-1].copy()
        last = np.full(lengths.shape[1], -1)
        np.maximum.at(last, env, t)
        ended = np.flatnonzero(last >= 0)
        self._lengths[ended] -= lengths[last[ended], ended]
        self._returns[ended] -= returns[last[ended], ended]
        self._whole = self._whole | (last >= 0)


def check_gradient_episodes(message: ExperienceMessage, *, num_envs: int, most_reward: float) -> ExperienceMessage:
    """Return the message; raise `ProtocolError` where its episodes are impossible. Without rewards, returns are only bounded.

    All but one episode of each of the `num_envs` environments began in this message.
    """
    lengths, returns = message.arrays["episode_length"].astype(np.int64), message.arrays["episode_return"]
    env = message.arrays[EPISODE_ENV]
    if not len(env) == len(lengths) == len(returns) or len(lengths) > message.env_steps:
        found = f"{len(returns)} returns, {len(lengths)} lengths, {len(env)} environments"
        raise _contradiction("episodes", found=found, wanted=f"as many of each, at most {message.env_steps}, the env steps")
    if len(env) and not 0 <= env.min() <= env.max() < num_envs:
        found = f"{env.min()} to {env.max()}"
        raise _contradiction("environments of episodes", found=found, wanted=f"0 to {num_envs - 1}")
    inside = np.sort(lengths)[: max(0, len(lengths) - num_envs)].sum()
    if (lengths < 1).any() or inside > message.env_steps:
        raise _contradiction("env steps of episodes", found=lengths.tolist()[:8], wanted=f"{message.env_steps} in this message")
    if (np.abs(returns) > most_reward * lengths).any():
        wanted = f"at most {most_reward:g} for each env step"
        raise _contradiction("return of an episode", found=float(np.abs(returns).max()), wanted=wanted)
    return message


def _only_continues(arrays: Arrays) -> bool:
    """Return whether no episode begins, ends or is reported and no row is missing, as in most short messages."""
    count = np.count_nonzero
    return (
        count(arrays["valid"]) == arrays["valid"].size
        and not count(arrays["terminated"])
        and not count(arrays["truncated"])
        and not count(arrays["start"][0])
        and not any(len(arrays[name]) for name in _REPORTS)
    )


def _cut_off(arrays: Arrays) -> NDArray[np.bool_]:
    """Return the valid rows [T, B] that a missing row follows: an invalid one that brings no start."""
    valid, start = arrays["valid"], arrays["start"]
    cut_off = np.zeros_like(valid)
    if not valid.all():
        cut_off[:-1] = valid[:-1] & ~valid[1:] & ~start[2:]
    return cut_off


def _reported(arrays: Arrays, cut_off: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the rows [T, B] that reported episodes end with; raise `ProtocolError` where they are not those of the message.

    A termination that no start and no reset row follows is a lost life. After the last row, and before missing rows (`cut_off`,
    of `_cut_off`), the report alone tells an end from a lost life. No other episode that missing rows cut off is reported.
    """
    lengths, returns, index = (arrays[name] for name in ("episode_length", "episode_return", EPISODE_INDEX))
    valid, start, truncated = arrays["valid"], arrays["start"], arrays["truncated"]
    over = (arrays["terminated"] | truncated) & valid
    follows, unknown = start[1:].copy(), cut_off.copy()
    follows[:-1] |= ~valid[1:] & start[2:]
    unknown[-1] = True
    certain = over & (follows | (unknown & truncated))
    if not len(lengths) == len(returns) == len(index):
        found = f"{len(returns)} returns, {len(lengths)} lengths, {len(index)} rows"
        raise _contradiction("episodes", found=found, wanted="as many of each")
    reported = np.isin(np.arange(valid.size), index).reshape(valid.shape)
    if np.count_nonzero(reported) != len(index) or (np.diff(index) <= 0).any():
        raise _contradiction("episodes", found=index.tolist()[:8], wanted=f"rows 0 to {valid.size - 1}, in order")
    if (certain & ~reported).any() or (reported & ~(certain | (over & unknown))).any():
        found, wanted = index.tolist()[:8], np.flatnonzero(certain).tolist()[:8]
        raise _contradiction("episodes", found=f"ends at {found}", wanted=f"{wanted}, by its rows")
    return reported


def _of_each_end(
    env: NDArray[Any], lengths: NDArray[np.int64], returns: NDArray[np.float64], whole: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return length and return of the episode that each end closes, and whether it was received whole.

    `env` is the environment of each end, `lengths` and `returns` are sums from the beginning up to it, in order of the rows.
    """
    order = np.argsort(env, kind="stable")
    again = np.zeros(len(env), np.bool_)  # the environment had an end before, in this message
    again[1:] = env[order][1:] == env[order][:-1]
    one, two, seen = lengths[order], returns[order], whole[env[order]]
    one[1:] -= np.where(again[1:], lengths[order][:-1], 0)
    two[1:] -= np.where(again[1:], returns[order][:-1], 0.0)
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return one[back], two[back], (seen | again)[back]


def _require_true(arrays: Arrays, length: NDArray[np.int64], total: NDArray[np.float64], whole: NDArray[np.bool_]) -> None:
    """Raise `ProtocolError` where a report is not of the `length` and `total` of its rows. Without all rows it may be longer."""
    lengths, returns = arrays["episode_length"], arrays["episode_return"]
    tolerance = RETURN_ABSOLUTE + RETURN_RELATIVE * np.abs(total)
    same = (lengths == length) & (np.abs(returns - total) <= tolerance)
    true = np.where(whole, same, lengths >= length)
    if not true.all():
        first = int(np.argmin(true))
        found, least = f"return {returns[first]}, length {lengths[first]}", "" if whole[first] else "at least "
        wanted = f"return {total[first]:.6g}, length {least}{length[first]}, by its rewards and rows"
        raise _contradiction(f"episode {first}", found=found, wanted=wanted)


def _kept(message: ExperienceMessage, env: NDArray[np.int64], whole: NDArray[np.bool_]) -> ExperienceMessage:
    """Return the message with those of its episodes that are `whole`, and the environment of each as an array more."""
    if not len(env):
        return message
    kept = {name: array[whole] if name in _REPORTS else array for name, array in message.arrays.items()}
    return replace(message, arrays=MappingProxyType(kept | {EPISODE_ENV: env[whole]}))


def _contradiction(fact: str, *, found: object, wanted: object) -> ProtocolError:
    return ProtocolError(DropReason.EPISODES, f"{fact} of the message", found=found, wanted=wanted)
