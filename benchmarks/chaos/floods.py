"""Hostile traffic on the learner's port: floods of messages, half-open connections, wrong keys, messages without an end."""

from __future__ import annotations

import contextlib
import math
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks import keys_storm
from benchmarks.chaos import flooder
from benchmarks.chaos.deployment import ROOT, Setup
from benchmarks.chaos.storm import Scene, Storm
from common.transport.curve import WorkerKeys
from common.units import MIB, Seconds

RATE = 4_000.0  # messages per second
HELD: Seconds = 10.0
LATE: Seconds = 60.0  # for a whole flood to be read after its end
UNREADABLE = ("rookery_learner_messages_dropped_total", "decode")  # the bytes of unknown senders are no message
READABLE = ("rookery_learner_messages_received_total", "rookery_learner_messages_ignored_total")
DELIVERED = 0.9  # least share of a flood that must arrive: another storm would be measured


def flood(scene: Scene, *, inside: bool) -> None:
    """Send 100,000 hostile messages, 4,000 in the short form, from a process of its own.

    The rate before is taken beside the same process that sends to a listener of its own: what is left is the learner's cost.
    """
    door = not inside and scene.deployment.setup.keys
    scene.claims = not door  # an accepted sender may claim any number of env steps
    rate, count = scene.scaled(RATE, RATE / 2), int(scene.scaled(100_000, 4_000))
    with _flooder(scene, inside=inside, count=int(rate * scene.scaled(10.0, 2.0)), rate=rate, dry=True) as process:
        before = sum(scene.deployment.steps().values()), time.monotonic()
        _, _, idle = _ended(process)
        scene.before = (sum(scene.deployment.steps().values()) - before[0]) / (time.monotonic() - before[1])
    counted = () if door else READABLE
    arrived = _arrived(scene, counted)
    with _flooder(scene, inside=inside, count=count, rate=rate, dry=False) as process, scene.rated():
        written, took, busy = _ended(process)
    sent = f"{count:,} attempts" if door else f"{written:,.0f} messages"
    scene.notes.append(f"{sent} at {count / took:,.0f} per second; the flooder took {busy:.0%} of a core, and {idle:.0%} before")
    scene.await_flow()
    with contextlib.suppress(TimeoutError):  # a busy machine reads them late
        scene.deployment.until(lambda: door or _arrived(scene, counted) >= arrived + count, "the flood has arrived", LATE)
    check_arrival(scene, _arrived(scene, counted) - arrived, count, door=door)


def check_arrival(scene: Scene, arrived: float, count: int, *, door: bool) -> None:
    """Note how much of a flood arrived: of `count` messages most must, and at the door, without a key, none may."""
    if not door:
        scene.notes.append(f"{arrived:,.0f} messages arrived, those of the workers included")
    if arrived if door else arrived < DELIVERED * count:
        scene.broken.append(f"{arrived:,.0f} of {count:,} {'messages without a key' if door else 'messages'} arrived")


def _arrived(scene: Scene, names: Collection[str] = ()) -> float:
    """Return how many times the learner received bytes that are no message, and messages that its metrics `names` count."""
    samples = scene.deployment.until(lambda: scene.deployment.read("learner"), "the learner answers")
    return float(samples.get(UNREADABLE, 0.0) + sum(value for (name, _), value in samples.items() if name in names))


@contextmanager
def _flooder(scene: Scene, *, inside: bool, count: int, rate: float, dry: bool) -> Iterator[subprocess.Popen[str]]:
    deployment = scene.deployment
    words = [sys.executable, "-m", flooder.__name__, f"tcp://127.0.0.1:{deployment.port}", "--count", str(count)]
    words += ["--rate", str(rate), "--seed", str(scene.chance.randrange(2**32))]
    words += (["--inside"] if inside else []) + (["--dry"] if dry else [])
    words += ["--keys", str(deployment.keys / "flooder")] if deployment.setup.keys else []
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def _ended(process: subprocess.Popen[str]) -> tuple[float, Seconds, float]:
    """Wait for the flooder; return the messages that it wrote, the seconds that it took and its share of a core."""
    assert process.stdout is not None
    written, took, share = map(float, process.stdout.readline().split())
    return written, took, share


