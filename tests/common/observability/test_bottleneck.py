"""The rule that names the bottleneck, case by case as `docs/metrics.md` lists them."""

from __future__ import annotations

import pytest

from common.observability.bottleneck import CPU_LOST, ON_THE_WIRE, STALE, THROTTLED, WAITING, Kind, Quota, find_bottleneck

pytestmark = pytest.mark.pure

BUSY_LEARNER = {"wait": 2.0, "ingest": 4.0, "train": 93.0, "publish": 1.0, "checkpoint": 0.0}
WAITING_LEARNER = {"wait": 38.0, "ingest": 4.0, "train": 57.0, "publish": 1.0, "checkpoint": 0.0}
BUSY_ACTORS = {"env": 71.0, "act": 20.0, "encode": 5.0, "credit_wait": 3.0, "snapshot": 1.0}
HELD_ACTORS = {"env": 40.0, "act": 15.0, "encode": 3.0, "credit_wait": 41.0, "snapshot": 1.0}


def test_a_learner_that_never_waits_holds_up_actors_that_do():
    """Too many actors for one learner, the usual picture on two cores."""
    verdict = find_bottleneck(learner=BUSY_LEARNER, actors=HELD_ACTORS)
    assert (verdict.kind, verdict.share) == (Kind.LEARNER, 0.93)
    assert verdict.sentence == (
        "learner-bound: the learner trains 93 % of the time, actors wait 41 % for credit; "
        "use a smaller network, fewer gradient steps per env step, or a GPU"
    )


def test_a_learner_that_waits_for_busy_actors_is_held_up_by_them():
    """A slow environment."""
    verdict = find_bottleneck(learner=WAITING_LEARNER, actors=BUSY_ACTORS)
    assert (verdict.kind, verdict.share) == (Kind.ACTOR, 0.71)
    assert verdict.sentence == (
        "actor-bound: the learner waits 38 % for experience; actors spend 71 % in the environment; "
        "add actors where cores are free"
    )


def test_both_waiting_is_a_matter_of_credits():
    """One credit, and a batch that needs two messages of it."""
    verdict = find_bottleneck(learner=WAITING_LEARNER, actors=HELD_ACTORS)
    assert verdict.kind is Kind.CREDIT
    assert "learner.credits" in verdict.sentence


def test_both_waiting_for_messages_on_the_wire_is_a_matter_of_the_network():
    """Actors behind a slow line: more credits would only lie on it, too."""
    verdict = find_bottleneck(learner=WAITING_LEARNER, actors=HELD_ACTORS, wire=0.97)
    assert (verdict.kind, verdict.share) == (Kind.NETWORK, 0.38)
    assert verdict.sentence.startswith(
        "network-bound: the learner waits 38 % for experience while actors wait 41 % for credit; "
        "messages spend 97 % of their way on the wire"
    )
    assert find_bottleneck(learner=WAITING_LEARNER, actors=HELD_ACTORS, wire=ON_THE_WIRE - 0.01).kind is Kind.CREDIT


def test_where_both_wait_and_the_wire_is_unknown_the_verdict_says_why():
    verdict = find_bottleneck(learner=WAITING_LEARNER, actors=HELD_ACTORS, unmeasured="1 of 2 connected actors are measured")
    assert (verdict.kind, verdict.share) == (Kind.CREDIT_OR_NETWORK, 0.38)
    assert verdict.sentence == (
        "credit- or network-bound: the learner waits 38 % for experience while actors wait 41 % for credit; "
        "1 of 2 connected actors are measured; the share of their way that messages spend on the wire is unknown"
    )


@pytest.mark.parametrize(("learner", "actors"), [(BUSY_LEARNER, HELD_ACTORS), (WAITING_LEARNER, BUSY_ACTORS)])
def test_a_slow_line_that_holds_up_only_one_side_is_not_the_bottleneck(learner, actors):
    """Messages may take their time where the other side is busy all along."""
    assert find_bottleneck(learner=learner, actors=actors, wire=1.0).kind in (Kind.LEARNER, Kind.ACTOR)


def test_a_learner_that_waits_for_actors_without_new_policies_is_held_up_by_the_network():
    """The learner drops old experience: by the phases alone more actors would help."""
    verdict = find_bottleneck(learner=WAITING_LEARNER, actors=BUSY_ACTORS, stale=0.75, actors_cpu_lost=0.9)
    assert (verdict.kind, verdict.share) == (Kind.NETWORK, 0.38)
    assert verdict.sentence == (
        "network-bound: new policies do not reach 75 % of the actors, and the learner waits 38 % for experience; "
        "look at the connections between the learner and them"
    )
    assert find_bottleneck(learner=WAITING_LEARNER, actors=BUSY_ACTORS, stale=STALE - 0.01).kind is Kind.ACTOR
    assert find_bottleneck(learner=BUSY_LEARNER, actors=HELD_ACTORS, stale=1.0).kind is Kind.LEARNER


def test_nobody_waiting_is_balance():
    """A tuned run."""
    verdict = find_bottleneck(learner=BUSY_LEARNER, actors=BUSY_ACTORS)
    assert (verdict.kind, verdict.sentence) == (Kind.BALANCED, "balanced: the learner works 98 % of the time, the actors 97 %")


@pytest.mark.parametrize(
    ("phase", "word"),
    [("ingest", "takes in experience"), ("train", "trains"), ("publish", "publishes"), ("checkpoint", "every_seconds")],
)
def test_the_advice_fits_the_learners_busiest_phase(phase, word):
    """A run that writes a checkpoint every second needs no GPU."""
    assert word in find_bottleneck(learner={"wait": 1.0, phase: 50.0}, actors=HELD_ACTORS).sentence


