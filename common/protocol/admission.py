"""Admission of experience: which messages of welcomed workers enter the queue, and the ledger column of each env step.

A message enters the queue if its number is next, its counters fit the credits of its sender, its policy was published, and its
arrays follow the run's schema, are finite and in range. A refused message is counted by reason, and its sender is informed by the
next Credit. In lockstep each message carries the state of its actor, which the next incarnation at the slot continues.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from common import units
from common.errors import BAD_CONTENT, DropReason, ProtocolError
from common.protocol import events as e
from common.protocol.arrays import check_numbers, check_schema
from common.protocol.events import sentence
from common.protocol.incarnation import HOLES, EpisodeCheck, LockstepState, LockstepStates, RunningEpisodes, Worker
from common.protocol.ledger import Account, Ledger
from common.protocol.limits import OBSERVATION_MAX, REWARD_MAX, SLOWEST_LINK
from common.protocol.messages import (
    ACTOR_STATE,
    MODES,
    ArraySpec,
    Evaluation,
    ExperienceMessage,
    Goodbye,
    Hello,
    Reject,
    Report,
)
from common.protocol.registry import SessionConfig, WorkerRegistry
from common.units import EnvSteps, Seconds, Version

LARGEST = {"reward": REWARD_MAX, "obs": OBSERVATION_MAX, "final_obs": OBSERVATION_MAX, "action": OBSERVATION_MAX}
"""Largest absolute values in the float arrays of a trajectory."""

EVALUATIONS = 4  # of one evaluator in a second: each writes a line of the log and a row of the learning curve
EVALUATION = (
    ArraySpec(name="episode_return", dtype="float32", shape=(-1,)),
    ArraySpec(name="episode_length", dtype="int32", shape=(-1,)),
)


class Admission:
    """Checks experience, evaluations and counters of workers. Owned by `LearnerSide`, which has the connections."""

    def __init__(
        self,
        registry: WorkerRegistry,
        config: SessionConfig,
        *,
        check: Callable[[ExperienceMessage], None],
        episodes: Callable[[], EpisodeCheck],
        resumed: bool,
    ) -> None:
        """As `LearnerSide`."""
        self.ledger = Ledger()
        self.messages_dropped: Counter[str] = Counter()
        self.waiting = 0  # admitted messages with credits that have not returned
        self.states = LockstepStates()
        self.resumed = resumed
        self.draining = False
        self._registry = registry
        self._config = config
        self._check = check
        self._new_episodes = episodes

    # --- counters that workers claim ---

    def report(self, worker: Worker, message: Report | Goodbye) -> list[e.Instruction]:
        """Take over the counters of a worker, unless they claim more than its credits allow."""
        try:
            _check_claim(worker.account.claim(message.produced, message.dropped), limit=self._claim_limit(worker))
        except ProtocolError as error:
            return self._claim_refused(worker, error)
        self.ledger.report(worker.account, message.produced, message.dropped)
        return []

    def check_hello(self, hello: Hello, worker: Worker | None) -> str:
        """Return why the counters of a Hello are refused: they claim more than its credits allow; "" where they do not.

        `worker` is the incarnation of the Hello, if it is known. Its first Hello to a resumed learner has no limit.
        """
        if self.resumed and (worker is None or worker.claim_limit is None):
            return ""  # an earlier learner may have received all of it
        messages, env_steps = (
            worker.missing(hello.resend_from, hello.completed) if worker else (hello.resend_from, hello.completed)
        )
        account = worker.account if worker else Account()
        limit = self._claim_limit(worker) if worker else self._config.in_flight(hello.role)
        try:
            _check_claim(max(env_steps, account.claim(hello.produced)), limit=limit, messages=messages)
        except ProtocolError as error:
            return str(error)
        return ""

    def greeted(self, worker: Worker, hello: Hello, reason: DropReason) -> list[e.Instruction]:
        """Take over the counters of an accepted Hello. Messages that it says will not come are dropped for `reason`."""
        out = self.skip(worker, hello.resend_from, *worker.missing(hello.resend_from, hello.completed), reason)
        self.ledger.report(worker.account, hello.produced)
        self.limit_claims(worker)
        return out

    def limit_claims(self, worker: Worker) -> None:
        """Limit what a worker may claim from its first accepted Hello on. An earlier learner may have granted more credits."""
        if worker.claim_limit is None:
            worker.claim_limit = self._config.in_flight(worker.role) + (worker.account.in_flight if self.resumed else 0)

    def _claim_limit(self, worker: Worker) -> EnvSteps:
        return self._config.in_flight(worker.role) if worker.claim_limit is None else worker.claim_limit

    def _claim_refused(self, worker: Worker, error: ProtocolError) -> list[e.Instruction]:
        """Leave a message with impossible counters out of the ledger: no worker of this project sends it."""
        self.messages_dropped[error.reason] += 1
        worker.bad_messages += 1
        fields = {"worker": worker.key.name, "detail": sentence(str(error))}
        return [e.LogEvent(event="claim_refused", fields=fields, warning=True)]

    # --- experience ---

    def experience(self, worker: Worker, message: ExperienceMessage, newest: Version, now: Seconds) -> list[e.Instruction]:
        """Admit a message to the queue, or count why not. `newest` is the published policy version."""
        if message.seq < worker.expected or message.seq in worker.ahead:
            return self._duplicate(worker, message)
        messages, env_steps = worker.missing(message.seq, message.env_steps_sent - message.env_steps)
        try:
            _check_claim(env_steps + message.env_steps, limit=self._claim_limit(worker), messages=messages)
        except ProtocolError as error:
            return self._claim_refused(worker, error)
        out = self.skip(worker, message.seq, messages, env_steps, DropReason.GAP)
        worker.expect(message.seq + 1)
        self.ledger.receive(worker.account, message.env_steps)
        try:
            message = self._admissible(worker, message, newest)
        except ProtocolError as error:
            self.ledger.drop(error.reason, message.env_steps)
            worker.complete(message.seq, message.env_steps)
            worker.bad_messages += error.reason in BAD_CONTENT
            return out + self._reject("experience_refused", worker, message.seq, error)
        worker.bad_messages = 0
        crossing = sum(array.nbytes for array in message.arrays.values()) / SLOWEST_LINK
        worker.crossing = crossing if math.isinf(worker.crossing) else max(worker.crossing, crossing)
        worker.waiting[message.seq] = message.env_steps
        self.waiting += 1
        self.ledger.queued += message.env_steps
        arrays = message.arrays
        if ACTOR_STATE in arrays:
            out += self._state_admitted(worker, message)
            arrays = {name: array for name, array in arrays.items() if name != ACTOR_STATE}
        admitted = e.Experience(
            worker=worker.key,
            index=worker.index,
            continues=worker.continues,
            seq=message.seq,
            version=message.version,
            env_steps=message.env_steps,
            arrays=arrays,
            arrived_at=now,
        )
        return [*out, admitted]

    def taken(self, worker: Worker, seq: units.Sequence) -> None:
        """Record that a message left the queue: its credit returns."""
        worker.taken[seq] = worker.waiting.pop(seq)
        self.waiting -= 1
        self._registry.owe_credit(worker)

    def completed(self, worker: Worker, seq: units.Sequence, reason: str | None) -> None:
        """Count a taken message as trained on (`reason` None), or as dropped."""
        env_steps = worker.taken.pop(seq)
        worker.complete(seq, env_steps)
        self.states.completed(worker.key, seq, trained=reason is None)
        self.ledger.queued -= env_steps
        if reason is None:
            self.ledger.trained += env_steps
        else:
            self.ledger.drop(reason, env_steps)
            self.messages_dropped[reason] += 1
        self._registry.account_changed(worker)

    def skip(
        self, worker: Worker, seq: units.Sequence, messages: int, env_steps: EnvSteps, reason: DropReason
    ) -> list[e.Instruction]:
        """Drop the messages before `seq` that never arrived, and their env steps."""
        if not messages and not env_steps:
            return []
        worker.skip(seq, env_steps)
        self.ledger.receive(worker.account, env_steps)
        self.ledger.drop(reason, env_steps)
        self.messages_dropped[reason] += messages
        fields = {"worker": worker.key.name, "messages": messages, "env_steps": env_steps, "reason": str(reason)}
        return [e.LogEvent(event="experience_lost", fields=fields, warning=True)]

    def close(self, worker: Worker, reason: DropReason = DropReason.WORKER_LOST) -> None:
        """Close the account of a worker. Its env steps in flight are dropped: no message with them will be accepted."""
        self._registry.close(worker)
        lost = worker.account.in_flight
        worker.account.lost += lost
        self.ledger.receive(worker.account, lost)
        self.ledger.drop(reason, lost)

    def _duplicate(self, worker: Worker, message: ExperienceMessage) -> list[e.Instruction]:
        """Count a message that had arrived; its acknowledgement, or its rejection, may have been lost and is sent again."""
        self.messages_dropped[DropReason.DUPLICATE] += 1
        self._registry.owe_credit(worker)
        if message.seq >= worker.acked and message.seq not in worker.waiting:
            detail = "completed when it first arrived"
            worker.rejects.append(Reject(seq=message.seq, reason=DropReason.DUPLICATE, detail=detail))
        return []

    def _admissible(self, worker: Worker, message: ExperienceMessage, newest: Version) -> ExperienceMessage:
        """Return the message as it enters the queue; raise `ProtocolError` where it must not enter."""
        if self.draining:
            raise ProtocolError(DropReason.RUN_ENDED, "the run is ending")
        room = self._config.window(actors=1) if worker.role == "actor" else 0  # the largest window there can be
        if len(worker.waiting) >= room:
            fact, wanted = "messages in the queue", f"less than {room}"
            raise ProtocolError(DropReason.UNCREDITED, fact, found=len(worker.waiting), wanted=wanted)
        _check_experience(message, schema=self._config.schema, newest=newest)
        self._check(message)
        if worker.episodes is None:
            worker.episodes = self._new_episodes()
            self._continue_episodes(worker, message)
        return worker.episodes(message)

    def _reject(self, event: str, worker: Worker, seq: units.Sequence, error: ProtocolError) -> list[e.Instruction]:
        reject = Reject(seq=seq, reason=error.reason, detail=sentence(str(error)))
        self.messages_dropped[error.reason] += 1
        worker.rejects.append(reject)
        self._registry.owe_credit(worker)
        fields = {"worker": worker.key.name, "seq": seq, "reason": str(error.reason), "detail": reject.detail}
        return [e.LogEvent(event=event, fields=fields, warning=True)]

    # --- evaluations ---

    def evaluation(self, worker: Worker, message: Evaluation, newest: Version, now: Seconds) -> list[e.Instruction]:
        """Pass on an evaluation, or count why not."""
        if now - worker.evaluations_since >= 1.0:
            worker.evaluations_since, worker.evaluations = now, 0
        worker.evaluations += 1
        try:
            _check_evaluation(message, newest=newest, number=worker.evaluations)
        except ProtocolError as error:
            return self._reject("evaluation_refused", worker, 0, error)
        played = worker.snapshot
        known = played is not None and played.version == message.version
        return [e.Evaluated(message=message, snapshot=played if known else None)]

    # --- lockstep ---

    def _state_admitted(self, worker: Worker, message: ExperienceMessage) -> list[e.Instruction]:
        """Keep, in lockstep, the state from which the slot continues. The first empty state is logged."""
        before, state = self.states.newest(worker.index), message.arrays[ACTOR_STATE]
        running = worker.episodes if isinstance(worker.episodes, RunningEpisodes) else None
        self.states.admitted(worker.index, worker.key, message.seq, LockstepState(state, running.state_dict() if running else {}))
        if state.size:
            return []
        if before is None:
            consequence = "a restart of it or of the learner breaks lockstep; its log says why"
            fields = {"worker": worker.key.name, "consequence": consequence}
            return [e.LogEvent(event="actor_state_unreadable", fields=fields, warning=True)]
        worker.continues = worker.continues and not before.actor.size  # it could not continue from the state that it got
        return []

    def _continue_episodes(self, worker: Worker, message: ExperienceMessage) -> None:
        """Continue, in lockstep, the episodes of the slot at the first message of an incarnation."""
        slot, state = self.states.newest(worker.index), message.arrays.get(ACTOR_STATE)
        if slot and slot.actor.size and state is not None and state.size and isinstance(worker.episodes, RunningEpisodes):
            worker.episodes.go_on(slot.episodes, message.seq)


# --- checks ---


def _check_claim(env_steps: EnvSteps, *, limit: EnvSteps, messages: int = 0) -> None:
    """Raise `ProtocolError` where a worker claims more than the credits granted to it allow.

    `env_steps`: claimed beyond those that arrived in messages; `messages`: sequence numbers that it skipped.
    """
    if env_steps > limit:
        wanted = f"at most {limit}: the credits granted, in rollouts"
        raise ProtocolError(DropReason.UNCREDITED, "env steps claimed beyond those that arrived", found=env_steps, wanted=wanted)
    if messages > HOLES:
        raise ProtocolError(DropReason.UNCREDITED, "messages skipped", found=messages, wanted=f"at most {HOLES}")


def _check_experience(message: ExperienceMessage, *, schema: tuple[ArraySpec, ...], newest: Version) -> None:
    """Raise `ProtocolError` unless a published policy acted, and the arrays are the run's, in range, of the claimed env steps."""
    _check_version(message.version, newest)
    check_schema(message.arrays, schema)
    check_numbers(message.arrays, LARGEST)
    valid = message.arrays.get("valid")
    if valid is not None and np.count_nonzero(valid) != message.env_steps:
        wanted = f"{np.count_nonzero(valid)} valid rows"
        raise ProtocolError(DropReason.SCHEMA, "env_steps of the message", found=message.env_steps, wanted=wanted)


