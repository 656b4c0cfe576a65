"""One rule that names the bottleneck, the same in the live view, in the doctor and on the dashboard.

Who works all the time holds the others up; who waits is held up. So two shares decide: how much of its time the
learner waits for experience, and how much of theirs the actors wait for credit. Where both wait, a third says for what:
how much of the time that messages are under way they spend on the wire, and not in the learner's queue.
`docs/metrics.md` explains the rule.
Pure: shares in, verdict out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

WAITING = 0.15
"""A side that waits less than this is busy: scheduling jitter alone makes a few per cent."""

ON_THE_WIRE = 0.5
"""Messages that spend more of their way than this between actors and queue are held up there."""


class Kind(StrEnum):
    """What holds the run up."""

    LEARNER = "learner-bound"
    ACTOR = "actor-bound"
    NETWORK = "network-bound"
    PACE = "pace-bound"
    BALANCED = "balanced"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The bottleneck; `share` is the part of its time that the busiest phase takes (of the wait, where both wait)."""

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
    "act": ("in the network", "add actors where cores are free, or set actor.precision=bf16 where the CPU has it"),
    "experience": ("on what they make of their rollouts", "add actors where cores are free, or use a smaller network"),
    "encode": ("encoding messages", "use smaller observations, or a longer rollout"),
    "snapshot": ("on snapshots", "use a longer rollout, or set learner.snapshot_precision=bf16"),
})  # fmt: skip


def find_bottleneck(*, learner: Mapping[str, float], actors: Mapping[str, float], wire: float = 0.0) -> Verdict:
    """Name the bottleneck from the time per phase of the learner and of all actors together.

    Any unit will do (seconds of a window, shares): each side is taken relative to its own sum. `actors` may be empty
    where nobody could read them; then the learner alone decides. `wire` is the share of their time under way that
    messages are on the wire; 0 also where nobody knows.
    """
    learner, actors = _shares(learner), _shares(actors)
    if not learner:
        return Verdict(kind=Kind.UNKNOWN, share=0.0, sentence="unknown: nothing has been measured yet")
    starved, held = learner.get("wait", 0.0), actors.get("credit_wait", 0.0)
    if starved >= WAITING and held >= WAITING:
        return _network_bound(starved, held, wire) if wire >= ON_THE_WIRE else _pace_bound(starved, held)
    if starved >= WAITING:
        return _actor_bound(starved, actors)
    if held >= WAITING or not actors:
        return _learner_bound(learner, held)
    share = 1.0 - starved
    busy = f"the learner works {percent(share)} of the time, the actors {percent(1.0 - held)}"
    return Verdict(kind=Kind.BALANCED, share=share, sentence=f"balanced: {busy}")


def _network_bound(starved: float, held: float, wire: float) -> Verdict:
    where = f"messages spend {percent(wire)} of their way on the wire"
    advice = "use smaller observations or networks, set learner.snapshot_precision=bf16, or bring them closer together"
    return Verdict(
        kind=Kind.NETWORK, share=min(starved, held), sentence=f"network-bound: {_both_wait(starved, held)}; {where}; {advice}"
    )


def _pace_bound(starved: float, held: float) -> Verdict:
    advice = "in lockstep that is the price, else raise learner.credits or lower learner.batch"
    return Verdict(
        kind=Kind.PACE,
        share=min(starved, held),
        sentence=f"pace-bound: {_both_wait(starved, held)}; {advice}",
    )


def _actor_bound(starved: float, actors: Mapping[str, float]) -> Verdict:
    phase, share = _busiest(actors, _ACTOR)
    where, advice = _ACTOR[phase]
    what = f"; actors spend {percent(share)} {where}" if share else ""
    return Verdict(
        kind=Kind.ACTOR,
        share=share,
        sentence=f"actor-bound: the learner waits {percent(starved)} for experience{what}; {advice}",
    )


def _learner_bound(learner: Mapping[str, float], held: float) -> Verdict:
    phase, share = _busiest(learner, _LEARNER)
    does, advice = _LEARNER[phase]
    what = f", actors wait {percent(held)} for credit" if held else ""
    return Verdict(
        kind=Kind.LEARNER,
        share=share,
        sentence=f"learner-bound: the learner {does} {percent(share)} of the time{what}; {advice}",
    )


def _both_wait(starved: float, held: float) -> str:
    return f"the learner waits {percent(starved)} for experience while actors wait {percent(held)} for credit"


def _busiest(shares: Mapping[str, float], phases: Mapping[str, tuple[str, str]]) -> tuple[str, float]:
    phase = max(phases, key=lambda name: shares.get(name, 0.0))
    return phase, shares.get(phase, 0.0)


def _shares(times: Mapping[str, float]) -> dict[str, float]:
    whole = sum(times.values())
    return {name: time / whole for name, time in times.items()} if whole > 0 else {}


def percent(share: float) -> str:
    """A share as people read it: `38 %`."""
    return f"{share:.0%}".replace("%", " %")
