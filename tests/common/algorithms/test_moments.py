"""Running statistics of observations: merged exactly, the same for every network, changed between versions alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.algorithms.api import ObservesExperience, RunProgress, WorkerContext
from common.algorithms.moments import Moments
from common.algorithms.registry import ALGORITHMS, build_algorithm, build_policy
from common.envs.spec import EnvSettings
from common.envs.trial import example_frames
from common.errors import ConfigError
from common.models import snapshot
from common.models.layers import Network
from common.models.normalisation import VectorNormalisation
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

MODEL = ModelSettings(hidden=(16,), normalize_observation=True, shared_trunk=False)
CONTEXT = WorkerContext(index=0, workers=1, num_envs=2)


def rows(seed, count=100):
    """Observations of three components, of which one has a mean far from 0."""
    return np.random.default_rng(seed).normal([0.0, 1e4, -3.0], [1.0, 0.1, 20.0], (count, 3)).astype(np.float32)


def test_merged_moments_are_those_of_all_observations_in_any_order():
    """As of three learners, each with its own share, one of them a single observation."""
    parts = [rows(0), rows(1, count=1), rows(2, count=900)]
    whole, first, second, third = (Moments.of(torch.from_numpy(part)) for part in (np.concatenate(parts), *parts))
    for merged in (first.merge(second).merge(third), third.merge(first.merge(second))):
        assert merged.count == 1_001
        torch.testing.assert_close(merged.mean, whole.mean, rtol=1e-13, atol=0.0)
        torch.testing.assert_close(merged.m2, whole.m2, rtol=1e-9, atol=0.0)
    np.testing.assert_allclose(whole.std, np.concatenate(parts).astype(np.float64).std(0), rtol=1e-9)


@pytest.mark.parametrize("name", ["ppo", "a3c", "impala"])
def test_experience_of_a_version_is_evaluated_as_it_was_acted_while_the_statistics_move(vector_env, make_sample, name):
    """Probability ratio 1 within 1e-5 in float32, version after version, though each sees other observations."""
    settings = ALGORITHMS[name].settings(learning_rate=1e-2)
    learner = build_algorithm(settings, model=MODEL, env=vector_env, seed=0)
    learner.calibrate(torch.rand(100, 2))
    policy = build_policy(settings, model=MODEL, env=vector_env, precision="fp32", seed=0, context=CONTEXT)
    means = []
    for version in range(4):
        policy.load(version, torch.from_numpy(snapshot.flatten(learner.model, "fp32")), env_steps=0)
        observation = np.random.default_rng(version).normal(10.0 * version, 1.0 + version, (33, 2, 2)).astype(np.float32)
        acted = [policy.act(torch.from_numpy(row)) for row in observation[:-1]]
        recorded = {key: torch.stack([step[key] for step in acted]).numpy() for key in ("action", "log_prob")}
        sample = make_sample(vector_env, length=32, version=version, obs=observation, **recorded)
        progress = RunProgress(env_steps=0, env_steps_planned=1_000, version=version)
        assert learner.update(learner.ingest([sample]), progress).metrics["first_ratio_error"] < 1e-5
        learner.observe([sample])
        means.append(learner.model.trunk.normalisation.mean.sum(0).tolist())
    seen = np.cumsum([0.5 * 100, 0.0, 64 * 10.0, 64 * 20.0, 64 * 30.0]) / np.cumsum([100, 64, 64, 64, 64])
    np.testing.assert_allclose(means, np.stack([seen[1:]] * 2, axis=1), atol=0.3)


@pytest.mark.parametrize(("name", "networks"), [("ppo", 2), ("dqn", 3), ("td3", 6), ("sac", 5)])
def test_all_networks_of_a_learner_normalise_alike(vector_env, continuous_env, make_sample, name, networks):
    """Both trunks; targets and averages; actor and critics. The replay memory holds observations as they were."""
    env = continuous_env if name in {"td3", "sac"} else vector_env
    changed = {} if name == "ppo" else {"replay_capacity": 1_000, "warmup": 0, "minibatch": 4, "samples_per_insert": 1.0}
    changed |= {"average_rate": 0.5} if name == "dqn" else {}
    learner = build_algorithm(ALGORITHMS[name].settings(**changed), model=MODEL, env=env, seed=0)
    assert isinstance(learner, ObservesExperience)
    valid = np.ones((16, 2), bool)
    valid[3, 1] = False  # a reset row: no action was taken on its observation
    sample = make_sample(env, length=16, valid=valid, seed=4)
    learner.ingest([sample])
    learner.observe([sample])
    observed = sample.arrays["obs"][:16][valid].astype(np.float64)
    found = [module for net in every_network(learner) for module in net.modules() if isinstance(module, VectorNormalisation)]
    assert len(found) == networks
    for module in found:
        np.testing.assert_allclose(module.mean.sum(0), observed.mean(0), rtol=1e-4)
        np.testing.assert_allclose(module.scale, 1 / observed.std(0), rtol=4e-3)
    if name != "ppo":
        stored = learner._replay.sample(64, np.random.default_rng(0)).observation
        assert {tuple(row) for row in stored.tolist()} <= {tuple(row) for row in sample.arrays["obs"].reshape(-1, 2).tolist()}


def every_network(learner):
    """Networks among the attributes of a learner."""
    return [value for value in vars(learner).values() if isinstance(value, Network)]


def test_gradients_carry_no_observations_so_their_learner_refuses(vector_env):
    """One line, before the run begins."""
    with pytest.raises(ConfigError, match=r"model.normalize_observation for vectors by a3c-grad: found true, wanted false.*a3c"):
        build_algorithm(ALGORITHMS["a3c-grad"].settings(), model=MODEL, env=vector_env, seed=0)


def test_every_live_component_of_humanoid_is_seen_after_1024_random_steps():
    """One divisor for all leaves 19 of 20 of its components below 0.05."""
    pytest.importorskip("mujoco")
    frames = torch.from_numpy(example_frames(EnvSettings(id="Humanoid-v5"), seed=1))
    moments = Moments.of(frames)
    live = moments.m2 > 1e-12 * moments.count
    assert (moments.std[live] / (2 * moments.std.max()) < 0.05).double().mean() > 0.9
    normalisation = VectorNormalisation(tuple(frames.shape[1:]))
    normalisation.set_moments(moments.mean, moments.std)
    deviation = normalisation(frames, torch.float32).std(0)
    assert len(frames) == 1_024
    assert live.sum() > 300
    assert ((deviation[live] > 0.3) & (deviation[live] < 3.0)).all()
    assert not deviation[~live].any()
