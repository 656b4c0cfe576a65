"""A run that is watched by a benchmark, without its processes."""

from __future__ import annotations

import signal
from contextlib import contextmanager

import pytest

from benchmarks import pipeline
from benchmarks.pipeline import CPU, TRAINED, Window
from common.config.load import load_settings
from common.observability.deployment import EVALUATOR, LEARNER


class Watched:
    """A run of given settings: each env step that is awaited was trained on, at 100 a second, by half a core."""

    def __init__(self, settings):
        self.settings, self.warm, self.stepping = settings, 0.0, False

    def wait_until_trained(self, env_steps):
        """Note them."""
        self.warm += env_steps

    def wait_until_all_step(self, env_steps):
        """Note that all were waited for."""
        self.stepping = env_steps > 0

    def watch(self, seconds):
        """Return the growth of what the learner and the evaluator count."""
        growth = {LEARNER: {TRAINED: 100.0 * seconds, CPU: 0.5 * seconds}}
        if self.settings.evaluator.enabled:
            growth[EVALUATOR] = {CPU: 0.1 * seconds, "rookery_evaluator_env_steps_total": 50.0 * seconds}
        return Window(seconds=seconds, growth=growth)


@pytest.fixture(autouse=True)
def sigterm():
    """Remove the handler that a benchmark's `main` installs."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def least():
    """Within it a real run is watched until it has trained on as many env steps as given, instead of for a time."""

    @contextmanager
    def watched_for(env_steps):
        with pytest.MonkeyPatch.context() as changed:
            changed.setattr(pipeline, "LEAST_ENV_STEPS", env_steps)
            for limit in ("START_SECONDS", "PAGE_SECONDS", "LEAVE_SECONDS"):
                changed.setattr(pipeline, limit, 300.0)
            yield

    return watched_for


@pytest.fixture
def watched(monkeypatch):
    """Let a benchmark's module start no process: `watched(module)` returns the list of the runs that it asks for.

    One run of real processes is watched in test_throughput.py and one in test_a3c.py.
    """

    def replace(module):
        runs = []

        @contextmanager
        def running(preset, overrides=()):
            runs.append(Watched(load_settings(preset=preset, overrides=overrides, environ={}).settings))
            yield runs[-1]

        monkeypatch.setattr(module, "running", running)
        return runs

    return replace
