"""Observations of several arrays and action masks, from the environment to the checks of the learner."""

from __future__ import annotations

import dataclasses

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text

from common.algorithms.batch import collate
from common.algorithms.moments import Moments, ObservationStatistics
from common.algorithms.on_policy import ActorCriticPolicy, network_outputs, recorded_log_prob
from common.algorithms.payload import check_trajectory, trajectory_schema
from common.algorithms.ranks import ALONE
from common.envs.leaves import action_mask, allowed, inputs_of, join_inputs, random_allowed, split
from common.envs.make import make
from common.envs.spec import EnvSettings
from common.envs.trial import trial
from common.errors import ConfigError, DropReason, ProtocolError
from common.models.distributions import Categorical
from common.models.leaves import mask_logits
from common.models.nets import build_q_network
from common.models.spec import ModelSettings
from common.protocol.events import Experience
from common.replay.blocks import BlockLayout
from services.acting.rollout import Rollout

pytestmark = pytest.mark.pure
PROBE = "common.envs.probes:mixed_action"


class Told(gymnasium.Env):
    """Shows `seen` and `info`; episodes end after three steps, or are cut there."""

    def __init__(self, space, seen, info=None, actions=None, *, truncates=False):
        self.truncates = truncates
        self.observation_space, self.action_space = space, actions or Discrete(3)
        self.seen, self.info, self.age = seen, info or {}, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.age = 0
        return self.seen, dict(self.info)

    def step(self, _action):
        self.age += 1
        return self.seen, 0.0, self.age == 3 and not self.truncates, self.age == 3 and self.truncates, dict(self.info)


@pytest.fixture
def told(monkeypatch):
    """Return a function that makes settings of a `Told`."""

    def settings(*arguments, action_mask=False, truncates=False, **changed):
        import common.envs.probes as module

        monkeypatch.setattr(module, "told", lambda: Told(*arguments, truncates=truncates), raising=False)
        return EnvSettings(entry_point="common.envs.probes:told", num_envs=2, action_mask=action_mask, **changed)

    return settings


TWO = Dict({"a": Box(-1, 1, (2,), np.float32), "b": Box(-np.inf, np.inf, (2, 2), np.float32)})
PLAIN, ONES = Box(-1, 1, (2,), np.float32), np.ones(2, np.float32)


def rollout_of(settings, policy, length=16):
    """The arrays of a rollout as an actor records them."""
    environment = make(settings)
    schema = trajectory_schema(environment.spec, length=length, num_envs=8, recorded=recorded_log_prob(length=length, num_envs=8))
    rollout = Rollout(schema, environment.reset(3))
    for t in range(length):
        acted = {name: value.numpy() for name, value in policy.act(torch.from_numpy(rollout.observation)).items()}
        action = acted.pop("action")
        rollout.record(t, action, acted, environment.step(action))
    return environment.spec, rollout.finish()


def probe(actions, mask, *, stack=1, autoreset="next_step"):
    kwargs = {"actions": actions, "mask": mask}
    named = {"action_mask": bool(mask), "frame_stack": stack, "autoreset": autoreset}
    return EnvSettings(entry_point=PROBE, num_envs=8, kwargs=kwargs, **named)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize(
    ("actions", "mask"),
    [("discrete", "leaf"), ("discrete", "info"), ("multi_discrete", "info"), ("multi_discrete", ""), ("box", "")],
)
def test_the_learner_computes_the_log_probabilities_that_actors_record(actions, mask, stack, autoreset):
    settings, model = probe(actions, mask, stack=stack, autoreset=autoreset), ModelSettings(hidden=(16,))
    policy = ActorCriticPolicy(model=model, env=make(settings).spec, precision="fp32", seed=1)
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    env, arrays = rollout_of(settings, policy)
    check_trajectory(env, arrays)
    batch = collate([Experience(version=0, env_steps=0, arrays=arrays)], env)
    outputs = network_outputs(policy.network, batch, moments=Moments(), precision="fp32")
    valid = batch.valid
    assert valid.any()
    torch.testing.assert_close(outputs.log_prob[valid], batch.log_prob[valid], rtol=0, atol=1e-5)
    if mask:
        newest = arrays["obs"][stack - 1 : -1]
        choices = action_mask(env, newest)
        per_component = [part.sum(-1) for part in np.split(choices, np.cumsum(env.action.choices)[:-1], axis=-1)]
        most = torch.from_numpy(np.sum([np.log(np.maximum(1, count)) for count in per_component], axis=0)).float()
        assert (outputs.entropy[valid] <= most[valid] + 1e-5).all()  # log of the number of allowed actions
        assert outputs.entropy[valid].isfinite().all()


