"""The supervisor's decisions, without a process or a clock."""

import pytest

from services.cli.train.instructions import (
    Kill,
    Outcome,
    ReportCrash,
    ReportFailure,
    ReportRefusal,
    Start,
    Terminate,
)
from services.cli.train.supervisor import Supervisor

pytestmark = pytest.mark.pure


def begun(*, actors=2, evaluator=True, resume=False, works=True):
    """Return a run with all children started at time 0, whose learner has accepted experience where it `works`."""
    core = Supervisor(actors=actors, evaluator=evaluator, resume=resume)
    core.begin(0.0)
    core.tick(core.timeouts.evaluator_start)
    if works:
        core.count_experience(accepted=0, refused=0, now=0.0)
        core.count_experience(accepted=256, refused=0, now=0.0)
    return core


def crash(core, name, times, *, now=1.0):
    """Let a child crash so many times, each time after its restart; return the instructions after the last crash."""
    for _ in range(times - 1):
        core.exited(name, 1, now)
        core.tick(now + 31.0)
        now += 32.0
    return core.exited(name, 1, now)


def gone(core, *names, code=0, now):
    """All instructions that follow when `names` exit one after the other."""
    return [instruction for name in names for instruction in core.exited(name, code, now)]


def test_a_run_starts_the_learner_first_and_the_evaluator_last():
    """All others look for the learner; only it hears that the run continues an older one."""
    core = Supervisor(actors=2, evaluator=True, resume=True)
    assert core.begin(0.0) == [Start("learner", resume=True), Start("actor-0"), Start("actor-1")]
    assert core.tick(1.0) == []
    assert core.tick(3.0) == [Start("evaluator")]
    assert core.tick(4.0) == []
    assert core.restarts == 0


def test_a_run_that_stops_at_its_start_starts_no_evaluator():
    core = Supervisor(actors=1, evaluator=True)
    core.begin(0.0)
    assert core.request_stop(1.0) == [Terminate("learner")]
    core.exited("learner", 0, 2.0)
    core.exited("actor-0", 0, 2.0)
    assert core.tick(9.0) == []
    assert core.done


def with_env_workers():
    """Return a run of two policy servers with two env workers each, begun at time 0."""
    core = Supervisor(actors=2, evaluator=False, env_workers=2)
    return core, core.begin(0.0)


def test_each_policy_server_has_env_workers_of_its_own_that_restart_alone():
    core, begun = with_env_workers()
    names = ["env_worker-0-0", "env_worker-0-1", "env_worker-1-0", "env_worker-1-1"]
    assert begun == [Start("learner"), Start("actor-0"), Start("actor-1"), *map(Start, names)]
    core.count_experience(accepted=256, refused=0, now=1.0)
    assert core.exited("env_worker-1-0", -9, 100.0) == [ReportCrash("env_worker-1-0", -9)]
    assert core.tick(100.5) == [Start("env_worker-1-0")]
    core.exited("learner", 0, 200.0)
    stopped = core.tick(206.0)
    assert stopped == [Terminate(name) for name in ("actor-0", "actor-1", *names)]


def test_a_run_ends_where_every_env_worker_crashes_before_any_experience_is_accepted():
    core, _ = with_env_workers()
    for name in ("env_worker-0-0", "env_worker-0-1", "env_worker-1-0"):
        assert crash(core, name, 2)[0] == ReportCrash(name, 1)
    failure, *_ = crash(core, "env_worker-1-1", 2)
    assert (failure.child, core.outcome) == ("env_worker-1-1", Outcome.FAILED)


def test_an_invalid_setting_of_an_env_worker_ends_the_run():
    core, _ = with_env_workers()
    failure, *_ = core.exited("env_worker-0-0", 2, 5.0)
    assert (failure.child, core.outcome) == ("env_worker-0-0", Outcome.REFUSED)


