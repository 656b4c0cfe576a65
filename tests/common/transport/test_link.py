"""A worker's link against a real learner's session over the network in memory, turned by one thread on a clock of its own."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ConfigError, DropReason, HandshakeFailure, RunChangedError
from common.protocol import codec
from common.protocol import events as e
from common.protocol.learner_side import LearnerSide
from common.protocol.messages import (
    ENV_WORKER,
    PROTOCOL_VERSION,
    Act,
    ArraySpec,
    Credit,
    Drain,
    Envelope,
    Evaluation,
    Observe,
    Snapshot,
    Trajectory,
    Welcome,
)
from common.protocol.session_config import SessionConfig
from common.protocol.worker_side import ConnectionState, Identity, WorkerSide
from common.transport.link import MESSAGES_AT_ONCE, Link
from tests.support.memory import MemoryHub

pytestmark = pytest.mark.wire

STEPS = 4
ENV = EnvSpec(
    observation_shape=(1,), observation_dtype="float32", action=ActionSpec(choices=(2,), shape=()), frame_stack=1, frame_skip=1
)  # fmt: skip
SCHEMA = (ArraySpec(name="reward", dtype="float32", shape=(STEPS,)),)
CONFIG = SessionConfig(
    run="run-1",
    run_config="{}",
    env_signature=ENV.signature,
    schema=SCHEMA,
    credits=3,
    rollout_env_steps=STEPS,
    batch=1,
    max_actors=4,
    forget_seconds=30.0,
)


class Learner:
    """The learner's end: session and transport, performed by the test; `admitted` in order."""

    def __init__(self, world, state=None, config=CONFIG):
        """Bound; going on from `state`, if any."""
        self.world, self.transport, self.session = world, world.hub.bind(), LearnerSide(config)
        self.admitted, self.evaluations = [], []
        if state:
            self.session.saved.load_state_dict(state)
        self.handle(e.Published(snapshot=policy(0)))

    def handle(self, event):
        """Let the session decide, and do it."""
        for instruction in self.session.handle(event, self.world.now):
            match instruction:
                case e.Send(route=route, message=message):
                    if not self.transport.send(route, codec.encode(Envelope(run=CONFIG.run, message=message))):
                        self.handle(e.Unsent(route=route, message=message))
                case e.Experience():
                    self.admitted.append(instruction)
                case e.Evaluated(message=message):
                    self.evaluations.append(message)

    def turn(self):
        """Receive all there is."""
        while (arrived := self.transport.receive(0.0)) is not None:
            self.handle(e.Received(route=arrived[0], envelope=codec.decode(arrived[1])))
        self.handle(e.Tick())

    def train(self):
        """Train on the oldest message."""
        item = self.admitted.pop(0)
        number = (item.worker, item.seq)
        self.handle(e.Taken(items=(number,)))
        self.handle(e.Completed(items=(number,)))
        return float(item.arrays["reward"][0])


class World:
    """One learner, one link, and the time."""

    def __init__(self, role="actor"):
        """A worker that was not welcomed yet."""
        self.now, self.hub, self.notes = 1000.0, MemoryHub(), []
        self.learner = Learner(self)
        session = WorkerSide(Identity(role=role, name=f"{role}-0", incarnation=5, software="test"))
        self.worker = self.hub.connect()
        self.link = Link(transport=self.worker, session=session, clock=lambda: self.now, log_event=self.notes.append)

    def turn(self, rounds=4, seconds=0.2):
        """Time passes for both."""
        for _ in range(rounds):
            self.now += seconds
            self.link.service()
            if self.learner:
                self.learner.turn()

    def crash(self):
        """The learner's process is gone; what it had saved is returned."""
        state = self.learner.session.saved.state_dict()
        self.learner.transport.close()
        self.learner = None
        return state

    @property
    def ledger(self):
        """The learner's books, which must balance."""
        self.learner.session.check_ledger()
        return self.learner.session.ledger.as_dict()