def test_masked_probabilities_are_those_of_a_distribution_over_the_allowed_actions_alone():
    logits, mask = torch.randn(64, 5, requires_grad=True), torch.rand(64, 5) < 0.6
    mask[:, 2] = True
    masked = Categorical.from_logits(mask_logits(logits, mask))
    for row in range(64):
        alone = torch.distributions.Categorical(logits=logits[row][mask[row]])
        torch.testing.assert_close(masked.log_probs[row][mask[row]], alone.logits)
        torch.testing.assert_close(masked.entropy()[row], alone.entropy())
    masked.entropy().sum().backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[~mask] == 0).all()
    drawn = Categorical(masked.log_probs.detach()).sample(torch.Generator().manual_seed(0))
    assert mask[torch.arange(64), drawn].all()


def test_the_largest_action_value_is_that_of_an_allowed_action():
    environment = make(probe("discrete", "leaf"))
    observation = environment.reset(0)
    net = build_q_network(ModelSettings(hidden=(8,)), environment.spec, dueling=True)
    best = net(torch.from_numpy(observation))[0].argmax(1).numpy()
    assert allowed(environment.spec, action_mask(environment.spec, observation), best).all()


@pytest.mark.parametrize("stack", [1, 2])
def test_leaves_are_taken_apart_and_joined_again(stack):
    env = dataclasses.replace(make(probe("discrete", "leaf")).spec, frame_stack=stack)
    shape = (5, *([stack] * (stack > 1)), *env.observation_shape)
    observation = np.random.default_rng(0).integers(0, 2, shape, np.uint8)
    if stack == 2:
        observation[:, 0, -8:] = observation[:, 1, -8:]  # of a mask the newest alone is kept
    inputs = inputs_of(env, observation)
    assert {name: array.shape[1:] for name, array in inputs.items()} == {leaf.path: leaf.shape for leaf in env.inputs}
    np.testing.assert_array_equal(join_inputs(env, list(inputs.values())), observation)


def test_random_play_takes_each_allowed_action_and_no_other():
    env = make(probe("multi_discrete", "info")).spec
    mask = np.tile(np.array([1, 0, 1, 1, 0, 1], bool), (300, 1))
    drawn = random_allowed(env, mask, np.random.default_rng(0))
    assert (drawn[:, [0, 2]] == [0, 1]).all()
    assert 100 < drawn[:, 1].sum() < 200


def test_a_memory_of_an_image_and_numbers_holds_their_bytes():
    env = make(probe("discrete", "leaf", stack=4)).spec
    layout = BlockLayout.plan(env, capacity=10_000, n_step=3, streams=8)
    leaves = sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in env.leaves)
    frames, dtype = layout.arrays()["frames"]
    assert np.prod(frames) * np.dtype(dtype).itemsize == leaves * (layout.positions + 1)


@pytest.mark.parametrize("where", ["info", "leaf"])
def test_the_last_observation_of_a_truncated_episode_has_its_leaves_and_its_mask(told, where):
    """Its environment has begun another episode in the same step."""
    mask, space, seen = np.array([1, 0, 1], np.int8), {"a": PLAIN}, {"a": ONES / 2}
    if where == "leaf":
        space, seen = space | {"action_mask": MultiBinary(3)}, seen | {"action_mask": mask}
    info = {"action_mask": mask} if where == "info" else {}
    settings = told(Dict(space), seen, info, action_mask=True, truncates=True, autoreset="same_step")
    environment = make(settings)
    environment.reset(0)
    for _ in range(3):
        row = environment.step(np.zeros(2, np.int64))
    assert row.final_index.tolist() == [0, 1]
    values = {leaf.path: leaf.values.tolist() for leaf in split(environment.spec, row.final_observation)}
    assert values == {"a": [[0.5, 0.5]] * 2, "action_mask": [[1, 0, 1]] * 2}


