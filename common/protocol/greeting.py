"""Greeting: the checks of a Hello, whatever the algorithm, and the two answers to it, Welcome and Refusal."""

from __future__ import annotations

from typing import NamedTuple

from common.errors import DropReason
from common.protocol import events as e
from common.protocol.accounting import Accounting
from common.protocol.events import RefusalCode, Route, WorkerKey, sentence
from common.protocol.incarnation import Worker, WorkerState
from common.protocol.limits import INCARNATION_MAX
from common.protocol.lockstep_states import ActorState, LockstepStates
from common.protocol.messages import ACTOR_STATE, ROLES, Envelope, Hello, Refusal, Snapshot, Welcome
from common.protocol.session_config import SessionConfig
from common.protocol.worker_registry import WorkerRegistry
from common.units import Seconds


class Objection(NamedTuple):
    """Reason of a refusal, as a code and a sentence; whether a new Hello may help, and whether as a new incarnation."""

    code: RefusalCode
    reason: str
    retry: bool
    new_incarnation: bool = False
    drop_reason: DropReason = DropReason.UNKNOWN_SENDER  # under which the Hello is counted


CHALLENGE_SECONDS: Seconds = 0.25  # between two Credits that try the connection of one worker; a worker greets every 0.5 s
_OWN_NAME = "give each worker its own name"