def policy(version):
    """A snapshot."""
    return Snapshot(
        version=version, env_steps=0, precision="fp32", layout="", arrays={"parameters": np.full(2, version, np.float32)}
    )


def rollout(number):
    """A rollout that carries its number."""
    return Trajectory(seq=0, env_steps_sent=0, version=0, env_steps=STEPS, arrays={"reward": np.full(STEPS, number, np.float32)})


@pytest.fixture
def role():
    """Of the worker in `world`."""
    return "actor"


@pytest.fixture
def world(role):
    """A worker that was welcomed."""
    built = World(role)
    built.turn()
    assert built.link.welcome is not None
    return built


def offer(world, *numbers):
    """Produce and send rollouts."""
    for number in numbers:
        world.link.count(world.link._produced + STEPS, Counter())
        world.link.offer(rollout(number))


def test_the_welcome_brings_the_run_and_the_credits(world):
    """All that an actor must know about its run."""
    welcome = world.link.welcome
    assert (welcome.config, welcome.schema, welcome.credits) == ("{}", SCHEMA, 3)
    assert world.link.has_credit
    assert world.link.sent["hello"] == 1
    assert world.link.received["welcome"] == 1


def test_credits_bound_what_is_under_way(world):
    """The third unacknowledged rollout is the last until one is taken."""
    offer(world, 1, 2, 3)
    world.turn()
    assert not world.link.has_credit
    assert world.learner.train() == 1.0
    world.turn()
    assert world.link.has_credit
    assert world.link.session.unacknowledged == 2


def test_the_time_that_messages_are_under_way_is_added_up(world):
    """Its rate is the number of messages under way, which separates a slow network from a slow learner."""
    offer(world, 1, 2)
    world.turn(rounds=1, seconds=1.0)
    assert world.link.unacknowledged_seconds == pytest.approx(2.0)
    offer(world, 3)
    world.turn(rounds=1, seconds=0.5)
    world.learner.train()
    world.turn(rounds=1, seconds=1.0)  # until the credit is seen, the message is under way
    assert world.link.unacknowledged_seconds == pytest.approx(6.5)
    world.turn(rounds=1, seconds=1.0)
    assert world.link.unacknowledged_seconds == pytest.approx(8.5)


def test_what_was_lost_with_a_connection_is_sent_again_once(world):
    """The cable is pulled with two rollouts on it: both arrive after it is back, in order, and no third time."""
    offer(world, 1, 2)
    world.hub.disconnect(world.worker)
    offer(world, 3)
    world.turn()
    assert world.learner.admitted == []
    world.hub.reconnect(world.worker)
    world.turn(8)
    assert [item.seq for item in world.learner.admitted] == [0, 1, 2]
    assert [world.learner.train() for _ in range(3)] == [1.0, 2.0, 3.0]
    world.turn()
    assert world.ledger["trained"] == world.ledger["produced"] == 3 * STEPS
    assert (world.link.session.reconnects, world.learner.session.reconnects) == (1, 1)
    assert "learner_lost" in [note.event for note in world.notes]


def test_a_restarted_learner_is_found_and_gets_what_it_had_not_saved(world):
    """The learner dies with one rollout trained and one queued, and comes back from its checkpoint: nothing is counted twice."""
    offer(world, 1, 2)
    world.turn()
    assert world.learner.train() == 1.0
    world.turn()
    state = world.crash()
    world.turn(20)
    offer(world, 3)
    world.learner = Learner(world, state)
    world.turn(20)
    assert [world.learner.train() for _ in range(len(world.learner.admitted))] == [2.0, 3.0]
    world.turn()
    assert world.ledger["trained"] == world.ledger["produced"] == 3 * STEPS
    assert world.link.session.reconnects == 1


