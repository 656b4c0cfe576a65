"""A learner on a GPU: its update alone, the whole pipeline, and the time to solve Pong.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --device cpu --parts update pipeline

| part | measured |
|---|---|
| update | one process trains on random images of the size of `pong-nature`: milliseconds of an update, of ingesting, of copying |
| pipeline | `pong-nature` with one actor for each core but one: env steps trained per second |
| pong | `rookery train pong` until it is solved, once |

The share of time in which the GPU is busy is the mean of the readings of `nvidia-smi` during a part, that of the cores the CPU
time of all processes of the part over all cores. The machine must be idle. Without a GPU nothing is measured, and the exit code
is 2; `--device cpu` measures the same parts on the CPU.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch

from benchmarks.learning import machine, train
from benchmarks.pipeline import running
from benchmarks.throughput import NO_EVALUATOR, PONG_NATURE
from common.algorithms.api import RunProgress
from common.algorithms.registry import build_algorithm, rollout_schema
from common.config.load import load_settings
from common.config.schema import Settings
from common.envs.trial import spec_of
from common.models.arithmetic import to_device
from common.protocol.events import Experience, WorkerKey
from common.runtime.machine import cores
from common.units import Seconds

PRESET, SOLVED = PONG_NATURE, "pong"
PARTS = ("update", "pipeline", "pong")
NOT_RUN = (
    "not run: there is no GPU that torch sees; wanted one and torch built for it, or --device cpu for the same parts on the CPU"
)
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=500")


@dataclass(slots=True)
class Shares:
    """The parts of a time in which the GPU and the cores of this machine were busy; None: not known."""

    gpu: float | None = None
    cpu: float | None = None

    def __str__(self) -> str:
        known = ((name, share) for name, share in (("GPU", self.gpu), ("cores", self.cpu)) if share is not None)
        return ", ".join(f"{name} busy {share:.0%}" for name, share in known) or "shares not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Medians of one learner's work on batches of random experience, in seconds."""

    env_steps: int  # of a batch
    update: Seconds
    ingest: Seconds  # the copy to the device included
    copy: Seconds  # of the frames alone
    shares: Shares = field(default_factory=Shares)

    def __str__(self) -> str:
        rate = self.env_steps / (self.update + self.ingest)
        parts = ", ".join(f"{name} {1e3 * getattr(self, name):.2f} ms" for name in ("update", "ingest", "copy"))
        return f"update    {self.env_steps} env steps: {parts}; {rate:,.0f} env steps/s alone; {self.shares}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the parts and print a line for each; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=20.0, help="of update and of pipeline, after warming up")
    parser.add_argument("--actors", type=int, default=max(1, cores() - 1), help="of pipeline")
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="settings of pong-nature to change")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(NOT_RUN, file=sys.stderr)
        return 2
    device = torch.device(options.device)
    print(f"device    {name_of(device)}; {machine()}, torch {torch.__version__}", flush=True)
    if "update" in options.parts:
        settings = load_settings(preset=PRESET, overrides=options.set, environ={}).settings
        print(measure_update(settings, device, seconds=options.seconds), flush=True)
    if "pipeline" in options.parts:
        print(measure_pipeline(device, options.actors, options.set, seconds=options.seconds), flush=True)
    if "pong" in options.parts:
        print(measure_pong(device), flush=True)
    return 0


