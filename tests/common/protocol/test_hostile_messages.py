"""Tests of the learner's session with hostile messages: no sequence makes it raise or unbalances its ledger."""

import random

import numpy as np
import pytest

from benchmarks.chaos.messages import Target, flood, own_hello
from common.errors import DropReason, ProtocolError
from common.protocol import events as e
from common.protocol.codec import decode
from common.protocol.incarnation import HOLES
from common.protocol.learner_side import LearnerSide
from common.protocol.messages import ArraySpec, Snapshot
from common.protocol.session_config import SessionConfig

pytestmark = pytest.mark.pure

SCHEMA = (ArraySpec(name="reward", dtype="float32", shape=(4,)), ArraySpec(name="valid", dtype="bool", shape=(4,)))
ROUTES = [b"a", b"b", b"c", b"d"]
MESSAGES = 500
ROLLOUT = 640  # env steps; the messages claim as many or absurdly more


def event(frames, route):
    """Return the event that the intake makes of the bytes of a connection."""
    try:
        return e.Received(route=route, envelope=decode(frames))
    except ProtocolError as error:
        return e.Undecodable(route=route, detail=str(error))


@pytest.mark.parametrize("seed", range(5))
def test_no_sequence_of_hostile_messages_makes_the_session_raise(seed):
    """Mutated messages, forged experience and counters, live names with huge incarnations, replays, by several connections.

    Between them come the other events of a learner: time passes, messages are trained on, connections end, policies appear.
    """
    chance = random.Random(seed)
    config = {"run": "run", "run_config": "{}", "env_signature": "", "schema": SCHEMA}
    side = LearnerSide(SessionConfig(**config, credits=2, rollout_env_steps=ROLLOUT, batch=1, max_actors=3))
    source = flood(chance, lambda: Target(run="run", schema=SCHEMA))
    queue, now, version = [], 0.0, 0
    admitted = 0

    def handle(what):
        nonlocal admitted
        out = side.handle(what, now)
        for instruction in out:
            if isinstance(instruction, e.Experience):
                assert np.isfinite(instruction.arrays["reward"]).all()
                queue.append((instruction.worker, instruction.seq))
                admitted += 1
            elif isinstance(instruction, e.Send) and chance.random() < 0.05:
                handle(e.Unsent(route=instruction.route, message=instruction.message))

    for _ in range(MESSAGES):
        greets = chance.random() < 0.1
        handle(event(own_hello(Target(), f"flooder-{chance.randrange(4)}") if greets else next(source), chance.choice(ROUTES)))
        now += chance.choice((0.0, 0.01, 1.0))
        kind = chance.randrange(8)
        if kind == 0:
            handle(e.Tick())
        elif kind == 1 and queue:
            taken = (queue.pop(0),)
            handle(e.Taken(items=taken))
            handle(e.Completed(items=taken, reason=None))
        elif kind == 2:
            handle(e.Published(snapshot=Snapshot(version=version, env_steps=0, precision="fp32", layout="x")))
            version += 1
        side.check_ledger()
    assert side.ledger.produced <= MESSAGES * side.config.in_flight("actor")  # no claim beyond the credits is in the ledger
    assert side.messages_dropped[DropReason.GAP] <= MESSAGES * HOLES
    assert admitted > 0  # the sequence reaches the checks that follow admission
