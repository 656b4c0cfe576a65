"""The learner's side of the protocol: events in, instructions out, and the ledger after each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.errors import DropReason, ProtocolError
from common.protocol import codec, learner_side
from common.protocol import events as e
from common.protocol.content import EVALUATIONS
from common.protocol.events import SENTENCE, RefusalCode, WorkerKey
from common.protocol.incarnation import HOLES, Worker
from common.protocol.learner_side import BAD_MESSAGES, LearnerSide
from common.protocol.ledger import Account
from common.protocol.messages import (
    ArraySpec,
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
    Report,
    Snapshot,
    SnapshotWanted,
    Trajectory,
    Welcome,
)
from common.protocol.session_config import SessionConfig

pytestmark = pytest.mark.pure

SCHEMA = (ArraySpec(name="reward", dtype="float32", shape=(4,)), ArraySpec(name="valid", dtype="bool", shape=(4,)))
ARRAYS = {"reward": np.zeros(4, np.float32), "valid": np.ones(4, np.bool_)}


class Learner:
    """A learner's session with time and words of its own; every step checks the ledger."""

    def __init__(self, begins_at: int = 0, **config: Any) -> None:
        given = {"credits": 2, "rollout_env_steps": 4, "batch": 1, "max_actors": 4, "schema": SCHEMA} | config
        self.side = LearnerSide(SessionConfig(run="run", run_config="{}", env_signature="env", **given))
        self.now = 0.0
        self.handle(e.Published(snapshot=Snapshot(version=begins_at, env_steps=0, precision="fp32", layout="x")))

    def handle(self, event: e.Event) -> list[e.Instruction]:
        """One event, and its instructions."""
        out = self.side.handle(event, self.now)
        self.side.check_ledger()
        return out

    def hear(self, route: bytes, message: Message, run: str = "run", public_key: str = "") -> list[e.Instruction]:
        """One message."""
        return self.handle(e.Received(route=route, envelope=Envelope(run=run, message=message), public_key=public_key))

    def greet(
        self, name: str = "a", route: bytes | None = None, incarnation: int = 1, public_key: str = "", **fields: Any
    ) -> list[e.Instruction]:
        """A Hello of an actor, on a connection named like it."""
        given = {"role": "actor", "software": "1", "env_signature": "env", "resend_from": 0, "completed": 0, "produced": 0}
        hello = Hello(worker=name, incarnation=incarnation, **(given | fields))
        return self.hear(route or name.encode(), hello, public_key=public_key)

    def reconnect(self, name: str = "a", route: bytes = b"x", **hello: Any) -> list[e.Instruction]:
        """Send a Hello by the name of a lost connection: the learner detects the loss, and accepts the next Hello."""
        (credit,) = of(Credit, self.greet(name, route, **hello), name.encode())
        self.handle(e.Unsent(route=name.encode(), message=credit))
        return self.greet(name, route, **hello)

    def send(self, seq: int, name: str = "a", **fields: Any) -> list[e.Instruction]:
        """A trajectory of four env steps."""
        given = {"version": 0, "env_steps": 4, "env_steps_sent": 4 * (seq + 1), "arrays": ARRAYS}
        return self.hear(name.encode(), Trajectory(seq=seq, **(given | fields)))

    def tick(self, seconds: float) -> list[e.Instruction]:
        """Time passes."""
        self.now += seconds
        return self.handle(e.Tick())

    def resumed(self, **config: Any) -> Learner:
        """A new learner that goes on from a checkpoint of this one, made now."""
        other = Learner(**config)
        other.side.saved.load_state_dict(json.loads(json.dumps(self.side.saved.state_dict())))
        other.side.check_ledger()
        return other

    @property
    def books(self) -> dict[str, Any]:
        """The ledger without the reasons at 0."""
        books = self.side.ledger.as_dict()
        return books | {"dropped": {reason: steps for reason, steps in books["dropped"].items() if steps}}


def of(kind: type, instructions: list[e.Instruction], route: bytes = b"a") -> list[Any]:
    """The messages of one kind that go to one worker."""
    return [i.message for i in instructions if isinstance(i, e.Send) and isinstance(i.message, kind) and i.route == route]


def items(*seqs: int, name: str = "a", incarnation: int = 1) -> tuple[tuple[WorkerKey, int], ...]:
    """Return the keys of messages in the queue."""
    return tuple((WorkerKey(name=name, incarnation=incarnation), seq) for seq in seqs)


def refusal(instructions: list[e.Instruction], route: bytes = b"a") -> tuple[str, bool]:
    """Code and retry of the one refusal."""
    (message,) = of(Refusal, instructions, route)
    return message.code, message.retry


# --- greeting ---


def test_a_greeting_is_answered_with_all_that_a_worker_needs() -> None:
    """An actor needs one fact, where the learner is; the rest comes from the Welcome."""
    learner = Learner()
    (welcome,) = of(Welcome, learner.greet())
    assert (welcome.index, welcome.generation, welcome.credits, welcome.version, welcome.schema) == (0, 0, 2, 0, SCHEMA)
    (evaluator,) = of(Welcome, learner.greet("evaluator", role="evaluator"), b"evaluator")
    assert (evaluator.index, evaluator.credits, evaluator.schema) == (0, 0, ())
    (second,) = of(Welcome, learner.greet("b"), b"b")
    (again,) = of(Welcome, learner.greet("a", incarnation=2))
    assert (second.index, again.index, again.generation, again.incarnation) == (1, 0, 1, 2)


def test_a_greeting_said_twice_keeps_the_open_want() -> None:
    """The worker repeated its Hello because the learner was slow; it will not ask for the snapshot again."""
    learner = Learner()
    learner.greet()
    learner.hear(b"a", SnapshotWanted(after=0))
    assert of(Welcome, learner.greet())
    assert of(Snapshot, learner.handle(e.Published(snapshot=Snapshot(version=1, env_steps=0, precision="fp32", layout="x"))))
    assert learner.side.reconnects == 0  # a slow learner is no lost connection


