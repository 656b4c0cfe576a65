"""The base of the learners that train from a replay memory, and the parts that they share.

`ingest` inserts the experience of actors; `update` takes the gradient steps that a rate limiter allows for the inserts. So the
number of times an env step is trained on follows from the settings alone, however fast actors and learner are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from common.algorithms import optim
from common.algorithms.api import RunProgress, UpdateResult
from common.algorithms.losses import require_vectors
from common.algorithms.measures import NONFINITE_STEPS, Measured, means, nonfinite_steps
from common.algorithms.moments import ObservationStatistics
from common.algorithms.ranks import ALONE, Ranks, total
from common.algorithms.rewards import RewardStatistics
from common.algorithms.sections import ReplaySection
from common.envs.spec import EnvSpec
from common.errors import ResourceError
from common.models import snapshot
from common.models.arithmetic import CPU, to_device
from common.protocol.events import Experience
from common.replay.blocks import STREAMS, Segment
from common.replay.buffer import Replay
from common.replay.sequences import SequenceReplay
from common.units import EnvSteps


class Inserted(NamedTuple):
    """The experience that one call of `ingest` inserted."""

    env_steps: int
    inserted: int  # as the memory counts them
    version: float  # mean of the policies that acted; NaN without experience


class RateLimiter:
    """Keeps (samples drawn) / (env steps inserted after the warm-up) at `samples_per_insert`, from below.

    The terms are those of Reverb (Cassirer et al. 2021, arXiv:2102.04736).

    With I env steps inserted since the warm-up, D samples drawn, ratio r and minibatches of b samples:

        with a sample budget of 0      r I - b       < D <= r I
        at any time                    r I - b - r M < D <= r I,   M the largest insert since the budget was 0

    The ratio D/I after an update is thus within b/I below r, whatever the timing. It cannot deadlock, because it never
    blocks an insert; it only bounds the number of minibatches.
    """

    def __init__(self, *, samples_per_insert: float, minibatch_size: int, warm_up: EnvSteps) -> None:
        """Allow no samples for the first `warm_up` env steps; ratio and size are positive. The owner adds to both counts."""
        self.samples_per_insert = samples_per_insert
        self.minibatch_size = minibatch_size
        self.warm_up = warm_up
        self.env_steps: EnvSteps = 0  # inserted so far, those of the warm-up included
        self.minibatches = 0  # sampled so far

    @property
    def sample_budget(self) -> int:
        """Minibatches that may be sampled now, >= 0."""
        allowed = self.samples_per_insert * max(0, self.env_steps - self.warm_up)
        return max(0, int(allowed // self.minibatch_size) - self.minibatches)

    @property
    def ratio(self) -> float:
        """Samples drawn per env step inserted since the warm-up; 0 before."""
        inserts = self.env_steps - self.warm_up
        return self.minibatches * self.minibatch_size / inserts if inserts > 0 else 0.0

    def state_dict(self) -> dict[str, float]:
        """Return the counts and their settings, in JSON values."""
        settings = {"samples_per_insert": self.samples_per_insert, "minibatch_size": self.minibatch_size, "warm_up": self.warm_up}
        return settings | {"env_steps": self.env_steps, "minibatches": self.minibatches}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore `state_dict`. With other settings, data inserted before adds no gradient steps."""
        self.env_steps, self.minibatches = int(state["env_steps"]), int(state["minibatches"])
        if self.state_dict() != state:
            self.minibatches = 0
            self.minibatches = self.sample_budget


