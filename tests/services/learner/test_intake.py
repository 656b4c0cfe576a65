"""The learner's I/O thread between a real session and a network in memory: what comes through, and what is stopped."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import closing
from unittest.mock import patch

import msgpack
import numpy as np
import pytest

from common.errors import ConfigError, DropReason, HandshakeFailure, InternalError, ResourceError
from common.observability.health import Health
from common.protocol import codec
from common.protocol.events import RefusalCode
from common.protocol.learner_side import LearnerSide
from common.protocol.messages import PROTOCOL_VERSION, ArraySpec, Envelope, Evaluation, Hello, Refusal, Snapshot
from common.runtime.machine import MemoryGuard
from common.transport.api import LIMIT_MESSAGES
from services.learner.accounts import AccountsFile, read
from services.learner.intake import HUNG_SECONDS, TICK_SECONDS, Intake
from services.learner.intake_monitor import IntakeMonitor
from tests.services.learner.conftest import SCHEMA, Colony, session_config
from tests.support.memory import MemoryHub

pytestmark = pytest.mark.service

PATIENCE = 120.0  # seconds; only a fault lets it pass
STEPS = 4  # env steps of one trajectory


def rewards(items):
    """Return a number that identifies a trajectory of the test."""
    return [item.arrays["reward"][0, 0] for item in items]


def numbered(make_trajectory, number):
    """A trajectory that carries its number as reward."""
    return make_trajectory(reward=np.full((2, 2), number, np.float32))


def policy(version):
    """A snapshot of three parameters."""
    return Snapshot(
        version=version, env_steps=0, precision="fp32", layout="x", arrays={"parameters": np.full(3, version, np.float32)}
    )


def assert_balances(stats):
    """Nothing appears from nowhere, nothing vanishes."""
    ledger = stats.ledger
    assert ledger["produced"] == ledger["trained"] + ledger["queued"] + ledger["in_flight"] + sum(ledger["dropped"].values())


def test_a_batch_is_whole_or_not_there(colony, make_trajectory):
    """Three rollouts for batches of two: the third waits for the fourth, and all come in order of arrival."""
    colony.intake.publish(policy(0))
    link = colony.welcome()
    for number in (1, 2, 3):
        link.offer(numbered(make_trajectory, number))
    assert rewards(colony.intake.take(2, PATIENCE)) == [1, 2]
    colony.until(lambda: colony.intake.stats.queue_depth == 1)
    assert colony.intake.take(2, 0.0) == []
    link.offer(numbered(make_trajectory, 4))
    assert rewards(colony.intake.take(2, PATIENCE)) == [3, 4]


def test_what_waits_alone_is_handed_over_when_patience_is_at_its_end(colony, make_trajectory):
    """One rollout or two for a batch of three, and the others are gone: no patience, no waiting; nothing comes of nothing."""
    colony.intake.publish(policy(0))
    link = colony.welcome()
    assert colony.intake.take(3, 0.0, patience=0.0) == []
    for numbers in ([1], [2, 3]):
        for number in numbers:
            link.offer(numbered(make_trajectory, number))
        colony.until(lambda: colony.intake.stats.queue_depth == len(numbers))  # noqa: B023
        assert colony.intake.take(3, 0.0, patience=PATIENCE) == []
        assert rewards(colony.intake.take(3, 0.0, patience=1e-9)) == numbers


def test_a_waiting_train_loop_is_woken_by_an_arrival(colony, make_trajectory):
    """The train loop waits in `take` while the network is silent; the rollout that ends the silence is handed over."""
    colony.intake.publish(policy(0))
    link = colony.welcome()
    taken = []
    loop = threading.Thread(target=lambda: taken.extend(colony.intake.take(1, PATIENCE)))
    loop.start()
    link.offer(numbered(make_trajectory, 7))
    loop.join(PATIENCE)
    assert rewards(taken) == [7]


def test_a_credit_returns_when_its_message_leaves_the_queue(make_colony, make_trajectory):
    """An actor with one credit waits while its rollout waits, and goes on as soon as the rollout is taken, trained or not."""
    colony = make_colony(credits=1)
    colony.intake.publish(policy(0))
    link = colony.welcome()
    assert link.has_credit
    link.offer(make_trajectory())
    assert not link.has_credit
    colony.until(lambda: colony.intake.stats.queue_depth == 1)
    assert not link.has_credit
    colony.intake.take(1, PATIENCE)
    colony.until(lambda: link.has_credit)


def test_the_queue_never_holds_more_than_its_capacity(make_colony, make_trajectory):
    """Two actors use all their credits while nothing is trained: the depth is credits times actors."""
    colony = make_colony(credits=2)
    colony.intake.publish(policy(0))
    links = [colony.welcome(f"actor-{number}") for number in range(2)]
    for link in links:
        while link.has_credit:
            link.offer(make_trajectory())
    colony.until(lambda: colony.intake.stats.queue_depth == 4)
    stats = colony.intake.stats
    assert (stats.queue_capacity, stats.ledger["queued"], stats.actors) == (4, 4 * STEPS, 2)
    assert stats.ledger["queued"] == 4 * STEPS
    assert_balances(stats)


@pytest.fixture
def accounting(tmp_path):
    """An intake that writes accounts, and a function that reads those of its workers."""
    hub, path = MemoryHub(), tmp_path / "accounts.jsonl"
    accounts = AccountsFile(path, run_id="run", clock=time.monotonic)
    session = LearnerSide(session_config(credits=2))
    intake = Intake(transport=hub.bind(), session=session, clock=time.monotonic, log_event=print, accounts=accounts)
    with closing(intake):
        intake.start()
        intake.publish(policy(0))
        yield Colony(hub=hub, session=session, intake=intake), lambda: read(path, run_id="run", produced=0)["registry"]["workers"]


def test_an_account_is_on_disk_before_its_worker_gets_credits(accounting, make_trajectory):
    """A kill of all processes loses at most the env steps that the credits of the workers stand for."""
    colony, written = accounting
    link = colony.welcome()
    for sent in range(2, 20):
        while link.has_credit:
            link.offer(make_trajectory())
        colony.until(lambda wanted=sent: colony.intake.update_stats() or produced(colony) == wanted * STEPS)
        assert colony.intake.take(1, PATIENCE)
        colony.until(lambda: link.has_credit)
        (found,) = written()
        assert found["account"]["produced"] == sent * STEPS


def test_a_disk_that_does_not_answer_makes_the_probe_fail(accounting):
    """The I/O thread waits in a write, no worker is answered, and the train loop still turns."""
    colony, _ = accounting
    now = [0.0]
    colony.intake.health, answered = Health(clock=lambda: now[0]), threading.Event()
    colony.until(lambda: "I/O thread" in colony.intake.health._ticks)
    colony.intake._post((answered.wait, Future()))
    try:
        now[0] += HUNG_SECONDS + 1.0
        colony.intake.health.tick()
        assert colony.intake.health.liveness().sentence.startswith("I/O thread has not ticked for")
    finally:
        answered.set()
    colony.until(lambda: colony.intake.health.liveness().ok)


def test_the_closed_account_of_a_worker_that_left_is_on_disk(accounting):
    colony, written = accounting
    link = colony.welcome()
    assert not written()[0]["closed"]
    link.close("done")
    colony.until(lambda: written()[0]["closed"])


def produced(colony):
    """Return the env steps of the ledger that actors reported."""
    return colony.intake.stats.ledger["produced"]


def test_a_connection_that_floods_is_ignored_and_others_are_served(make_trajectory):
    """Refusing each of its messages would take the time of honest workers. All of it happens within a second."""
    hub, notes = MemoryHub(), []
    most = LIMIT_MESSAGES + session_config().window(actors=1)
    intake = Intake(transport=hub.bind(), session=LearnerSide(session_config()), clock=lambda: 0.0, log_event=notes.append)
    colony, flood = Colony(hub=hub, session=intake.session, intake=intake), most + 50
    with closing(intake):
        intake.start()
        intake.publish(policy(0))
        flooder = hub.connect()
        for _ in range(flood):
            colony.until(lambda: flooder.send([b"no message"]))
        colony.until(lambda: intake.update_stats() or intake.stats.messages_dropped[DropReason.DECODE] == most + 1)
        link = colony.welcome()
        link.offer(numbered(make_trajectory, 7))
        assert rewards(intake.take(1, PATIENCE)) == [7]
        intake.update_stats()
        assert intake.stats.messages_dropped[DropReason.DECODE] + intake.stats.messages_ignored == flood
    assert [note.event for note in notes].count("connection_ignored") == 1


def assert_stands_still(colony):
    """No message holds a credit, so the time that they did does not grow from one tick to the next."""
    first = colony.intake.stats
    colony.until(lambda: colony.intake.stats is not first)
    second = colony.intake.stats
    colony.until(lambda: colony.intake.stats is not second)
    assert colony.intake.stats.queue_seconds == second.queue_seconds > 0


def test_the_time_that_messages_wait_is_added_up(colony, make_trajectory):
    """It grows while a message is in the queue, and not while the queue is empty."""
    colony.intake.publish(policy(0))
    colony.welcome().offer(make_trajectory())
    colony.until(lambda: colony.intake.stats.queue_seconds > 0)
    colony.intake.take(1, PATIENCE)
    colony.until(lambda: colony.intake.stats.queue_depth == 0)
    assert_stands_still(colony)


def test_the_queue_is_looked_at_when_that_is_due_and_not_when_a_message_comes(monkeypatch):
    """A look that each message wakes finds it waiting each time: slow actors had a queue 30 times as deep as it was."""
    transport, now, waited, enough = MemoryHub().bind(), [0.0], [], threading.Event()
    intake = Intake(transport=transport, session=LearnerSide(session_config()), clock=lambda: now[0], log_event=print)

    def receive(timeout):
        waited.append(timeout)
        now[0] += min(timeout, 0.6 * TICK_SECONDS)  # something comes after more than half of the time
        if len(waited) > 4:
            enough.set()

    monkeypatch.setattr(transport, "receive", receive)
    with closing(intake):
        intake.start()
        assert enough.wait(PATIENCE)
    assert waited[:5] == pytest.approx([0.0, TICK_SECONDS, 0.4 * TICK_SECONDS, TICK_SECONDS, 0.4 * TICK_SECONDS])


BAD = {
    "another dtype": ({"reward": np.ones((2, 2), np.float64)}, DropReason.SCHEMA),
    "another shape": ({"reward": np.ones((3, 2), np.float32)}, DropReason.SCHEMA),
    "a missing array": ({"valid": None}, DropReason.SCHEMA),
    "an array too many": ({"gift": np.ones(1, np.float32)}, DropReason.SCHEMA),
    "NaN in the rewards": ({"reward": np.full((2, 2), np.nan, np.float32)}, DropReason.NON_FINITE),
    "an infinite return": ({"episode_return": np.array([np.inf], np.float32)}, DropReason.NON_FINITE),
    "a policy of the future": ({"version": 9}, DropReason.VERSION),
    "more env steps than rows": ({"env_steps": STEPS + 1}, DropReason.SCHEMA),
    "states of another size": ({"memory": np.zeros((2, 2, 4), np.float32)}, DropReason.SCHEMA),
    "states of another number of environments": ({"memory": np.zeros((2, 3, 3), np.float32)}, DropReason.SCHEMA),
    "no states": ({"memory": None}, DropReason.SCHEMA),
    "NaN in a state": ({"memory": np.full((2, 2, 3), np.nan, np.float32)}, DropReason.NON_FINITE),
    "an infinite state": ({"memory": np.full((2, 2, 3), -np.inf, np.float32)}, DropReason.NON_FINITE),
    "a state whose square is infinite": ({"memory": np.full((2, 2, 3), 1e30, np.float32)}, DropReason.OUT_OF_RANGE),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_experience_is_refused_counted_and_reported_and_the_run_goes_on(make_colony, make_trajectory, what):
    """An actor with a fault sends one bad rollout among good ones: it costs that rollout, a counter and a log line."""
    changes, reason = BAD[what]
    memory = {"memory": np.zeros((2, 2, 3), np.float32)}
    colony = make_colony(schema=(*SCHEMA, ArraySpec(name="memory", dtype="float32", shape=(2, 2, 3))))
    colony.intake.publish(policy(0))
    link = colony.welcome()
    bad = make_trajectory(**memory | changes)
    link.count(bad.env_steps + STEPS, {})
    link.offer(bad)
    link.offer(make_trajectory(reward=np.full((2, 2), 5, np.float32), **memory))
    items = colony.intake.take(1, PATIENCE)
    assert rewards(items) == [5]
    colony.intake.complete(items)
    colony.until(lambda: any(note.event == "message_rejected" for note in colony.worker_notes))
    (rejected,) = [note.fields for note in colony.worker_notes if note.event == "message_rejected"]
    assert (rejected["seq"], rejected["reason"]) == (0, reason)
    assert len(rejected["detail"].splitlines()) == 1
    colony.until(lambda: colony.intake.stats.ledger["trained"] == STEPS)
    stats = colony.intake.stats
    assert stats.messages_dropped == {reason: 1}
    assert stats.ledger["dropped"][reason] == bad.env_steps
    assert_balances(stats)


FOREIGN = {
    "bytes that are no message": ([b"\xc1 this is no header"], RefusalCode.DECODE),
    "a header of another protocol": ([msgpack.packb({"v": PROTOCOL_VERSION + 1, "tag": "hello"})], RefusalCode.PROTOCOL),
    "an array frame that is missing": (
        [msgpack.packb({"v": PROTOCOL_VERSION, "tag": "goodbye", "run": "", "arrays": [["x", "bool", [1]]]})],
        RefusalCode.DECODE,
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_bytes_are_answered_with_a_refusal_and_counted(colony, make_trajectory, what):
    """A port scanner, a worker of another release, a broken network card: refused with a reason, counted, without harm."""
    frames, code = FOREIGN[what]
    unknown = colony.hub.connect()
    assert unknown.send(frames)
    answer = codec.decode(unknown.receive(PATIENCE)).message
    assert isinstance(answer, Refusal)
    assert answer.code == code
    assert answer.reason
    colony.intake.publish(policy(0))
    link = colony.welcome()
    link.offer(make_trajectory())
    assert len(colony.intake.take(1, PATIENCE)) == 1
    colony.until(lambda: colony.intake.stats.messages_dropped == {DropReason.DECODE: 1})
    assert next(note.event for note in colony.notes if note.warning) == "worker_refused"


@pytest.mark.parametrize(
    ("worker", "says"), [({"run": "run-0"}, ["run-0", "run-1", "restart"]), ({"signature": "xyz"}, ["xyz", "abc", "install"])]
)
def test_a_worker_of_another_run_or_environment_ends_with_a_sentence(colony, worker, says):
    """An actor left over from yesterday's run, or with another release of the emulator, must not train this one."""
    link = colony.link(**worker)
    with pytest.raises(ConfigError, match="the learner refuses this worker") as refused:
        colony.until(lambda: link.welcome)
    for words in says:
        assert words in str(refused.value)
    colony.links.clear()
    colony.until(lambda: set(colony.intake.stats.messages_dropped) == {DropReason.UNKNOWN_SENDER})


