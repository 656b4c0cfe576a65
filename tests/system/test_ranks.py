"""`rookery train` with two learner processes: one is killed, all continue, and their ledgers add up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import psutil
import pytest

from common.protocol.ledger import sum_counts
from tests.ports import free_ports
from tests.system.conftest import Http, gone

pytestmark = [pytest.mark.system, pytest.mark.timeout(2400)]

SECONDS = 600.0  # for anything awaited: each start imports torch in four processes


def test_a_killed_rank_comes_back_and_the_ledgers_of_both_add_up(colony, wait, balances):
    run = colony.train("learner.ranks=2", "evaluator.enabled=false")
    others = colony.run_dir / "rank-1" / "checkpoints"
    wait(lambda: colony.checkpoints() and list(others.glob("checkpoint-*")), "both ranks write checkpoints", SECONDS)
    first, second = sorted(learners(run), key=lambda child: child.environ()["RANK"])
    actors = {name: child.pid for name, child in run.children().items() if name != "learner"}
    saved = int(colony.checkpoints()[-1].rpartition("-")[2])
    second.kill()
    wait(lambda: gone(first), "the other rank ends too", SECONDS)
    # An update does not wait for a rank that has no workers yet: each rank must have trained on experience of its own.
    ranks = [run.http, Http(int(run.http.url.rpartition(":")[2]) + 1)]
    wait(lambda: run.http.status().get("learner_updates", 0) > saved, "both train on from a checkpoint", SECONDS)
    for rank in ranks:
        wait(
            lambda rank=rank: rank.status().get("ledger", {}).get("trained", 0) > 0,
            "the rank trains on its own experience",
            SECONDS,
        )
    assert {name: child.pid for name, child in run.children().items() if name != "learner"} == actors
    run.signal(signal.SIGINT)
    assert run.ended(SECONDS) == 0, run.output
    summary = colony.summary()
    balances(summary["ledger"])
    assert len(summary["ledgers"]) == 2
    assert all(ledger["trained"] > 0 for ledger in summary["ledgers"])
    assert summary["ledger"] == sum_counts(summary["ledgers"])
    assert summary["ledger"]["trained"] == summary["env_steps"]
    assert summary["ledger"]["in_flight"] == summary["ledger"]["queued"] == 0


def learners(run):
    """The processes of all ranks that `rookery train` started."""
    return [child for child in psutil.Process(run.process.pid).children(recursive=True) if "services.learner" in child.cmdline()]


def test_a_process_that_does_not_know_its_rank_ends_with_one_line(colony):
    one = colony.learner("learner.ranks=2")
    assert one.ended(SECONDS) == 2
    assert "learner.ranks is 2, and this process does not know which one it is" in one.output


# The limit of an operation of training is that of the connections too, which on a busy machine take their time: it is set later.
OF_ONE_RANK = """
import os, sys, time, torch
from datetime import timedelta
from torch.distributed.distributed_c10d import _set_pg_timeout
from common.errors import LostRankError
from common.runtime.process_group import TorchrunEnvironment, process_group

own = TorchrunEnvironment.of(2, os.environ)
with process_group(own, waiting=lambda: None, join_seconds=None, timeout=600.0, slow_timeout=600.0) as group:
    _set_pg_timeout(timedelta(seconds=0.5))
    if own.rank == 1:
        time.sleep(1.0)
    print(group.gather_json({"rank": own.rank}), group.broadcast_bytes(b"of 0" if own.rank == 0 else b"").decode(), flush=True)
    if own.rank == 1:
        sys.stdin.readline()
    try:
        group.gather(torch.zeros(1))
    except LostRankError:
        print("lost", flush=True)
"""


def test_a_rank_may_take_long_beside_a_checkpoint_and_not_in_training():
    (port,) = free_ports(1)
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            environment = {**os.environ, **variables, "RANK": str(rank)}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
            ranks.append(stack.enter_context(subprocess.Popen([sys.executable, "-c", OF_ONE_RANK], **pipes)))
            stack.callback(ranks[-1].kill)
        assert [rank.stdout.readline() for rank in ranks] == ["[{'rank': 0}, {'rank': 1}] of 0\n"] * 2
        assert ranks[0].stdout.readline() == "lost\n"  # the second waits for a line on its input
