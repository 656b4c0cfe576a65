"""A run in containers, from `make images` to a learner that is killed: what docs/containers.md promises, on a real engine.

Grafana is left out: its image cannot be had without a registry. Its files are read by tests/docker/test_files.py.
Seconds are printed, and nothing is held to them: they are the machine's as much as ours.
"""

from __future__ import annotations

import time

import pytest

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

SERVICES = ("learner", "actor", "evaluator", "prometheus")
TRAINED = "rookery_learner_env_frames_trained_total"
PATIENCE = "120"  # seconds before `docker stop` kills, on a machine that is busy


@pytest.fixture(scope="module")
def running(colony, wait):
    """The run with four actors, once its frames flow; and the seconds that took."""
    began = time.monotonic()
    colony.compose("up", "--detach", "--scale", "actor=4", *SERVICES)
    targets = 'sum(up{job=~"learner|actor|evaluator"})'
    wait(lambda: colony.query(targets) == [6.0], "all targets are up in Prometheus", found=colony.state)
    found = time.monotonic() - began
    wait(lambda: sum(colony.query(f"rate({TRAINED}[15s])")) > 0, "frames flow")
    flowing = time.monotonic() - began
    print(f"all targets up after {found:.0f} s, frames per second above 0 after {flowing:.0f} s")  # noqa: T201
    return colony


def test_all_services_are_found_and_the_learner_trains(running, wait):
    wait(lambda: running.query("count(rookery_actor_env_steps_total > 0)") == [4.0], "all actors play")
    wait(lambda: running.query("rookery_learner_workers_connected{role='actor'}") == [4.0], "all actors are connected")
    assert running.query("count by (job) (up == 1)") == [1.0, 4.0, 1.0] or running.query("count(up == 1)") == [6.0]
    wait(lambda: running.status().get("learner_updates", 0) >= 3, "the learner updates")
    assert running.status()["preset"] == "pong"


@pytest.mark.parametrize("service", ["learner", "actor", "evaluator"])
def test_a_container_can_do_no_more_than_it_must(running, service):
    for container in running.containers(service):
        host = container["HostConfig"]
        assert (container["Config"]["User"], host["ReadonlyRootfs"], host["CapDrop"]) == ("10001:10001", True, ["ALL"])
        assert "no-new-privileges:true" in host["SecurityOpt"]
        assert host["Memory"] > 0
    inside = ("exec", "-T", service, "sh", "-c")
    assert running.compose(*inside, "id -u; id -g").split() == ["10001", "10001"]
    assert (
        running.compose(*inside, "touch /opt/rookery/x 2>&1 || touch /opt/project/x 2>&1 || echo refused")
        .strip()
        .endswith("refused")
    )
    assert running.compose(*inside, "touch /tmp/x && echo written").strip() == "written"
    assert running.compose("exec", "-T", service, "rookery", "health", "--ready").strip() == "ok"


def test_a_learner_that_is_killed_goes_on_and_no_actor_is_restarted(running, wait):
    learner = running.containers("learner")[0]["Id"]
    actors = {container["Id"]: container["State"]["StartedAt"] for container in running.containers("actor")}
    listed = "ls /var/lib/rookery/run/checkpoints"
    wait(lambda: "checkpoint-" in running.compose("exec", "-T", "learner", "sh", "-c", listed, check=False), "a checkpoint")
    running.shell("docker", "kill", "--signal", "KILL", learner)
    assert running.containers("learner")[0]["State"]["ExitCode"] == 137
    began = time.monotonic()
    running.shell("docker", "start", learner)
    wait(lambda: running.status().get("phase") == "training", "the learner is back")
    resumed = running.status()
    wait(lambda: running.status().get("learner_updates", 0) > resumed["learner_updates"], "flow is back")
    seconds = time.monotonic() - began
    print(f"flow is back {seconds:.0f} s after the start of the next learner")  # noqa: T201
    assert resumed["learner_updates"] > 0
    assert running.status()["version"] > 0
    assert '"resumed"' in running.compose("logs", "learner") or "resumed version=" in running.compose("logs", "learner")
    after = {container["Id"]: container["State"]["StartedAt"] for container in running.containers("actor")}
    assert after == actors
    assert all(container["RestartCount"] == 0 for container in running.containers("actor"))


def test_a_learner_that_is_stopped_saves_and_an_actor_leaves(running, wait):
    learner = running.containers("learner")[0]["Id"]
    running.shell("docker", "stop", "--time", PATIENCE, learner)
    assert running.containers("learner")[0]["State"]["ExitCode"] == 0
    assert all(container["State"]["Running"] for container in running.containers("actor"))
    running.shell("docker", "start", learner)
    wait(lambda: running.status().get("workers", {}).get("actor") == 4, "the learner is back and has its actors again")
    one = running.containers("actor")[0]["Id"]
    running.shell("docker", "stop", "--time", PATIENCE, one)
    assert running.shell("docker", "inspect", "--format", "{{.State.ExitCode}}", one).stdout.strip() == "0"
