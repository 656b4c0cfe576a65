"""Environments that are stepped side by side, with rows of one meaning for every origin and autoreset mode.

next_step   the row after an end ignores its action and only brings the reset: valid False, start True
same_step   the row that ends an episode brings the next one's first observation: start True; the last
observation of a truncated episode, which is bootstrapped from, comes apart in `final_observation`

Rows may be agents (`common.envs.agents`). One that has left before the others has rows that are neither valid nor a start.

Observations of several arrays, an action mask among them, are joined to one array (`common.envs.leaves`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Space
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from common.envs import state
from common.envs.agents import STARTS, AgentRows, as_bools
from common.envs.leaves import Array
from common.envs.observation import AnyVectorEnv, ObservationReader
from common.envs.spaces import describe_action
from common.envs.spec import ACTION_MASK, EnvSettings, EnvSpec
from common.errors import ConfigError

SEEDS = 2**31  # ale-py takes no larger seed


class Transition(NamedTuple):
    """Result of one step of B environments. Arrays may be views: copy those that are to outlive the next step."""

    observation: Array  # [B, *frame]: what the next action is chosen on
    reward: NDArray[np.float32]  # [B], raw; 0 in a row that is not valid
    terminated: NDArray[np.bool_]  # [B]: the episode ended by its own rules
    truncated: NDArray[np.bool_]  # [B]: the episode was cut off, by a time limit
    valid: NDArray[np.bool_]  # [B]: False in a reset row, and without an agent: its action was ignored
    start: NDArray[np.bool_]  # [B]: `observation` is the first of an episode
    final_index: NDArray[np.int32]  # [K]: environments truncated in this row, where `observation` is past their end
    final_observation: Array  # [K, *frame]: their last observations
    life_lost: NDArray[np.bool_]  # [B]: an end for the learner alone; False where the episode ended, and unless asked for


class VectorEnvironment:
    """B environments stepped together. One thread uses it; `close` it when done."""

    def __init__(self, env: AnyVectorEnv, *, settings: EnvSettings, mode: AutoresetMode) -> None:
        """Take over `env`, which resets itself by `mode`. Raises `ConfigError` for a space that is not supported."""
        self._name = settings.name
        action, self.to_native = describe_action(env.single_action_space)
        self._observed = ObservationReader(env, settings, action)
        ours = isinstance(env, AtariVectorEnv) and not settings.entry_point  # else a function chose how many frames it skips
        self.num_envs: int = env.num_envs
        self.agents = len(env.agents) if isinstance(env, AgentRows) else 1  # rows of one environment, one after the other
        self.action_space: Space[Any] = env.single_action_space  # of one environment, as `to_native` gives it
        self.spec = EnvSpec(
            **self._observed.described(),
            action=action,
            frame_stack=settings.frame_stack,
            frame_skip=settings.frame_skip if ours else 1,
        )
        # Settings that are set and not heeded: those of Atari by a function of the user's own, the mode of resets by others too.
        image = {"crop": settings.crop != (0, 0), "terminate_on_life_loss": settings.terminate_on_life_loss}
        self.unheeded = [name for name, is_set in image.items() if is_set and not isinstance(env, AtariVectorEnv)]
        if not ours and settings.frame_skip != EnvSettings.model_fields["frame_skip"].default:
            self.unheeded.append("frame_skip")
        if settings.autoreset == "same_step" and mode is not AutoresetMode.SAME_STEP:
            self.unheeded.append("autoreset")
        self.offers_masks = self._observed.ignores_mask  # whether an action mask came that `env.action_mask` does not use
        self.native = env  # the environments as gymnasium knows them
        self._counts_lives = settings.terminate_on_life_loss and isinstance(env, AtariVectorEnv)
        self._lives: NDArray[np.int32] = np.zeros(self.num_envs, np.int32)
        self.same_step = mode is AutoresetMode.SAME_STEP  # else an end comes a step before the reset
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._all_valid = np.ones(self.num_envs, np.bool_)
        self._no_life_lost = np.zeros(self.num_envs, np.bool_)
        self._no_index = np.zeros(0, np.int32)
        self._no_frames = np.zeros((0, *self.spec.observation_shape), self.spec.observation_dtype)

    def reset(self, seed: int) -> Array:
        """Begin B episodes, environment b with `seed + b` where it is seeded alone; return the first observations [B, *frame].

        Raises `ConfigError` where the infos are no dict: masks and last observations are looked up in it.
        """
        state.seed_spaces(self.native, seed)  # an environment may sample them
        try:
            observation, info = self.native.reset(seed=seed % (SEEDS - self.num_envs))
        except LookupError:
            self._observed.require_leaves(getattr(self.native, "_env_obs", ()))
            raise
        if not isinstance(info, Mapping):
            fact, fix = f"{self._name} returns infos in another form", "leave out the wrapper that converts them"
            raise ConfigError(fact, found=type(info).__name__, wanted="a dict of arrays, as of any VectorEnv", fix=fix)
        self.offers_masks |= self._offered(info)
        if self._counts_lives:
            self._lives = info["lives"].copy()
        self._ended = np.zeros(self.num_envs, np.bool_)
        return self._observed(observation, info, acted_on=self._all_valid)

    def step(self, action: Array) -> Transition:
        """Take `action`: [B] or [B, K] int64 from 0, or [B, A] float32, clipped to the space's bounds here.

        Raises `ConfigError` where the environment returns arrays of other shapes than its space and its number of rows say, or
        ends that are no numbers.
        """
        try:
            observed, rewards, terminated, truncated, info = self.native.step(self.to_native(action))
        except LookupError:
            self._observed.require_leaves(getattr(self.native, "_env_obs", ()))  # of SyncVectorEnv: one for each environment
            raise
        self.offers_masks |= self._offered(info)
        reward = np.asarray(rewards, np.float32)
        terminated, truncated = (as_bools(ends, name=self._name) for ends in (terminated, truncated))
        if not reward.shape == terminated.shape == truncated.shape == self._ended.shape:
            fact = f"{self._name} returns rewards, terminated and truncated of other shapes"
            found, wanted = f"{reward.shape}, {terminated.shape} and {truncated.shape}", f"{self._ended.shape} of each"
            raise ConfigError(fact, found=found, wanted=wanted, fix="correct the environment")
        after_end, self._ended = self._ended, terminated | truncated
        start = after_end
        if not self.same_step and after_end.any():
            start = info.get(STARTS, after_end)
            self._ended = (self._ended | after_end) & ~start
        observation = self._observed(observed, info, acted_on=self._all_valid if self.same_step else ~self._ended)
        life_lost = self._life_lost(info)
        if self.same_step:
            final = self._finals(truncated, info)
            return Transition(observation, reward, terminated, truncated, self._all_valid, self._ended, *final, life_lost)
        if after_end.any():  # a reset row has no meaning beside its observation
            alive = ~after_end
            reward, terminated, truncated = np.where(alive, reward, np.float32(0)), terminated & alive, truncated & alive
            life_lost = life_lost & alive  # a bonus life of the game before is none that was lost
        final = self._no_index, self._no_frames
        return Transition(observation, reward, terminated, truncated, ~after_end, start, *final, life_lost)

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which another process continues bit for bit: plain values, not a copy.

        Raises `StateError` where the state of the environments cannot be read.
        """
        return {"ended": self._ended, "lives": self._lives, "environment": state.capture(self.native)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore `state_dict`, after a reset.

        Raises `StateError` where the state does not fit; the environments must then be built anew.
        """
        ended, lives = (saved.get(name) for name in ("ended", "lives"))
        for value, current in ((ended, self._ended), (lives, self._lives)):
            state.check_like("state of the environments", value, current)
        state.restore(self.native, saved.get("environment", {}))
        self._ended, self._lives = np.array(ended), np.array(lives)

    def close(self) -> None:
        """Free the emulators and other resources."""
        self.native.close()

    def _offered(self, info: Mapping[str, Any]) -> bool:
        return ACTION_MASK in info and self.spec.action.discrete and not self.spec.action_mask

    def _life_lost(self, info: Mapping[str, Any]) -> NDArray[np.bool_]:
        """Return [B]: fewer lives than before, in a game that continues. A reset restores lives and loses none."""
        if not self._counts_lives:
            return self._no_life_lost
        before, self._lives = self._lives, info["lives"].copy()
        return (self._lives < before) & ~self._ended

    def _finals(self, truncated: NDArray[np.bool_], info: Mapping[str, Any]) -> tuple[NDArray[np.int32], Array]:
        if not truncated.any():
            return self._no_index, self._no_frames
        index = np.flatnonzero(truncated).astype(np.int32)
        return index, self._observed.final(info, index)