def half_open(scene: Scene) -> None:
    """Open 1,000 connections, 200 in the short form, that send nothing, a part of a greeting, or a greeting and no more."""
    count = int(scene.scaled(1_000, 200))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * count)), hard))
    openings = (b"", flooder.GREETING[:10], flooder.GREETING)
    with contextlib.ExitStack() as held:
        refused = 0
        for _ in range(count):
            try:
                connection = held.enter_context(socket.create_connection(("127.0.0.1", scene.deployment.port), timeout=5.0))
                connection.sendall(scene.chance.choice(openings))
            except OSError:
                refused += 1
        time.sleep(scene.scaled(HELD, 1.0))
        mark = scene.deployment.mark()
        if len(scene.deployment.flowing(mark, 30.0)) < len(mark):
            scene.broken.append("an actor did not flow while the connections were open")
        if refused:
            scene.broken.append(f"{refused} of {count:,} connections were not taken")
    scene.await_flow()


def wrong_keys(scene: Scene) -> None:
    """Connect 2,000 unknown senders, 100 in the short form: unknown keys, another learner's key, no keys, a password."""
    deployment, count = scene.deployment, int(scene.scaled(2_000, 100))
    learner_key = WorkerKeys.of(str(deployment.keys / "flooder"))
    assert learner_key is not None
    before = _arrived(scene)
    endpoint = f"tcp://127.0.0.1:{deployment.port}"
    outcomes = keys_storm.storm(endpoint, count, scene.chance.randrange(2**31), learner_key=learner_key.server)
    arrived = _arrived(scene) - before
    scene.notes.append(", ".join(f"{outcome} {times}" for outcome, times in sorted(outcomes.items())))
    if others := sum(times for outcome, times in outcomes.items() if not outcome.endswith("refused")):
        scene.broken.append(f"{others} of {count:,} connections with wrong keys were not refused")
    if arrived:
        scene.broken.append(f"{arrived:.0f} messages of connections with wrong keys arrived")
    scene.await_flow()


def unfinished(scene: Scene) -> None:
    """Send 1 GiB, 64 MiB in the short form, as parts of one message that never ends."""
    part = b"\x03" + MIB.to_bytes(8, "big") + bytes(MIB)  # more follows, long
    sent = 0
    with socket.create_connection(("127.0.0.1", scene.deployment.port), timeout=5.0) as connection:
        connection.sendall(flooder.GREETING + flooder.READY)
        with contextlib.suppress(OSError):
            while sent < scene.scaled(1024, 64):
                connection.sendall(part)
                sent += 1
        scene.await_flow()
    scene.notes.append(f"{sent} MiB were taken")


ENCRYPTED = Setup(keys=True)
STORMS = [
    Storm(
        name="flood-door", what="100,000 attempts to send without a key, the learner has keys; wanted: honest rate 95 %",
        disturb=partial(flood, inside=False), setup=ENCRYPTED, rate_goal=0.95,
    ),
    # Before the messages of flood-inside, which the short form's learner may still be counting as unreadable afterwards.
    Storm(name="wrong-keys", what="2,000 connections with wrong keys or none", disturb=wrong_keys, setup=ENCRYPTED),
    Storm(
        name="flood-inside", what="100,000 hostile messages with a valid key; wanted: honest rate 80 %",
        disturb=partial(flood, inside=True), setup=ENCRYPTED, rate_goal=0.80,
    ),
    Storm(
        name="flood-vanish", what="100,000 hostile messages over 2,000 connections that vanish without a Goodbye, no keys",
        disturb=partial(flood, inside=False),
    ),
    Storm(name="half-open", what="1,000 connections that never finish their handshake", disturb=half_open),
    # The learner keeps the parts until its memory is nearly exhausted: decision 25.
    Storm(
        name="unfinished", what="1 GiB of one message that never ends; its memory may be kept", disturb=unfinished,
        memory_goal=math.inf,
    ),
]  # fmt: skip