@pytest.mark.parametrize("changed", [{"run_config": '{"env": 1}'}, {"schema": (replace(SCHEMA[0], shape=(2 * STEPS,)),)}])
def test_a_learner_that_was_resumed_with_other_settings_is_not_served_with_those_of_before(world, changed):
    """The worker was built from the first Welcome: it would play another environment than the run's, without a word."""
    state = world.crash()
    world.turn(20)
    world.learner = Learner(world, state, replace(CONFIG, **changed))
    with pytest.raises(RunChangedError, match="the learner goes on with other settings"):
        world.turn(20)


def test_a_worker_that_was_forgotten_goes_on_as_a_new_one_with_counters_from_zero(world):
    """An actor was cut off for so long that its account was closed: its process counts on, its new incarnation from zero."""
    offer(world, 1)
    world.turn()
    world.learner.train()
    world.link.count(2 * STEPS, Counter())
    world.turn(8)  # long enough for a heartbeat with these counts
    world.hub.disconnect(world.worker)
    world.link.offer(rollout(2))
    world.link.count(3 * STEPS, Counter({DropReason.UNFINISHED: STEPS}))
    for _ in range(50):
        world.now += 1.0
        world.learner.turn()
    assert world.ledger["in_flight"] == 0
    world.hub.reconnect(world.worker)
    world.turn(20)
    assert world.link.session.identity.incarnation == 6
    world.link.count(4 * STEPS, Counter({DropReason.UNFINISHED: STEPS}))
    world.link.offer(rollout(9))
    world.turn(8)
    assert world.learner.train() == 9.0
    world.turn(8)
    assert world.ledger["produced"] == 4 * STEPS  # of the old one as its Hello says, and the new one's
    assert world.ledger["trained"] == 2 * STEPS
    assert world.ledger["dropped"][DropReason.WORKER_LOST] == 2 * STEPS
    assert world.ledger["dropped"][DropReason.UNFINISHED] == 0
    assert world.ledger["in_flight"] == 0


def test_a_link_that_follows_another_in_its_process_states_what_came_since(world):
    """The run goes on with other settings, and the account of the earlier loop has its own steps."""
    world.link.count_from(10 * STEPS, Counter({DropReason.UNFINISHED: 3 * STEPS}))
    world.link.count(11 * STEPS, Counter({DropReason.UNFINISHED: 4 * STEPS}))
    world.turn(8)
    assert world.ledger["produced"] == STEPS
    assert world.ledger["dropped"][DropReason.UNFINISHED] == STEPS


def test_the_newest_policy_replaces_one_that_nobody_took(world):
    """Three policies come, each on a request of its own."""
    for version in (1, 2, 3):
        world.link.request_snapshot(after=version - 1)
        world.learner.handle(e.Published(snapshot=policy(version)))
        world.turn()
    assert world.link.take_snapshot().version == 3
    assert world.link.take_snapshot() is None


def test_a_policy_that_waits_to_be_taken_is_not_sent_again(world):
    world.turn()
    world.link.request_snapshot(after=-1)
    world.turn()
    world.link.request_snapshot(after=-1)  # by an actor that acts by an older one until its rollout ends
    world.turn()
    assert world.link.received["snapshot"] == 1
    world.learner.handle(e.Published(snapshot=policy(1)))
    world.turn()
    assert world.link.received["snapshot"] == 2
    assert world.link.take_snapshot().version == 1


def test_the_transport_gets_the_size_of_the_largest_message_from_the_welcome_on(monkeypatch):
    """The Welcome states the size of the first policy, which would otherwise have to cross before its size is known."""
    world, sizes = World(), []
    monkeypatch.setattr(world.worker, "expect", sizes.append)
    world.turn()
    assert sizes[0] == policy(0).nbytes
    large = np.zeros(1000, np.float32)
    world.link.offer(Trajectory(seq=0, env_steps_sent=0, version=0, env_steps=STEPS, arrays={"reward": large}))
    assert sizes[-1] > large.nbytes