@pytest.mark.parametrize(
    ("hello", "code", "retry"),
    [
        ({"role": "spy"}, RefusalCode.ROLE, False),
        ({"env_signature": "other"}, RefusalCode.ENVIRONMENT, False),
        ({"name": "b"}, RefusalCode.FULL, True),
        ({"name": "evaluator-1", "role": "evaluator"}, RefusalCode.FULL, True),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_with_the_reason(hello: dict[str, Any], code: RefusalCode, *, retry: bool) -> None:
    """A wrong role, another environment, one actor or evaluator too many."""
    learner = Learner(max_actors=1, max_evaluators=1)
    learner.greet(incarnation=5)
    learner.greet("evaluator-0", role="evaluator")
    assert refusal(learner.greet(**({"route": b"x"} | hello)), b"x") == (code, retry)
    assert learner.side.messages_dropped[DropReason.UNKNOWN_SENDER] == 1
    assert (learner.side.connected("actor"), learner.side.connected("evaluator")) == (1, 1)


def test_a_worker_of_another_run_is_refused() -> None:
    """The actor's learner was replaced by that of another run on the same port."""
    hello = Hello(role="actor", worker="a", incarnation=1, software="", env_signature="", resend_from=0, completed=0, produced=0)
    assert refusal(Learner().hear(b"a", hello, run="other")) == (RefusalCode.RUN, False)


def test_bytes_that_are_no_message_are_refused_and_another_protocol_for_good() -> None:
    """A worker of another version, or a port scanner."""
    learner = Learner()
    assert refusal(learner.handle(e.Undecodable(route=b"a", detail="x" * 9999))) == (RefusalCode.DECODE, True)
    assert refusal(learner.handle(e.Undecodable(route=b"a", detail="", protocol=True))) == (RefusalCode.PROTOCOL, False)
    assert learner.side.messages_dropped[DropReason.DECODE] == 2


def test_a_refusal_that_quotes_the_worker_fits_into_a_header() -> None:
    """A role of a megabyte must not make the answer impossible to send."""
    (answer,) = of(Refusal, Learner().greet(role="x" * 10**6))
    assert len(answer.reason) <= SENTENCE


def test_what_a_worker_says_of_itself_is_cut_short_in_the_log() -> None:
    """32 KiB of nonsense as its release, and as its last words."""
    learner = Learner()
    notes = [*learner.greet(software="\u2603" * 9999), *learner.hear(b"a", Goodbye(reason="\n" * 9999, produced=0))]
    for note in (note for note in notes if isinstance(note, e.LogEvent)):
        assert all(len(value) <= SENTENCE for value in note.fields.values() if isinstance(value, str))


def test_an_unknown_sender_is_refused_and_may_retry() -> None:
    """As after a restart of the learner; a Goodbye gets no answer."""
    learner = Learner()
    assert refusal(learner.send(3)) == (RefusalCode.UNKNOWN_SENDER, True)
    assert learner.hear(b"a", Goodbye(reason="", produced=9)) == []
    assert (learner.side.messages_dropped[DropReason.UNKNOWN_SENDER], learner.books["produced"]) == (2, 0)


def test_a_message_that_only_learners_send_ends_the_worker() -> None:
    """Neither an actor nor an evaluator ever sends one."""
    learner = Learner()
    learner.greet()
    assert refusal(learner.hear(b"a", Credit(acked=0, credits=9, version=0))) == (RefusalCode.ROLE, False)


def test_two_names_on_one_connection_do_no_harm() -> None:
    """A confused worker greets under another name without closing: the first name counts as away."""
    learner = Learner()
    learner.greet("a", route=b"x")
    learner.greet("b", route=b"x")
    assert learner.side.connected("actor") == 1
    assert of(Welcome, learner.greet("a", route=b"y"), b"y")
    assert of(Welcome, learner.greet("b", route=b"x"), b"x")
    assert learner.side.connected("actor") == 2


def test_a_killed_actor_comes_back_where_the_run_is_full() -> None:
    """Its old connection still counts as alive, and is its own."""
    learner = Learner(max_actors=1)
    learner.greet()
    assert of(Welcome, learner.reconnect(incarnation=2), b"x")


# --- the name of a connected worker


@pytest.mark.parametrize(
    "claim", [{"incarnation": 2**62}, {"incarnation": 5, "resend_from": 2**62}, {"incarnation": 4}, {"role": "evaluator"}]
)
def test_the_name_of_a_connected_worker_cannot_be_taken(claim: dict[str, Any]) -> None:
    """A Hello of a larger incarnation, of the same one, of a smaller one, of another role: the holder keeps name and account."""
    learner = Learner()
    learner.greet(incarnation=5)
    before = learner.books
    (probe,) = of(Credit, learner.greet(route=b"x", **claim), b"a")
    assert probe.credits == 2
    assert refusal(learner.greet(route=b"x", **claim), b"x") == (RefusalCode.IN_USE, True)
    assert learner.books == before
    assert any(isinstance(i, e.Experience) for i in learner.send(0))


def test_a_worker_whose_connection_ended_gets_its_name_back_with_the_next_hello() -> None:
    """It was killed and started again; its old connection takes no message any more."""
    learner = Learner()
    learner.greet(incarnation=5)
    assert of(Welcome, learner.reconnect(incarnation=6), b"x")


def test_the_name_of_a_worker_that_is_silent_too_long_is_free() -> None:
    """Its host was paused and replaced: the connection stands, and nothing comes by it."""
    learner = Learner()
    learner.greet(incarnation=5)
    learner.now += 10.1
    assert of(Welcome, learner.greet(route=b"x", incarnation=6), b"x")


def test_a_flood_of_hellos_by_one_name_sends_its_holder_one_credit_per_interval() -> None:
    """Else it would fill the holder's buffers, and a Credit that finds no room would make the holder count as away."""
    learner = Learner()
    learner.greet()
    sent = [of(Credit, learner.greet(route=b"%d" % number, incarnation=9), b"a") for number in range(100)]
    assert sum(map(len, sent)) == 1


def test_a_smaller_incarnation_is_refused_with_the_one_to_greet_as() -> None:
    """The clock of its host stepped back between two starts; the earlier process said Goodbye, or was lost."""
    learner = Learner()
    learner.greet(incarnation=2**40)
    learner.hear(b"a", Goodbye(reason="", produced=0))
    (answer,) = of(Refusal, learner.greet(incarnation=5))
    assert (answer.code, answer.retry, answer.incarnation) == (RefusalCode.SUPERSEDED, True, 2**40 + 1)
    assert of(Welcome, learner.greet(incarnation=2**40 + 1))


def test_no_incarnation_is_so_large_that_none_can_follow() -> None:
    """A hostile Hello by a free name, of the largest number there is, or of the largest that is taken."""
    learner = Learner()
    (answer,) = of(Refusal, learner.greet(incarnation=2**63 - 1))
    assert (answer.code, answer.retry, answer.incarnation) == (RefusalCode.SUPERSEDED, True, 0)
    learner.greet(incarnation=2**62)
    learner.hear(b"a", Goodbye(reason="", produced=0))
    (answer,) = of(Refusal, learner.greet(incarnation=5))
    assert of(Welcome, learner.greet(incarnation=answer.incarnation))


def test_a_checkpoint_of_the_largest_incarnation_ends_nothing() -> None:
    """An earlier release took any number, and kept it."""
    learner = Learner()
    learner.greet()
    state = json.loads(json.dumps(learner.side.saved.state_dict()))
    state["registry"]["workers"][0]["incarnation"] = state["registry"]["forgotten"] = 2**63 - 1
    learner.side.saved.load_state_dict(state)
    (answer,) = of(Refusal, learner.greet(incarnation=5))
    assert of(Welcome, learner.greet(incarnation=answer.incarnation))


def test_a_name_belongs_to_the_key_that_greeted_by_it_until_it_is_given_up() -> None:
    """Two workers with a key each; the second greets by the first one's name while that is away, and after it has left."""
    learner = Learner()
    learner.greet(public_key="one")
    learner = learner.resumed()
    assert refusal(learner.greet(public_key="two", incarnation=9)) == (RefusalCode.IN_USE, True)
    assert of(Welcome, learner.greet(public_key="one"))
    learner.hear(b"a", Goodbye(reason="", produced=0))
    assert of(Welcome, learner.greet(public_key="two", incarnation=9))


# --- credits ---


def test_a_credit_returns_when_its_message_leaves_the_queue_and_not_before() -> None:
    """Arrival frees nothing; the train loop's take does, before training ends."""
    learner = Learner()
    learner.greet()
    assert of(Credit, learner.send(0)) == []
    assert learner.books["queued"] == 4
    (credit,) = of(Credit, learner.handle(e.Taken(items=items(0))))
    assert (credit.acked, credit.credits, learner.books["queued"]) == (1, 2, 4)
    learner.handle(e.Completed(items=items(0)))
    assert (learner.books["trained"], learner.books["queued"]) == (4, 0)


def test_acknowledgements_are_cumulative_and_never_pass_a_waiting_message() -> None:
    """The second message was taken first: it is acknowledged with the first."""
    learner = Learner()
    learner.greet()
    learner.send(0)
    learner.send(1)
    (credit,) = of(Credit, learner.handle(e.Taken(items=items(1))))
    assert credit.acked == 0
    (credit,) = of(Credit, learner.handle(e.Taken(items=items(0))))
    assert credit.acked == 2


def test_windows_together_hold_a_batch_however_few_actors_there_are() -> None:
    """A batch of 7 and two credits each: one actor alone must fill it, or the learner waits for ever."""
    learner = Learner(batch=7)
    assert of(Welcome, learner.greet())[0].credits == 7
    assert of(Credit, learner.greet("b"))[0].credits == 4
    assert learner.side.queue_capacity == 8
    learner.hear(b"b", Goodbye(reason="", produced=0))
    assert of(Credit, learner.tick(1.0))[0].credits == 7


def test_the_capacity_is_that_of_the_actors_expected_and_never_less_than_what_is_queued() -> None:
    """A cut cable: "2 of 0 messages" would be nonsense, and the actors will be back; a departed one's messages still wait."""
    learner = Learner(credits=3)
    assert learner.side.queue_capacity == 3
    for name in "ab":
        learner.greet(name)
        learner.send(0, name)
        learner.send(1, name)
    assert learner.side.queue_capacity == 6
    learner.tick(11.0)
    assert (learner.side.connected("actor"), learner.side.queue_capacity) == (0, 6)
    assert learner.side.open_actors == {"a", "b"}
    learner.tick(60.0)
    assert (learner.side.queue_capacity, learner.side.open_actors) == (4, frozenset())
    learner.handle(e.Taken(items=(*items(0, 1), *items(0, 1, name="b"))))
    assert learner.side.queue_capacity == 3


def test_what_is_sent_without_credit_is_refused() -> None:
    """An actor that ignores its window cannot grow the queue, nor can an evaluator that sends experience."""
    learner = Learner()
    learner.greet()
    assert [bool(of(Credit, learner.send(seq))) for seq in range(3)] == [False, False, True]
    learner.greet("evaluator", role="evaluator")
    assert not any(isinstance(i, e.Experience) for i in learner.send(0, "evaluator"))
    assert learner.books["dropped"] == {"uncredited": 4}  # an evaluator has no credits, and its claim of env steps is refused
    assert learner.side.messages_dropped == {DropReason.UNCREDITED: 2}


def test_waiting_messages_of_earlier_incarnations_hold_credits_of_their_slot() -> None:
    """A worker that greets again and again, by its name or another, cannot grow the queue beyond one window."""
    learner = Learner(max_actors=1)
    learner.greet()
    learner.send(0)
    learner.send(1)
    assert of(Welcome, learner.greet(incarnation=2))[0].credits == 0
    learner.send(0)
    learner.hear(b"a", Goodbye(reason="", produced=4))
    assert of(Welcome, learner.greet("b", incarnation=3), b"b")[0].credits == 0
    learner.send(0, "b")
    assert (learner.side.waiting, learner.side.messages_dropped) == (2, {DropReason.UNCREDITED: 2})
    assert of(Credit, learner.handle(e.Taken(items=items(0))), b"b")[0].credits == 1
    assert any(isinstance(i, e.Experience) for i in learner.send(1, "b"))


def test_both_sides_of_silence_are_filled() -> None:
    """A Credit each heartbeat, to evaluators too."""
    learner = Learner()
    learner.greet("evaluator", role="evaluator")
    assert of(Credit, learner.tick(0.5), b"evaluator") == []
    assert of(Credit, learner.tick(0.5), b"evaluator") == [Credit(acked=0, credits=0, version=0)]


# --- admission ---


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"arrays": ARRAYS | {"reward": np.zeros(5, np.float32)}}, DropReason.SCHEMA),
        ({"arrays": ARRAYS | {"extra": np.zeros(4, np.float32)}}, DropReason.SCHEMA),
        ({"arrays": ARRAYS | {"valid": np.zeros(4, np.bool_)}}, DropReason.SCHEMA),
        ({"arrays": ARRAYS | {"reward": np.full(4, np.nan, np.float32)}}, DropReason.NON_FINITE),
        ({"arrays": ARRAYS | {"reward": np.full(4, 3e38, np.float32)}}, DropReason.OUT_OF_RANGE),
        ({"version": 1}, DropReason.VERSION),
    ],
)
def test_bad_experience_is_refused_counted_once_and_rejected_in_a_credit(fields: dict[str, Any], reason: DropReason) -> None:
    """A shape, a surplus array, a lie about env steps, NaN, a policy that never was: the run goes on."""
    learner = Learner()
    learner.greet()
    out = learner.send(0, **fields)
    (credit,) = of(Credit, out)
    assert [(r.seq, r.reason) for r in credit.rejects] == [(0, reason)]
    assert credit.acked == 1
    assert not any(isinstance(i, e.Experience) for i in out)
    learner.send(0, **fields)
    assert (learner.books["dropped"], learner.books["produced"]) == ({reason: 4}, 4)
    assert any(isinstance(i, e.Experience) for i in learner.send(1))


