"""Deep Q-learning on Pong in one short program (Mnih et al. 2015), and the changes that make it faster one by one.

The rungs of `benchmarks.ladder` that are no preset. Every rung takes one gradient step on 32 samples for each env step, or on
32 * B samples for each step of B environments, so all of them do the same work. Nothing here is part of the system.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import ale_py
import gymnasium
import numpy as np
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from PIL import Image
from torch import Tensor, multiprocessing, nn
from torch.nn import functional

from common.runtime.machine import cores

FRAME_SKIP, SIZE, SAMPLES = 4, 84, 32
WARM_UP, CAPACITY = 500, 10_000  # transitions; what is timed does not depend on the size of the memory
EPSILON, GAMMA, TARGET_EVERY = 0.02, 0.99, 1_000

Transitions = list[tuple[Any, int, float, bool, Any]]  # observation, action, reward, terminated, next observation


@dataclass(frozen=True, slots=True)
class Program:
    """The changes that a rung has."""

    games: Literal["wrapped", "tuned", "vector"] = "wrapped"
    envs: int = 1
    no_grad: bool = False  # acting records no gradients
    apart: bool = False  # acting has a process of its own


class Wrapped:
    """One game as early programs wrapped it: every frame in colour, shrunk by Python, stacked as float32."""

    def __init__(self, seed: int) -> None:
        """Start the emulator."""
        gymnasium.register_envs(ale_py)
        self._env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
        self._env.reset(seed=seed)

    def reset(self) -> Any:
        """Begin a game; return the first stack [4, 84, 84]."""
        self._stack = np.repeat(self._image([self._env.reset()[0]])[None], FRAME_SKIP, axis=0)
        return self._stack

    def step(self, action: int) -> tuple[Any, float, bool]:
        """Take an action for four frames; return the next stack, the reward and whether the game ended."""
        frames, rewards, ended = self._frames(action)
        self._stack = np.concatenate([self._stack[1:], self._image(frames)[None]])
        return self._stack, rewards, ended

    def _frames(self, action: int) -> tuple[list[Any], float, bool]:
        steps = [self._env.step(action) for _ in range(FRAME_SKIP)]
        return [step[0] for step in steps[-2:]], sum(float(step[1]) for step in steps), any(step[2] for step in steps)

    def _image(self, frames: list[Any]) -> Any:
        grey = np.dot(np.max(frames, axis=0), [0.299, 0.587, 0.114])
        return np.asarray(Image.fromarray(grey.astype(np.uint8)).resize((SIZE, SIZE)), np.float32) / 255.0


class Tuned(Wrapped):
    """One game with tuned wrappers: two grey screens of four frames, and bytes instead of floats."""

    def _frames(self, action: int) -> tuple[list[Any], float, bool]:
        ale = self._env.unwrapped.ale  # type: ignore[attr-defined]
        native = self._env.unwrapped._action_set[action]  # type: ignore[attr-defined]  # noqa: SLF001
        reward = sum(float(ale.act(native)) for _ in range(FRAME_SKIP - 1))
        first = ale.getScreenGrayscale()
        reward += ale.act(native)
        return [first, ale.getScreenGrayscale()], reward, ale.game_over()

    def _image(self, frames: list[Any]) -> Any:
        grey = frames[0][..., 0] if frames[0].ndim > 2 else np.maximum(frames[0], frames[-1])  # noqa: PLR2004
        return np.asarray(Image.fromarray(grey).resize((SIZE, SIZE)))


class Separate:
    """B games, stepped one after another."""

    def __init__(self, kind: type[Wrapped], envs: int) -> None:
        """Start the emulators."""
        self._games = [kind(seed) for seed in range(envs)]

    def reset(self) -> Any:
        """Return the first stacks [B, 4, 84, 84]."""
        return np.stack([game.reset() for game in self._games])

    def step(self, actions: Any) -> tuple[Any, Any, Any]:
        """Return stacks, rewards and ends; a game that ended has begun again."""
        results = [game.step(int(action)) for game, action in zip(self._games, actions, strict=True)]
        stacks = [game.reset() if ended else stack for game, (stack, _, ended) in zip(self._games, results, strict=True)]
        return np.stack(stacks), [result[1] for result in results], [result[2] for result in results]


class Vector:
    """B games in ale-py's vector environment: emulation, grey images and stacks in C++."""

    def __init__(self, envs: int) -> None:
        """Start the emulators."""
        mode = AutoresetMode.SAME_STEP
        self._env = AtariVectorEnv("pong", envs, autoreset_mode=mode, num_threads=1, frameskip=FRAME_SKIP, stack_num=FRAME_SKIP)

    def reset(self) -> Any:
        """Return the first stacks [B, 4, 84, 84]."""
        return self._env.reset(seed=0)[0].copy()

    def step(self, actions: Any) -> tuple[Any, Any, Any]:
        """As `Separate.step`."""
        stacks, rewards, terminated, truncated, _ = self._env.step(actions)
        return stacks.copy(), rewards, terminated | truncated