def test_a_learner_that_states_no_size_of_its_policy_leaves_the_transport_its_own_until_one_has_come(monkeypatch):
    """An older learner."""
    world, sizes = World(), []
    monkeypatch.setattr(world.worker, "expect", sizes.append)
    monkeypatch.setattr(Snapshot, "nbytes", 0)
    world.turn()
    assert world.link.welcome is not None
    assert not sizes
    world.link.request_snapshot(after=-1)
    world.turn()
    assert sizes


def test_an_env_worker_leaves_the_transport_its_own_size_of_the_largest_message(monkeypatch):
    """A policy server is silent while it acts: an env worker that reconnected soon would lose its slot, and its episodes."""
    hub, sizes = MemoryHub(), []
    server, own = hub.bind(), hub.connect()
    monkeypatch.setattr(own, "expect", sizes.append)
    session = WorkerSide(Identity(role=ENV_WORKER, name="w0", incarnation=5, software="test"))
    link = Link(transport=own, session=session, clock=lambda: 1000.0, log_event=lambda _: None)
    link.service()
    route, _ = server.receive(0.0)
    welcome = Welcome(
        index=0,
        generation=0,
        config="{}",
        env_signature="",
        schema=(),
        credits=0,
        version=-1,
        heartbeat_seconds=1.0,
        incarnation=5,
    )
    for message in (welcome, Act(number=0, seed=1)):
        server.send(route, codec.encode(Envelope(run="run-1", message=message)))
    link.service()
    assert link.take_act() is not None
    link.say(Observe(number=0, arrays={"observation": np.zeros(1000, np.float32)}))
    assert not sizes


def test_a_learner_that_sends_without_a_pause_lets_the_worker_look_at_its_time(world, monkeypatch):
    """It could not be stopped else."""
    world.turn()
    handled = world.link.received.total()
    credit = codec.encode(Envelope(run=CONFIG.run, message=Credit(acked=0, credits=3, version=-1)))
    monkeypatch.setattr(world.worker, "receive", lambda _: credit)
    world.link.service()
    assert world.link.received.total() == handled + MESSAGES_AT_ONCE


def test_a_snapshot_that_the_network_changed_is_requested_again(world):
    """The learner has no newer one to send, and one changed byte of a layout must not end a worker."""
    world.link.layout = "ours"
    changed, sound = (replace(policy(1), layout=layout) for layout in ("0urs", "ours"))
    world.learner.handle(e.Published(snapshot=changed))
    world.link.request_snapshot(after=-1)
    world.link.service()
    world.learner.turn()
    world.learner.session.snapshot = sound
    world.turn()
    assert [note.event for note in world.notes].count("undecodable") == 1
    assert world.link.take_snapshot().layout == "ours"


def test_a_learner_with_another_network_ends_the_worker_with_a_sentence(world):
    """Two snapshots in a row are no accident."""
    world.link.layout = "ours"
    world.link.request_snapshot(after=-1)
    with pytest.raises(ConfigError, match="network is not the one built here: found layout , wanted layout ours"):
        world.turn()


@pytest.mark.parametrize("what", ["run", "environment"])
def test_a_refusal_for_good_ends_the_worker_with_a_sentence(world, what):
    """It is left over from another run, or has another environment: exit code 2 and what to do, once it is sure."""
    identity = Identity(role="actor", name="actor-1", incarnation=5, software="test")
    session = WorkerSide(identity, **{"run": {"run": "run-0"}, "environment": {"env_signature": "other"}}[what])
    link = Link(transport=world.hub.connect(), session=session, clock=lambda: world.now, log_event=world.notes.append)

    def greet():
        world.now += 0.5
        link.service()
        world.learner.turn()
        link.service()

    greet()
    with pytest.raises(ConfigError, match=rf"the learner refuses this worker \({what}\)") as refused:
        greet()
    assert refused.value.exit_code == 2


