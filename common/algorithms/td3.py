"""Twin delayed deterministic policy gradients (Fujimoto et al. 2018, arXiv:1802.09477): losses, learner and policy.

All actions but those of the environment are scaled to -1..1: networks, noise and its clip (`ActionBounds` converts).
Axes: N transitions, A components of an action, B environments; the values of both critics are [2, N].
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from common.algorithms import optim
from common.algorithms.api import Entry
from common.algorithms.measures import NONFINITE_STEPS, Measured
from common.algorithms.off_policy import td_target
from common.algorithms.settings import TD3Settings
from common.algorithms.twin_critics import RandomStartPolicy, TwinCriticLearner, clipped_double_q
from common.errors import InternalError
from common.models import nets
from common.models.arithmetic import autocast
from common.replay.buffer import Transitions


def smoothed_action(action: Tensor, noise: Tensor, *, clip: float) -> Tensor:
    """Target policy smoothing: clip(mu'(next) + clip(noise, -c, c), -1, 1) [N, A] (section 5.3, algorithm 1).

    Similar actions should have similar values: without noise a deterministic policy exploits the peaks of the critic's errors.

    Args:
        action: [N, A] of the target actor, in -1..1.
        noise: [N, A] Gaussian.
        clip: c >= 0.
    """
    if action.shape != noise.shape:
        raise InternalError("noise of another shape", found=tuple(noise.shape), wanted=tuple(action.shape))
    return (action + noise.clamp(-clip, clip)).clamp_(-1.0, 1.0)


class TD3(TwinCriticLearner[nets.DeterministicActor]):
    """`common.algorithms.api.Algorithm` for a deterministic actor and two critics."""

    _settings: TD3Settings
    _targets: nets.ActorWithCritics[nets.DeterministicActor]
    _build = staticmethod(nets.build_td3_networks)

    def _target_networks(self) -> nets.ActorWithCritics[nets.DeterministicActor]:
        return copy.deepcopy(self._nets).requires_grad_(requires_grad=False)

    def _optimizers(self) -> dict[str, tuple[torch.optim.Optimizer, nn.Module]]:
        return {
            "actor_adam": (self._actor_optimizer, self._nets.actor),
            "critic_adam": (self._critic_optimizer, self._nets.critics),
        }

    def _gradient_step(self, rows: Transitions) -> Measured:
        """Train both critics; at every `policy_delay`-th step train the actor, then move all targets.

        A step that left out the actor counts as left out, so that the next step trains the actor.
        """
        observation = self._tensor(rows.observation)
        critic_loss, measured = self._update_critics(observation, rows.action, target=self._td_targets(rows))
        if self._gradient_steps % self._settings.policy_delay == 0:
            return {**measured, **self._update_actor(observation, critic_loss=critic_loss)}
        return measured

    @torch.no_grad()
    def _td_targets(self, rows: Transitions) -> Tensor:
        """Return y [N]: reward, and the smaller of the target critics' values of the smoothed target action."""
        noise = self._settings.target_noise * self._noise(rows.action)
        following = self._tensor(rows.next_observation)
        with autocast(self._settings.precision, self._device):
            action = smoothed_action(self._targets.actor(following), noise, clip=self._settings.target_noise_clip)
            value = clipped_double_q(self._targets.q_values(following, action))
        return td_target(reward=self._tensor(rows.reward), discount=self._tensor(rows.discount), value=value)

    def _update_actor(self, observation: Tensor, *, critic_loss: Tensor) -> Measured:
        """Move the actor along the first critic's gradient, whose own weights stay, and then all targets.

        Neither moves where the critics were not moved, or where the actor's loss or gradient is not finite.
        """
        with autocast(self._settings.precision, self._device):
            action = self._nets.actor(observation)
            value = self._nets.critics[0](observation, action).squeeze(1)
        loss = -value.mean()  # its gradient is the deterministic policy gradient (eq. 2)
        joint = optim.differentiate(self._actor_optimizer, loss, rows=len(observation), ranks=self._ranks)
        both = joint + critic_loss
        optim.step(self._actor_optimizer, lr=self._learning_rate, finite=both)
        optim.polyak_update(self._targets, self._nets, self._settings.target_rate, finite=both)
        left_out = {NONFINITE_STEPS: ~both.isfinite()}
        return {"actor_loss": loss.detach(), "action_abs": action.detach().abs().mean()} | left_out


class NoisyPolicy(RandomStartPolicy[nets.DeterministicActor]):
    """`common.algorithms.api.Policy` of TD3: the actor's action and Gaussian noise; uniform until `random_env_steps`."""

    _actor = nets.DeterministicActor

    def __init__(self, *, settings: TD3Settings, **others: Any) -> None:
        """`others` as of the base."""
        super().__init__(settings=settings, **others)
        self._noise = torch.tensor(settings.exploration_noise)  # standard deviation, in halves of an action's range

    def _choose(self, observation: Tensor, *, greedy: bool) -> Tensor:
        action: Tensor = self._net(observation)
        if greedy:
            return action
        noise = torch.empty_like(action).normal_(generator=self._generator)
        return torch.addcmul(action, noise, self._noise).clamp_(-1.0, 1.0)


ENTRY = Entry(settings=TD3Settings, algorithm=TD3, policy=NoisyPolicy)
