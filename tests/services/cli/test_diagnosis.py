"""The diagnosis, illness by illness, on figures written out: each is found where it is, and a healthy run has none."""

import pytest

from common.runtime.bottleneck import Kind
from services.cli.diagnosis import diagnose
from services.cli.readings import Reading, compare

pytestmark = pytest.mark.pure

MIB = 2**20
NOW = 1_000_000.0  # Unix time at the end of a window of ten seconds
LEARNER = {  # a healthy learner over ten seconds: metric -> before and after
    "training": (1, 1),
    "phase_seconds_total{wait}": (0, 0.5),
    "phase_seconds_total{train}": (0, 9.0),
    "phase_seconds_total{publish}": (0, 0.5),
    "updates_total": (100, 120),
    "env_steps_trained_total": (10_000, 14_000),
    "env_steps_dropped_total{stale}": (50, 50),
    "env_steps_dropped_total{unfinished}": (0, 0),
    "messages_received_total{trajectory}": (100, 120),
    "messages_dropped_total{decode}": (0, 0),
    "handshakes_failed_total{key}": (2, 2),
    "handshakes_failed_total{mechanism}": (0, 0),
    "message_bytes_received_total": (0, 40_000_000),
    "message_bytes_sent_total": (0, 10_000_000),
    "peers_connected{actor}": (3, 3),
    "policy_version": (100, 120),
    "policy_lag_versions_sum": (0, 20),
    "policy_lag_versions_count": (0, 20),
    "policy_lag_limit_versions": (20, 20),
    "training_metric{nonfinite_steps}": (0, 0),
    "queue_seconds_total": (0, 24.0),
    "checkpoint_interval_seconds": (60, 60),
    "checkpoint_last_success_timestamp_seconds": (NOW - 50, NOW - 50),
    "checkpoint_failures_total": (0, 0),
    "process_start_time_seconds": (NOW - 9000, NOW - 9000),
    "process_resident_memory_bytes": (500 * MIB, 501 * MIB),
}
ACTOR = {
    "phase_seconds_total{env}": (0, 5.0),
    "phase_seconds_total{act}": (0, 2.0),
    "phase_seconds_total{credit_wait}": (0, 3.0),
    "env_steps_total": (5000, 6400),
    "messages_sent_total{trajectory}": (50, 57),
    "policy_version": (99, 119),
    "connected": (1, 1),
    "reconnects_total": (0, 0),
    "unacknowledged_seconds_total": (0, 10.0),
    "process_start_time_seconds": (NOW - 9000, NOW - 9000),
    "process_resident_memory_bytes": (300 * MIB, 300 * MIB),
}


def moment(which, role, samples, **more):
    """One end of the window as a scrape shows it."""
    found = {}
    for name, ends in samples.items():
        metric, _, label = name.rstrip("}").partition("{")
        full = metric if metric.startswith("process_") else f"rookery_{role}_{metric}"
        found[full, label] = float(ends[which])
    return Reading(at=NOW - 10 + 10 * which, role=role, samples=found, **more)


def examined(learner=None, *actors, **after):
    """The diagnosis of a healthy run with these changes; `after` changes the learner's second reading."""
    learner = LEARNER | (learner or {})
    actors = [ACTOR | actor for actor in (actors or ({}, {}, {}))]
    before = {"learner": moment(0, "learner", learner)}
    end = {"learner": moment(1, "learner", learner, **after)}
    for number, actor in enumerate(actors):
        before[f"actor-{number}"], end[f"actor-{number}"] = moment(0, "actor", actor), moment(1, "actor", actor)
    return diagnose(compare(before, end))


def faults(diagnosis):
    """Names and sentences."""
    return {fault.name: fault.sentence for fault in diagnosis.faults}


BUSY_ACTOR = {"phase_seconds_total{credit_wait}": (0, 0.0), "phase_seconds_total{env}": (0, 8.0)}
STARVED = {"phase_seconds_total{wait}": (0, 6.0), "phase_seconds_total{train}": (0, 3.5)}


