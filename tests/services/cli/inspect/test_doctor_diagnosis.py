"""The diagnosis, illness by illness, on given values: each is found where it is, and a healthy run has none."""

from dataclasses import replace

import pytest

from common.observability.bottleneck import Kind
from common.observability.deployment import ServiceSample, compare
from services.cli.inspect.doctor import diagnose

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
    "workers_connected{actor}": (3, 3),
    "ledger_env_steps{trained}": (500, 900),
    "env_steps_planned": (1000, 1000),
    "target_return": (475, 475),
    "episode_return_mean": (300, 310),
    "policy_version": (100, 120),
    "policy_lag_versions_sum": (0, 20),
    "policy_lag_versions_count": (0, 20),
    "policy_lag_limit_versions": (20, 20),
    "nonfinite_steps_total": (3, 3),
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


def sample(which, role, samples, **more):
    """One end of the window as a scrape shows it."""
    found = {}
    for name, ends in samples.items():
        metric, _, label = name.rstrip("}").partition("{")
        full = metric if metric.startswith("process_") else f"rookery_{role}_{metric}"
        found[full, label] = float(ends[which])
    return ServiceSample(at=NOW - 10 + 10 * which, role=role, samples=found, **more)


def examined(learner=None, *actors, **after):
    """The diagnosis of a healthy run with these changes; `after` changes the learner's second reading."""
    learner = LEARNER | (learner or {})
    actors = [ACTOR | actor for actor in (actors or ({}, {}, {}))]
    before = {"learner": sample(0, "learner", learner)}
    end = {"learner": sample(1, "learner", learner, **after)}
    for number, actor in enumerate(actors):
        before[f"actor-{number}"], end[f"actor-{number}"] = sample(0, "actor", actor), sample(1, "actor", actor)
    return diagnose(compare(before, end))


def faults(diagnosis):
    """Names and sentences."""
    return {finding.check.name: finding.sentence for finding in diagnosis.findings}


BUSY_ACTOR = {"phase_seconds_total{credit_wait}": (0, 0.0), "phase_seconds_total{env}": (0, 8.0)}
WAITING = {"phase_seconds_total{wait}": (0, 6.0), "phase_seconds_total{train}": (0, 3.5)}


def test_a_healthy_run_has_a_bottleneck_and_no_fault():
    """Every run has a bottleneck: that alone must not fail a check in a pipeline."""
    diagnosis = examined()
    assert diagnosis.findings == ()
    assert diagnosis.verdict.kind is Kind.LEARNER
    assert (
        diagnosis.gain
        == "at most 1.4 times as fast, the most that these actors could make; without that phase at most 10.0 times as fast"
    )


def test_the_finding_of_a_waiting_learner_has_the_number_of_actors_to_add():
    """It waits 60 %: three actors fill 40 %, so five more would do, and no more than 2.5 times is to be had."""
    diagnosis = examined(WAITING, BUSY_ACTOR, BUSY_ACTOR, BUSY_ACTOR)
    assert diagnosis.verdict.kind is Kind.ACTOR
    assert diagnosis.gain == (
        "at most 2.5 times as fast, the most that the learner could train on; "
        "5 more actors like the 3 here (140 env steps/s each) would feed it"
    )
    assert "the learner waits 60 %" in faults(diagnosis)["LearnerWaiting"]
    assert examined(WAITING, BUSY_ACTOR).gain == "at most 2.5 times as fast, the most that the learner could train on"


def test_ranks_are_diagnosed_as_one_learner():
    """One waits 5 % of its time and the other 95 %: together half. The second has no actors."""
    ranks, waits = {"ranks": (2, 2)}, {"phase_seconds_total{wait}": (0, 9.5), "phase_seconds_total{train}": (0, 0.5)}
    first = LEARNER | ranks | {"nonfinite_steps_total": (0, 7)}  # which each rank counts for all
    second = first | waits | {"phase_seconds_total{publish}": (0, 0), "workers_connected{actor}": (0, 0)}
    before, after = (
        {"learner": sample(which, "learner", first), "learner-1": sample(which, "learner", second)}
        | {f"actor-{number}": sample(which, "actor", ACTOR | BUSY_ACTOR) for number in range(3)}
        for which in (0, 1)
    )
    diagnosis = diagnose(compare(before, after))
    assert diagnosis.verdict.kind is Kind.ACTOR
    assert diagnosis.gain.startswith("at most 2.0 times as fast")
    assert "ActorsMissing" not in faults(diagnosis)
    assert faults(diagnosis)["NonFiniteLoss"].startswith("7 gradient steps were not finite")
    assert faults(diagnosis)["RankWithoutActors"].startswith("learner-1 has no actor and trains on nothing")


