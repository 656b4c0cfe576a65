"""The supervisor's decisions, without a process or a clock."""

import pytest

from services.cli.supervisor import (
    Begin,
    Exited,
    GiveUp,
    Kill,
    Outcome,
    Scale,
    Start,
    StopRequested,
    Supervisor,
    Terminate,
    Tick,
)

pytestmark = pytest.mark.pure


def begun(*, actors=2, evaluator=True, resume=False):
    """A run whose children have all just started, at time 0."""
    core = Supervisor(actors=actors, evaluator=evaluator, resume=resume)
    core.handle(Begin(), 0.0)
    return core


def gone(core, *names, code=0, now):
    """All instructions that follow when `names` exit one after the other."""
    return [instruction for name in names for instruction in core.handle(Exited(name, code), now)]


def test_a_run_starts_the_learner_first_and_everybody_once():
    """All others look for the learner; only it hears that the run continues an older one."""
    core = Supervisor(actors=2, evaluator=True, resume=True)
    assert core.handle(Begin(), 0.0) == [Start("learner", resume=True), Start("evaluator"), Start("actor-0"), Start("actor-1")]
    assert core.handle(Tick(), 1.0) == []


def test_a_killed_actor_comes_back_alone_after_half_a_second():
    """A kill -9 of one actor in the middle of a run: the run goes on with one actor less for a moment."""
    core = begun()
    assert core.handle(Exited("actor-1", -9), 100.0) == []
    assert core.handle(Tick(), 100.4) == []
    assert core.handle(Tick(), 100.5) == [Start("actor-1")]
    assert core.restarts == {"learner": 0, "evaluator": 0, "actor-0": 0, "actor-1": 1}


def test_an_actor_that_keeps_dying_waits_twice_as_long_each_time_up_to_a_bound():
    """An environment that crashes at its first step must not eat a core with restarts."""
    core, now, waits = begun(), 0.0, []
    for _ in range(9):
        core.handle(Exited("actor-0", 1), now)
        waited = next(half * 0.5 for half in range(1, 100) if core.handle(Tick(), now + half * 0.5) == [Start("actor-0")])
        now += waited
        waits.append(waited)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_minute_of_health_starts_the_delays_afresh():
    """An actor that dies once an hour comes back at once each time."""
    core = begun()
    for now in (1.0, 10.0, 20.0):
        core.handle(Exited("actor-0", 1), now)
        core.handle(Tick(), now + 5)
    core.handle(Exited("actor-0", 1), 25.0 + 60.0)
    assert core.handle(Tick(), 85.5) == [Start("actor-0")]


def test_a_dead_learner_continues_from_its_checkpoint_and_no_actor_is_touched():
    """A kill -9 of the learner: actors reconnect by themselves to the learner that comes back."""
    core = begun()
    assert core.handle(Exited("learner", -9), 50.0) == []
    assert core.handle(Tick(), 50.5) == [Start("learner", resume=True)]


def test_a_learner_that_dies_again_and_again_is_given_up():
    """A learner out of memory at every start: after five restarts the user is told, and the others are sent home."""
    core, now = begun(), 0.0
    for _ in range(5):
        now += 40.0
        assert core.handle(Exited("learner", -9), now) == []
        core.handle(Tick(), now + 30)
    instructions = core.handle(Exited("learner", -9), now + 40)
    assert instructions[0] == GiveUp("learner", "it died 6 times in 300 seconds (signal 9)", -9)
    assert instructions[1:] == [Terminate("evaluator"), Terminate("actor-0"), Terminate("actor-1")]
    assert core.outcome is Outcome.FAILED


def test_deaths_long_ago_do_not_count_against_the_learner():
    """One crash a day for a week is not a crash loop."""
    core = begun()
    for day in range(1, 20):
        assert core.handle(Exited("learner", 1), day * 86400.0) == []
        assert core.handle(Tick(), day * 86400.0 + 1) == [Start("learner", resume=True)]


@pytest.mark.parametrize("child", ["actor-1", "evaluator"])
def test_a_child_that_refuses_its_settings_ends_the_run_at_once(child):
    """Exit code 2 says that no restart can help: the learner saves, then all go."""
    core = begun()
    assert core.handle(Exited(child, 2), 3.0) == [GiveUp(child, "its settings cannot work", 2), Terminate("learner")]
    others = {"evaluator", "actor-0", "actor-1"} - {child}
    assert set(core.handle(Exited("learner", 0), 5.0)) == {Terminate(name) for name in others}
    gone(core, *others, now=6.0)
    assert core.done
    assert core.outcome is Outcome.REFUSED


def test_a_learner_that_refuses_its_settings_is_not_restarted():
    """A port in use or a corrupt checkpoint: one message, not six."""
    core = begun(actors=1, evaluator=False)
    assert core.handle(Exited("learner", 2), 1.0) == [GiveUp("learner", "its settings cannot work", 2), Terminate("actor-0")]
    assert core.outcome is Outcome.REFUSED


def test_the_end_of_the_learner_is_the_end_of_the_run():
    """The target is reached: actors were drained and leave by themselves, nobody is signalled."""
    core = begun()
    assert core.handle(Exited("learner", 0), 10.0) == []
    assert gone(core, "actor-0", "actor-1", "evaluator", now=12.0) == []
    assert core.done
    assert core.outcome is Outcome.FINISHED


def test_an_actor_that_does_not_leave_is_asked_and_then_killed():
    """An environment stuck in native code at the end of a run cannot hold the terminal."""
    core = begun(actors=2, evaluator=False)
    core.handle(Exited("learner", 0), 10.0)
    gone(core, "actor-0", now=11.0)
    assert core.handle(Tick(), 14.9) == []
    assert core.handle(Tick(), 15.0) == [Terminate("actor-1")]
    assert core.handle(Tick(), 20.9) == []
    assert core.handle(Tick(), 21.0) == [Kill("actor-1")]
    gone(core, "actor-1", code=-9, now=21.1)
    assert core.done
    assert core.outcome is Outcome.FINISHED


