"""The books of a run: what is counted as trained, when it is solved, when it is over, and what the summary says."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.algorithms.settings import PPOSettings
from common.config.schema import Settings
from common.config.sections import CheckpointSettings, RunSettings, TargetSettings
from common.errors import ConfigError
from common.observability.learner_stats import IntakeStats
from common.protocol.events import Experience, WorkerKey
from common.protocol.messages import Evaluation
from services.learner.coverage import Coverage, EpisodeCoverage
from services.learner.record import EPISODES, RunRecord

pytestmark = pytest.mark.pure

STATS = IntakeStats(ledger={"produced": 9}, queue_depth=1, queue_capacity=4, actors=2, evaluators=1)


def record(*, started_at=100.0, frame_skip=4, mode="asynchronous", **target):
    """A run that began at second 100."""
    settings = Settings(run=RunSettings(preset="toy", seed=7, mode=mode), target=TargetSettings(**{"env_steps": 5000} | target))
    return RunRecord(settings=settings, run_id="run-1", frame_skip=frame_skip, started_at=started_at)


def evaluation(mode, *returns, version=3):
    """Return the report of an evaluator."""
    arrays = {"episode_return": np.array(returns, np.float32), "episode_length": np.ones(len(returns), np.int32)}
    return Evaluation(version=version, mode=mode, arrays=arrays)


def test_a_run_is_solved_only_by_a_full_hundred_episodes():
    """Ninety-nine perfect episodes are luck that has not been tested: the mean is of 100."""
    run = record(mean100=10.0)
    run.ended([10.0] * (EPISODES - 1), [1] * (EPISODES - 1), now=110.0)
    assert not run.solved
    assert run.mean_return == 10.0
    run.env_steps = 640
    run.ended([10.0], [1], now=111.5)
    assert run.solved_at == {"wall_seconds": 11.5, "env_steps": 640}
    assert run.over(111.5) == "target reached"


def test_a_mean_that_is_shown_as_its_target_has_reached_it():
    """The mean of float32 returns of 0.9 is a little less."""
    run = record(mean100=0.9)
    run.ended([float(np.float32(0.9))] * EPISODES, [1] * EPISODES, now=110.0)
    assert run.mean_return < 0.9
    assert run.summary(STATS, now=110.0)["mean100"] == 0.9
    assert run.solved


def test_the_mean_of_too_few_episodes_is_no_progress_to_the_target():
    """124 env steps of a slow environment, one good episode: 2 % of the budget, and not 100 %."""
    run = record(mean100=10.0)
    run.trained(env_steps=124, metrics={})
    run.ended([10.0], [124], now=101.0)
    run.tick(101.0)
    assert run.status(STATS, 101.0)["progress"]["fraction"] == 124 / 5000
    run.ended([10.0] * EPISODES, [1] * EPISODES, now=102.0)
    run.tick(102.0)
    assert run.status(STATS, 102.0)["progress"]["fraction"] == 1.0


def test_only_the_last_hundred_episodes_count():
    """The bad beginning is forgotten, and a later fall does not take the solution back."""
    run = record(mean100=10.0)
    run.ended([-50.0] * 500, [1] * 500, now=101.0)
    run.ended([10.0] * EPISODES, [5] * EPISODES, now=102.0)
    assert run.solved
    assert (run.episodes, run.mean_length) == (600, 5)
    run.ended([-50.0] * EPISODES, [1] * EPISODES, now=103.0)
    assert run.solved
    assert run.mean_return == -50.0


def finished(worker, ends):
    """A message of T rows of B environments, where the episodes of `ends` [T, B] ended."""
    return Experience(worker=worker, version=0, env_steps=ends.size, arrays={"episode_env": np.nonzero(ends)[1]})


@pytest.mark.parametrize("lengths", ["geometric", "narrow", "two kinds"])
def test_the_mean_that_declares_a_run_solved_is_not_that_of_the_episodes_that_end_first(lengths):
    """1,024 environments begin together; each step costs 1, and the policy changes nothing: 100 in the mean."""
    rng, envs, rows = np.random.default_rng(5), 1024, 4
    draw = {
        "geometric": lambda count: rng.geometric(0.01, count),
        "narrow": lambda count: rng.integers(90, 111, count),
        "two kinds": lambda count: rng.choice([10, 190], count),
    }[lengths]
    run, coverage, worker = record(mean100=-1e6), EpisodeCoverage(envs), WorkerKey(name="one", incarnation=0)
    length = draw(envs)
    left, now = length.copy(), 0.0
    while not run.solved:
        now += 0.01
        ends, ended = np.zeros((rows, envs), bool), []
        for row in range(rows):
            left -= 1
            over = left == 0
            ends[row] = over
            ended += length[over].tolist()
            length[over] = draw(np.count_nonzero(over))
            left[over] = length[over]
        run.ended([-value for value in ended], ended, now, coverage.add([finished(worker, ends)], {"one"}))
    assert run.mean_return == pytest.approx(-100.0, rel=0.05)


def test_environments_of_a_new_incarnation_end_an_episode_first_and_those_of_a_closed_actor_do_not_count():
    """An actor may take minutes from one message to the next. An actor without a message is not waited for."""
    coverage, ends = EpisodeCoverage(2), np.array([[True, False], [False, True]])
    one, two = WorkerKey(name="one", incarnation=0), WorkerKey(name="two", incarnation=0)
    both = {"one", "two"}
    assert coverage.add([finished(one, ends), finished(two, ends[:1])], both) == Coverage(4, 1)
    assert coverage.add([finished(replace(one, incarnation=1), ends[:1])], both | {"without a message"}) == Coverage(4, 2)
    assert coverage.add([], both) == Coverage(4, 2)
    assert coverage.add([finished(replace(one, incarnation=1), ends[1:])], {"one"}) == Coverage(2, 0, left=1)
    same = Experience(worker=two, version=0, env_steps=9, arrays={"episode_env": np.zeros(5, np.int32)})
    assert coverage.add([same], {"one"}) == Coverage(4, 1)  # it is back, with five short episodes of one environment
    assert coverage.add([Experience(worker=two, version=0, env_steps=9, arrays={})], both) == Coverage(4, 1)
    own = {"episode_return": np.ones(1, np.float32)}  # a payload that names no environments
    start = np.array([[True, True], [False, True]])
    third = Experience(worker=WorkerKey(name="three", incarnation=0), version=0, env_steps=9, arrays={"start": start})
    all_open = both | {"three"}
    assert coverage.add([third], all_open).unfinished == 3
    assert coverage.add([replace(third, arrays=own | {"start": start})], all_open).unfinished == 2
    assert coverage.add([replace(third, arrays=own)], all_open).unfinished == 1


def test_in_lockstep_environments_that_have_ended_an_episode_stay_so_after_a_restart():
    """Actors continue theirs. Else the resumed run reaches its target later, and ends with other weights."""
    kept, ends = EpisodeCoverage(2, lockstep=True), np.array([[True, False]])
    actor = WorkerKey(name="one", incarnation=0)
    assert kept.add([replace(finished(actor, ends), index=1)], ()) == Coverage(2, 1)
    state = json.loads(json.dumps(kept.state_dict()))
    for lockstep, left in ((True, 0), (False, 1)):
        after = EpisodeCoverage(2, lockstep=lockstep)
        after.load_state_dict(state)
        other = finished(replace(actor, incarnation=7), ends[:, ::-1])
        assert after.add([replace(other, index=1)], ()) == Coverage(2, left)
        again = replace(finished(replace(actor, incarnation=8), ends), index=1, continues=False)
        assert after.add([again], ()) == Coverage(2, 1, left=left)


def test_short_episodes_of_actors_that_left_before_their_long_ones_do_not_reach_the_target():
    """Each step costs 1. Twenty actors join, end episodes of 20 steps, and are taken away before they end those of 100."""
    run = record(mean100=-50.0)
    run.coverage = EpisodeCoverage(2)
    one, *others = [WorkerKey(name=f"actor-{number}", incarnation=1) for number in range(21)]
    both, first, names = np.array([[True, True]]), np.array([[True, False]]), frozenset({"actor-0"})
    ended = [-100.0] * EPISODES
    run.ended(ended, [100] * EPISODES, 1.0, run.coverage.add([finished(one, both)], names))
    joined = run.coverage.add([finished(other, first) for other in others], names.union(other.name for other in others))
    run.ended([-20.0] * EPISODES, [20] * EPISODES, 2.0, joined)
    assert (run.mean_return, run.unfinished) == (-20.0, 20)
    for left, complete, short in ((1, False, EPISODES - 1), (EPISODES - 2, False, 1), (1, True, 0)):
        run.ended(ended[:1] * left, [100] * left, 3.0, run.coverage.add([finished(one, first)], names))
        assert (run.mean_is_complete, run.unfinished, run.solved) == (complete, 0, False)
        assert run.summary(STATS, now=4.0)["episodes_before_leaving"] == short


def test_short_episodes_of_actors_that_restarted_before_their_long_ones_do_not_reach_the_target():
    """As above, but the same actors restart: the window has the short episodes of both processes, and the long ones of one."""
    run = record(mean100=-50.0)
    run.coverage = EpisodeCoverage(2)
    actors = [WorkerKey(name=f"actor-{number}", incarnation=1) for number in range(20)]
    names, first, both = {actor.name for actor in actors}, np.array([[True, False]]), np.array([[True, True]])
    run.ended([-20.0] * EPISODES, [20] * EPISODES, 1.0, run.coverage.add([finished(actor, first) for actor in actors], names))
    again = [finished(replace(actor, incarnation=2), both) for actor in actors]
    run.ended([-20.0] * 20 + [-100.0] * 20, [20] * 20 + [100] * 20, 2.0, run.coverage.add(again, names))
    assert (run.mean_return, run.unfinished, run.before_leaving) == (-36.0, 0, EPISODES - 40)
    assert (run.mean_is_complete, run.solved) == (False, False)


@pytest.mark.parametrize("boundary", [False, True], ids=["in a message", "between two messages"])
def test_short_episodes_before_missing_rows_of_env_workers_do_not_reach_the_target(boundary):
    """As above, but all env workers of one policy server are replaced, before half of its environments ended an episode."""
    run, envs, rows = record(mean100=-50.0), 40, 4
    run.coverage = EpisodeCoverage(envs)
    server, names = WorkerKey(name="actor-0", incarnation=1), {"actor-0"}

    def rows_of(ended, **places):
        arrays = {name: np.zeros((rows, envs), bool) for name in ("terminated", "truncated")}
        arrays |= {"valid": np.ones((rows, envs), bool), "start": np.zeros((rows + 1, envs), bool)}
        for name, place in places.items():
            arrays[name][place] = name != "valid"
        return Experience(worker=server, version=0, env_steps=9, arrays=arrays | {"episode_env": np.array(ended, np.int32)})

    short, all_of_them = list(range(envs // 2)), list(range(envs))
    first = rows_of(short, terminated=(1, short), valid=(2, short), start=(3, short))  # a reset row is not missing
    run.ended([-20.0] * EPISODES, [20] * EPISODES, 1.0, run.coverage.add([first], names))
    assert (run.unfinished, run.before_leaving) == (envs // 2, 0)
    lost = rows_of([], valid=slice(0 if boundary else 1, None))
    run.ended([], [], 2.0, run.coverage.add([lost], names))
    assert run.before_leaving == EPISODES
    run.ended([], [], 2.0, run.coverage.add([rows_of([], start=-1, valid=slice(None))], names))  # new episodes begin
    ended = [-20.0] * 20 + [-100.0] * 20
    run.ended(ended, [20] * 20 + [100] * 20, 3.0, run.coverage.add([rows_of(all_of_them)], names))
    assert (run.mean_return, run.unfinished, run.before_leaving) == (-36.0, 0, EPISODES - envs)
    run.ended([], [], 4.0, run.coverage.add([rows_of([], valid=slice(1, None))], names))  # each has ended one by now
    assert (run.before_leaving, run.solved) == (EPISODES - envs, False)


@pytest.mark.parametrize(("short", "environments"), [(EPISODES // 2, 2), (EPISODES, 3 * EPISODES)])
def test_a_window_that_was_not_full_or_grows_keeps_short_episodes_of_actors_that_left_for_longer(short, environments):
    run = record(mean100=-99.0)
    run.ended([-20.0] * short, [20] * short, 1.0, Coverage(42, 20))
    run.ended([], [], 2.0, Coverage(2, 0, left=20))
    size = max(EPISODES, environments)
    for ended, complete in ((size - 1, False), (1, True)):
        run.ended([-100.0] * ended, [100] * ended, 3.0, Coverage(environments, 0))
        assert (run.mean_is_complete, run.solved) == (complete, False)
    assert run.mean_return == -100.0


@pytest.mark.parametrize("left", [0, 20])
def test_short_episodes_of_before_a_resume_do_not_reach_the_target(left):
    """The environments of before, which had not ended their longer ones, are gone, be it by the resume or before it."""
    before, after = record(mean100=-50.0), record(mean100=-50.0)
    before.ended([-20.0] * EPISODES, [20] * EPISODES, 1.0, Coverage(42, 20))
    if left:
        before.ended([], [], 2.0, Coverage(2, 0, left=left))
    after.load_state_dict(json.loads(json.dumps(before.state_dict(now=5.0))), now=10.0)
    for ended, complete in ((1, False), (EPISODES - 2, False), (1, True)):
        after.ended([-100.0] * ended, [100] * ended, 11.0, Coverage(2, 0))
        assert (after.mean_is_complete, after.solved) == (complete, False)


def test_after_a_resume_full_windows_of_environments_that_had_all_ended_an_episode_count_at_once():
    """In lockstep those of environments that had not, too: they go on."""
    for unfinished, mode in ((0, "asynchronous"), (20, "lockstep")):
        before, after = record(mean100=-50.0, mode=mode), record(mean100=-50.0, mode=mode)
        before.ended([-40.0] * EPISODES, [40] * EPISODES, 1.0, Coverage(42, unfinished))
        after.load_state_dict(json.loads(json.dumps(before.state_dict(now=5.0))), now=10.0)
        after.ended([-40.0], [40], 11.0, Coverage(42, 0))
        assert (after.mean_is_complete, after.solved) == (True, True)


@pytest.mark.parametrize(
    ("target", "env_steps", "now", "reason"),
    [
        ({}, 4999, 1e9, ""),
        ({}, 5000, 100.0, "env step budget spent"),
        ({"wall_seconds": 60.0}, 0, 159.9, ""),
        ({"wall_seconds": 60.0}, 0, 160.0, "wall-clock budget spent"),
    ],
)
def test_a_budget_that_is_spent_ends_the_run(target, env_steps, now, reason):
    """A run without a target, or that never reaches it, ends all the same."""
    run = record(**target)
    run.trained(env_steps=env_steps, metrics={})
    assert run.over(now) == reason


def test_the_summary_holds_what_the_issue_names_and_is_json():
    """Scripts read it: every name is there from the start, unknown is null and never NaN."""
    summary = record().summary(STATS, now=100.0)
    wanted = {
        "preset", "seed", "solved", "wall_seconds", "env_steps", "frames", "learner_updates", "mean100", "last_evaluation",
        "env_steps_per_second", "frames_per_second", "policy_lag", "ledger", "target",
    }  # fmt: skip
    assert wanted <= summary.keys()
    assert (summary["mean100"], summary["last_evaluation"], summary["solved"]) == (None, None, False)
    assert summary["policy_lag"] == {"min": None, "mean": None, "max": None}
    json.dumps(summary, allow_nan=False)


def test_frames_are_env_steps_times_the_frame_skip():
    """Atari results are quoted in emulator frames; the code counts env steps."""
    run = record(frame_skip=4)
    run.trained(env_steps=300, metrics={})
    run.trained(env_steps=100, metrics={})
    summary = run.summary(STATS, now=110.0)
    assert (summary["env_steps"], summary["frames"], summary["learner_updates"]) == (400, 1600, 2)
    assert (summary["env_steps_per_second"], summary["frames_per_second"]) == (40.0, 160.0)


def test_frames_of_before_a_resume_are_counted_with_the_frame_skip_of_then():
    before, after = record(frame_skip=4), record(frame_skip=2)
    before.trained(env_steps=300, metrics={})
    after.load_state_dict(json.loads(json.dumps(before.state_dict(now=110.0))), now=200.0)
    after.trained(env_steps=100, metrics={})
    summary = after.summary(STATS, now=210.0)
    assert (summary["env_steps"], summary["frames"]) == (400, 1400)
    assert (summary["env_steps_per_second"], summary["frames_per_second"]) == (20.0, 70.0)


def test_environments_that_ended_no_episode_are_remembered_over_a_resume():
    """Without them a mean over short episodes would look complete until the next update, or for good where none comes."""
    before, after = record(), record()
    before.ended([1.0], [4], now=101.0, coverage=Coverage(environments=4, unfinished=3))
    after.load_state_dict(json.loads(json.dumps(before.state_dict(now=110.0))), now=200.0)
    assert after.summary(STATS, now=210.0)["environments_unfinished"] == 3


def test_once_each_environment_has_ended_an_episode_those_that_begin_later_leave_no_gap_in_the_curve():
    """Over a resume only in lockstep with the same settings: else environments begin anew. In another one returns do too."""
    before, after, other, lockstep = record(), record(), record(), record(mode="lockstep")
    for unfinished, covered in ((3, False), (0, True), (2, True)):
        for each in (before, lockstep):
            each.ended([1.0], [4], now=101.0, coverage=Coverage(environments=4, unfinished=unfinished))
            assert each.covered == covered
    state, state_in_lockstep = (json.loads(json.dumps(each.state_dict(now=110.0))) for each in (before, lockstep))
    began_lockstep, went_on = record(mode="lockstep"), record(mode="lockstep")
    for resumed, from_state in ((after, state), (began_lockstep, state), (went_on, state_in_lockstep)):
        resumed.load_state_dict(from_state, now=200.0)
        resumed.ended([1.0], [4], now=201.0, coverage=Coverage(environments=4, unfinished=4))
        assert resumed.covered == (resumed is went_on)
    for _ in range(2):  # 8 environments, of which one never ends an episode
        assert not other.covered
        other.ended([1.0] * 40, [4] * 40, now=101.0, coverage=Coverage(environments=8, unfinished=1))
    assert other.covered
    other = record()
    other.load_state_dict(state | {"task": state["task"] | {"id": "Other-v1"}}, now=200.0)
    assert not other.covered


def test_the_status_survives_a_loss_that_is_not_a_number():
    """The status of a diverging run must not fail."""
    run = record()
    run.trained(env_steps=10, metrics={"policy_loss": math.nan, "entropy": 0.5})
    run.tick(101.0)
    status = run.status(STATS, now=101.0)
    assert status["training"] == {"entropy": 0.5}
    assert (status["queue"], status["workers"]) == ({"depth": 1, "capacity": 4}, {"actor": 2, "evaluator": 1})
    json.dumps(status, allow_nan=False)


def test_the_status_has_metrics_of_numpy_and_torch_as_numbers():
    """TensorBoard and Prometheus take those of a user's algorithm as they are; JSON would refuse the whole status."""
    run = record()
    run.trained(env_steps=10, metrics={"loss": np.float32(0.5), "steps": np.int64(3), "entropy": torch.tensor(0.25)})
    run.tick(101.0)
    assert json.loads(json.dumps(run.status(STATS, now=101.0)))["training"] == {"loss": 0.5, "steps": 3.0, "entropy": 0.25}


