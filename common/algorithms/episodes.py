"""Check that the episodes a worker reports follow from the rewards and ends that it sent.

A forged return would end a run as solved. Axes: T env steps, B environments. An episode is checked where all of its rows were
received, for which B sums per worker are kept between messages. An episode whose beginning was not received is removed from the
message, because its return cannot be verified.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import DropReason, PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from common.wire.messages import Arrays, Experience

ABSOLUTE, RELATIVE = 1e-3, 1e-6
"""How far a return may be from the sum of its rewards: one is rounded to float32, both were added in some order."""


class TrajectoryEpisodes:
    """The check of one worker's trajectories; call it with each trajectory that is otherwise valid, in order of `seq`."""

    def __init__(self) -> None:
        """Begin without any received row."""
        self._following = -1  # number of the message that continues the sums
        self._whole: NDArray[np.bool_] = np.zeros(0, np.bool_)  # [B]: the running episode was received from its beginning
        self._lengths: NDArray[np.int64] = np.zeros(0, np.int64)  # [B]: env steps of it so far
        self._returns: NDArray[np.float64] = np.zeros(0)  # [B]: rewards of it so far

    def __call__(self, message: Experience) -> Experience:
        """Return the message with the episodes received whole; raise `PeerError` where its report contradicts its rows."""
        arrays, following, self._following = message.arrays, self._following, -1
        valid = arrays["valid"]
        begins = arrays["start"][0] | ~valid[0]
        if message.seq != following:
            self._whole = begins
            self._lengths, self._returns = np.zeros(len(begins), np.int64), np.zeros(len(begins))
        elif (begins & (self._lengths > 0)).any():
            raise _contradiction("an episode begins", found="the one before it was not reported", wanted="a report of each end")
        lengths = self._lengths + valid.cumsum(0)
        returns = self._returns + arrays["reward"].cumsum(0, np.float64)
        certain, possible = _ends(arrays)
        said_length, said_return = arrays["episode_length"], arrays["episode_return"]
        if len(said_length) != len(said_return):
            found = f"{len(said_return)} returns and {len(said_length)} lengths"
            raise _contradiction("episodes", found=found, wanted="as many of both")
        t, env = np.nonzero(certain | possible)
        length, total, whole = _of_each_end(env, lengths[t, env], returns[t, env], self._whole)

        def fits(number: Any, end: Any) -> Any:
            """Return whether report `number` may belong to `end`."""
            same = (said_length[number] == length[end]) & (
                np.abs(said_return[number] - total[end]) <= ABSOLUTE + RELATIVE * np.abs(total[end])
            )
            return np.where(whole[end], same, said_length[number] >= length[end])

        ends = np.arange(len(t))
        if possible.any():
            ends = _chosen(ends, certain[t, env], len(said_length), fits)
        if len(ends) != len(said_length):
            raise _contradiction("episodes", found=len(said_length), wanted=f"{len(ends)}, the ends in the message")
        right = fits(np.arange(len(ends)), ends)
        if not right.all():
            first = int(np.argmin(right))
            found = f"return {said_return[first]}, length {said_length[first]}"
            least = "" if whole[ends[first]] else "at least "
            wanted = f"return {total[ends[first]]:.6g}, length {least}{length[ends[first]]}, by its rewards and rows"
            raise _contradiction(f"episode {first}", found=found, wanted=wanted)
        self._carry(t[ends], env[ends], lengths, returns)
        self._following = message.seq + 1
        return _only(message, whole[ends])

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


def gradient_episodes(message: Experience, *, num_envs: int, most_reward: float) -> Experience:
    """Return the message; raise `PeerError` where its episodes are impossible. Without rewards, returns are only bounded.

    All but one episode of each of the `num_envs` environments began in this message.
    """
    lengths, returns = message.arrays["episode_length"].astype(np.int64), message.arrays["episode_return"]
    if len(lengths) != len(returns) or len(lengths) > message.env_steps:
        found = f"{len(returns)} returns and {len(lengths)} lengths"
        raise _contradiction("episodes", found=found, wanted=f"as many of both, at most {message.env_steps}, the env steps")
    inside = np.sort(lengths)[: max(0, len(lengths) - num_envs)].sum()
    if (lengths < 1).any() or inside > message.env_steps:
        raise _contradiction("env steps of episodes", found=lengths.tolist()[:8], wanted=f"{message.env_steps} in this message")
    if (np.abs(returns) > most_reward * lengths).any():
        wanted = f"at most {most_reward:g} for each env step"
        raise _contradiction("return of an episode", found=float(np.abs(returns).max()), wanted=wanted)
    return message


def _ends(arrays: Arrays) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the rows [T, B] after which an episode certainly ended, and those of the last row after which it may have.

    A termination that no start and no reset row follows is a lost life; what follows the last row is not in the message.
    """
    start, valid = arrays["start"], arrays["valid"]
    over = (arrays["terminated"] | arrays["truncated"]) & valid
    follows = start[1:].copy()
    follows[:-1] |= ~valid[1:]
    follows[-1] |= arrays["truncated"][-1]
    certain = over & follows
    possible = np.zeros_like(certain)
    possible[-1] = over[-1] & ~certain[-1]
    return certain, possible


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


def _chosen(ends: NDArray[Any], certain: NDArray[np.bool_], reports: int, fits: Callable[[int, int], Any]) -> NDArray[Any]:
    """Return the ends that the reports belong to, in order: all certain ends, and those possible ends that a report fits."""
    chosen: list[int] = []
    for end in ends.tolist():
        if certain[end] or (len(chosen) < reports and bool(fits(len(chosen), end))):
            chosen.append(end)
    return np.array(chosen, np.int64)


def _only(message: Experience, whole: NDArray[np.bool_]) -> Experience:
    if whole.all():
        return message
    names = ("episode_return", "episode_length")
    kept = {name: array[whole] if name in names else array for name, array in message.arrays.items()}
    return replace(message, arrays=MappingProxyType(kept))


def _contradiction(fact: str, *, found: object, wanted: object) -> PeerError:
    return PeerError(DropReason.EPISODES, f"{fact} of the message", found=found, wanted=wanted)