def test_actors_drained_before_the_learner_has_written_its_end_are_not_started_again():
    """At the target the learner drains its actors, then writes for seconds: a new actor would find nothing to do."""
    core = begun(actors=1, evaluator=False)
    core.handle(Exited("actor-0", 0), 100.0)
    assert core.handle(Tick(), 114.0) == []
    assert core.handle(Exited("learner", 0), 114.5) == []
    assert core.done


def test_an_actor_sent_away_while_the_run_goes_on_comes_back():
    """Somebody sent SIGTERM to one actor by hand; it left politely, and the run wants it back."""
    core = begun(actors=1, evaluator=False)
    core.handle(Exited("actor-0", 0), 100.0)
    assert core.handle(Tick(), 160.0) == [Start("actor-0")]


def test_ctrl_c_ends_the_learner_first_and_the_others_after_it():
    """The learner writes a last checkpoint while its actors still live, so that their last experience is counted."""
    core = begun()
    assert core.handle(StopRequested(), 30.0) == [Terminate("learner")]
    assert core.handle(Tick(), 44.0) == []
    assert core.handle(Exited("learner", 0), 44.5) == [Terminate("evaluator"), Terminate("actor-0"), Terminate("actor-1")]
    gone(core, "evaluator", "actor-0", "actor-1", now=46.0)
    assert core.done
    assert core.outcome is Outcome.STOPPED


def test_a_learner_that_does_not_stop_is_killed_and_the_run_counts_as_failed():
    """A learner that hangs while it saves: the user gets the prompt back and is not told that all is well."""
    core = begun(actors=0, evaluator=False)
    core.handle(StopRequested(), 30.0)
    assert core.handle(Tick(), 49.9) == []
    assert core.handle(Tick(), 50.0) == [Kill("learner")]
    core.handle(Exited("learner", -9), 50.1)
    assert core.done
    assert core.outcome is Outcome.FAILED


@pytest.mark.parametrize("code", [-15, 143])
def test_ctrl_c_while_the_learner_still_starts_is_an_ordinary_stop(code):
    """A user interrupts after a typo in the command: the learner still imports its libraries and has nothing to save."""
    core = begun(actors=0, evaluator=False)
    core.handle(StopRequested(), 0.5)
    core.handle(Exited("learner", code), 0.6)
    assert core.outcome is Outcome.STOPPED


def test_a_second_ctrl_c_kills_whoever_is_left():
    """An impatient user gets the prompt back now."""
    core = begun(actors=1, evaluator=False)
    core.handle(StopRequested(), 30.0)
    assert core.handle(StopRequested(), 31.0) == [Kill("learner"), Kill("actor-0")]
    assert gone(core, "learner", "actor-0", code=-9, now=31.1) == []
    assert core.done
    assert core.outcome is Outcome.KILLED


def test_nobody_is_started_again_once_a_stop_was_asked_for():
    """An actor that happened to wait for its restart when Ctrl-C came stays down."""
    core = begun(actors=1, evaluator=False)
    core.handle(Exited("actor-0", 1), 29.9)
    core.handle(StopRequested(), 30.0)
    assert core.handle(Tick(), 35.0) == []


def test_ctrl_c_while_the_learner_waits_for_its_restart_sends_the_others_home_at_once():
    """There is no learner to wait for."""
    core = begun(actors=1, evaluator=False)
    core.handle(Exited("learner", 1), 29.9)
    assert core.handle(StopRequested(), 30.0) == [Terminate("actor-0")]
    gone(core, "actor-0", now=31.0)
    assert core.done


def test_more_actors_start_and_fewer_leave_politely():
    """`--actors auto` tries three and goes back to two: the third drains, and nobody starts it again."""
    core = begun(actors=1, evaluator=False)
    assert core.handle(Scale(3), 10.0) == [Start("actor-1"), Start("actor-2")]
    assert core.actors == 3
    assert core.handle(Scale(2), 20.0) == [Terminate("actor-2")]
    assert core.handle(Exited("actor-2", 0), 21.0) == []
    assert core.handle(Tick(), 500.0) == []
    assert core.handle(Exited("actor-1", -9), 501.0) == []
    assert core.handle(Tick(), 502.0) == [Start("actor-1")]


def test_an_actor_that_does_not_leave_when_scaled_down_is_killed():
    """It hangs; the run has one process too many on its cores."""
    core = begun(actors=2, evaluator=False)
    core.handle(Scale(1), 10.0)
    assert core.handle(Tick(), 15.9) == []
    assert core.handle(Tick(), 16.0) == [Kill("actor-1")]


def test_an_actor_that_waits_for_its_restart_is_forgotten_when_scaled_down_and_not_started_twice_when_scaled_up():
    """It died a moment before."""
    core = begun(actors=2, evaluator=False)
    core.handle(Exited("actor-1", -9), 10.0)
    assert core.handle(Scale(3), 10.1) == [Start("actor-2")]
    assert core.handle(Scale(1), 10.2) == [Terminate("actor-2")]
    core.handle(Exited("actor-2", 0), 10.3)
    assert core.handle(Tick(), 60.0) == []
    assert core.handle(Scale(2), 61.0) == [Start("actor-1")]


def test_nobody_is_started_for_a_run_that_ends():
    """The search and Ctrl-C at the same moment."""
    core = begun(actors=1)
    core.handle(StopRequested(), 10.0)
    assert core.handle(Scale(3), 10.1) == []
