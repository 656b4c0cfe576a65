"""Policy server and env workers as processes: kills, the ledger, and an env worker without the packages that its image lacks."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_ports

pytestmark = pytest.mark.system

DOCKERFILE = (Path(__file__).parents[2] / "docker" / "Dockerfile").read_text(encoding="utf-8")
LEFT_OUT = re.search(r"requirements\.py ([^>\n]+) > env-worker\.txt", DOCKERFILE)[1].split()
MODULES = [{"pygame-ce": "pygame"}.get(name, name) for name in LEFT_OUT]
WITHOUT = f"import sys; sys.modules.update(dict.fromkeys({MODULES})); "  # an import of any of them raises ImportError


def test_an_env_worker_and_the_health_check_need_no_package_that_its_image_leaves_out():
    assert "torch" in MODULES
    code = "import services.env_worker, services.cli.app as app; sys.exit(app.main(['health', 'metrics.port=9']))"
    done = subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("no answer at 127.0.0.1:9/healthz")


def test_a_policy_server_without_a_learner_ends_with_one_line(colony):
    server = colony.start(
        "services.policy_server", "--learner", colony.endpoint, "--workers", "2", "policy_server.learner_seconds=1"
    )
    assert server.ended() == 2
    line = server.output.strip().splitlines()[-1]
    found = f"no learner answers: found none at {colony.endpoint} within 1 s; start the learner first, or set actor.learner"
    assert line == f"rookery policy-server: error: {found}"


def test_an_env_worker_that_is_killed_costs_its_unfinished_rows_and_the_ledger_balances(colony, wait, balances):
    """The env workers run without torch. One is killed and replaced; the run goes on, and ends for all of them."""
    (port, metrics_port) = free_ports(2)
    learner = colony.learner("evaluator.enabled=false", "actor.count=1", "learner.max_policy_lag=1000")
    address = f"tcp://127.0.0.1:{port}"
    words = ["--learner", colony.endpoint, "--bind", address, "--workers", "2", "--allow-code", "paced", "--name", "server"]
    own = f"metrics.port={metrics_port}", "policy_server.learner_seconds=null", "policy_server.insecure=true"
    server = colony._service(["services.policy_server", *words, *own], metrics_port)

    def env_worker(name):
        (own_port,) = free_ports(1)
        (colony.folder / "bare.py").write_text(
            f"{WITHOUT}import runpy; runpy.run_module('services.env_worker', run_name='__main__', alter_sys=True)"
        )
        own = ["--policy-server", address, "--name", name, "--allow-code", "paced", f"metrics.port={own_port}"]
        return colony._service(["bare", *own], own_port)

    workers = [env_worker(f"w{number}") for number in range(2)]

    def missing_rows():
        return server.http.metric("rookery_policy_server_missing_rows_total")

    wait(lambda: learner.http.status().get("env_steps", 0) > 200, "the learner trains")
    wait(lambda: server.http.metric("rookery_policy_server_env_workers") == 2, "both env workers are there")
    for worker in [server, *workers]:
        wait(lambda worker=worker: worker.http.get("/readyz")[0] == 200, "all are ready")
    before, steps = missing_rows(), learner.http.status()["env_steps"]
    workers[0].signal(signal.SIGKILL)
    wait(lambda: missing_rows() >= before + 4, "the rows of the killed env worker are missing")
    wait(lambda: learner.http.status()["env_steps"] > steps + 200, "the rows of the other one go on")
    workers[0] = env_worker("w0")
    wait(lambda: server.http.metric("rookery_policy_server_env_workers") == 2, "its successor has the slot")
    filled = missing_rows()
    played = workers[0].http.metric
    wait(lambda: played("rookery_env_worker_env_steps_total") > 100, "the successor steps")
    assert server.http.metric("rookery_policy_server_env_workers_lost_total") >= 1  # a busy machine may cost another
    assert missing_rows() >= filled
    learner.signal(signal.SIGTERM)
    assert [service.ended() for service in (learner, server)] == [0, 0]
    assert "any process that reaches this port may be an env worker" in server.output
    for worker in workers:
        worker.signal(signal.SIGTERM)  # one that was not scheduled during the drain has missed it, and greets
    assert [worker.ended() for worker in workers] == [0, 0]
    ledger = colony.summary()["ledger"]
    balances(ledger)
    assert ledger["produced"] > 400
    assert (ledger["queued"], ledger["in_flight"]) == (0, 0)
    assert {reason for reason, steps in ledger["dropped"].items() if steps} <= {"unfinished", "run_ended", "stale"}
