"""The rule that names the bottleneck, for the live view, the doctor and the dashboard.

A side that works all the time holds up the other, which waits. Two shares decide: of the learner's time that it waits for
experience, and of the actors' time that they wait for credit. Where both wait, a third decides: of the time from sending a
message to its acknowledgement that it spends on the wire, and not in the learner's queue. That share is known only where all
connected actors are measured. A busy side that waits for a core for a large share of its time lacks CPU, whatever it computes.
A learner that waits while new policies reach few actors is held up by the network: it drops old experience. `docs/metrics.md`
explains the rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

# Limits of the shares that decide; `checks.base` has the reason of each.
WAITING = 0.15
ON_THE_WIRE = 0.5
CPU_LOST = 0.4
STALE = 0.5
THROTTLED = 0.25
"""A container that its CPU limit stops in more than this share of its periods lacks CPU because of the limit."""


class Quota(NamedTuple):
    """The CPU limit of the containers of one side."""

    cores: float = math.nan  # NaN without a limit
    throttled: float = 0.0  # share of its periods in which the limit stops the container


NO_QUOTA = Quota()


class Kind(StrEnum):
    """Kinds of bottleneck."""

    LEARNER = "learner-bound"
    ACTOR = "actor-bound"
    NETWORK = "network-bound"
    CREDIT = "credit-bound"
    CREDIT_OR_NETWORK = "credit- or network-bound"
    CPU = "cpu-starved"
    BALANCED = "balanced"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The bottleneck; `share` is that of the busiest phase in its side's time.

    Where both sides wait it is that of the wait, and where CPU lacks that of the wait for a core.
    """

    kind: Kind
    share: float
    sentence: str


# phase -> (its work, the advice)
_LEARNER = MappingProxyType({
    "ingest": ("takes in experience", "use smaller observations, or fewer trajectories per update"),
    "train": ("trains", "use a smaller network, fewer gradient steps per env step, or a GPU"),
    "publish": ("publishes snapshots", "publish less often, or set learner.snapshot_precision=bf16"),
    "record": ("writes results", "put the run directory on a faster disk"),
    "checkpoint": ("writes checkpoints", "raise checkpoint.every_seconds"),
})  # fmt: skip
_ACTOR = MappingProxyType({
    "env": ("in the environment", "add actors where cores are free"),
    "act": ("in the network", "add actors where cores are free, or set actor.precision=bf16 where the CPU has it"),
    "experience": ("computing what they send of rollouts", "add actors where cores are free, or use a smaller network"),
    "encode": ("encoding messages", "use smaller observations, or a longer rollout"),
    "snapshot": ("on snapshots", "use a longer rollout, or set learner.snapshot_precision=bf16"),
})  # fmt: skip
_CREDIT_ADVICE = "in lockstep that is the price, else raise learner.credits or lower learner.batch"
_NETWORK_ADVICE = "use smaller observations or networks, set learner.snapshot_precision=bf16, or bring them closer together"