class Silent(Told):
    """Gives no mask with the last observation of an episode."""

    def step(self, action):
        seen, reward, terminated, truncated, info = super().step(action)
        return seen, reward, terminated, truncated, {} if self.age == 3 else info


@pytest.mark.parametrize("kind", [np.array, list, tuple])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_last_observation_needs_no_mask(monkeypatch, mode, num_envs, kind):
    """Also where all environments end in one step, and none has one."""
    import common.envs.probes as module

    info = {"action_mask": kind([1, 0, 1])}
    monkeypatch.setattr(module, "told", lambda: Silent(PLAIN, ONES, info, truncates=True), raising=False)
    settings = EnvSettings(entry_point="common.envs.probes:told", num_envs=num_envs, action_mask=True, autoreset=mode)
    environment = make(settings)
    masks = [action_mask(environment.spec, environment.reset(0))]
    masks += [action_mask(environment.spec, environment.step(np.zeros(num_envs, np.int64)).observation) for _ in range(8)]
    assert [mask[0].tolist() for mask in masks].count([True, False, True]) >= 6


class Masks(gymnasium.vector.SyncVectorEnv):
    """Hands over other masks of the environments that ended."""

    last = ()

    def step(self, actions):
        *row, info = super().step(actions)
        if "final_info" in info:
            info["final_info"]["action_mask"] = self.last
        return *row, info


@pytest.mark.parametrize("last", [[[1, 0, 1]], [[1, 0, 1], None, [1, 0, 1]], 1])
def test_last_masks_that_are_no_batch_are_refused(monkeypatch, last):
    import common.envs.probes as module

    info = {"action_mask": np.array([1, 0, 1], np.int8)}
    envs = [lambda: Told(PLAIN, ONES, info, truncates=True)] * 3
    made = Masks(envs, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)
    made.last = last
    monkeypatch.setattr(module, "told", lambda: made, raising=False)
    settings = EnvSettings(entry_point="common.envs.probes:told", num_envs=3, action_mask=True, autoreset="same_step")
    environment = make(settings)
    environment.reset(0)
    with pytest.raises(ConfigError, match="found masks in final_info that are no batch of all environments"):
        [environment.step(np.zeros(3, np.int64)) for _ in range(3)]


def test_two_hundred_leaves_are_as_good_as_two(told):
    space = Dict({f"x{number}": Box(-1, 1, (1,), np.float32) for number in range(200)})
    with trial(told(space, space.sample()), env_steps=5) as environment:
        assert len(environment.spec.leaves) == 200


def test_a_dict_of_one_leaf_is_that_leaf(told):
    with trial(told(Dict({"only": PLAIN}), {"only": ONES})) as environment:
        assert (environment.spec.leaves, environment.spec.observation_shape) == ((), (2,))


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_leaves_that_are_not_chosen_may_be_anything(told, mode):
    space = Dict({"a": PLAIN, "action_mask": MultiBinary(3), "arm": Dict({"x": PLAIN, "y": PLAIN}), "text": Text(5)})
    seen = {"a": ONES, "action_mask": np.ones(3, np.int8), "arm": {"x": ONES, "y": ONES / 2}, "text": "words"}
    settings = told(space, seen, leaves=("arm", "a"), action_mask=True, truncates=True, autoreset=mode)
    with trial(settings, env_steps=7) as environment:
        assert [leaf.path for leaf in environment.spec.leaves] == ["a", "arm/x", "arm/y", "action_mask"]
        values = {leaf.path: leaf.values.tolist() for leaf in split(environment.spec, environment.reset(0))}
    assert values["arm/y"] == [[0.5, 0.5]] * len(values["arm/y"])
    with pytest.raises(ConfigError, match=r"found \['ar'\], wanted some of a, action_mask, arm/x, arm/y, text"):
        make(told(space, seen, leaves=("ar", "a")))