class Greeting:
    """Answers to Hellos. Owned by `LearnerSide`."""

    def __init__(self, registry: WorkerRegistry, accounting: Accounting, states: LockstepStates, config: SessionConfig) -> None:
        self.reconnects = 0
        self._registry = registry
        self._accounting = accounting
        self._states = states
        self._config = config

    def hello(
        self, route: Route, envelope: Envelope, public_key: str, *, newest: Snapshot | None, draining: bool, now: Seconds
    ) -> list[e.Instruction]:
        """Answer the Hello in `envelope`: connect its worker, or refuse it. `newest` is the newest policy."""
        hello = envelope.message
        assert isinstance(hello, Hello)
        known = self._registry.find(hello)
        same = known if known is not None and known.key.incarnation == hello.incarnation else None
        objection = _check_config(hello, envelope.run, self._config)
        if objection is None and known is not None and self._has_other_connection(known, route, now):
            if not self._is_tested(known, route, now):
                return []  # the worker greets again
            fact = f"a connected worker has the name {hello.worker!r}; {_OWN_NAME}"
            objection = Objection(RefusalCode.IN_USE, fact, retry=True)
        objection = (
            objection
            or _check_evicted(hello, known, now)
            or _check_identity(hello, public_key, known, self._registry)
            or self._check_room(hello, known, draining=draining)
            or self._check_counters(hello, same)
        )
        if objection is not None:
            return self._refuse(route, hello, same, objection)
        return self._accept(route, hello, public_key, known, same, newest=newest, now=now)

    def _has_other_connection(self, worker: Worker, route: Route, now: Seconds) -> bool:
        """Return whether a worker is connected on another connection than `route`, and was heard on it lately."""
        return worker.route not in (None, route) and worker.silent(now) <= self._config.silence_seconds + worker.crossing

    def _is_tested(self, holder: Worker, route: Route, now: Seconds) -> bool:
        """Return whether the connection of a name's holder stood the test for which the last Hello on `route` was the reason.

        Where it was not tested yet, the holder gets a Credit: if that cannot be sent, its connection is closed, and the next
        Hello on `route` succeeds.
        """
        if holder.challenger == route:
            holder.challenger = None
            return True
        if now - holder.challenged_at >= CHALLENGE_SECONDS:  # a flood of Hellos must not fill the holder's buffers
            holder.challenger, holder.challenged_at = route, now
            self._registry.owe_credit(holder)
        return False

    def _check_room(self, hello: Hello, known: Worker | None, *, draining: bool) -> Objection | None:
        """Return why the run has no slot for a worker beside the others of its role that are connected; None where it has."""
        if draining and (known is None or hello.incarnation != known.key.incarnation):
            # A known worker may still send its last counters and a Goodbye.
            return Objection(RefusalCode.DRAINING, "the run is ending", retry=False)
        holds = known is not None and known.route is not None and known.role == hello.role
        others = self._registry.connected(hello.role) - holds
        if others < self._config.slots(hello.role):
            return None
        limit = "actor.count" if self._config.lockstep else "learner.max_actors"
        remedy = f"raise {limit}" if hello.role == "actor" else "end one"
        return Objection(RefusalCode.FULL, f"the run has its {others} {hello.role}s; {remedy} to admit another", retry=True)

    def _check_counters(self, hello: Hello, same: Worker | None) -> Objection | None:
        """Return why the counters of a Hello are refused; None where they are not. `same`: its incarnation, if it is known."""
        reason = self._accounting.check_hello(hello, same)
        if not reason:
            return None
        fact = f"{reason}; greet as the one named here"
        return Objection(RefusalCode.FORGOTTEN, fact, retry=True, new_incarnation=True, drop_reason=DropReason.UNCREDITED)

    def _refuse(self, route: Route, hello: Hello, same: Worker | None, objection: Objection) -> list[e.Instruction]:
        self._accounting.messages_dropped[objection.drop_reason] += 1
        if same is not None and same.state is WorkerState.CLOSED and self._check_counters(hello, same) is None:
            # It stepped on while it was silent, and will count from 0: those env steps are in no other account.
            self._accounting.ledger.report(same.account, hello.produced)
            self._accounting.close(same)
            self._accounting.limit_claims(same)
        incarnation = self._registry.name_incarnation(hello.worker) if objection.new_incarnation else -1
        return refusal(route, objection.code, objection.reason, retry=objection.retry, incarnation=incarnation)

    def _accept(
        self,
        route: Route,
        hello: Hello,
        public_key: str,
        known: Worker | None,
        same: Worker | None,
        *,
        newest: Snapshot | None,
        now: Seconds,
    ) -> list[e.Instruction]:
        notes = [] if same else self._free_slot(hello, known, now)
        worker = same or self._registry.join(WorkerKey(name=hello.worker, incarnation=hello.incarnation), hello.role)
        if self._config.lockstep and worker.role == "actor" and hello.welcomed and worker.state is WorkerState.EXPECTED:
            return [*notes, *self._rolled_back(route, worker, hello)]
        again = worker.state is not WorkerState.EXPECTED
        worker.public_key, worker.challenger = public_key, None
        if worker.route != route:  # on the same connection it is a repeated Hello, and its SnapshotWanted is still open
            self.reconnects += again
            worker.wanted_after = None
        self._registry.connect(worker, route, now)
        # The training of an earlier learner after its last checkpoint is in weights that are lost.
        out = self._accounting.accept_hello(worker, hello, DropReason.GAP if again else DropReason.ROLLED_BACK)
        fields = {"worker": worker.key.name, "role": worker.role, "index": worker.index, "again": again}
        note = e.LogEvent(event="worker_welcomed", fields=fields | {"software": sentence(hello.software)})
        slot = self._states.newest(worker.index) if self._config.lockstep and worker.role == "actor" else None
        state = slot.actor if slot else None
        worker.continues = worker.continues if again else state is None or state.size > 0
        answer = _welcome(worker, self._config, window=self._registry.window(worker), newest=newest, state=state)
        return [e.Send(route=route, message=answer), *notes, note, *out]

    def _rolled_back(self, route: Route, worker: Worker, hello: Hello) -> list[e.Instruction]:
        """Refuse, in lockstep, an incarnation of another learner process, whose experience this learner cannot use."""
        self._accounting.ledger.report(worker.account, hello.produced)
        self._accounting.close(worker, DropReason.ROLLED_BACK)
        fact = "in lockstep an actor goes on from the state of a resumed learner; greet as a new incarnation"
        incarnation = self._registry.name_incarnation(hello.worker)
        return refusal(route, RefusalCode.FORGOTTEN, fact, retry=True, incarnation=incarnation)

    def _free_slot(self, hello: Hello, older: Worker | None, now: Seconds) -> list[e.Instruction]:
        """Close the account of the older incarnation; free a slot for a name that holds none of this role."""
        if older is not None:
            self._accounting.close(older)
            if older.role == hello.role:
                return []
        out: list[e.Instruction] = []
        for worker in self._registry.crowded_out(hello.role, now):
            if worker.state is not WorkerState.CLOSED:
                out.append(away_event("worker_forgotten", worker, worker.silent(now)))
                self._accounting.close(worker)
            self._registry.forget(worker)
        return out


def _check_config(hello: Hello, run: str, config: SessionConfig) -> Objection | None:
    if hello.role not in ROLES:
        return Objection(RefusalCode.ROLE, f"role: found {hello.role!r}, wanted one of {', '.join(ROLES)}", retry=False)
    return check_run(hello, run, config.run, config.env_signature, worker="worker", server="learner")