@pytest.mark.parametrize("name", ["ActorsMissing", "TargetNotReached"])
def test_sums_of_some_ranks_are_no_fault_of_the_run(name):
    changes, _ = SICK[name]
    assert faults(examined(changes | {"ranks": (2, 2)})) == {}


def test_a_rank_that_is_unreachable_is_named():
    before = {f"learner{name}": sample(0, "learner", LEARNER | {"ranks": (2, 2)}) for name in ("", "-1")}
    after = {
        "learner": sample(1, "learner", LEARNER | {"ranks": (2, 2)}),
        "learner-1": replace(before["learner-1"], samples={}, unreachable="gone"),
    }
    diagnosis = diagnose(compare(before, after))
    assert diagnosis.verdict.sentence == "unknown: the learner is unreachable (gone)"
    assert set(faults(diagnosis)) == {"LearnerDown"}


def test_a_learner_that_only_waits_is_promised_no_figure():
    """At 98 % the division gives 50 times: nobody has seen what the learner could do."""
    diagnosis = examined({"phase_seconds_total{wait}": (0, 490.0)}, BUSY_ACTOR, BUSY_ACTOR, BUSY_ACTOR)
    assert diagnosis.gain == "many times as fast, the most that the learner could train on"


def test_a_slow_network_is_found_by_the_messages_under_way():
    """Both sides wait, and of thirty message-seconds the queue had three."""
    waits = {"phase_seconds_total{credit_wait}": (0, 8.0), "phase_seconds_total{env}": (0, 0.0)}
    learner = WAITING | {"queue_seconds_total": (0, 3.0)}
    diagnosis = examined(learner, waits, waits, waits)
    assert diagnosis.verdict.kind is Kind.NETWORK
    assert diagnosis.gain == (
        "at most 2.5 times as fast, until the side that waits less is busy; "
        "a message is under way for 1.4 s, 90 % of that on the wire; the wire carries 5 MB/s"
    )
    diagnosis = examined(learner, waits)  # of three: the queue had messages of all
    assert diagnosis.verdict.kind is Kind.CREDIT_OR_NETWORK
    assert diagnosis.gain.endswith("; a message is under way for 1.4 s; the wire carries 5 MB/s")


def test_a_learner_with_an_eighth_of_a_core_is_promised_what_a_core_would_bring():
    """It computes for 9.5 s of ten and gets 1.2 CPU seconds."""
    diagnosis = examined({"computing_cpu_seconds_total": (0, 1.2)})
    assert (diagnosis.verdict.kind, diagnosis.verdict.share) == (Kind.CPU, pytest.approx(0.83))
    assert diagnosis.gain == "at most 5.9 times as fast, if a core were always free"
    assert diagnosis.findings == ()


def test_a_cpu_limit_that_stops_the_container_is_the_reason_for_a_core_that_lacks():
    limit = {"cpu_limit_cores": (0.5, 0.5), "cpu_limit_periods_total{throttled}": (10, 106)}
    starved = {"computing_cpu_seconds_total": (0, 1.2), **limit, "cpu_limit_periods_total{not_throttled}": (5, 9)}
    assert "the CPU limit of 0.5 cores stops the container in 96 % of its periods" in examined(starved).verdict.sentence
    assert "CPU limit of" not in examined(starved | {"cpu_limit_periods_total{throttled}": (106, 106)}).verdict.sentence


def test_without_actors_the_findings_use_the_learners_metrics_alone():
    """Only the learner's address was given."""
    learner = LEARNER | WAITING
    diagnosis = diagnose(compare({"learner": sample(0, "learner", learner)}, {"learner": sample(1, "learner", learner)}))
    assert diagnosis.verdict.kind is Kind.ACTOR
    assert diagnosis.gain == "at most 2.5 times as fast, the most that the learner could train on"
    assert list(faults(diagnosis)) == ["LearnerWaiting"]


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
    diagnosis = examined(STILL | {"workers_connected{actor}": (connected, connected)}, IDLE, IDLE, IDLE)
    assert word in faults(diagnosis)["LearnerStalled"]
    assert "LearnerWaiting" not in faults(diagnosis)
    assert (diagnosis.verdict.sentence, diagnosis.gain) == ("unknown: no env step is made, received or trained on", "")


