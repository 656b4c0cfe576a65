"""Conservation of experience: produced = trained + queued + in flight + dropped, in env steps, at every moment.

The four right-hand figures are counted where each thing happens; `produced` is what the actors say of themselves.
In flight is what an actor has stepped and the learner has not received: on the wire, waiting for credit at the
actor, or in the rollout being collected. It is derived, and must never be negative: that is the check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import DropReason, InternalError
from common.units import EnvSteps
from common.wire.messages import Dropped


@dataclass(slots=True, kw_only=True)
class Account:
    """The books of one incarnation of one actor, in env steps."""

    produced: EnvSteps = 0  # as last reported
    received: EnvSteps = 0  # of all messages up to the newest, lost ones included: they are dropped, too
    dropped_by_peer: dict[str, EnvSteps] = field(default_factory=dict)  # reason -> never sent: the actor said so

    @property
    def in_flight(self) -> EnvSteps:
        """Env steps stepped by the actor and not yet seen here."""
        return self.produced - self.received - sum(self.dropped_by_peer.values())


@dataclass(slots=True, kw_only=True)
class Ledger:
    """The books of the run, over all its actors and learners; the accounts themselves belong to the learner's session."""

    produced: EnvSteps = 0  # of all actors, as far as this run's learners were told
    trained: EnvSteps = 0
    queued: EnvSteps = 0  # received, not yet trained on or dropped
    dropped: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str, env_steps: EnvSteps) -> None:
        """Count `env_steps` that will never be trained on."""
        self.dropped[str(reason)] += env_steps

    def receive(self, account: Account, env_steps: EnvSteps) -> None:
        """Move `env_steps` of an actor out of flight; the caller says where to."""
        account.received += env_steps
        self.report(account, 0)

    def report(self, account: Account, produced: EnvSteps, dropped: Iterable[Dropped] = ()) -> None:
        """Take over an actor's own counters: they only grow, and never claim less than what has arrived."""
        known, said = {str(reason) for reason in DropReason}, Counter[str]()
        for drop in dropped:
            said[drop.reason if drop.reason in known else DropReason.UNFINISHED.value] += drop.env_steps
        for reason, env_steps in said.items():
            news = max(0, env_steps - account.dropped_by_peer.get(reason, 0))
            account.dropped_by_peer[reason] = account.dropped_by_peer.get(reason, 0) + news
            self.drop(reason, news)
        news = max(0, produced - account.produced, -account.in_flight)
        account.produced += news
        self.produced += news

    @property
    def in_flight(self) -> EnvSteps:
        """What is neither trained, queued nor dropped."""
        return self.produced - self.trained - self.queued - self.dropped.total()

    def check(self, accounts_in_flight: EnvSteps) -> None:
        """Raise `InternalError` unless the books of the run and those of its actors agree to the step."""
        if self.in_flight != accounts_in_flight or accounts_in_flight < 0:
            raise InternalError(
                "the ledger does not balance", found=f"{self.in_flight} in flight ({self.as_dict()})", wanted=accounts_in_flight
            )

    def as_dict(self) -> dict[str, Any]:
        """The form of summary.json; every drop reason is present."""
        return {
            "produced": self.produced,
            "trained": self.trained,
            "queued": self.queued,
            "in_flight": self.in_flight,
            "dropped": {str(reason): self.dropped[str(reason)] for reason in DropReason},
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], accounts_in_flight: EnvSteps) -> Ledger:
        """The ledger of a checkpoint: of what was queued then, open accounts have it in flight again, the rest is lost."""
        ledger = cls(produced=state["produced"], trained=state["trained"], dropped=Counter(state["dropped"]))
        ledger.drop(DropReason.ROLLED_BACK, ledger.in_flight - accounts_in_flight)
        return ledger
