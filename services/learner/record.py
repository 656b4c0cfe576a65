"""Counters and recent results of the run: the one source of `summary.json`, `GET /status` and the learning curve.

Pure bookkeeping: every method gets the time as an argument. Env steps are counted as trained on. One thread writes; any may read
the `status`, which shows the state at the last `tick`, never half of an update.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from common.config.layers import dotted
from common.config.schema import Settings
from common.errors import ConfigError
from common.observability.learner_stats import IntakeStats, Progress
from common.protocol.messages import Evaluation
from common.units import EnvSteps, Seconds, Version, significant
from services.learner.coverage import NO_ACTORS, Coverage, EpisodeCoverage
from services.learner.progress import ProgressEstimator
from services.learner.rates import PolicyLag, RateWindow, StepRates

EPISODES = 100  # of "mean100"; where there are more environments, as many as those
COVERED = 10  # episodes for each environment, after which their mean is none over the shortest, though some ended none

_SAVED_AS_THEY_ARE = ("env_steps", "frames", "episodes", "updates", "version", "solved_at", "last_evaluation")


def _number(metric: str, value: object) -> float:
    """Return the value of a metric, which may be of numpy or torch. Raises ConfigError where it is no number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises the last
        fact, fix = f"metric {metric!r} of the algorithm is no number", "correct the UpdateResult of the algorithm"
        raise ConfigError(fact, found=repr(value), fix=fix) from error