def test_a_long_rollout_is_no_standstill():
    """Nothing came in the window, but the actors play: the learner waits, and is not stalled."""
    found = faults(examined(STILL, BUSY_ACTOR, BUSY_ACTOR, BUSY_ACTOR))
    assert "LearnerWaiting" in found
    assert "LearnerStalled" not in found


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
    sentence = faults(examined({}, {}, {}, lame))["ActorStraggler"]
    assert sentence.startswith("actor-2 makes 40 env steps/s, the median is 140; it spends 82 % in env")
    assert "ActorStraggler" not in faults(examined({}, {}, {}, lame | {"env_steps_total": (5000, 5701)}))


def test_an_actor_that_waits_for_credit_is_no_straggler():
    """The learner takes less of it than of the others: it is not slow."""
    waits = {"env_steps_total": (5000, 5400), "phase_seconds_total{credit_wait}": (0, 3.0)}
    assert "ActorStraggler" not in faults(examined({}, {}, {}, waits))


def test_an_actor_without_a_learner_is_no_straggler():
    alone = {"env_steps_total": (0, 0), "connected": (0, 0)} | dict.fromkeys([k for k in ACTOR if k.startswith("phase_")], (0, 0))
    found = faults(examined({}, {}, {}, alone))
    assert "ActorStraggler" not in found
    assert "WorkerDisconnected" in found


def test_of_two_actors_neither_is_the_straggler():
    """Which of them is the odd one out?"""
    assert faults(examined({"workers_connected{actor}": (2, 2)}, {}, {"env_steps_total": (5000, 5001)})) == {}


def test_an_actor_that_gets_no_policies_is_named():
    """It began seven rollouts by version 99, and 100 was there before the first."""
    diagnosis = examined({}, {}, {}, {"policy_version": (99, 99)})
    assert faults(diagnosis)["SnapshotsStale"].startswith("actor-2 has acted by version 99 through 7 rollouts, the newest is 120")
    assert diagnosis.verdict.kind is Kind.LEARNER


def test_policies_that_do_not_arrive_are_the_bottleneck_where_the_learner_waits():
    """The learner throws away what is too old: by the phases alone one would add actors."""
    old = BUSY_ACTOR | {"policy_version": (99, 99)}
    diagnosis = examined(WAITING, old, old, old)
    assert diagnosis.verdict.kind is Kind.NETWORK
    assert "new policies do not reach 100 % of the actors" in diagnosis.verdict.sentence
    assert diagnosis.gain == ""


def test_one_of_several_actors_without_new_policies_is_a_fault_and_no_bottleneck():
    diagnosis = examined(WAITING, BUSY_ACTOR, BUSY_ACTOR, BUSY_ACTOR | {"policy_version": (99, 99)})
    assert diagnosis.verdict.kind is Kind.ACTOR
    assert "SnapshotsStale" in faults(diagnosis)


@pytest.mark.parametrize(
    "changes",
    [
        {"policy_version": (100, 100)},  # the learner published none
        {"policy_version": (99, 99), "messages_sent_total{trajectory}": (50, 51)},  # it is still at its first rollout
    ],
)
def test_an_actor_that_could_not_have_a_newer_policy_is_not_blamed(changes):
    """A slow actor, or a learner in a long update."""
    assert "SnapshotsStale" not in faults(examined({"policy_version": (100, 100)}, {}, {}, changes))
    assert "SnapshotsStale" not in faults(examined({}, {}, {}, {"messages_sent_total{trajectory}": (50, 51)} | changes))


SICK = {
    "ExperienceDropped": ({"env_steps_dropped_total{stale}": (50, 450)}, "9 % of the env steps are dropped (stale 400)"),
    "DecodeErrors": ({"messages_dropped_total{decode}": (0, 3)}, "3 messages are none of this run"),
    "TargetNotReached": (
        {"ledger_env_steps{trained}": (980, 980), "episode_return_mean": (300, 300)},
        "98 % of the env steps are spent, and the mean return is 300 of 475",
    ),
    "WorkersRefused": ({"handshakes_failed_total{key}": (2, 12)}, "failed in 10 s (key 10)"),
    "SocketReopened": ({"sockets_reopened_total": (1, 3)}, "the learner dropped all connections 2 times"),
    "PolicyLagHigh": ({"policy_lag_versions_sum": (0, 240)}, "experience is 12 versions old, beyond 20 it is dropped"),
    "ReplayShrinks": (
        {"training_metric{replay_incomplete}": (0.1, 0.34)},
        "34 % of it are blocks that are not full; set actor.count to all actors that join",
    ),
    "NonFiniteLoss": ({"nonfinite_steps_total": (3, 5)}, "2 gradient steps were not finite and left out"),
    "MemoryGrowing": (
        {"process_resident_memory_bytes": (500 * MIB, 512 * MIB), "training_metric{replay_env_steps}": (9000, 9100)},
        "learner grew by 12 MiB in 10 s and holds 512 MiB",
    ),
    "DescriptorsShort": (
        {"process_open_fds": (900, 900), "process_max_fds": (1024, 1024)},
        "learner has 900 of 1,024 files and connections open",
    ),
    "CheckpointFailing": ({"checkpoint_failures_total": (0, 1)}, "1 could not be written"),
    "UploadFailing": ({"upload_failures_total": (0, 2)}, "2 to the store failed"),
    "CheckpointTooOld": (
        {"checkpoint_last_success_timestamp_seconds": (NOW - 200, NOW - 200)},
        "the last one is 200 s old, wanted every 60 s",
    ),
    "ActorsMissing": ({"workers_connected{actor}": (3, 2)}, "2 of 3 actors are connected"),
}