def test_the_algorithm_may_refuse_what_fits_the_schema() -> None:
    """An action outside the action space."""

    def check(_: ExperienceMessage) -> None:
        raise ProtocolError(DropReason.SCHEMA, "action")

    learner = Learner()
    learner.side = LearnerSide(learner.side.config, check=check)
    learner.handle(e.Published(snapshot=Snapshot(version=0, env_steps=0, precision="fp32", layout="x")))
    learner.greet()
    learner.send(0)
    assert learner.books["dropped"] == {"schema": 4}


SICK = ARRAYS | {"reward": np.full(4, np.nan, np.float32)}


def test_a_worker_that_sends_only_bad_messages_is_evicted_for_a_minute() -> None:
    """Each check costs the learner's time. Its account is closed, its Hello refused, and after a minute it starts anew."""
    learner = Learner()
    learner.greet(produced=8)
    for seq in range(BAD_MESSAGES - 1):
        assert of(Refusal, learner.send(seq, arrays=SICK)) == []
    (answer,) = of(Refusal, learner.send(BAD_MESSAGES - 1, arrays=SICK))
    assert (answer.code, answer.retry) == (RefusalCode.EVICTED, True)
    assert answer.reason == (
        "16 messages were refused, and no experience between them was accepted; correct them, and greet again after 60 s"
    )
    assert (learner.side.evictions, learner.side.connected("actor"), learner.books["in_flight"]) == (1, 0, 0)
    assert refusal(learner.send(BAD_MESSAGES)) == (RefusalCode.UNKNOWN_SENDER, True)
    (answer,) = of(Refusal, learner.greet(incarnation=9))
    assert (answer.code, answer.retry) == (RefusalCode.EVICTED, True)
    assert answer.reason == "'a' was evicted, because its messages were refused; correct its messages, and greet again after 60 s"
    learner.now += 60.0
    assert refusal(learner.greet()) == (RefusalCode.FORGOTTEN, True)
    assert of(Welcome, learner.greet(incarnation=9))


def test_a_new_incarnation_continues_the_count_of_bad_messages() -> None:
    """A Hello before each sixteenth message would spare a worker from eviction. After the eviction it begins with none."""
    learner = Learner()
    for incarnation in range(1, BAD_MESSAGES + 1):
        learner.greet(incarnation=incarnation)
        assert learner.side.evictions == 0
        learner.send(0, arrays=SICK)
    assert learner.side.evictions == 1
    learner.now += 60.0
    learner.greet(incarnation=BAD_MESSAGES + 1)
    learner.send(0, arrays=SICK)
    assert learner.side.evictions == 1


def test_a_worker_that_skips_numbers_while_a_message_waits_is_evicted() -> None:
    """The learner remembers each skipped number until the lowest message is completed; a Hello may not skip more of them."""
    learner = Learner()
    learner.greet()
    for number in range(BAD_MESSAGES + 2):
        assert learner.side.evictions == 0
        learner.send((HOLES + 1) * number, env_steps=0, env_steps_sent=0, arrays=ARRAYS | {"valid": np.zeros(4, np.bool_)})
    (worker,) = learner.side._registry
    assert (learner.side.evictions, len(worker.ahead)) == (1, HOLES)
    learner = Learner()
    learner.greet()
    learner.send(0)
    assert of(Welcome, learner.greet(resend_from=HOLES + 1, completed=4, produced=4))
    assert refusal(learner.greet(resend_from=HOLES + 2, completed=4, produced=4)) == (RefusalCode.FORGOTTEN, True)


def test_skipped_numbers_are_passed_through_once() -> None:
    """With one pass for each of them, such messages occupied the I/O thread for minutes."""

    class Counted(dict[int, int]):
        passes = 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            return super().__iter__()

    ahead = Counted()
    worker = Worker(
        key=WorkerKey(name="a", incarnation=1), role="actor", index=0, generation=0, waiting={0: 4}, expected=1, ahead=ahead
    )
    worker.skip(HOLES, 8)
    assert (ahead.passes, len(ahead), sum(ahead.values())) == (1, HOLES - 1, 8)


def test_a_sound_message_between_bad_ones_keeps_its_worker() -> None:
    """An environment that fails now and then; and policies that were rolled back, of which a window is refused at once."""
    learner = Learner()
    learner.greet()
    for seq in range(40):
        learner.send(seq, **({} if seq % 10 == 9 else {"arrays": SICK}))
        if seq % 10 == 9:
            learner.handle(e.Taken(items=items(seq)))
            learner.handle(e.Completed(items=items(seq)))
    for seq in range(40, 80):
        learner.send(seq, version=9)
    assert (learner.side.evictions, learner.side.connected("actor")) == (0, 1)


def test_a_welcomed_worker_that_sends_bytes_that_are_no_messages_is_evicted_too() -> None:
    """A flood after a Hello evicts the worker; a connection that never greeted has no worker to evict."""
    learner = Learner()
    learner.greet()
    codes = [refusal(learner.handle(e.Undecodable(route=b"a", detail="")))[0] for _ in range(BAD_MESSAGES)]
    assert codes == [RefusalCode.DECODE] * (BAD_MESSAGES - 1) + [RefusalCode.EVICTED]
    assert refusal(learner.handle(e.Undecodable(route=b"a", detail=""))) == (RefusalCode.DECODE, True)


