"""A cluster of local processes, and the run that its pods have."""

from __future__ import annotations

import pytest

from tests.k8s.manifests import on_top, render
from tests.k8s.runner import Cluster

# Small enough that a run is under way within a second, and never over.
RUN = """
env: {id: CartPole-v1, num_envs: 8}
model: {hidden: [16], activation: tanh}
algorithm: {name: ppo, epochs: 2, minibatch: 64}
rollout: {length: 16}
learner: {batch: 1, credits: 2}
evaluator: {every_seconds: 1.0, episodes: 4}
checkpoint: {every_seconds: 0.5}
target: {env_steps: 100_000_000}
"""


def rendered(folder, run=RUN, name="run.yaml", overlay="local", components=()):
    """An overlay with another run, as the page tells a user to write it."""
    folder.mkdir()
    (folder / name).write_text(run)
    generator = {"name": "run", "behavior": "replace", "files": [name]}
    return render(on_top(folder, overlay, components=components, configMapGenerator=[generator]))


@pytest.fixture
def cluster(tmp_path):
    """A cluster without pods."""
    built = Cluster(rendered(tmp_path / "mine"), tmp_path)
    yield built
    built.close()


def all_ready(*pods):
    """Whether every pod is ready."""
    return all(pod.status.ready for pod in pods)


def restarts(*pods):
    """How often each was started anew."""
    return [pod.status.restarts for pod in pods]
