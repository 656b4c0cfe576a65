"""Exported policies, run by onnxruntime: they act as the policy that they were made of."""

from __future__ import annotations

import importlib.util
import json
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers

if importlib.util.find_spec("onnxscript") is None:  # torch imports it for an export, and it takes half a second
    pytest.skip("no onnxscript", allow_module_level=True)
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from common.envs import probes  # noqa: E402 - the packages come first
from common.errors import ConfigError, ResourceError  # noqa: E402
from common.policies import export  # noqa: E402
from common.policies.load import load_policy  # noqa: E402

pytestmark = pytest.mark.wire  # reads and writes files

OBSERVATIONS = 10_000
IMAGES = [
    "env.height=42",
    "env.width=42",
    "env.crop=[0,0]",
    "model.normalize_observation=true",
    "algorithm.replay_capacity=10000",
]
OWN = """
import gymnasium
import numpy as np
import torch

class Shifted(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(3, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 0.0, True, False, {}

class Double(Shifted):
    action_space = gymnasium.spaces.Box(-0.1, 0.2, (2,), np.float64)

class Pictures(Shifted):
    observation_space = gymnasium.spaces.Box(-5, 1, (16, 16, 3), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.full((16, 16, 3), -5, np.float32), {}

class Named(Shifted):
    observation_space = gymnasium.spaces.Dict({name: Shifted.observation_space for name in ("goal", "pos")})

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

class Counting(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.layer = torch.nn.Linear(shape[0], 3)

    def forward(self, x):
        return self.layer(x.reshape(len(x), -1))

class Deciding(Counting):
    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Code of a user's own, by the name of its module."""
    (tmp_path / "exported.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)  # code of a run is in the current directory
    monkeypatch.delitem(sys.modules, "exported", raising=False)


@pytest.mark.parametrize(
    ("preset", "overrides", "outputs"),
    [
        ("cartpole", [], ["action", "logits"]),
        ("pendulum-td3", [], ["action"]),
        ("pendulum-sac", [], ["action"]),
        ("pong-dqn", IMAGES, ["action", "q_values"]),
    ],
)
def test_onnxruntime_takes_the_same_greedy_actions(make_run, preset, overrides, outputs):
    policy = load_policy(make_run(*overrides, preset=preset)[0].path)
    model = export.to_onnx(policy)
    found = export.compare(model, policy, observations=OBSERVATIONS)
    assert (found.different, found.observations) == (0, OBSERVATIONS)
    assert found.equal >= OBSERVATIONS - 1
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (taken,) = session.get_inputs()
    assert (taken.name, taken.shape) == ("observation", ["batch", *policy.env.network_input_shape])
    assert taken.type == ("tensor(uint8)" if policy.env.observation_dtype == "uint8" else "tensor(float)")
    assert [output.name for output in session.get_outputs()] == outputs
    observation = export.random_observations(policy, 200, np.random.default_rng(2))
    for rows in (observation, observation[:1]):
        action, *scores = session.run(None, {"observation": rows})
        assert (action.shape, action.dtype) == (policy(rows).shape, policy(rows).dtype)
        for values in scores:
            assert np.array_equal(values.argmax(axis=1), action)
    assert len(np.unique(policy(observation), axis=0)) > 1
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.neg_()
    assert export.compare(model, policy, observations=1000).different > 100  # another policy differs from the exported one


@pytest.mark.parametrize(("share", "different"), [(0.8e-4, 0), (1.2e-4, 200)])
def test_continuous_actions_may_differ_by_a_ten_thousandth_of_their_range(make_run, monkeypatch, share, different):
    policy = load_policy(make_run(preset="pendulum-td3")[0].path)
    model, act = export.to_onnx(policy), type(policy).__call__
    monkeypatch.setattr(type(policy), "__call__", lambda self, observation: act(self, observation) + np.float32(4.0 * share))
    assert export.compare(model, policy, observations=200).different == different


def test_the_resnet_of_impala_is_exported(make_run):
    small = ("env.height=16", "env.width=16", "env.crop=[0,0]", "model.conv=impala", "model.hidden=[8]")
    policy = load_policy(make_run(*small, preset="pong-impala")[0].path)
    found = export.compare(export.to_onnx(policy), policy, observations=200)
    assert (found.different, found.observations) == (0, 200)


def test_actions_are_those_of_the_environment(make_run, own, tmp_path):
    """Numbers that begin at 5, and a box of doubles that is narrower than what the network answers."""
    for name in ("Shifted", "Double"):
        run, _ = make_run(f"env.entry_point=exported:{name}", path=tmp_path / name)
        policy = load_policy(run.path)
        observation = export.random_observations(policy, 1000, np.random.default_rng(1))
        action = export._Graph(policy)(torch.from_numpy(observation))[0].detach().numpy()
        assert np.array_equal(action, policy(observation))
        assert action.dtype == policy(observation).dtype
    assert list(export._scores(policy.module, torch.from_numpy(observation), None)) == ["mean"]
    assert policy(observation).min() == -0.1
    assert policy(observation).max() == 0.2
    space = json.loads(export.metadata(policy)["rookery.action_space"])
    assert space == {"type": "box", "shape": [2], "low": [-0.1] * 2, "high": [0.2] * 2, "dtype": "float64"}


@pytest.mark.parametrize(
    ("kind", "space"),
    [
        ("multi_discrete", {"type": "multi_discrete", "n": [3, 2], "start": [4, 0], "shape": [2], "dtype": "int64"}),
        ("multi_binary", {"type": "multi_discrete", "n": [2] * 4, "start": [0] * 4, "shape": [2, 2], "dtype": "int8"}),
        ("box", {"type": "box", "low": [None] * 2, "high": [None] * 2, "shape": [1, 2], "dtype": "float32"}),
    ],
)
def test_actions_of_several_components_are_exported_as_the_environment_takes_them(make_run, kind, space):
    policy = load_policy(make_run("env.entry_point=common.envs.probes:joint_action", f"env.kwargs={{kind: {kind}}}")[0].path)
    model = export.to_onnx(policy)
    found = export.compare(model, policy, observations=1000)
    assert (found.different, found.observations) == (0, 1000)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    observation = export.random_observations(policy, 100, np.random.default_rng(2))
    action, _ = session.run(None, {"observation": observation})
    assert (action.shape, str(action.dtype)) == ((100, *space["shape"]), space["dtype"])
    assert policy.make_env().action_space.contains(policy(observation)[0])
    assert json.loads(export.metadata(policy)["rookery.action_space"]) == space
    if kind != "box":
        assert not export._tied(
            policy,
            policy.batch(observation)[0],
            None,
            policy.to_native(np.zeros((100, *policy.env.action.shape), np.int64)),
            action,
        ).all()
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.neg_()
    assert export.compare(model, policy, observations=1000).different > 100


def test_discrete_observations_are_coded_inside_of_the_model(make_run):
    named = "env.entry_point=common.envs.probes:named_action", "env.kwargs={kind: multi_discrete}", "env.frame_stack=2"
    policy = load_policy(make_run(*named)[0].path)
    model = export.to_onnx(policy)
    assert export.compare(model, policy, observations=1000).different == 0
    observation, _ = policy.make_env().reset(seed=1)
    assert policy.make_env().observation_space.contains(observation)
    assert policy(observation) in (0, 1)
    assert "below [3, 4]" in export.metadata(policy)["rookery.preprocessing"]


@pytest.mark.parametrize(
    ("preset", "stack", "mask"),
    [("cartpole", 2, "info"), ("cartpole-dqn", 1, "leaf"), ("cartpole", 2, "")],
)
def test_each_array_of_an_observation_is_an_input_of_the_model(make_run, preset, stack, mask):
    named = "env.entry_point=common.envs.probes:mixed_action", f"env.kwargs={{mask: '{mask}'}}", f"env.action_mask={bool(mask)}"
    policy = load_policy(make_run(*named, f"env.frame_stack={stack}", preset=preset)[0].path)
    model = export.to_onnx(policy)
    found = export.compare(model, policy, observations=1000)
    assert (found.different, found.observations) == (0, 1000)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    axis = [stack] * (stack > 1)
    shapes = {"arm/0": [*axis, 2], "arm/1": [*axis, 1], "camera": [*axis, 3, 8, 8]} | ({"action_mask": [8]} if mask else {})
    assert {each.name: each.shape[1:] for each in session.get_inputs()} == shapes
    assert [each["name"] for each in json.loads(export.metadata(policy)["rookery.observation"])] == list(shapes)
    environment = policy.make_env()
    observation, _ = environment.reset(seed=1)
    assert environment.observation_space.contains(observation)
    assert environment.action_space.contains(policy(observation))
    batch = export.random_observations(policy, 500, np.random.default_rng(3))
    if mask:
        forbidden = batch["action_mask"][np.arange(500), policy(batch, greedy=False)] == 0
        assert not forbidden.any()
        with pytest.raises(ConfigError, match=r"observation of other arrays: .*arm/0.*wanted.*action_mask"):
            policy({path: array for path, array in observation.items() if path != "action_mask"})
    with pytest.raises(ConfigError, match="observation camera of another shape"):
        policy(observation | {"camera": observation["arm/0"]})
    for outside in (-1, 3):  # a code without a 1, like any other
        with pytest.raises(
            ConfigError, match=rf"observation arm/1 outside of its choices: found {outside} to {outside}, wanted 0"
        ):
            policy(observation | {"arm/1": np.full_like(observation["arm/1"], outside)})


@pytest.mark.parametrize(
    ("name", "overrides"), [("action", []), ("logits", []), ("start", ["model.recurrent=gru", "model.shared_trunk=true"])]
)
def test_arrays_of_one_name_are_refused(make_run, monkeypatch, name, overrides):
    """A file with two arrays of one name is no model."""

    def renamed():
        space = spaces.Dict({path: spaces.Box(-1, 1, (2,), np.float32) for path in (name, "other")})
        return wrappers.TransformObservation(probes.matching_action(), lambda _: space.sample(), space)

    monkeypatch.setattr(probes, "renamed", renamed, raising=False)
    run, _ = make_run("env.entry_point=common.envs.probes:renamed", "model.hidden=[8]", *overrides)
    policy = load_policy(run.path, allow_code=["common.envs.probes"])
    with pytest.raises(ConfigError, match=rf"arrays of an exported model: found observations \['{name}'\], wanted names"):
        export.to_onnx(policy)


@pytest.mark.parametrize(
    ("cell", "preset", "overrides", "scores"),
    [
        ("lstm", "cartpole", ["model.shared_trunk=true"], "logits"),
        ("gru", "cartpole-dqn", ["algorithm.minibatch=128", "algorithm.burn_in=2"], "q_values"),
    ],
)
def test_memory_is_an_input_and_an_output_of_the_model(make_run, cell, preset, overrides, scores):
    memory = f"model.recurrent={cell}", "model.recurrent_size=6", "model.hidden=[8]"
    policy = load_policy(make_run(*memory, *overrides, preset=preset)[0].path)
    model = export.to_onnx(policy)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == ["observation", "memory", "start"]
    assert [each.name for each in session.get_outputs()] == ["action", scores, "next_memory"]
    assert export.compare(model, policy, observations=1000).different == 0
    memory, start = np.zeros((3, policy.settings.model.state_size), np.float32), np.ones(3, np.bool_)
    seen = np.random.default_rng(1).normal(size=(20, 3, 4)).astype(np.float32)
    seen[3, 1, 0] = np.nan  # which costs that environment its memory, and no more
    for observation in seen:
        action, memory = session.run(["action", "next_memory"], {"observation": observation, "memory": memory, "start": start})
        start[:] = False
        known = np.isfinite(observation).all()  # else the loaded policy would refuse it
        wanted = policy(observation) if known else policy.policy.act(torch.from_numpy(observation), greedy=True)["action"].numpy()
        np.testing.assert_array_equal(action, wanted)
    for start in (np.array([True, False, False]), [False, True, False]):  # both are forgotten
        policy.reset(start)
    start = np.array([True, True, False])
    fed = {"observation": observation, "memory": memory, "start": start}
    np.testing.assert_array_equal(session.run(["action"], fed)[0], policy(observation))
    with pytest.raises(ConfigError, match=r"start of other environments: found \[1\], wanted \[3\]"):
        policy.reset([True])
    whole = {"observation": observation, "memory": memory, "start": start}
    others = {"memory": memory[:2]}, {"memory": memory[:1]}, {"start": start[:1]}, {"observation": observation[:1]}
    for other in others:  # that of batch 1 would be repeated for all rows
        with pytest.raises(Exception, match=r"mismatched dimensions of \d and \d"):
            session.run(None, whole | other)
    with pytest.raises(Exception, match=r"index: 1 Got: \d+ Expected: \d+"):
        session.run(None, whole | {"memory": np.zeros((3, memory.shape[1] + 1), np.float32)})
    with pytest.raises(ConfigError, match=r"another number of environments: found 2, wanted 3, as before; call policy.reset\(\)"):
        policy(observation[:2])
    policy.reset()
    np.testing.assert_array_equal(policy(observation[:2]), policy_of_new_episodes(session, observation[:2], memory))


def policy_of_new_episodes(session, observation, memory):
    """Actions of the exported policy where all episodes begin, whatever `memory` is."""
    fed = {"observation": observation, "memory": memory[: len(observation)], "start": np.ones(len(observation), np.bool_)}
    return session.run(["action"], fed)[0]


def test_a_tie_is_no_difference_and_a_preference_is(make_run):
    policy = load_policy(make_run()[0].path)
    observation = export.random_observations(policy, 1000, np.random.default_rng(1))
    wanted = policy(observation)
    found = 1 - wanted
    seen, _ = policy.batch(observation)
    assert export._tied(policy, seen, None, found, wanted).mean() < 0.01
    policy.module.policy_head.weight.zero_()
    policy.module.policy_head.bias.zero_()
    assert export._tied(policy, seen, None, found, wanted).all()


@pytest.mark.parametrize("preset", ["cartpole", "cartpole-dqn"])
def test_a_preference_among_the_actions_that_a_mask_allows_is_a_difference(make_run, preset):
    masked = "env.entry_point=common.envs.probes:mixed_action", "env.kwargs={mask: leaf, camera: false}", "env.action_mask=true"
    policy = load_policy(make_run(*masked, preset=preset)[0].path)
    model = export.to_onnx(policy)
    assert export.compare(model, policy, observations=1000).different == 0
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.neg_()
    found = export.compare(model, policy, observations=1000)
    assert (found.different > 100, found.ties) == (True, 0)


def test_the_metadata_describes_policy_input_and_output(make_run):
    run, _ = make_run("env.height=42", "env.width=40", "env.crop=[4,2]", preset="pong")
    facts = export.metadata(load_policy(run.path))
    assert facts.items() >= {
        ("rookery.run_id", "tiny"),
        ("rookery.version", "7"),
        ("rookery.env_steps", "7000"),
        ("rookery.algorithm", "ppo"),
        ("rookery.env_id", "ALE/Pong-v5"),
        ("rookery.observation_shape", "[4, 36, 40]"),
        ("rookery.observation_dtype", "uint8"),
        ("rookery.frame_stack", "4"),
    }
    assert json.loads(facts["rookery.action_space"]) == {"type": "discrete", "n": 6, "start": 0}
    assert json.loads(facts["rookery.env"])["frame_skip"] == 4
    assert "42 x 40, without 4 rows at the top and 2 at the bottom" in facts["rookery.preprocessing"]
    assert "newest 4 frames, the oldest first" in facts["rookery.preprocessing"]


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (
            ["env.entry_point=exported:Pictures"],
            ["the largest absolute bound of its space if that is above 1", "limit of its dtype"],
        ),
        (["env.entry_point=exported:Named", "env.leaves=[pos]"], ["The observation is pos alone, by env.leaves. A frame is"]),
    ],
)
def test_the_metadata_says_how_images_of_floats_are_scaled_and_which_leaf_was_chosen(make_run, own, settings, facts):
    policy = load_policy(make_run(*settings, "model.hidden=[8]")[0].path)
    for fact in facts:
        assert fact in export.metadata(policy)["rookery.preprocessing"]
    if policy.env.is_image:
        assert policy.make_env().reset(seed=1)[0].min() == -1.0


@pytest.mark.parametrize(
    ("network", "fact"),
    [("Counting", "the network fixes the batch size: found 2"), ("Deciding", "the policy cannot be exported: found ")],
)
def test_a_network_that_cannot_be_exported_is_refused_in_one_line(make_run, own, network, fact):
    policy = load_policy(make_run(f"model.entry_point=exported:{network}")[0].path)
    with pytest.raises(ConfigError, match=fact) as raised:
        export.to_onnx(policy)
    assert "\n" not in str(raised.value)


def test_a_missing_package_is_named_with_the_extra_that_has_it(make_run, monkeypatch):
    find = export.importlib.util.find_spec
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    with pytest.raises(ResourceError, match=r"not installed: found no onnxscript; pip install 'rookery\[export\]'"):
        export.to_onnx(load_policy(make_run()[0].path))