def test_reports_of_episodes_are_checked_for_each_worker_and_what_counts_enters_the_queue() -> None:
    """The check of one worker carries its sums; it may leave episodes out."""
    learner, seen = Learner(), []

    def episodes() -> Callable[[ExperienceMessage], ExperienceMessage]:
        seen.append([])

        def check(message: ExperienceMessage) -> ExperienceMessage:
            seen[-1].append(message.seq)
            return replace(message, arrays={"valid": message.arrays["valid"]})

        return check

    learner.side = LearnerSide(learner.side.config, episodes=episodes)
    learner.handle(e.Published(snapshot=Snapshot(version=0, env_steps=0, precision="fp32", layout="x")))
    learner.greet()
    admitted = [i for seq in range(2) for i in learner.send(seq) if isinstance(i, e.Experience)]
    learner.greet("b")
    learner.send(0, "b")
    assert seen == [[0, 1], [0]]
    assert [list(admit.arrays) for admit in admitted] == [["valid"], ["valid"]]


def test_a_refusal_that_did_not_arrive_is_sent_again() -> None:
    """Its Credit was lost with the connection, or never left: the message would hold a credit for ever."""
    learner = Learner(credits=3)
    learner.greet()
    learner.send(0)
    (credit,) = of(Credit, learner.send(1, version=9))
    assert of(Credit, learner.handle(e.Unsent(route=b"a", message=credit))) == []
    assert [r.seq for r in of(Credit, learner.tick(1.0))[0].rejects] == [1]
    learner.greet()
    learner.send(0)
    assert [(r.seq, r.reason) for r in of(Credit, learner.send(1, version=9))[0].rejects] == [(1, DropReason.DUPLICATE)]
    assert learner.books["dropped"] == {"version": 4}


def test_the_rejects_of_a_worker_that_reads_nothing_fit_into_one_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends arrays with names in four-byte letters until its buffers are full, and then looks at the answer."""
    monkeypatch.setattr(learner_side, "BAD_MESSAGES", 1000)
    learner = Learner()
    learner.greet()
    arrays = {"\U0001d538" * 60 + chr(0x1D538 + i): ARRAYS["reward"] for i in range(20)}
    for seq in range(200):
        (credit,) = of(Credit, learner.send(seq, arrays=ARRAYS | arrays))
        assert codec.encode(Envelope(run="run", message=credit))
        learner.handle(e.Unsent(route=b"a", message=credit))
    assert len(credit.rejects) > 1


# --- loss, duplicates, gaps ---


def test_what_is_sent_again_is_taken_once() -> None:
    """After a reconnect the actor re-sends what was not acknowledged; one message had arrived, one had not."""
    learner = Learner()
    learner.greet()
    learner.send(0)
    learner.reconnect(produced=8)
    out = learner.hear(b"x", Trajectory(seq=0, version=0, env_steps=4, env_steps_sent=4, arrays=ARRAYS))
    assert of(Credit, out, b"x")[0].acked == 0
    out = learner.hear(b"x", Trajectory(seq=1, version=0, env_steps=4, env_steps_sent=8, arrays=ARRAYS))
    assert [(i.worker, i.seq) for i in out if isinstance(i, e.Experience)] == list(items(1))
    assert (learner.side.messages_dropped[DropReason.DUPLICATE], learner.side.reconnects) == (1, 1)
    assert (learner.books["produced"], learner.books["queued"]) == (8, 8)


def test_a_gap_is_counted_in_messages_and_in_env_steps() -> None:
    """Two messages are lost: the next one contains their env steps."""
    learner = Learner()
    learner.greet()
    learner.send(0)
    learner.send(3, env_steps_sent=4 + 11 + 4)
    assert learner.side.messages_dropped[DropReason.GAP] == 2
    assert learner.books == {"produced": 19, "trained": 0, "queued": 8, "in_flight": 0, "dropped": {"gap": 11}}


def test_what_an_actor_gave_up_is_a_gap_from_its_hello_on() -> None:
    """It could not be decoded, and will not be sent again."""
    learner = Learner()
    learner.greet()
    learner.greet(resend_from=1, completed=4, produced=4)
    assert (learner.books["dropped"], learner.side.messages_dropped[DropReason.GAP]) == ({"gap": 4}, 1)


# --- snapshots ---


def test_a_want_is_answered_once_and_with_the_newest_only() -> None:
    """A slow actor misses versions and costs nothing; a late joiner is served at once."""
    learner = Learner()
    learner.greet()
    (first,) = of(Snapshot, learner.hear(b"a", SnapshotWanted(after=-1)))
    assert first.version == 0
    for version in (1, 2):
        assert (
            of(
                Snapshot,
                learner.handle(e.Published(snapshot=Snapshot(version=version, env_steps=0, precision="fp32", layout="x"))),
            )
            == []
        )
    (newest,) = of(Snapshot, learner.hear(b"a", SnapshotWanted(after=0)))
    assert newest.version == 2
    assert of(Snapshot, learner.hear(b"a", SnapshotWanted(after=2))) == []
    assert of(Snapshot, learner.tick(1.0)) == []
    (unsent,) = of(Snapshot, learner.handle(e.Published(snapshot=Snapshot(version=3, env_steps=0, precision="fp32", layout="x"))))
    assert of(Snapshot, learner.handle(e.Unsent(route=b"a", message=unsent))) == []
    assert of(Snapshot, learner.tick(1.0)) == [unsent]


def test_a_resumed_learner_hands_out_its_older_policy() -> None:
    """The actor holds version 9 of a life that is gone; what it collects with it would be refused."""
    learner = Learner()
    learner.greet()
    (snapshot,) = of(Snapshot, learner.hear(b"a", SnapshotWanted(after=9)))
    assert snapshot.version == 0


# --- evaluations ---

PLAYED = {"episode_return": np.array([1.0, 3.0], np.float32), "episode_length": np.array([5, 6], np.int32)}


def test_evaluations_are_passed_on() -> None:
    """The evaluator's result reaches the train loop."""
    learner, evaluation = Learner(), Evaluation(version=0, mode="greedy", arrays=PLAYED)
    learner.greet("evaluator", role="evaluator")
    assert learner.hear(b"evaluator", evaluation) == [e.Evaluated(message=evaluation)]


def test_an_evaluation_comes_with_the_policy_that_was_played() -> None:
    """It is several versions old by then; the last one that was sent to the evaluator is kept, and no other."""
    learner = Learner()
    learner.greet("evaluator", role="evaluator")

    def played(version: int) -> Snapshot | None:
        (evaluated,) = learner.hear(b"evaluator", Evaluation(version=version, mode="greedy", arrays=PLAYED))
        assert isinstance(evaluated, e.Evaluated)
        return evaluated.snapshot

    assert played(0) is None
    (first,) = of(Snapshot, learner.hear(b"evaluator", SnapshotWanted(after=-1)), b"evaluator")
    for version in (1, 2):
        learner.handle(e.Published(snapshot=Snapshot(version=version, env_steps=0, precision="fp32", layout="x")))
    assert played(0) == first
    (newest,) = of(Snapshot, learner.hear(b"evaluator", SnapshotWanted(after=0)), b"evaluator")
    assert newest.version == 2
    learner.tick(1.0)
    assert [played(version) for version in (0, 2)] == [None, newest]


def test_a_policy_of_a_killed_learner_is_no_policy_of_its_successor() -> None:
    """The successor continues from version 50, and makes another version 120: the result of the first one is not of this run."""

    def taken(version: int) -> bool:
        out = learner.hear(b"evaluator", Evaluation(version=version, mode="greedy", arrays=PLAYED))
        return any(isinstance(i, e.Evaluated) for i in out)

    learner = Learner(begins_at=50)
    learner.greet("evaluator", role="evaluator")
    learner.handle(e.Published(snapshot=Snapshot(version=130, env_steps=0, precision="fp32", layout="x")))
    assert [taken(version) for version in (50, 120)] == [True, False]
    learner.tick(1.0)
    learner.hear(b"evaluator", SnapshotWanted(after=-1))
    assert [taken(130), taken(120)] == [True, False]


