"""The worker's side of the protocol: events in, instructions out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import ConfigError, InternalError
from common.protocol import events as e
from common.protocol.events import RefusalCode
from common.protocol.messages import (
    Credit,
    Drain,
    Dropped,
    Envelope,
    Evaluation,
    ExperienceMessage,
    Goodbye,
    Hello,
    Message,
    Refusal,
    Reject,
    Report,
    Snapshot,
    SnapshotWanted,
    Trajectory,
    Welcome,
)
from common.protocol.worker_side import ConnectionState, Identity, WorkerSide

pytestmark = pytest.mark.pure


def actor() -> WorkerSide:
    """A worker that has sent nothing yet."""
    return WorkerSide(Identity(role="actor", name="a", incarnation=7, software="1"))


def welcome(credits: int = 2, version: int = 3) -> Welcome:  # noqa: A002 - the field's name
    """A learner's answer to a Hello."""
    return Welcome(
        index=0, generation=0, config="{}", env_signature="", schema=(), credits=credits, version=version, heartbeat_seconds=1.0
    )


def hear(side: WorkerSide, message: Message, now: float = 0.0) -> list[e.Instruction]:
    """Return the worker's instructions after `message` of the learner."""
    return side.handle(e.Received(envelope=Envelope(run="run", message=message)), now)


def offer(side: WorkerSide, env_steps: int = 10, now: float = 0.0) -> list[e.Instruction]:
    """Return the worker's instructions after a rollout of its application."""
    return side.offer(Trajectory(seq=0, env_steps_sent=0, version=3, env_steps=env_steps), now)


def said(instructions: list[e.Instruction]) -> list[Message]:
    """Return the messages that are sent."""
    return [send.message for send in instructions if isinstance(send, e.Send)]


def numbers(instructions: list[e.Instruction]) -> list[int]:
    """Return the numbers of the experience messages that are sent."""
    return [message.seq for message in said(instructions) if isinstance(message, ExperienceMessage)]


def greeted(credits: int = 2) -> WorkerSide:  # noqa: A002
    """A worker that was welcomed."""
    side = actor()
    side.handle(e.Tick(), 0.0)
    hear(side, welcome(credits))
    return side


def refuse(side: WorkerSide, code: RefusalCode, *, retry: bool, incarnation: int = -1) -> list[e.Instruction]:
    """Return the worker's instructions after a Refusal."""
    return hear(side, Refusal(code=code, reason="because", retry=retry, incarnation=incarnation))


def test_a_worker_greets_until_it_is_answered() -> None:
    """Actors may start before their learner."""
    side = actor()
    assert [type(m) for m in said(side.handle(e.Tick(), 0.0))] == [Hello]
    assert said(side.handle(e.Tick(), 0.4)) == []
    (again,) = said(side.handle(e.Tick(), 0.5))
    assert (again.worker, again.incarnation, again.resend_from, again.completed) == ("a", 7, 0, 0)
    (greeting,) = hear(side, welcome())
    assert isinstance(greeting, Welcome)
    assert (side.state, side.window, side.version, side.run) == (ConnectionState.WELCOME, 2, 3, "run")


def test_a_hello_that_no_connection_took_is_repeated_at_the_next_tick() -> None:
    """The learner may listen by then, and a worker that is welcomed later collects later."""
    side = actor()
    (hello,) = said(side.handle(e.Tick(), 0.0))
    assert side.handle(e.Unsent(message=hello), 0.0) == []
    assert said(side.handle(e.Tick(), 0.1)) == [hello]


def test_a_second_welcome_changes_nothing() -> None:
    """Two Hellos were under way when the learner came up: what is kept must not be sent twice."""
    side = greeted()
    offer(side)
    assert hear(side, welcome()) == []


def test_experience_is_numbered_and_its_steps_are_summed() -> None:
    """The session fills in what the learner's account stands on."""
    side = greeted()
    (first,), (second,) = said(offer(side, 10)), said(offer(side, 7))
    assert [(m.seq, m.env_steps_sent) for m in (first, second)] == [(0, 10), (1, 17)]
    assert not side.has_credit
    with pytest.raises(InternalError, match="without a credit"):
        offer(side)