def name_of(device: torch.device) -> str:
    """Return the name of the GPU, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def measure_update(settings: Settings, device: torch.device, *, seconds: Seconds) -> Update:
    """Collate random experience and train on it, again and again for `seconds`."""
    env = spec_of(settings.env)
    algorithm = build_algorithm(
        settings.algorithm, model=settings.model, env=env, seed=0, device=device, length=settings.rollout.length
    )
    samples = random_batch(settings)
    progress = RunProgress(env_steps=0, env_steps_planned=settings.target.env_steps, version=0)
    timed: dict[str, list[Seconds]] = {"ingest": [], "copy": [], "update": []}

    def work() -> None:
        frames = torch.from_numpy(np.concatenate([sample.arrays["obs"] for sample in samples], axis=1))
        timed["copy"].append(seconds_of(lambda: to_device(frames, device), device))
        batches = []
        timed["ingest"].append(seconds_of(lambda: batches.append(algorithm.ingest(samples)), device))
        timed["update"].append(seconds_of(lambda: algorithm.update(batches[0], progress), device))

    work()  # warm: kernels are chosen, memory is allocated
    for found in timed.values():
        found.clear()
    with busy(device) as shares:
        until = time.monotonic() + seconds
        while not timed["update"] or time.monotonic() < until:
            work()
    env_steps = sum(sample.env_steps for sample in samples)
    return Update(env_steps=env_steps, shares=shares, **{name: median(found) for name, found in timed.items()})


def random_batch(settings: Settings) -> list[Experience]:
    """Return `learner.batch` rollouts of random images and rewards, all rows valid."""
    env, rng = spec_of(settings.env), np.random.default_rng(0)
    length, num_envs = settings.rollout.length, settings.env.num_envs
    samples = []
    for number in range(settings.learner.batch):
        arrays = {}
        for spec in rollout_schema(settings.algorithm, model=settings.model, env=env, length=length, num_envs=num_envs):
            arrays[spec.name] = np.zeros([max(0, size) for size in spec.shape], spec.dtype)
        arrays["obs"] = rng.integers(0, 256, arrays["obs"].shape).astype(arrays["obs"].dtype)
        arrays["reward"][:] = rng.normal(size=arrays["reward"].shape)
        arrays["valid"][:] = True
        if "log_prob" in arrays:
            arrays["log_prob"][:] = -np.log(max(1, env.action.n))
        worker = WorkerKey(name=f"actor-{number}", incarnation=0)
        samples.append(Experience(worker=worker, seq=0, version=0, env_steps=length * num_envs, arrays=arrays))
    return samples


def seconds_of(work: Callable[[], object], device: torch.device) -> Seconds:
    """Return the time of `work` until the device has finished it."""
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def measure_pipeline(device: torch.device, actors: int, overrides: Sequence[str], *, seconds: Seconds) -> str:
    """Return a line on a whole run: env steps trained per second, and the learner's share of time in each phase."""
    words = (f"learner.device={device.type}", f"actor.count={actors}", f"learner.batch={actors}", *overrides, NO_EVALUATOR)
    settings = load_settings(preset=PRESET, overrides=words, environ={}).settings
    with running(PRESET, words) as run:
        run.wait_until_trained(4 * settings.scale.batch_env_steps)
        with busy(device) as shares:
            window = run.watch(seconds)
    shares.cpu = window.cores_busy / cores()
    phases = " ".join(f"{phase} {part:.0%}" for phase, part in window.phases("learner").items())
    return f"pipeline  {window.trained_per_second:,.0f} env steps/s trained, {actors} actors; {shares}; learner: {phases}"


def measure_pong(device: torch.device) -> str:
    """Return a line on `rookery train pong`: minutes until it is solved."""
    with tempfile.TemporaryDirectory() as folder, busy(device) as shares:
        summary = train(SOLVED, 1, Path(folder) / "run", (f"learner.device={device.type}",))
    solved = summary["solved_at"]
    if solved is None:
        return f"pong      not solved within {summary['env_steps']:,} env steps; {shares}"
    return f"pong      solved after {solved['wall_seconds'] / 60:.1f} minutes, {solved['env_steps']:,} env steps; {shares}"


@contextmanager
def busy(device: torch.device, command: Sequence[str] = NVIDIA_SMI) -> Iterator[Shares]:
    """Measure the shares of this process, its ended children and the GPU inside the block; they are known after it."""
    shares, began, before = Shares(), time.monotonic(), _cpu_seconds()
    watching = None
    if device.type == "cuda":
        uuid = torch.cuda.get_device_properties(device).uuid
        watching = _start((*command, f"--id=GPU-{uuid}"))
    try:
        yield shares
    finally:
        if watching is not None:
            watching.terminate()
            shares.gpu = share_of(watching.communicate()[0])
        shares.cpu = (_cpu_seconds() - before) / (time.monotonic() - began) / cores()


def share_of(readings: str) -> float | None:
    """Return the mean of what `nvidia-smi` printed, percents, as a share; None where it printed no number."""
    percents = [int(word) for word in readings.split() if word.isdecimal()]
    return fmean(percents) / 100 if percents else None


def _start(command: Sequence[str]) -> subprocess.Popen[str] | None:
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:  # a container without the driver's programs
        return None


def _cpu_seconds() -> Seconds:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
