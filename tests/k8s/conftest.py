"""A cluster of local processes, and the run that its pods have."""

from __future__ import annotations

import os

import pytest

from tests.k8s.manifests import WORKLOADS, of, on_top, render
from tests.k8s.runner import Cluster
from tests.system.conftest import PACED

# Small enough that a run is under way within a second, and never over. Its steps take a moment, as those of a simulator do.
RUN = """
env: {entry_point: "paced:make", num_envs: 8}
model: {hidden: [16], activation: tanh}
algorithm: {name: ppo, epochs: 2, minibatch: 64}
rollout: {length: 16}
learner: {batch: 1, credits: 2}
evaluator: {every_seconds: 1.0, episodes: 4}
checkpoint: {every_seconds: 0.5}
target: {env_steps: 100_000_000}
"""


def rendered(folder, run=RUN, name="run.yaml", overlay="local", components=()):
    """Return an overlay with another run, written as docs/kubernetes.md describes."""
    folder.mkdir()
    (folder / name).write_text(run)
    generator = {"name": "run", "behavior": "replace", "files": [name]}
    manifests = render(on_top(folder, overlay, components=components, configMapGenerator=[generator]))
    for workload in of(manifests, *WORKLOADS):  # as docs/kubernetes.md describes for an environment of one's own
        role, (container,) = workload["metadata"]["name"], workload["spec"]["template"]["spec"]["containers"]
        if role != "learner":
            container["env"].append({"name": f"ROOKERY_{role.upper()}__ALLOW_CODE", "value": "[paced]"})
    return manifests


@pytest.fixture(autouse=True)
def _environment(tmp_path_factory, monkeypatch):
    """The environment of `RUN`, which an image of its own would contain."""
    folder = tmp_path_factory.mktemp("image")
    (folder / "paced.py").write_text(PACED)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@pytest.fixture
def cluster(tmp_path):
    """A cluster without pods."""
    built = Cluster(rendered(tmp_path / "mine"), tmp_path)
    yield built
    built.close()


def all_ready(*pods):
    """Return whether every pod is ready."""
    return all(pod.status.ready for pod in pods)


def restarts(*pods):
    """Return the restart count of each pod."""
    return [pod.status.restarts for pod in pods]
