"""The logic of tests/cluster, with a stand-in for kubectl; the manifests are rendered by kubectl itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster import installation
from tests.cluster.installation import Installation, Kubectl, Pod, unexplained
from tests.k8s.manifests import WORKLOADS, kubectl, named, of, render

pytestmark = pytest.mark.system

READY = Pod("u1", "learner-0", "learner", "true", "0", "", "", "", "2026-01-01T00:00:00Z", "")
GONE = READY._replace(ready="false", exit_code="143", started_at="", deleted_at="2026-01-01T00:00:09Z")
NEXT = READY._replace(uid="u2", restarts="1", last_exit_code="137")
LEDGER = {"produced": 10, "trained": 6, "queued": 1, "in_flight": 1, "dropped": {"unfinished": 2}}


def lines(*pods):
    """Return pods as kubectl prints them."""
    return "".join(",".join(pod) + "\n" for pod in pods)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return a function: an `Installation` whose kubectl gives these answers."""
    monkeypatch.setattr(installation, "POLL", 0.02)
    program = tmp_path / "kubectl"
    source = Path(__file__).with_name("fake_kubectl.py").read_text()
    program.write_text(f"#!{sys.executable} -IS\n{source}")
    program.chmod(0o755)

    def make(*answers, components=()):
        defaults = [
            [["get", "pods"], "", "", 0],
            [["apply"], "", "", 0],
            [["delete"], "", "", 0],
            [["get", "pods,events"], "", "", 0],
        ]
        (tmp_path / "answers.json").write_text(json.dumps([*answers, *defaults]))
        return Installation(Kubectl(str(program), "ns"), tmp_path / "overlays", components=components)

    return make


def test_a_cluster_that_does_not_answer_is_named_by_the_last_line_of_the_error(fake):
    error = "E1 memcache\nThe connection to the server localhost:8080 was refused\n"
    assert fake([["version"], "", error, 1]).kubectl.unreachable() == "The connection to the server localhost:8080 was refused"
    assert fake([["version"], "Server Version: v1.36.2\n", "", 0]).kubectl.unreachable() == ""


def test_the_exit_code_of_a_deleted_pod_is_known_and_is_not_its_successors(fake):
    installed = fake([["--watch"], lines(READY, GONE, NEXT), "", 0])
    installed.apply()
    try:
        assert installed.exit_code(READY) == "143"
    finally:
        installed.delete()


def test_pods_that_are_being_deleted_are_left_out(fake):
    assert fake([["get", "pods"], lines(NEXT, GONE), "", 0]).pods("learner") == [NEXT]


def test_an_image_that_cannot_be_pulled_fails_at_once(fake):
    installed = fake([["get", "pods"], lines(READY._replace(ready="false", waiting="ErrImagePull")), "", 0])
    with pytest.raises(AssertionError, match="learner-0 cannot be pulled: ErrImagePull; load the images"):
        installed.wait(lambda: False, "nothing")


def test_what_never_happens_is_named(fake, monkeypatch):
    monkeypatch.setattr(installation, "DEADLINE", 0.0)
    with pytest.raises(AssertionError, match="never happened: the learner trains"):
        fake().wait(lambda: False, "the learner trains")


def test_flow_requires_a_ledger_that_balances(fake):
    def status(**changed):
        return json.dumps({"workers": {"actor": 1, "evaluator": 1}, "env_steps": 5, "ledger": LEDGER | changed})

    pods = [["get", "pods"], lines(READY, READY._replace(component="actor", name="a")), "", 0]
    installed = fake(pods, [["exec"], status(), "", 0])
    steps = iter(range(100))
    read = installed.status
    installed.status = lambda rank=0: read(rank) | {"env_steps": next(steps)}
    assert installed.flows(actors=1)["ledger"] == LEDGER
    fake(pods, [["exec"], status(trained=5), "", 0])
    with pytest.raises(AssertionError):
        installed.flows(actors=1)


def test_flow_adds_up_the_workers_of_ranks_and_checks_the_ledger_of_each(fake):
    """Of two ranks one has both actors, the other the evaluator."""

    def status(actors, evaluators, **changed):
        workers = {"actor": actors, "evaluator": evaluators}
        return json.dumps({"workers": workers, "env_steps": 5, "ledger": LEDGER | changed})

    actor = READY._replace(component="actor")
    names = [READY, READY._replace(name="learner-1"), actor._replace(name="a"), actor._replace(name="b")]
    pods, first = [["get", "pods"], lines(*names), "", 0], [["exec", "learner-0"], status(0, 1), "", 0]

    def installed(**changed):
        made = fake(pods, first, [["exec", "learner-1"], status(2, 0, **changed), "", 0], components=["ranks"])
        steps, read = iter(range(1000)), made.status
        made.status = lambda rank=0: read(rank) | {"env_steps": next(steps)}
        return made

    assert installed().flows(actors=2)["workers"] == {"actor": 0, "evaluator": 1}
    with pytest.raises(AssertionError, match="trained"):
        installed(trained=5).flows(actors=2)


def test_a_learner_that_does_not_answer_has_no_status(fake):
    assert fake([["exec"], "", "error: container not found", 1]).status() == {}


def test_env_steps_that_no_column_explains_are_counted():
    assert unexplained(LEDGER) == 0
    assert unexplained(LEDGER | {"produced": 13}) == 3


@pytest.mark.parametrize("components", [["pdb"], ["curve-auth"], ["ranks"], ["policy-server"]])
def test_the_overlay_is_rendered_into_the_namespace_with_the_images_of_the_registry(tmp_path, components):
    own = Installation(Kubectl(kubectl(), "rookery-test-1"), tmp_path, registry="registry.example.com/rl/", components=components)
    objects = render(Path(own.write()))
    names = {
        manifest["metadata"]["name"] if manifest["kind"] == "Namespace" else manifest["metadata"]["namespace"]
        for manifest in objects
    }
    assert names == {"rookery-test-1"}
    assert named(objects, "StatefulSet", "learner")["spec"]["replicas"] == own.ranks
    for manifest in of(objects, *WORKLOADS):
        for container in manifest["spec"]["template"]["spec"]["containers"]:
            assert container["image"].startswith("registry.example.com/rl/rookery-")
    assert yaml.safe_load((tmp_path / "local" / "run.yaml").read_text())["env"]["id"] == "CartPole-v1"
