"""Asynchronous advantage actor-critic by gradients: actors compute them on their own rollouts, the learner takes the steps.

As in Mnih et al. 2016 (arXiv:1602.01783), but the weights are the learner's and so is the only optimizer: actors keep no
state that training depends on. The learner averages a group of gradients in each step, in which older ones have less weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.algorithms import optim
from common.algorithms.a3c import LOSS_PARTS, single_pass_loss
from common.algorithms.api import Entry, RunProgress, UpdateResult
from common.algorithms.batch import collate
from common.algorithms.episode_reports import EPISODE_ENV, EPISODE_INDEX, check_gradient_episodes
from common.algorithms.moments import Moments
from common.algorithms.on_policy import ActorCriticLearner, ActorCriticPolicy, network_outputs, recorded_log_prob, return_inputs
from common.algorithms.payload import Payload
from common.algorithms.ranks import average_gradients, total
from common.algorithms.returns import gae
from common.algorithms.settings import A3CGradSettings
from common.envs.spec import EnvSpec
from common.errors import DropReason, ProtocolError
from common.models import nets, snapshot
from common.models.spec import ModelSettings
from common.protocol.events import Experience
from common.protocol.limits import REWARD_MAX
from common.protocol.messages import Arrays, ArraySpec, ExperienceMessage, Gradient
from common.units import EnvSteps, Version

_BF16_EXPONENT = np.uint16(0x7F80)  # all ones: infinity or NaN


class GradientPolicy(ActorCriticPolicy):
    """Sends the gradient of the loss on the rollout that it acted in, at the weights that acted."""

    def __init__(self, *, settings: A3CGradSettings, model: ModelSettings, env: EnvSpec, **others: Any) -> None:
        """Gradients are float32, computed in the arithmetic that the settings name; `others` as of the base."""
        super().__init__(model=model, env=env, **others)
        self._settings, self._env = settings.for_actions(discrete=env.action.discrete), env
        self._entropy_coef = optim.scheduled_entropy_coef(self._settings, env_steps=0)
        self._trained = nets.build_actor_critic(model, env)

    def load(self, version: Version, parameters: Tensor, *, env_steps: EnvSteps) -> None:
        """As the base, and the same weights to differentiate, with the entropy bonus of this point of the run."""
        super().load(version, parameters, env_steps=env_steps)
        self._entropy_coef = optim.scheduled_entropy_coef(self._settings, env_steps=env_steps)
        snapshot.load(self._trained, parameters)

    def experience(self, rollout: Arrays) -> Arrays:
        """Return the arrays of a Gradient; zeros for a rollout of nothing but reset rows."""
        settings = self._settings
        sample = Experience(version=self.version, env_steps=0, arrays=rollout)
        batch = collate([sample], self._env, state_size=self.memory.shape[1])
        parts = torch.zeros(len(LOSS_PARTS))
        self._trained.zero_grad(set_to_none=True)
        if batch.valid.any():
            outputs = network_outputs(self._trained, batch, moments=Moments(), precision=settings.precision)
            inputs = return_inputs(batch, outputs, clip_reward=settings.clip_reward)
            returns = gae(**inputs, gamma=settings.gamma, lambda_=settings.gae_lambda)
            loss = single_pass_loss(settings, batch, outputs, returns, returns.target, entropy_coef=self._entropy_coef)
            loss.total.backward()  # type: ignore[no-untyped-call]
            parts = torch.stack(loss[1:])
        return {
            "gradient": snapshot.flatten_gradient(self._trained, settings.gradient_precision),
            "loss_parts": parts.numpy(),
            "episode_return": rollout["episode_return"],
            "episode_length": rollout["episode_length"],
            EPISODE_ENV: rollout[EPISODE_INDEX] % rollout["valid"].shape[1],
        }


def gradient_payload(
    *, settings: A3CGradSettings, model: ModelSettings, env: EnvSpec, length: int, num_envs: int, **_: object
) -> Payload:
    """Gradients of the network that `model` and `env` describe, each of at most T = `length` by B = `num_envs` env steps.

    P are all parameters of the network, in the order of its snapshots: the gradient of those that are not trained is 0.
    """
    size = snapshot.ParameterLayout.of(nets.outline_actor_critic(model, env)).size
    schema = (
        # [P], of the mean loss over the rollout's valid env steps; uint16 has the bits of bfloat16.
        ArraySpec(name="gradient", dtype="float32" if settings.gradient_precision == "fp32" else "uint16", shape=(size,)),
        ArraySpec(name="loss_parts", dtype="float32", shape=(len(LOSS_PARTS),)),  # of that loss, by the names in `LOSS_PARTS`
        ArraySpec(name="episode_return", dtype="float32", shape=(-1,)),  # [K], raw, of the episodes that ended in the rollout
        ArraySpec(name="episode_length", dtype="int32", shape=(-1,)),  # [K] env steps of each
        ArraySpec(name=EPISODE_ENV, dtype="int32", shape=(-1,)),  # [K], the environment of each
    )
    return Payload(
        message_type=Gradient,
        schema=schema,
        check=partial(check_gradient, most=length * num_envs),
        episodes=lambda: partial(check_gradient_episodes, num_envs=num_envs, most_reward=REWARD_MAX),
    )


def check_gradient(message: ExperienceMessage, *, most: int) -> None:
    """Refuse (ProtocolError) bfloat16 that is not finite, and a gradient of more than `most` env steps: they are its weight."""
    if message.env_steps > most:
        raise ProtocolError(DropReason.SCHEMA, "env steps of a gradient", found=message.env_steps, wanted=f"at most {most}")
    gradient = message.arrays["gradient"]
    if gradient.dtype == np.uint16:
        broken = np.flatnonzero((gradient & _BF16_EXPONENT) == _BF16_EXPONENT)
        if len(broken):
            fact = f"array gradient at {[int(broken[0])]}"
            raise ProtocolError(
                DropReason.NON_FINITE, fact, found=f"bfloat16 {gradient[broken[0]]:#06x}", wanted="finite numbers"
            )


class GradientBatch(NamedTuple):
    """K gradients and their weights."""

    gradients: Sequence[Tensor]  # [P] float32 or bfloat16 each
    parts: Tensor  # [K, len(LOSS_PARTS)]
    env_steps: Tensor  # [K] float64
    version: Tensor  # [K] int64: policy that acted and was differentiated


class A3CGrad(ActorCriticLearner):
    """`common.algorithms.api.Algorithm` for actor-critic networks."""

    _settings: A3CGradSettings

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As the base, with values in units of return, in which actors compute the loss, whatever units `state` has."""
        super(ActorCriticLearner, self).load_state_dict(state)

    def ingest(self, samples: Sequence[Experience]) -> GradientBatch:  # type: ignore[override]
        """Gradients side by side."""
        return GradientBatch(
            gradients=[snapshot.to_tensor(sample.arrays["gradient"]) for sample in samples],
            parts=torch.tensor(np.array([sample.arrays["loss_parts"] for sample in samples])).view(-1, len(LOSS_PARTS)),
            env_steps=torch.tensor([sample.env_steps for sample in samples], dtype=torch.float64),
            version=torch.tensor([sample.version for sample in samples], dtype=torch.int64),
        )

    def update(self, batch: GradientBatch, progress: RunProgress, stop: Callable[[], bool] = lambda: False) -> UpdateResult:
        """Take one step along the weighted mean of the gradients.

            g = sum_i w_i * g_i / sum_i w_i,    w_i = env_steps_i / (1 + lag_i)

        over the gradients of all ranks.

        Without lag this is the gradient of the mean loss over the joined rollouts. 1 / (1 + lag) follows Zhang et al. 2016
        (arXiv:1511.05950), here relative to the group: a lag that all its gradients share is left to the learning rate.
        A step that is not finite is left out and counted (`nonfinite_steps`).
        """
        del stop  # an update is one step
        lag = progress.version - batch.version
        weight = batch.env_steps / (1.0 + lag.clamp_min(0))
        own = weight.sum().item()
        if total(own, self._ranks) == 0:
            return UpdateResult(samples=0, metrics={})
        weight = (weight / max(own, 1e-12)).float()
        learning_rate = optim.scheduled_learning_rate(self._settings, progress)
        mean = torch.zeros(snapshot.ParameterLayout.of(self._model).size)
        for gradient, share in zip(batch.gradients, weight.tolist(), strict=True):
            mean.add_(gradient, alpha=share)
        snapshot.load_gradient(self._model, mean)
        loss = average_gradients(self._model.parameters(), torch.zeros((), device=self._device), rows=own, ranks=self._ranks)
        most = self._settings.max_grad_norm
        norm = optim.clipped_step(self._optimizer, self._model, loss, lr=learning_rate, max_grad_norm=most).item()
        nonfinite = {"nonfinite_steps": float(math.isnan(norm))}
        if not own:
            return UpdateResult(samples=0, metrics=nonfinite)
        metrics = {
            "learning_rate": learning_rate,
            "entropy_coef": optim.scheduled_entropy_coef(self._settings, env_steps=progress.env_steps),
            "policy_lag_mean": lag.double().mean().item(),
            "gradients": float(len(weight)),
        } | nonfinite
        if not math.isnan(norm):
            metrics |= dict(zip(LOSS_PARTS, (weight @ batch.parts).tolist(), strict=True)) | {"grad_norm": norm}
        return UpdateResult(samples=int(batch.env_steps.sum()), metrics=metrics)


ENTRY = Entry(
    settings=A3CGradSettings, algorithm=A3CGrad, policy=GradientPolicy, recorded=recorded_log_prob, payload=gradient_payload
)