def test_a_message_before_any_greeting_is_answered_and_not_admitted(colony, make_trajectory):
    """The learner restarted, and an actor that did not notice goes on sending: a Refusal makes it greet."""
    unknown = colony.hub.connect()
    assert unknown.send(codec.encode(Envelope(run="run-1", message=make_trajectory())))
    answer = codec.decode(unknown.receive(PATIENCE)).message
    assert (answer.code, answer.retry) == (RefusalCode.UNKNOWN_SENDER, True)
    colony.until(lambda: set(colony.intake.stats.messages_dropped) == {DropReason.UNKNOWN_SENDER})
    assert colony.intake.take(1, 0.0) == []


def test_a_fault_in_the_io_thread_reaches_the_train_loop(colony, monkeypatch):
    """A bug in the session must end the learner with its traceback, not leave it waiting for a dead thread."""

    def fails(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(colony.session, "handle", fails)
    with pytest.raises(InternalError, match="a bug") as caught:
        colony.intake.take(1, PATIENCE)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    for call in (colony.intake.session_state, colony.intake.finish):
        with pytest.raises(InternalError, match="a bug"):
            call(timeout=PATIENCE)


def test_a_question_that_fails_is_not_waited_for(colony, monkeypatch):
    """A bug while the checkpoint is composed reaches the train loop at once."""
    monkeypatch.setattr(colony.session.saved, "state_dict", lambda: 1 // 0)
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        colony.intake.session_state(timeout=PATIENCE)


def test_books_that_do_not_balance_are_said_once_and_cost_no_run(colony, make_trajectory, monkeypatch):
    """Our own bug, but a night of training is worth more than the books."""
    ticks = []

    def unbalanced():
        ticks.append(1)
        raise InternalError("the ledger does not balance")

    monkeypatch.setattr(colony.session, "check_ledger", unbalanced)
    colony.intake.publish(policy(0))
    link = colony.welcome()
    colony.until(lambda: len(ticks) > 2)
    link.offer(make_trajectory())
    assert len(colony.intake.take(1, PATIENCE)) == 1
    assert [note.event for note in colony.notes].count("ledger_unbalanced") == 1


def test_whoever_wants_the_newest_policy_gets_it_when_it_is_published(colony):
    """A worker asks before there is any policy, and skips those that came while it was busy."""
    link = colony.welcome()
    link.request_snapshot(after=-1)
    colony.intake.publish(policy(0))
    colony.until(lambda: link.take_snapshot())
    for version in range(1, 5):
        colony.intake.publish(policy(version))
    colony.intake.update_stats()
    link.request_snapshot(after=0)
    colony.until(lambda: link.session.version == 4)
    snapshot = link.take_snapshot()
    assert snapshot.version == 4
    assert snapshot.arrays["parameters"].tolist() == [4, 4, 4]
    colony.until(lambda: colony.intake.stats.sent["snapshot"])
    assert colony.intake.stats.bytes_sent > 0


def test_bytes_are_those_of_all_parts_of_the_messages_received_and_sent():
    session = LearnerSide(session_config())
    monitor = IntakeMonitor(transport=MemoryHub().bind(), session=session, log_event=print, memory=MemoryGuard())
    monitor.arrived([b"1234", b"567"])
    for version in range(2):
        monitor.sent(policy(version), [b"12", b"345", b""])
    stats = monitor.stats(queue_depth=0)
    assert (stats.bytes_received, stats.bytes_sent, stats.sent) == (7, 10, {"snapshot": 2})


def test_evaluations_are_handed_over_once(colony):
    """The train loop looks for them each round."""
    colony.intake.publish(policy(0))
    link = colony.welcome("evaluator-0", "evaluator")
    arrays = {"episode_return": np.array([1.0, 3.0], np.float32), "episode_length": np.array([5, 6], np.int32)}
    link.say(Evaluation(version=0, mode="greedy", arrays=arrays))
    found = []
    colony.until(lambda: found.extend(colony.intake.take_evaluations()) or found)
    (evaluation,) = (evaluated.message for evaluated in found)
    assert (evaluation.mode, evaluation.arrays["episode_return"].tolist()) == ("greedy", [1, 3])
    assert colony.intake.take_evaluations() == []


def test_a_bad_evaluation_is_reported_to_the_evaluator_and_counted_by_the_learner(colony):
    """An environment that returns NaN: its mean would be no number, and the summary no JSON."""
    colony.intake.publish(policy(0))
    link = colony.welcome("evaluator-0", "evaluator")
    arrays = {"episode_return": np.array([np.nan], np.float32), "episode_length": np.array([1], np.int32)}
    assert link.say(Evaluation(version=0, mode="greedy", arrays=arrays))
    colony.until(lambda: [note.event for note in colony.worker_notes] == ["message_rejected"])
    assert colony.worker_notes[0].fields["reason"] == DropReason.NON_FINITE
    colony.until(lambda: colony.intake.stats.messages_dropped == {DropReason.NON_FINITE: 1})
    assert colony.intake.take_evaluations() == []


def test_an_actor_that_evaluates_is_refused(colony):
    """The score belongs to evaluators."""
    link = colony.welcome()
    assert link.say(Evaluation(version=0, mode="greedy"))
    colony.until(lambda: [note for note in colony.worker_notes if note.event == "refused"])
    (refused,) = [note.fields for note in colony.worker_notes if note.event == "refused"]
    assert refused == {"code": "role", "reason": "a learner takes no evaluation from an actor"}
    assert colony.intake.take_evaluations() == []


def test_the_state_for_a_checkpoint_contains_all_that_was_completed_before(colony, make_trajectory):
    """A checkpoint that forgot the batch just trained on would train on it twice after a resume."""
    colony.intake.publish(policy(0))
    link = colony.welcome()
    link.offer(make_trajectory())
    link.offer(make_trajectory())
    first = colony.intake.take(1, PATIENCE)
    colony.intake.complete(first)
    ledger = colony.intake.session_state(timeout=PATIENCE)["ledger"]
    assert ledger["trained"] == STEPS


def test_the_end_closes_every_account(colony, make_trajectory):
    """Of five rollouts one is trained on, one was taken and is dropped, two wait, one is only said to exist."""
    colony.intake.publish(policy(0))
    link = colony.welcome()
    link.count(5 * STEPS, {})
    for _ in range(4):
        link.offer(make_trajectory())
    trained, dropped = colony.intake.take(2, PATIENCE)
    colony.intake.complete([trained])
    colony.intake.complete([dropped], DropReason.STALE)
    colony.until(lambda: colony.intake.stats.queue_depth == 2)
    link.close("done")  # its Goodbye says that 20 env steps were produced
    colony.links.clear()
    colony.until(lambda: colony.intake.stats.actors == 0)
    colony.intake.finish(timeout=PATIENCE)
    ledger = colony.intake.stats.ledger
    lost = {reason: steps for reason, steps in ledger["dropped"].items() if steps}
    assert (ledger["produced"], ledger["trained"], ledger["queued"], ledger["in_flight"]) == (5 * STEPS, STEPS, 0, 0)
    assert lost == {DropReason.STALE: STEPS, DropReason.RUN_ENDED: 2 * STEPS, DropReason.WORKER_LOST: STEPS}


def test_a_drain_waits_until_the_last_worker_has_left(colony):
    """The run ends: both workers get a Drain, and the learner waits for their goodbyes while its loop counts as alive."""
    links = [colony.welcome("actor-0"), colony.welcome("evaluator-0", "evaluator")]
    colony.until(lambda: colony.intake.stats.actors == colony.intake.stats.evaluators == 1)
    colony.intake.drain("target reached", 9.0)
    colony.until(lambda: all(link.drain for link in links))
    assert [link.drain.reason for link in links] == ["target reached"] * 2
    assert not colony.intake.wait_for_goodbyes(PATIENCE, alive=lambda: None, abort=lambda: True)
    turns = []
    for link in links:
        link.close("run over")
    assert colony.intake.wait_for_goodbyes(PATIENCE, alive=lambda: turns.append(1), abort=lambda: False)


def test_waiting_for_goodbyes_has_an_end(colony):
    """A worker that hangs cannot keep the learner from ending."""
    colony.welcome()
    colony.until(lambda: colony.intake.stats.actors == 1)
    assert not colony.intake.wait_for_goodbyes(2 * TICK_SECONDS, alive=lambda: None, abort=lambda: False)


def test_an_actor_that_comes_when_the_run_is_over_is_sent_home_without_blame(colony):
    """A killed actor is restarted by its supervisor just as the run ends: it must leave with exit code 0, not 2."""
    colony.intake.drain("target reached", 9.0)
    colony.intake.update_stats()  # the I/O thread knows of the drain
    late = colony.link("late")
    colony.until(lambda: late.drain)
    assert late.welcome is None
    assert "ending" in late.drain.reason


def test_a_worker_that_comes_back_is_counted_and_sends_again_what_was_lost(colony, make_trajectory):
    """The network breaks with a rollout on the wire: it arrives once, and the reconnect shows in the stats."""
    colony.intake.publish(policy(0))
    link = colony.welcome()
    worker = link._transport
    colony.hub.disconnect(worker)
    link.offer(numbered(make_trajectory, 3))
    colony.hub.reconnect(worker)
    colony.until(lambda: colony.intake.stats.queue_depth == 1)
    assert rewards(colony.intake.take(1, PATIENCE)) == [3]
    stats = colony.intake.stats
    assert (stats.reconnects, stats.messages_dropped) == (1, {})


def test_closing_ends_the_thread_even_while_it_waits(colony):
    """The learner's process must be able to end."""
    colony.intake.close()
    assert not colony.intake._thread.is_alive()
    assert colony.hub.learner is None


def test_a_hello_that_speaks_for_another_role_is_refused(colony):
    """Only actors and evaluators have business here."""
    hello = Hello(
        role="spy", worker="x", incarnation=1, software="", env_signature="", resend_from=0, completed=0, produced=0
    )  # fmt: skip
    unknown = colony.hub.connect()
    unknown.send(codec.encode(Envelope(run="", message=hello)))
    assert codec.decode(unknown.receive(PATIENCE)).message.code == RefusalCode.ROLE


def by_place(queue):
    """One message of each of two actors, the first place first; none while one is missing."""
    found = {item.index: item for item in reversed(queue)}
    return [found[0], found[1]] if len(found) == 2 else []


def test_in_lockstep_the_next_policy_is_there_before_the_credit(make_colony, make_trajectory):
    """A round is taken and trained on: only then credits return, after the new policy."""
    colony = make_colony(credits=1, batch=2, lockstep=True)
    colony.intake.publish(policy(0))
    links = [colony.welcome("actor-0"), colony.welcome("actor-1")]
    for link in links:
        link.request_snapshot(after=-1)
    for link in links:
        colony.until(link.take_snapshot)
        link.request_snapshot(after=0)
    links[1].offer(numbered(make_trajectory, 2))
    assert colony.intake.take_round(by_place, 0.0) == []
    links[0].offer(numbered(make_trajectory, 1))
    items = colony.intake.take_round(by_place, PATIENCE)
    assert rewards(items) == [1, 2]
    assert colony.intake.take_round(by_place, 0.0) == []
    links[0].service(3 * TICK_SECONDS)
    assert not any(link.has_credit for link in links)
    waited = colony.intake.stats.queue_seconds
    colony.until(lambda: colony.intake.stats.queue_seconds > waited)  # what trains holds its credit: it is not on the wire
    colony.intake.publish(policy(1))
    colony.intake.complete(items)
    for link in links:
        colony.until(lambda link=link: link.has_credit)
        assert link.take_snapshot().version == 1
    colony.intake.finish()
    assert colony.intake.stats.ledger["trained"] == 2 * STEPS
    assert_balances(colony.intake.stats)


def test_an_intake_that_is_held_up_is_named(colony):
    """The disk of the log stands still, and with it the thread that writes there: a sentence, not a bare timeout."""
    held, called = threading.Event(), threading.Event()

    def stand_still(_):
        called.set()
        held.wait(PATIENCE)

    colony.intake.log_event = stand_still
    colony.hub.connect().send([b"no message"])
    try:
        assert called.wait(PATIENCE)
        with pytest.raises(
            ResourceError, match=r"the intake thread does not answer: found none in 0\.05 s, wanted an answer; look"
        ):
            colony.intake.session_state(timeout=0.05)
        with patch.object(threading.Condition, "wait_for", lambda _, predicate, __: predicate()):  # no time passes
            for call in (colony.intake.session_state, colony.intake.update_stats, colony.intake.finish):
                with pytest.raises(ResourceError, match=f"none in {HUNG_SECONDS:g} s"):
                    call()
    finally:
        held.set()
    assert colony.intake.session_state()


def test_handshakes_that_fail_are_counted_and_logged(colony):
    """A worker without a key reconnects every second: one line, and a counter in /metrics."""
    transport = colony.intake.transport
    transport.handshakes.detail = "a worker has no keys"
    transport.handshakes.failed[HandshakeFailure.MECHANISM] += 3
    colony.until(lambda: colony.intake.stats.handshakes_failed[HandshakeFailure.MECHANISM] == 3 and colony.notes)
    (note,) = [note for note in colony.notes if note.event == "handshake_failed"]
    assert note.fields["detail"] == "a worker has no keys"
    assert note.warning
