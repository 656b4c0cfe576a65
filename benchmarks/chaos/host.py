"""Faults of the machine under a run: a full and a read-only disk, a small /dev/shm, a wall clock that steps."""

from __future__ import annotations

import signal
import time

from benchmarks.chaos import machine
from benchmarks.chaos.deployment import Setup
from benchmarks.chaos.storm import Scene, Storm

FAILURES = ("rookery_learner_checkpoint_failures_total", "")
SAVED = ("rookery_learner_checkpoint_last_success_timestamp_seconds", "")
HOUR = 3600.0


def full_disk(scene: Scene) -> None:
    """Fill the disk of the run directory; after a checkpoint has failed, kill the learner, which must start again regardless."""
    with machine.full(scene.deployment.disk):
        _await_failure(scene)
        scene.deployment.kill("learner", signal.SIGKILL)
        _restarted(scene)
        scene.await_flow(scene.deployment.bound())
    _await_checkpoint(scene)


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
    scene.deployment.kill("learner", signal.SIGKILL)
    _restarted(scene)
    scene.await_flow(scene.deployment.bound())


def clock_steps(scene: Scene) -> None:
    """Step the wall clock an hour ahead, two back and one ahead, which the short form omits; an actor is killed after each."""
    clock = scene.deployment.clock
    for offset in (HOUR, -HOUR) if scene.short else (HOUR, -HOUR, 0.0):
        clock.step(offset)
        scene.await_flow()
        before = scene.deployment.pid("actor-0")
        scene.deployment.kill("actor-0", signal.SIGKILL)
        scene.deployment.until(lambda before=before: scene.deployment.pid("actor-0") != before, "the actor is started again")
        scene.await_flow(timed=False)  # its process starts anew, which takes seconds
        time.sleep(scene.scaled(5.0, 0.0))


def _restarted(scene: Scene) -> None:
    before = scene.deployment.pid("learner")
    scene.deployment.until(lambda: scene.deployment.pid("learner") != before, "the learner is started again")


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
