"""The rule that names the bottleneck, for the live view, the doctor and the dashboard.

A side that works all the time holds up the other, which waits. Two shares decide: of the learner's time that it waits for
experience, and of the actors' time that they wait for credit. Where both wait, a third decides: of the time from sending a
message to its acknowledgement that it spends on the wire, and not in the learner's queue. A busy side that waits
for a core for a large share of its time lacks CPU, whatever it computes. A learner that waits while new policies reach few
actors is held up by the network: it drops old experience. `docs/metrics.md` explains the rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

WAITING = 0.15
"""A side that waits less than this is busy: scheduling jitter alone makes a few per cent."""

ON_THE_WIRE = 0.5
"""Messages that spend more of their time than this between actors and queue are held up there."""

CPU_LOST = 0.4
"""A busy side that waits for a core for more than this share of its time lacks CPU: two processes on one core lose half each."""

STALE = 0.5
"""A learner that waits while new policies do not reach this share of the actors, or more, is held up by the network."""

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
    "train": ("trains", "use a smaller network or fewer epochs, or a GPU"),
    "publish": ("publishes snapshots", "publish less often, or set learner.snapshot_precision=bf16"),
    "checkpoint": ("writes checkpoints", "raise checkpoint.every_seconds"),
})  # fmt: skip
_ACTOR = MappingProxyType({
    "env": ("in the environment", "add actors where cores are free"),
    "act": ("in the network", "add actors where cores are free, or set actor.precision=bf16 where the CPU has it"),
    "experience": ("computing what they send of rollouts", "add actors where cores are free, or use a smaller network"),
    "encode": ("encoding messages", "use smaller observations, or a longer rollout"),
    "snapshot": ("on snapshots", "use a longer rollout, or set learner.snapshot_precision=bf16"),
})  # fmt: skip


def find_bottleneck(
    *,
    learner: Mapping[str, float],
    actors: Mapping[str, float],
    wire: float = 0.0,
    stale: float = 0.0,
    learner_cpu_lost: float = math.nan,
    actors_cpu_lost: float = math.nan,
    learner_quota: Quota = NO_QUOTA,
    actors_quota: Quota = NO_QUOTA,
) -> Verdict:
    """Name the bottleneck from the time per phase of the learner and of all actors together.

    Any unit will do (seconds of a window, shares): each side is taken relative to its own sum. `actors` may be empty
    where they could not be read; then the learner alone decides. `wire` is the share of their time under way that
    messages are on the wire, and `stale` the share of the actors that new policies do not reach; each is 0 also where it is
    unknown. `learner_cpu_lost` and `actors_cpu_lost` are the shares of their time in which they wait for a core; NaN where
    they are unknown. The quotas decide only what is said of a core that lacks.
    """
    learner, actors = _shares(learner), _shares(actors)
    if not learner:
        return Verdict(kind=Kind.UNKNOWN, share=0.0, sentence="unknown: nothing has been measured yet")
    learner_waits, actors_wait = learner.get("wait", 0.0), actors.get("credit_wait", 0.0)
    if stale >= STALE and learner_waits >= WAITING:
        return _cut_off(learner_waits, stale)
    learner_short = learner_waits < WAITING and learner_cpu_lost > CPU_LOST
    actors_short = actors_wait < WAITING and actors_cpu_lost > CPU_LOST
    if learner_short and not (actors_short and actors_cpu_lost > learner_cpu_lost):
        return _learner_short_of_cpu(learner_cpu_lost, actors_wait, learner_quota)
    if actors_short:
        return _actors_short_of_cpu(actors_cpu_lost, learner_waits, actors_quota)
    if learner_waits >= WAITING and actors_wait >= WAITING:
        return (
            _network_bound(learner_waits, actors_wait, wire) if wire >= ON_THE_WIRE else _credit_bound(learner_waits, actors_wait)
        )
    if learner_waits >= WAITING:
        return _actor_bound(learner_waits, actors)
    if actors_wait >= WAITING or not actors:
        return _learner_bound(learner, actors_wait)
    share = 1.0 - learner_waits
    busy = f"the learner works {percent(share)} of the time, the actors {percent(1.0 - actors_wait)}"
    return Verdict(kind=Kind.BALANCED, share=share, sentence=f"balanced: {busy}")


def _learner_short_of_cpu(lost: float, actors_wait: float, quota: Quota) -> Verdict:
    what = f", actors wait {percent(actors_wait)} for credit" if actors_wait else ""
    advice = _raise_limit(quota) or "end other programs on its machine, run fewer actors there, or raise its CPU limit"
    sentence = f"cpu-starved: the learner waits {percent(lost)} of the time for a core{what}; {advice}"
    return Verdict(kind=Kind.CPU, share=lost, sentence=sentence)


def _actors_short_of_cpu(lost: float, learner_waits: float, quota: Quota) -> Verdict:
    what = f", the learner waits {percent(learner_waits)} for experience" if learner_waits else ""
    advice = _raise_limit(quota) or "run fewer actors for each core, end other programs there, or raise their CPU limits"
    sentence = f"cpu-starved: actors wait {percent(lost)} of the time for a core{what}; {advice}"
    return Verdict(kind=Kind.CPU, share=lost, sentence=sentence)


def _raise_limit(quota: Quota) -> str:
    """Return the advice where a CPU limit is the reason; "" where it is not."""
    if not quota.throttled > THROTTLED:
        return ""
    limit = f"the CPU limit of {quota.cores:g} cores stops the container in {percent(quota.throttled)} of its periods"
    return f"{limit}: raise the limit, or run fewer processes in that container"


def _network_bound(learner_waits: float, actors_wait: float, wire: float) -> Verdict:
    where = f"messages spend {percent(wire)} of their way on the wire"
    advice = "use smaller observations or networks, set learner.snapshot_precision=bf16, or bring them closer together"
    return Verdict(
        kind=Kind.NETWORK,
        share=min(learner_waits, actors_wait),
        sentence=f"network-bound: {_both_wait(learner_waits, actors_wait)}; {where}; {advice}",
    )


def _cut_off(learner_waits: float, stale: float) -> Verdict:
    seen = f"new policies do not reach {percent(stale)} of the actors, and the learner waits {percent(learner_waits)}"
    advice = "look at the connections between the learner and them"
    return Verdict(kind=Kind.NETWORK, share=learner_waits, sentence=f"network-bound: {seen} for experience; {advice}")


def _credit_bound(learner_waits: float, actors_wait: float) -> Verdict:
    advice = "in lockstep that is the price, else raise learner.credits or lower learner.batch"
    return Verdict(
        kind=Kind.CREDIT,
        share=min(learner_waits, actors_wait),
        sentence=f"credit-bound: {_both_wait(learner_waits, actors_wait)}; {advice}",
    )


def _actor_bound(learner_waits: float, actors: Mapping[str, float]) -> Verdict:
    phase, share = _busiest(actors, _ACTOR)
    where, advice = _ACTOR[phase]
    what = f"; actors spend {percent(share)} {where}" if share else ""
    return Verdict(
        kind=Kind.ACTOR,
        share=share,
        sentence=f"actor-bound: the learner waits {percent(learner_waits)} for experience{what}; {advice}",
    )


def _learner_bound(learner: Mapping[str, float], actors_wait: float) -> Verdict:
    phase, share = _busiest(learner, _LEARNER)
    does, advice = _LEARNER[phase]
    what = f", actors wait {percent(actors_wait)} for credit" if actors_wait else ""
    return Verdict(
        kind=Kind.LEARNER,
        share=share,
        sentence=f"learner-bound: the learner {does} {percent(share)} of the time{what}; {advice}",
    )


def _both_wait(learner_waits: float, actors_wait: float) -> str:
    return f"the learner waits {percent(learner_waits)} for experience while actors wait {percent(actors_wait)} for credit"


def _busiest(shares: Mapping[str, float], phases: Mapping[str, tuple[str, str]]) -> tuple[str, float]:
    phase = max(phases, key=lambda name: shares.get(name, 0.0))
    return phase, shares.get(phase, 0.0)


def _shares(times: Mapping[str, float]) -> dict[str, float]:
    whole = sum(times.values())
    return {name: time / whole for name, time in times.items()} if whole > 0 else {}


def percent(share: float) -> str:
    """Return a share as a percentage: `38 %`."""
    return f"{share:.0%}".replace("%", " %")
