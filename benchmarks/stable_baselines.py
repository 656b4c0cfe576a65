"""Env steps/s of a preset of TD3 or PPO and of Stable-Baselines3's, at the same network, minibatch and updates per env step.

    python -m benchmarks.stable_baselines --preset halfcheetah                       after `make mujoco`
    python -m benchmarks.stable_baselines --preset benchmarks/cartpole-fast.yaml     on gymnasium's own vector environment

It needs `pip install stable-baselines3`, which the project itself does not. Ours is the preset's whole run, evaluator and
checkpoints included, of TD3 without layer normalisation; theirs trains alone in a process of its own, once with torch's own
number of threads (all cores) and once with one; the faster counts. They take turns, since machines drift:

    ratio = env steps/s of ours / env steps/s of theirs, both after the warm-up, medians
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

from benchmarks.pipeline import Window, running
from common.algorithms.settings import PPOSettings, TD3Settings
from common.conditions import value_of
from common.config.load import load_settings
from common.config.schema import Settings
from common.envs.trial import spec_of
from common.errors import ConfigError, ResourceError
from common.models.arithmetic import CPU, native
from common.runtime import process
from common.runtime.machine import cores
from common.units import Seconds

WARM_UP = 1_000  # env steps of TD3 that are not measured
STEADY = 200  # and gradient steps, one an env step
BATCHES = 4  # of PPO that are not measured
PLAIN = {"env.entry_point": "", "model.entry_point": "", "model.recurrent": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Env steps/s of all repetitions; `theirs` by the number of threads."""

    ours: Sequence[Window]
    theirs: Mapping[int, Sequence[float]]

    @property
    def rate(self) -> float:
        """Median of ours."""
        return median(window.trained_per_second for window in self.ours)

    @property
    def best(self) -> int:
        """The number of threads that serves theirs best."""
        return max(self.theirs, key=lambda threads: median(self.theirs[threads]))

    @property
    def ratio(self) -> float:
        """Ours over the best of theirs."""
        return self.rate / median(self.theirs[self.best])


def benchmark(preset: str, overrides: Sequence[str], *, repeats: int, seconds: Seconds) -> Result:
    """Measure ours, theirs with all cores, theirs with one, ours, ...; each for `seconds`."""
    settings = load_settings(preset=preset, overrides=overrides, environ={}).settings
    if (named := settings.algorithm.name) not in COMPARED:
        wanted = " or ".join(COMPARED)
        raise ConfigError("this algorithm is not compared", found=named, wanted=wanted, fix="name another --preset")
    for key, plain in PLAIN.items():
        if (found := value_of(settings, key)[0]) != plain:
            raise ConfigError(f"theirs has no {key}", found=found, wanted=plain, fix="name another --preset")
    same = (*overrides, *COMPARED[named].same)
    settings = load_settings(preset=preset, overrides=same, environ={}).settings
    if isinstance(settings.algorithm, TD3Settings):
        _gradient_steps(settings.algorithm)
    theirs: dict[int, list[float]] = {threads: [] for threads in sorted({1, cores()}, reverse=True)}
    ours = []
    for _ in range(repeats):
        with running(preset, same) as run:
            run.wait_until_trained(COMPARED[named].warm_up(settings))
            ours.append(run.watch(seconds))
        print(_line(ours[-1]), flush=True)
        for threads, rates in theirs.items():
            rates.append(_apart(settings, threads, seconds))
            print(f"theirs, {threads} threads: {rates[-1]:.0f}/s", flush=True)
    return Result(ours=ours, theirs=theirs)


def _line(window: Window) -> str:
    spent = ", ".join(f"{child} {seconds / window.seconds:.2f}" for child, seconds in window.cpu_seconds().items())
    return f"ours: {window.trained_per_second:.0f}/s; cores busy: {spent}"