@pytest.mark.parametrize("value", [None, "high", [0.5], torch.zeros(2), np.zeros(2)], ids=repr)
def test_a_metric_that_is_no_number_is_named(value):
    """Without its name, a user's algorithm ends in a traceback of the learner's own code."""
    with pytest.raises(ConfigError, match=r"metric 'loss' of the algorithm is no number: found"):
        record().trained(env_steps=10, metrics={"entropy": 0.5, "loss": value})


def test_the_status_shows_one_moment_and_no_half_of_an_update():
    """It is asked by another thread: between an update's steps and the version it made, both are the old ones."""
    run = record()
    run.trained(env_steps=10, metrics={"entropy": 0.5})
    run.version = 1
    run.ended([1.0], [4], now=101.0)
    run.tick(101.0)
    before = run.status(STATS, now=102.0)
    run.trained(env_steps=10, metrics={"entropy": 0.4, "policy_loss": 0.1})
    run.lag.add(3, 10)
    run.evaluations["sampled"] = 9.0
    assert run.status(STATS, now=102.0) == before
    run.version = 2
    run.tick(102.0)
    after = run.status(STATS, now=102.0)
    assert [(status["env_steps"], status["version"], status["mean100"]) for status in (before, after)] == [
        (10, 1, 1.0), (20, 2, 1.0),
    ]  # fmt: skip
    assert (before["evaluations"], before["training"]) == ({}, {"entropy": 0.5})
    assert (after["evaluations"], after["training"]) == ({"sampled": 9.0}, {"entropy": 0.4, "policy_loss": 0.1})