def test_a_window_that_shrinks_during_a_rollout_does_not_waste_it() -> None:
    """Another actor joined while this one was collecting with its credit."""
    side = greeted(credits=2)
    offer(side)
    hear(side, Credit(acked=0, credits=1, version=3))
    assert not side.has_credit
    assert numbers(offer(side)) == [1]


def test_an_acknowledgement_frees_all_below_it() -> None:
    """One Credit may speak for several messages; one that came late for none."""
    side = greeted(credits=3)
    for _ in range(3):
        offer(side)
    hear(side, Credit(acked=2, credits=3, version=5))
    assert (side.unacknowledged, side.version) == (1, 5)
    hear(side, Credit(acked=1, credits=3, version=5))
    assert side.unacknowledged == 1


def test_a_reject_frees_its_message_and_is_passed_on_once_for_each_telling() -> None:
    """NaN in the second rollout: the first still waits in the learner's queue."""
    side = greeted()
    offer(side)
    offer(side)
    reject = Reject(seq=1, reason="non_finite", detail="NaN")
    assert hear(side, Credit(acked=0, credits=2, version=3, rejects=(reject,))) == [reject]
    assert side.has_credit


def test_after_a_loss_what_is_kept_is_sent_again_in_order() -> None:
    """The learner was silent too long; rollouts 1 and 2 had not been acknowledged."""
    side = greeted(credits=3)
    for _ in range(3):
        offer(side)
    hear(side, Credit(acked=1, credits=3, version=3))
    (note,) = side.handle(e.Tick(), 5.1)
    assert (note.event, side.state) == ("learner_lost", ConnectionState.GREETING)
    (hello,) = said(side.handle(e.Tick(), 5.7))
    assert (hello.resend_from, hello.completed) == (1, 10)
    assert numbers(hear(side, welcome(), 5.8)) == [1, 2]
    assert side.reconnects == 1


def test_experience_made_while_the_learner_is_away_waits_for_it() -> None:
    """Credits left over may be used; the message goes out with the next Welcome."""
    side = greeted()
    side.handle(e.Unsent(message=Report(produced=0)), 1.0)
    assert side.has_credit
    assert said(offer(side, now=1.1)) == []
    assert numbers(hear(side, welcome(), 2.0)) == [0]


def test_words_from_before_the_loss_are_not_believed() -> None:
    """A Credit of the old connection arrives while greeting anew."""
    side = greeted()
    offer(side)
    side.handle(e.Unsent(message=Report(produced=0)), 1.0)
    assert hear(side, Credit(acked=1, credits=2, version=9), 1.1) == []
    assert side.unacknowledged == 1


def test_a_silent_worker_reports_its_counters() -> None:
    """The heartbeat carries the ledger's news; a message just sent is a heartbeat too."""
    side = greeted()
    side.count(produced=40, dropped=(Dropped(reason="unfinished", env_steps=4),))
    assert said(side.handle(e.Tick(), 0.9)) == []
    (report,) = said(side.handle(e.Tick(), 1.0))
    assert (report.produced, report.dropped[0].env_steps) == (40, 4)
    hear(side, Credit(acked=0, credits=2, version=3), 1.0)
    assert said(side.handle(e.Tick(), 1.5)) == []


@pytest.mark.parametrize("role", ["actor", "evaluator"])
def test_each_request_is_answered_by_one_snapshot(role) -> None:
    """The application may repeat it while none has come; a learner that takes over is asked again, until one has."""
    side = WorkerSide(Identity(role=role, name="e", incarnation=7, software="1"))
    side.handle(e.Tick(), 0.0)
    hear(side, welcome())
    assert said(side.request_snapshot(-1, 0.0)) == [SnapshotWanted(after=-1)]
    assert side.request_snapshot(-1, 0.1) == []
    side.handle(e.Unsent(message=Report(produced=0)), 1.0)
    assert SnapshotWanted(after=-1) in said(hear(side, welcome(), 2.0))
    snapshot = Snapshot(version=4, env_steps=0, precision="fp32", layout="x")
    assert hear(side, snapshot) == [snapshot]
    assert said(side.request_snapshot(4, 5.0)) == [SnapshotWanted(after=4)]


