"""Check that the episodes a worker reports follow from the rewards and ends that it sent: a forged return would end the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import DropReason, ProtocolError
from common.protocol.messages import Arrays, ExperienceMessage

EPISODE_ENV = "episode_env"
"""The array of the environments of reported episodes: sent with gradients, and found in the rows of trajectories."""

RETURN_ABSOLUTE, RETURN_RELATIVE = 1e-3, 1e-6
"""Tolerance between a reported return and the sum of its rewards: one is rounded to float32, both were added in some order."""


class TrajectoryEpisodes:
    """Check of the trajectories of one worker.

    Call it with each trajectory that is otherwise valid, in order of `seq`. An episode is checked where all of its
    rows were received, for which B sums are kept between messages. An episode whose beginning was not received is removed from
    the message, because its return cannot be verified. An episode that missing rows cut off is not reported: see `_find_ends`.
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
            over, cut_off = (arrays["terminated"] | arrays["truncated"]) & valid, _cut_off(arrays)
            lengths = self._lengths + valid.cumsum(0)
            returns = self._returns + reward.cumsum(0, np.float64)
            ends = _find_ends(arrays, over, cut_off, lengths=lengths, returns=returns, whole=self._whole)
            reported = _match_reports(arrays, ends)
            closed = np.union1d(reported, np.flatnonzero(ends.cut_off))
            self._carry(ends.t[closed], ends.env[closed], lengths, returns)
            message = _kept(message, ends.env[reported], ends.whole[reported])
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


class _Ends(NamedTuple):
    """The rows after which an episode ended, may have ended or was cut off: [E] each, in order of rows, then environments."""

    t: NDArray[np.int64]  # row
    env: NDArray[np.int64]
    certain: NDArray[np.bool_]  # an episode ended
    possible: NDArray[np.bool_]  # one ended, or a life was lost
    cut_off: NDArray[np.bool_]  # a missing row follows
    length: NDArray[np.int64]  # env steps of the episode up to the row
    total: NDArray[np.float64]  # rewards of the episode up to the row
    whole: NDArray[np.bool_]  # the episode was received from its beginning


def _only_continues(arrays: Arrays) -> bool:
    """Return whether no episode begins, ends or is reported and no row is missing, as in most short messages."""
    count = np.count_nonzero
    return (
        count(arrays["valid"]) == arrays["valid"].size
        and not count(arrays["terminated"])
        and not count(arrays["truncated"])
        and not count(arrays["start"][0])
        and not len(arrays["episode_length"])
        and not len(arrays["episode_return"])
    )


def _cut_off(arrays: Arrays) -> NDArray[np.bool_]:
    """Return the valid rows [T, B] that a missing row follows: an invalid one that brings no start."""
    valid, start = arrays["valid"], arrays["start"]
    cut_off = np.zeros_like(valid)
    if not valid.all():
        cut_off[:-1] = valid[:-1] & ~valid[1:] & ~start[2:]
    return cut_off


def _find_ends(
    arrays: Arrays,
    over: NDArray[np.bool_],
    cut_off: NDArray[np.bool_],
    *,
    lengths: NDArray[np.int64],
    returns: NDArray[np.float64],
    whole: NDArray[np.bool_],
) -> _Ends:
    """Return the ends of episodes in the rows of a message.

    `over` [T, B]: the valid rows that are marked as ends; `cut_off` [T, B]: those of `_cut_off`; `lengths`, `returns` [T, B]:
    sums since the beginning of the episode that ran before the first row; `whole` [B]: of that episode.

    A termination that no start and no reset row follows is a lost life. Rows after the last one are not in the message, and an
    episode that did not end before missing rows is never reported.
    """
    start, valid = arrays["start"], arrays["valid"]
    follows = start[1:].copy()
    follows[:-1] |= ~valid[1:] & start[2:]
    unknown = cut_off.copy()
    unknown[-1] = True
    certain = over & (follows | (unknown & arrays["truncated"]))
    possible = over & unknown & ~certain
    t, env = np.nonzero(certain | possible | cut_off)
    sums = _of_each_end(env, lengths[t, env], returns[t, env], whole)
    return _Ends(t, env, certain[t, env], possible[t, env], cut_off[t, env], *sums)


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


def _match_reports(arrays: Arrays, ends: _Ends) -> NDArray[np.int64]:
    """Return the end of each reported episode; raise `ProtocolError` where a report has no end, or an end no report."""
    lengths, returns = arrays["episode_length"], arrays["episode_return"]
    if len(lengths) != len(returns):
        raise _contradiction("episodes", found=f"{len(returns)} returns and {len(lengths)} lengths", wanted="as many of both")
    chosen = _choose(ends, lengths, returns) if ends.possible.any() else np.flatnonzero(ends.certain)
    if len(chosen) != len(lengths):
        raise _contradiction("episodes", found=len(lengths), wanted=f"{len(chosen)}, the ends in the message")
    right = _fits(ends, chosen, lengths, returns)
    if not right.all():
        first = int(np.argmin(right))
        end = chosen[first]
        found = f"return {returns[first]}, length {lengths[first]}"
        least = "" if ends.whole[end] else "at least "
        wanted = f"return {ends.total[end]:.6g}, length {least}{ends.length[end]}, by its rewards and rows"
        raise _contradiction(f"episode {first}", found=found, wanted=wanted)
    return chosen


def _choose(ends: _Ends, lengths: NDArray[np.int32], returns: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the ends that the reports belong to, in order: all certain ends, and those possible ends that a report fits."""
    chosen: list[int] = []
    for end in np.flatnonzero(ends.certain | ends.possible).tolist():
        number = len(chosen)  # of the next report
        if ends.certain[end] or (number < len(lengths) and bool(_fits(ends, end, lengths[number], returns[number]))):
            chosen.append(end)
    return np.array(chosen, np.int64)


def _fits(ends: _Ends, end: Any, length: Any, total: Any) -> Any:
    """Return whether a report may belong to `end`, for one or for arrays of both. Without all rows only a length can be wrong."""
    tolerance = RETURN_ABSOLUTE + RETURN_RELATIVE * np.abs(ends.total[end])
    same = (length == ends.length[end]) & (np.abs(total - ends.total[end]) <= tolerance)
    return np.where(ends.whole[end], same, length >= ends.length[end])


def _kept(message: ExperienceMessage, env: NDArray[np.int64], whole: NDArray[np.bool_]) -> ExperienceMessage:
    """Return the message with those of its episodes that are `whole`, and the environment of each as an array more."""
    if not len(env):
        return message
    names = ("episode_return", "episode_length")
    kept = {name: array[whole] if name in names else array for name, array in message.arrays.items()}
    return replace(message, arrays=MappingProxyType(kept | {EPISODE_ENV: env[whole]}))


def _contradiction(fact: str, *, found: object, wanted: object) -> ProtocolError:
    return ProtocolError(DropReason.EPISODES, f"{fact} of the message", found=found, wanted=wanted)