class _SavedRecord(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    elapsed_seconds: float
    env_steps: int
    frames: int
    unfinished: int
    covered: bool
    unbiased: int
    episodes: int
    updates: int
    version: int
    solved_at: dict[str, float] | None
    target: float | None
    target_evaluation: float | None
    last_evaluation: dict[str, Any] | None
    evaluations: dict[str, float]
    returns: list[float]
    lengths: list[int]
    lag: list[float]
    timed: list[float]
    task: dict[str, Any]
    shown_mean100: float | None
    lowest_mean100: float | None
    coverage: dict[str, list[int]]
    lockstep_broken: str
    settings: dict[str, Any]
    settings_changed: list[dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """Counters and recent results of one run, resumes included."""

    settings: Settings
    run_id: str
    frame_skip: int
    started_at: Seconds  # on the clock of `now`; earlier processes of a resumed run included
    phase: str = "starting"
    env_steps: EnvSteps = 0
    frames: int = 0  # of the emulator; a resume may change the frame skip
    episodes: int = 0
    updates: int = 0
    version: Version = 0
    solved_at: dict[str, float] | None = None
    task_changed: str = ""  # settings of the environment that were others before the resume: results of before do not count
    settings_changed: list[dict[str, Any]] = field(default_factory=list)  # at resumes: env steps, and what changed
    lockstep_broken: str = ""  # reason why, in lockstep, another run of the same seed may end with other weights
    parameters_sha256: str | None = None  # of the final policy; None until the run ends
    last_evaluation: dict[str, Any] | None = None
    best: dict[str, Any] | None = None  # version, mean return, episodes and env steps of the policy in the checkpoint `best`
    evaluations: dict[str, float] = field(default_factory=dict)
    _evaluated: dict[str, Version] = field(default_factory=dict)  # versions of `evaluations`
    training: Mapping[str, float] = field(default_factory=dict)
    lag: PolicyLag = field(default_factory=PolicyLag)
    returns: deque[float] = field(default_factory=deque)
    lengths: deque[int] = field(default_factory=deque)
    coverage: EpisodeCoverage = field(init=False)
    unfinished: int = 0  # environments that have ended no episode: until all have, the mean is one over short episodes
    covered: bool = False  # whether all had since the start, or `COVERED` were ended for each: some may never end one
    _ended: int = 0  # episodes, by this process
    _unbiased: int = 0  # newest episodes, since an actor last left before its longer ones ended
    mean_is_complete: bool = False  # whether the mean is one over enough episodes to reach the target
    rates: StepRates = field(default_factory=lambda: RateWindow().rates())
    progress: Progress = field(default_factory=Progress)
    _estimator: ProgressEstimator = field(default_factory=ProgressEstimator)
    _window: RateWindow = field(default_factory=RateWindow)
    _learning: RateWindow = field(default_factory=RateWindow)  # from the first update with gradient steps on
    _env_steps_before: EnvSteps | None = 0  # that earlier processes trained on; None after the first update of this one
    _ended_at: Seconds = math.inf
    _shown: tuple[dict[str, Any], dict[str, Any]] = field(init=False)  # facts and live; replaced, never changed

    def __post_init__(self) -> None:
        self.coverage = EpisodeCoverage(self.settings.env.num_envs, lockstep=self.settings.lockstep)
        self._show()

    # --- writing ---

    def trained(self, *, env_steps: EnvSteps, metrics: Mapping[str, float]) -> None:
        """Count one update on `env_steps`. Raises ConfigError for a metric of a user's algorithm that is no number."""
        self.env_steps += env_steps
        self.frames += env_steps * self.frame_skip
        self.updates += 1
        self._env_steps_before = None
        self.training = {name: _number(name, value) for name, value in metrics.items()}

    def measure(self, now: Seconds) -> None:
        """Update the rates, which fall while a run stalls."""
        if self.env_steps != self._env_steps_before:  # the start, until the first update, is in no rate
            self._window.add(now, self.env_steps)
            if self.training.get("gradient_steps", 1.0):  # 0 in a warm-up, which is no measure of the rest of the run
                self._learning.add(now, self.env_steps)
        self.rates = self._window.rates()

    def tick(self, now: Seconds) -> None:
        """Update the rates and the progress."""
        self.measure(now)
        elapsed, target, mean = now - self.started_at, self.settings.target, self.mean_return if self.mean_is_complete else None
        rate = self._learning.rates().last_60s
        self.progress = self._estimator.update(elapsed, target, env_steps=self.env_steps, rate=rate, mean=mean)
        self._show()

    def ended(self, returns: Sequence[float], lengths: Sequence[int], now: Seconds, coverage: Coverage = NO_ACTORS) -> None:
        """Count training episodes that ended: raw returns, lengths in env steps.

        The target is reached by the mean of a full window, once each environment has ended an episode. The window has an
        episode of each environment, because those that end within a short time are of similar lengths. Where an actor leaves or
        restarts before each of its environments has ended one, the window may have the short ones of that actor alone: the target
        is not reached until none of them is left.
        """
        self.episodes += len(returns)
        self.unfinished = coverage.unfinished
        self._unbiased = (0 if coverage.left else self._unbiased) + len(returns)
        self.returns.extend(returns)
        self.lengths.extend(lengths)
        for _ in range(len(self.returns) - max(EPISODES, coverage.environments)):
            self.returns.popleft()
            self.lengths.popleft()
        self._ended += len(returns)
        complete = not self.unfinished or self._ended >= COVERED * coverage.environments
        self.covered |= bool(self.returns) and complete
        self.mean_is_complete = len(self.returns) >= EPISODES and not (self.before_leaving or self.unfinished)
        target = self.settings.target.mean100
        if target is not None and self.mean_is_complete and significant(self.mean_return) >= target:
            self._reached_target(now, self.env_steps)

    def _reached_target(self, now: Seconds, env_steps: EnvSteps) -> None:
        if self.solved_at is None:
            self.solved_at = {"wall_seconds": round(now - self.started_at, 1), "env_steps": env_steps}

    def evaluated(self, evaluation: Evaluation, now: Seconds, *, env_steps: EnvSteps) -> dict[str, Any]:
        """Count an evaluation of the policy of `env_steps`; return the result as it stands in the summary."""
        returns = evaluation.arrays["episode_return"]
        mean = significant(float(returns.mean(dtype=np.float64)))  # float32 would overflow on returns that are finite
        result: dict[str, Any] = {"version": evaluation.version, "mode": evaluation.mode, "mean": mean, "episodes": len(returns)}
        greedy = evaluation.mode == "greedy"
        late = evaluation.version < self._evaluated.get(evaluation.mode, 0)  # of a slower evaluator
        if not late:
            self.evaluations[evaluation.mode], self._evaluated[evaluation.mode] = mean, evaluation.version
        if self.last_evaluation is None or (greedy and not late):
            self.last_evaluation = result
        target = self.settings.target.evaluation
        if greedy and target is not None and mean >= target:
            self._reached_target(now, env_steps)
        self._show()
        return result

    def stop_progress(self, *, done: bool) -> None:
        """End training: nothing is trained or left to train any more; `done`: by itself, so that nothing is missing."""
        self.progress = Progress(1.0 if done else self.progress.fraction)
        self.rates = StepRates(last_10s=0.0, last_60s=0.0, run=self.rates.run)
        self._show()

    def finish(self, now: Seconds) -> None:
        """End the run: its time stands still."""
        self.phase, self._ended_at = "finished", now
        self._show()

    # --- reading ---

    @property
    def mean_return(self) -> float:
        """Return the mean raw return of the newest training episodes, 100 or one of each environment; NaN before the first."""
        return sum(self.returns) / len(self.returns) if self.returns else math.nan

    @property
    def mean_length(self) -> float:
        """Return the mean length of the same episodes in env steps; NaN before the first."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else math.nan

    @property
    def before_leaving(self) -> int:
        """Return the episodes in mean100 from before an actor left or restarted in the middle of longer ones."""
        return max(0, len(self.returns) - self._unbiased)

    @property
    def solved(self) -> bool:
        """Return whether the mean of 100 episodes, or a greedy evaluation, has reached its target."""
        return self.solved_at is not None

    def over(self, now: Seconds) -> str:
        """Return the reason why the run ends by itself now; "" while it does not."""
        target = self.settings.target
        if self.solved:
            return "target reached"
        if self.env_steps >= target.env_steps:
            return "env step budget spent"
        if target.wall_seconds is not None and now - self.started_at >= target.wall_seconds:
            return "wall-clock budget spent"
        return ""

    def summary(self, stats: IntakeStats, now: Seconds) -> dict[str, Any]:
        """Return the content of summary.json: JSON values."""
        return self._timed(self._facts(), stats, now)

    def status(self, stats: IntakeStats, now: Seconds) -> dict[str, Any]:
        """Return the summary as of the last `tick` or evaluation, and the state of the running process. Safe from any thread."""
        facts, live = self._shown
        summary = self._timed(facts, stats, now)
        return {
            **summary,
            **live,
            "phase": self.phase,
            "frames_per_second": live["frames_per_second"] | {"run": summary["frames_per_second"]},
            "queue": {"depth": stats.queue_depth, "capacity": stats.queue_capacity},
            "workers": {"actor": stats.actors, "evaluator": stats.evaluators},
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
            "target": self.settings.target.model_dump(include={"mean100", "evaluation", "env_steps"}),
            "env_steps": self.env_steps,
            "frames": self.frames,
            "episodes": self.episodes,
            "learner_updates": self.updates,
            "version": self.version,
            "mean100": significant(self.mean_return) if math.isfinite(self.mean_return) else None,
            "mean100_episodes": len(self.returns),
            "environments_unfinished": self.unfinished,
            "episodes_before_leaving": self.before_leaving,
            "last_evaluation": self.last_evaluation,
            "best": self.best,
            "policy_lag": self.lag.as_dict(),
        }

    def _live(self) -> dict[str, Any]:
        return {
            "frames_per_second": {name: round(rate * self.frame_skip, 1) for name, rate in asdict(self.rates).items()},
            "progress": asdict(self.progress),
            "evaluations": dict(self.evaluations),
            "training": {name: value for name, value in self.training.items() if math.isfinite(value)},
        }

    def _timed(self, facts: Mapping[str, Any], stats: IntakeStats, now: Seconds) -> dict[str, Any]:
        wall = max(min(now, self._ended_at) - self.started_at, 1e-9)
        rate = self.rates.run or facts["env_steps"] / wall  # since the first update of each process, or before there are two
        return {
            **facts,
            "wall_seconds": round(wall, 1),
            "env_steps_per_second": round(rate, 1),
            "frames_per_second": round(rate * facts["frames"] / max(facts["env_steps"], 1), 1),
            "ledger": stats.ledger,
        }

    # --- resuming ---

    def state_dict(self, now: Seconds) -> dict[str, Any]:
        """Return the state from which a resumed run continues, JSON values."""
        return {
            "elapsed_seconds": now - self.started_at,
            **{name: getattr(self, name) for name in _SAVED_AS_THEY_ARE},
            "unfinished": self.unfinished,
            "covered": self.covered,
            "unbiased": self._unbiased,
            "target": self.settings.target.mean100,
            "target_evaluation": self.settings.target.evaluation,
            "evaluations": dict(self.evaluations),
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "coverage": self.coverage.state_dict(),
            "lockstep_broken": self.lockstep_broken,
            "settings": deciding_settings(self.settings),
            "settings_changed": self.settings_changed,
            "lag": [self.lag.low, self.lag.high, self.lag.weighted, self.lag.env_steps],
            "timed": list(self._window.timed),
            "task": self.settings.env.task,
            "shown_mean100": self._estimator.mean,
            "lowest_mean100": self._estimator.lowest,
        }

    def load_state_dict(self, state: Mapping[str, Any], now: Seconds) -> None:
        """Restore `state_dict`; time in between does not count. Raises `ValueError` where `state` is no state of a record.

        Where the environment is another one now, the returns and evaluations of before are forgotten.
        """
        try:
            _SavedRecord.model_validate(state)
        except ValidationError as error:
            wrong = ", ".join(".".join(map(str, each["loc"])) for each in error.errors())
            raise ValueError(f"the record of a checkpoint of another version: {wrong}") from error
        self.lockstep_broken, self.settings_changed = state["lockstep_broken"], list(state["settings_changed"])
        before, present = state["settings"], deciding_settings(self.settings)
        if changes := _changes(before, present):
            self.lockstep_broken = self.lockstep_broken or f"resumed with other settings: {'; '.join(changes.values())}"
        # A setting that one of the two lacks is of another version, but for an argument of the environment.
        kept = (key for key in changes if key.startswith("env.kwargs.") or (key in before and key in present))
        if known := [changes[key] for key in kept]:
            self.settings_changed.append({"env_steps": state["env_steps"], "settings": known})
        self.started_at = now - state["elapsed_seconds"]
        self._env_steps_before = state["env_steps"]
        for name in _SAVED_AS_THEY_ARE:
            setattr(self, name, state[name])
        target = self.settings.target
        if (state["target"], state["target_evaluation"]) != (target.mean100, target.evaluation):
            self.solved_at = None  # another target is not reached yet
        self.evaluations = dict(state["evaluations"])
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])
        self.task_changed = self.settings.env.task_changes(state["task"])
        if not self.task_changed:
            self._estimator.mean, self._estimator.lowest = state["shown_mean100"], state["lowest_mean100"]
            self.unfinished = state["unfinished"]
            continues = self.settings.lockstep and not changes  # else environments may begin anew: short episodes are the first
            self.covered = continues and state["covered"]
            left = self.unfinished and not continues  # before each environment had ended an episode
            self._unbiased = 0 if left else state["unbiased"]
        else:
            self.solved_at = self.last_evaluation = None
            for results in (self.evaluations, self.returns, self.lengths):
                results.clear()
        if last := self.last_evaluation:
            self._evaluated = dict.fromkeys(self.evaluations, last["version"])
        self.lag = PolicyLag(*state["lag"])
        if not self.task_changed and not changes:
            self.coverage.load_state_dict(state["coverage"])
        self._window = RateWindow(state["timed"])
        self.rates = self._window.rates()
        self._show()

    def begin_environments_anew(self) -> None:
        """After `load_state_dict`: in lockstep too, environments do not continue where the sessions of their actors ended."""
        self.coverage.load_state_dict({})
        self.covered = False
        self._unbiased = 0 if self.unfinished else self._unbiased


def deciding_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that decide with which weights a run of one seed ends, by dotted key."""
    values = settings.model_dump(mode="json")
    learner = ["ranks", "batch", "max_policy_lag", "snapshot_precision"]
    learner += [] if settings.lockstep else ["credits", "batch_seconds"]  # in lockstep they have no effect
    chosen = {name: values[name] for name in ("env", "model", "algorithm", "rollout")} | {
        "run": {name: values["run"][name] for name in ("seed", "mode")},
        "learner": {name: values["learner"][name] for name in learner},
        "actor": {name: values["actor"][name] for name in ("count", "precision")},
        "target": {"env_steps": values["target"]["env_steps"]},  # schedules run over it
    }
    return dotted(chosen)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that changed since a checkpoint, with their values; a learning rate only where the run takes it."""
    keys = {**before, **now}
    changes = {key: f"{key} was {before.get(key)}, is {now.get(key)}" for key in keys if before.get(key) != now.get(key)}
    if before.get("algorithm.lr_schedule") == now.get("algorithm.lr_schedule") == "kl_adaptive":
        changes.pop("algorithm.learning_rate", None)  # the adapted rate goes on
    return changes