def test_time_and_phase_go_on_between_updates():
    """An update of a minute, or the last evaluation: the status shows that the run lives."""
    run = record(frame_skip=2)
    run.trained(env_steps=100, metrics={})
    run.tick(110.0)
    run.phase = "evaluating"
    status = run.status(STATS, now=120.0)
    assert (status["wall_seconds"], status["phase"]) == (20.0, "evaluating")
    assert (status["env_steps_per_second"], status["frames_per_second"]["run"]) == (5.0, 10.0)


def test_rates_fall_while_nothing_is_trained():
    """A run that stalls must not look as fast as before."""
    run = record(frame_skip=2)
    for second in range(100, 121):
        run.trained(env_steps=50, metrics={})
        run.tick(float(second))
    assert run.status(STATS, now=120.0)["frames_per_second"]["last_10s"] == 100.0
    run.tick(140.0)
    rates = run.status(STATS, now=140.0)["frames_per_second"]
    assert rates["last_10s"] == 0.0
    assert rates["run"] == 50.0  # 1,000 env steps in the 40 s since the first update, times 2 frames


def test_the_time_of_a_run_that_is_over_stands_still():
    """A learner that lingers over the weekend: the run took ten seconds, and nothing is fast any more."""
    run = record(frame_skip=2)
    for second in range(100, 111):
        run.trained(env_steps=50, metrics={})
        run.tick(float(second))
    run.stop_progress(done=True)
    run.finish(110.0)
    status = run.status(STATS, now=99_999.0)
    assert (status["phase"], status["wall_seconds"], status["env_steps_per_second"]) == ("finished", 10.0, 50.0)
    assert status["frames_per_second"] == {"last_10s": 0.0, "last_60s": 0.0, "run": 100.0}


