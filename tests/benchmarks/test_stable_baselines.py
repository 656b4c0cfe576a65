"""The comparison with Stable-Baselines3, without processes of ours; theirs is trained where installed. No speed is tested."""

import pytest

from benchmarks import stable_baselines
from benchmarks.pipeline import TRAINED, Window
from common.errors import ConfigError
from common.observability.deployment import LEARNER

pytestmark = pytest.mark.system

TINY = ("model.hidden=[8]", "algorithm.minibatch=8", "algorithm.samples_per_insert=8", "algorithm.replay_capacity=5000")


def test_both_are_measured_in_turns(watched, monkeypatch):
    """In place of theirs a rate by the number of threads: the faster one is what ours is held to."""
    runs = watched(stable_baselines)
    monkeypatch.setattr(stable_baselines, "cores", lambda: 2)
    monkeypatch.setattr(stable_baselines, "_apart", lambda settings, threads, _: 50.0 / threads * (settings == runs[-1].settings))
    result = stable_baselines.benchmark("pendulum-td3", TINY, repeats=2, seconds=0.5)
    assert [run.warm for run in runs] == [stable_baselines.WARM_UP + stable_baselines.STEADY] * 2
    assert {(run.settings.algorithm.warmup, run.settings.model.layer_norm) for run in runs} == {(stable_baselines.WARM_UP, False)}
    assert result.theirs == {2: [25.0, 25.0], 1: [50.0, 50.0]}
    assert (result.rate, result.best, result.ratio) == (100.0, 1, 2.0)


def test_ours_is_held_to_the_better_median_of_theirs():
    """By hand: 300 env steps/s beside 100 with two threads, and 90 with one."""
    ours = [Window(seconds=2.0, growth={LEARNER: {TRAINED: 600.0}})]
    result = stable_baselines.Result(ours=ours, theirs={2: [100.0, 10.0, 110.0], 1: [90.0, 90.0, 500.0]})
    assert result.best == 2
    assert result.ratio == pytest.approx(3.0)


def test_another_algorithm_is_refused_in_words():
    """Before anything is started."""
    with pytest.raises(ConfigError, match="found impala, wanted td3 or ppo"):
        stable_baselines.benchmark("cartpole-impala", (), repeats=1, seconds=1.0)


def test_a_network_that_theirs_has_not_is_refused():
    """It would be compared with another one, on another task."""
    with pytest.raises(ConfigError, match=r"theirs has no env\.entry_point: found common\.envs\.hidden:cartpole"):
        stable_baselines.benchmark("cartpole-velocity-free", (), repeats=1, seconds=1.0)


@pytest.mark.parametrize(("samples", "found"), [(3, "0.375"), (12, "1.5")])
def test_a_ratio_that_theirs_cannot_keep_is_refused(samples, found, watched):
    """Rounded, theirs would not train at all, or another number of times for each env step."""
    runs = watched(stable_baselines)
    with pytest.raises(ConfigError, match=f"found {found}, wanted a whole number, at least 1"):
        stable_baselines.benchmark("pendulum-td3", (*TINY, f"algorithm.samples_per_insert={samples}"), repeats=1, seconds=1.0)
    assert runs == []


def test_without_their_library_there_is_one_line(monkeypatch, capsys):
    """It is no dependency: the error names the package to install."""
    monkeypatch.setattr(stable_baselines.importlib.util, "find_spec", lambda _: None)
    assert stable_baselines.main([]) == 2
    assert "pip install stable-baselines3" in capsys.readouterr().err


def test_the_clock_counts_after_the_warm_up(monkeypatch):
    """A second for each env step, counted from the third on and for four seconds: one per second, after 7 env steps."""
    clock = stable_baselines.Clock(first=3, seconds=4.0)
    env_steps, goes_on = 0, True
    monkeypatch.setattr(stable_baselines.time, "monotonic", lambda: float(env_steps))
    while goes_on:
        env_steps += 1
        goes_on = clock({}, {})
    assert env_steps == 7
    assert clock.rate == 1.0


def test_the_clock_counts_as_many_rollouts_as_trainings(monkeypatch):
    """Rollouts of 4 steps of 2 environments without time, each followed by a training of a second: 8 env steps/s, by hand."""
    clock = stable_baselines.Clock(first=8, seconds=2.5, rows=2, every=4)
    steps, goes_on = 0, True
    monkeypatch.setattr(stable_baselines.time, "monotonic", lambda: float((steps - 1) // 4))
    while goes_on:
        steps += 1
        goes_on = clock({}, {})
    assert clock.rate == 8.0


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("pendulum-td3", TINY),
        ("cartpole", ("env.num_envs=4", "algorithm.minibatch=32", "rollout.length=8", "learner.batch=1", "algorithm.epochs=1")),
    ],
)
def test_theirs_is_trained_where_it_is_installed(preset, overrides):
    """A fifth of a second of it."""
    pytest.importorskip("stable_baselines3")
    named = stable_baselines.load_settings(preset=preset, environ={}).settings.algorithm.name
    same = (*overrides, *stable_baselines.COMPARED[named].same)
    settings = stable_baselines.load_settings(preset=preset, overrides=same, environ={}).settings
    assert stable_baselines.stable_baselines3(settings, threads=1, seconds=0.2) > 0.0