def test_a_killed_actor_restarts_alone_after_half_a_second():
    """A kill -9 of one actor in the middle of a run: the run goes on with one actor less for a moment."""
    core = begun()
    assert core.exited("actor-1", -9, 100.0) == [ReportCrash("actor-1", -9)]
    assert core.tick(100.4) == []
    assert core.tick(100.5) == [Start("actor-1")]
    assert core.restarts == 1


def test_an_actor_that_keeps_dying_waits_twice_as_long_each_time_up_to_a_bound():
    """An environment that crashes at its first step must not eat a core with restarts."""
    core, now, waits = begun(), 0.0, []
    for _ in range(9):
        core.exited("actor-0", 1, now)
        waited = next(half * 0.5 for half in range(1, 100) if core.tick(now + half * 0.5) == [Start("actor-0")])
        now += waited
        waits.append(waited)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_minute_of_health_starts_the_delays_afresh():
    """An actor that dies once an hour comes back at once each time."""
    core = begun()
    for now in (1.0, 10.0, 20.0):
        core.exited("actor-0", 1, now)
        core.tick(now + 5)
    core.exited("actor-0", 1, 25.0 + 60.0)
    assert core.tick(85.5) == [Start("actor-0")]


def test_a_run_ends_when_every_actor_crashes_twice_before_any_experience_was_accepted():
    core = begun(works=False)
    assert crash(core, "actor-0", 4) == [ReportCrash("actor-0", 1)]  # the other one may only be slow to start
    assert core.exited("actor-1", 1, 200.0) == [ReportCrash("actor-1", 1)]
    core.tick(300.0)
    reason = "2 crashes before any of its experience was accepted (exit code 1)"
    assert core.exited("actor-1", 1, 400.0) == [ReportFailure("actor-1", reason, 1), Terminate("learner")]
    assert core.outcome is Outcome.FAILED


def test_crashes_after_a_long_start_count_as_well():
    """A simulator that takes two minutes to start, and then fails."""
    core = begun(actors=1, works=False)
    core.exited("actor-0", 1, 120.0)
    core.tick(151.0)
    assert core.exited("actor-0", 1, 271.0)[0].child == "actor-0"
    assert core.outcome is Outcome.FAILED


def test_crashes_count_from_zero_whenever_experience_is_accepted():
    core, accepted = begun(actors=1), 256
    for now in (100.0, 500.0, 900.0):
        assert crash(core, "actor-0", 7, now=now) == [ReportCrash("actor-0", 1)]
        accepted += 256
        core.count_experience(accepted=accepted, refused=0, now=now + 300.0)
    assert core.outcome is Outcome.RUNNING
    (failed, *_) = crash(core, "actor-0", 8, now=1300.0)
    assert failed == ReportFailure("actor-0", "8 crashes since experience was last accepted (exit code 1)", 1)
    assert core.outcome is Outcome.FAILED


@pytest.mark.parametrize("code", [0, 2])
def test_the_end_of_an_actor_that_is_no_crash_is_reported_as_before(code):
    core = begun(actors=1, evaluator=False, works=False)
    assert all(not isinstance(instruction, ReportCrash) for instruction in core.exited("actor-0", code, 1.0))


def test_a_run_ends_when_all_experience_is_refused():
    core = begun(works=False)
    assert core.count_experience(accepted=0, refused=2, now=5.0) == []
    failed = ReportFailure("actor-0", "all its experience is refused (3 messages)", 1)
    assert core.count_experience(accepted=0, refused=3, now=6.0) == [failed, Terminate("learner")]
    assert core.outcome is Outcome.FAILED


def test_refused_experience_ends_no_run_whose_actors_are_elsewhere():
    core = begun(actors=0, works=False)
    assert core.count_experience(accepted=0, refused=99, now=5.0) == []
    assert core.outcome is Outcome.RUNNING