def test_the_start_is_in_no_rate():
    """Processes start for a minute, then the run makes 100 env steps per second; so it does after a resume."""
    run, now = record(frame_skip=2), 100.0
    for _ in range(2):
        for _ in range(60):
            now += 1.0
            run.tick(now)
        for _ in range(21):
            run.trained(env_steps=100, metrics={})
            run.tick(now)
            now += 1.0
        status = run.status(STATS, now=now)
        assert (status["env_steps_per_second"], status["frames_per_second"]["last_60s"]) == (100.0, 200.0)
        state, run = run.state_dict(now=now), record(started_at=now, frame_skip=2)
        run.load_state_dict(state, now=now)


def test_a_finished_run_that_is_resumed_keeps_the_speed_of_its_training():
    run = record()
    for second in range(11):
        run.trained(env_steps=100, metrics={})
        run.tick(100.0 + second)
    state, resumed = json.loads(json.dumps(run.state_dict(now=170.0))), record()
    resumed.load_state_dict(state, now=900.0)
    resumed.tick(901.0)
    assert resumed.summary(STATS, now=901.0)["env_steps_per_second"] == 100.0


def test_the_speed_of_a_resumed_run_is_that_of_all_its_processes():
    """10 s with 100 env steps per second, an hour of nothing, then 30 s with 500: 400 on the average."""
    run, now = record(), 100.0
    for seconds, speed in ((10, 100), (30, 500)):
        for _ in range(seconds + 1):
            run.trained(env_steps=speed, metrics={})
            run.tick(now)
            now += 1.0
        summary, state = run.summary(STATS, now=now), json.loads(json.dumps(run.state_dict(now=now)))
        run, now = record(started_at=now + 3600.0), now + 3600.0
        run.load_state_dict(state, now=now)
    assert summary["env_steps_per_second"] == 400.0


