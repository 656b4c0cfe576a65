"""Deep Q-learning from a replay memory (Mnih et al. 2015; Double: van Hasselt et al. 2016): the learner's side.

`collate` inserts what actors sent, `update` takes the gradient steps that the inserts have paid for. So the number of times an
env step is trained on follows from the settings alone, however fast actors and learner are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from common.algorithms import exploration, q_learning
from common.algorithms.api import Progress, Sample, UpdateResult
from common.algorithms.settings.dqn import DQNSettings
from common.envs.spec import EnvSpec
from common.errors import ConfigError
from common.models import q
from common.models.spec import ModelSettings
from common.replay import Governor, Replay, Transitions


class Inserted(NamedTuple):
    """What one call of `collate` put into the memory."""

    env_steps: int
    version: float  # mean, of the policies that acted


class _Step(NamedTuple):
    """What one gradient step measured, each a scalar; the names are those of the metrics."""

    loss: Tensor
    q_mean: Tensor
    td_abs: Tensor
    grad_norm: Tensor


class DQN:
    """`common.algorithms.api.Algorithm` for action values."""

    def __init__(self, *, settings: DQNSettings, model: ModelSettings, env: EnvSpec, seed: int) -> None:
        """Build both networks, the optimizer and the memory; `seed` fixes initial weights and what is drawn."""
        if not env.action.discrete:
            wanted, fix = "a finite number of actions", "choose an algorithm for continuous actions"
            raise ConfigError("dqn cannot act here", found=f"actions {env.action.shape}", wanted=wanted, fix=fix)
        self._settings = settings
        self._model = q.build(model, env, dueling=settings.dueling, seed=seed)
        self._target = copy.deepcopy(self._model).requires_grad_(requires_grad=False)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=settings.learning_rate, eps=settings.adam_eps, fused=True)
        self._gradient_steps = 0  # of the whole run
        self._rng = np.random.default_rng(seed)
        self._replay = Replay(
            env=env,
            capacity=settings.replay_capacity,
            n_step=settings.n_step,
            gamma=settings.gamma,
            clip_reward=settings.clip_reward,
            prioritized=settings.priorities,
        )
        self._governor = Governor(
            samples_per_insert=settings.samples_per_insert, warmup=settings.warmup, minibatch=settings.minibatch
        )

    @property
    def model(self) -> q.QNetwork:
        """The online network, whose parameters are published (float32)."""
        return self._model

    def describe(self) -> Mapping[str, float]:
        """The memory that is allocated."""
        return {"replay_env_steps": self._settings.replay_capacity, "replay_bytes": self._replay.nbytes}

    def calibrate(self, frames: Tensor) -> None:
        """Fix the normalisation of observations by example frames [N, *frame]."""
        self._model.calibrate(frames)
        self._copy_to_target(1.0)

    def collate(self, samples: Sequence[Sample]) -> Inserted:
        """Insert trajectories into the memory."""
        for sample in samples:
            self._replay.insert(sample, stream=0)
        env_steps = sum(sample.env_steps for sample in samples)
        self._governor.inserted(env_steps)
        return Inserted(env_steps, float(np.mean([sample.version for sample in samples])))

    def update(self, batch: Inserted, progress: Progress, stop: Callable[[], bool] = lambda: False) -> UpdateResult:
        """Take the gradient steps that are owed for all inserts so far; none before the warm-up is over.

        A step whose loss or gradient is not finite is left out and counted (`nonfinite_steps`), and so are its samples: bad
        numbers do not make the run train more often on the others. What was not measured is not among the metrics.
        """
        steps: list[_Step | None] = []
        while self._governor.owed and not stop():
            self._governor.sampled()
            steps.append(self._step(self._replay.sample(self._settings.minibatch, self._rng, beta=self._beta(progress))))
        taken = [step for step in steps if step is not None]
        metrics = {
            "policy_lag_mean": progress.version - batch.version,
            "gradient_steps": float(len(taken)),
            "nonfinite_steps": float(len(steps) - len(taken)),
            "replay_env_steps": float(len(self._replay)),
            "samples_per_insert": self._governor.ratio,
        }
        if self._settings.exploration == "annealed":
            metrics["epsilon"] = exploration.annealed(progress.env_steps, self._settings)
        if taken:
            means = torch.stack([torch.stack(step) for step in taken]).mean(dim=0).tolist()
            metrics |= dict(zip(_Step._fields, means, strict=True))
        return UpdateResult(samples=batch.env_steps, metrics=metrics)

    def _step(self, rows: Transitions) -> _Step | None:
        """One gradient step on N transitions; None, and no weight changed, where it would not be finite."""
        settings = self._settings
        reward, discount, weight = map(torch.from_numpy, (rows.reward, rows.discount, rows.weight))
        with self._autocast():
            with torch.no_grad():
                following = torch.from_numpy(rows.next_observation)
                selecting = self._model(following) if settings.double else None
                value = q_learning.next_value(self._target(following), selecting)
                target = q_learning.td_target(reward=reward, discount=discount, value=value)
            values = self._model(torch.from_numpy(rows.observation))
        loss, td_error, value = q_learning.q_loss(
            values, torch.from_numpy(rows.action), target=target, weight=weight, huber=settings.huber
        )
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), settings.max_grad_norm)
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            return None
        self._optimizer.step()
        self._gradient_steps += 1
        if self._gradient_steps % settings.target_every == 0:
            self._copy_to_target(settings.target_rate)
        error = td_error.abs()
        if settings.prioritized:
            self._replay.update_priorities(rows.index, error.numpy())
        return _Step(loss.detach(), value.mean(), error.mean(), norm.detach())

    @torch.no_grad()
    def _copy_to_target(self, rate: float) -> None:
        """Move the target network towards the online one, all the way where `rate` is 1."""
        for target, online in zip(self._target.parameters(), self._model.parameters(), strict=True):
            target.lerp_(online, rate)

    def _beta(self, progress: Progress) -> float:
        """Of the importance weights, rising to 1 at the end of the run (Schaul et al. 2016, section 3.4)."""
        done = min(1.0, progress.env_steps / progress.env_steps_planned)
        return self._settings.priority_beta + (1.0 - self._settings.priority_beta) * done

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._settings.precision == "bf16")
