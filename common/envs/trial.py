"""Trial of an environment: its spec, its first env steps, which find its faults before a run starts, and examples."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv

from common.envs.leaves import Array, action_mask, random_allowed, split
from common.envs.make import build
from common.envs.spaces import outside_space, require_integers
from common.envs.spec import EnvSettings, EnvSpec
from common.envs.state import seed_generators
from common.envs.vector import VectorEnvironment
from common.errors import ConfigError, RookeryError
from common.units import Seconds

TRIAL_SECONDS: Seconds = 0.5  # for its env steps
EXAMPLE_ENVS, EXAMPLE_STEPS = 2, 512  # few and many: an Atari environment takes as long to begin as to play 700 steps
LEAST_STEPS = 2  # env steps, however slow: enough for a step that always raises, or a reward that is always NaN


def spec_of(settings: EnvSettings) -> EnvSpec:
    """Describe the environment: build one, begin an episode, and close it again. Errors as in `trial`."""
    with trial(settings) as environment:
        return environment.spec


@contextmanager
def trial(settings: EnvSettings, *, num_envs: int = 1, env_steps: int = 0) -> Iterator[VectorEnvironment]:
    """Yield `num_envs` environments, or as many as `build` makes, that took random actions; close them afterwards.

    Each takes `env_steps` of them, or as many as fit into `TRIAL_SECONDS`, and two at least. Errors as in `make`, and
    `ConfigError` where the environment itself fails, or returns arrays of other shapes than its space or numbers not finite.
    """
    environment, wanted = None, "an environment"
    with ExitStack() as stack:
        try:
            environment = stack.enter_context(closing(build(settings, num_envs)))
            wanted = f"observations of shape {environment.spec.observation_shape}"
            if type(environment.native) is SyncVectorEnv:
                environment.native.envs = [_Checked(env, settings.name) for env in environment.native.envs]
            observation = environment.reset(0)
            _require_observation(observation, environment.spec, settings)
            wanted += ", a single number as each reward, and a bool as terminated and as truncated"
            random, until = np.random.default_rng(0), time.monotonic() + TRIAL_SECONDS
            for number in range(env_steps):
                if number >= LEAST_STEPS and time.monotonic() >= until:
                    break
                transition = environment.step(random_actions(environment.spec, observation, random))
                observation = transition.observation
                _require_observation(observation, environment.spec, settings)
                _require_finite(transition.reward, "rewards", settings)
        except RookeryError:
            raise
        except Exception as error:  # a user's own code may raise anything, and no restart helps
            found = f"{type(error).__name__}: {error}"
            stage = "is built or begins an episode" + (", or in its first env steps" if env_steps else "")
            fact = f"{settings.name} fails when it {stage}"
            fix = "correct the environment, or env.kwargs"
            if environment is not None and environment.offers_masks:  # it may have refused an action that its mask forbids
                fix += ", or set env.action_mask=true"
            raise ConfigError(fact, found=found, wanted=wanted, fix=fix) from error
        yield environment


class _Checked(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Refuses ends that are no numbers, as gymnasium takes None for False, and integers beyond the dtype of their space."""

    def __init__(self, env: Any, name: str) -> None:
        super().__init__(env)
        self._name = name

    def reset(self, **given: Any) -> tuple[Any, Any]:
        """As of `gymnasium.Env`."""
        observation, info = self.env.reset(**given)
        self._require_integers(observation)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """As of `gymnasium.Env`."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if not all(isinstance(end, int | float) or hasattr(end, "dtype") for end in (terminated, truncated)):
            raise TypeError(f"terminated {terminated!r}, truncated {truncated!r}")
        self._require_integers(observation)
        return observation, reward, terminated, truncated, info

    def _require_integers(self, observation: Any) -> None:
        with suppress(LookupError):  # of a leaf that is missing, which is found by its name afterwards
            require_integers(self._name, self.env.observation_space, [observation])


def _require_observation(observation: Array, spec: EnvSpec, settings: EnvSettings) -> None:
    for path, values, choices in split(spec, observation):
        _require_finite(values, f"observations {path}".strip(), settings)
        if choices and not ((values >= 0) & (values < choices)).all():
            raise outside_space(settings.name, path, values[0].tolist(), wanted=f"0 to below {choices}")


def _require_finite(values: Array, what: str, settings: EnvSettings) -> None:
    if not np.isfinite(values).all():
        fact, found = f"{settings.name} returns {what} that are not finite as float32", str(values[~np.isfinite(values)][0])
        raise ConfigError(fact, found=found, wanted="finite numbers", fix="correct the environment")


def example_frames(settings: EnvSettings, *, seed: int) -> Array:
    """Return observations of random play, [EXAMPLE_STEPS * B, *frame], B environments. The global generators are seeded too.

    Agents that have left are not seen; observations repeat in place of theirs.
    """
    random = np.random.default_rng(seed)
    seed_generators(seed)
    with closing(build(settings, EXAMPLE_ENVS)) as environment:
        observation, frames = environment.reset(seed), []
        for _ in range(EXAMPLE_STEPS):
            transition = environment.step(random_actions(environment.spec, observation, random))
            observation = transition.observation
            frames.append(observation[transition.valid | transition.start])
        seen = np.concatenate(frames)
        return np.resize(seen, (EXAMPLE_STEPS * environment.num_envs, *seen.shape[1:]))


def random_actions(spec: EnvSpec, observation: Array, random: np.random.Generator) -> Array:
    """Return actions [B, ...] drawn from all that the observations [B, *frame] allow; without bounds from a normal."""
    action = spec.action
    size = (len(observation), *action.shape)
    if spec.action_mask:
        return random_allowed(spec, action_mask(spec, observation), random)
    if action.discrete:
        return random.integers(action.choices, size=size)
    low, high = np.array(action.low), np.array(action.high)
    bounded = np.isfinite(high - low)
    within = random.uniform(np.where(bounded, low, 0.0), np.where(bounded, high, 0.0), size)
    free = random.normal(action.origin, size=size)
    return np.where(bounded, within, free).astype(np.float32)  # the environment's step clips them