def test_the_time_left_is_by_the_speed_with_gradient_steps():
    """A warm-up of 10,000 env steps takes two seconds; then 130 a second."""
    run, now = record(env_steps=1_000_000), 100.0
    for speed, seconds, steps in ((5000, 2, 0.0), (130, 20, 16.0)):
        for _ in range(seconds):
            now += 1.0
            run.trained(env_steps=speed, metrics={"gradient_steps": steps})
            run.tick(now)
            assert steps or run.progress.seconds_left is None
    assert run.progress.seconds_left == (1_000_000 - run.env_steps) / 130


def test_policy_lag_is_weighted_by_env_steps():
    """A tiny fresh rollout does not make a batch of old ones young."""
    run = record()
    run.lag.add(4, 30)
    run.lag.add(0, 10)
    run.lag.add(1, 0)
    assert run.summary(STATS, now=101.0)["policy_lag"] == {"min": 0, "mean": 3.0, "max": 4}


def test_the_lag_of_a_run_that_was_never_fresh_has_its_true_minimum():
    """Zero is a claim: the minimum starts at the first lag seen."""
    run = record()
    run.lag.add(5, 10)
    run.lag.add(3, 10)
    assert run.lag.as_dict() == {"min": 3, "mean": 4.0, "max": 5}


def test_the_last_evaluation_is_the_greedy_one():
    """Greedy play is the score; sampled play stands for it only until there is one."""
    run = record()
    run.evaluated(evaluation("sampled", 1.0), 0.0, env_steps=640)
    assert run.last_evaluation["mode"] == "sampled"
    run.evaluated(evaluation("greedy", 0.0, 0.0, 9.0, version=8), 0.0, env_steps=640)
    run.evaluated(evaluation("sampled", 9.0), 0.0, env_steps=640)
    assert run.status(STATS, now=101.0)["evaluations"] == {"greedy": 3.0, "sampled": 9.0}
    assert run.last_evaluation == {"version": 8, "mode": "greedy", "mean": 3.0, "episodes": 3}
    assert run.evaluations == {"greedy": 3.0, "sampled": 9.0}


