"""What `rookery doctor` thinks of a run: the bottleneck, what can be gained, and what is broken. Pure: a fleet in, findings out.

A bottleneck is no fault: every run has one. A fault is what costs experience, stands still, or will end the run, by the
same table of thresholds as the alerts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from common.monitoring import thresholds as limits
from common.monitoring.figures import ORDINARY_DROPS, UNREADABLE_DROPS
from common.runtime.bottleneck import WAITING, Kind, Verdict, percent
from common.units import MIB, Seconds
from services.cli.readings import Fleet, Service, shares
from services.cli.supervisor import ACTOR

BELIEVED = 0.95  # of its time idle: what a side could do beyond that nobody has seen
FINISHED = 2  # rollouts, of which the second was begun when a newer policy had been there for a while
NOISE = 8 * MIB  # that an allocator takes and gives back
HOUR: Seconds = 3600.0


@dataclass(frozen=True, slots=True)
class Fault:
    """Something broken: one word, and what is seen and what to do."""

    name: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """`gain` says what removing the bottleneck could bring; "" where nothing can be said."""

    verdict: Verdict
    gain: str
    faults: tuple[Fault, ...]


def diagnose(fleet: Fleet) -> Diagnosis:
    """Judge a run, whose learner must be known, by what happened between two moments."""
    learner = fleet.learner
    assert learner is not None
    if learner.after.silence:
        verdict = Verdict(kind=Kind.UNKNOWN, share=0.0, sentence="unknown: the learner does not answer")
    elif learner.now("training") == 0:
        verdict = Verdict(kind=Kind.UNKNOWN, share=0.0, sentence="unknown: the learner does not train, it starts or has ended")
    else:
        verdict = _unreached(fleet, learner) or fleet.bottleneck
    checks = EVER if verdict.kind is Kind.UNKNOWN else (*EVER, *WHILE_TRAINING)
    faults = tuple(fault for check in checks for fault in check(fleet, learner))
    return Diagnosis(verdict=verdict, gain=gain(fleet, verdict), faults=faults)


def _unreached(fleet: Fleet, learner: Service) -> Verdict | None:
    """Where policies do not arrive the phases mislead: the learner throws away what comes, and more actors are no help."""
    waits, deaf = learner.shares.get("wait", 0.0), [actor for actor in fleet.actors if acts_by_old_policy(actor, learner)]
    if waits < WAITING or not deaf:
        return None
    who = f"new policies do not reach {len(deaf)} of {len(fleet.actors)} actors"
    return Verdict(
        kind=Kind.NETWORK, share=waits, sentence=f"network-bound: {who}; look at what lies between the learner and them"
    )


# --- what could be gained ---


def gain(fleet: Fleet, verdict: Verdict) -> str:
    """How much faster the run could be at most without its bottleneck: Amdahl's law on the measured shares."""
    learner = fleet.learner
    assert learner is not None
    waits, held = learner.shares.get("wait", 0.0), shares(fleet.acting).get("credit_wait", 0.0)
    match verdict.kind:
        case Kind.ACTOR:
            return f"{_at_most(waits)}, the most that the learner could train on{_more_actors(fleet, waits)}"
        case Kind.LEARNER if fleet.actors:
            return f"{_at_most(held)}, the most that these actors could make; without that phase {_at_most(verdict.share)}"
        case Kind.NETWORK | Kind.PACE if held >= WAITING:
            return f"{_at_most(min(waits, held))}, until the side that waits less is busy{_round_trip(fleet)}"
        case _:
            return ""


def _at_most(idle: float) -> str:
    return "many times as fast" if idle > BELIEVED else f"at most {1.0 / (1.0 - idle):.1f} times as fast"


def _more_actors(fleet: Fleet, waits: float) -> str:
    count = len(fleet.actors)
    if not count or waits > BELIEVED:
        return ""
    more = math.ceil(count * waits / (1.0 - waits))
    rate = sum(actor.rate("env_steps_total") for actor in fleet.actors) / count
    actors = "actor" if more == 1 else "actors"
    return f"; {more} more {actors} like the {count} here ({rate:,.0f} env steps/s each) would feed it"


