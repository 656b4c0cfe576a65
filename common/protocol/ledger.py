"""Conservation of experience: produced = trained + queued + in flight + dropped, in env steps, at any time.

`trained`, `queued` and `dropped` are counted where each event happens; `produced` is reported by the actors. In flight are the
env steps of finished rollouts that the learner has not received: on the wire, or kept at the actor until they can be sent. They
are derived as the difference, and the check is that it is never negative.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from common.errors import DropReason, InternalError
from common.protocol.messages import Dropped
from common.units import EnvSteps

_REASONS: Final = frozenset(map(str, DropReason))


@dataclass(slots=True, kw_only=True)
class Account:
    """The books of one incarnation of one actor, in env steps."""

    produced: EnvSteps = 0  # as last reported
    received: EnvSteps = 0  # of all messages up to the newest, lost ones included: they are dropped, too
    lost: EnvSteps = 0  # of `received`: in flight when the account was closed
    dropped_by_worker: dict[str, EnvSteps] = field(default_factory=dict)  # reason -> never sent, by the actor's reports

    @property
    def in_flight(self) -> EnvSteps:
        """Env steps that the actor reported, did not drop, and that have not arrived."""
        return self.produced - self.received - sum(self.dropped_by_worker.values())

    def drops(self, dropped: Sequence[Dropped]) -> Counter[str]:
        """Return the env steps that the actor dropped, by known reason: as in a report, and none less than in earlier ones."""
        reported = Counter[str]()
        for drop in dropped:
            reported[drop.reason if drop.reason in _REASONS else DropReason.UNFINISHED.value] += drop.env_steps
        return reported | Counter(self.dropped_by_worker)

    def claim(self, produced: EnvSteps, dropped: Sequence[Dropped] = ()) -> EnvSteps:
        """Return the env steps that a report adds to those of all messages that arrived."""
        return max(produced - (self.received - self.lost), self.drops(dropped).total())


@dataclass(slots=True, kw_only=True)
class Ledger:
    """The books of the run, over all its actors and learners; the accounts themselves belong to the learner's session."""

    produced: EnvSteps = 0  # of all actors, as far as they reported it to this run's learners
    trained: EnvSteps = 0
    queued: EnvSteps = 0  # received, not yet trained on or dropped
    dropped: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str, env_steps: EnvSteps) -> None:
        """Count `env_steps` that will never be trained on."""
        self.dropped[str(reason)] += env_steps

    def receive(self, account: Account, env_steps: EnvSteps) -> None:
        """Move `env_steps` of an actor out of flight; the caller counts them in another column."""
        account.received += env_steps
        self.report(account, 0)

    def report(self, account: Account, produced: EnvSteps, dropped: Sequence[Dropped] = ()) -> None:
        """Take over an actor's own counters: they only grow, and never claim less than has arrived."""
        for reason, env_steps in (account.drops(dropped) if dropped else {}).items():
            self.drop(reason, env_steps - account.dropped_by_worker.get(reason, 0))
            account.dropped_by_worker[reason] = env_steps
        added = max(0, produced - account.produced, -account.in_flight)
        account.produced += added
        self.produced += added

    @property
    def in_flight(self) -> EnvSteps:
        """Return the env steps that are neither trained, queued nor dropped."""
        return self.produced - self.trained - self.queued - self.dropped.total()

    def check(self, accounts_in_flight: EnvSteps) -> None:
        """Raise `InternalError` unless the books of the run and those of its actors agree to the step."""
        if self.in_flight != accounts_in_flight or accounts_in_flight < 0:
            raise InternalError(
                "the ledger does not balance", found=f"{self.in_flight} in flight ({self.as_dict()})", wanted=accounts_in_flight
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the form of summary.json; every drop reason is present."""
        return {
            "produced": self.produced,
            "trained": self.trained,
            "queued": self.queued,
            "in_flight": self.in_flight,
            "dropped": {str(reason): self.dropped[str(reason)] for reason in DropReason},
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], accounts_in_flight: EnvSteps) -> Ledger:
        """Return the ledger of a checkpoint: queued env steps are in flight again in open accounts, and lost in others."""
        ledger = cls(produced=state["produced"], trained=state["trained"], dropped=Counter(state["dropped"]))
        ledger.drop(DropReason.ROLLED_BACK, ledger.in_flight - accounts_in_flight)
        return ledger


def sum_counts(counts: Sequence[Any]) -> Any:
    """Return the sum of numbers, or of each number in nested mappings, such as the ledgers of several ranks.

    Raises `KeyError` or `TypeError` where one lacks a key of the first, or has another form.
    """
    first = counts[0]
    return {name: sum_counts([each[name] for each in counts]) for name in first} if isinstance(first, dict) else sum(counts)
