"""One rule that names the bottleneck, the same in the live view, in the doctor and on the dashboard.

Who works all the time holds the others up; who waits is held up. So two shares decide: how much of its time the
learner waits for experience, and how much of theirs the actors wait for credit. `docs/metrics.md` explains the rule.
Pure: shares in, verdict out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

WAITING = 0.15
"""A side that waits less than this is busy: scheduling jitter alone makes a few per cent."""


class Kind(StrEnum):
    """What holds the run up."""

    LEARNER = "learner-bound"
    ACTOR = "actor-bound"
    PACE = "pace-bound"
    BALANCED = "balanced"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The bottleneck; `share` is the part of its time that the busiest phase takes (of the wait, where pace-bound)."""

    kind: Kind
    share: float
    sentence: str


# phase -> (what one does in it, what helps)
_LEARNER = MappingProxyType({
    "collate": ("collates batches", "use smaller observations, or fewer trajectories per update"),
    "train": ("trains", "use a smaller network or fewer epochs, or a GPU"),
    "publish": ("publishes snapshots", "publish less often, or set learner.snapshot_precision=bf16"),
    "checkpoint": ("writes checkpoints", "raise checkpoint.every_seconds"),
})  # fmt: skip
_ACTOR = MappingProxyType({
    "env": ("in the environment", "add actors where cores are free"),
    "act": ("in the network", "add actors where cores are free, or set actor.precision=bf16"),
    "experience": ("on what they make of their rollouts", "add actors where cores are free, or use a smaller network"),
    "encode": ("encoding messages", "use smaller observations, or a longer rollout"),
    "snapshot": ("on snapshots", "use a longer rollout, or set learner.snapshot_precision=bf16"),
})  # fmt: skip


def find_bottleneck(*, learner: Mapping[str, float], actors: Mapping[str, float]) -> Verdict:
    """Name the bottleneck from the time per phase of the learner and of all actors together.

    Any unit will do (seconds of a window, shares): each side is taken relative to its own sum. `actors` may be empty
    where nobody could read them; then the learner alone decides.
    """
    learner, actors = _shares(learner), _shares(actors)
    if not learner:
        return Verdict(kind=Kind.UNKNOWN, share=0.0, sentence="unknown: nothing has been measured yet")
    starved, held = learner.get("wait", 0.0), actors.get("credit_wait", 0.0)
    if starved >= WAITING and held >= WAITING:
        return _pace_bound(starved, held)
    if starved >= WAITING:
        return _actor_bound(starved, actors)
    if held >= WAITING or not actors:
        return _learner_bound(learner, held)
    share = 1.0 - starved
    busy = f"the learner works {_percent(share)} of the time, the actors {_percent(1.0 - held)}"
    return Verdict(kind=Kind.BALANCED, share=share, sentence=f"balanced: {busy}")


def _pace_bound(starved: float, held: float) -> Verdict:
    who = f"the learner waits {_percent(starved)} for experience while actors wait {_percent(held)} for credit"
    return Verdict(
        kind=Kind.PACE,
        share=min(starved, held),
        sentence=f"pace-bound: {who}; in lockstep that is the price, else raise learner.credits or lower learner.batch",
    )


def _actor_bound(starved: float, actors: Mapping[str, float]) -> Verdict:
    phase, share = _busiest(actors, _ACTOR)
    where, advice = _ACTOR[phase]
    what = f"; actors spend {_percent(share)} {where}" if share else ""
    return Verdict(
        kind=Kind.ACTOR,
        share=share,
        sentence=f"actor-bound: the learner waits {_percent(starved)} for experience{what}; {advice}",
    )


def _learner_bound(learner: Mapping[str, float], held: float) -> Verdict:
    phase, share = _busiest(learner, _LEARNER)
    does, advice = _LEARNER[phase]
    what = f", actors wait {_percent(held)} for credit" if held else ""
    return Verdict(
        kind=Kind.LEARNER,
        share=share,
        sentence=f"learner-bound: the learner {does} {_percent(share)} of the time{what}; {advice}",
    )


def _busiest(shares: Mapping[str, float], phases: Mapping[str, tuple[str, str]]) -> tuple[str, float]:
    phase = max(phases, key=lambda name: shares.get(name, 0.0))
    return phase, shares.get(phase, 0.0)


def _shares(times: Mapping[str, float]) -> dict[str, float]:
    whole = sum(times.values())
    return {name: time / whole for name, time in times.items()} if whole > 0 else {}


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")
