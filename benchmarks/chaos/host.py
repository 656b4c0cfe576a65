"""Faults of the machine under a run: full and read-only disks, a small /dev/shm, a wall clock that steps."""

from __future__ import annotations

import shutil
import signal
import time
from functools import partial
from operator import gt

from benchmarks.chaos import machine
from benchmarks.chaos.deployment import Setup
from benchmarks.chaos.storm import Scene, Storm
from common.config.load import load_settings
from common.errors import RookeryError
from common.runtime.copies import copy_address, restore
from common.units import Seconds
from services.learner.journal import CURVE

FAILURES = ("rookery_learner_checkpoint_failures_total", "")
SAVED = ("rookery_learner_checkpoint_last_success_timestamp_seconds", "")
IN_METRICS = {  # failures and the time of the last success, by disk
    "checkpoints": (FAILURES, SAVED),
    "store": (("rookery_learner_upload_failures_total", ""), ("rookery_learner_upload_last_success_timestamp_seconds", "")),
}
FULL: Seconds = 5.0  # most, after a loss is reported
KILLED = 1 / 3  # of the times that a disk is full
HOUR = 3600.0


def full_disk(scene: Scene) -> None:
    """Fill the disk of the run directory; after a checkpoint has failed, kill the learner, which must start again regardless."""
    with machine.full(scene.deployment.disk):
        _await_failure(scene)
        _kill_learner(scene)
    _await_checkpoint(scene)


def full_disks(scene: Scene, *, seconds: Seconds) -> None:
    """Fill, in turn, the disks of checkpoints, logs, results and the store, and free each at random; kill the learner on some.

    Each loss must be reported, and all must be written again once there is space; at the end the copy must be restorable.
    """
    deployment, until = scene.deployment, time.monotonic() + seconds
    kills, rounds = 0, 0
    while time.monotonic() < until:
        rounds += 1
        for name in scene.chance.sample([*deployment.disks], len(deployment.disks)):
            killed = scene.chance.random() < KILLED
            kills += killed
            _fill_for_a_while(scene, name, killed=killed)
    scene.notes.append(f"each disk was full {rounds} times; the learner was killed on a full one {kills} times")
    for row in deployment.run_files.learning_curve_csv.read_text().splitlines():
        if row.count(",") != len(CURVE) - 1:
            scene.broken.append(f"a row of the learning curve is cut: {row!r}")


def _fill_for_a_while(scene: Scene, name: str, *, killed: bool) -> None:
    """Fill one disk and free it; with `killed`, kill the learner in between."""
    deployment, chance = scene.deployment, scene.chance
    losses = _losses(scene, name)
    with machine.full(deployment.disks[name], logs=name == "logs"):
        if killed:
            _kill_learner(scene)
            losses = min(losses, _losses(scene, name))  # of its successor, where they are in its metrics
        if name == "logs":  # their loss is reported in the log itself, afterwards
            deployment.restart("actor-0", signal.SIGTERM)
            scene.await_flow(timed=False)
        else:
            deployment.until(lambda: _losses(scene, name) > losses, f"a loss of {name} is reported")
        time.sleep(chance.uniform(0.0, FULL))
        scene.await_flow()
        _restore(scene)
    written = _written(scene, name)
    if name == "logs":
        deployment.until(lambda: _losses(scene, name) > losses, "lost lines are reported")
    deployment.until(lambda: all(map(gt, _written(scene, name), written)), f"{name} are written again")


def _restore(scene: Scene) -> None:
    """Restore the run from its copy as a machine would that takes over, at this very moment."""
    folder, deployment = scene.deployment.folder / "restored", scene.deployment
    with deployment.paused("learner"):
        try:
            copy = restore(copy_address(f"file://{deployment.store}", deployment.run_dir), folder)
            load_settings(preset=str(copy.config), environ={})
        except RookeryError as error:
            scene.broken.append(f"the copy cannot be restored: {error}")
    shutil.rmtree(folder, ignore_errors=True)