def test_an_unknown_sender_that_greets_by_a_live_name_ends_no_worker(world):
    """With a larger incarnation, again and again; the holder works on, is killed, starts with a smaller clock, and works on."""
    world.turn()
    unknown = WorkerSide(Identity(role="actor", name="actor-0", incarnation=2**62, software="test"))
    link = Link(transport=world.hub.connect(), session=unknown, clock=lambda: world.now, log_event=lambda _: None)
    for _ in range(40):
        link.service()
        world.turn(rounds=1)
    assert (link.welcome, world.link.session.state) == (None, ConnectionState.WELCOME)
    world.worker.close()
    link.close("leaves")
    session = WorkerSide(Identity(role="actor", name="actor-0", incarnation=3, software="test"))
    world.link = Link(transport=world.hub.connect(), session=session, clock=lambda: world.now, log_event=world.notes.append)
    world.turn(rounds=8)
    assert (world.link.session.state, session.identity.incarnation) == (ConnectionState.WELCOME, 6)


def test_a_worker_that_connects_after_the_run_is_drained_without_an_error(world):
    """A supervisor would take exit code 2 for a broken setting, and give up a run that has just been solved."""
    world.learner.handle(e.DrainAsked(reason="target reached", deadline_seconds=9.0))
    session = WorkerSide(Identity(role="actor", name="late", incarnation=1, software="test"))
    link = Link(transport=world.hub.connect(), session=session, clock=lambda: world.now, log_event=world.notes.append)
    link.service()
    world.learner.turn()
    link.service()
    assert link.drain == Drain(reason="the run is ending", deadline_seconds=0.0)
    assert not link.has_credit


def test_a_learner_of_another_protocol_version_ends_the_worker(world):
    """Not even its Refusal can be read; both versions are named, and what to do."""
    route = next(iter(world.learner.transport.connections))
    world.learner.transport.send(route, [msgpack.packb({"v": PROTOCOL_VERSION + 1, "tag": "refusal"})])
    world.link.service()  # one alone may be a message that the network changed
    assert [note.event for note in world.notes].count("undecodable") == 1
    world.learner.transport.send(route, [msgpack.packb({"v": PROTOCOL_VERSION + 1, "tag": "refusal"})])
    with pytest.raises(ConfigError, match=f"found {PROTOCOL_VERSION + 1}, wanted {PROTOCOL_VERSION}; run the same"):
        world.link.service()


def test_bytes_that_are_no_message_cost_a_line(world):
    """A broken learner does not end its actors."""
    world.learner.transport.send(next(iter(world.learner.transport.connections)), [b"\xc1"])
    world.turn()
    assert [note.event for note in world.notes].count("undecodable") == 1
    offer(world, 1)
    world.turn()
    assert world.learner.train() == 1.0


def test_another_environment_is_refused_before_a_step_is_taken(world):
    """The emulator here has another release: its frames have another shape."""
    world.link.check_environment(ENV)
    assert world.link.session.env_signature == ENV.signature
    other = dataclasses.replace(ENV, observation_shape=(2,))
    with pytest.raises(ConfigError, match=f"found signature {other.signature}.*wanted signature {ENV.signature}; install"):
        world.link.check_environment(other)


def test_refused_experience_is_noted_and_its_credit_returns(world):
    """The actor goes on; the log says what the learner disliked."""
    world.link.count(STEPS, Counter())
    world.link.offer(Trajectory(seq=0, env_steps_sent=0, version=7, env_steps=STEPS, arrays=dict(rollout(1).arrays)))
    world.turn()
    (note,) = [note for note in world.notes if note.event == "message_rejected"]
    assert (note.fields["reason"], note.warning) == (DropReason.VERSION, True)
    assert world.link.session.unacknowledged == 0


