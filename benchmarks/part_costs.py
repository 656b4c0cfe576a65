"""Core time per env step of each part of the work, measured alone: the floor that a pipeline is compared with.

Every core runs the same part at the same time in a process of its own, because two busy cores are slower than one.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from numpy.typing import NDArray

from common.algorithms.api import Algorithm, Policy, RunProgress, WorkerContext, begin_episodes, states
from common.algorithms.registry import build_algorithm, build_policy, rollout_schema
from common.algorithms.sections import ReplaySection
from common.config.schema import Settings
from common.envs.make import make
from common.envs.stacking import FrameStacker
from common.envs.vector import VectorEnvironment
from common.errors import ResourceError
from common.models.snapshot import flatten, to_tensor
from common.protocol.events import Experience, WorkerKey
from common.protocol.messages import Arrays
from common.runtime.machine import cores
from common.runtime.process import set_torch_threads
from common.units import EnvSteps, Seconds
from services.acting.rollout import Rollout

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier

START_SECONDS: Seconds = 120.0


class PartCosts(NamedTuple):
    """Core seconds per env step."""

    env: float  # the vector environment's step
    act: float  # the stack the network sees, and the policy's action on it
    make: float  # the payload of a finished rollout: a gradient, or just the rollout
    train: float  # stacks of the batch or inserts into the memory, and the update with all its gradient steps

    @property
    def total(self) -> float:
        """Core seconds of all processes."""
        return self.env + self.act + self.make + self.train

    def floor(self, actors: int) -> float:
        """Env steps/s of one learner and `actors` actors, each process with one thread, if they did nothing else.

        The scarcest of three: all cores, on which the parts share; the learner's own process; the actors'.
        """
        return min(cores() / self.total, 1 / self.train, actors / (self.env + self.act + self.make))


@dataclass(frozen=True, slots=True)
class Worker:
    """Runs the parts in one process, in step with those of the other cores."""

    settings: Settings
    seconds: Seconds
    barrier: Barrier
    results: Queue[PartCosts]

    def __call__(self) -> None:
        """Measure, and put the costs into `results`."""
        try:
            self.results.put(self._measure())
        except BaseException:
            self.barrier.abort()
            raise

    def _measure(self) -> PartCosts:
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
            context=WorkerContext(index=0, workers=1, num_envs=environment.num_envs),
        )
        algorithm = build_algorithm(
            settings.algorithm, model=settings.model, env=environment.spec, seed=0, length=settings.rollout.length
        )
        policy.load(0, to_tensor(flatten(algorithm.model, settings.learner.snapshot_precision)), env_steps=0)
        actions = _play(environment, policy, rollout)
        recorded, env_steps = rollout.finish(states(policy)), rollout.env_steps
        stacker = FrameStacker(recorded["obs"][0], environment.spec.frame_stack)

        def step() -> EnvSteps:
            return sum(int(environment.step(action).valid.sum()) for action in actions)

        def act() -> EnvSteps:
            for frames, start in zip(recorded["obs"][-rollout.length :], recorded["start"][1:], strict=True):
                stacker.push(frames, start)
                begin_episodes(policy, start)
                policy.act(torch.from_numpy(stacker.observation))
            return rollout.length * environment.num_envs

        def make_experience() -> EnvSteps:
            policy.experience(recorded)
            return env_steps

        env, acting, experience = (self._cost(part) for part in (step, act, make_experience))
        train = self._cost(_training(settings, algorithm, policy.experience(recorded), env_steps))
        environment.close()
        return PartCosts(env=env, act=acting, make=experience, train=train)

    def _cost(self, part: Callable[[], EnvSteps]) -> float:
        """Core seconds per env step, while the other cores do the same."""
        part()  # warm: allocations, kernels chosen
        self.barrier.wait(START_SECONDS)
        env_steps, until, began = 0, time.monotonic() + self.seconds, time.process_time()
        while True:  # once at least, on a machine that was busy with something else for all of that time
            env_steps += part()
            if time.monotonic() >= until:
                return (time.process_time() - began) / env_steps


def measure(settings: Settings, seconds: Seconds) -> PartCosts:
    """Cost of each part, measured for `seconds` each, the mean of all cores."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(cores()), context.Queue()
    workers = [context.Process(target=Worker(settings, seconds, barrier, results), daemon=True) for _ in range(cores())]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise ResourceError("a part could not be measured", found=[worker.exitcode for worker in workers], wanted="exit code 0")
    measured = [results.get() for _ in workers]
    return PartCosts(*map(fmean, zip(*measured, strict=True)))


def _play(environment: VectorEnvironment, policy: Policy, rollout: Rollout) -> list[NDArray[Any]]:
    """Fill the rollout; returns the actions [B, ...] of each row."""
    actions = []
    for t in range(rollout.length):
        begin_episodes(policy, rollout.start(t))
        acted = {name: value.numpy() for name, value in policy.act(torch.from_numpy(rollout.observation)).items()}
        actions.append(acted.pop("action"))
        rollout.record(t, actions[-1], acted, environment.step(actions[-1]))
    return actions


def _training(settings: Settings, algorithm: Algorithm, arrays: Arrays, env_steps: EnvSteps) -> Callable[[], EnvSteps]:
    """Return the learner's work on one batch of such messages, after the warm-up of a replay memory."""
    numbers = itertools.count()
    progress = RunProgress(env_steps=0, env_steps_planned=settings.target.env_steps, version=0)

    def take() -> list[Experience]:
        batch = range(settings.learner.batch)
        seq = next(numbers)
        workers = (WorkerKey(name=f"actor-{number}", incarnation=0) for number in batch)
        return [Experience(worker=worker, seq=seq, version=0, env_steps=env_steps, arrays=arrays) for worker in workers]

    for _ in range(-(-warm_up(settings) // (settings.learner.batch * env_steps))):
        algorithm.ingest(take())
    return lambda: algorithm.update(algorithm.ingest(take()), progress).samples


def warm_up(settings: Settings) -> EnvSteps:
    """Env steps before the first gradient step: 0 without a replay memory."""
    return settings.algorithm.warmup if isinstance(settings.algorithm, ReplaySection) else 0


def _rollout(settings: Settings, environment: VectorEnvironment) -> Rollout:
    length = settings.rollout.length
    schema = rollout_schema(
        settings.algorithm, model=settings.model, env=environment.spec, length=length, num_envs=environment.num_envs
    )
    return Rollout(schema, environment.reset(0))
