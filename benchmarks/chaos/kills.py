"""Processes that end or stand still: kill storms of actors and learners, and pauses of every service."""

from __future__ import annotations

import random
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial

from benchmarks.chaos.deployment import Setup
from benchmarks.chaos.storm import Scene, Storm
from common.units import Seconds

MIX = ("KILL", "KILL", "SEGV", "TERM", "STOP")
STOPPED: Seconds = 10.0
ACTORS = 4
RANKS_FLOW_GOAL: Seconds = 15.0  # from the kill: both ranks start again, and join
SERVERS_FLOW_GOAL: Seconds = 30.0  # from the last signal: all processes may have to start again, and join one after the other
PAUSES: tuple[Seconds, ...] = (5.0, 35.0, 90.0)


@dataclass(frozen=True, slots=True)
class Blow:
    """One disturbance of a kill storm."""

    at: Seconds  # from the start of the storm
    actor: int  # or another process
    kind: str


def blows(chance: random.Random, *, count: int, seconds: Seconds, actors: int) -> list[Blow]:
    """Return a Poisson process of `count` signals over about `seconds`, each for one of `actors`."""
    at, drawn = 0.0, []
    for number in range(count):
        at += chance.expovariate(count / seconds)
        kind = MIX[number] if number < len(MIX) else chance.choice(MIX)  # even a few signals are of every kind
        drawn.append(Blow(at, chance.randrange(actors), kind))
    return drawn


def kill_actors(scene: Scene) -> None:
    """Send 200 signals within 10 minutes; 5 within 5 seconds in the short form, one of each kind."""
    _strike(scene, scene.deployment.actors, count=int(scene.scaled(200, 5)), seconds=scene.scaled(600, 5))
    scene.await_flow(timed=False)  # processes that start anew, which takes seconds
    scene.notes.append(f"{scene.deployment.killed} incarnations of actors ended without a Goodbye")


def kill_policy_servers(scene: Scene, *, seconds: Seconds) -> None:
    """Send a signal each 3 s on average to policy servers, env workers and the learner behind them."""
    deployment = scene.deployment
    names = [*deployment.learners, *deployment.actors, *deployment.steppers]
    _strike(scene, names, count=int(seconds / 3), seconds=seconds)
    scene.await_flow()
    scene.notes.append(
        f"{deployment.killed} policy servers ended without a Goodbye; environments began anew {deployment.begun()} times"
    )


def _strike(scene: Scene, names: list[str], *, count: int, seconds: Seconds) -> None:
    """Send `count` signals within about `seconds`; what was stopped goes on before this returns."""
    deployment, began = scene.deployment, time.monotonic()
    stopped = scene.scaled(STOPPED, 1.0)
    timers = []
    for blow in blows(scene.chance, count=count, seconds=seconds, actors=len(names)):
        time.sleep(max(0.0, began + blow.at - time.monotonic()))
        name = names[blow.actor]
        if blow.kind == "STOP":
            deployment.pause(name, on=True)
            timers.append(threading.Timer(stopped, deployment.pause, (name,), {"on": False}))
            timers[-1].start()
        else:
            deployment.kill(name, signal.Signals[f"SIG{blow.kind}"])
    for timer in timers:
        timer.join()


def kill_learners(scene: Scene) -> None:
    """Kill the learner 20 times, twice in the short form, each time at a random moment of its work."""
    for _ in range(int(scene.scaled(20, 2))):
        time.sleep(scene.chance.uniform(0.0, scene.scaled(4.0, 1.0)))
        kill = signal.Signals[f"SIG{scene.chance.choice(MIX[:4])}"]
        scene.deployment.restart("learner", kill)
        scene.await_flow(scene.deployment.bound())


def kill_ranks(scene: Scene) -> None:
    """Kill a rank of the learner 20 times, twice in the short form; the other ranks end with it, and all are started again."""
    deployment = scene.deployment
    for _ in range(int(scene.scaled(20, 2))):
        time.sleep(scene.chance.uniform(0.0, scene.scaled(4.0, 1.0)))
        before = {rank: deployment.pid(rank) for rank in deployment.learners}
        killed_at = time.monotonic()
        deployment.kill(scene.chance.choice(deployment.learners), signal.SIGKILL)
        for rank, pid in before.items():
            deployment.await_successor(rank, pid)
        scene.await_flow(killed_at)


def kill_all(scene: Scene) -> None:
    """Kill every process at once, three times, as a machine that loses its power."""
    deployment = scene.deployment
    for _ in range(3):
        time.sleep(scene.chance.uniform(1.0, 4.0))
        before = deployment.pid("learner")
        for name in deployment.names:
            deployment.kill(name, signal.SIGKILL)
        deployment.await_successor("learner", before)
        deployment.bound()
        scene.await_flow(timed=False)  # all processes start anew, which takes seconds


def pause(scene: Scene, *, names: tuple[str, ...], seconds: Seconds) -> None:
    """Hold services still for `seconds`, 2 in the short form."""
    with scene.deployment.paused(*names):
        time.sleep(scene.scaled(seconds, 2.0))
    scene.await_flow()


STORMS = [
    Storm(
        name="kill-learners",
        what="20 times KILL, SEGV or TERM for the learner, at random moments",
        disturb=kill_learners,
    ),
    Storm(
        name="kill-ranks",
        what="20 times KILL for one of two ranks of the learner, at random moments; wanted: flow back within 15 s",
        disturb=kill_ranks,
        setup=Setup(ranks=2),
        flow_goal=RANKS_FLOW_GOAL,
        short=False,
    ),
    Storm(name="kill-all", what="KILL for every process at once, three times", disturb=kill_all, short=False),
    Storm(
        name="kill-actors",
        what="200 signals in 10 minutes for 4 actors: KILL, SEGV, TERM, STOP for 10 s",
        disturb=kill_actors,
        setup=Setup(actors=ACTORS),
    ),
    Storm(
        name="kill-policy-servers",
        what="200 signals in 10 minutes (KILL, SEGV, TERM, STOP for 10 s) for 2 policy servers, their 4 env workers or "
        "the learner; wanted: flow back within 30 s",
        disturb=partial(kill_policy_servers, seconds=600),
        setup=Setup(env_workers=2),
        flow_goal=SERVERS_FLOW_GOAL,
        short=False,
    ),
    *(
        Storm(
            name=f"pause-{target}-{seconds:g}",
            what=f"SIGSTOP for {seconds:g} s: {' and '.join(names)}",
            disturb=partial(pause, names=names, seconds=seconds),
            short=seconds == PAUSES[0],
        )
        for target, names in (("learner", ("learner",)), ("workers", ("actor-0", "evaluator")))
        for seconds in PAUSES
    ),
]