@pytest.mark.parametrize(("evaluation", "seen"), [(300, "the last greedy evaluation is 300 of 475"), (float("nan"), "")])
def test_a_spent_budget_is_named_where_the_target_is_one_of_evaluations(evaluation, seen):
    """The training episodes have no target; the evaluations of the sampled policy have none either."""
    spent = {"ledger_env_steps{trained}": (980, 980), "target_return": (float("nan"), float("nan"))}
    spent |= {"target_evaluation_return": (475, 475), "evaluation_return_mean{sampled}": (100, 100)}
    found = faults(examined(spent | {"evaluation_return_mean{greedy}": (evaluation, evaluation)}))
    expected = {"TargetNotReached": f"98 % of the env steps are spent, and {seen}; raise target.env_steps"}
    assert found == (expected if seen else {})


@pytest.mark.parametrize("name", SICK)
def test_each_fault_in_the_learners_metrics_is_named(name):
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
    "a replay memory that fills": {
        "process_resident_memory_bytes": (500 * MIB, 540 * MIB), "training_metric{replay_env_steps}": (10_000, 14_000),
    },
    "a start of minutes": {
        "checkpoint_last_success_timestamp_seconds": (0, 0), "process_start_time_seconds": (NOW - 600, NOW - 600),
    },
    "an allocator": {"process_resident_memory_bytes": (500 * MIB, 505 * MIB)},
}  # fmt: skip


@pytest.mark.parametrize("what", WELL)
def test_what_belongs_to_a_healthy_run_is_no_fault(what):
    """A doctor that cries at everything is not asked twice."""
    assert faults(examined(WELL[what])) == {}


@pytest.mark.parametrize("ends", [(0, 1), (1, 1)])
def test_an_evicted_actor_is_named_with_the_reason_while_it_is_not_connected(ends):
    """The learner received nothing from it in these ten seconds: the refusals are of before."""
    refused = {"workers_evicted_total": ends, "messages_dropped_total{non_finite}": (16, 16)}
    finding = faults(examined(refused | {"workers_connected{actor}": (3, 2)}))["WorkersEvicted"]
    assert "only bad messages came from them (non_finite 16)" in finding
    assert "WorkersEvicted" not in faults(examined(refused | {"workers_evicted_total": (1, 1)}))


def test_no_checkpoint_since_the_start_is_old_too():
    """The first one was due long ago."""
    trains = {"phase_seconds_total{wait}": (8890, 8890.5)}
    found = faults(examined({"checkpoint_last_success_timestamp_seconds": (0, 0)} | trains))
    assert "none was written in 8,900 s of training, wanted every 60 s" in found["CheckpointTooOld"]


@pytest.mark.parametrize(("uploaded", "newer"), [(NOW - 1030, "980 s"), (0, "8,950 s"), (NOW - 900, ""), (float("nan"), "")])
def test_uploads_that_hang_are_named_by_the_age_of_the_copy(uploaded, newer):
    """None of them has failed; the newest checkpoint is of 50 s ago, and the process of 9,000."""
    found = faults(examined({"upload_last_success_timestamp_seconds": (uploaded, uploaded)}))
    if newer:
        assert f"the copy in the store is {newer} older than the newest checkpoint" in found["UploadFailing"]
    else:
        assert found == {}


def test_a_restarted_learner_is_named_and_its_totals_are_no_losses():
    """The totals that a resumed learner takes over from its checkpoint are not of this window."""
    resumed = {"process_start_time_seconds": (NOW - 9000, NOW - 5), "env_steps_dropped_total{stale}": (60_000, 50_000)}
    assert list(faults(examined(resumed | {"checkpoint_last_success_timestamp_seconds": (0, 0)}))) == ["ProcessRestarted"]


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"connected": (1, 0)}, "WorkerDisconnected", "actor-2 has no learner"),
        ({"reconnects_total": (1, 3)}, "WorkerReconnects", "actor-2 lost the learner 2 times in 10 s"),
        ({"reconnects_total": (1, 2)}, "WorkerReconnects", "actor-2 lost the learner once"),
    ],
)
def test_an_actor_that_loses_its_learner_is_named(changes, name, words):
    """No other process reports it: the others continue."""
    assert words in faults(examined({}, {}, {}, changes))[name]


