"""Tests of policies that do not fit: each costs a counter and a log line, never the worker."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.algorithms.on_policy import ActorCriticPolicy
from common.envs.spec import ActionSpec, EnvSpec
from common.models import nets
from common.models.snapshot import ParameterLayout
from common.models.spec import ModelSettings
from common.protocol.messages import Snapshot
from common.protocol.worker_side import Identity, WorkerSide
from common.transport.link import Link
from services.acting.policy import load_newest_policy
from tests.support.memory import MemoryHub

pytestmark = pytest.mark.service

ENV = EnvSpec(
    observation_shape=(2,), observation_dtype="float32", action=ActionSpec(choices=(2,), shape=()), frame_stack=1, frame_skip=1
)
MODEL = ModelSettings(hidden=(4,))
SIZE = ParameterLayout.of(nets.build_actor_critic(MODEL, ENV)).size


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"weights": np.zeros(SIZE, np.float32)},
        {"parameters": np.zeros(SIZE, np.float64)},
        {"parameters": np.zeros(SIZE - 1, np.float32)},
        {"parameters": np.zeros((1, SIZE), np.float32)},
        {"parameters": np.zeros(SIZE, np.float32), "more": np.zeros(1, np.float32)},
    ],
)
def test_a_snapshot_that_does_not_fit_is_refused_and_the_next_one_taken(arrays, monkeypatch):
    """Without parameters, of another dtype, size or number of axes, with more: the policy before it acts on."""
    notes = []
    session = WorkerSide(Identity(role="actor", name="a", incarnation=1, software=""))
    link = Link(transport=MemoryHub().connect(), session=session, clock=lambda: 0.0, log_event=notes.append)
    policy = ActorCriticPolicy(model=MODEL, env=ENV, precision="fp32", seed=1)

    def arrive(version, content):
        snapshot = Snapshot(version=version, env_steps=0, precision="fp32", layout=policy.layout, arrays=content)
        monkeypatch.setattr(link, "take_snapshot", lambda: snapshot)

    arrive(1, {"parameters": np.ones(SIZE, np.float32)})
    assert load_newest_policy(link, policy).version == 1
    arrive(2, arrays)
    assert load_newest_policy(link, policy) is None
    assert (policy.version, [note.event for note in notes]) == (1, ["undecodable"])
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in policy._net.parameters())
    arrive(3, {"parameters": np.zeros(SIZE, np.float32)})
    assert load_newest_policy(link, policy).version == 3
