"""The parts that DQN and PQN share: the loss of action values, and the policy that acts by them.

Axes: N transitions, n actions, B environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from common.algorithms.api import NetworkPolicy, WorkerContext
from common.algorithms.losses import require_vectors
from common.algorithms.sections import ActionValueSection
from common.envs.spec import EnvSpec
from common.models import nets
from common.models.spec import ModelSettings
from common.units import EnvSteps, Version


class QLoss(NamedTuple):
    """`loss` to minimise, a scalar; without gradient: `td_error` [N], target - value, and `value` [N], Q(o, a)."""

    loss: Tensor
    td_error: Tensor
    value: Tensor


def q_loss(q: Tensor, action: Tensor, *, target: Tensor, huber: float | None) -> QLoss:
    """mean(l(target_i - Q(o_i, a_i))), l half the square, or Huber's where an error beyond `huber` counts linearly.

    Huber's loss bounds the gradient of one transition (Mnih et al. 2015 clip the error to -1..1, which is `huber` 1).

    Args:
        q: [N, n] float32 with gradient, Q(o_i, .).
        action: [N] int64, a_i.
        target: [N] float32.
        huber: delta > 0; None for the squared error.
    """
    value = q.gather(1, action.unsqueeze(1)).squeeze(1)
    require_vectors(value, target)
    if huber is None:
        losses = 0.5 * (value - target).square()
    else:
        losses = functional.huber_loss(value, target, reduction="none", delta=huber)
    value_seen = value.detach()
    return QLoss(losses.mean(), target - value_seen, value_seen)


class EpsilonGreedyPolicy(NetworkPolicy[nets.QNetwork]):
    """`common.algorithms.api.Policy` of action values: the best action, or with probability epsilon any allowed one."""

    def __init__(
        self, *, settings: ActionValueSection, model: ModelSettings, env: EnvSpec, context: WorkerContext, **others: Any
    ) -> None:
        """`others`, `precision` and `seed`, as of the base."""
        net = nets.build_q_network(model, env, dueling=settings.dueling)
        super().__init__(net, state_size=model.state_size, **others)
        self._settings, self._training = settings, context.training
        self.epsilon = annealed_epsilon(0, settings) if context.training else settings.epsilon

    def load(self, version: Version, parameters: Tensor, *, env_steps: EnvSteps) -> None:
        """Take the weights of a snapshot, flat [P] float32 or bfloat16, and the epsilon of that point of the run."""
        super().load(version, parameters, env_steps=env_steps)
        if self._training:
            self.epsilon = annealed_epsilon(env_steps, self._settings)

    @torch.inference_mode()
    def act(self, observation: Tensor, *, greedy: bool = False) -> Mapping[str, Tensor]:
        """[B, *input] in the environment's dtype → {"action": [B] int64}; `greedy` takes the best action."""
        values, state = self._net(observation, self._past)
        self._remember(state)
        action = values.argmax(dim=1)
        if not greedy:
            allowed = self._net.allowed(observation)
            if allowed is None:
                drawn = torch.randint(values.shape[1], action.shape, generator=self._generator)
            else:
                drawn = torch.rand(values.shape, generator=self._generator).masked_fill(~allowed, -1.0).argmax(dim=1)
            explores = torch.rand(action.shape, generator=self._generator) < self.epsilon
            action = torch.where(explores, drawn, action)
        return {"action": action}


def annealed_epsilon(env_steps: EnvSteps, settings: ActionValueSection) -> float:
    """Epsilon from `epsilon_initial` at the start of the run in a straight line to `epsilon`, and constant from there on."""
    done = min(1.0, env_steps / settings.epsilon_env_steps) if settings.epsilon_env_steps else 1.0
    return settings.epsilon_initial + (settings.epsilon - settings.epsilon_initial) * done