def test_no_policy_is_kept_for_a_worker_that_left() -> None:
    """Evaluators that come and go do not fill the learner's memory."""
    learner = Learner()
    learner.greet("evaluator", role="evaluator")
    learner.hear(b"evaluator", SnapshotWanted(after=-1))
    assert [worker.snapshot is not None for worker in learner.side._registry] == [True]
    learner.hear(b"evaluator", Goodbye(reason="the end", produced=0))
    assert [worker.snapshot for worker in learner.side._registry] == [None]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mode": "lucky"}, DropReason.SCHEMA),
        ({"arrays": {}}, DropReason.SCHEMA),
        ({"arrays": {name: array[:0] for name, array in PLAYED.items()}}, DropReason.SCHEMA),
        ({"arrays": {name: np.ones(2**15 + 1, array.dtype) for name, array in PLAYED.items()}}, DropReason.SCHEMA),
        ({"arrays": PLAYED | {"episode_length": np.ones(1, np.int32)}}, DropReason.SCHEMA),
        ({"arrays": PLAYED | {"episode_length": np.array([5, 0], np.int32)}}, DropReason.EPISODES),
        ({"arrays": PLAYED | {"episode_return": np.array([np.nan, 1.0], np.float32)}}, DropReason.NON_FINITE),
        ({"version": 1}, DropReason.VERSION),
    ],
)
def test_a_bad_evaluation_is_refused_counted_and_rejected_in_a_credit(fields: dict[str, Any], reason: DropReason) -> None:
    """Of another release, of a broken environment, of a policy that died with an earlier learner: the evaluator reads why."""
    learner = Learner()
    learner.greet("evaluator", role="evaluator")
    out = learner.hear(b"evaluator", Evaluation(**({"version": 0, "mode": "greedy", "arrays": PLAYED} | fields)))
    assert not any(isinstance(i, e.Evaluated) for i in out)
    (reject,) = of(Credit, out, b"evaluator")[0].rejects
    assert (reject.seq, reject.reason) == (0, reason)
    assert learner.side.messages_dropped == {reason: 1}
    sound = learner.hear(b"evaluator", Evaluation(version=0, mode="sampled", arrays=PLAYED))
    assert any(isinstance(i, e.Evaluated) for i in sound)


def test_a_flood_of_evaluations_is_refused() -> None:
    """Each would write a line of the log and a row of the learning curve. A new incarnation may send no more of them."""
    learner, evaluation = Learner(), Evaluation(version=0, mode="greedy", arrays=PLAYED)
    learner.greet("evaluator", role="evaluator")
    taken = [e.Evaluated(message=evaluation) in learner.hear(b"evaluator", evaluation) for _ in range(5)]
    learner.greet("evaluator", role="evaluator", incarnation=2)
    taken += [e.Evaluated(message=evaluation) in learner.hear(b"evaluator", evaluation) for _ in range(5)]
    assert taken == [True] * EVALUATIONS + [False] * (10 - EVALUATIONS)
    assert learner.side.messages_dropped == {DropReason.UNCREDITED: 10 - EVALUATIONS}
    learner.tick(1.0)
    assert e.Evaluated(message=evaluation) in learner.hear(b"evaluator", evaluation)


def test_an_actor_may_not_evaluate() -> None:
    """An evaluation must come from an evaluator."""
    learner = Learner()
    learner.greet()
    out = learner.hear(b"a", Evaluation(version=0, mode="greedy", arrays=PLAYED))
    assert refusal(out) == (RefusalCode.ROLE, False)
    assert not any(isinstance(i, e.Evaluated) for i in out)


# --- a learner's restart ---


def test_what_was_trained_after_the_checkpoint_is_rolled_back() -> None:
    """It was acknowledged, so nobody can send it again; its weights are gone."""
    learner = Learner()
    learner.greet()
    learner.send(0)
    resumed = learner.resumed()
    resumed.greet(resend_from=2, completed=8, produced=8)
    assert resumed.books == {"produced": 8, "trained": 0, "queued": 0, "in_flight": 0, "dropped": {"rolled_back": 8}}
    assert resumed.side.messages_dropped[DropReason.GAP] == 0


def killed_after_its_checkpoint() -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint of one actor with 1 message completed, and the accounts when the learner was killed.

    Since then 2 more of that actor were trained on and 1 waits; another actor joined, 1 message, and a third has left.
    """
    learner = Learner(credits=9)
    learner.greet("a")
    complete(learner, "a", 0)
    learner.greet("c")
    checkpoint = json.loads(json.dumps(learner.side.saved.state_dict()))
    complete(learner, "a", 1, 2)
    learner.send(3, "a")
    learner.hear(b"a", Report(produced=20))
    learner.greet("b")
    complete(learner, "b", 0)
    learner.hear(b"c", Goodbye(reason="", produced=5))
    return checkpoint, json.loads(json.dumps(learner.side.saved.state_dict()))


def complete(learner: Learner, name: str, *seqs: int) -> None:
    """Messages of an actor that are trained on."""
    for seq in seqs:
        learner.send(seq, name)
        learner.handle(e.Taken(items=items(seq, name=name)))
        learner.handle(e.Completed(items=items(seq, name=name)))


def test_what_a_killed_learner_trained_on_after_its_checkpoint_is_rolled_back_though_nobody_is_left_to_say_so() -> None:
    """Everything was killed at once: the accounts that it kept on disk say how much is lost."""
    checkpoint, accounts = killed_after_its_checkpoint()
    resumed = Learner(credits=9)
    resumed.side.saved.load_state_dict(checkpoint)
    resumed.side.saved.load_accounts(accounts)
    resumed.side.check_ledger()
    assert resumed.books == {
        "produced": 29, "trained": 4, "queued": 0, "in_flight": 8, "dropped": {"rolled_back": 17},
    }  # fmt: skip
    resumed.now = 100.0
    resumed.tick(0.0)
    resumed.tick(61.0)
    assert (resumed.books["in_flight"], resumed.books["dropped"]) == (0, {"rolled_back": 17, "worker_lost": 8})


def test_a_worker_that_survived_says_nothing_that_is_counted_twice() -> None:
    """It greets with the account that the file holds already, sends its waiting messages again, and continues."""
    checkpoint, accounts = killed_after_its_checkpoint()
    resumed = Learner(credits=9)
    resumed.side.saved.load_state_dict(checkpoint)
    resumed.side.saved.load_accounts(accounts)
    resumed.greet("a", resend_from=3, completed=12, produced=20)
    complete(resumed, "a", 3, 4)
    assert resumed.books == {
        "produced": 29, "trained": 12, "queued": 0, "in_flight": 0, "dropped": {"rolled_back": 17},
    }  # fmt: skip


def test_accounts_without_a_checkpoint_are_all_rolled_back() -> None:
    """Killed before it had saved anything."""
    _, accounts = killed_after_its_checkpoint()
    fresh = Learner(credits=9)
    fresh.side.saved.load_accounts(accounts)
    fresh.side.check_ledger()
    assert (fresh.books["trained"], fresh.books["dropped"]["rolled_back"], fresh.books["produced"]) == (0, 21, 29)


def break_in(state: dict[str, Any], path: list[Any], value: object) -> dict[str, Any]:
    """The state with one entry replaced, or removed."""
    inner = state
    for part in path[:-1]:
        inner = inner[part]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return state


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["ledger"], None),
        (["ledger", "trained"], None),
        (["ledger", "produced"], "9"),
        (["ledger", "produced"], -9),
        (["registry", "workers", 0, "account"], None),
        (["registry", "workers", 0, "account", "received"], 1.5),
        (["registry", "workers", 0, "incarnation"], "x"),
        (["registry", "generations"], [["actor", 0]]),
    ],
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(path: list[Any], value: object) -> None:
    """A checkpoint of another release, or damaged: the next older one may serve."""
    learner = Learner()
    learner.greet(produced=8)
    before, broken = learner.books, break_in(json.loads(json.dumps(learner.side.saved.state_dict())), path, value)
    for load in (learner.side.saved.load_state_dict, learner.side.saved.load_accounts):
        with pytest.raises(ValueError, match="validation error"):
            load(broken)
    assert learner.books == before


@pytest.mark.parametrize("taken", [False, True])
def test_what_was_queued_at_the_checkpoint_is_sent_again_and_trained(taken: bool) -> None:
    """The acknowledgement had not reached its actor: it still keeps the message."""
    learner = Learner()
    learner.greet()
    learner.send(0)
    if taken:
        learner.handle(e.Taken(items=items(0)))
    resumed = learner.resumed()
    assert resumed.books["in_flight"] == 4
    resumed.greet(produced=4)
    assert any(isinstance(i, e.Experience) for i in resumed.send(0))
    resumed.handle(e.Taken(items=items(0)))
    resumed.handle(e.Completed(items=items(0)))
    assert resumed.books == {"produced": 4, "trained": 4, "queued": 0, "in_flight": 0, "dropped": {}}


@pytest.mark.parametrize("again", [False, True])
def test_a_message_refused_ahead_of_a_waiting_one_is_not_counted_twice(again: bool) -> None:
    """Message 1 was refused while 0 waited, then came the checkpoint; the actor may or may not have heard of it."""
    learner = Learner()
    learner.greet()
    learner.send(0)
    learner.send(1, version=9)
    resumed = learner.resumed()
    resumed.greet(produced=8)
    resumed.send(0)
    if again:
        assert of(Credit, resumed.send(1, version=9))[0].rejects[0].seq == 1
    resumed.send(2)
    assert resumed.books == {"produced": 12, "trained": 0, "queued": 8, "in_flight": 0, "dropped": {"version": 4}}
    assert resumed.side.messages_dropped[DropReason.GAP] == 0


def test_a_message_refused_ahead_stays_refused_though_the_one_before_it_never_comes() -> None:
    """Number 0 is lost, and the resumed learner has 1 already: the next message contains the env steps of 0."""
    learner = Learner()
    learner.greet()
    learner.send(0)
    learner.send(1, version=9)
    resumed = learner.resumed()
    resumed.greet(produced=8)
    resumed.send(1)
    assert resumed.side.messages_dropped[DropReason.DUPLICATE] == 1
    resumed.send(2)
    assert resumed.books == {"produced": 12, "trained": 0, "queued": 4, "in_flight": 0, "dropped": {"version": 4, "gap": 4}}


def test_what_a_departed_actor_had_queued_is_rolled_back() -> None:
    """It said Goodbye before the checkpoint: nobody can send it again."""
    learner = Learner()
    learner.greet()
    learner.send(0)
    learner.hear(b"a", Goodbye(reason="", produced=4))
    resumed = learner.resumed()
    assert resumed.books == {"produced": 4, "trained": 0, "queued": 0, "in_flight": 0, "dropped": {"rolled_back": 4}}
    assert refusal(resumed.greet()) == (RefusalCode.FORGOTTEN, True)


def test_an_actor_that_died_with_its_learner_is_lost_in_time() -> None:
    """The resumed learner gives it the same time to come back as any other."""
    learner = Learner()
    learner.greet(produced=10)
    resumed = learner.resumed()
    resumed.now = 1000.0
    resumed.tick(0.0)
    resumed.tick(60.0)
    assert resumed.books["in_flight"] == 10
    resumed.tick(1.0)
    assert resumed.books["dropped"] == {"worker_lost": 10}


def test_names_keep_their_numbers_over_a_restart() -> None:
    """The index picks an actor's random streams."""
    learner = Learner()
    for name in "ab":
        learner.greet(name)
    (welcome,) = of(Welcome, learner.resumed().greet("b"), b"b")
    assert (welcome.index, welcome.generation) == (1, 0)


