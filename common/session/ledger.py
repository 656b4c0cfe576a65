"""Conservation of experience: produced = trained + queued + in flight + dropped, in env steps, at every moment.

The four right-hand figures are counted where each thing happens; `produced` is what the actors say of themselves.
In flight is what an actor has stepped and the learner has not received: on the wire, waiting for credit at the
actor, or in the rollout being collected. It is derived, and must never be negative: that is the check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import DropReason, InternalError
from common.units import EnvSteps


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
    """The books of the run. `produced` counts closed accounts too; open ones are added by the owner of the accounts."""

    produced: EnvSteps = 0  # of all actors, as far as this run's learners were told
    trained: EnvSteps = 0
    queued: EnvSteps = 0  # received, not yet trained on or dropped
    dropped: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str, env_steps: EnvSteps) -> None:
        """Count `env_steps` that will never be trained on."""
        self.dropped[str(reason)] += env_steps

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
    def restored(cls, state: Mapping[str, Any]) -> Ledger:
        """The ledger of a checkpoint: what was queued or in flight then is accounted for when its actors greet again."""
        return cls(produced=state["produced"], trained=state["trained"], dropped=Counter(state["dropped"]))
