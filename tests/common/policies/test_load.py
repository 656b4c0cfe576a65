"""Policies loaded from run directories: which checkpoint, which actions, and one line for all that cannot be loaded."""

from __future__ import annotations

import pickle
import re
import shutil
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch

import rookery
from common.algorithms.api import WorkerContext
from common.algorithms.registry import build_policy
from common.errors import ConfigError, ResourceError
from common.models import snapshot
from common.models.snapshot import ParameterLayout
from common.policies.load import BEST, POLICY, load_policy
from common.replay.blocks import Segment
from common.runtime.checkpoint_files import MANIFEST, SEGMENTS, TENSORS, Checkpoint, read
from common.runtime.checkpoints import STATE_SETTINGS, CheckpointStore

pytestmark = pytest.mark.wire  # reads and writes files

SMALL = "model.hidden=[8]"
MASKED = ("env.entry_point=common.envs.probes:mixed_action", "env.kwargs={mask: leaf}", "env.action_mask=true")
OWN = """
import gymnasium
import numpy as np

class Shifted(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.taken = []
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(np.int64(action)), action
        return np.zeros(2, np.float32), float(action), True, False, {}
"""

BOUNDED = """
class Bounded(Shifted):
    def __init__(self, high, level="level"):
        open(level).close()
        self.action_space = gymnasium.spaces.Box(-high, high, (1,), np.float32)

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, True, False, {}
"""


def evaluator_of(algorithm, policy):
    """The policy of an evaluator that received the snapshot of this learner."""
    settings, context = policy.settings, WorkerContext(index=0, workers=1, num_envs=1, training=False)
    built = build_policy(settings.algorithm, model=settings.model, env=policy.env, precision="fp32", seed=1, context=context)
    built.load(1, snapshot.to_tensor(snapshot.flatten(algorithm.model, "fp32")), env_steps=1)
    return built


def observations(policy, count=50):
    random = np.random.default_rng(0)
    shape = (count, *policy.env.network_input_shape)
    if policy.env.observation_dtype == "uint8":
        return random.integers(0, 256, shape, np.uint8)
    return random.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("cartpole", []),
        ("cartpole-dqn", ["algorithm.average_rate=0.5"]),  # the average is published, and not the network that is trained
        ("pendulum-td3", []),
        ("pendulum-sac", []),
        ("pong", ["env.height=36", "env.width=36", "env.crop=[0,0]", "model.conv=[[4,8,4]]"]),
    ],
)
def test_it_acts_as_the_evaluator_of_the_run(make_run, preset, overrides):
    run, algorithm = make_run(SMALL, *overrides, preset=preset)
    policy = rookery.load_policy(run.path)
    evaluator, batch = evaluator_of(algorithm, policy), observations(policy)
    for greedy in (True, False):
        wanted = evaluator.act(torch.from_numpy(batch), greedy=greedy)["action"].numpy()
        assert np.array_equal(policy(batch, greedy=greedy), wanted)
    assert len(np.unique(policy(batch), axis=0)) > 1
    assert (policy.version, policy.env_steps, policy.run_id) == (7, 7000, "tiny")
    assert snapshot.digest(policy.module) == snapshot.digest(algorithm.model)


def test_one_observation_gives_one_action_of_the_environment(make_run):
    run, _ = make_run(SMALL, preset="pendulum")
    policy = load_policy(run.path)
    batch = observations(policy, 2000)
    assert np.allclose(policy(batch[3]), policy(batch)[3], atol=1e-5)
    assert np.array_equal(policy(batch[3].astype(np.float64)), policy(batch[3]))
    drawn = policy(batch, greedy=False)
    assert (drawn.min(), drawn.max()) == (-2.0, 2.0)  # the bounds of Pendulum, which a Gaussian does not know


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("cartpole", ["model.recurrent=gru", "model.shared_trunk=true"]),
        ("pendulum-td3", []),
        *(("cartpole", [*MASKED, f"env.frame_stack={stack}"]) for stack in (1, 2)),
    ],
)
def test_no_observation_gives_no_action(make_run, preset, overrides):
    """An empty batch ended in numpy's own error."""
    policy = load_policy(make_run(SMALL, *overrides, preset=preset)[0].path)
    none = {leaf.path: np.zeros((0, *leaf.shape), leaf.dtype) for leaf in policy.env.inputs}
    one = policy(policy.make_env().reset(seed=1)[0])
    policy.reset()
    for greedy in (True, False):
        found = policy(none if policy.env.leaves else none["observation"], greedy=greedy)
        assert (found.shape, found.dtype) == ((0, *one.shape), one.dtype)


