"""The parts that TD3 and SAC share: the losses and the gradient step of two critics, and actors that begin at random.

All actions but those of the environment are scaled to -1..1 (`ActionBounds` converts).
Axes: N transitions, A components of an action, B environments; the values of both critics are [2, N].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor, nn

from common.algorithms import optim
from common.algorithms.api import NetworkPolicy, WorkerContext
from common.algorithms.measures import NONFINITE_STEPS, Measured
from common.algorithms.off_policy import ReplayLearner
from common.algorithms.ranks import ALONE, Ranks
from common.algorithms.settings import TwinCriticSection
from common.envs.spec import EnvSpec
from common.errors import InternalError
from common.models.arithmetic import CPU, autocast, to_device
from common.models.nets import ActionBounds, Actor, ActorWithCritics, TwinCritics, build_actor
from common.models.spec import ModelSettings
from common.replay.blocks import STREAMS
from common.units import EnvSteps, Version

_ADAM_EPS = 1e-8


# --- losses ---


def clipped_double_q(values: Tensor) -> Tensor:
    """Min over k of Q_k(o, a) [N] of both critics [2, N]: an overestimate of one critic alone has no effect.

    Fujimoto et al. 2018 (arXiv:1802.09477), eq. 10.
    """
    _require_both_critics(values)
    return values.amin(dim=0)


def critic_loss(values: Tensor, *, target: Tensor) -> Tensor:
    """Sum over k of mean_i (Q_k(o_i, a_i) - y_i)^2, a scalar; both critics are trained towards the same y.

    Args:
        values: [2, N] float32, Q_1 and Q_2.
        target: [N] float32, y; see `off_policy.td_target`.
    """
    _require_both_critics(values)
    if target.shape != values.shape[1:]:
        raise InternalError("targets of another shape", found=tuple(target.shape), wanted=f"{tuple(values.shape[1:])}, [N]")
    return (values - target).square().mean(dim=1).sum()


def _require_both_critics(values: Tensor) -> None:
    if values.ndim != 2 or len(values) != 2:  # noqa: PLR2004 - two critics
        raise InternalError("the values of both critics are needed", found=tuple(values.shape), wanted="[2, N]")


# --- the learner's side ---


class TwinCriticLearner(ReplayLearner, Generic[Actor]):
    """Base of the learners of continuous actions: networks, optimizers, random stream, and the step that trains both critics.

    A subclass chooses the networks, and adds the step that trains the actor.
    """

    _settings: TwinCriticSection
    _nets: ActorWithCritics[Actor]
    _targets: TwinCritics

    def __init__(
        self,
        *,
        settings: TwinCriticSection,
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
        self._bounds = ActionBounds.of(env.action)
        super().__init__(
            settings=settings,
            env=env,
            seed=seed,
            device=device,
            ranks=ranks,
            streams=streams,
            normalize_reward=normalize_reward,
        )
        self._nets = self._build(model, env, seed=seed).to(device)
        self._targets = self._target_networks()
        acting, lr, critic_lr = self._trained_with_actor(), settings.learning_rate, settings.critic_learning_rate
        self._critic_rate = 1.0 if critic_lr is None else critic_lr / lr  # in rates of the actor
        self._actor_optimizer = optim.build_optimizer("adam", acting, lr=lr, eps=_ADAM_EPS)
        self._critic_optimizer = optim.build_optimizer("adam", self._nets.critics, lr=lr * self._critic_rate, eps=_ADAM_EPS)
        self._generator = torch.Generator().manual_seed(seed + 1 + ranks.index)  # `seed` alone drew the weights

    @staticmethod
    @abstractmethod
    def _build(settings: ModelSettings, env: EnvSpec, *, seed: int) -> ActorWithCritics[Actor]:
        """Return the networks, their weights drawn from `seed`."""

    @abstractmethod
    def _target_networks(self) -> TwinCritics:
        """Return copies of the networks that have targets, which no gradient trains."""

    def _trained_with_actor(self) -> nn.Module:
        """Return what the actor's optimizer moves."""
        return self._nets.actor

    def _networks(self) -> dict[str, TwinCritics]:
        return {"parameters": self._nets, "targets": self._targets}

    @property
    def model(self) -> Actor:
        """The actor, which is published (float32)."""
        return self._nets.actor

    def _noise(self, like: np.ndarray) -> Tensor:
        """Standard normal noise [N, A] for actions of this shape."""
        return to_device(torch.empty(like.shape).normal_(generator=self._generator), self._device)

    def _update_critics(self, observation: Tensor, action: np.ndarray, *, target: Tensor) -> tuple[Tensor, Measured]:
        """Train both critics towards y [N] for the environment's actions [N, A]; return the loss of all ranks, and metrics.

        Where the loss or its gradient is not finite neither critic moves, and the loss that is returned is NaN.
        """
        unit = to_device(self._bounds.unscale(torch.from_numpy(action)), self._device)
        with autocast(self._settings.precision, self._device):
            values = self._nets.q_values(observation, unit)
        loss = critic_loss(values, target=target)
        joint = optim.differentiate(self._critic_optimizer, loss, rows=len(observation), ranks=self._ranks)
        optim.step(self._critic_optimizer, lr=self._learning_rate * self._critic_rate, finite=joint)
        values = values.detach()
        measured = {"critic_loss": loss.detach(), "td_abs": (values - target).abs().mean(), "q_mean": values.mean()}
        return joint, measured | {NONFINITE_STEPS: ~joint.isfinite()}

    def state_dict(self) -> dict[str, Any]:
        """Copies, in nested dicts with string keys; leaves are tensors and JSON scalars."""
        return super().state_dict() | {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; ResourceError, and nothing changed, where the state is of another architecture."""
        super().load_state_dict(state)
        if "generator" in state:
            self._generator.set_state(state["generator"])


# --- the acting side ---


class RandomStartPolicy(NetworkPolicy[Actor]):
    """Base of the policies: actions from all over the range, each as likely, until `random_env_steps` of the run."""

    _actor: type[Actor]

    def __init__(
        self, *, settings: TwinCriticSection, model: ModelSettings, env: EnvSpec, context: WorkerContext, **others: Any
    ) -> None:
        """Build the actor; an evaluator, by `context`, never acts at random. `others`, `precision` and `seed`, as of the base.

        Errors as of `TwinCriticLearner`.
        """
        settings.require_actions(env.action)
        self._bounds = ActionBounds.of(env.action)
        super().__init__(build_actor(self._actor, model, env), **others)
        self._random_env_steps = settings.random_env_steps if context.training else 0
        self._random = self._random_env_steps > 0

    def load(self, version: Version, parameters: Tensor, *, env_steps: EnvSteps) -> None:
        """Take the weights of a snapshot, flat [P] float32 or bfloat16; they act from `random_env_steps` of the run on."""
        super().load(version, parameters, env_steps=env_steps)
        self._random = env_steps < self._random_env_steps

    @torch.inference_mode()
    def act(self, observation: Tensor, *, greedy: bool = False) -> Mapping[str, Tensor]:
        """[B, *input] in the environment's dtype → {"action": [B, A] float32} within the bounds; `greedy` adds no noise."""
        if self._random and not greedy:
            unit = torch.empty(len(observation), len(self._bounds.center)).uniform_(-1.0, 1.0, generator=self._generator)
        else:
            unit = self._choose(observation, greedy=greedy)
        return {"action": self._bounds.scale(unit)}

    @abstractmethod
    def _choose(self, observation: Tensor, *, greedy: bool) -> Tensor:
        """Return the actor's actions [B, A] in -1..1."""
