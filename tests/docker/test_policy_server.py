"""A policy server and env workers in containers, and what they are for: small images, and little memory for an environment."""

from __future__ import annotations

import re

import pytest

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

MOST_MEGABYTES = 150  # of an env worker on Pong
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SERVICES = ("learner", "policy-server", "env-worker")


def test_the_image_of_an_env_worker_has_at_most_a_third_of_the_bytes_of_an_actors(engine, images):
    def size(image):
        return int(engine("docker", "image", "inspect", "--format", "{{.Size}}", f"rookery-{image}:{images}").stdout)

    assert 3 * size("env-worker") <= size("actor")


def test_env_workers_play_for_a_policy_server_in_little_memory(colony, wait):
    colony.compose("--profile", "policy-server", "up", "--detach", *SERVICES)
    wait(lambda: colony.status().get("workers", {}).get("actor") == 1, "the policy server is connected")
    wait(lambda: colony.status().get("learner_updates", 0) >= 3, "the learner trains on what env workers played")
    workers = colony.containers("env-worker")
    assert len(workers) == 2
    for worker in workers:
        # The memory of the container, less cached files that the kernel can give up.
        used = colony.shell("docker", "stats", "--no-stream", "--format", "{{.MemUsage}}", worker["Id"]).stdout
        number, unit = re.match(r"([\d.]+)([KMG]iB)", used).groups()
        assert float(number) * UNITS[unit] <= MOST_MEGABYTES * 1e6
        assert worker["RestartCount"] == 0
