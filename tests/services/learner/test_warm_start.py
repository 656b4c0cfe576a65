"""`run.init`: a run that starts with the weights of another one."""

from __future__ import annotations

import shutil

import pytest
import torch

from common.algorithms.registry import build_algorithm
from common.envs.trial import spec_of
from common.errors import ConfigError, ResourceError
from common.models.snapshot import ParameterLayout, digest
from common.replay.blocks import Segment
from common.runtime.checkpoint_files import Checkpoint
from common.runtime.checkpoints import CheckpointStore
from common.runtime.run_directory import SEGMENTS
from services.learner.resume import _load_initial_weights, open_state
from services.learner.startup import open_directory, parse, with_run_id

pytestmark = pytest.mark.service

REPLAY = {"cartpole-dqn", "pendulum-td3", "pendulum-sac"}  # presets with a replay memory


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def learner(preset, *words, seed=1):
    """Return the invocation, the algorithm and the environment of a run."""
    small = ["algorithm.replay_capacity=2000", "algorithm.warmup=500"] if preset in REPLAY else []
    invocation = with_run_id(parse(["--config", preset, *small, *words], {}))
    env = spec_of(invocation.settings.env)
    settings = invocation.settings
    return invocation, build_algorithm(settings.algorithm, model=settings.model, env=env, seed=seed), env


def saved(preset, *words, seed=7, state=None, segments=()):
    """Save a checkpoint of a run and return its path and its algorithm."""
    _, algorithm, _ = learner(preset, *words, seed=seed)
    with torch.no_grad():
        for parameter in algorithm.model.parameters():
            parameter.add_(0.5)
    checkpoint = Checkpoint(
        run_id="other",
        version=3,
        env_steps=900,
        architecture=ParameterLayout.of(algorithm.model).fingerprint,
        counters={"record": {}, "session": {}},
        state=state or algorithm.state_dict(),
        segments=segments,
    )
    directory = open_directory(learner(preset, "--run-dir", "other")[0], [])
    return CheckpointStore(directory.checkpoints, keep=3).save(checkpoint), algorithm


def opened(preset, *words):
    """Open the state of a run; gives record, algorithm, directory."""
    invocation, algorithm, env = learner(preset, "--run-dir", "mine", *words)
    directory = open_directory(invocation, words)
    store = CheckpointStore(directory.checkpoints, keep=3)
    record, session = open_state(invocation, directory, algorithm=algorithm, env=env, store=store)
    return record, session, algorithm, store


@pytest.mark.parametrize("preset", ["cartpole", "cartpole-dqn", "pendulum-td3", "pendulum-sac"])
def test_a_run_starts_with_the_weights_and_nothing_else(preset):
    place, source = saved(preset)
    record, _, algorithm, _ = opened(preset, f"run.init={place}")
    assert digest(algorithm.model) == digest(source.model)
    assert (record.env_steps, record.version, record.updates) == (0, 0, 0)
    assert record.run_id != "other"


def test_the_replay_memory_of_the_other_run_is_not_needed():
    place, source = saved("cartpole-dqn", segments=[Segment(key="k", parts=[memoryview(b"frames")])])
    shutil.rmtree(place.parent / SEGMENTS)
    _, _, algorithm, _ = opened("cartpole-dqn", f"run.init={place}")
    assert digest(algorithm.model) == digest(source.model)


def test_the_value_head_of_ppo_comes_with_the_units_that_it_was_trained_in():
    _, trained, _ = learner("cartpole")
    target, valid = torch.arange(6.0).view(3, 2) + 50.0, torch.ones(3, 2, dtype=torch.bool)
    trained.move_value_units(target, valid)
    place, _ = saved("cartpole", state=trained.state_dict())
    _, _, algorithm, _ = opened("cartpole", f"run.init={place}")
    observation = torch.zeros(1, 4)
    before, after = (each._moments.denormalize(each.model(observation).value) for each in (trained, algorithm))
    torch.testing.assert_close(after, before)
    assert after.item() > 40.0


def test_every_network_of_dqn_takes_the_weights():
    place, source = saved("cartpole-dqn", "algorithm.average_rate=1.0")
    _, _, algorithm, _ = opened("cartpole-dqn", f"run.init={place}")
    state, wanted = algorithm.state_dict(), source.state_dict()["parameters"]
    for network in ("parameters", "target", "average"):
        assert all(torch.equal(state[network][name], tensor) for name, tensor in wanted.items())


def test_ppo_can_start_where_another_algorithm_of_the_same_layers_ended():
    place, source = saved("cartpole-a3c")
    assert digest(opened("cartpole", f"run.init={place}")[2].model) == digest(source.model)


@pytest.mark.parametrize(
    ("words", "found", "wanted"),
    [
        (["env.id=Acrobot-v1"], r"\[64, 4\]", r"\[64, 6\]"),
        (["model.hidden=[32]"], r"\[64, 4\]", r"\[32, 4\]"),
    ],
)
def test_a_network_of_other_layers_is_refused_by_name_and_shape(words, found, wanted):
    place, _ = saved("cartpole")
    with pytest.raises(ResourceError, match=f"found .*{found}.*wanted .*{wanted}"):
        opened("cartpole", *words, f"run.init={place}")


def test_a_path_without_a_whole_checkpoint_is_refused(tmp_path):
    with pytest.raises(ResourceError, match=r"run\.init .* cannot be used"):
        opened("cartpole", f"run.init={tmp_path}")


def test_a_checkpoint_of_a_policy_alone_is_refused():
    place, _ = saved("cartpole", state={"policy": torch.zeros(3)})
    with pytest.raises(ResourceError, match="found a policy alone"):
        opened("cartpole", f"run.init={place}")


def test_an_algorithm_that_cannot_take_weights_is_refused():
    with pytest.raises(ConfigError, match="LoadsParameters"):
        _load_initial_weights("checkpoint", object())


def test_a_resumed_run_goes_on_with_its_own_weights():
    place, source = saved("cartpole")
    record, session, algorithm, store = opened("cartpole", f"run.init={place}")
    with torch.no_grad():
        next(algorithm.model.parameters()).mul_(2.0)
    layout = ParameterLayout.of(algorithm.model).fingerprint
    counters = {"record": record.state_dict(now=1e9), "session": session.saved.state_dict()}
    state = algorithm.state_dict()
    store.save(Checkpoint(run_id="x", version=1, env_steps=0, architecture=layout, counters=counters, state=state))
    resumed = opened("cartpole", f"run.init={place}", "--resume")[2]
    assert digest(resumed.model) == digest(algorithm.model) != digest(source.model)


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_with_the_weights_again():
    place, source = saved("cartpole")
    opened("cartpole", f"run.init={place}")
    assert digest(opened("cartpole", f"run.init={place}", "--resume")[2].model) == digest(source.model)