def test_a_run_ends_when_all_experience_is_refused_from_some_time_on():
    """NaN that begins in the middle: the learner evicts the actor after 16 messages, and then nothing is counted any more."""
    core = begun(actors=1)
    assert core.count_experience(accepted=512, refused=0, now=100.0) == []
    assert core.count_experience(accepted=512, refused=16, now=101.0) == [ReportRefusal(16)]
    assert core.tick(119.9) == []
    assert core.tick(120.0) == [
        ReportFailure("actor-0", "all its experience is refused (16 messages)", 1),
        Terminate("learner"),
    ]
    assert core.outcome is Outcome.FAILED


def test_experience_that_is_refused_beside_accepted_one_is_reported_once_a_minute():
    core = begun(actors=2)
    reports = []
    for second in range(1, 130):
        reports += core.count_experience(accepted=256 + 256 * second, refused=second, now=100.0 + second)
    assert reports == [ReportRefusal(1), ReportRefusal(60), ReportRefusal(60)]
    assert core.outcome is Outcome.RUNNING


def test_a_restarted_learner_counts_refusals_from_zero():
    core = begun(actors=1)
    core.count_experience(accepted=512, refused=15, now=100.0)
    core.count_experience(accepted=256, refused=0, now=110.0)  # back at its checkpoint
    assert core.count_experience(accepted=256, refused=2, now=190.0) == [ReportRefusal(2)]
    assert core.outcome is Outcome.RUNNING


@pytest.mark.parametrize(("resume", "works"), [(False, True), (True, False)])
def test_experience_of_before_a_resume_does_not_show_that_the_run_works(resume, works):
    core = Supervisor(actors=1, evaluator=False, resume=resume)
    core.begin(0.0)
    core.count_experience(accepted=1000, refused=0, now=1.0)
    assert core.works is works
    core.count_experience(accepted=1001, refused=0, now=2.0)
    assert core.works


def test_a_dead_learner_continues_from_its_checkpoint_and_no_actor_is_touched():
    """A kill -9 of the learner: actors reconnect by themselves to the learner that comes back."""
    core = begun()
    assert core.exited("learner", -9, 50.0) == [ReportCrash("learner", -9)]
    assert core.tick(50.5) == [Start("learner", resume=True)]


def test_a_learner_that_dies_again_and_again_is_given_up():
    """A learner out of memory at every start: after five restarts the run fails, and the workers are stopped."""
    core, now = begun(), 0.0
    for _ in range(5):
        now += 40.0
        assert core.exited("learner", -9, now) == [ReportCrash("learner", -9)]
        core.tick(now + 30)
    instructions = core.exited("learner", -9, now + 40)
    assert instructions[0] == ReportFailure("learner", "6 crashes in 300 seconds (signal 9)", -9)
    assert instructions[1:] == [Terminate("evaluator"), Terminate("actor-0"), Terminate("actor-1")]
    assert core.outcome is Outcome.FAILED


def test_deaths_long_ago_do_not_count_against_the_learner():
    """One crash a day for a week is not a crash loop."""
    core = begun()
    for day in range(1, 20):
        assert core.exited("learner", 1, day * 86400.0) == [ReportCrash("learner", 1)]
        assert core.tick(day * 86400.0 + 1) == [Start("learner", resume=True)]


@pytest.mark.parametrize("child", ["actor-1", "evaluator"])
def test_a_child_that_refuses_its_settings_ends_the_run_at_once(child):
    """Exit code 2 says that no restart can help: the learner saves, then all go."""
    core = begun()
    assert core.exited(child, 2, 3.0) == [ReportFailure(child, "a setting is invalid", 2), Terminate("learner")]
    others = {"evaluator", "actor-0", "actor-1"} - {child}
    assert set(core.exited("learner", 0, 5.0)) == {Terminate(name) for name in others}
    gone(core, *others, now=6.0)
    assert core.done
    assert core.outcome is Outcome.REFUSED


