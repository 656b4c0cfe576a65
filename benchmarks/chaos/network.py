"""Faults of the network between the workers and the learner, made by a `Proxy`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from benchmarks.chaos.deployment import Setup
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.storm import Scene, Storm
from common.units import KIB, Seconds

DELAY: tuple[Seconds, Seconds] = (0.05, 0.15)  # 100 ms with 50 ms of jitter
SLOW = 24 * KIB  # bytes per second of each direction of each connection
CUT_EVERY: Seconds = 5.0
BLACKHOLES: tuple[Seconds, ...] = (20.0, 90.0)
CORRUPTED = 0.02  # of the chunks


def degraded(scene: Scene, *, change: Callable[[Proxy], None]) -> None:
    """Apply the faults to the network for 20 s, 3 in the short form, then remove them."""
    proxy = _proxy(scene)
    change(proxy)
    time.sleep(scene.scaled(20.0, 3.0))
    _heal(proxy)
    scene.await_flow()


def cut(scene: Scene) -> None:
    """Cut all connections every 5 s, four times; twice within 2 s in the short form."""
    for _ in range(int(scene.scaled(4, 2))):
        _proxy(scene).cut()
        scene.await_flow()
        time.sleep(scene.chance.uniform(0.0, scene.scaled(CUT_EVERY, 0.5)))


def blackhole(scene: Scene, *, seconds: Seconds) -> None:
    """Let nothing pass for `seconds`, 3 in the short form; no connection ends, as where packets are lost."""
    proxy = _proxy(scene)
    proxy.pass_nothing(on=True)
    time.sleep(scene.scaled(seconds, 3.0))
    proxy.pass_nothing(on=False)
    scene.await_flow()


def corrupt(scene: Scene) -> None:
    """Change a byte in some chunks for 20 s, 3 in the short form. Without keys a changed number may pass for a true one."""
    scene.claims = not scene.deployment.setup.keys

    def change(proxy: Proxy) -> None:
        proxy.corrupted = CORRUPTED

    degraded(scene, change=change)


def _delay(proxy: Proxy) -> None:
    proxy.delay = DELAY


def _throttle(proxy: Proxy) -> None:
    proxy.bytes_per_second = SLOW


def _heal(proxy: Proxy) -> None:
    proxy.delay, proxy.bytes_per_second, proxy.corrupted = (0.0, 0.0), math.inf, 0.0


def _proxy(scene: Scene) -> Proxy:
    assert scene.deployment.proxy is not None
    scene.deployment.proxy.chance = scene.chance
    return scene.deployment.proxy


PROXY, ENCRYPTED = Setup(proxy=True), Setup(proxy=True, keys=True)
STORMS = [
    Storm(
        name="delay", what="every message 50 to 150 ms late, for 20 s", disturb=partial(degraded, change=_delay), setup=PROXY
    ),
    Storm(
        name="throttle", what="24 KiB/s per direction and connection, for 20 s", disturb=partial(degraded, change=_throttle),
        setup=PROXY,
    ),
    Storm(name="cut", what="all connections cut, four times", disturb=cut, setup=PROXY),
    *(
        Storm(
            name=f"blackhole-{seconds:g}", what=f"nothing passes for {seconds:g} s, no connection ends",
            disturb=partial(blackhole, seconds=seconds), setup=PROXY, short=seconds == BLACKHOLES[0],
        )
        for seconds in BLACKHOLES
    ),
    Storm(  # not in the short form: without keys a Welcome that is changed twice may end a worker that starts
        name="corrupt", what="a byte changed in 2 % of the chunks, for 20 s, without keys", disturb=corrupt, setup=PROXY,
        short=False,
    ),
    Storm(  # a changed length leaves connections that stand and pass nothing, and keep a worker's name for 10 s of silence
        name="corrupt-keys", what="the same with keys; wanted: flow back within 12 s", disturb=corrupt, setup=ENCRYPTED,
        flow_goal=12.0,
    ),
]  # fmt: skip
