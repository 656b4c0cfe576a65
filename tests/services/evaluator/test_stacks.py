"""The evaluator shows its network the very stacks that an actor's and the learner's networks see."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.envs.make import make
from common.envs.spec import EnvSettings
from common.envs.stacking import stack
from common.observability.worker_metrics import EvaluatorStats
from services.evaluator import EvaluatorLoop

pytestmark = pytest.mark.service


class Camera:
    """A policy that remembers what it was shown, and an environment that remembers what it returned."""

    def __init__(self, environment):
        self.environment, self.spec, self.num_envs, self.agents = environment, environment.spec, environment.num_envs, 1
        self.shown, self.frames, self.starts = [], [], []

    def act(self, observation, *, greedy=False):  # noqa: ARG002
        """Remember, and stand still."""
        self.shown.append(observation.numpy().copy())
        return {"action": torch.zeros(self.num_envs, dtype=torch.int64)}

    def reset(self, seed):
        """Remember the first frame."""
        frame = self.environment.reset(seed)
        self.frames, self.starts = [frame.copy()], [np.ones(self.num_envs, bool)]
        return frame

    def step(self, action):
        """Remember the next frame."""
        transition = self.environment.step(action)
        self.frames.append(transition.observation.copy())
        self.starts.append(transition.start.copy())
        return transition


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("frame_stack", [1, 4])
def test_the_evaluator_shows_the_stacks_that_training_sees(autoreset, frame_stack):
    """An evaluator that stacked frames its own way scored -21 with a policy that trained at 18."""
    settings = EnvSettings(
        entry_point="common.envs.probes:counting",
        kwargs={"lengths": [3, 5, 11], "truncates": [False, True, False], "image": True},
        num_envs=3,
        autoreset=autoreset,
        frame_stack=frame_stack,
    )
    camera = Camera(make(settings))
    link = SimpleNamespace(service=lambda: None, say=lambda _: None, drain=None, session=SimpleNamespace(version=0))
    evaluator = EvaluatorLoop(
        link=link,
        environment=camera,
        episodes=3,
        policy=camera,
        seed=1,
        every_seconds=0.0,
        rest=lambda: None,
        stats=EvaluatorStats(version=0),
        stopping=lambda: False,
        alive=lambda **_: None,
        clock=itertools.count().__next__,
    )
    evaluator._evaluate("greedy", keep_going=lambda: True)
    rows = len(camera.shown)
    before = np.zeros((frame_stack - 1, *camera.frames[0].shape), camera.frames[0].dtype)
    seen = stack(np.concatenate([before, np.stack(camera.frames[:rows])]), np.stack(camera.starts[:rows]))
    assert rows >= 3
    np.testing.assert_array_equal(np.stack(camera.shown), seen)