@pytest.mark.parametrize(("missing", "held", "share"), [(1400, 1, "50 %"), (0, 0, "100 %")])
def test_a_policy_server_without_some_of_its_env_workers_is_named(missing, held, share):
    """The run goes on with the rows of the others, or, without any, with those of other actors."""
    before, after = ({"learner": sample(end, "learner", LEARNER), "actor-0": sample(end, "actor", ACTOR)} for end in (0, 1))
    steps = 5000.0 + (1400.0 if held else 0.0)
    before["actor-0"].samples.update({("rookery_policy_server_missing_rows_total", ""): 40.0})
    after["actor-0"].samples.update({
        ("rookery_policy_server_missing_rows_total", ""): 40.0 + missing,
        ("rookery_policy_server_env_workers", ""): float(held),
        ("rookery_actor_env_steps_total", ""): steps,
    })  # fmt: skip
    found = faults(diagnose(compare(before, after)))
    assert found["EnvWorkersMissing"].startswith(f"{share} of the rows of actor-0 are missing (env workers connected: {held})")


def test_an_env_worker_that_loses_its_policy_server_is_named():
    samples = {"connected": (1, 0), "env_steps_total": (0, 100), "phase_seconds_total{wait}": (0, 10.0)}
    before, after = (
        {"learner": sample(end, "learner", LEARNER), "10.0.0.9:9100": sample(end, "env_worker", samples)} for end in (0, 1)
    )
    found = faults(diagnose(compare(before, after)))["WorkerDisconnected"]
    assert found == "env worker 10.0.0.9:9100 has no policy server; look whether it reaches the address of the policy server"


def test_what_a_probe_finds_wrong_is_passed_on():
    """/healthz reports a loop that hangs."""
    found = faults(examined(unhealthy="intake has not ticked for 40.0 s; wanted every 15 s"))
    assert found == {"LoopHung": "learner: intake has not ticked for 40.0 s; wanted every 15 s; restart it"}


def test_a_worker_that_does_not_answer_is_a_fault():
    """An actor of the run was killed, and nobody started it again."""
    begin = {"learner": sample(0, "learner", LEARNER), "actor-0": sample(0, "actor", ACTOR)}
    end = {"learner": sample(1, "learner", LEARNER), "actor-0": ServiceSample(at=NOW, unreachable="connection refused")}
    assert (
        faults(diagnose(compare(begin, end)))["WorkerUnreachable"] == "actor-0 does not answer: connection refused; see its log"
    )


def test_an_unreachable_learner_is_the_only_fault():
    """Without it nothing can be said about the run."""
    begin, end = {"learner": sample(0, "learner", LEARNER)}, {"learner": ServiceSample(at=NOW, unreachable="timed out")}
    diagnosis = diagnose(compare(begin, end))
    assert (diagnosis.verdict.kind, diagnosis.gain, list(faults(diagnosis))) == (Kind.UNKNOWN, "", ["LearnerDown"])
    assert diagnosis.verdict.sentence == "unknown: the learner is unreachable (timed out)"


def test_a_learner_that_came_within_the_measurement_has_no_bottleneck_yet():
    """One sample is of no time: no rate and no share follows from it."""
    idle = STILL | {"workers_connected{actor}": (1, 1)}
    actor = {"actor-0": sample(0, "actor", ACTOR)}, {"actor-0": sample(1, "actor", ACTOR)}
    diagnosis = diagnose(compare(actor[0], actor[1] | {"learner": sample(1, "learner", LEARNER | idle)}))
    assert diagnosis.verdict.sentence == "unknown: the learner was not measured at both ends of this time"
    assert diagnosis.findings == ()


def test_a_run_that_has_ended_is_not_ill():
    """Its learner stays to answer, for an orchestrator: no updates, an old checkpoint, no actors, and all is well."""
    over = STILL | {"training": (0, 0), "workers_connected{actor}": (0, 0)}
    over |= {"checkpoint_last_success_timestamp_seconds": (NOW - 9999, NOW - 9999)}
    diagnosis = diagnose(
        compare({"learner": sample(0, "learner", LEARNER | over)}, {"learner": sample(1, "learner", LEARNER | over)})
    )
    assert diagnosis.findings == ()
    assert "does not train" in diagnosis.verdict.sentence
