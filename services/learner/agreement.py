"""Decisions that all ranks of a learner take together: when an update begins, when a checkpoint is due, and when the run ends.

Several times a second each rank votes: what it has, and what it would do. All ranks see all votes, and decide alike. A learner
of one rank does not use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch

from common.errors import InternalError, ResourceError
from common.runtime.process_group import ProcessGroup
from common.units import EnvSteps, Version

REASONS = ("", "stopped", "target reached", "env step budget spent", "wall-clock budget spent")
"""Reasons why a run ends, by the numbers under which ranks exchange them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The state of one rank."""

    ready: bool  # its batch is due, or it need not be waited for
    messages: int  # in its batch
    env_steps: EnvSteps  # in its batch
    episodes: int  # that ended in its batch
    reason: int  # why it would end the run, of `REASONS`
    save: bool  # whether it would write a checkpoint
    weights: int  # first bits of the hash of its weights; 0 where they are not compared now
    evaluated: bool = False  # whether it has results of evaluations, for which it may write the best policy next


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision of all ranks."""

    train: bool
    idle: bool = False  # whether every rank is ready, and none has experience
    env_steps: EnvSteps = 0  # of all ranks, in this update
    episodes: int = 0  # most of one rank, in this update
    reason: str = ""  # why the run ends; "": it does not
    save: bool = False
    evaluated: bool = False  # whether a rank has results of evaluations


def decide(votes: Sequence[Vote]) -> Decision:
    """Return the decision that follows from the votes of all ranks. Raises `InternalError` where their weights differ.

    The run ends where one rank would end it. An update begins when every rank is ready, and one of them has experience.
    """
    if len({vote.weights for vote in votes}) > 1:
        found = [f"{vote.weights:012x}" for vote in votes]
        raise InternalError("the weights of the ranks differ", found=found, wanted="one hash", fix="report this")
    reason = next((REASONS[vote.reason] for vote in votes if vote.reason), "")
    ready, experience = all(vote.ready for vote in votes), any(vote.messages for vote in votes)
    return Decision(
        train=not reason and ready and experience,
        idle=ready and not experience,
        env_steps=sum(vote.env_steps for vote in votes),
        episodes=max(vote.episodes for vote in votes),
        reason=reason,
        save=any(vote.save for vote in votes),
        evaluated=any(vote.evaluated for vote in votes),
    )


class Agreement:
    """The exchange of votes and results with the other ranks. The train loop's thread owns it."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def decide(self, vote: Vote) -> Decision:
        """Return the decision of all ranks. Raises `LostRankError`, and `InternalError` where the ranks' weights differ."""
        rows = self.group.gather(torch.tensor(astuple(vote), dtype=torch.int64)).tolist()
        return decide([Vote(**{field.name: value for field, value in zip(fields(Vote), row, strict=True)}) for row in rows])

    def episodes(self, returns: Sequence[float], lengths: Sequence[float], most: int) -> tuple[list[float], list[int]]:
        """Return raw returns and lengths of the episodes of all ranks, by rank; `most` is the largest number of one rank."""
        if not most:
            return [], []
        own = torch.full((2, most), float("nan"), dtype=torch.float64)
        own[0, : len(returns)] = torch.tensor(list(returns), dtype=torch.float64)
        own[1, : len(lengths)] = torch.tensor(list(lengths), dtype=torch.float64)
        gathered = self.group.gather(own)
        known = ~gathered[:, 1].isnan()  # a length is always a number
        return gathered[:, 0][known].tolist(), [int(length) for length in gathered[:, 1][known].tolist()]

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Return what `work` returns on each rank, JSON values by rank, which may take minutes.

        Raises `ResourceError` on every rank where it is raised on one.
        """
        result, failure = None, None
        try:
            result = work()
        except ResourceError as error:
            failure = error
        done = self.group.gather_json([failure is None, result])
        if failure is not None:
            raise failure
        if failed := [rank for rank, (good, _) in enumerate(done) if not good]:
            raise ResourceError("another rank cannot do its part", found=f"rank {failed[0]}", fix="its log has the reason")
        return [result for _, result in done]

    def all(self, *, done: bool) -> bool:
        """Return whether every rank is done."""
        return bool(self.group.gather(torch.tensor([int(done)])).all())


def common_version(group: ProcessGroup, newest: Any) -> Version:
    """Return the newest version of which every rank has a good checkpoint; -1 where there is none.

    `newest(most)` returns the newest good version of this rank that is at most `most` (None: any); -1 without one.
    """
    most: Version | None = None
    while True:
        own: Version = newest(most)
        versions = group.gather_json(own)
        if min(versions) == max(versions):
            return int(versions[0])
        most = min(versions)
        if most < 0:
            return -1
