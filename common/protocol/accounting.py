"""Accounting of experience: the ledger of the run, and the counters of workers, which their credits limit.

A worker states the env steps that it stepped and dropped, and which messages it will not send any more. Env steps that arrived
in no message enter the ledger by these statements alone. One that claims more than the credits of its worker allow is refused.
"""

from __future__ import annotations

from collections import Counter

from common import units
from common.errors import DropReason, ProtocolError
from common.protocol import events as e
from common.protocol.events import sentence
from common.protocol.incarnation import HOLES, Worker
from common.protocol.ledger import Account, Ledger
from common.protocol.messages import Goodbye, Hello, Report
from common.protocol.session_config import SessionConfig
from common.protocol.worker_registry import WorkerRegistry
from common.units import EnvSteps


class Accounting:
    """Owner of the ledger and of the counts of dropped messages. `LearnerSide` owns it."""

    def __init__(self, registry: WorkerRegistry, config: SessionConfig, *, resumed: bool) -> None:
        self.ledger = Ledger()
        self.messages_dropped: Counter[str] = Counter()
        self.resumed = resumed
        self._registry = registry
        self._config = config

    # --- counters that workers state ---

    def report(self, worker: Worker, message: Report | Goodbye) -> list[e.Instruction]:
        """Take over the counters of a worker, unless they claim more than its credits allow."""
        try:
            self.check_claim(worker, worker.account.claim(message.produced, message.dropped))
        except ProtocolError as error:
            return self.refuse_claim(worker, error)
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
        account, ahead = (worker.account, len(worker.ahead)) if worker else (Account(), 0)
        limit = self._claim_limit(worker) if worker else self._config.in_flight(hello.role)
        try:
            _check_claim(max(env_steps, account.claim(hello.produced)), limit=limit, messages=messages + ahead)
        except ProtocolError as error:
            return str(error)
        return ""

    def accept_hello(self, worker: Worker, hello: Hello, reason: DropReason) -> list[e.Instruction]:
        """Take over the counters of an accepted Hello. Messages that by its numbers will not come are dropped for `reason`."""
        out = self.skip(worker, hello.resend_from, *worker.missing(hello.resend_from, hello.completed), reason)
        self.ledger.report(worker.account, hello.produced)
        self.limit_claims(worker)
        return out

    # --- limits ---

    def limit_claims(self, worker: Worker) -> None:
        """Limit what a worker may claim from its first accepted Hello on. An earlier learner may have granted more credits."""
        if worker.claim_limit is None:
            worker.claim_limit = self._config.in_flight(worker.role) + (worker.account.in_flight if self.resumed else 0)

    def check_claim(self, worker: Worker, env_steps: EnvSteps, *, messages: int = 0) -> None:
        """Raise `ProtocolError` where a worker claims `env_steps` that its credits do not allow, or skips too many `messages`."""
        _check_claim(env_steps, limit=self._claim_limit(worker), messages=messages)

    def refuse_claim(self, worker: Worker, error: ProtocolError) -> list[e.Instruction]:
        """Leave a message with impossible counters out of the ledger: no worker of this project sends it."""
        self.messages_dropped[error.reason] += 1
        worker.bad_messages += 1
        fields = {"worker": worker.key.name, "detail": sentence(str(error))}
        return [e.LogEvent(event="claim_refused", fields=fields, warning=True)]

    def _claim_limit(self, worker: Worker) -> EnvSteps:
        return self._config.in_flight(worker.role) if worker.claim_limit is None else worker.claim_limit

    # --- env steps that arrive in no message ---

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
        fields = {"worker": worker.key.name, "messages": messages, "env_steps": env_steps, "reason": reason}
        return [e.LogEvent(event="experience_lost", fields=fields, warning=True)]

    def close(self, worker: Worker, reason: DropReason = DropReason.WORKER_LOST) -> None:
        """Close the account of a worker. Its env steps in flight are dropped: no message with them will be accepted."""
        self._registry.close(worker)
        lost = worker.account.in_flight
        worker.account.lost += lost
        self.ledger.receive(worker.account, lost)
        self.ledger.drop(reason, lost)

    @property
    def in_flight(self) -> EnvSteps:
        """Return the env steps in flight by the accounts of all workers."""
        return sum(worker.account.in_flight for worker in self._registry)


def _check_claim(env_steps: EnvSteps, *, limit: EnvSteps, messages: int) -> None:
    if env_steps > limit:
        wanted = f"at most {limit}: the credits granted, in rollouts"
        raise ProtocolError(DropReason.UNCREDITED, "env steps claimed beyond those that arrived", found=env_steps, wanted=wanted)
    if messages > HOLES:
        fact, wanted = "messages skipped or completed early", f"at most {HOLES}"
        raise ProtocolError(DropReason.UNCREDITED, fact, found=messages, wanted=wanted)