def _round_trip(fleet: Fleet) -> str:
    messages = sum(actor.sent() for actor in fleet.actors)
    if not messages or fleet.learner is None:
        return ""
    seconds, learner = fleet.under_way / messages, fleet.learner
    bytes_ = learner.rate("message_bytes_received_total") + learner.rate("message_bytes_sent_total")
    way = f"a message is under way for {seconds:.2g} s, {percent(fleet.wire)} of that on the wire"
    return f"; {way}, which carries {bytes_ / 1e6:.2g} MB/s"


# --- what is broken ---


def _silent(fleet: Fleet, _: Service) -> Iterator[Fault]:
    for service in fleet.services:
        if service.after.silence:
            yield Fault("away", f"{service.title} does not answer: {service.after.silence}; see its log")


def _hung(fleet: Fleet, _: Service) -> Iterator[Fault]:
    for service in fleet.services:
        if service.after.complaint:
            yield Fault("hung", f"{service.title}: {service.after.complaint}; restart it")


def _restarted(fleet: Fleet, _: Service) -> Iterator[Fault]:
    for service in fleet.services:
        if service.restarted:
            yield Fault("restarted", f"{service.title} began anew within the {service.seconds:.0f} s measured; see its log")


def _flow(fleet: Fleet, learner: Service) -> Iterator[Fault]:
    """Nothing moves at all, or the learner has far too little to do."""
    waits, seconds = learner.shares.get("wait", 0.0), f"{learner.seconds:.0f} s"
    moved = learner.grew("updates_total") + sum(actor.grew("env_steps_total") for actor in fleet.actors)
    arrived = learner.grew("messages_received_total", "trajectory") + learner.grew("messages_received_total", "gradient")
    if not moved and not arrived and limits.STARVED.passed(waits):
        if not learner.now("peers_connected", ACTOR):
            yield Fault("stalled", f"no update in {seconds}: no actor is connected; start one with `rookery actor --learner ...`")
        else:
            yield Fault("stalled", f"no update in {seconds}: actors are connected and send nothing; look at their logs")
    elif limits.STARVED.passed(waits):
        yield Fault("starved", f"the learner waits {percent(waits)} of its time for experience; the bottleneck says why")


def _lost_learner(fleet: Fleet, _: Service) -> Iterator[Fault]:
    for peer in fleet.services:
        if peer.measured and peer.now("connected") == 0:
            yield Fault("cut off", f"{peer.title} has no learner; look whether it reaches the learner's address")
        elif (again := peer.grew("reconnects_total")) and peer is not fleet.learner:
            times = "once" if again == 1 else f"{again:.0f} times"
            yield Fault("reconnects", f"{peer.title} lost the learner {times} in {peer.seconds:.0f} s; look at the network")


def _actors_missing(fleet: Fleet, learner: Service) -> Iterator[Fault]:
    known = sum(service.role == ACTOR for service in fleet.services)
    connected = learner.now("peers_connected", ACTOR)
    if known and limits.ACTORS.passed(connected / known):
        yield Fault("actors missing", f"{connected:.0f} of {known} actors are connected")


def acts_by_old_policy(actor: Service, learner: Service) -> bool:
    """Whether it still acts by the policy of the beginning, though there was a newer one before it began its last rollouts."""
    version = actor.now("policy_version")
    return actor.sent() >= FINISHED and actor.then("policy_version") == version < learner.then("policy_version")


def _snapshots(fleet: Fleet, learner: Service) -> Iterator[Fault]:
    for actor in fleet.actors:
        if acts_by_old_policy(actor, learner):
            version, newest = actor.now("policy_version"), learner.now("policy_version")
            yield Fault(
                "stale snapshots",
                f"{actor.title} has acted by version {version:.0f} through {actor.sent():.0f} rollouts, the newest is "
                f"{newest:.0f}; look at what lies between the learner and it",
            )


def _straggler(fleet: Fleet, _: Service) -> Iterator[Fault]:
    rates = {actor.name: actor.rate("env_steps_total") for actor in fleet.actors}
    usual = median(rates.values()) if rates else 0.0
    if len(rates) < limits.STRAGGLER_ACTORS:
        return
    for actor in fleet.actors:
        if usual and limits.STRAGGLER.passed(rates[actor.name] / usual):
            yield Fault(
                "straggler",
                f"{actor.title} makes {rates[actor.name]:,.0f} env steps/s, the median is {usual:,.0f}; {_where(actor)}; "
                "look at what else runs on its machine",
            )