def find_bottleneck(
    *,
    learner: Mapping[str, float],
    actors: Mapping[str, float],
    wire: float = 0.0,
    unmeasured: str = "",
    stale: float = 0.0,
    learner_cpu_lost: float = math.nan,
    actors_cpu_lost: float = math.nan,
    learner_quota: Quota = NO_QUOTA,
    actors_quota: Quota = NO_QUOTA,
) -> Verdict:
    """Name the bottleneck from the time per phase of the learner and of all actors together.

    Any unit will do (seconds of a window, shares): each side is taken relative to its own sum. `actors` may be empty
    where they could not be read; then the learner alone decides. `wire` is the share of their time under way that
    messages are on the wire, unless `unmeasured` is the reason why it is unknown. `stale` is the share of the actors that new
    policies do not reach, 0 also where it is unknown. `learner_cpu_lost` and `actors_cpu_lost` are the shares of their time in
    which they wait for a core; NaN where they are unknown. The quotas decide only what is said of a core that lacks.
    """
    learner, actors = shares(learner), shares(actors)
    if not learner:
        return _verdict(Kind.UNKNOWN, 0.0, "nothing has been measured yet")
    learner_waits, actors_wait = learner.get("wait", 0.0), actors.get("credit_wait", 0.0)
    for_experience = f"the learner waits {percent(learner_waits)} for experience"
    for_credit = f"actors wait {percent(actors_wait)} for credit"
    also = f", {for_credit}" if actors_wait else ""
    if stale >= STALE and learner_waits >= WAITING:
        unreached = f"new policies do not reach {percent(stale)} of the actors, and {for_experience}"
        return _verdict(Kind.NETWORK, learner_waits, f"{unreached}; look at the connections between the learner and them")
    learner_short = learner_waits < WAITING and learner_cpu_lost > CPU_LOST
    actors_short = actors_wait < WAITING and actors_cpu_lost > CPU_LOST
    if learner_short and not (actors_short and actors_cpu_lost > learner_cpu_lost):
        advice = (
            _raise_limit(learner_quota) or "end other programs on its machine, run fewer actors there, or raise its CPU limit"
        )
        waits = f"the learner waits {percent(learner_cpu_lost)} of the time for a core{also}"
        return _verdict(Kind.CPU, learner_cpu_lost, f"{waits}; {advice}")
    if actors_short:
        advice = (
            _raise_limit(actors_quota) or "run fewer actors for each core, end other programs there, or raise their CPU limits"
        )
        wait = f"actors wait {percent(actors_cpu_lost)} of the time for a core"
        return _verdict(Kind.CPU, actors_cpu_lost, f"{wait}{f', {for_experience}' if learner_waits else ''}; {advice}")
    if learner_waits >= WAITING and actors_wait >= WAITING:
        both, share = f"{for_experience} while {for_credit}", min(learner_waits, actors_wait)
        if unmeasured:
            unknown = "the share of their way that messages spend on the wire is unknown"
            return _verdict(Kind.CREDIT_OR_NETWORK, share, f"{both}; {unmeasured}; {unknown}")
        if wire >= ON_THE_WIRE:
            way = f"messages spend {percent(wire)} of their way on the wire"
            return _verdict(Kind.NETWORK, share, f"{both}; {way}; {_NETWORK_ADVICE}")
        return _verdict(Kind.CREDIT, share, f"{both}; {_CREDIT_ADVICE}")
    if learner_waits >= WAITING:
        share, where, advice = _busiest(actors, _ACTOR)
        what = f"; actors spend {percent(share)} {where}" if share else ""
        return _verdict(Kind.ACTOR, share, f"{for_experience}{what}; {advice}")
    if actors_wait >= WAITING or not actors:
        share, does, advice = _busiest(learner, _LEARNER)
        return _verdict(Kind.LEARNER, share, f"the learner {does} {percent(share)} of the time{also}; {advice}")
    share = 1.0 - learner_waits
    busy = f"the learner works {percent(share)} of the time, the actors {percent(1.0 - actors_wait)}"
    return _verdict(Kind.BALANCED, share, busy)


def _verdict(kind: Kind, share: float, reason: str) -> Verdict:
    return Verdict(kind=kind, share=share, sentence=f"{kind}: {reason}")


def _raise_limit(quota: Quota) -> str:
    """Return the advice where a CPU limit is the reason; "" where it is not."""
    if not quota.throttled > THROTTLED:
        return ""
    limit = f"the CPU limit of {quota.cores:g} cores stops the container in {percent(quota.throttled)} of its periods"
    return f"{limit}: raise the limit, or run fewer processes in that container"


def _busiest(shares: Mapping[str, float], phases: Mapping[str, tuple[str, str]]) -> tuple[float, str, str]:
    phase = max(phases, key=lambda name: shares.get(name, 0.0))
    return shares.get(phase, 0.0), *phases[phase]


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of a sum; empty where that is 0."""
    whole = sum(seconds.values())
    return {name: part / whole for name, part in seconds.items()} if whole > 0 else {}


def percent(share: float) -> str:
    """Return a share as a percentage: `38 %`."""
    return f"{share:.0%}".replace("%", " %")