def test_a_healthy_run_has_a_bottleneck_and_no_fault():
    """Every run has a bottleneck: that alone must not fail a check in a pipeline."""
    diagnosis = examined()
    assert diagnosis.faults == ()
    assert diagnosis.verdict.kind is Kind.LEARNER
    assert (
        diagnosis.gain
        == "at most 1.4 times as fast, the most that these actors could make; without that phase at most 10.0 times as fast"
    )


def test_a_starved_learner_is_told_how_many_actors_would_feed_it():
    """It waits 60 %: three actors fill 40 %, so five more would do, and no more than 2.5 times is to be had."""
    diagnosis = examined(STARVED, BUSY_ACTOR, BUSY_ACTOR, BUSY_ACTOR)
    assert diagnosis.verdict.kind is Kind.ACTOR
    assert diagnosis.gain == (
        "at most 2.5 times as fast, the most that the learner could train on; "
        "5 more actors like the 3 here (140 env steps/s each) would feed it"
    )
    assert "the learner waits 60 %" in faults(diagnosis)["starved"]


def test_a_learner_that_only_waits_is_promised_no_figure():
    """At 98 % the division gives 50 times: nobody has seen what the learner could do."""
    diagnosis = examined({"phase_seconds_total{wait}": (0, 490.0)}, BUSY_ACTOR, BUSY_ACTOR, BUSY_ACTOR)
    assert diagnosis.gain == "many times as fast, the most that the learner could train on"


def test_a_slow_network_is_told_by_where_messages_are():
    """Both sides wait, and of thirty message-seconds the queue had three."""
    waits = {"phase_seconds_total{credit_wait}": (0, 8.0), "phase_seconds_total{env}": (0, 0.0)}
    diagnosis = examined(STARVED | {"queue_seconds_total": (0, 3.0)}, waits, waits, waits)
    assert diagnosis.verdict.kind is Kind.NETWORK
    assert diagnosis.gain == (
        "at most 2.5 times as fast, until the side that waits less is busy; "
        "a message is under way for 1.4 s, 90 % of that on the wire, which carries 5 MB/s"
    )


def test_without_actors_the_learners_figures_are_all_there_is():
    """Only the learner's address was given."""
    learner = LEARNER | STARVED
    diagnosis = diagnose(compare({"learner": moment(0, "learner", learner)}, {"learner": moment(1, "learner", learner)}))
    assert diagnosis.verdict.kind is Kind.ACTOR
    assert diagnosis.gain == "at most 2.5 times as fast, the most that the learner could train on"
    assert list(faults(diagnosis)) == ["starved"]


STILL = {
    "phase_seconds_total{wait}": (0, 10.0), "phase_seconds_total{train}": (0, 0.0), "phase_seconds_total{publish}": (0, 0.0),
    "updates_total": (100, 100), "messages_received_total{trajectory}": (100, 100), "env_steps_trained_total": (9, 9),
    "policy_version": (100, 100), "policy_lag_versions_sum": (0, 0), "policy_lag_versions_count": (0, 0),
}  # fmt: skip
IDLE = {
    "env_steps_total": (5000, 5000), "messages_sent_total{trajectory}": (50, 50), "policy_version": (99, 99),
    "phase_seconds_total{env}": (0, 0.0), "phase_seconds_total{act}": (0, 0.0), "phase_seconds_total{credit_wait}": (0, 10.0),
}  # fmt: skip


@pytest.mark.parametrize(("connected", "word"), [(0, "no actor is connected"), (3, "send nothing")])
def test_a_run_in_which_nothing_moves_is_stalled(connected, word):
    """No update, no experience, no env step: that is not a matter of speed."""
    found = faults(examined(STILL | {"peers_connected{actor}": (connected, connected)}, IDLE, IDLE, IDLE))
    assert word in found["stalled"]
    assert "starved" not in found


def test_a_long_rollout_is_no_standstill():
    """Nothing came in the window, but the actors play: the learner is starved, not stalled."""
    found = faults(examined(STILL, BUSY_ACTOR, BUSY_ACTOR, BUSY_ACTOR))
    assert "starved" in found
    assert "stalled" not in found