@pytest.mark.parametrize(
    ("arguments", "mask", "message"),
    [
        (
            (TWO, {"a": ONES, "b": np.full((2, 2), np.nan, np.float32)}),
            False,
            "returns observations b that are not finite as float32: found nan",
        ),
        ((TWO, {"a": ONES}), False, "returns an observation without b: found keys a, wanted all arrays of its space"),
        ((PLAIN, ONES), True, r"gives no mask of its actions: found none in info, with \[\], wanted 3 numbers 0 or 1 in info"),
        ((PLAIN, ONES, {"action_mask": np.ones(2, np.int8)}), True, r"found one of shape \(2,\), wanted 3 numbers"),
        ((PLAIN, ONES, {"action_mask": [1, 1]}), True, r"found one of shape \(2,\), wanted 3 numbers"),
        ((PLAIN, ONES, {"action_mask": [1, [0]]}), True, "found lists of several lengths, wanted 3 numbers"),
        ((PLAIN, ONES, {"action_mask": np.zeros(3, np.int8)}), True, "allows no action: found a mask of zeros, or none, of env"),
        ((PLAIN, ONES, {"action_mask": np.full(3, 7, np.int8)}), True, "found one with 7, wanted 3 numbers 0 or 1"),
        (
            (PLAIN, ONES, {"action_mask": np.array([1, 0, 0, 0, 0], np.int8)}, MultiDiscrete([2, 3])),
            True,
            "allows no action: found a mask of zeros for component 1 of its action of environment 0, wanted an allowed action",
        ),
        ((Dict({"a": PLAIN, "b": Box(0, 1, (0,))}), {"a": ONES, "b": ONES[:0]}), False, "observation space b is empty"),
        ((Dict({"action_mask": MultiBinary(3)}), {"action_mask": np.ones(3, np.int8)}), True, "shows nothing but a mask"),
        (
            (Dict({"a": PLAIN, "action_mask": MultiBinary(2)}), {"a": ONES, "action_mask": np.ones(2, np.int8)}),
            True,
            r"found one of shape \(2,\), wanted 3",
        ),
        ((PLAIN, ONES, None, PLAIN), True, "env.action_mask does not fit the actions: found continuous ones"),
    ],
)
def test_a_bad_leaf_or_mask_is_named_before_the_run(told, arguments, mask, message):
    with pytest.raises(ConfigError, match=message), trial(told(*arguments, action_mask=mask), env_steps=5):
        pass


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_a_leaf_that_is_missing_later_is_named(told, mode):
    """Of same_step: in the last observation of a truncated episode alone."""
    seen = {"a": ONES, "b": np.ones((2, 2), np.float32)}
    environment = make(told(TWO, seen, truncates=True, autoreset=mode))
    environment.reset(0)
    env = environment.native.envs[0]
    step = env.step
    for _ in range(2):
        environment.step(np.zeros(2, np.int64))
    env.step = lambda action: ({"a": ONES}, *step(action)[1:])
    with pytest.raises(ConfigError, match="returns an observation without b: found keys a"):
        environment.step(np.zeros(2, np.int64))


def test_a_mask_that_is_not_used_is_offered(told):
    seen = {"a": ONES, "action_mask": np.ones(3, np.int8)}
    with trial(told(Dict({"a": PLAIN, "action_mask": MultiBinary(3)}), seen)) as environment:
        assert environment.offers_masks
    with trial(told(Dict({"a": PLAIN, "action_mask": MultiBinary(3)}), seen, action_mask=True)) as environment:
        assert not environment.offers_masks


MASK = {"action_mask": np.array([1, 0, 1], np.int8)}


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ((Dict({"a": PLAIN, "action_mask": MultiBinary(3)}), {"a": ONES, **MASK}), ", or set env.action_mask=true"),
        ((PLAIN, ONES, MASK), ", or set env.action_mask=true"),
        ((PLAIN, ONES), ""),
    ],
)
def test_an_environment_with_masks_that_fails_without_them_may_need_them(told, monkeypatch, arguments, fix):
    def step(_, action):
        raise ValueError(f"{action} is forbidden")

    settings = told(*arguments)
    monkeypatch.setattr(Told, "step", step)
    with pytest.raises(ConfigError, match="is forbidden") as refusal, trial(settings, env_steps=5):
        pass
    assert refusal.value.fix == f"correct the environment, or env.kwargs{fix}"