def test_drawn_actions_follow_from_the_seed(make_run):
    run, _ = make_run(SMALL)
    drawn = [load_policy(run.path, seed=seed)(observations(load_policy(run.path)), greedy=False) for seed in (3, 3, 4)]
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


@pytest.mark.parametrize("seed", ["a", None, 1.5, -1, 2**63])
def test_a_seed_that_is_none_is_refused(make_run, seed):
    """It ended in torch's own error after the whole policy was loaded."""
    run, _ = make_run(SMALL)
    wanted = f"seed of drawn actions: found {seed!r}, wanted an integer from 0 to 2**63 - 1"
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        load_policy(run.path, seed=seed)


def test_a_seed_may_be_an_integer_of_numpy(make_run):
    run, _ = make_run(SMALL)
    drawn = [load_policy(run.path, seed=seed)(np.zeros((50, 4)), greedy=False) for seed in (3, np.int64(3))]
    assert np.array_equal(*drawn)


def test_actions_are_numbered_as_the_environment_numbers_them(make_run, tmp_path, monkeypatch):
    (tmp_path / "shifted_games.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)  # code of a run is in the current directory
    run, _ = make_run(SMALL, "env.entry_point=shifted_games:Shifted")
    policy = load_policy(run.path)
    env = policy.make_env()
    observation, _ = env.reset(seed=1)
    action = policy(observation)
    assert env.action_space == gymnasium.spaces.Discrete(3, start=5)
    assert env.action_space.contains(action)
    assert env.step(action)[1] == float(action)


@pytest.mark.parametrize(
    ("observation", "found"),
    [(np.zeros((4, 7), np.float32), "(4, 7)"), (np.zeros(5), "(5,)"), (np.float32(0), "()"), (np.zeros((2, 3, 4)), "(2, 3, 4)")],
)
def test_an_observation_of_another_shape_is_refused(make_run, observation, found):
    run, _ = make_run(SMALL)
    with pytest.raises(ConfigError) as refusal:
        load_policy(run.path)(observation)
    assert found in str(refusal.value)


@pytest.mark.parametrize(
    ("observation", "found"),
    [
        ([[0.0] * 4, [0.0] * 3], "observation is no array: found list: "),
        ((np.zeros(4), {}), "observation is no array: found tuple: "),  # what `reset` returns
        (torch.zeros(4, requires_grad=True), "observation is no array: found Tensor: "),
        ({1: np.zeros(4), "a": np.zeros(4)}, "observation of other arrays: found ['1', 'a'], wanted ['observation']"),
    ],
)
def test_an_observation_that_is_no_array_is_refused(make_run, observation, found):
    """It ended in an error of numpy, torch or Python."""
    with pytest.raises(ConfigError, match=re.escape(found)):
        load_policy(make_run(SMALL)[0].path)(observation)


def test_floats_are_no_image(make_run):
    run, _ = make_run("env.height=36", "env.width=36", "env.crop=[0,0]", "model.conv=[[4,8,4]]", SMALL, preset="pong")
    policy = load_policy(run.path)
    with pytest.raises(ConfigError, match="float32"):
        policy(observations(policy).astype(np.float32))


def test_integers_that_an_image_cannot_have_are_refused(make_run):
    """They were taken modulo 256."""
    run, _ = make_run("env.height=36", "env.width=36", "env.crop=[0,0]", "model.conv=[[4,8,4]]", SMALL, preset="pong")
    policy = load_policy(run.path)
    images = observations(policy).astype(np.uint16)
    assert policy(images).shape == (50,)
    images[3] += 256
    with pytest.raises(ConfigError, match=r"observation outside of its type: found 0 to \d+, wanted uint8"):
        policy(images)


def test_masks_of_other_integers_are_taken_and_those_that_allow_nothing_are_not(make_run):
    policy = load_policy(make_run(SMALL, *MASKED)[0].path)
    observation, _ = policy.make_env().reset(seed=1)
    mask = observation["action_mask"]
    assert all(policy(observation | {"action_mask": mask.astype(dtype)}) == policy(observation) for dtype in ("int8", "bool"))
    with pytest.raises(ConfigError, match="an action mask allows no action: found no choice of component 0"):
        policy(observation | {"action_mask": 0 * mask})
    batch = {path: np.stack(3 * [array]) for path, array in observation.items()}
    forbidden = batch["action_mask"] * np.array([[1], [0], [1]], np.uint8)
    with pytest.raises(ConfigError, match="an action mask allows no action: found no choice of component 0 in row 1"):
        policy(batch | {"action_mask": forbidden})
    with pytest.raises(ConfigError, match=r"a batch of observations: found .*1 of action_mask, wanted as many of each array"):
        policy(batch | {"action_mask": mask[np.newaxis]})


def test_of_several_agents_those_that_have_left_may_have_masks_that_allow_nothing(make_run):
    setting = "env.entry_point=common.envs.probes:leaving_agents"
    policy = load_policy(make_run(SMALL, setting, "env.kwargs={mask: leaf}", "env.action_mask=true")[0].path)
    observation, _ = policy.make_env().reset(seed=1)
    left = observation["action_mask"] * np.array([[1], [0]], np.uint8)
    assert policy(observation | {"action_mask": left})[0] == policy(observation)[0]
    with pytest.raises(ConfigError, match="an action mask allows no action"):
        policy(observation | {"action_mask": 0 * left})


def test_settings_that_change_bounds_or_masks_do_not_fit_a_policy(make_run, tmp_path, monkeypatch):
    """Its actions were scaled to other bounds, and the mask was left out, without a word."""
    (tmp_path / "bounded_games.py").write_text(OWN + BOUNDED, encoding="utf-8")
    (tmp_path / "level").touch()
    monkeypatch.chdir(tmp_path)
    runs = (
        (
            ("env.entry_point=bounded_games:Bounded", "env.kwargs={high: 1}"),
            ("env.kwargs={high: 100}",),
        ),
        (MASKED, ("env.action_mask=false",)),
    )
    for number, (settings, changed) in enumerate(runs):
        run, _ = make_run(SMALL, *settings, path=tmp_path / f"run{number}")
        assert "the environment does not fit the policy: found other settings of ['" in refusal(run.path, overrides=changed)
        load_policy(run.path, overrides=["env.num_envs=2"])
    (tmp_path / "level").rename(tmp_path / "moved")
    load_policy(tmp_path / "run0", overrides=["env.kwargs={high: 1, level: moved}"])  # the run's own cannot be built any more


def test_a_policy_can_be_sent_to_another_process(make_run, tmp_path):
    for preset in ("cartpole", "pendulum"):
        policy = load_policy(make_run(SMALL, preset=preset, path=tmp_path / preset)[0].path)
        batch = observations(policy)
        assert np.array_equal(pickle.loads(pickle.dumps(policy))(batch), policy(batch))


# --- which checkpoint ---


def test_a_link_to_a_checkpoint_has_the_settings_of_its_own_run(make_run, tmp_path):
    """Also one in the folder of another run."""
    run, _ = make_run(SMALL, "algorithm.gamma=0.9")
    other, _ = make_run(SMALL, path=tmp_path / "other")
    (other.path / "inits").mkdir()
    link = other.path / "inits/first"
    link.symlink_to(run.checkpoints / "checkpoint-000000000007")
    assert load_policy(link).settings.algorithm.gamma == 0.9


def test_the_newest_a_version_and_a_directory(make_run):
    run, _ = make_run(SMALL, version=7)
    make_run(SMALL, version=12, seed=2)
    assert load_policy(run.path).version == 12
    assert load_policy(str(run.path), checkpoint=7).version == 7
    assert load_policy(run.path, checkpoint="7").version == 7
    assert load_policy(run.checkpoints / "checkpoint-000000000007").version == 7
    with pytest.raises(ConfigError, match=r"found 8, wanted newest or one of 12, 7$"):
        load_policy(run.path, checkpoint=8)
    with pytest.raises(ConfigError, match="two checkpoints named"):
        load_policy(run.checkpoints / "checkpoint-000000000007", checkpoint=12)
    with pytest.raises(ConfigError, match="found best"):
        load_policy(run.path, checkpoint="best")


@pytest.mark.parametrize("task", [{}, {"kwargs": {"length": 3}}])
def test_a_checkpoint_of_a_policy_alone_is_the_best_in_the_environment_of_the_run(make_run, tmp_path, task):
    run, _ = make_run(SMALL)
    best = make_run(SMALL, seed=5, path=tmp_path / "other")[1].model
    alone = Checkpoint(
        run_id="tiny",
        version=3,
        env_steps=30,
        architecture=ParameterLayout.of(best).fingerprint,
        counters={"settings": {"env": task}},
        state={POLICY: snapshot.to_tensor(snapshot.flatten(best, "fp32"))},
    )
    CheckpointStore(tmp_path / "alone", keep=1).save(alone).rename(run.checkpoints / BEST)
    named = [load_policy(run.checkpoints / BEST)]
    if task:  # the run was resumed with another
        with pytest.raises(ConfigError, match=r"of another environment than the run's: found env.kwargs was {'length': 3}, is"):
            load_policy(run.path, checkpoint="best")
    else:
        named.append(load_policy(run.path, checkpoint="best"))
    for policy in named:
        assert (policy.version, policy.env_steps) == (3, 30)
        assert snapshot.digest(policy.module) == snapshot.digest(best)
    assert load_policy(run.path).version == 7


def test_the_network_is_that_of_the_weights_whatever_a_resume_has_changed(make_run):
    """An older version was played with the activation that the run has since."""
    run, _ = make_run(SMALL, "model.activation=tanh")
    before = load_policy(run.path)
    saved = replace(read(run.checkpoints / "checkpoint-000000000007"), counters={STATE_SETTINGS: before.settings.state_settings})
    CheckpointStore(run.checkpoints, keep=3).save(saved)
    run.config.write_text(run.config.read_text().replace("activation: tanh", "activation: relu"))
    policy, batch = load_policy(run.path, overrides=["env.num_envs=2"]), observations(before, 1000)
    assert np.array_equal(policy(batch), before(batch))
    assert (policy.settings.model, policy.settings.env.num_envs) == (before.settings.model, 2)


def test_a_network_of_settings_that_this_version_does_not_have_is_one_line(make_run):
    run, _ = make_run(SMALL)
    saved = read(run.checkpoints / "checkpoint-000000000007")
    CheckpointStore(run.checkpoints, keep=3).save(replace(saved, counters={STATE_SETTINGS: {"model": {"activation": "sine"}}}))
    assert re.search("^model.activation: found 'sine' .*checkpoint-000000000007", refusal(run.path))


def test_files_of_the_replay_memory_are_not_needed(make_run):
    run, _ = make_run(SMALL)
    saved = read(run.checkpoints / "checkpoint-000000000007")
    CheckpointStore(run.checkpoints, keep=3).save(
        replace(saved, version=8, segments=[Segment(key="k", parts=[memoryview(b"frames")])])
    )
    shutil.rmtree(run.checkpoints / SEGMENTS)
    assert load_policy(run.path).version == 8


def test_the_newest_checkpoint_of_a_run_that_replaces_it_meanwhile_is_the_next_one(make_run, monkeypatch):
    """`checkpoint.keep` is 1: the run saves version 8 and removes 7 after 7 was found, and before it was read."""
    run, _ = make_run(SMALL)
    newer = replace(read(run.checkpoints / "checkpoint-000000000007"), version=8)

    def save_and_read(folder, **options):
        if not (run.checkpoints / "checkpoint-000000000008").exists():
            CheckpointStore(run.checkpoints, keep=1).save(newer)
        return read(folder, **options)

    monkeypatch.setattr("common.policies.load.read", save_and_read)
    assert load_policy(run.path).version == 8


# --- bad input ---


def refusal(path, **options):
    """The one line of an error with exit code 2."""
    with pytest.raises((ConfigError, ResourceError)) as error:
        load_policy(path, **options)
    assert error.value.exit_code == 2
    return " ".join(str(error.value).split())


def test_a_directory_without_a_run(tmp_path):
    assert "no config.yaml in" in refusal(tmp_path)
    assert "no config.yaml in" in refusal(tmp_path / "nowhere")


def test_a_run_without_a_checkpoint(make_run):
    run, _ = make_run(SMALL)
    (run.checkpoints / "checkpoint-000000000007").rename(run.checkpoints / ".partial-checkpoint-000000000007")
    assert "the run has no checkpoint" in refusal(run.path)
    shutil.rmtree(run.checkpoints)
    assert "the run has no checkpoint" in refusal(run.path)


@pytest.mark.parametrize("name", [MANIFEST, TENSORS])
def test_a_checkpoint_that_was_written_by_half(make_run, name):
    run, _ = make_run(SMALL)
    file = run.checkpoints / "checkpoint-000000000007" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert name in refusal(run.path)
    file.unlink()
    assert name in refusal(run.path)


def test_a_checkpoint_of_another_format(make_run):
    run, _ = make_run(SMALL)
    manifest = run.checkpoints / "checkpoint-000000000007" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    assert "format: found 2" in refusal(run.path)


def test_a_checkpoint_of_another_architecture(make_run):
    run, _ = make_run(SMALL)
    run.config.write_text(run.config.read_text().replace("hidden: [8]", "hidden: [9]"))
    assert "is of another architecture" in refusal(run.path)


def test_a_checkpoint_of_another_algorithm_with_the_same_network(make_run):
    run, _ = make_run(SMALL)
    text = run.config.read_text()
    other, _ = make_run(SMALL, preset="cartpole-dqn", path=run.path.parent / "dqn")
    shutil.rmtree(other.checkpoints)
    shutil.copytree(run.checkpoints, other.checkpoints)
    assert text != other.config.read_text()
    assert "is of another architecture" in refusal(other.path)


def test_a_run_of_another_version(make_run):
    run, _ = make_run(SMALL)
    run.config.write_text(run.config.read_text() + "warp:\n  speed: 9\n")
    line = refusal(run.path)
    assert "warp" in line
    assert "another version of rookery" in line


@pytest.mark.parametrize("section", ["run", "env", "target"])
def test_a_configuration_that_is_cut_is_not_filled_up_with_defaults(make_run, section):
    run, _ = make_run(SMALL)
    text = run.config.read_text()
    run.config.write_text(text[: f"\n{text}".index(f"\n{section}:")])
    assert "config.yaml of the run is cut" in refusal(run.path)


def test_settings_that_a_policy_does_not_fit(make_run):
    run, _ = make_run(SMALL)
    assert load_policy(run.path, overrides=["env.num_envs=3"]).settings.env.num_envs == 3
    assert "found algorithm.gamma=1, wanted env.key=value" in refusal(run.path, overrides=["algorithm.gamma=1"])
    assert "the environment does not fit the policy: found other settings of ['id']" in refusal(
        run.path, overrides="env.id=Pendulum-v1"
    )
    assert "env.num_env" in refusal(run.path, overrides=["env.num_env=3"])


def test_settings_of_learners_are_refused_where_they_are_given_and_not_where_the_run_has_them(make_run):
    """Returns are of raw rewards and of whole games, whatever these settings are."""
    game = "env.height=36", "env.width=36", "env.crop=[0,0]", "model.conv=[[4,8,4]]", SMALL
    own = "env.terminate_on_life_loss=true", "env.normalize_reward=true", "algorithm.clip_reward=false"
    run, _ = make_run(*game, *own, preset="breakout")
    load_policy(run.path, overrides=["env.num_envs=2"]).make_env().close()
    for key in ("terminate_on_life_loss", "normalize_reward"):
        assert f"settings without effect on ALE/Breakout-v5: found env.{key}, wanted none" in refusal(
            run.path, overrides=[f"env.{key}=false"]
        )
        with pytest.raises(ConfigError, match=f"found env.{key}, wanted none"):
            load_policy(run.path).make_env(**{key: False})