def test_a_worker_has_joined_until_its_learner_is_away_for_longer_than_it_may_be_silent(world):
    """Readiness depends on it: a learner that restarts within seconds leaves workers ready, one that stays away does not."""
    assert world.link.joined
    state = world.crash()
    world.turn(rounds=20)  # 4 s of 5
    assert world.link.session.state is ConnectionState.GREETING
    assert world.link.joined
    world.turn(rounds=20)
    assert not world.link.joined
    world.learner = Learner(world, state)
    world.turn(rounds=8)
    assert world.link.joined


def test_a_worker_that_was_never_welcomed_has_not_joined():
    """Its learner is not there yet."""
    world = World()
    world.crash()
    world.turn()
    assert not world.link.joined


def test_a_goodbye_closes_the_account(world):
    """At SIGTERM the Goodbye contains what the actor dropped itself, so that nothing stays in flight."""
    offer(world, 1)
    world.link.count(2 * STEPS, Counter({DropReason.UNFINISHED: STEPS}))
    world.link.close("SIGTERM")
    world.learner.turn()
    assert world.learner.train() == 1.0
    assert (world.ledger["trained"], world.ledger["dropped"][DropReason.UNFINISHED], world.ledger["in_flight"]) == (
        STEPS,
        STEPS,
        0,
    )
    assert world.worker.closed


@pytest.mark.parametrize("role", ["evaluator"])
def test_what_is_not_kept_is_sent_or_handed_back(world):
    """An evaluation reaches a learner that is there; of one that is away the evaluator hears, and may try again."""
    arrays = {"episode_return": np.ones(1, np.float32), "episode_length": np.ones(1, np.int32)}
    evaluation = Evaluation(version=0, mode="greedy", arrays=arrays)
    assert world.link.say(evaluation)
    world.turn()
    assert [message.mode for message in world.learner.evaluations] == ["greedy"]
    world.hub.disconnect(world.worker)
    assert not world.link.say(evaluation)  # this one meets the cut cable
    assert not world.link.say(evaluation)
    assert world.link.sent["evaluation"] == 1
    world.hub.reconnect(world.worker)
    world.turn(8)
    assert world.link.say(evaluation)


@pytest.mark.parametrize("role", ["evaluator"])
def test_a_rejected_evaluation_is_noted(world):
    """The evaluator's log says what the learner disliked."""
    arrays = {"episode_return": np.full(1, np.nan, np.float32), "episode_length": np.ones(1, np.int32)}
    assert world.link.say(Evaluation(version=0, mode="greedy", arrays=arrays))
    world.turn()
    (note,) = [note for note in world.notes if note.event == "message_rejected"]
    assert (note.fields["reason"], note.warning) == (DropReason.NON_FINITE, True)
    assert world.learner.evaluations == []


def test_a_handshake_that_fails_is_logged_with_possible_reasons(world):
    """The learner has other keys, or none: said at once, then every ten seconds, for as long as it lasts."""
    world.worker.handshakes.detail = "the learner does not allow key x"
    for rounds, lines in ((1, 1), (40, 1), (10, 2)):  # 0.2 s each
        for _ in range(rounds):
            world.worker.handshakes.failed[HandshakeFailure.KEY] += 1
            world.turn(rounds=1)
        failures = [note for note in world.notes if note.event == "handshake_failed"]
        assert len(failures) == lines
    assert failures[0].fields == {"times": 1, "detail": "the learner does not allow key x"}
    assert failures[1].fields["times"] == 50
    assert all(note.warning for note in failures)


def test_a_worker_that_was_silent_for_long_greets_before_it_goes_on(world):
    """It built its environments: the learner has forgotten it, and messages from before that wait at its socket."""
    world.learner.turn()
    for _ in range(35):
        world.now += 1.0
        world.learner.turn()
    world.link.greet_after_silence()
    assert not world.link.welcomed
    world.link.service()
    assert not world.link.welcomed
    world.turn(rounds=8)
    assert world.link.new_incarnation
    assert world.link.welcomed
    world.turn()
    world.link.greet_after_silence()
    assert world.link.welcomed