def check_run(hello: Hello, run: str, wanted: str, signature: str, *, worker: str, server: str) -> Objection | None:
    """Return why a worker is of another run than the `wanted` one, or built an environment of another `signature`; else None."""
    if run not in ("", wanted):
        difference = f"run: found {run!r}, wanted {wanted!r}"
        return Objection(RefusalCode.RUN, f"{difference}; restart this {worker} to join the run", retry=False)
    if hello.env_signature not in ("", signature):
        difference = f"environment signature: found {hello.env_signature}, wanted {signature}"
        return Objection(RefusalCode.ENVIRONMENT, f"{difference}; install the {server}'s environment packages here", retry=False)
    return None


def _check_identity(hello: Hello, public_key: str, known: Worker | None, registry: WorkerRegistry) -> Objection | None:
    """Return why a worker may not use this name, of which `known` is the newest incarnation; None where it may."""
    if hello.incarnation > max(INCARNATION_MAX, registry.named):
        fact = f"incarnation: found {hello.incarnation}, wanted at most {INCARNATION_MAX}; greet as the one named here"
        return Objection(RefusalCode.SUPERSEDED, fact, retry=True, new_incarnation=True)
    fact = "the account of this incarnation is closed; greet as the one named here"
    renew = Objection(RefusalCode.FORGOTTEN, fact, retry=True, new_incarnation=True)
    if known is not None:
        if known.state is not WorkerState.CLOSED:  # a worker that left, or was away for long, may return with a new key
            other_key = known.public_key and public_key and public_key != known.public_key
            owner = "a worker of another key" if other_key else f"an {known.role}"
            if other_key or hello.role != known.role:
                return Objection(RefusalCode.IN_USE, f"the name {hello.worker!r} belongs to {owner}; {_OWN_NAME}", retry=True)
        if hello.incarnation < known.key.incarnation:
            fact = f"a newer incarnation of {hello.worker!r} has greeted; greet as the one named here"
            return Objection(RefusalCode.SUPERSEDED, fact, retry=True, new_incarnation=True)
        if hello.incarnation == known.key.incarnation:
            return renew if known.state is WorkerState.CLOSED else None
    # The counters of a forgotten name are lost, so its trained experience is unknown. All its incarnations are at most
    # `registry.forgotten`: one in that range with env steps may be one of them and must start anew, also where an older one has
    # taken the name since. (It may also have met only a learner that was killed, and then loses the messages that it kept.)
    # An incarnation without env steps is safe, unless there are messages of it: its account is theirs.
    stepped = hello.produced or hello.completed or hello.resend_from
    return renew if registry.keeps(hello) or (stepped and hello.incarnation <= registry.forgotten) else None


def _check_evicted(hello: Hello, known: Worker | None, now: Seconds) -> Objection | None:
    if known is None or now >= known.evicted_until:
        return None
    wait = f"correct its messages, and greet again after {known.evicted_until - now:.0f} s"
    fact = f"{hello.worker!r} was evicted, because its messages were refused; {wait}"
    return Objection(RefusalCode.EVICTED, fact, retry=True)


def _welcome(worker: Worker, config: SessionConfig, *, window: int, newest: Snapshot | None, state: ActorState | None) -> Welcome:
    """Return the Welcome of a worker that is admitted, with the `state` from which an actor goes on in lockstep.

    In lockstep, an actor whose slot has no state yet begins as the first actor at that slot did.
    """
    actor = worker.role == "actor"
    begins = config.lockstep and actor and state is None
    return Welcome(
        arrays={} if state is None or not state.size else {ACTOR_STATE: state},
        index=worker.index * config.ranks + config.rank,  # in the whole run
        generation=0 if begins else worker.generation,
        config=config.run_config,
        env_signature=config.env_signature,
        schema=config.schema if actor else (),
        credits=window if actor else 0,
        version=newest.version if newest else -1,
        heartbeat_seconds=config.heartbeat_seconds,
        incarnation=worker.key.incarnation,
        snapshot_bytes=newest.nbytes if newest else 0,
    )


def refusal(route: Route, code: RefusalCode, reason: str, *, retry: bool, incarnation: int = -1) -> list[e.Instruction]:
    """Return a Refusal to send, and its log event."""
    reason = sentence(reason)
    warning = code != RefusalCode.DRAINING  # the end of a run is no fault
    note = e.LogEvent(event="worker_refused", fields={"route": route.hex(), "code": code, "reason": reason}, warning=warning)
    return [e.Send(route=route, message=Refusal(code=code, reason=reason, retry=retry, incarnation=incarnation)), note]


def away_event(event: str, worker: Worker, silent: Seconds) -> e.LogEvent:
    """Return the log event of a worker that was not heard for `silent` seconds."""
    return e.LogEvent(event=event, fields={"worker": worker.key.name, "silent_seconds": round(silent, 1)}, warning=True)
