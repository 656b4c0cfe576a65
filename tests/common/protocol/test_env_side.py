"""The slots of a policy server: their env workers, the messages sent to them, and missing rows."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import DropReason, ProtocolError
from common.protocol import events as e
from common.protocol.env_side import EnvSide
from common.protocol.env_slots import EnvSessionConfig
from common.protocol.events import RefusalCode
from common.protocol.messages import (
    Act,
    ArraySpec,
    Credit,
    Drain,
    Envelope,
    Goodbye,
    Hello,
    Observe,
    Refusal,
    Report,
    Trajectory,
    Welcome,
)

pytestmark = pytest.mark.pure

ROWS, SLOTS = 2, 2


def check(arrays, ended):
    """Let an episode with a reward end, after which one without must come; new ones never end."""
    ends = arrays["reward"] > 0
    if ended is not None and (ends & ended).any():
        raise ProtocolError(DropReason.SCHEMA, "a reward after an end")
    return np.zeros(ROWS, np.bool_) if ended is None else ends


SCHEMA = (
    ArraySpec(name="observation", dtype="float32", shape=(ROWS, 1)),
    ArraySpec(name="reward", dtype="float32", shape=(ROWS,)),
)
CONFIG = EnvSessionConfig(
    run="run-1",
    env_config="{}",
    env_signature="8c1f",
    schema=SCHEMA,
    check=check,
    slots=SLOTS,
    rows=ROWS,
    reset_seconds=300.0,
)
ACTION = np.arange(SLOTS * ROWS)


def rows(value=0.0, reward=0.0):
    """Arrays of an Observe."""
    return {"observation": np.full((ROWS, 1), value, np.float32), "reward": np.full(ROWS, reward, np.float32)}


class Scene:
    """A policy server at a time that the test sets."""

    def __init__(self):
        self.side, self.now = EnvSide(CONFIG), 0.0
        self.side.begin(100, self.now)

    def say(self, route, message, run="run-1"):
        """Let a message arrive; return what is sent for it, by route."""
        return self.do(self.side.handle(e.Received(route=route, envelope=Envelope(run=run, message=message)), self.now))

    def do(self, instructions):
        """Return the messages in instructions."""
        return [(each.route, each.message) for each in instructions if isinstance(each, e.Send)]

    def hello(self, route, name="w0", *, incarnation=1, role="env_worker", signature="", run=""):
        """Let an env worker greet."""
        hello = Hello(
            role=role, worker=name, incarnation=incarnation, software="x", env_signature=signature, resend_from=0, completed=0,
            produced=0,
        )  # fmt: skip
        return self.say(route, hello, run)

    def join(self, route, name):
        """Let an env worker greet and answer its first Act."""
        (_, welcome), (_, act) = self.hello(route, name)
        assert isinstance(welcome, Welcome)
        assert self.say(route, Observe(number=act.number, arrays=rows())) == []
        return act

    def act(self):
        """Begin a step; return the Acts by route."""
        return dict(self.do(self.side.act(ACTION, self.now)))

    def both_ready(self):
        """Two env workers, and a first row that shows their first observations."""
        self.join(b"a", "w0")
        self.join(b"b", "w1")
        self.act()
        assert [part.begun for part in self.side.finish()] == [True, True]


@pytest.fixture
def scene():
    return Scene()


def refusal(sent):
    """Return code and `retry` of the one message that is sent."""
    ((_, message),) = sent
    assert isinstance(message, Refusal)
    return message.code, message.retry


def test_a_welcome_names_the_slot_and_the_first_act_begins_episodes_with_the_seed_of_its_rows(scene):
    for route, name, index in ((b"a", "w0", 0), (b"b", "w1", 1)):
        (_, welcome), (_, act) = scene.hello(route, name)
        assert (welcome.index, welcome.schema, welcome.env_signature, welcome.credits) == (index, SCHEMA, "8c1f", 0)
        assert (act.seed, dict(act.arrays)) == (100 + index * ROWS, {})


def test_each_worker_gets_its_rows_of_the_actions_and_the_step_ends_with_the_last_answer(scene):
    scene.both_ready()
    acts = scene.act()
    assert {route: act.arrays["action"].tolist() for route, act in acts.items()} == {b"a": [0, 1], b"b": [2, 3]}
    assert scene.side.rows_waiting == SLOTS * ROWS
    scene.say(b"b", Observe(number=acts[b"b"].number, arrays=rows(2.0)))
    assert not scene.side.answered
    scene.say(b"a", Observe(number=acts[b"a"].number, arrays=rows(1.0)))
    assert scene.side.answered
    assert [part.arrays["observation"][0, 0] for part in scene.side.finish()] == [1.0, 2.0]


def test_a_late_worker_misses_rows_until_new_episodes_and_its_late_answer_is_ignored(scene):
    scene.both_ready()
    acts = scene.act()
    scene.say(b"a", Observe(number=acts[b"a"].number, arrays=rows()))
    ((route, again),) = scene.do(scene.side.expire(scene.now))
    assert (route, again.number, again.seed) == (b"b", acts[b"b"].number + 1, 100 + ROWS + SLOTS * ROWS)
    assert [part.arrays is None for part in scene.side.finish()] == [False, True]
    scene.say(b"b", Observe(number=acts[b"b"].number, arrays=rows()))
    assert list(scene.act()) == [b"a"]
    scene.say(b"b", Observe(number=again.number, arrays=rows()))
    assert not scene.side.answered
    scene.side.expire(scene.now)
    assert [(part.arrays is None, part.begun) for part in scene.side.finish()] == [(True, False), (False, True)]
    assert scene.side.missing_rows == 2 * ROWS


def test_the_first_of_several_missing_rows_begins_no_episode(scene):
    """A worker that is lost and replaced within one step: the learner distinguishes missing rows from a reset by it."""
    scene.both_ready()
    acts = scene.act()
    scene.side.handle(e.Unsent(route=b"b", message=acts[b"b"]), scene.now)
    scene.join(b"c", "w9")
    scene.say(b"a", Observe(number=acts[b"a"].number, arrays=rows()))
    assert [(part.arrays is None, part.begun) for part in scene.side.finish()] == [(False, False), (True, False)]
    scene.act()
    scene.side.expire(scene.now)
    assert [(part.arrays is None, part.begun) for part in scene.side.finish()] == [(True, False), (False, True)]


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"observation": np.zeros((ROWS, 1), np.float32)}, DropReason.SCHEMA),
        (rows() | {"observation": np.zeros((ROWS + 1, 1), np.float32)}, DropReason.SCHEMA),
        (rows() | {"observation": np.zeros((ROWS, 1), np.float64)}, DropReason.SCHEMA),
        (rows(np.nan), DropReason.NON_FINITE),
        (rows(1e9), DropReason.OUT_OF_RANGE),
    ],
)
def test_an_answer_that_cannot_be_used_is_counted_and_its_rows_are_missing(scene, arrays, reason):
    scene.both_ready()
    acts = scene.act()
    scene.say(b"a", Observe(number=acts[b"a"].number, arrays=rows()))
    ((_, again),) = scene.say(b"b", Observe(number=acts[b"b"].number, arrays=arrays))
    assert again.seed >= 0
    assert scene.side.messages_refused == {reason: 1}
    assert scene.side.answered
    assert [part.arrays is None for part in scene.side.finish()] == [False, True]


def test_each_answer_of_an_env_worker_is_checked_as_the_one_that_follows_its_last(scene):
    """After an answer to an Act with a seed no row has ended."""
    scene.both_ready()

    def answer(reward):
        act = scene.act()[b"a"]
        (*_, again) = scene.say(b"a", Observe(number=act.number, arrays=rows(reward=reward))) or [None]
        scene.side.expire(scene.now)
        scene.side.finish()
        return again

    assert [answer(1.0), answer(0.0), answer(1.0)] == [None] * 3
    _, begin = answer(1.0)
    assert scene.side.messages_refused == {DropReason.SCHEMA: 1}
    scene.say(b"a", Observe(number=begin.number, arrays=rows(reward=1.0)))
    scene.side.finish()
    assert answer(1.0) is None


def test_the_request_for_new_episodes_is_sent_again_until_it_is_answered(scene):
    _, (_, act) = scene.hello(b"a")
    for _ in range(3):
        scene.now += 1.0
        scene.say(b"a", Report(produced=0))
        assert scene.do(scene.side.handle(e.Tick(), scene.now)) == [(b"a", act)]
    scene.say(b"a", Observe(number=act.number, arrays=rows()))
    scene.now += 1.0
    ((_, heartbeat),) = scene.do(scene.side.handle(e.Tick(), scene.now))
    assert isinstance(heartbeat, Credit)


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"role": "actor"}, RefusalCode.ROLE),
        ({"run": "run-2"}, RefusalCode.RUN),
        ({"signature": "77aa"}, RefusalCode.ENVIRONMENT),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_for_good(scene, changed, code):
    assert refusal(scene.hello(b"a", **changed)) == (code, False)
    assert scene.side.connected == 0


def test_a_worker_without_a_free_slot_may_greet_again_and_takes_the_slot_of_one_that_ends(scene):
    scene.both_ready()
    assert refusal(scene.hello(b"c", "w2")) == (RefusalCode.FULL, True)
    scene.say(b"b", Goodbye(reason="SIGTERM", produced=0))
    (_, welcome), _ = scene.hello(b"c", "w2")
    assert (welcome.index, welcome.generation) == (1, 1)


def test_a_worker_that_is_silent_loses_its_slot_and_gets_it_again_with_new_episodes(scene):
    scene.both_ready()
    scene.now += CONFIG.silence_seconds + 1
    scene.side.handle(e.Tick(), scene.now)
    assert (scene.side.connected, scene.side.workers_lost) == (0, 2)
    assert refusal(scene.say(b"b", Report(produced=0))) == (RefusalCode.UNKNOWN_SENDER, True)
    (_, welcome), (_, act) = scene.hello(b"b", "w1")
    assert (welcome.index, welcome.generation) == (1, 0)
    assert act.seed >= 0


def test_a_worker_that_begins_new_episodes_may_be_silent_for_as_long_as_a_build(scene):
    scene.hello(b"a", "w0")
    scene.now += 0.1
    scene.say(b"a", Report(produced=0))
    for now, connected in ((CONFIG.silence_seconds + 1, 1), (CONFIG.reset_seconds + 1, 0)):
        scene.now = now
        scene.side.handle(e.Tick(), scene.now)
        assert scene.side.connected == connected


def test_a_worker_that_never_received_the_request_for_new_episodes_is_lost_as_any_other(scene):
    scene.both_ready()
    scene.act()
    scene.now += 1.0
    scene.side.expire(scene.now)
    scene.now += CONFIG.silence_seconds
    scene.side.handle(e.Tick(), scene.now)
    assert scene.side.connected == 0


def test_the_successor_of_a_killed_worker_gets_its_slot_once_the_old_connection_is_closed(scene):
    scene.both_ready()
    ((route, credit),) = scene.hello(b"c", "w1", incarnation=2)
    assert route == b"b"
    scene.side.handle(e.Unsent(route=b"b", message=credit), scene.now)
    (_, welcome), _ = scene.hello(b"c", "w1", incarnation=2)
    assert (welcome.index, welcome.incarnation, welcome.generation) == (1, 2, 1)


def test_a_name_of_a_connected_worker_is_refused_to_another(scene):
    scene.both_ready()
    scene.hello(b"c", "w1", incarnation=2)
    assert refusal(scene.hello(b"c", "w1", incarnation=2)) == (RefusalCode.IN_USE, True)
    assert list(scene.act()) == [b"a", b"b"]


def test_a_worker_that_reconnects_within_a_step_goes_on(scene):
    """Its Observe may have been lost with the connection: then the step timeout ends the step."""
    scene.both_ready()
    acts = scene.act()
    ((_, welcome),) = scene.hello(b"c", "w1")
    assert welcome.index == 1
    scene.say(b"a", Observe(number=acts[b"a"].number, arrays=rows()))
    scene.say(b"c", Observe(number=acts[b"b"].number, arrays=rows(5.0)))
    assert [part.arrays["observation"][0, 0] for part in scene.side.finish()] == [0.0, 5.0]


def test_bytes_and_messages_of_learners_are_refused_and_counted(scene):
    scene.both_ready()
    sent = scene.do(scene.side.handle(e.Undecodable(route=b"a", detail="bytes", protocol=False), scene.now))
    assert refusal(sent) == (RefusalCode.DECODE, True)
    sent = scene.do(scene.side.handle(e.Undecodable(route=b"z", detail="version 9", protocol=True), scene.now))
    assert refusal(sent) == (RefusalCode.PROTOCOL, False)
    assert refusal(scene.say(b"a", Trajectory(seq=0, version=0, env_steps=0, env_steps_sent=0))) == (RefusalCode.ROLE, False)
    assert scene.side.messages_refused == {DropReason.DECODE: 2, DropReason.SCHEMA: 1}


def test_the_end_of_the_run_drains_all_and_admits_none(scene):
    scene.both_ready()
    sent = scene.do(scene.side.handle(e.DrainAsked(reason="solved", deadline_seconds=5.0), scene.now))
    assert [(route, type(message)) for route, message in sent] == [(b"a", Drain), (b"b", Drain)]
    assert refusal(scene.hello(b"c", "w2")) == (RefusalCode.DRAINING, False)


def test_an_act_is_numbered_upwards_over_all_holders_of_a_slot(scene):
    first = scene.join(b"a", "w0")
    scene.say(b"a", Goodbye(reason="x", produced=0))
    second = scene.join(b"b", "w5")
    assert isinstance(second, Act)
    assert second.number > first.number