def test_after_a_loss_an_actor_gets_the_policy_of_the_learner_whatever_its_number_and_an_evaluator_none() -> None:
    """The next learner may have trained again up to the version of the last. An evaluator must play what it was sent last."""
    requests = {}
    for role in ("actor", "evaluator"):
        side = WorkerSide(Identity(role=role, name="e", incarnation=7, software="1"))
        side.handle(e.Tick(), 0.0)
        hear(side, welcome())
        side.handle(e.Unsent(message=Report(produced=0)), 1.0)
        requests[role] = [message for message in said(hear(side, welcome(), 2.0)) if isinstance(message, SnapshotWanted)]
    assert requests == {"actor": [SnapshotWanted(after=-1)], "evaluator": []}


def test_a_request_whose_answer_could_not_be_decoded_is_repeated() -> None:
    """The learner has answered it, and will not answer it twice."""
    side = greeted()
    assert side.request_again(0.0) == []
    side.request_snapshot(4, 0.0)
    assert said(side.request_again(0.1)) == [SnapshotWanted(after=4)]


def test_a_snapshot_that_cannot_be_used_is_requested_again_at_once() -> None:
    """Also where the next one is requested already: the learner may have none newer than the one that came."""
    side = greeted()
    side.request_snapshot(4, 0.0)
    assert said(side.request_snapshot(-1, 0.1)) == [SnapshotWanted(after=-1)]


FINAL = [
    RefusalCode.PROTOCOL,
    RefusalCode.RUN,
    RefusalCode.ENVIRONMENT,
    RefusalCode.ROLE,
]


@pytest.mark.parametrize("code", FINAL)
def test_a_final_refusal_ends_the_worker(code: RefusalCode) -> None:
    """Another Hello would not help: the application gets the reason, and nothing more is sent."""
    side = greeted()
    refuse(side, code, retry=False)
    assert refuse(side, code, retry=False)[-1] == e.Refused(code=code, reason="because")
    assert (side.state, side.has_credit) == (ConnectionState.ENDED, False)
    assert side.handle(e.Tick(), 99.0) == []
    assert hear(side, welcome()) == []


def test_the_end_of_the_run_ends_the_worker_at_once() -> None:
    """This refusal is never a mistake, and a moment later no learner answers."""
    assert refuse(greeted(), RefusalCode.DRAINING, retry=False)[-1] == e.Refused(code="draining", reason="because")


@pytest.mark.parametrize("code", FINAL)
def test_one_final_refusal_may_be_of_a_hello_that_the_network_changed(code: RefusalCode) -> None:
    """Without keys a byte of it may flip: the worker greets once more before it ends."""
    side = actor()
    side.handle(e.Tick(), 0.0)
    assert not any(isinstance(i, e.Refused) for i in refuse(side, code, retry=False))
    assert [type(m) for m in said(side.handle(e.Tick(), 0.5))] == [Hello]
    hear(side, welcome())
    assert side.state is ConnectionState.WELCOME


@pytest.mark.parametrize("code", [RefusalCode.UNKNOWN_SENDER])
def test_a_refusal_that_may_pass_makes_the_worker_greet_again(code: RefusalCode) -> None:
    """The learner has restarted: everything sent to it meanwhile is refused, and one Hello is enough."""
    side = greeted()
    offer(side)
    (hello,) = said(refuse(side, code, retry=True))
    assert (hello.resend_from, hello.completed) == (0, 0)
    assert said(refuse(side, code, retry=True)) == []
    assert numbers(hear(side, welcome())) == [0]


def test_what_the_learner_cannot_read_is_not_sent_again() -> None:
    """It would be refused for ever; it still holds its credit, for the learner may hold some of it."""
    side = greeted()
    offer(side, 10)
    (hello,) = said(refuse(side, RefusalCode.DECODE, retry=True))
    assert (hello.resend_from, hello.completed) == (1, 10)
    assert numbers(hear(side, welcome())) == []
    assert side.unacknowledged == 1
    hear(side, Credit(acked=1, credits=2, version=3))
    assert side.unacknowledged == 0


def test_a_worker_whose_hello_cannot_be_read_ends() -> None:
    """A learner of another make: it would be asked, and would refuse, twice a second for ever."""
    side = actor()
    side.handle(e.Tick(), 0.0)
    refuse(side, RefusalCode.DECODE, retry=True)
    _, refused = refuse(side, RefusalCode.DECODE, retry=True)
    assert (refused.code, side.state) == (RefusalCode.DECODE, ConnectionState.ENDED)


