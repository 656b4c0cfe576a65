"""The rendered manifests, run: who is not let in, and what cannot start says so in one line."""

from __future__ import annotations

from functools import partial

import pytest

from common.transport.curve import make
from tests.k8s.conftest import all_ready, rendered, restarts
from tests.k8s.runner import Cluster
from tests.system.conftest import until

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


@pytest.fixture
def guarded(tmp_path):
    """A cluster with the component curve-auth, and the Secrets that the page tells to make."""
    make(tmp_path / "keys", ["peer"])
    built = Cluster(rendered(tmp_path / "mine", components=["curve-auth"]), tmp_path)
    for role in ("learner", "peer"):
        built.secrets[f"{role}-keys"] = {path.name: path.read_bytes() for path in (tmp_path / "keys" / role).iterdir()}
    yield built
    built.close()


@pytest.fixture
def elsewhere(tmp_path):
    """A cluster of pods without keys."""
    built = Cluster(rendered(tmp_path / "other"), tmp_path / "elsewhere")
    yield built
    built.close()


def test_with_keys_flow_is_as_without_and_a_pod_without_them_stays_outside(guarded, elsewhere):
    """The component alone is enough: pods find each other; a pod of the same cluster that was given no keys does not get in."""
    learner, actor, evaluator = guarded.start("learner"), guarded.start("actor"), guarded.start("evaluator")
    until(lambda: all_ready(learner, actor, evaluator), "all are ready")
    until(lambda: learner.http.status()["env_steps"] > 1000, "it trains")
    assert '"event": "insecure"' not in learner.logs
    elsewhere._stable["learner"] = learner.address
    stranger = elsewhere.start("actor")
    failed = partial(learner.http.metric, "rookery_learner_handshakes_failed_total")  # who hangs up first is chance
    until(lambda: failed(reason="mechanism") + failed(reason="broken") >= 2, "the learner has sent it away")
    until(lambda: '"event": "handshake_failed"' in stranger.logs, "it says that it is not let in")
    assert "(--keys)" in stranger.logs
    assert learner.http.status()["peers"] == {"actor": 1, "evaluator": 1}
    assert not stranger.status.ready
    assert restarts(learner, actor, evaluator, stranger) == [0, 0, 0, 0]


@pytest.mark.parametrize("role", ["learner", "actor"])
def test_a_secret_without_the_key_is_one_line_and_exit_code_2(guarded, role):
    """Made of the wrong folder: `kubectl get pod` shows that something is wrong, `kubectl logs` what."""
    guarded.secrets["learner-keys"], guarded.secrets["peer-keys"] = guarded.secrets["peer-keys"], guarded.secrets["learner-keys"]
    pod = guarded.start(role)
    until(lambda: pod.status.reason == "CrashLoopBackOff", "the pod shows that something is wrong")
    assert pod.status.exit_code == 2
    until(lambda: pod.status.restarts, "it is tried again")
    (line,) = {line for line in pod.logs.splitlines() if line}
    assert line.startswith(f"rookery {role}: error: key cannot be read: found No such file or directory at ")
    assert line.endswith("`rookery keys DIRECTORY` makes folders of keys")


def test_a_secret_that_is_not_there_holds_the_pod_back(guarded):
    """Nobody starts without keys by mistake."""
    del guarded.secrets["peer-keys"]
    actor = guarded.start("actor")
    until(lambda: actor.status.reason == "ContainerCreating", "the pod waits for its secret")
    assert actor.status.message == 'secret "peer-keys" not found'


# -- bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoilt", "reason", "says"),
    [
        (lambda folder: rendered(folder, name="runs.yaml"), "CrashLoopBackOff", "run.yaml"),
        (lambda folder: rendered(folder, run="learner: {bacth: 1}"), "CrashLoopBackOff", "did you mean batch?"),
        (lambda folder: rendered(folder, overlay="gpu"), "CrashLoopBackOff", "a device that CUDA sees"),
        (lambda folder: [m for m in rendered(folder) if m["kind"] != "ConfigMap"], "ContainerCreating", "not found"),
    ],
    ids=["key", "setting", "gpu", "config-map"],
)
def test_a_learner_that_cannot_start_says_so_in_one_line(tmp_path, spoilt, reason, says, monkeypatch):
    """What `kubectl get pod` and `kubectl logs` show must be enough to put it right."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # no GPU, whatever this machine has
    cluster = Cluster(spoilt(tmp_path / "mine"), tmp_path)
    try:
        learner = cluster.start("learner")
        until(lambda: learner.status.reason == reason, "the pod shows that something is wrong")
        if reason == "CrashLoopBackOff":
            assert learner.status.exit_code == 2
            until(lambda: learner.status.restarts, "it is tried again")
        lines = {line for line in (learner.logs or learner.status.message).splitlines() if line}
        assert len(lines) == 1, lines
        assert says in lines.pop()
        assert not learner.status.ready
    finally:
        cluster.close()


def test_a_volume_that_cannot_be_written_is_named(cluster):
    """A claim of another user's, or a volume that was mounted read-only after an error of its disk."""
    learner = cluster.pod("learner")
    (volume,) = learner.volumes
    volume.mkdir(parents=True)
    (volume / "run").write_text("no folder can be made where a file is")
    learner.start()
    until(lambda: learner.status.reason == "CrashLoopBackOff", "the pod shows that something is wrong")
    assert learner.status.exit_code == 2
    (line,) = [line for line in learner.logs.splitlines() if "error:" in line][:1]
    assert "run directory" in line
    assert str(volume / "run") in line
