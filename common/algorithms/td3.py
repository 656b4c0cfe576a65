"""Twin delayed deterministic policy gradients (Fujimoto et al. 2018, arXiv:1802.09477): the learner's side.

Everything but `ActionBounds` speaks in actions of -1 to 1: networks, noise and its clip.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from common.algorithms import deterministic, optimizers, parameters
from common.algorithms.off_policy import Measured, ReplayLearner
from common.algorithms.q_learning import td_target
from common.algorithms.settings.td3 import TD3Settings
from common.envs.spec import EnvSpec
from common.models import deterministic as models
from common.models.arithmetic import CPU, autocast
from common.models.spec import ModelSettings
from common.replay.memory import Transitions

_ADAM_EPS = 1e-8


class TD3(ReplayLearner):
    """`common.algorithms.api.Algorithm` for one best action and two critics of it."""

    _settings: TD3Settings

    def __init__(
        self, *, settings: TD3Settings, model: ModelSettings, env: EnvSpec, seed: int, device: torch.device = CPU
    ) -> None:
        """Build networks, optimizers and memory; `seed` fixes initial weights, noise and what is drawn.

        Raises ConfigError for discrete actions and for those without bounds.
        """
        self._bounds = models.ActionBounds.of(env.action)
        super().__init__(settings=settings, env=env, seed=seed, device=device)
        self._nets = models.build(model, env, seed=seed).to(device)
        self._targets = copy.deepcopy(self._nets).requires_grad_(requires_grad=False)
        learned = [list(filter(_learns, net.parameters())) for net in (self._nets.actor, self._nets.critics)]
        self._actor_weights, self._critic_weights = learned
        self._actor_adam, self._critic_adam = (
            torch.optim.Adam(weights, lr=settings.learning_rate, eps=_ADAM_EPS, fused=True) for weights in learned
        )
        self._generator = torch.Generator().manual_seed(seed)
        self._gradient_steps = 0  # of the whole run

    @property
    def model(self) -> models.Actor:
        """The actor, whose parameters are published (float32)."""
        return self._nets.actor

    def _networks(self) -> tuple[models.ActorCritics, ...]:
        return self._nets, self._targets

    def _step(self, rows: Transitions) -> Measured | None:
        """One step of both critics and, every `policy_delay`-th time, of the actor and the targets."""
        observation = self._tensor(rows.observation)
        measured = self._step_critics(rows, observation)
        if measured is None:
            return None
        self._gradient_steps += 1
        if self._gradient_steps % self._settings.policy_delay == 0:
            measured |= self._step_actor(observation)
            parameters.follow(self._targets, self._nets, self._settings.target_rate)
        return measured

    def _step_critics(self, rows: Transitions, observation: Tensor) -> dict[str, Tensor] | None:
        action = self._bounds.unscale(torch.from_numpy(rows.action)).to(self._device)
        target = self._target(rows)
        with autocast(self._settings.precision, self._device):
            values = self._nets.values(observation, action)
        loss, td_abs, value = deterministic.critic_loss(values, target=target)
        if not math.isfinite(loss.item()):
            return None
        self._descend(loss, self._critic_weights, self._critic_adam)
        return {"critic_loss": loss.detach(), "td_abs": td_abs, "q_mean": value}

    @torch.no_grad()
    def _target(self, rows: Transitions) -> Tensor:
        """What both critics are trained towards, [N]."""
        settings, following = self._settings, self._tensor(rows.next_observation)
        with autocast(self._settings.precision, self._device):
            action = self._targets.actor(following)
            noise = torch.empty_like(action, device="cpu").normal_(std=settings.target_noise, generator=self._generator)
            action = deterministic.smoothed(action, noise.to(self._device), clip=settings.target_noise_clip)
            values = self._targets.values(following, action)
        reward, discount = self._tensor(rows.reward), self._tensor(rows.discount)
        return td_target(reward=reward, discount=discount, value=deterministic.clipped_double(values))

    def _step_actor(self, observation: Tensor) -> dict[str, Tensor]:
        """Towards what the first critic rates higher; its own weights get no gradient from it."""
        with autocast(self._settings.precision, self._device):
            action = self._nets.actor(observation)
            loss = deterministic.actor_loss(self._nets.critics[0](observation, action))
        self._descend(loss, self._actor_weights, self._actor_adam)
        return {"actor_loss": loss.detach(), "action_abs": action.detach().abs().mean()}

    def _descend(self, loss: Tensor, weights: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
        """One step of these weights alone: the gradients of all others are not even computed."""
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient
        optimizers.step(optimizer, lr=self._learning_rate)

    def state_dict(self) -> dict[str, Any]:
        """Copies, in nested dicts with string keys; leaves are tensors and JSON scalars."""
        return super().state_dict() | {
            "parameters": parameters.state_of(self._nets),
            "targets": parameters.state_of(self._targets),
            "actor_adam": optimizers.state_of(self._actor_adam, self._nets.actor),
            "critic_adam": optimizers.state_of(self._critic_adam, self._nets.critics),
            "generator": self._generator.get_state(),
            "gradient_steps": self._gradient_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; ResourceError, and nothing changed, where the state is of another architecture."""
        parameters.restore(self._nets, state.get("parameters", {}))
        parameters.restore(self._targets, state["targets"])
        optimizers.restore(self._actor_adam, self._nets.actor, state["actor_adam"])
        optimizers.restore(self._critic_adam, self._nets.critics, state["critic_adam"])
        self._generator.set_state(state["generator"])
        self._gradient_steps = state["gradient_steps"]
        super().load_state_dict(state)


def _learns(parameter: Tensor) -> bool:
    return parameter.requires_grad