def _where(actor: Service) -> str:
    if not actor.shares:
        return "its loop does not turn"
    phase, share = max(actor.shares.items(), key=lambda item: item[1])
    return f"it spends {percent(share)} in {phase}"


def _drops(_: Fleet, learner: Service) -> Iterator[Fault]:
    if learner.restarted:  # what it resumed from has other totals
        return
    grown = learner.grew_by_label("env_steps_dropped_total")
    lost = {reason: steps for reason, steps in grown.items() if steps and reason not in ORDINARY_DROPS}
    gone, trained = sum(lost.values()), learner.grew("env_steps_trained_total")
    if gone and limits.DROPPED.passed(gone / (gone + trained)):
        what = ", ".join(f"{reason} {steps:,.0f}" for reason, steps in sorted(lost.items(), key=lambda item: -item[1]))
        yield Fault("dropping", f"{percent(gone / (gone + trained))} of the env steps are dropped ({what}); see docs/metrics.md")
    if limits.BAD_MESSAGES.passed(unread := sum(learner.grew("messages_dropped_total", reason) for reason in UNREADABLE_DROPS)):
        yield Fault("bad messages", f"{unread:.0f} messages are none of this run; use the same rookery version everywhere")


def _refused(_: Fleet, learner: Service) -> Iterator[Fault]:
    failed = {reason: times for reason, times in learner.grew_by_label("handshakes_failed_total").items() if times}
    if failed and limits.REFUSED.passed(sum(failed.values()) / learner.seconds):
        why = ", ".join(f"{reason} {times:.0f}" for reason, times in sorted(failed.items(), key=lambda item: -item[1]))
        seen = f"connections to the learner came to nothing in {learner.seconds:.0f} s ({why})"
        yield Fault("refused", f"{seen}; see docs/security.md, or keep strangers from its port")


def _reopened(_: Fleet, learner: Service) -> Iterator[Fault]:
    if limits.REOPENED.passed(times := learner.grew("sockets_reopened_total")):
        seen = f"the learner dropped all connections {times:.0f} times since its memory was short"
        yield Fault("out of memory", f"{seen}; keep strangers from its port, or give it more memory")


def _lag(_: Fleet, learner: Service) -> Iterator[Fault]:
    lag, limit = learner.mean("policy_lag_versions"), learner.now("policy_lag_limit_versions")
    if limit and limits.LAG.passed(lag / limit):
        yield Fault("lagging", f"experience is {lag:.0f} versions old, beyond {limit:.0f} it is dropped; lower learner.credits")


def _non_finite(_: Fleet, learner: Service) -> Iterator[Fault]:
    if limits.NON_FINITE.passed(learner.now("training_metric", "nonfinite_steps")):
        yield Fault("not finite", "gradients are not finite and left out; lower algorithm.learning_rate")


def _memory(fleet: Fleet, _: Service) -> Iterator[Fault]:
    for service in fleet.services:
        size, began = service.now("process_resident_memory_bytes"), service.now("process_start_time_seconds")
        if not service.measured or not limits.SETTLED.passed(service.after.at - began):
            continue
        growth = size - service.then("process_resident_memory_bytes")
        if growth > NOISE and limits.GROWTH.passed(growth / service.seconds * HOUR):
            what = f"{service.title} grew by {growth / MIB:,.0f} MiB in {service.seconds:.0f} s and holds {size / MIB:,.0f} MiB"
            yield Fault("leaking memory", f"{what}; restart it before the machine runs out, and report it")


def _checkpoint(_: Fleet, learner: Service) -> Iterator[Fault]:
    if failed := learner.grew("checkpoint_failures_total"):
        yield Fault("checkpoints fail", f"{failed:.0f} could not be written; look at the disk and the learner's log")
    last, every = learner.now("checkpoint_last_success_timestamp_seconds"), learner.now("checkpoint_interval_seconds")
    age = learner.after.at - (last or learner.now("process_start_time_seconds"))
    if every and limits.CHECKPOINT.passed(age / every):
        yield Fault("old checkpoint", f"the last one is {age:,.0f} s old, wanted every {every:,.0f} s; look at the disk")


EVER = (_silent, _hung, _restarted, _refused, _reopened, _memory)
WHILE_TRAINING = (_flow, _lost_learner, _actors_missing, _snapshots, _straggler, _drops, _lag, _non_finite, _checkpoint)