def test_a_late_evaluation_of_an_older_policy_is_not_the_last_one():
    """Of two evaluators the slower one reports a policy that the other has left behind."""
    run = record()
    run.evaluated(evaluation("sampled", 1.0, version=600), 0.0, env_steps=640)
    for version, last in ((500, 500), (100, 500), (500, 500), (501, 501)):
        run.evaluated(evaluation("greedy", float(version), version=version), 0.0, env_steps=640)
        assert (run.last_evaluation["version"], run.last_evaluation["mean"]) == (last, last)
        assert run.evaluations["greedy"] == last
    run.evaluated(evaluation("sampled", 9.0, version=100), 0.0, env_steps=640)
    assert run.evaluations["sampled"] == 1.0
    resumed = record()
    resumed.load_state_dict(json.loads(json.dumps(run.state_dict(now=110.0))), now=200.0)
    for mode in ("greedy", "sampled"):
        resumed.evaluated(evaluation(mode, 9.0, version=100), 0.0, env_steps=640)
    assert (resumed.last_evaluation["version"], resumed.evaluations) == (501, {"greedy": 501, "sampled": 1.0})


def test_a_run_is_solved_by_one_greedy_evaluation_that_reaches_its_target():
    run = record(evaluation=10.0)
    run.env_steps = 640
    for mode, returns in (("sampled", [99.0]), ("greedy", [9.0, 10.0])):
        run.evaluated(evaluation(mode, *returns), 110.0, env_steps=640)
        assert run.over(110.0) == ""
    run.ended([50.0] * EPISODES, [1] * EPISODES, now=111.0)  # the training score has no target here
    run.evaluated(evaluation("greedy", 9.0, 11.0), 112.5, env_steps=640)
    assert run.solved_at == {"wall_seconds": 12.5, "env_steps": 640}
    assert run.over(113.0) == "target reached"
    run.evaluated(evaluation("greedy", 0.0), 114.0, env_steps=640)
    assert run.solved


@pytest.mark.parametrize(("target", "solved"), [(3.0, True), (4.0, False), (None, False)])
def test_a_resumed_run_with_another_target_of_evaluations_is_not_solved_by_the_old_one(target, solved):
    before = record(evaluation=3.0)
    before.evaluated(evaluation("greedy", 3.5), 110.0, env_steps=640)
    after = record(evaluation=target)
    after.load_state_dict(json.loads(json.dumps(before.state_dict(now=120.0))), now=200.0)
    assert after.solved == solved


