"""Acting by action values: the best known action, and now and then any (epsilon-greedy). And how wrong they turned out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from common.algorithms import exploration, q_learning
from common.algorithms.api import Place
from common.algorithms.batch import final_stacks
from common.algorithms.policy import NetworkPolicy
from common.algorithms.settings.dqn import DQNSettings
from common.envs.spec import EnvSpec
from common.envs.stacking import stack
from common.models import q
from common.models.spec import ModelSettings, Precision
from common.units import EnvSteps, Version
from common.wire.messages import Arrays, ArraySpec

_ROWS = 256  # observations per forward pass over a rollout: activations stay in the cache


def recorded(*, settings: DQNSettings, length: int, num_envs: int) -> tuple[ArraySpec, ...]:
    """What goes with each env step of a rollout: its first priority, where actors are to say it."""
    if not (settings.prioritized and settings.initial_priorities):
        return ()
    return (ArraySpec(name="priority", dtype="float32", shape=(length, num_envs)),)


class EpsilonGreedyPolicy(NetworkPolicy[q.QNetwork]):
    """`common.algorithms.api.Policy` of DQN."""

    def __init__(
        self, *, settings: DQNSettings, model: ModelSettings, env: EnvSpec, precision: Precision, seed: int, place: Place
    ) -> None:
        """Build the network of the run; `place` says where on the ladder the environments stand."""
        super().__init__(q.build(model, env, dueling=settings.dueling), precision=precision, seed=seed)
        self._settings, self._env, self._place = settings, env, place
        self.epsilon = exploration.epsilon(settings, place, env_steps=0)

    def load(self, version: Version, parameters: Tensor, *, env_steps: EnvSteps) -> None:
        """Take the weights of a snapshot: flat [P] float32 or bfloat16, and the exploration of that point of the run."""
        super().load(version, parameters, env_steps=env_steps)
        self.epsilon = exploration.epsilon(self._settings, self._place, env_steps=env_steps)

    @torch.inference_mode()
    def act(self, observation: Tensor, *, greedy: bool = False) -> Mapping[str, Tensor]:
        """[B, *input] in the environment's dtype → {"action": [B] int64}; `greedy` never draws at random."""
        values = self._net(observation)
        action = values.argmax(dim=1)
        if not greedy:
            drawn = torch.randint(values.shape[1], action.shape, generator=self._generator)
            explores = torch.rand(action.shape, generator=self._generator) < self.epsilon
            action = torch.where(explores, drawn, action)
        return {"action": action}

    def experience(self, rollout: Arrays) -> Arrays:
        """The rollout, and its array `priority` filled in where there is one: |delta| of the n-step window from each row on."""
        if "priority" not in rollout:
            return rollout
        return {**rollout, "priority": self._errors(rollout)}

    @torch.inference_mode()
    def _errors(self, rollout: Arrays) -> np.ndarray:
        observation = stack(rollout["obs"], rollout["start"])
        best, taken = self._values(observation.reshape(-1, *observation.shape[2:]), rollout["action"].reshape(-1))
        length, num_envs = rollout["reward"].shape
        following = best[num_envs:]
        if len(rollout["final_index"]):
            last = final_stacks(self._env, observation, rollout["final_obs"], rollout["final_index"])
            following[rollout["final_index"]] = self._values(last, rollout["action"][:0])[0]
        settings = self._settings
        reward = torch.from_numpy(rollout["reward"])
        error = q_learning.window_errors(
            reward=reward.sign() if settings.clip_reward else reward,
            value=taken.view(length, num_envs),
            next_value=following.view(length, num_envs),
            gamma=settings.gamma,
            n_step=settings.n_step,
            **{name: torch.from_numpy(rollout[name]) for name in ("terminated", "truncated", "valid")},
        )
        errors: np.ndarray = error.numpy()
        return errors

    def _values(self, observation: np.ndarray, action: np.ndarray) -> tuple[Tensor, Tensor]:
        """max_a Q(o, a) of all observations [N, *input], and Q(o, action) of the first ones, of which `action` is known."""
        values = torch.cat([self._net(part) for part in torch.split(torch.from_numpy(observation), _ROWS)])
        taken = values[: len(action)].gather(1, torch.from_numpy(action).unsqueeze(1)).squeeze(1)
        return values.amax(dim=1), taken