def _apart(settings: Settings, threads: int, seconds: Seconds) -> float:
    """Return the env steps/s of Stable-Baselines3 in a fresh process."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_send, args=(sender, settings, threads, seconds))
    process.start()
    sender.close()
    try:
        rate: float = receiver.recv()
    except EOFError:
        process.join()
        raise ResourceError("Stable-Baselines3 did not finish", found=f"exit code {process.exitcode}", wanted="0") from None
    process.join()
    return rate


def _send(sender: Connection, settings: Settings, threads: int, seconds: Seconds) -> None:
    sender.send(stable_baselines3(settings, threads=threads, seconds=seconds))


def stable_baselines3(settings: Settings, *, threads: int, seconds: Seconds) -> float:
    """Env steps/s of Stable-Baselines3 after its warm-up, measured for `seconds` in this process."""
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    recipe = COMPARED[settings.algorithm.name]
    model = recipe.build(settings)
    clock = Clock(first=recipe.warm_up(settings), seconds=seconds, rows=model.n_envs, every=recipe.steps(settings))
    model.learn(sys.maxsize, callback=clock)
    return clock.rate


def _gradient_steps(algorithm: TD3Settings) -> int:
    """Return the gradient steps for each env step, of ours and of theirs. Raises `ConfigError` where they are no whole number."""
    steps = algorithm.samples_per_insert / algorithm.minibatch
    if steps < 1 or steps % 1:
        fact, fix = "theirs takes whole gradient steps for each env step", "change algorithm.samples_per_insert"
        raise ConfigError(fact, found=steps, wanted="a whole number, at least 1", fix=fix)
    return int(steps)


def _td3(settings: Settings) -> Any:
    algorithm = settings.algorithm
    assert isinstance(algorithm, TD3Settings)
    noise = importlib.import_module("stable_baselines3.common.noise")
    still = np.zeros(spec_of(settings.env).action.shape[0])
    return importlib.import_module("stable_baselines3").TD3(
        "MlpPolicy",
        gymnasium.make(settings.env.id, **settings.env.kwargs),
        learning_rate=algorithm.learning_rate,
        buffer_size=algorithm.replay_capacity,
        learning_starts=algorithm.warmup,
        batch_size=algorithm.minibatch,
        tau=algorithm.target_rate,
        gamma=algorithm.gamma,
        train_freq=1,
        gradient_steps=_gradient_steps(algorithm),
        action_noise=noise.NormalActionNoise(still, still + algorithm.exploration_noise),
        policy_delay=algorithm.policy_delay,
        target_policy_noise=algorithm.target_noise,
        target_noise_clip=algorithm.target_noise_clip,
        policy_kwargs={"net_arch": list(settings.model.hidden)},
        device="cpu",
        seed=1,
    )


def _ppo(settings: Settings) -> Any:
    algorithm = settings.algorithm
    assert isinstance(algorithm, PPOSettings)
    activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[settings.model.activation]
    return importlib.import_module("stable_baselines3").PPO(
        "MlpPolicy",
        _vector(settings),
        n_steps=settings.rollout.length,
        batch_size=algorithm.minibatch,
        n_epochs=algorithm.epochs,
        learning_rate=algorithm.learning_rate,
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
        clip_range=algorithm.clip,
        ent_coef=algorithm.entropy_coef or 0.0,
        vf_coef=algorithm.value_coef,
        max_grad_norm=algorithm.max_grad_norm,
        policy_kwargs={"net_arch": list(settings.model.hidden), "activation_fn": activation},
        device="cpu",
        seed=1,
    )


def _vector(settings: Settings) -> Any:
    """Gymnasium's own vector environment as Stable-Baselines3 takes one; its reset rows count as env steps, in theirs' favour."""
    base: Any = importlib.import_module("stable_baselines3.common.vec_env").VecEnv
    env = gymnasium.make_vec(settings.env.id, settings.env.num_envs, vectorization_mode="vector_entry_point")

    class Rows(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
            self._infos: list[dict[str, Any]] = [{} for _ in range(env.num_envs)]

        def reset(self) -> Any:
            return env.reset(seed=1)[0]

        def step_async(self, actions: Any) -> None:
            self._actions = actions

        def step_wait(self) -> Any:
            observation, reward, terminated, truncated, _ = env.step(self._actions)
            return observation, reward, terminated | truncated, self._infos

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:  # noqa: ARG002
            return [None] * env.num_envs

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:  # noqa: ARG002
            return [False] * env.num_envs

        def set_attr(self, *_: Any) -> None:
            raise NotImplementedError

        def env_method(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

        def close(self) -> None:
            env.close()

    return Rows()


class Compared(NamedTuple):
    """Build, warm-up and settings of the comparison of one algorithm."""

    build: Callable[[Settings], Any]  # theirs
    warm_up: Callable[[Settings], int]  # env steps that are not measured
    steps: Callable[[Settings], int]  # of all environments, between two trainings of theirs
    same: tuple[str, ...] = ()  # settings of ours without which the two would differ


COMPARED = {
    "td3": Compared(
        _td3,
        warm_up=lambda _: WARM_UP + STEADY,
        steps=lambda _: 1,
        same=(
            f"algorithm.warmup={WARM_UP}",
            f"algorithm.random_env_steps={WARM_UP}",
            "model.layer_norm=false",
        ),  # theirs has none
    ),
    "ppo": Compared(
        _ppo,
        warm_up=lambda settings: BATCHES * settings.scale.batch_env_steps,
        steps=lambda settings: settings.rollout.length,
        same=("model.shared_trunk=false", "model.layer_norm=false"),
    ),
}


class Clock:
    """A callback of Stable-Baselines3 after each step of its environments: ends the measurement and holds its rate."""

    def __init__(self, *, first: int, seconds: Seconds, rows: int = 1, every: int = 1) -> None:
        """Count from env step `first` on, for `seconds`; each step is one of `rows` environments.

        The count ends a multiple of `every` steps after it began: as many rollouts are counted as trainings on them.
        """
        self._first, self._seconds, self._rows = -(-first // rows), seconds, rows
        self._every, self._asked = every, 0
        self._began: Seconds = 0.0
        self.rate = 0.0

    def __call__(self, _locals: dict[str, Any], _globals: dict[str, Any]) -> bool:
        """Return whether training continues."""
        self._asked += 1
        if self._asked == self._first:
            self._began = time.monotonic()
        past = time.monotonic() - self._began
        counted = self._asked - self._first
        if counted <= 0 or counted % self._every or past < self._seconds:
            return True
        self.rate = self._rows * counted / past
        return False


def report(result: Result, settings: Settings) -> str:
    """Return the result as lines of text."""
    lines = [f"ours, {_arithmetic(settings)}: {result.rate:.0f} env steps/s (median)"]
    lines += [f"Stable-Baselines3, fp32, {n} threads: {median(rates):.0f} env steps/s" for n, rates in result.theirs.items()]
    return "\n".join([*lines, f"ours / theirs with {result.best} threads = {result.ratio:.2f}"])


def _arithmetic(settings: Settings) -> str:
    return f"{native(settings.algorithm.precision, CPU)}, {settings.learner.torch_threads} threads of training"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stable_baselines", description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings to try")
    parser.add_argument("--preset", default="halfcheetah")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement, after warming up")
    asked = parser.parse_args(argv)

    def measure() -> int:
        if importlib.util.find_spec("stable_baselines3") is None:
            fix = "pip install stable-baselines3"
            raise ResourceError("nothing to compare with", found="no stable_baselines3", wanted="it installed", fix=fix)
        settings = load_settings(preset=asked.preset, overrides=asked.overrides, environ={}).settings
        print(f"{asked.preset} {' '.join(asked.overrides)}; load before: {os.getloadavg()[0]:.1f}", flush=True)
        print(report(benchmark(asked.preset, asked.overrides, repeats=asked.repeats, seconds=asked.seconds), settings))
        return 0

    return process.run(measure, program="benchmarks.stable_baselines")


if __name__ == "__main__":
    raise SystemExit(main())