def test_a_resumed_run_goes_on_from_where_it_was():
    """After a kill and a resume an hour later: the counters, the mean of 100 and the time spent training are the same."""
    before = record()
    before.trained(env_steps=300, metrics={})
    before.version = 9
    before.ended([1.0, 3.0], [4, 6], now=110.0)
    before.evaluated(evaluation("greedy", 2.0), 0.0, env_steps=640)
    before.lag.add(2, 300)
    state = json.loads(json.dumps(before.state_dict(now=130.0)))
    after = record(started_at=5000.0)
    after.load_state_dict(state, now=5000.0)
    assert after.summary(STATS, now=5010.0) == before.summary(STATS, now=140.0)
    assert (after.version, after.mean_return, after.mean_length) == (9, 2.0, 5.0)
    assert after.state_dict(now=5000.0) == state | {"covered": False}  # its environments have ended no episode yet
    assert after.status(STATS, now=5010.0)["env_steps"] == 300


def test_returns_of_another_environment_are_no_results_of_a_resumed_run():
    """Rewards ten times as large before: neither the mean of 100 nor an evaluation of then counts; other settings keep them."""

    def resumed(**env):
        after = record(mean100=20.0)
        after.settings = after.settings.model_copy(update={"env": after.settings.env.model_copy(update=env)})
        after.load_state_dict(json.loads(json.dumps(before.state_dict(now=120.0))), now=200.0)
        return after

    before = record(mean100=20.0)
    before.env_steps = 640
    before.ended([50.0] * EPISODES, [1] * EPISODES, now=110.0)
    before.evaluated(evaluation("greedy", 50.0), 111.0, env_steps=640)
    after = resumed(kwargs={"scale": 1.0}, num_envs=4)
    assert after.task_changed == "env.kwargs was {}, is {'scale': 1.0}"
    assert (after.solved, list(after.returns), after.evaluations, after.last_evaluation) == (False, [], {}, None)
    assert after.env_steps == 640
    after = resumed(num_envs=4, autoreset="same_step")
    assert (after.task_changed, after.solved, len(after.returns)) == ("", True, EPISODES)


def test_small_returns_are_told_apart():
    """Three decimals made equal zeros of them."""
    run = record(evaluation=1.0)
    run.ended([4.1e-5], [1], now=110.0)
    for value in (4e-5, 0.9996):
        run.evaluated(evaluation("greedy", value), 110.0, env_steps=640)
        assert run.last_evaluation["mean"] == pytest.approx(value, rel=1e-6)
    assert not run.solved
    assert run.summary(STATS, now=110.0)["mean100"] == pytest.approx(4.1e-5, rel=1e-6)


@pytest.mark.parametrize(("target", "solved"), [(3.0, True), (4.0, False), (None, False)])
def test_a_resumed_run_with_another_target_is_not_solved_by_the_old_one(target, solved):
    """Solved at 3, resumed to get to 4: it trains on, and does not end at once with the old success."""
    before = record(mean100=3.0)
    before.ended([3.5] * 100, [1] * 100, now=110.0)
    assert before.over(110.0) == "target reached"
    after = record(mean100=target)
    after.load_state_dict(json.loads(json.dumps(before.state_dict(now=120.0))), now=200.0)
    assert after.solved == solved
    assert after.over(200.0) == ("target reached" if solved else "")


def test_a_record_of_another_version_is_named():
    state = record().state_dict(now=1.0)
    del state["task"], state["lag"]
    with pytest.raises(ValueError, match=r"of another version: lag, task$"):
        record().load_state_dict(state, now=2.0)


def test_only_an_unbroken_run_in_lockstep_is_reproducible():
    """The summary shows whether two runs must agree; the checkpoints keep the reason where lockstep broke."""
    settings = Settings(run=RunSettings(mode="lockstep"))
    run, asynchronous = (RunRecord(settings=s, run_id="r", frame_skip=1, started_at=0.0) for s in (settings, Settings()))
    summary = run.summary(STATS, now=1.0)
    assert (summary["mode"], summary["reproducible"], summary["parameters_sha256"]) == ("lockstep", True, None)
    assert not asynchronous.summary(STATS, now=1.0)["reproducible"]
    state = json.loads(json.dumps(run.state_dict(now=1.0)))
    run.lockstep_broken = "an actor was replaced"
    assert not run.summary(STATS, now=1.0)["reproducible"]
    broken = json.loads(json.dumps(run.state_dict(now=1.0)))
    for kept, reproducible in ((state, True), (broken, False)):
        resumed = RunRecord(settings=settings, run_id="r", frame_skip=1, started_at=0.0)
        resumed.load_state_dict(kept, now=2.0)
        assert resumed.summary(STATS, now=3.0)["reproducible"] == reproducible


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"target": TargetSettings(env_steps=9000)}, "target.env_steps was 5000, is 9000"),
        ({"algorithm": PPOSettings(learning_rate=1e-5)}, "algorithm.learning_rate was 0.00025, is 1e-05"),
        ({"run": RunSettings(seed=8)}, "run.seed was 7, is 8"),
        ({"target": TargetSettings(env_steps=5000, mean100=1.0), "checkpoint": CheckpointSettings(keep=9)}, ""),
    ],
)
def test_a_run_that_is_resumed_with_settings_that_change_its_weights_is_not_reproducible(settings, says):
    """No run with one of the two configurations ends with the same weights; where and until when it runs does not matter."""
    before = record()
    state = json.loads(json.dumps(before.state_dict(now=1.0)))
    after = RunRecord(settings=before.settings.model_copy(update=settings), run_id="run-1", frame_skip=4, started_at=1.0)
    after.load_state_dict(state, now=2.0)
    assert after.lockstep_broken == (says and f"resumed with other settings: {says}")


