"""What an actor sends: the type of message, its arrays, and the check of what a schema cannot say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.algorithms.episodes import TrajectoryEpisodes
from common.algorithms.trajectory import check_trajectory
from common.envs.spec import EnvSpec
from common.wire.messages import ArraySpec, Experience, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """`check` raises PeerError for a message that fits the schema, is finite, and still cannot be trained on.

    `episodes` makes the check of one worker's episodes. It raises PeerError too, and returns the message with verified episodes.
    """

    message: type[Experience]
    schema: tuple[ArraySpec, ...]
    check: Callable[[Experience], None]
    episodes: Callable[[], Callable[[Experience], Experience]]


def trajectories(*, env: EnvSpec, rollout: tuple[ArraySpec, ...], **_: object) -> Shipment:
    """Rollouts as they were written down, by the schema `rollout`."""
    return Shipment(
        message=Trajectory,
        schema=rollout,
        check=lambda message: check_trajectory(env, message.arrays),
        episodes=TrajectoryEpisodes,
    )
