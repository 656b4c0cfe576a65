"""Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv:1812.05905): losses, learner and policy.

The return that is maximised counts alpha times the entropy of the policy besides the reward, and alpha, the temperature, is
adjusted until the entropy is -A nats. All actions but those of the environment are scaled to -1..1 (`ActionBounds` converts).
Axes: N transitions, A components of an action, B environments; the values of both critics are [2, N].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.algorithms import optim
from common.algorithms.api import Entry
from common.algorithms.losses import require_vectors
from common.algorithms.measures import NONFINITE_STEPS, Measured
from common.algorithms.off_policy import td_target
from common.algorithms.settings import SACSettings
from common.algorithms.twin_critics import RandomStartPolicy, TwinCriticLearner, clipped_double_q
from common.models import nets
from common.models.arithmetic import autocast
from common.models.distributions import TanhGaussian
from common.replay.buffer import Transitions


def soft_value(value: Tensor, log_prob: Tensor, *, temperature: Tensor) -> Tensor:
    """V(o) = Q(o, a) - alpha log pi(a | o) [N] for one action of each observation (eq. 3).

    Args:
        value: [N] float32, Q(o, a), the smaller of both critics.
        log_prob: [N] float32.
        temperature: alpha, a scalar.
    """
    require_vectors(value, log_prob)
    return value - temperature * log_prob


def temperature_loss(temperature: Tensor, log_prob: Tensor, *, target_entropy: float) -> Tensor:
    """Mean of -alpha (log pi(a | o) + H) (eq. 18), a scalar: alpha grows while the entropy is below H.

    Args:
        temperature: alpha, a scalar; the gradient is with respect to it alone.
        log_prob: [N] float32 of actions of the policy.
        target_entropy: H in nats.
    """
    return -temperature * (log_prob.detach() + target_entropy).mean()


class SAC(TwinCriticLearner[nets.GaussianActor]):
    """`common.algorithms.api.Algorithm` for a stochastic actor, two critics and a temperature."""

    _settings: SACSettings
    _nets: nets.SACNetworks
    _build = staticmethod(nets.build_sac_networks)

    def _target_networks(self) -> nets.TwinCritics:
        return self._nets.target_critics()

    def _trained_with_actor(self) -> nn.Module:
        return nn.ModuleList([self._nets.actor, self._nets.temperature])  # Adam moves each parameter by itself

    def _optimizers(self) -> dict[str, tuple[torch.optim.Optimizer, nn.Module]]:
        return {
            "actor_adam": (self._actor_optimizer, self._nets),  # by names of all networks: the temperature's is among them
            "critic_adam": (self._critic_optimizer, self._nets.critics),
        }

    def _gradient_step(self, rows: Transitions) -> Measured:
        """Train both critics, then actor and temperature, and move the target critics (algorithm 1)."""
        observation = self._tensor(rows.observation)
        critic_loss, measured = self._update_critics(observation, rows.action, target=self._td_targets(rows))
        return {**measured, **self._update_actor(observation, rows, critic_loss=critic_loss)}

    @torch.no_grad()
    def _td_targets(self, rows: Transitions) -> Tensor:
        """Return y [N]: reward, and the target critics' soft value of an action that the actor draws for the next observation."""
        following = self._tensor(rows.next_observation)
        with autocast(self._settings.precision, self._device):
            action, log_prob = self._nets.actor(following).sample(self._noise(rows.action))
            value = clipped_double_q(self._targets.q_values(following, action))
        value = soft_value(value, log_prob, temperature=self._nets.temperature())
        return td_target(reward=self._tensor(rows.reward), discount=self._tensor(rows.discount), value=value)

    def _update_actor(self, observation: Tensor, rows: Transitions, *, critic_loss: Tensor) -> Measured:
        """Move the actor towards the highest soft value (eq. 9), the temperature towards the target entropy, then the targets.

        The weights of the critics stay. Nothing moves where the critics were not moved, or where a loss or the gradient is not
        finite.
        """
        with autocast(self._settings.precision, self._device):
            action, log_prob = self._nets.actor(observation).sample(self._noise(rows.action))
            value = clipped_double_q(self._nets.q_values(observation, action))
        temperature = self._nets.temperature()
        loss = -soft_value(value, log_prob, temperature=temperature.detach()).mean()
        target_entropy = -float(action.shape[1])  # one nat less for each component, as in appendix D
        total = loss + temperature_loss(temperature, log_prob, target_entropy=target_entropy)
        joint = optim.differentiate(self._actor_optimizer, total, rows=len(observation), ranks=self._ranks)
        both = joint + critic_loss
        optim.step(self._actor_optimizer, lr=self._learning_rate, finite=both)
        optim.polyak_update(self._targets.critics, self._nets.critics, self._settings.target_rate, finite=both)
        return {
            "actor_loss": loss.detach(),
            "action_abs": action.detach().abs().mean(),
            "entropy": -log_prob.detach().mean(),
            "temperature": temperature.detach(),
            NONFINITE_STEPS: ~both.isfinite(),
        }


class SACPolicy(RandomStartPolicy[nets.GaussianActor]):
    """`common.algorithms.api.Policy` of SAC: draws from the actor's distribution; greedy: the median, tanh of the mean."""

    _actor = nets.GaussianActor

    def _choose(self, observation: Tensor, *, greedy: bool) -> Tensor:
        policy: TanhGaussian = self._net(observation)
        if greedy:
            return policy.median()
        noise = torch.empty_like(policy.mean).normal_(generator=self._generator)
        action, _ = policy.sample(noise)
        return action


ENTRY = Entry(settings=SACSettings, algorithm=SAC, policy=SACPolicy)