def test_settings_that_changed_at_a_resume_stay_in_the_record():
    """Half of the run had another learning rate: a later resume with the same settings must not hide it."""
    run = record()
    run.trained(env_steps=300, metrics={})
    before, settings = run.settings, run.settings.model_copy(update={"algorithm": PPOSettings(learning_rate=1e-5)})
    for now in (2.0, 3.0):
        state = json.loads(json.dumps(run.state_dict(now=now)))
        del state["settings"]["env.leaves"]  # of a version that did not have it
        run = RunRecord(settings=settings, run_id="run-1", frame_skip=4, started_at=now)
        run.load_state_dict(state, now=now)
    change = f"algorithm.learning_rate was {before.algorithm.learning_rate}, is 1e-05"
    assert run.settings_changed == [{"env_steps": 300, "settings": [change]}]


@pytest.mark.parametrize(
    ("schedule", "earlier", "noted"),
    [("kl_adaptive", "kl_adaptive", False), ("linear", "linear", True), ("kl_adaptive", "linear", True)],
)
def test_a_learning_rate_without_effect_is_no_change(schedule, earlier, noted):
    """`kl_adaptive` goes on with the rate that it had."""
    before, after = record(), record()
    for run, rate, name in ((before, 1e-3, earlier), (after, 1e-4, schedule)):
        algorithm = PPOSettings(learning_rate=rate, lr_schedule=name)
        run.settings = run.settings.model_copy(update={"algorithm": algorithm})
    after.load_state_dict(json.loads(json.dumps(before.state_dict(now=1.0))), now=2.0)
    changes = [text for each in after.settings_changed for text in each["settings"]]
    assert ("algorithm.learning_rate was 0.001, is 0.0001" in changes) == noted


@pytest.mark.parametrize(
    ("mode", "name", "value", "noted"),
    [
        ("asynchronous", "ranks", 2, True),
        ("asynchronous", "credits", 8, True),
        ("asynchronous", "batch_seconds", 0.5, True),
        ("asynchronous", "torch_threads", 2, False),
        ("lockstep", "ranks", 2, True),
        ("lockstep", "credits", 8, False),  # without effect there
    ],
)
def test_settings_of_the_learner_that_decide_a_result_are_noted_at_a_resume(mode, name, value, noted):
    before, after = record(), record()
    before.settings = before.settings.model_copy(update={"run": RunSettings(mode=mode)})
    learner = before.settings.learner.model_copy(update={name: value})
    after.settings = before.settings.model_copy(update={"learner": learner})
    after.load_state_dict(json.loads(json.dumps(before.state_dict(now=1.0))), now=2.0)
    change = f"learner.{name} was {getattr(before.settings.learner, name)}, is {value}"
    assert after.settings_changed == ([{"env_steps": 0, "settings": [change]}] if noted else [])


@pytest.mark.parametrize(
    ("arguments", "later", "says"),
    [
        ({"wind": True, "gravity": -9.0}, {"wind": True}, "env.kwargs.gravity was -9.0, is None"),
        ({"wind": True}, {"wind": True, "gravity": -9.0}, "env.kwargs.gravity was None, is -9.0"),
        ({"gravity": -9.0}, {}, "env.kwargs.gravity was -9.0, is None"),
    ],
)
def test_an_argument_of_the_environment_that_is_added_or_left_out_is_noted_at_a_resume(arguments, later, says):
    """It changes the weights, and what the returns are of."""
    before, after = record(), record()
    for run, kwargs in ((before, arguments), (after, later)):
        run.settings = run.settings.model_copy(update={"env": run.settings.env.model_copy(update={"kwargs": kwargs})})
    after.load_state_dict(json.loads(json.dumps(before.state_dict(now=1.0))), now=2.0)
    assert after.lockstep_broken.startswith(f"resumed with other settings: {says}")
    assert after.settings_changed == [{"env_steps": 0, "settings": [says]}]