def network() -> nn.Sequential:
    """Return the action values of 84x84 images in stacks of four (Mnih et al. 2015)."""
    convolutions = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6))


def to_input(stacks: Any) -> Tensor:
    """Return stacks as float32 from 0 to 1."""
    tensor = torch.from_numpy(stacks)
    return tensor if tensor.dtype == torch.float32 else tensor.float() / 255.0


def play(program: Program, values: nn.Module) -> Iterator[Transitions]:
    """Act for ever; yield the transitions of each step of all environments."""
    kinds = {"wrapped": Wrapped, "tuned": Tuned}
    games = Vector(program.envs) if program.games == "vector" else Separate(kinds[program.games], program.envs)
    observation = games.reset()
    while True:
        with torch.no_grad() if program.no_grad else nullcontext():
            greedy = values(to_input(observation)).argmax(dim=1).numpy()
        actions = np.where(np.random.random(program.envs) < EPSILON, np.random.randint(6, size=program.envs), greedy)  # noqa: NPY002
        following, rewards, ended = games.step(actions)
        yield list(zip(observation, actions.tolist(), rewards, ended, following, strict=True))
        observation = following


def act(program: Program, values: nn.Module, queue: Any) -> None:
    """Put transitions into `queue`, for ever: the process that acts."""
    torch.set_num_threads(max(1, cores() // 2))
    for transitions in play(program, values):
        queue.put(transitions)


def gradient_step(values: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, rows: Transitions) -> None:
    """Take one step on the squared error to r + gamma max_a Q_target(next, a)."""
    observation, action, reward, ended, following = zip(*rows, strict=True)
    with torch.no_grad():
        future = target(to_input(np.stack(following))).amax(dim=1) * ~torch.tensor(ended, dtype=torch.bool)
    chosen = values(to_input(np.stack(observation))).gather(1, torch.tensor(action)[:, None])[:, 0]
    optimizer.zero_grad()
    loss = functional.mse_loss(chosen, torch.tensor(reward, dtype=torch.float32) + GAMMA * future)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def env_steps_per_second(program: Program, seconds: float) -> float:
    """Play and train for `seconds` after a warm-up; return env steps trained on per second."""
    values, processes = network(), []
    memory: Transitions = []
    target, added, updates = copy.deepcopy(values), 0, 0
    torch.set_num_threads(cores())  # the gradient step takes most of the time of every rung
    if program.apart:
        context, values = multiprocessing.get_context("spawn"), values.share_memory()
        queue = context.Queue(maxsize=8)
        processes.append(context.Process(target=act, args=(program, values, queue), daemon=True))
        processes[0].start()
        source: Iterator[Transitions] = iter(queue.get, None)
    else:
        source = play(program, values)
    optimizer = torch.optim.Adam(values.parameters(), lr=1e-4)
    began = trained = 0.0
    for transitions in source:
        memory[added % CAPACITY : added % CAPACITY + len(transitions)] = transitions
        added += len(transitions)
        if added < WARM_UP:
            continue
        gradient_step(values, target, optimizer, random.sample(memory, SAMPLES * program.envs))
        updates += 1
        if updates % TARGET_EVERY == 0:
            target.load_state_dict(values.state_dict())
        if updates == 3:  # noqa: PLR2004 - the first steps allocate
            began, trained = time.monotonic(), float(added)
        elif began and time.monotonic() - began > seconds:
            break
    rate = (added - trained) / (time.monotonic() - began)
    for process in processes:
        process.terminate()
        process.join()
    return rate
