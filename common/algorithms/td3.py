"""Twin delayed deterministic policy gradients (Fujimoto et al. 2018, arXiv:1802.09477): losses, learner and policy.

All actions but those of the environment are scaled to -1..1: networks, noise and its clip (`ActionBounds` converts).
Axes: N transitions, A components of an action, B environments; the values of both critics are [2, N].
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from common.algorithms import optim
from common.algorithms.api import Entry, NetworkPolicy, WorkerContext
from common.algorithms.measures import NONFINITE_STEPS, Measured
from common.algorithms.off_policy import ReplayLearner, td_target
from common.algorithms.ranks import ALONE, Ranks, average_gradients
from common.algorithms.settings import TD3Settings
from common.envs.spec import EnvSpec
from common.errors import InternalError
from common.models import nets
from common.models.arithmetic import CPU, autocast, to_device
from common.models.spec import ModelSettings, Precision
from common.replay.blocks import STREAMS
from common.replay.buffer import Transitions
from common.units import EnvSteps, Version

_ADAM_EPS = 1e-8


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


def clipped_double_q(values: Tensor) -> Tensor:
    """Min over k of Q'_k(next, a') [N] of both critics [2, N] (eq. 10): an overestimate of one critic alone has no effect."""
    _require_both_critics(values)
    return values.amin(dim=0)


def critic_loss(values: Tensor, *, target: Tensor) -> Tensor:
    """Sum over k of mean_i (Q_k(o_i, a_i) - y_i)^2, a scalar; both critics are trained towards the same y (algorithm 1).

    Args:
        values: [2, N] float32, Q_1 and Q_2.
        target: [N] float32, y = R + gamma^k * `clipped_double_q`; see `off_policy.td_target`.
    """
    _require_both_critics(values)
    if target.shape != values.shape[1:]:
        raise InternalError("targets of another shape", found=tuple(target.shape), wanted=f"{tuple(values.shape[1:])}, [N]")
    return (values - target).square().mean(dim=1).sum()


def _require_both_critics(values: Tensor) -> None:
    if values.ndim != 2 or len(values) != 2:  # noqa: PLR2004 - two critics
        raise InternalError("the values of both critics are needed", found=tuple(values.shape), wanted="[2, N]")


class TD3(ReplayLearner):
    """`common.algorithms.api.Algorithm` for a deterministic actor and two critics."""

    _settings: TD3Settings

    def __init__(
        self,
        *,
        settings: TD3Settings,
        model: ModelSettings,
        env: EnvSpec,
        seed: int,
        device: torch.device = CPU,
        ranks: Ranks = ALONE,
        streams: int = STREAMS,
        normalize_reward: bool = False,
    ) -> None:
        """`seed` fixes weights, noise and samples. Raises ConfigError for discrete actions and for those without bounds."""
        settings.require_actions(env.action)
        self._bounds = nets.ActionBounds.of(env.action)
        super().__init__(
            settings=settings,
            env=env,
            seed=seed,
            device=device,
            ranks=ranks,
            streams=streams,
            normalize_reward=normalize_reward,
        )
        self._nets = nets.build_td3_networks(model, env, seed=seed).to(device)
        self._targets = copy.deepcopy(self._nets).requires_grad_(requires_grad=False)
        rate = settings.learning_rate
        self._critic_optimizer = optim.build_optimizer("adam", self._nets.critics, lr=rate, eps=_ADAM_EPS)
        self._actor_optimizer = optim.build_optimizer("adam", self._nets.actor, lr=rate, eps=_ADAM_EPS)
        self._generator = torch.Generator().manual_seed(seed + ranks.index)

    @property
    def model(self) -> nets.DeterministicActor:
        """The actor, which is published (float32)."""
        return self._nets.actor

    def _networks(self) -> dict[str, nets.TD3Networks]:
        return {"parameters": self._nets, "targets": self._targets}

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
        target = self._td_targets(rows)
        with autocast(self._settings.precision, self._device):
            values = self._nets.q_values(
                observation, to_device(self._bounds.unscale(torch.from_numpy(rows.action)), self._device)
            )
        loss = critic_loss(values, target=target)
        joint = self._differentiated(self._critic_optimizer, loss, rows=len(observation))
        optim.step(self._critic_optimizer, lr=self._learning_rate, finite=joint)
        values = values.detach()
        measured = {"critic_loss": loss.detach(), "td_abs": (values - target).abs().mean(), "q_mean": values.mean()}
        measured[NONFINITE_STEPS] = ~joint.isfinite()
        if self._gradient_steps % self._settings.policy_delay == 0:
            measured |= self._update_actor(observation, critic_loss=joint)
        return measured

    @torch.no_grad()
    def _td_targets(self, rows: Transitions) -> Tensor:
        """Return y [N]: reward, and the smaller of the target critics' values of the smoothed target action."""
        noise = torch.empty(rows.action.shape).normal_(std=self._settings.target_noise, generator=self._generator)
        following = self._tensor(rows.next_observation)
        with autocast(self._settings.precision, self._device):
            action = self._targets.actor(following)
            action = smoothed_action(action, to_device(noise, self._device), clip=self._settings.target_noise_clip)
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
        joint = self._differentiated(self._actor_optimizer, loss, rows=len(observation))
        both = joint + critic_loss
        optim.step(self._actor_optimizer, lr=self._learning_rate, finite=both)
        optim.polyak_update(self._targets, self._nets, self._settings.target_rate, finite=both)
        left_out = {NONFINITE_STEPS: ~both.isfinite()}
        return {"actor_loss": loss.detach(), "action_abs": action.detach().abs().mean()} | left_out

    def _differentiated(self, optimizer: torch.optim.Optimizer, loss: Tensor, *, rows: int) -> Tensor:
        """Give its parameters alone the gradient of the loss of all ranks; return that loss, NaN where the norm is not finite."""
        parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        optimizer.zero_grad(set_to_none=True)
        if rows:
            loss.backward(inputs=parameters)  # type: ignore[no-untyped-call]
        loss = average_gradients(parameters, loss, rows=rows, ranks=self._ranks)
        return loss + 0.0 * nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])

    def state_dict(self) -> dict[str, Any]:
        """Copies, in nested dicts with string keys; leaves are tensors and JSON scalars."""
        return super().state_dict() | {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; ResourceError, and nothing changed, where the state is of another architecture."""
        super().load_state_dict(state)
        if "generator" in state:
            self._generator.set_state(state["generator"])


class NoisyPolicy(NetworkPolicy[nets.DeterministicActor]):
    """`common.algorithms.api.Policy` of TD3: the actor's action and Gaussian noise; uniform until `random_env_steps`."""

    def __init__(
        self,
        *,
        settings: TD3Settings,
        model: ModelSettings,
        env: EnvSpec,
        precision: Precision,
        seed: int,
        context: WorkerContext,
    ) -> None:
        """Build the actor; an evaluator, by `context`, never acts at random. Raises ConfigError as `TD3` does."""
        settings.require_actions(env.action)
        self._bounds = nets.ActionBounds.of(env.action)
        super().__init__(nets.build_td3_actor(model, env), precision=precision, seed=seed)
        self._random_env_steps = settings.random_env_steps if context.training else 0
        self._random = self._random_env_steps > 0
        self.noise = torch.tensor(settings.exploration_noise)  # standard deviation, in halves of an action's range

    def load(self, version: Version, parameters: Tensor, *, env_steps: EnvSteps) -> None:
        """Take the weights of a snapshot, flat [P] float32 or bfloat16; they act from `random_env_steps` of the run on."""
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


ENTRY = Entry(settings=TD3Settings, algorithm=TD3, policy=NoisyPolicy)