@pytest.mark.parametrize("code", [RefusalCode.FULL, RefusalCode.IN_USE, RefusalCode.EVICTED])
def test_a_full_run_is_asked_again_with_patience(code: RefusalCode) -> None:
    """It may be full, or the name in use, for hours, and each Hello costs a line in two logs."""
    side = actor()
    side.handle(e.Tick(), 0.0)
    refuse(side, code, retry=True)
    assert said(side.handle(e.Tick(), side.FULL_SECONDS - 0.1)) == []
    assert [type(m) for m in said(side.handle(e.Tick(), side.FULL_SECONDS))] == [Hello]


def test_a_forgotten_worker_starts_over_as_a_new_incarnation() -> None:
    """It was stopped for minutes, and its experience was dropped."""
    side = greeted()
    offer(side)
    _, started, send = refuse(side, RefusalCode.FORGOTTEN, retry=True)
    assert started == e.NewIncarnation(incarnation=8)
    hello = send.message
    assert (hello.incarnation, hello.resend_from, hello.completed, hello.produced) == (8, 0, 0, 0)
    hear(side, welcome())
    assert numbers(offer(side)) == [0]


@pytest.mark.parametrize("code", [RefusalCode.FORGOTTEN, RefusalCode.SUPERSEDED])
def test_a_worker_goes_on_as_the_incarnation_that_the_learner_names(code: RefusalCode) -> None:
    """Its clock stepped back, or another process used its name: it never ends for that, and restarts once for two refusals."""
    side = greeted()
    for _ in range(2):
        refuse(side, code, retry=True, incarnation=2**62 + 1)
    assert side.identity.incarnation == 2**62 + 1
    assert not side.has_credit  # messages of its predecessor in the queue hold credits: the Welcome has the number left
    hear(side, replace(welcome(), incarnation=2**62 + 1))
    assert numbers(offer(side)) == [0]


def test_a_worker_born_again_twice_does_not_enter_as_its_first_rebirth() -> None:
    """It had said Hello twice, so it was refused twice; its third Hello is lost, and the learner only knows the second life."""
    side = greeted()
    for _ in range(2):
        refuse(side, RefusalCode.FORGOTTEN, retry=True)
    assert hear(side, replace(welcome(), incarnation=8)) == []
    assert side.state is ConnectionState.GREETING
    greeting, *_ = hear(side, replace(welcome(), incarnation=9))
    assert isinstance(greeting, Welcome)


def test_goodbye_carries_the_last_counters() -> None:
    """So that the account closes; to a learner that is away there is nothing to say."""
    side = greeted()
    side.count(produced=40)
    assert said(side.close("done", 0.1)) == [Goodbye(reason="done", produced=40)]
    assert side.close("done", 0.2) == []
    assert actor().close("done", 0.0) == []


def test_a_drain_is_passed_on() -> None:
    """The application decides how to end; a second Drain does no harm."""
    side, drain = greeted(), Drain(reason="solved", deadline_seconds=5.0)
    assert hear(side, drain) == [drain]


def test_an_evaluation_without_a_learner_is_not_sent() -> None:
    """Evaluations are neither numbered nor kept: the evaluator may send it again later."""
    evaluation = Evaluation(version=1, mode="greedy")
    assert said(greeted().send(evaluation, 0.0)) == [evaluation]
    assert actor().send(evaluation, 0.0) == []


def test_a_message_that_no_learner_sends_is_a_line_in_the_log() -> None:
    """Another program may answer on that port: the actor continues."""
    (note,) = hear(greeted(), Report(produced=1))
    assert note.event == "unexpected_message"


def test_an_event_of_the_learners_side_is_a_bug_of_ours() -> None:
    """Wired wrongly, it must not pass in silence."""
    with pytest.raises(InternalError, match="learner's side"):
        greeted().handle(e.Ended(), 0.0)


@pytest.mark.parametrize("name", ["", "a b", ".", "x" * 129])
def test_a_name_that_no_learner_takes_is_the_users_mistake(name: str) -> None:
    """One line and exit code 2, before anything is sent."""
    with pytest.raises(ConfigError, match=r"name of this evaluator: found .* wanted 1 to 128 of .*; set evaluator.name"):
        Identity(role="evaluator", name=name, incarnation=1, software="")