def test_a_learner_that_refuses_its_settings_is_not_restarted():
    """A port in use or a corrupt checkpoint: one message, not six."""
    core = begun(actors=1, evaluator=False)
    assert core.exited("learner", 2, 1.0) == [ReportFailure("learner", "a setting is invalid", 2), Terminate("actor-0")]
    assert core.outcome is Outcome.REFUSED


def test_the_end_of_the_learner_is_the_end_of_the_run():
    """The target is reached: actors were drained and leave by themselves, nobody is signalled."""
    core = begun()
    assert core.exited("learner", 0, 10.0) == []
    assert gone(core, "actor-0", "actor-1", "evaluator", now=12.0) == []
    assert core.done
    assert core.outcome is Outcome.FINISHED


def test_an_actor_that_does_not_leave_is_asked_and_then_killed():
    """An environment stuck in native code at the end of a run cannot hold the terminal."""
    core = begun(actors=2, evaluator=False)
    core.exited("learner", 0, 10.0)
    gone(core, "actor-0", now=11.0)
    assert core.tick(14.9) == []
    assert core.tick(15.0) == [Terminate("actor-1")]
    assert core.tick(20.9) == []
    assert core.tick(21.0) == [Kill("actor-1")]
    gone(core, "actor-1", code=-9, now=21.1)
    assert core.done
    assert core.outcome is Outcome.FINISHED


def test_actors_drained_before_the_learner_has_written_its_end_are_not_started_again():
    """At the target the learner drains its actors, then writes for seconds: a new actor would find nothing to do."""
    core = begun(actors=1, evaluator=False)
    core.exited("actor-0", 0, 100.0)
    assert core.tick(114.0) == []
    assert core.exited("learner", 0, 114.5) == []
    assert core.done


def test_an_actor_sent_away_while_the_run_goes_on_comes_back():
    """One actor gets SIGTERM by hand: it sends a Goodbye, and the supervisor restarts it."""
    core = begun(actors=1, evaluator=False)
    core.exited("actor-0", 0, 100.0)
    assert core.tick(160.0) == [Start("actor-0")]
    assert core.restarts == 0, "it did not die, and its log has no reason"


def test_ctrl_c_ends_the_learner_first_and_the_others_after_it():
    """The learner writes a last checkpoint while its actors still live, so that their last experience is counted."""
    core = begun()
    assert core.request_stop(30.0) == [Terminate("learner")]
    assert core.tick(44.0) == []
    assert core.exited("learner", 0, 44.5) == [Terminate("evaluator"), Terminate("actor-0"), Terminate("actor-1")]
    gone(core, "evaluator", "actor-0", "actor-1", now=46.0)
    assert core.done
    assert core.outcome is Outcome.STOPPED


def test_a_learner_that_does_not_stop_is_killed_and_the_run_counts_as_failed():
    """A learner that hangs while it saves: the user gets the prompt back with an error."""
    core = begun(actors=0, evaluator=False)
    core.request_stop(30.0)
    assert core.tick(49.9) == []
    assert core.tick(50.0) == [Kill("learner")]
    core.exited("learner", -9, 50.1)
    assert core.done
    assert core.outcome is Outcome.FAILED


@pytest.mark.parametrize("code", [-15, 143])
def test_ctrl_c_while_the_learner_still_starts_is_an_ordinary_stop(code):
    """A user interrupts after a typo in the command: the learner still imports its libraries and has nothing to save."""
    core = begun(actors=0, evaluator=False)
    core.request_stop(0.5)
    core.exited("learner", code, 0.6)
    core.request_stop(1.5)
    assert core.outcome is Outcome.STOPPED


def test_a_second_ctrl_c_while_a_learner_that_crashed_is_away_loses_progress():
    """Nothing was saved since its last checkpoint, which the exit code says."""
    core = begun(actors=1, evaluator=False)
    core.exited("learner", -9, 30.0)
    core.request_stop(30.1)
    assert core.request_stop(31.0) == [Kill("actor-0")]
    assert core.outcome is Outcome.KILLED