def test_a_long_update_is_no_standstill():
    """The learner trains for longer than the window."""
    busy = {
        "phase_seconds_total{wait}": (0, 0.0),
        "phase_seconds_total{train}": (0, 10.0),
        "phase_seconds_total{publish}": (0, 0.0),
    }
    assert faults(examined(STILL | busy, IDLE, IDLE, IDLE)) == {}


def test_a_straggler_is_named_with_what_it_does():
    """One of three machines is throttled."""
    lame = {"env_steps_total": (5000, 5400), "phase_seconds_total{env}": (0, 9.0), "phase_seconds_total{credit_wait}": (0, 0.0)}
    sentence = faults(examined({}, {}, {}, lame))["straggler"]
    assert sentence.startswith("actor-2 makes 40 env steps/s, the median is 140; it spends 82 % in env")
    assert "straggler" not in faults(examined({}, {}, {}, {"env_steps_total": (5000, 5701)}))


def test_of_two_actors_neither_is_the_straggler():
    """Which of them is the odd one out?"""
    assert faults(examined({"peers_connected{actor}": (2, 2)}, {}, {"env_steps_total": (5000, 5001)})) == {}


def test_an_actor_that_gets_no_policies_is_named():
    """It began seven rollouts by version 99, and 100 was there before the first."""
    diagnosis = examined({}, {}, {}, {"policy_version": (99, 99)})
    assert faults(diagnosis)["stale snapshots"].startswith(
        "actor-2 has acted by version 99 through 7 rollouts, the newest is 120"
    )
    assert diagnosis.verdict.kind is Kind.LEARNER


def test_where_that_starves_the_learner_it_is_the_bottleneck():
    """The learner throws away what is too old: by the phases alone one would add actors."""
    old = BUSY_ACTOR | {"policy_version": (99, 99)}
    diagnosis = examined(STARVED, old, old, old)
    assert diagnosis.verdict.kind is Kind.NETWORK
    assert "new policies do not reach 3 of 3 actors" in diagnosis.verdict.sentence
    assert diagnosis.gain == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"policy_version": (100, 100)},  # the learner published none
        {"policy_version": (99, 99), "messages_sent_total{trajectory}": (50, 51)},  # it is still at its first rollout
    ],
)
def test_an_actor_that_could_not_have_a_newer_policy_is_not_blamed(changes):
    """A slow actor, or a learner in a long update."""
    assert "stale snapshots" not in faults(examined({"policy_version": (100, 100)}, {}, {}, changes))
    assert "stale snapshots" not in faults(examined({}, {}, {}, {"messages_sent_total{trajectory}": (50, 51)} | changes))


SICK = {
    "dropping": ({"env_steps_dropped_total{stale}": (50, 450)}, "9 % of the env steps are dropped (stale 400)"),
    "bad messages": ({"messages_dropped_total{decode}": (0, 3)}, "3 messages are none of this run"),
    "refused": ({"handshakes_failed_total{key}": (2, 12)}, "came to nothing in 10 s (key 10)"),
    "out of memory": ({"sockets_reopened_total": (1, 3)}, "the learner dropped all connections 2 times"),
    "lagging": ({"policy_lag_versions_sum": (0, 240)}, "experience is 12 versions old, beyond 20 it is dropped"),
    "not finite": ({"training_metric{nonfinite_steps}": (0, 2)}, "gradients are not finite"),
    "leaking memory": (
        {"process_resident_memory_bytes": (500 * MIB, 512 * MIB)},
        "learner grew by 12 MiB in 10 s and holds 512 MiB",
    ),
    "checkpoints fail": ({"checkpoint_failures_total": (0, 1)}, "1 could not be written"),
    "old checkpoint": (
        {"checkpoint_last_success_timestamp_seconds": (NOW - 200, NOW - 200)},
        "the last one is 200 s old, wanted every 60 s",
    ),
    "actors missing": ({"peers_connected{actor}": (3, 2)}, "2 of 3 actors are connected"),
}


@pytest.mark.parametrize("name", SICK)
def test_each_fault_of_the_learners_figures_is_named(name):
    """One change to a healthy run, and that fault alone."""
    changes, words = SICK[name]
    found = faults(examined(changes))
    assert list(found) == [name]
    assert words in found[name]