def test_an_incarnation_that_only_a_killed_learner_knew_is_taken_with_what_it_kept() -> None:
    """It joined after the checkpoint: nothing of it is in these books, so nothing can be counted twice."""
    learner = Learner().resumed()
    learner.greet(resend_from=1, completed=4, produced=8)
    assert any(isinstance(i, e.Experience) for i in learner.send(1))
    assert learner.books == {"produced": 8, "trained": 0, "queued": 4, "in_flight": 0, "dropped": {"rolled_back": 4}}


# --- names that come and go ---


def test_a_thousand_names_leave_the_books_right_and_nothing_else() -> None:
    """Default names hold a process id: every crash brings a new one, for weeks."""
    learner = Learner(max_actors=2, max_evaluators=1)
    for number in range(1000):
        name, evaluator = f"host-{number}", f"evaluator-{number}"
        learner.greet(name)
        learner.greet(evaluator, role="evaluator")
        learner.hear(name.encode(), Report(produced=8))
        learner.send(0, name)
        learner.handle(e.Taken(items=items(0, name=name)))
        learner.handle(e.Completed(items=items(0, name=name)))
        learner.tick(61.0)
        learner.tick(61.0)
    assert learner.books == {"produced": 8000, "trained": 4000, "queued": 0, "in_flight": 0, "dropped": {"worker_lost": 4000}}
    assert len([*learner.side._registry]) == 3
    assert len(json.dumps(learner.side.saved.state_dict())) < 2000


def test_a_name_finds_its_slot_again_while_slots_are_free() -> None:
    """An actor restarts an hour later; others have come meanwhile, and took what was free."""
    learner = Learner(max_actors=3)
    for name in "ab":
        learner.greet(name)
    learner.hear(b"a", Goodbye(reason="", produced=0))
    learner.greet("c")
    learner.tick(3600.0)
    (welcome,) = of(Welcome, learner.greet("a", incarnation=2))
    assert (welcome.index, welcome.generation) == (0, 1)


def test_a_new_name_takes_the_slot_closed_longest_with_random_streams_of_its_own() -> None:
    """A slot is below `max_actors`, so it is used again; (slot, slot generation) never is."""
    learner = Learner(max_actors=3)
    for name in "abc":
        learner.greet(name)
        learner.tick(1.0)
    learner.hear(b"b", Goodbye(reason="", produced=0))
    learner.tick(1.0)
    learner.hear(b"c", Goodbye(reason="", produced=0))
    welcomes = [of(Welcome, learner.greet(name), name.encode())[0] for name in "de"]
    assert [(welcome.index, welcome.generation) for welcome in welcomes] == [(1, 1), (2, 1)]
    (welcome,) = of(Welcome, learner.resumed(max_actors=3).greet("e", incarnation=2), b"e")
    assert (welcome.index, welcome.generation) == (2, 2)


def test_an_away_worker_loses_its_slot_after_the_closed_ones_and_is_logged() -> None:
    """A cut cable, and a new actor that needs the slot: what was in flight is dropped before 60 s are over."""
    learner = Learner(max_actors=2)
    learner.greet("gone")
    learner.tick(9.0)
    learner.greet("away", produced=8)
    learner.hear(b"gone", Goodbye(reason="", produced=0))
    learner.tick(11.0)
    learner.greet("b")
    assert learner.books["in_flight"] == 8
    out = learner.greet("c")
    assert learner.books["dropped"] == {"worker_lost": 8}
    assert [note.fields["worker"] for note in out if isinstance(note, e.LogEvent) and note.event == "worker_forgotten"] == [
        "away"
    ]


@pytest.mark.parametrize("resumed", [False, True])
def test_an_incarnation_that_was_forgotten_cannot_come_back_as_new_work(resumed: bool) -> None:
    """Its process was stopped for a day. Its first message was trained on, and it never heard of that: it starts anew."""
    learner = Learner(max_actors=1)
    learner.greet(produced=8)
    learner.send(0)
    learner.handle(e.Taken(items=items(0)))
    learner.handle(e.Completed(items=items(0)))
    learner.tick(61.0)
    learner.greet("b", incarnation=1)
    learner.hear(b"b", Goodbye(reason="", produced=0))
    learner.tick(1.0)
    if resumed:
        learner = learner.resumed(max_actors=1)
    before = learner.books
    assert refusal(learner.greet(route=b"x", produced=8), b"x") == (RefusalCode.FORGOTTEN, True)
    assert learner.books == before
    assert of(Welcome, learner.greet(incarnation=2, route=b"x"), b"x")


def test_a_forgotten_incarnation_starts_anew_where_an_older_one_has_taken_its_name() -> None:
    """Two hosts with one name and other clocks: what the paused one had stepped is in the ledger, and is not counted twice."""
    learner = Learner(max_actors=1)
    learner.greet("a", incarnation=9, produced=8)
    learner.tick(61.0)
    learner.greet("b", incarnation=1)
    learner.hear(b"b", Goodbye(reason="", produced=0))
    learner.greet("a", incarnation=5)
    learner = learner.resumed(max_actors=1)
    before = learner.books
    assert refusal(learner.greet("a", incarnation=9, produced=8, route=b"x"), b"x") == (RefusalCode.FORGOTTEN, True)
    assert learner.books == before


def test_an_incarnation_whose_messages_are_queued_keeps_its_account_where_an_older_one_has_taken_its_name() -> None:
    """A new account under the same key would not know them: the I/O thread would end when they are taken."""
    learner = Learner(max_actors=1)
    learner.greet("a", incarnation=5, produced=4)
    learner.send(0)
    learner.tick(11.0)
    learner.greet("b")
    learner.hear(b"b", Goodbye(reason="", produced=0))
    assert of(Welcome, learner.greet("a", incarnation=4, route=b"x"), b"x")
    assert refusal(learner.greet("a", incarnation=5, route=b"x"), b"x") == (RefusalCode.FORGOTTEN, True)
    learner.handle(e.Taken(items=items(0, incarnation=5)))


