"""What the run has done so far: the one source of `summary.json`, `GET /status` and the learning curve.

Pure bookkeeping: time comes in, numbers go out. Env steps are counted as trained on. One thread writes; any may ask for
the `status`, which shows the moment of the last `tick`, never half of an update.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from common.runtime.rates import Rates, RateWindow
from common.runtime.tree import Settings
from common.units import EnvSteps, Seconds, Version
from common.wire.messages import Evaluation
from services.learner.intake import Figures

EPISODES = 100  # of "mean100"


class _Saved(BaseModel):
    """Form of a record's state."""

    model_config = ConfigDict(strict=True, extra="ignore")

    elapsed_seconds: float
    env_steps: int
    episodes: int
    updates: int
    version: int
    solved_at: dict[str, float] | None
    target: float | None
    last_evaluation: dict[str, Any] | None
    evaluations: dict[str, float]
    returns: list[float]
    lengths: list[int]
    lag: list[float]


@dataclass(slots=True)
class Lag:
    """Policy lag in versions of the env steps trained on, over the whole run."""

    low: int = 0
    high: int = 0
    weighted: float = 0.0  # sum of lag x env steps
    env_steps: EnvSteps = 0

    def add(self, lag: int, env_steps: EnvSteps) -> None:
        """Count `env_steps` that were `lag` versions old when they were trained on."""
        self.low = min(self.low, lag) if self.env_steps else lag
        self.high = max(self.high, lag)
        self.weighted += lag * env_steps
        self.env_steps += env_steps

    def as_dict(self) -> dict[str, float | None]:
        """Nothing known is None, not 0."""
        known = self.env_steps > 0
        return {
            "min": self.low if known else None,
            "mean": round(self.weighted / self.env_steps, 3) if known else None,
            "max": self.high if known else None,
        }


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """Counters and recent results of one run, resumes included."""

    settings: Settings
    run_id: str
    frame_skip: int
    started_at: Seconds  # on the clock whose readings come in as `now`; earlier lives of a resumed run included
    phase: str = "starting"
    env_steps: EnvSteps = 0
    episodes: int = 0
    updates: int = 0
    version: Version = 0
    solved_at: dict[str, float] | None = None
    lockstep_broken: str = ""  # why another run of the same seed may end with other weights, though it is in lockstep
    parameters_sha256: str | None = None  # of the final policy; None until the run ends
    last_evaluation: dict[str, Any] | None = None
    evaluations: dict[str, float] = field(default_factory=dict)
    training: Mapping[str, float] = field(default_factory=dict)
    lag: Lag = field(default_factory=Lag)
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=EPISODES))
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=EPISODES))
    rates: Rates = field(default_factory=lambda: RateWindow().rates())
    _window: RateWindow = field(default_factory=RateWindow)
    _ended_at: Seconds = math.inf
    _shown: tuple[dict[str, Any], dict[str, Any]] = field(init=False)  # facts and live; replaced, never changed

    def __post_init__(self) -> None:
        """Show the beginning."""
        self._show()

    # --- writing ---

    def trained(self, *, env_steps: EnvSteps, metrics: Mapping[str, float]) -> None:
        """One update was done on `env_steps`."""
        self.env_steps += env_steps
        self.updates += 1
        self.training = dict(metrics)

    def tick(self, now: Seconds) -> None:
        """Time passed: the rates of a run that stalls fall."""
        self._window.add(now, self.env_steps)
        self.rates = self._window.rates()
        self._show()

    def ended(self, returns: Sequence[float], lengths: Sequence[int], now: Seconds) -> None:
        """Training episodes ended; raw returns, lengths in env steps."""
        self.episodes += len(returns)
        self.returns.extend(returns)
        self.lengths.extend(lengths)
        target = self.settings.target.mean100
        if target is not None and self.solved_at is None and len(self.returns) == EPISODES and self.mean_return >= target:
            self.solved_at = {"wall_seconds": round(now - self.started_at, 1), "env_steps": self.env_steps}

    def evaluated(self, evaluation: Evaluation) -> dict[str, Any]:
        """An evaluator reported; returns the result as it stands in the summary."""
        returns = evaluation.arrays["episode_return"]
        mean = round(float(returns.mean(dtype=np.float64)), 3)  # float32 would overflow on returns that are finite
        result: dict[str, Any] = {"version": evaluation.version, "mode": evaluation.mode, "mean": mean, "episodes": len(returns)}
        self.evaluations[evaluation.mode] = mean
        if evaluation.mode == "greedy" or self.last_evaluation is None:
            self.last_evaluation = result
        self._show()
        return result

    def finish(self, now: Seconds) -> None:
        """The run is over: its time stands still, and nothing is trained any more."""
        self.phase, self._ended_at = "finished", now
        self.rates = RateWindow().rates()
        self._show()

    # --- reading ---

    @property
    def mean_return(self) -> float:
        """Mean raw return of the last 100 training episodes (of as many as there are); NaN before the first."""
        return sum(self.returns) / len(self.returns) if self.returns else math.nan

    @property
    def mean_length(self) -> float:
        """Mean length of the last 100 training episodes in env steps; NaN before the first."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else math.nan

    @property
    def solved(self) -> bool:
        """Whether the mean of 100 episodes has reached the preset's target."""
        return self.solved_at is not None

    def over(self, now: Seconds) -> str:
        """Why the run ends by itself now; "" while it does not."""
        target = self.settings.target
        if self.solved:
            return "target reached"
        if self.env_steps >= target.env_steps:
            return "env step budget spent"
        if target.wall_seconds is not None and now - self.started_at >= target.wall_seconds:
            return "wall-clock budget spent"
        return ""

    def summary(self, figures: Figures, now: Seconds) -> dict[str, Any]:
        """The content of summary.json: JSON values, nothing rounded up."""
        return self._timed(self._facts(), figures, now)

    def status(self, figures: Figures, now: Seconds) -> dict[str, Any]:
        """The summary as of the last `tick` or evaluation, and what matters only while the run goes on. Safe from any thread."""
        facts, live = self._shown
        summary = self._timed(facts, figures, now)
        return {
            **summary,
            **live,
            "phase": self.phase,
            "frames_per_second": live["frames_per_second"] | {"run": summary["frames_per_second"]},
            "queue": {"depth": figures.queue_depth, "capacity": figures.queue_capacity},
            "peers": {"actor": figures.actors, "evaluator": figures.evaluators},
        }

    def _show(self) -> None:
        self._shown = self._facts(), self._live()

    def _facts(self) -> dict[str, Any]:
        return {
            "preset": self.settings.run.preset,
            "run_id": self.run_id,
            "seed": self.settings.run.seed,
            "mode": self.settings.run.mode,
            "reproducible": self.settings.lockstep and not self.lockstep_broken,
            "parameters_sha256": self.parameters_sha256,
            "solved": self.solved,
            "solved_at": self.solved_at,
            "env_steps": self.env_steps,
            "frames": self.env_steps * self.frame_skip,
            "episodes": self.episodes,
            "learner_updates": self.updates,
            "mean100": _known(self.mean_return),
            "last_evaluation": self.last_evaluation,
            "policy_lag": self.lag.as_dict(),
        }

    def _live(self) -> dict[str, Any]:
        target = self.settings.target
        return {
            "version": self.version,
            "frames_per_second": {name: round(rate * self.frame_skip, 1) for name, rate in asdict(self.rates).items()},
            "target": {"mean100": target.mean100, "env_steps": target.env_steps},
            "evaluations": dict(self.evaluations),
            "training": {name: value for name, value in self.training.items() if math.isfinite(value)},
        }

    def _timed(self, facts: Mapping[str, Any], figures: Figures, now: Seconds) -> dict[str, Any]:
        wall = max(min(now, self._ended_at) - self.started_at, 1e-9)
        return {
            **facts,
            "wall_seconds": round(wall, 1),
            "env_steps_per_second": round(facts["env_steps"] / wall, 1),
            "frames_per_second": round(facts["frames"] / wall, 1),
            "ledger": figures.ledger,
        }

    # --- resuming ---

    def state_dict(self, now: Seconds) -> dict[str, Any]:
        """What a resumed run goes on from. JSON values."""
        return {
            "elapsed_seconds": now - self.started_at,
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "updates": self.updates,
            "version": self.version,
            "solved_at": self.solved_at,
            "target": self.settings.target.mean100,
            "last_evaluation": self.last_evaluation,
            "evaluations": dict(self.evaluations),
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "lockstep_broken": self.lockstep_broken,
            "lag": [self.lag.low, self.lag.high, self.lag.weighted, self.lag.env_steps],
        }

    def load_state_dict(self, state: Mapping[str, Any], now: Seconds) -> None:
        """Restore `state_dict`; time in between does not count. Raises `ValueError` where `state` is no state of a record."""
        _Saved.model_validate(state)
        self.lockstep_broken = state.get(
            "lockstep_broken", "resumed from a checkpoint of a version that lacks what was under way"
        )
        self.started_at = now - state["elapsed_seconds"]
        for name in ("env_steps", "episodes", "updates", "version", "solved_at", "last_evaluation"):
            setattr(self, name, state[name])
        if state["target"] != self.settings.target.mean100:
            self.solved_at = None  # another target is not reached yet
        self.evaluations = dict(state["evaluations"])
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])
        self.lag = Lag(*state["lag"])
        self._show()


def _known(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None