WELL = {
    "a resume": {"env_steps_dropped_total{rolled_back}": (0, 4000)},
    "an actor that left": {"env_steps_dropped_total{unfinished}": (0, 4000)},
    "a look at the port": {"handshakes_failed_total{mechanism}": (0, 1)},
    "a few drops": {"env_steps_dropped_total{stale}": (50, 80)},
    "a young process": {
        "process_resident_memory_bytes": (200 * MIB, 500 * MIB), "process_start_time_seconds": (NOW - 60, NOW - 60),
        "checkpoint_last_success_timestamp_seconds": (0, 0),
    },
    "an allocator": {"process_resident_memory_bytes": (500 * MIB, 505 * MIB)},
    "no gradient step yet": {"training_metric{nonfinite_steps}": (float("nan"), float("nan"))},
}  # fmt: skip


@pytest.mark.parametrize("what", WELL)
def test_what_belongs_to_a_healthy_run_is_no_fault(what):
    """A doctor that cries at everything is not asked twice."""
    assert faults(examined(WELL[what])) == {}


def test_no_checkpoint_since_the_start_is_old_too():
    """The first one was due long ago."""
    found = faults(examined({"checkpoint_last_success_timestamp_seconds": (0, 0)}))
    assert "the last one is 9,000 s old" in found["old checkpoint"]


def test_a_restarted_learner_is_named_and_its_totals_are_no_losses():
    """What a resumed learner takes over from its checkpoint has not happened in this window."""
    resumed = {"process_start_time_seconds": (NOW - 9000, NOW - 5), "env_steps_dropped_total{stale}": (60_000, 50_000)}
    assert list(faults(examined(resumed | {"checkpoint_last_success_timestamp_seconds": (0, 0)}))) == ["restarted"]


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"connected": (1, 0)}, "cut off", "actor-2 has no learner"),
        ({"reconnects_total": (1, 3)}, "reconnects", "actor-2 lost the learner 2 times in 10 s"),
        ({"reconnects_total": (1, 2)}, "reconnects", "actor-2 lost the learner once"),
    ],
)
def test_an_actor_that_loses_its_learner_is_named(changes, name, words):
    """The others go on, so nobody else would tell."""
    assert words in faults(examined({}, {}, {}, changes))[name]


def test_what_a_probe_finds_wrong_is_passed_on():
    """A loop that hangs says so at /healthz."""
    found = faults(examined(complaint="intake has not ticked for 40.0 s; wanted every 15 s"))
    assert found == {"hung": "learner: intake has not ticked for 40.0 s; wanted every 15 s; restart it"}


def test_who_does_not_answer_is_away():
    """An actor of the run was killed, and nobody started it again."""
    begin = {"learner": moment(0, "learner", LEARNER), "actor-0": moment(0, "actor", ACTOR)}
    end = {"learner": moment(1, "learner", LEARNER), "actor-0": Reading(at=NOW, silence="connection refused")}
    assert faults(diagnose(compare(begin, end)))["away"] == "actor-0 does not answer: connection refused; see its log"


def test_a_learner_that_went_away_is_the_one_thing_to_say():
    """Without it nothing can be told of the run."""
    begin, end = {"learner": moment(0, "learner", LEARNER)}, {"learner": Reading(at=NOW, silence="timed out")}
    diagnosis = diagnose(compare(begin, end))
    assert (diagnosis.verdict.kind, diagnosis.gain, list(faults(diagnosis))) == (Kind.UNKNOWN, "", ["away"])


def test_a_run_that_has_ended_is_not_ill():
    """Its learner stays to answer, for an orchestrator: no updates, an old checkpoint, no actors, and all is well."""
    over = STILL | {"training": (0, 0), "peers_connected{actor}": (0, 0)}
    over |= {"checkpoint_last_success_timestamp_seconds": (NOW - 9999, NOW - 9999)}
    diagnosis = diagnose(
        compare({"learner": moment(0, "learner", LEARNER | over)}, {"learner": moment(1, "learner", LEARNER | over)})
    )
    assert diagnosis.faults == ()
    assert "does not train" in diagnosis.verdict.sentence