def test_an_incarnation_that_was_forgotten_is_known_by_its_queued_messages() -> None:
    """Even one that hides that it has stepped: its messages are still to be completed."""
    learner = Learner(max_actors=1)
    learner.greet(produced=4)
    learner.send(0)
    learner.tick(11.0)
    learner.greet("b")
    learner.hear(b"b", Goodbye(reason="", produced=0))
    assert refusal(learner.greet(route=b"x"), b"x") == (RefusalCode.FORGOTTEN, True)
    learner.handle(e.Taken(items=items(0)))
    learner.handle(e.Completed(items=items(0)))
    assert (learner.books["trained"], learner.books["in_flight"]) == (4, 0)


def test_a_host_whose_clock_is_behind_may_join_after_others_were_forgotten() -> None:
    """Incarnations of different names are readings of different clocks; one that has stepped nothing is safe."""
    learner = Learner(max_actors=1)
    for name, incarnation in (("a", 900), ("b", 800), ("c", 1)):
        assert of(Welcome, learner.greet(name, incarnation=incarnation), name.encode())
        learner.hear(name.encode(), Goodbye(reason="", produced=0))


# --- coming and going ---


def test_a_new_incarnation_closes_the_account_of_the_old() -> None:
    """Kill -9: what was in flight is lost, what had arrived is trained on."""
    learner = Learner()
    learner.greet(produced=10)
    learner.send(0)
    learner.reconnect(incarnation=2)
    assert learner.books["dropped"] == {"worker_lost": 6}
    learner.tick(1.0)
    learner.handle(e.Taken(items=items(0)))
    learner.handle(e.Completed(items=items(0), reason=DropReason.STALE))
    assert learner.books["dropped"] == {"worker_lost": 6, "stale": 4}
    learner.tick(1.0)
    assert items(0)[0][0] not in [worker.key for worker in learner.side._registry]


def test_what_an_actor_stepped_after_its_last_report_is_in_its_closed_account() -> None:
    """It was cut off for longer than the silence limit, and continued until its credits were spent."""
    learner = Learner()
    learner.greet()
    learner.hear(b"a", Report(produced=8))
    learner.tick(20.0)
    learner.tick(100.0)
    assert learner.books["dropped"] == {DropReason.WORKER_LOST: 8}
    for _ in range(2):  # a Hello may come twice
        assert refusal(learner.greet(route=b"x", produced=16), b"x") == (RefusalCode.FORGOTTEN, True)
        assert learner.books["produced"] == 16
        assert learner.books["dropped"] == {DropReason.WORKER_LOST: 16}
    refusal(learner.greet(route=b"x", produced=2**40), b"x")
    assert learner.books["produced"] == 16


def test_a_silent_actor_is_away_then_forgotten_then_a_new_incarnation() -> None:
    """Stopped for minutes: its credits go to the others, its experience is dropped, and it may start over."""
    learner = Learner()
    learner.greet(produced=10)
    learner.tick(10.1)
    assert (learner.side.connected("actor"), learner.books["in_flight"]) == (0, 10)
    learner.tick(50.0)
    assert learner.books["dropped"] == {"worker_lost": 10}
    assert refusal(learner.greet(route=b"x", produced=10), b"x") == (RefusalCode.FORGOTTEN, True)
    assert of(Welcome, learner.greet(incarnation=2))


def test_a_name_stays_with_a_holder_whose_message_may_be_crossing() -> None:
    """10 MB take 20 s on the slowest link, and the limit of silence is 10 s."""
    learner = Learner(schema=(ArraySpec(name="x", dtype="uint8", shape=(10_000_000,)),))
    learner.greet()
    learner.tick(29.0)
    assert not of(Welcome, learner.greet(route=b"x", incarnation=2), b"x")
    learner.tick(2.0)
    assert of(Welcome, learner.greet(route=b"x", incarnation=2), b"x")


def test_an_actor_that_is_not_heard_gets_no_heartbeats() -> None:
    """It receives nothing, so it reconnects, also where only its own messages are lost."""
    learner = Learner()
    learner.greet()
    learner.send(0)
    assert of(Credit, learner.tick(3.0))
    assert not of(Credit, learner.tick(1.0))
    learner.hear(b"a", Report(produced=0, dropped=()))
    assert of(Credit, learner.tick(1.0))


def test_an_actor_whose_message_is_large_gets_heartbeats_while_the_next_one_crosses() -> None:
    """It cannot be heard then: on a link of 0.5 MB/s this message takes 4 s."""
    learner = Learner(schema=(ArraySpec(name="reward", dtype="float32", shape=(500_000,)),))
    learner.greet()
    learner.send(0, env_steps=4, arrays={"reward": np.zeros(500_000, np.float32)})
    learner.tick(2.0)
    assert of(Credit, learner.tick(4.9))
    assert not of(Credit, learner.tick(1.0))


def test_a_slot_that_the_killed_learner_had_given_away_has_one_holder() -> None:
    """Its accounts name the earlier holder too, closed, and the successor forgets that one."""
    killed = Learner(max_actors=2)
    killed.greet("a")
    killed.greet("c")
    (earlier, _) = json.loads(json.dumps(killed.side.saved.accounts()))["registry"]["workers"]
    killed.hear(b"a", Goodbye(reason="done", produced=0, dropped=()))
    killed.greet("b")
    accounts = json.loads(json.dumps(killed.side.saved.accounts()))
    accounts["registry"]["workers"].insert(0, earlier | {"closed": True})
    successor = Learner(max_actors=2)
    successor.side.saved.load_accounts(accounts)
    welcomes = [of(Welcome, successor.greet(name, incarnation=2), name.encode()) for name in ("b", "a")]
    assert [welcome.index for (welcome,) in welcomes] == [0, 1]


def test_an_incarnation_that_was_replaced_before_the_checkpoint_is_counted_once() -> None:
    """Its messages were still in the queue, and one was trained on after it: the accounts of the killed learner name it."""
    killed = Learner(credits=4)
    killed.greet()
    for seq in range(3):
        killed.send(seq)
    killed.greet(incarnation=2)
    killed.send(0)
    checkpoint, accounts = (
        json.loads(json.dumps(state())) for state in (killed.side.saved.state_dict, killed.side.saved.accounts)
    )
    killed.handle(e.Taken(items=items(0)))
    killed.handle(e.Completed(items=items(0)))
    closed = killed.side.saved.changed_accounts([], closed=True)
    accounts["registry"]["workers"] = closed["workers"] + accounts["registry"]["workers"]
    resumed = Learner(credits=3)
    resumed.side.saved.load_state_dict(checkpoint)
    resumed.side.saved.load_accounts(accounts)
    resumed.side.check_ledger()
    assert resumed.books["produced"] == 16
    (welcome,) = of(Welcome, resumed.greet(incarnation=2, produced=4))
    assert welcome.generation == 1
    assert any(isinstance(i, e.Experience) for i in resumed.send(0))
    assert resumed.books == {"produced": 16, "trained": 0, "queued": 4, "in_flight": 0, "dropped": {"rolled_back": 12}}


def test_an_incarnation_that_came_and_went_between_checkpoint_and_accounts_is_rolled_back() -> None:
    """The accounts have the newest incarnation of each name; the ledger beside them has the env steps of all."""
    killed = Learner()
    killed.greet()
    complete(killed, "a", 0)
    checkpoint = json.loads(json.dumps(killed.side.saved.state_dict()))
    complete(killed, "a", 1, 2)
    killed.greet(incarnation=2)
    killed.send(0)
    accounts = json.loads(json.dumps(killed.side.saved.accounts()))
    resumed = Learner()
    resumed.side.saved.load_state_dict(checkpoint)
    resumed.side.saved.load_accounts(accounts)
    resumed.side.check_ledger()
    assert resumed.books == {"produced": 16, "trained": 4, "queued": 0, "in_flight": 4, "dropped": {"rolled_back": 8}}


def test_changed_accounts_are_returned_once_and_closed_ones_on_request() -> None:
    learner = Learner()
    learner.greet(produced=4)

    def changed(*, closed: bool = False) -> list[tuple[str, int, bool]]:
        found = learner.side.saved.changed_accounts([b"a"], closed=closed)
        return [(w["name"], w["account"]["produced"], w["closed"]) for w in found["workers"]] if found else []

    assert changed() == [("a", 4, False)]
    assert changed() == []
    learner.hear(b"a", Goodbye(reason="done", produced=8, dropped=()))
    assert changed() == []
    assert changed(closed=True) == [("a", 8, True)]
    assert changed(closed=True) == []


def test_an_actor_that_was_away_goes_on_where_it_was() -> None:
    """Silent for a while, and not forgotten."""
    learner = Learner()
    learner.greet(produced=4)
    learner.tick(20.0)
    learner.greet(produced=4)
    assert any(isinstance(i, e.Experience) for i in learner.send(0))


