"""Acting with a deterministic actor: its action and Gaussian noise, after a first while of actions drawn from all alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from common.algorithms.api import Place
from common.algorithms.exploration import rank
from common.algorithms.policy import NetworkPolicy
from common.algorithms.settings.td3 import TD3Settings
from common.envs.spec import EnvSpec
from common.models import deterministic as models
from common.models.spec import ModelSettings, Precision
from common.units import EnvSteps, Version


class NoisyPolicy(NetworkPolicy[models.Actor]):
    """`common.algorithms.api.Policy` of TD3."""

    def __init__(
        self, *, settings: TD3Settings, model: ModelSettings, env: EnvSpec, precision: Precision, seed: int, place: Place
    ) -> None:
        """Build the actor; `place` says how much noise each environment gets. Raises ConfigError as the learner does."""
        self._bounds = models.ActionBounds.of(env.action)
        super().__init__(models.build_actor(model, env), precision=precision, seed=seed)
        self._random_env_steps = settings.random_env_steps if place.training else 0
        self._random = self._random_env_steps > 0
        self.noise = noise_levels(settings, place)

    def load(self, version: Version, parameters: Tensor, *, env_steps: EnvSteps) -> None:
        """Take the weights of a snapshot: flat [P] float32 or bfloat16; it acts once the run is past `random_env_steps`."""
        super().load(version, parameters, env_steps=env_steps)
        self._random = env_steps < self._random_env_steps

    @torch.inference_mode()
    def act(self, observation: Tensor, *, greedy: bool = False) -> Mapping[str, Tensor]:
        """[B, *input] in the environment's dtype → {"action": [B, A] float32} within the bounds; `greedy` adds no noise."""
        action = self._net(observation)
        if not greedy:
            drawn = torch.empty_like(action)
            if self._random:
                action = drawn.uniform_(-1.0, 1.0, generator=self._generator)
            else:
                noise = drawn.normal_(generator=self._generator)
                action = torch.addcmul(action, noise, self.noise).clamp_(-1.0, 1.0)
        return {"action": self._bounds.scale(action)}


def noise_levels(settings: TD3Settings, place: Place) -> Tensor:
    """Deviation of the noise of each environment at this place, [B, 1] float32, in halves of an action's range.

    sigma_i = sigma * spread^(2 i / (N-1) - 1), i = 0 .. N-1 over all environments of all actors: from sigma / spread to
    sigma * spread, in equal ratios. After the epsilon of Ape-X (Horgan et al. 2018, arXiv:1803.00933), so that some
    environments look far around while others show what the policy itself brings. A single one gets sigma / spread.
    """
    exponent = 2.0 * rank(place) - 1.0
    return (settings.exploration_noise * settings.exploration_spread**exponent).unsqueeze(1)
