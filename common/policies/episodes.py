"""Whole episodes of a policy in environments side by side, each counted once: for the evaluator and for `rookery evaluate`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.envs.stacking import Frames, FrameStacker
from common.envs.vector import Transition, VectorEnvironment
from common.units import EnvSteps


def of_all_agents(episodes: int, agents: int) -> int:
    """Return `episodes`, or the next larger number in which each of the agents of an environment has as many."""
    return -(-episodes // agents) * agents


class Tally:
    """Returns and lengths of a number of episodes that is fixed beforehand for each environment.

    The first episodes of each environment count, and no later ones: so an environment with short episodes adds no more of them
    than one with long episodes.
    """

    def __init__(self, episodes: int, num_envs: int, *, agents: int = 1) -> None:
        """Share `episodes` among the environments; the first ones play one more where they cannot be shared equally.

        Of an environment of several `agents`, each a row, all play equally many: `episodes` is `of_all_agents`.
        """
        self.returns: NDArray[np.float64] = np.zeros(episodes)
        self.lengths: NDArray[np.int32] = np.zeros(episodes, np.int32)
        each, left = divmod(episodes // agents, num_envs // agents)
        share = np.repeat(each + (np.arange(num_envs // agents) < left), agents)
        self._after = np.cumsum(share)  # the episodes of environment b end before this index
        self._first = self._after - share
        self._index = self._first.copy()  # of the episode that it plays

    @property
    def ended(self) -> int:
        """Episodes that have ended."""
        return int((self._index - self._first).sum())

    @property
    def complete(self) -> bool:
        """Return whether all episodes have ended."""
        return self.ended == len(self.returns)

    def add(self, transition: Transition) -> EnvSteps:
        """Count one step of all environments; return the env steps that it took, also of episodes that do not count."""
        playing = self._index < self._after
        index = self._index[playing]
        self.returns[index] += transition.reward[playing]  # 0 in a row that is not valid
        self.lengths[index] += transition.valid[playing]
        self._index += playing & (transition.terminated | transition.truncated)
        return int(transition.valid.sum())


class Episodes:
    """One evaluation: until it is `complete`, choose an action for `observation` and pass it to `step`."""

    def __init__(self, environment: VectorEnvironment, *, episodes: int, seed: int) -> None:
        """Reset the environments, environment b with `seed + b`; `of_all_agents` of `episodes` are counted, evenly over them."""
        self._environment = environment
        self._stacker = FrameStacker(environment.reset(seed), environment.spec.frame_stack)
        self.start: NDArray[np.bool_] = np.ones(environment.num_envs, np.bool_)  # [B]: `observation` is the first of an episode
        agents = environment.agents
        self.tally = Tally(of_all_agents(episodes, agents), environment.num_envs, agents=agents)

    @property
    def complete(self) -> bool:
        """Return whether all episodes have ended."""
        return self.tally.complete

    @property
    def observation(self) -> Frames:
        """The input of the policy, [B, *input]: overwritten by the next `step`."""
        return self._stacker.observation

    def step(self, action: NDArray[np.generic]) -> EnvSteps:
        """Take `action` [B, ...], as `VectorEnvironment.step` does; return the env steps that it took."""
        transition = self._environment.step(action)
        self._stacker.push(transition.observation, transition.start)
        self.start = transition.start
        return self.tally.add(transition)