def test_goodbye_closes_an_account() -> None:
    """The last counters say what was dropped; what never came is lost."""
    learner = Learner()
    learner.greet()
    learner.hear(b"a", Goodbye(reason="", produced=10, dropped=(Dropped(reason="unfinished", env_steps=7),)))
    assert learner.books == {
        "produced": 10, "trained": 0, "queued": 0, "in_flight": 0, "dropped": {"unfinished": 7, "worker_lost": 3},
    }  # fmt: skip
    assert learner.side.connected("actor") == 0


def test_a_drain_reaches_every_worker_until_it_leaves() -> None:
    """Experience still under way is counted; a known worker may reconnect to say goodbye, a new one may not come."""
    learner = Learner()
    learner.greet()
    (drain,) = of(Drain, learner.handle(e.DrainAsked(reason="solved", deadline_seconds=5.0)))
    assert drain == Drain(reason="solved", deadline_seconds=5.0)
    assert of(Drain, learner.tick(1.0)) == [Drain(reason="solved", deadline_seconds=4.0)]
    assert of(Credit, learner.send(0))[0].rejects[0].reason == DropReason.RUN_ENDED
    assert refusal(learner.greet("new"), b"new") == (RefusalCode.DRAINING, False)
    out = learner.reconnect(produced=9)
    assert of(Welcome, out, b"x")
    assert of(Drain, out, b"x")
    learner.handle(e.Ended())
    assert learner.books == {
        "produced": 9, "trained": 0, "queued": 0, "in_flight": 0, "dropped": {"run_ended": 4, "worker_lost": 5},
    }  # fmt: skip


# --- hostile numbers ---


@pytest.mark.parametrize(
    "words",
    [
        [Report(produced=100), Report(produced=1)],
        [Report(produced=1, dropped=(Dropped(reason="no such reason", env_steps=2**62),))],
        [Trajectory(seq=2**63 - 1, version=0, env_steps=2**63 - 1, env_steps_sent=0)],
        [Trajectory(seq=2**62, version=0, env_steps=4, env_steps_sent=2**62, arrays=ARRAYS)],
        [Trajectory(seq=0, version=0, env_steps=4, env_steps_sent=2**62, arrays=ARRAYS), Report(produced=3)],
        [Trajectory(seq=1, version=0, env_steps=4, env_steps_sent=0, arrays=ARRAYS), Goodbye(reason="", produced=0)],
        [Trajectory(seq=seq, version=0, env_steps=2**40, env_steps_sent=0) for seq in range(50)],
        [SnapshotWanted(after=2**62), Evaluation(version=2**62, mode="x" * 9999)],
        [
            Hello(
                role="actor", worker="a", incarnation=1, software="", env_signature="", resend_from=2**62, completed=1, produced=0
            )
        ],
        [
            Hello(
                role="actor", worker="a", incarnation=1, software="", env_signature="", resend_from=0, completed=2**62, produced=0
            )
        ],
    ],
)
def test_hostile_numbers_neither_raise_nor_unbalance(words: list[Message]) -> None:
    """Each event checks the ledger; an honest actor beside the liar is served as before, and a checkpoint can be made."""
    learner = Learner()
    learner.greet("honest")
    learner.greet()
    for word in words:
        learner.hear(b"a", word)
    assert any(isinstance(i, e.Experience) for i in learner.send(0, "honest"))
    assert learner.books["produced"] <= 24  # 4 of the honest worker, a window and two rollouts of the other, a message
    resumed = learner.resumed()
    resumed.greet()
    for word in words:
        resumed.hear(b"a", word)
    resumed.handle(e.Ended())
    assert resumed.books["in_flight"] == 0


CLAIM = 16  # env steps beyond those that arrived: a window of 2 rollouts, the one under way, one dropped; 4 each


@pytest.mark.parametrize(
    "claim",
    [
        Report(produced=CLAIM + 1),
        Report(produced=0, dropped=(Dropped(reason="unfinished", env_steps=10), Dropped(reason="stale", env_steps=7))),
        Goodbye(reason="", produced=2**40),
        Trajectory(seq=0, version=0, env_steps=CLAIM + 1, env_steps_sent=CLAIM + 1, arrays=ARRAYS),
        Trajectory(seq=3, version=0, env_steps=4, env_steps_sent=CLAIM + 1, arrays=ARRAYS),
        Trajectory(seq=2**40, version=0, env_steps=4, env_steps_sent=8, arrays=ARRAYS),
    ],
)
def test_a_claim_beyond_the_credits_granted_does_not_enter_the_ledger(claim: Message) -> None:
    """The message is counted, the log says why, and the account is as before."""
    learner = Learner()
    learner.greet()
    learner.hear(b"a", Report(produced=CLAIM))
    refused = [note for note in learner.hear(b"a", claim) if isinstance(note, e.LogEvent) and note.event == "claim_refused"]
    assert len(refused) == 1
    assert "found" in refused[0].fields["detail"]
    assert learner.side.messages_dropped == {DropReason.UNCREDITED: 1}
    assert learner.books["produced"] == CLAIM
    assert learner.side.messages_dropped[DropReason.GAP] == 0


def test_a_worker_that_sends_only_impossible_claims_is_evicted() -> None:
    """As after any 16 bad messages in a row."""
    learner = Learner()
    learner.greet()
    for _ in range(BAD_MESSAGES - 1):
        assert of(Refusal, learner.hear(b"a", Report(produced=2**40))) == []
    assert refusal(learner.hear(b"a", Report(produced=2**40))) == (RefusalCode.EVICTED, True)


@pytest.mark.parametrize("claim", [{"completed": 2**40}, {"produced": 2**40}, {"resend_from": 2**40}])
@pytest.mark.parametrize("known", [False, True])
def test_a_hello_with_an_impossible_claim_starts_anew_as_another_incarnation(claim: dict[str, Any], *, known: bool) -> None:
    """A learner that is the first of its run has no predecessor that may have received those env steps."""
    learner = Learner()
    if known:
        learner.greet()
    (answer,) = of(Refusal, learner.greet(**claim))
    assert (answer.code, answer.retry) == (RefusalCode.FORGOTTEN, True)
    assert learner.books["produced"] == 0
    assert learner.side.messages_dropped == {DropReason.UNCREDITED: 1}
    assert of(Welcome, learner.greet(incarnation=answer.incarnation))


def test_a_gap_before_a_message_that_was_completed_earlier_has_the_env_steps_of_the_missing_one():
    """Of messages 0 to 5, of 10 env steps each, 3 is missing, 4 arrives, and 5 was completed before the checkpoint."""
    key, account = WorkerKey(name="a", incarnation=1), Account(produced=60, received=40)
    worker = Worker(key=key, role="actor", index=0, generation=0, expected=3, ahead={5: 10}, account=account)
    assert worker.missing(4, 40) == (1, 10)
    assert worker.missing(6, 60) == (2, 20)


def test_a_resumed_learner_takes_the_first_hello_of_an_incarnation_at_its_word_and_no_other_claim() -> None:
    """Its predecessor may have received the env steps, and granted larger windows."""
    learner = Learner().resumed()
    assert of(Welcome, learner.greet(resend_from=2**20, completed=2**22, produced=2**22 + 100))
    assert learner.books["dropped"] == {DropReason.ROLLED_BACK: 2**22}
    learner.hear(b"a", Report(produced=2**22 + 100 + CLAIM))
    assert learner.side.messages_dropped[DropReason.UNCREDITED] == 0
    learner.hear(b"a", Report(produced=2**22 + 101 + CLAIM))
    assert learner.side.messages_dropped[DropReason.UNCREDITED] == 1
    assert learner.books["in_flight"] == 100 + CLAIM


def test_in_lockstep_no_window_is_widened_for_actors_that_are_not_connected_yet():
    """The first of three actors would else collect their share, too, by a policy that is old when it is trained on."""
    learner = Learner(credits=1, batch=3, lockstep=True)
    (first,) = of(Welcome, learner.greet("a"))
    assert first.credits == 1
    assert Learner(credits=1, batch=3).greet("a")[0].message.credits == 3


def test_experience_comes_with_the_slot_of_its_sender():
    """Lockstep goes by slots: names and incarnations differ from run to run."""
    learner = Learner()
    learner.greet("a")
    learner.greet("b")
    learner.reconnect("b", route=b"again", incarnation=2)
    (admitted,) = [i for i in learner.hear(b"again", Trajectory(seq=0, version=0, env_steps=4, env_steps_sent=4, arrays=ARRAYS))
                   if isinstance(i, e.Experience)]  # fmt: skip
    assert (admitted.index, admitted.continues) == (1, True)