def _losses(scene: Scene, name: str) -> float:
    """Return how many losses on a disk are reported."""
    if name in IN_METRICS:
        return scene.deployment.read("learner").get(IN_METRICS[name][0], 0.0)
    return scene.deployment.said("learner").count("lines_lost" if name == "logs" else "results_lost")


def _written(scene: Scene, name: str) -> tuple[float, ...]:
    """Return numbers that grow, each of them, as the files on a disk are written."""
    deployment, run = scene.deployment, scene.deployment.run_files
    if name in IN_METRICS:
        return (deployment.read("learner").get(IN_METRICS[name][1], 0.0),)
    if name == "logs":
        return (len(deployment.said("learner")),)
    return run.learning_curve_csv.stat().st_size, sum(path.stat().st_size for path in run.tensorboard.iterdir())


def read_only_disk(scene: Scene) -> None:
    """Make the run's disk read-only until a checkpoint has failed."""
    with machine.read_only(scene.deployment.disk):
        _await_failure(scene)
        scene.await_flow()
    _await_checkpoint(scene)


def small_shm(scene: Scene) -> None:
    """Kill an actor, then the learner: the new processes find a /dev/shm of 64 KiB, as all processes did from the start."""
    scene.deployment.kill("actor-0", signal.SIGKILL)
    scene.await_flow(timed=False)
    _await_checkpoint(scene)  # only what a checkpoint holds of the killed actor is known to the next learner
    _kill_learner(scene)


def clock_steps(scene: Scene) -> None:
    """Step the wall clock an hour ahead, two back and one ahead, which the short form omits; an actor is killed after each."""
    clock = scene.deployment.clock
    for offset in (HOUR, -HOUR) if scene.short else (HOUR, -HOUR, 0.0):
        clock.step(offset)
        scene.await_flow()
        scene.deployment.restart("actor-0", signal.SIGKILL)
        scene.await_flow(timed=False)  # its process starts anew, which takes seconds
        time.sleep(scene.scaled(5.0, 0.0))


def _kill_learner(scene: Scene) -> None:
    scene.deployment.restart("learner", signal.SIGKILL)
    scene.await_flow(scene.deployment.bound())


def _await_failure(scene: Scene) -> None:
    scene.deployment.until(lambda: scene.deployment.read("learner").get(FAILURES, 0.0) > 0, "a checkpoint fails and is counted")


def _await_checkpoint(scene: Scene) -> None:
    before = scene.deployment.read("learner").get(SAVED, 0.0)
    scene.deployment.until(lambda: scene.deployment.read("learner").get(SAVED, 0.0) > before, "a checkpoint is written again")


STORMS = [
    Storm(
        name="full-disk", what="the run's disk is full; the learner is killed meanwhile", disturb=full_disk,
        setup=Setup(disk=True),
        needs=machine.cannot_mount,
    ),
    Storm(
        name="full-disks",
        what="the disks of checkpoints, logs, results and store are full in turn for 10 minutes; the learner is killed on some",
        disturb=partial(full_disks, seconds=600), setup=Setup(disks=True), needs=machine.cannot_mount, short=False,
    ),
    Storm(
        name="read-only-disk", what="the run's disk can be read, not written", disturb=read_only_disk, setup=Setup(disk=True),
        needs=machine.cannot_mount,
    ),
    Storm(
        name="small-shm", what="a /dev/shm of 64 KiB, with keys; learner and an actor are killed", disturb=small_shm,
        # With keys, so that the short form deploys it apart from the disks: its mount namespace sees no later mount.
        setup=Setup(shm=True, keys=True), needs=machine.cannot_mount,
    ),
    Storm(
        name="clock", what="the wall clock steps by +1 h, -2 h, +1 h; an actor is killed after each", disturb=clock_steps,
        setup=Setup(clock=True),
    ),
]  # fmt: skip