def _check_evaluation(message: Evaluation, *, newest: Version, number: int) -> None:
    """Raise `ProtocolError` unless a published policy played, in a known mode, and returns are finite with as many lengths.

    `number` counts the evaluations of the sender in this second, from 1: one that sends too many is refused, too.
    """
    if number > EVALUATIONS:
        raise ProtocolError(DropReason.UNCREDITED, "evaluations in a second", found=number, wanted=f"at most {EVALUATIONS}")
    _check_version(message.version, newest)
    if message.mode not in MODES:
        raise ProtocolError(DropReason.SCHEMA, "mode of an evaluation", found=repr(message.mode[:32]), wanted=" or ".join(MODES))
    check_schema(message.arrays, EVALUATION)
    check_numbers(message.arrays)
    returns, lengths = (message.arrays[spec.name] for spec in EVALUATION)
    if len(returns) == 0 or len(returns) != len(lengths):
        found = f"{len(returns)} returns and {len(lengths)} lengths"
        raise ProtocolError(DropReason.SCHEMA, "episodes of an evaluation", found=found, wanted="as many of both, one at least")


def _check_version(version: Version, newest: Version) -> None:
    if version > newest:
        raise ProtocolError(
            DropReason.VERSION, "policy version that was never published", found=version, wanted=f"at most {newest}"
        )