def test_a_second_ctrl_c_kills_whoever_is_left():
    """An impatient user gets the prompt back now."""
    core = begun(actors=1, evaluator=False)
    core.request_stop(30.0)
    assert core.request_stop(31.0) == [Kill("learner"), Kill("actor-0")]
    assert gone(core, "learner", "actor-0", code=-9, now=31.1) == []
    assert core.done
    assert core.outcome is Outcome.KILLED


@pytest.mark.parametrize(
    ("ended", "outcome"),
    [(("learner", 0), Outcome.FINISHED), (("actor-0", 2), Outcome.REFUSED), (("learner", 2), Outcome.REFUSED)],
)
def test_only_a_second_ctrl_c_kills_the_children_of_a_run_that_already_ends(ended, outcome):
    """The first one comes while the learner saves, or after it has: nothing may be lost, and the run ended as it did."""
    core = begun(evaluator=False)
    core.exited(*ended, 30.0)
    assert core.request_stop(31.0) == []
    left = [child for child in core._children if child != ended[0]]
    assert core.request_stop(32.0) == [Kill(child) for child in left]
    gone(core, *left, code=-9, now=32.1)
    assert (core.done, core.outcome) == (True, outcome)


def test_a_second_ctrl_c_after_the_learner_has_saved_loses_nothing():
    core = begun(evaluator=False)
    core.request_stop(30.0)
    core.exited("learner", 0, 31.0)
    assert core.request_stop(32.0) == [Kill("actor-0"), Kill("actor-1")]
    assert core.outcome is Outcome.STOPPED


def test_nobody_is_started_again_once_a_stop_was_asked_for():
    """An actor that happened to wait for its restart when Ctrl-C came stays down."""
    core = begun(actors=1, evaluator=False)
    core.exited("actor-0", 1, 29.9)
    core.request_stop(30.0)
    assert core.tick(35.0) == []


def test_ctrl_c_while_the_learner_waits_for_its_restart_sends_the_others_home_at_once():
    """There is no learner to wait for."""
    core = begun(actors=1, evaluator=False)
    core.exited("learner", 1, 29.9)
    assert core.request_stop(30.0) == [Terminate("actor-0")]
    gone(core, "actor-0", now=31.0)
    assert core.done


def test_more_actors_start_and_fewer_leave_politely():
    """`--actors auto` tries three and goes back to two: the third drains, and nobody starts it again."""
    core = begun(actors=1, evaluator=False)
    assert core.set_actors(3, 10.0) == [Start("actor-1"), Start("actor-2")]
    assert core.actors == 3
    assert core.set_actors(2, 20.0) == [Terminate("actor-2")]
    assert core.exited("actor-2", 0, 21.0) == []
    assert core.tick(500.0) == []
    assert core.exited("actor-1", -9, 501.0) == [ReportCrash("actor-1", -9)]
    assert core.tick(502.0) == [Start("actor-1")]


def test_an_actor_that_does_not_leave_when_scaled_down_is_killed():
    """It hangs; the run has one process too many on its cores."""
    core = begun(actors=2, evaluator=False)
    core.set_actors(1, 10.0)
    assert core.tick(15.9) == []
    assert core.tick(16.0) == [Kill("actor-1")]


def test_an_actor_that_waits_for_its_restart_is_forgotten_when_scaled_down_and_not_started_twice_when_scaled_up():
    """It died a moment before."""
    core = begun(actors=2, evaluator=False)
    core.exited("actor-1", -9, 10.0)
    assert core.set_actors(3, 10.1) == [Start("actor-2")]
    assert core.set_actors(1, 10.2) == [Terminate("actor-2")]
    core.exited("actor-2", 0, 10.3)
    assert core.tick(60.0) == []
    assert core.set_actors(2, 61.0) == [Start("actor-1")]


