"""Acting by action values: the best known action, and now and then any (epsilon-greedy)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from common.algorithms import exploration
from common.algorithms.api import Place
from common.algorithms.policy import NetworkPolicy
from common.algorithms.settings.dqn import DQNSettings
from common.envs.spec import EnvSpec
from common.models import q
from common.models.snapshot import Precision
from common.models.spec import ModelSettings
from common.units import EnvSteps, Version


class EpsilonGreedyPolicy(NetworkPolicy[q.QNetwork]):
    """`common.algorithms.api.Policy` of DQN."""

    def __init__(
        self, *, settings: DQNSettings, model: ModelSettings, env: EnvSpec, precision: Precision, seed: int, place: Place
    ) -> None:
        """Build the network of the run; `place` says where on the ladder the environments stand."""
        super().__init__(q.build(model, env, dueling=settings.dueling), precision=precision, seed=seed)
        self._settings, self._place = settings, place
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