def test_the_learner_refuses_a_leaf_that_is_not_finite_and_an_action_that_is_forbidden():
    settings = probe("discrete", "leaf")
    policy = ActorCriticPolicy(model=ModelSettings(hidden=(8,)), env=make(settings).spec, precision="fp32", seed=1)
    env, arrays = rollout_of(settings, policy)
    bad = arrays["obs"].copy()
    next(leaf for leaf in split(env, bad) if leaf.path == "arm/0").values[3, 2, 0] = np.inf
    with pytest.raises(ProtocolError, match="array obs/arm/0 at") as refused:
        check_trajectory(env, arrays | {"obs": bad})
    assert refused.value.reason is DropReason.NON_FINITE
    number = arrays["obs"].copy()
    next(leaf for leaf in split(env, number) if leaf.path == "arm/1").values[3, 2, 0] = 3
    with pytest.raises(ProtocolError, match="observation arm/1 outside the observation space"):
        check_trajectory(env, arrays | {"obs": number})
    mask = action_mask(env, arrays["obs"][:-1])
    row = tuple(np.argwhere(arrays["valid"] & ~mask.all(-1))[0])
    action = arrays["action"].copy()
    action[row] = np.flatnonzero(~mask[row])[0]
    with pytest.raises(ProtocolError, match="actions that their mask forbids: found 1"):
        check_trajectory(env, arrays | {"action": action})


def test_vectors_of_a_tree_are_normalised_and_its_discrete_leaves_are_not():
    environment = make(probe("discrete", "leaf"))
    net = build_q_network(ModelSettings(hidden=(8,), normalize_observation=True), environment.spec, dueling=False)
    frames = np.concatenate([environment.reset(seed) for seed in range(20)])
    statistics = ObservationStatistics(lambda: [net], env=environment.spec, ranks=ALONE)
    statistics.calibrate(torch.from_numpy(frames))
    arm, number, camera = net.trunk.trunks()
    values = [leaf.values for leaf in split(environment.spec, frames)]
    np.testing.assert_allclose(arm.normalisation.mean.sum(0).detach().numpy(), values[0].mean(0), atol=1e-3)
    torch.testing.assert_close(
        camera.normalisation.mean.detach().numpy(), values[2].mean(0, dtype=np.float32), rtol=1e-3, atol=1e-3
    )
    assert number.normalisation is None


def test_a_batch_without_env_steps_adds_nothing_to_the_statistics_of_a_tree():
    """As of a rank of the learner that has no actors, and of a message that has rows of resets alone."""
    environment = make(probe("discrete", "leaf"))
    net = build_q_network(ModelSettings(hidden=(8,), normalize_observation=True), environment.spec, dueling=False)
    frames = environment.reset(0)
    statistics = ObservationStatistics(lambda: [net], env=environment.spec, ranks=ALONE)
    statistics.calibrate(torch.from_numpy(frames))
    statistics.add([])
    assert statistics.state_dict()["count"] == len(frames)


class Arms(torch.nn.Module):
    """A network of a user's own."""

    def __init__(self, shape):
        super().__init__()
        assert shape == {"arm/0": (2,), "arm/1": (3,), "camera": (3, 8, 8)}
        self.first = torch.nn.Linear(5, 7)

    def forward(self, observation):
        return (
            self.first(torch.cat([observation["arm/0"], observation["arm/1"]], dim=1))
            + observation["camera"].mean((1, 2, 3))[:, None]
        )


def test_a_network_of_the_users_own_gets_the_arrays_by_their_paths(monkeypatch):
    import common.envs.probes as module

    monkeypatch.setattr(module, "Arms", Arms, raising=False)
    environment = make(probe("discrete", "leaf"))
    settings = ModelSettings(hidden=(8,), entry_point="common.envs.probes:Arms")
    net = build_q_network(settings, environment.spec, dueling=False)
    assert net(torch.from_numpy(environment.reset(0)))[0].shape == (8, 8)
    assert net.trunk.user.features == 7