def test_nobody_is_started_for_a_run_that_ends():
    """The search and Ctrl-C at the same moment."""
    core = begun(actors=1)
    core.request_stop(10.0)
    assert core.set_actors(3, 10.1) == []


def test_each_rank_of_the_learner_restarts_with_resume_and_rank_0_ends_the_run():
    core = Supervisor(actors=1, evaluator=False, ranks=2)
    assert core.begin(0.0) == [Start("learner"), Start("learner-1"), Start("actor-0")]
    core.exited("learner-1", -9, 10.0)
    core.exited("learner", 1, 10.0)
    assert core.tick(11.0) == [Start("learner", resume=True), Start("learner-1", resume=True)]
    core.exited("learner", 0, 20.0)
    assert core.outcome is Outcome.FINISHED


def test_a_rank_that_crashes_again_and_again_ends_the_run_as_rank_0_does():
    """Rank 0 waits for it without a limit, so its own end would never come."""
    core = Supervisor(actors=1, evaluator=False, ranks=2)
    core.begin(0.0)
    assert crash(core, "learner-1", 5) == [ReportCrash("learner-1", 1)]
    failure, *_ = core.exited("learner-1", -9, 170.0)
    assert (failure.child, failure.reason) == ("learner-1", "6 crashes in 300 seconds (signal 9)")
    assert core.outcome is Outcome.FAILED


def with_ranks(ranks):
    """Return a run whose ranks have joined: it started at time 0, and experience was accepted at 10."""
    core = Supervisor(actors=1, evaluator=False, ranks=ranks)
    core.begin(0.0)
    core.count_experience(accepted=256, refused=0, now=10.0)
    return core


def test_a_rank_that_hangs_is_killed_after_another_has_ended_and_all_continue():
    """Rank 0 ended after its time limit, and waited forever for the one that hung."""
    core = with_ranks(3)
    core.exited("learner", 1, 100.0)
    core.exited("learner-2", 1, 100.1)
    assert core.tick(100.7) == [Start("learner", resume=True), Start("learner-2", resume=True)]
    assert core.tick(444.0) == []
    assert core.tick(445.0) == [Kill("learner-1")]
    core.exited("learner-1", -9, 445.1)
    assert core.tick(446.0) == [Start("learner-1", resume=True)]
    core.count_experience(accepted=512, refused=0, now=450.0)
    assert core.tick(1000.0) == []
    core.exited("learner-1", 1, 1000.0)  # the next time as well
    assert core.tick(1345.0) == [Kill("learner"), Kill("learner-2"), Start("learner-1", resume=True)]


def test_a_rank_that_ends_after_another_was_lost_costs_its_successor_nothing():
    """An actor of the rank that ended last sent experience meanwhile."""
    core = with_ranks(2)
    core.exited("learner-1", -9, 100.0)
    core.tick(100.5)
    core.count_experience(accepted=512, refused=0, now=101.0)
    core.exited("learner", 1, 102.0)
    assert core.tick(103.0) == [Start("learner", resume=True)]
    assert core.tick(1000.0) == []


def test_ranks_that_have_not_joined_wait_for_the_successor_of_one_that_ended():
    core = Supervisor(actors=1, evaluator=False, ranks=2)
    core.begin(0.0)
    core.exited("learner-1", 1, 10.0)
    assert core.tick(1000.0) == [Start("learner-1", resume=True)]


def test_crashes_of_ranks_are_counted_for_each_of_them():
    """A rank that is lost ends the others: that is one crash of the learner, and not two."""
    core = Supervisor(actors=1, evaluator=False, ranks=2)
    core.begin(0.0)
    for now in (10.0, 50.0, 90.0, 130.0, 170.0):
        for rank in ("learner-1", "learner"):
            assert core.exited(rank, 1, now) == [ReportCrash(rank, 1)]
        core.tick(now + 31.0)
    assert core.outcome is Outcome.RUNNING
