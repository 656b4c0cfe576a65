"""The exact ledger of env steps: what the environments counted, compared with the learner's ledger at the end."""

from __future__ import annotations

import json
from dataclasses import dataclass

from benchmarks.chaos.deployment import UNSEEN, Deployment
from common.runtime.run_directory import RunDirectory
from common.units import EnvSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Counts of env steps over a whole run that has ended."""

    stepped: EnvSteps = 0  # by the environments' own counters, over all incarnations of all actors
    produced: EnvSteps = 0  # by the learner's ledger
    trained: EnvSteps = 0
    open: EnvSteps = 0  # queued or in flight, though the run has ended
    dropped: EnvSteps = 0
    unseen: EnvSteps = 0  # stepped by killed actors after their last message, within the bound of their credits; and in rows of
    # env workers that no policy server received, at most one env step before each new beginning of an environment
    claims: bool = False  # a storm sent env steps that no environment made
    note: str = ""

    @property
    def unaccounted(self) -> EnvSteps:
        """Return the env steps that no column explains."""
        missing = self.stepped - self.unseen - self.produced
        forged = self.claims and missing < 0
        unbalanced = self.produced - self.trained - self.dropped - self.open
        return (0 if forged else abs(missing)) + abs(unbalanced) + abs(self.open)


def close_books(deployment: Deployment, *, claims: bool) -> Books:
    """Return the counts of a run that has ended; `claims`: a storm sent env steps that no environment made."""
    stepped = sum(deployment.steps().values())
    try:
        ledger = json.loads(RunDirectory(deployment.run_dir).summary.read_text())["ledger"]
    except (OSError, ValueError):
        return Books(stepped=stepped, note="the learner left no summary.json")
    reported = any("ledger_unbalanced" in deployment.said(rank) for rank in deployment.learners)
    return Books(
        stepped=stepped,
        produced=ledger["produced"],
        trained=ledger["trained"],
        open=ledger["queued"] + ledger["in_flight"],
        dropped=sum(ledger["dropped"].values()),
        unseen=min(max(0, stepped - ledger["produced"]), deployment.killed * UNSEEN + deployment.begun()),
        claims=claims,
        note="the learner logged ledger_unbalanced" if reported else "",
    )