@pytest.mark.parametrize(
    ("phase", "word"),
    [("env", "environment"), ("act", "network"), ("experience", "rollouts"), ("encode", "encoding"), ("snapshot", "snapshots")],
)
def test_the_advice_fits_the_actors_busiest_phase(phase, word):
    """A large network on a small actor is another matter than a slow game."""
    assert word in find_bottleneck(learner=WAITING_LEARNER, actors={"credit_wait": 1.0, phase: 50.0}).sentence


def test_without_actors_the_learner_alone_decides():
    """Actors on other machines, with metrics that this process cannot read."""
    assert find_bottleneck(learner=BUSY_LEARNER, actors={}).kind is Kind.LEARNER
    verdict = find_bottleneck(learner=WAITING_LEARNER, actors={})
    assert verdict.kind is Kind.ACTOR
    assert verdict.sentence == "actor-bound: the learner waits 38 % for experience; add actors where cores are free"


@pytest.mark.parametrize("learner", [{}, {"wait": 0.0, "train": 0.0}])
def test_before_anything_was_measured_the_verdict_is_unknown(learner):
    """The first line of the live view."""
    assert find_bottleneck(learner=learner, actors=BUSY_ACTORS).kind is Kind.UNKNOWN


def test_the_threshold_itself_counts_as_waiting():
    """The documented rule says: 15 % or more."""
    at = {"wait": WAITING, "train": 1.0 - WAITING}
    assert find_bottleneck(learner=at, actors=BUSY_ACTORS).kind is Kind.ACTOR
    assert find_bottleneck(learner=BUSY_LEARNER, actors={"env": 1.0 - WAITING, "credit_wait": WAITING}).kind is Kind.LEARNER


def test_a_busy_learner_without_a_core_is_starved_of_cpu():
    """Another program takes the core: a smaller network would not help as much as that core."""
    verdict = find_bottleneck(learner=BUSY_LEARNER, actors=HELD_ACTORS, learner_cpu_lost=0.88, actors_cpu_lost=0.0)
    assert (verdict.kind, verdict.share) == (Kind.CPU, 0.88)
    assert verdict.sentence == (
        "cpu-starved: the learner waits 88 % of the time for a core, actors wait 41 % for credit; "
        "end other programs on its machine, run fewer actors there, or raise its CPU limit"
    )


def test_a_cpu_limit_that_stops_the_container_is_named():
    quota = Quota(cores=0.5, throttled=0.96)
    verdict = find_bottleneck(learner=BUSY_LEARNER, actors=HELD_ACTORS, learner_cpu_lost=0.88, learner_quota=quota)
    advice = "; the CPU limit of 0.5 cores stops the container in 96 % of its periods: raise the limit, or run fewer processes"
    assert advice in verdict.sentence
    verdict = find_bottleneck(learner=WAITING_LEARNER, actors=BUSY_ACTORS, actors_cpu_lost=0.75, actors_quota=quota)
    assert advice in verdict.sentence


def test_a_cpu_limit_that_is_hardly_met_is_not_blamed():
    quota = Quota(cores=4.0, throttled=THROTTLED)
    verdict = find_bottleneck(learner=BUSY_LEARNER, actors=HELD_ACTORS, learner_cpu_lost=0.88, learner_quota=quota)
    assert "end other programs" in verdict.sentence


def test_busy_actors_without_cores_are_starved_of_cpu():
    """Eight actors on two cores: more of them would not help."""
    verdict = find_bottleneck(learner=WAITING_LEARNER, actors=BUSY_ACTORS, learner_cpu_lost=0.1, actors_cpu_lost=0.75)
    assert (verdict.kind, verdict.share) == (Kind.CPU, 0.75)
    assert verdict.sentence == (
        "cpu-starved: actors wait 75 % of the time for a core, the learner waits 38 % for experience; "
        "run fewer actors for each core, end other programs there, or raise their CPU limits"
    )


def test_where_both_sides_lack_cpu_the_verdict_names_the_one_that_lacks_more():
    sides = {"learner": BUSY_LEARNER, "actors": BUSY_ACTORS}
    assert "the learner waits 80 %" in find_bottleneck(**sides, learner_cpu_lost=0.8, actors_cpu_lost=0.6).sentence
    assert "actors wait 80 %" in find_bottleneck(**sides, learner_cpu_lost=0.6, actors_cpu_lost=0.8).sentence


@pytest.mark.parametrize(
    ("learner", "actors", "lost", "kind"),
    [
        (WAITING_LEARNER, BUSY_ACTORS, {"learner_cpu_lost": 0.9}, Kind.ACTOR),
        (BUSY_LEARNER, HELD_ACTORS, {"actors_cpu_lost": 0.9}, Kind.LEARNER),
        (WAITING_LEARNER, HELD_ACTORS, {"learner_cpu_lost": 0.9, "actors_cpu_lost": 0.9}, Kind.CREDIT),
        (BUSY_LEARNER, HELD_ACTORS, {"learner_cpu_lost": CPU_LOST}, Kind.LEARNER),
        (BUSY_LEARNER, HELD_ACTORS, {}, Kind.LEARNER),
    ],
)
def test_a_side_that_waits_does_not_lack_cpu(learner, actors, lost, kind):
    """More CPU for a side that waits would bring nothing; a side without a measurement is not judged."""
    assert find_bottleneck(learner=learner, actors=actors, **lost).kind is kind
