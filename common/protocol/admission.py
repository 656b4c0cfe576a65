"""Admission: which experience and evaluations of welcomed workers are accepted, and the ledger column of each env step.

A message enters the queue if its number is next, its counters fit the credits of its sender, its policy was published, and its
arrays follow the run's schema, are finite and in range. A refused message is counted by reason, and its sender is informed by the
next Credit. In lockstep each message carries the state of its actor, which the next incarnation at the slot continues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common import units
from common.errors import BAD_CONTENT, DropReason, ProtocolError
from common.protocol import events as e
from common.protocol.accounting import Accounting
from common.protocol.content import check_evaluation, check_experience
from common.protocol.events import sentence
from common.protocol.incarnation import EpisodeCheck, Worker
from common.protocol.limits import SLOWEST_LINK
from common.protocol.lockstep_states import LockstepStates
from common.protocol.messages import ACTOR_STATE, Evaluation, ExperienceMessage, Reject
from common.protocol.session_config import SessionConfig
from common.protocol.worker_registry import WorkerRegistry
from common.units import Seconds, Version


@dataclass(slots=True)
class Admission:
    """Checks experience and evaluations of workers. Owned by `LearnerSide`, which has the connections."""

    registry: WorkerRegistry
    accounting: Accounting
    states: LockstepStates
    config: SessionConfig
    check: Callable[[ExperienceMessage], None]
    episodes: Callable[[], EpisodeCheck]  # makes the check of one worker's episodes
    waiting: int = 0  # admitted messages with credits that have not returned
    draining: bool = False

    # --- experience ---

    def experience(self, worker: Worker, message: ExperienceMessage, newest: Version, now: Seconds) -> list[e.Instruction]:
        """Admit a message to the queue, or count why not. `newest` is the published policy version."""
        if message.seq < worker.expected or message.seq in worker.ahead:
            return self._duplicate(worker, message)
        messages, env_steps = worker.missing(message.seq, message.env_steps_sent - message.env_steps)
        try:
            self.accounting.check_claim(worker, env_steps + message.env_steps, messages=messages + len(worker.ahead))
        except ProtocolError as error:
            return self.accounting.refuse_claim(worker, error)
        out = self.accounting.skip(worker, message.seq, messages, env_steps, DropReason.GAP)
        worker.expect(message.seq + 1)
        self.accounting.ledger.receive(worker.account, message.env_steps)
        try:
            message = self._admissible(worker, message, newest)
        except ProtocolError as error:
            self.accounting.ledger.drop(error.reason, message.env_steps)
            worker.complete([message.seq], message.env_steps)
            worker.bad_messages += error.reason in BAD_CONTENT
            return out + self._reject("experience_refused", worker, message.seq, error)
        worker.bad_messages = 0
        crossing = message.nbytes / SLOWEST_LINK
        worker.crossing = max(worker.crossing, crossing)
        worker.waiting[message.seq] = message.env_steps
        self.waiting += 1
        self.accounting.ledger.queued += message.env_steps
        arrays = message.arrays
        if ACTOR_STATE in arrays:
            out += self.states.admitted(worker, message)
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
        self.registry.owe_credit(worker)

    def completed(self, worker: Worker, seq: units.Sequence, reason: str | None) -> None:
        """Count a taken message as trained on (`reason` None), or as dropped."""
        env_steps = worker.taken.pop(seq)
        worker.complete([seq], env_steps)
        self.states.completed(worker.key, seq, trained=reason is None)
        self.accounting.ledger.queued -= env_steps
        if reason is None:
            self.accounting.ledger.trained += env_steps
        else:
            self.accounting.ledger.drop(reason, env_steps)
            self.accounting.messages_dropped[reason] += 1
        self.registry.account_changed(worker)

    def _duplicate(self, worker: Worker, message: ExperienceMessage) -> list[e.Instruction]:
        """Count a message that had arrived; its acknowledgement, or its rejection, may have been lost and is sent again."""
        self.accounting.messages_dropped[DropReason.DUPLICATE] += 1
        self.registry.owe_credit(worker)
        if message.seq >= worker.acked and message.seq not in worker.waiting:
            detail = "completed when it first arrived"
            worker.rejects.append(Reject(seq=message.seq, reason=DropReason.DUPLICATE, detail=detail))
        return []

    def _admissible(self, worker: Worker, message: ExperienceMessage, newest: Version) -> ExperienceMessage:
        """Return the message as it enters the queue; raise `ProtocolError` where it must not enter."""
        if self.draining:
            raise ProtocolError(DropReason.RUN_ENDED, "the run is ending")
        room = self.config.window(actors=1) if worker.role == "actor" else 0  # the largest window there can be
        waiting = len(worker.waiting) + self.registry.waiting_before(worker)
        if waiting >= room:
            raise ProtocolError(DropReason.UNCREDITED, "messages in the queue", found=waiting, wanted=f"less than {room}")
        check_experience(message, schema=self.config.schema, newest=newest)
        self.check(message)
        if worker.episodes is None:
            worker.episodes = self.episodes()
            self.states.continue_episodes(worker, message)
        return worker.episodes(message)

    def _reject(self, event: str, worker: Worker, seq: units.Sequence, error: ProtocolError) -> list[e.Instruction]:
        reject = Reject(seq=seq, reason=error.reason, detail=sentence(str(error)))
        self.accounting.messages_dropped[error.reason] += 1
        worker.rejects.append(reject)
        self.registry.owe_credit(worker)
        fields = {"worker": worker.key.name, "seq": seq, "reason": error.reason, "detail": reject.detail}
        return [e.LogEvent(event=event, fields=fields, warning=True)]

    # --- evaluations ---

    def evaluation(self, worker: Worker, message: Evaluation, known: bool, now: Seconds) -> list[e.Instruction]:
        """Pass on an evaluation, or count why not; `known`: this learner has sent that version, or its checkpoint has it."""
        if now - worker.evaluations_since >= 1.0:
            worker.evaluations_since, worker.evaluations = now, 0
        worker.evaluations += 1
        try:
            check_evaluation(message, known=known, number=worker.evaluations)
        except ProtocolError as error:
            return self._reject("evaluation_refused", worker, 0, error)
        played = worker.snapshot
        known = played is not None and played.version == message.version
        return [e.Evaluated(message=message, snapshot=played if known else None)]
