"""What one env step costs in core time, part by part, with nothing around it: the floor that a pipeline is held to.

Every core runs the same part at the same time in a process of its own, because two busy cores are slower than one.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from common.algorithms.api import Place, Progress, Sample
from common.algorithms.registry import build_algorithm, build_policy, rollout_schema
from common.envs.make import VectorEnvironment, make
from common.errors import ResourceError
from common.models.snapshot import flatten, to_tensor
from common.runtime.root import set_torch_threads
from common.runtime.tree import Settings
from common.units import EnvSteps, Seconds
from services.actor.rollout import Rollout

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier

START_SECONDS: Seconds = 120.0


class Parts(NamedTuple):
    """Core seconds per env step."""

    env: float  # the vector environment's step
    act: float  # the stack the network sees, and the policy's action on it
    train: float  # stacks of the batch, and the update

    @property
    def floor(self) -> float:
        """Env steps/s of all cores if they did nothing else."""
        return cores() / sum(self)


@dataclass(frozen=True, slots=True)
class _Worker:
    """Runs the parts in one process, in step with those of the other cores."""

    settings: Settings
    seconds: Seconds
    barrier: Barrier
    results: Queue[Parts]

    def __call__(self) -> None:
        try:
            self.results.put(self._measure())
        except BaseException:
            self.barrier.abort()
            raise

    def _measure(self) -> Parts:
        settings = self.settings
        set_torch_threads(1)
        environment = make(settings.env)
        rollout = _rollout(settings, environment)
        policy = build_policy(
            settings.algorithm,
            model=settings.model,
            env=environment.spec,
            precision=settings.actor.precision,
            seed=0,
            place=Place(index=0, peers=1, num_envs=environment.num_envs),
        )
        algorithm = build_algorithm(settings.algorithm, model=settings.model, env=environment.spec, seed=0)
        policy.load(0, to_tensor(flatten(algorithm.model, settings.learner.snapshot_precision)), env_steps=0)
        actions = np.random.default_rng(0).integers(environment.spec.action.n, size=(rollout.length, environment.num_envs))

        def step() -> EnvSteps:
            return sum(int(environment.step(action).valid.sum()) for action in actions)

        def act() -> EnvSteps:
            for t in range(rollout.length):
                policy.act(torch.from_numpy(rollout.observation(t)))
            return actions.size

        env_cost, act_cost = self._cost(step), self._cost(act)
        for t, action in enumerate(actions):
            transition = environment.step(action)
            log_prob = np.full(environment.num_envs, -np.log(environment.spec.action.n), np.float32)
            rollout.record(t, action, {"log_prob": log_prob}, transition)
        samples = [Sample(version=0, env_steps=rollout.env_steps, arrays=rollout.finish())] * settings.learner.batch
        progress = Progress(env_steps=0, env_steps_planned=settings.target.env_steps, version=0)
        train_cost = self._cost(lambda: algorithm.update(algorithm.collate(samples), progress).samples)
        environment.close()
        return Parts(env_cost, act_cost, train_cost)

    def _cost(self, part: Callable[[], EnvSteps]) -> float:
        """Core seconds per env step, while the other cores do the same."""
        part()  # warm: allocations, kernels chosen
        self.barrier.wait(START_SECONDS)
        env_steps, until, began = 0, time.monotonic() + self.seconds, time.process_time()
        while time.monotonic() < until:
            env_steps += part()
        return (time.process_time() - began) / env_steps


def measure(settings: Settings, seconds: Seconds) -> Parts:
    """Cost of each part, measured for `seconds` each, the mean of all cores."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(cores()), context.Queue()
    workers = [context.Process(target=_Worker(settings, seconds, barrier, results), daemon=True) for _ in range(cores())]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise ResourceError("a part could not be measured", found=[worker.exitcode for worker in workers], wanted="exit code 0")
    measured = [results.get() for _ in workers]
    return Parts(*map(fmean, zip(*measured, strict=True)))


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def _rollout(settings: Settings, environment: VectorEnvironment) -> Rollout:
    length = settings.rollout.length
    schema = rollout_schema(settings.algorithm, env=environment.spec, length=length, num_envs=environment.num_envs)
    return Rollout(schema, environment.reset(0))