class ReplayLearner(ABC):
    """Base of a `common.algorithms.api.Algorithm` with a replay memory: inserts, rate limit, update loop, metrics.

    A subclass adds networks, optimizers and `_gradient_step`. The memory is not part of `state_dict` because of its size:
    checkpoints hold it separately (`common.algorithms.api.SavesReplay`), or a resumed run fills it again and warms up.
    """

    def __init__(
        self,
        *,
        settings: ReplaySection,
        env: EnvSpec,
        seed: int,
        device: torch.device = CPU,
        ranks: Ranks = ALONE,
        streams: int = STREAMS,
        normalize_reward: bool = False,
        replay: SequenceReplay | None = None,
    ) -> None:
        """`seed` and rank fix what is sampled; `replay` takes the place of the memory of single transitions.

        Raises ConfigError where that does not fit `streams` environments.
        """
        self._ranks = ranks
        self._rate_limiter = RateLimiter(
            samples_per_insert=settings.samples_per_insert,
            minibatch_size=settings.minibatch * ranks.count,
            warm_up=settings.warmup,
        )
        self._settings, self._learning_rate = settings, settings.learning_rate
        self._device = device  # of the networks; the memory is on the CPU
        self._gradient_steps = 0  # taken in the whole run, and begun in this update
        self._rng = np.random.default_rng(seed + ranks.index)
        self._observations = ObservationStatistics(lambda: self._networks().values(), env=env, ranks=ranks)
        self._rewards = RewardStatistics(enabled=normalize_reward, gamma=settings.gamma, ranks=ranks)
        if replay is None:
            sizes = {"capacity": settings.replay_capacity, "n_step": settings.n_step, "streams": streams}
            self._replay: Replay | SequenceReplay = Replay(
                env=env, **sizes, gamma=settings.gamma, clip_reward=settings.clip_reward
            )
        else:
            self._replay = replay

    @abstractmethod
    def _networks(self) -> Mapping[str, nn.Module]:
        """Return the trained network as "parameters", then its targets and averages, by their keys in `state_dict`.

        A target or an average has the names of the trained network for its parameters: for all of them, or for some.
        """

    @abstractmethod
    def _optimizers(self) -> Mapping[str, tuple[torch.optim.Optimizer, nn.Module]]:
        """Return each optimizer with its network, by its key in `state_dict`."""

    def calibrate(self, frames: Tensor) -> None:
        """Begin the normalisation of observations with example observations [N, *frame]."""
        self._observations.calibrate(frames)

    def observe(self, samples: Sequence[Experience]) -> None:
        """Let all networks normalise vector observations by all so far, these included; the memory holds them as they were."""
        self._observations.add(samples)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(array), self._device)

    @abstractmethod
    def _gradient_step(self, rows: Any) -> Measured:
        """Train on one minibatch, `Transitions` or `Sequences`; where the loss is not finite, no network moves.

        No value is read, because the read would wait for a GPU.
        """

    @property
    def replay_env_steps(self) -> EnvSteps:
        """Capacity of the memory: `replay_capacity`, rounded up to whole blocks."""
        return self._replay.layout.capacity

    @property
    def replay_bytes(self) -> int:
        """Bytes of the memory when it is full."""
        return self._replay.layout.nbytes

    def replay_state(self) -> dict[str, Any]:
        """Return the state of the memory without its segments, and of the rate limiter."""
        return {"memory": self._replay.state_dict(), "rate_limiter": self._rate_limiter.state_dict()}

    def load_replay_state(self, state: Mapping[str, Any]) -> None:
        """Restore `replay_state`; the caller then fills the segments. Raises `ResourceError` for a memory of another layout."""
        self._replay.load_state_dict(state["memory"])
        self._rate_limiter.load_state_dict(state["rate_limiter"])

    def replay_segments(self) -> Sequence[Segment]:
        """Return the segments of the memory."""
        return self._replay.segments()

    def ingest(self, samples: Sequence[Experience]) -> Inserted:
        """Insert trajectories into the memory of this rank, which holds rewards as they were."""
        self._rewards.add(samples)
        before = self._rate_limiter.env_steps
        for sample in samples:
            self._rate_limiter.env_steps += self._replay.insert(sample.arrays, stream=sample.stream, seq=sample.seq)
        env_steps, inserted = sum(sample.env_steps for sample in samples), self._rate_limiter.env_steps - before
        return Inserted(env_steps, inserted, float(np.mean([sample.version for sample in samples])) if samples else math.nan)

    def update(self, batch: Inserted, progress: RunProgress, stop: Callable[[], bool] = lambda: False) -> UpdateResult:
        """Take gradient steps while the rate limiter allows samples; none before the warm-up is over.

        A step with a loss that is not finite is left out and counted (`nonfinite_steps`); its samples count too, so that bad
        numbers do not make the run train more often on the others. Toward the delays of targets and actor it does not count from
        the end of the update on, when it is known: a read after each step would wait for a GPU. Metrics that no step measured are
        left out.

        The rate limiter counts the inserts and the samples of all ranks, so that all of them take the same number of steps. A
        minibatch of a rank with an empty memory has no rows. A minibatch of sequences may hold invalid rows alone: no step is
        taken if it does on all ranks.
        """
        filled = self._count_ranks(batch.inserted)
        self._learning_rate = optim.scheduled_learning_rate(self._settings, progress)
        steps: list[Measured] = []
        windows: list[np.ndarray] = []
        own = self._settings.minibatch if len(self._replay) else 0
        while self._rate_limiter.sample_budget and filled and not stop():
            self._rate_limiter.minibatches += 1
            rows = self._replay.sample(own, self._rng)
            windows.append(rows.env_steps)
            if isinstance(self._replay, SequenceReplay) and not total(len(rows.reward), self._ranks):
                continue
            self._gradient_steps += 1
            measured = self._gradient_step(replace(rows, reward=self._rewards.scaled(rows.reward)))
            steps.append(measured if len(rows.reward) else {NONFINITE_STEPS: measured[NONFINITE_STEPS]})
        left_out = nonfinite_steps(steps)
        self._gradient_steps -= left_out
        metrics = {
            "learning_rate": self._learning_rate,
            "gradient_steps": float(len(steps) - left_out),
            NONFINITE_STEPS: float(left_out),
            "replay_env_steps": float(len(self._replay)),
            "replay_incomplete": self._replay.incomplete,
            "samples_per_insert": self._rate_limiter.ratio,
        } | self._rewards.metrics
        if batch.env_steps:
            metrics["policy_lag_mean"] = progress.version - batch.version
        if len(drawn := np.concatenate(windows) if windows else np.empty(0)):
            metrics["window_env_steps"] = float(drawn.mean())
        return UpdateResult(samples=batch.env_steps, metrics=metrics | means(steps))

    def _count_ranks(self, inserted: int) -> bool:
        """Count the inserts of the other ranks; return whether any rank, this one included, has transitions to sample."""
        if self._ranks.count == 1:
            return len(self._replay) > 0
        everywhere, ready = self._ranks.sum(torch.tensor([inserted, len(self._replay)])).tolist()
        self._rate_limiter.env_steps += everywhere - inserted
        return bool(ready)

    def state_dict(self) -> dict[str, Any]:
        """Copies, in nested dicts with string keys; leaves are tensors and JSON scalars."""
        state: dict[str, Any] = {
            "replay_rng": dict(self._rng.bit_generator.state),
            "observation_moments": self._observations.state_dict(),
            "rewards": self._rewards.state_dict(),
            "gradient_steps": self._gradient_steps,
        }
        state |= {key: snapshot.network_state(net) for key, net in self._networks().items()}
        return state | {key: snapshot.optimizer_state(*trained) for key, trained in self._optimizers().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; ResourceError, and nothing changed, where it is of another architecture or algorithm.

        A network that the state lacks begins at the trained one.
        """
        optimizers = self._optimizers()
        if lacking := [key for key in optimizers if key not in state]:
            fact, fix = "the checkpoint is of another algorithm", "resume with the algorithm settings of that run, or see --init"
            raise ResourceError(fact, found=f"no optimizer {lacking[0]}", fix=fix)
        self._restore_networks(state)
        for key, trained in optimizers.items():
            snapshot.restore_optimizer(*trained, state[key])
        if "replay_rng" in state:  # else each rank keeps its own
            self._rng.bit_generator.state = state["replay_rng"]
        self._observations.load_state_dict(state.get("observation_moments", {}))
        self._rewards.load_state_dict(state.get("rewards", {}))
        self._gradient_steps = state.get("gradient_steps", 0)

    def load_parameters(self, state: Mapping[str, Any]) -> None:
        """Take networks and statistics of observations and rewards; targets and averages begin at the trained network."""
        self._restore_networks({"parameters": state.get("parameters", {})})
        self._observations.load_state_dict(state.get("observation_moments", {}))
        self._rewards.load_state_dict(state.get("rewards", {}))

    def _restore_networks(self, state: Mapping[str, Any]) -> None:
        trained = state.get("parameters", {})
        restored = []
        for key, net in self._networks().items():
            own = state.get(key) or {name: trained[name] for name, _ in net.named_parameters() if name in trained}
            snapshot.require_same_network(net, own)
            restored.append((net, own))
        for net, own in restored:
            snapshot.restore_network(net, own)


def td_target(*, reward: Tensor, discount: Tensor, value: Tensor) -> Tensor:
    """R_i + gamma^k_i * V(next_i) [N] (Sutton 1988; n-step as in Hessel et al. 2018, arXiv:1710.02298, eq. 3).

    The actions within a window are those of the policies that acted; k_i > 1 is not corrected for, as is usual for small n.

    Args:
        reward: [N] float32, R_i = sum over j < k_i of gamma^j * r_{i+j}.
        discount: [N] float32, gamma^k_i, 0 where the episode terminated within the window.
        value: [N] float32, V(next_i).
    """
    require_vectors(reward, discount, value)
    return torch.addcmul(reward, discount, value)
