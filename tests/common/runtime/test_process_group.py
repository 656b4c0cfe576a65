"""The variables of one rank of a learner, and ranks that join, end while they join, or never come."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from common.config.endpoint import Endpoint
from common.errors import ConfigError, LostRankError
from common.runtime import process_group as module
from common.runtime.process_group import ProcessGroup, TorchrunEnvironment, process_group, rendezvous
from tests.ports import free_ports

pytestmark = pytest.mark.service

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29400",
}
PATIENCE = 120.0  # seconds; only a fault lets it pass
SHORT = 0.3


@pytest.fixture
def free_port():
    return free_ports(1)[0]  # one that the kernel chose may be that of another connection a moment later


@pytest.fixture
def agent():
    """A store that outlives every rank, as torchrun's agent serves it."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE))


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """On a busy machine a store that is there may take seconds to answer."""
    monkeypatch.setattr(module, "TRY_SECONDS", PATIENCE)
    monkeypatch.setattr(module, "ANSWER_SECONDS", PATIENCE)


class KilledError(BaseException):
    """The process of a rank ends here."""


def rank(number, port, *, world_size=2, agent_store=False):
    master = Endpoint("127.0.0.1", port)
    return TorchrunEnvironment(rank=number, local_rank=number, world_size=world_size, master=master, agent_store=agent_store)


def killed_while_it_joins(agent, own):
    """Let the process of a rank end after it has written its token; the store has it afterwards."""
    polls = []

    def waiting():
        polls.append(1)
        if len(polls) > 1:  # the store was there at the first
            raise KilledError

    with pytest.raises(KilledError):
        rendezvous(own, waiting=waiting, seconds=None)
    agent.wait([f"rookery/rank/{own.rank}"], timedelta(seconds=PATIENCE))  # a write does not wait for the store


def test_the_variables_of_torchrun_say_which_rank_a_process_is():
    assert TorchrunEnvironment.of(2, TORCHRUN) == rank(1, 29400)


def test_the_time_of_an_operation_of_training_counts_while_it_runs(monkeypatch):
    group, seen, now = ProcessGroup(rank(0, 29400), None), [], itertools.count(1.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    monkeypatch.setattr(torch.distributed, "all_gather", lambda *_, **__: seen.append(group.sum_seconds()))
    group.gather(torch.zeros(1))
    assert seen == [1.0]
    assert (finished := group.sum_seconds()) >= 1.0
    group.gather_votes(torch.zeros(1))
    assert seen[1] == group.sum_seconds() == finished


def test_operations_of_training_have_the_time_limit_of_training_and_others_the_longer_one(free_port, monkeypatch):
    limits = []

    def noted(operation):
        def note(*values, group=None, **how):
            backend = (group or torch.distributed.group.WORLD)._get_backend(torch.device("cpu"))
            limits.append(backend.options._timeout.total_seconds())
            return operation(*values, group=group, **how)

        return note

    for name in ("all_reduce", "all_gather", "broadcast"):
        monkeypatch.setattr(torch.distributed, name, noted(getattr(torch.distributed, name)))
    alone = rank(0, free_port, world_size=1)
    with process_group(alone, waiting=lambda: None, join_seconds=PATIENCE, timeout=500.0, slow_timeout=600.0) as group:
        group.sum(torch.zeros(1)), group.gather(torch.zeros(1)), group.gather_votes(torch.zeros(1))
        assert limits == [500.0] * 3
        assert group.gather_json({"rank": 0}) == [{"rank": 0}]
        assert group.broadcast_bytes(b"of 0") == b"of 0"
        assert limits[3:] == [600.0] * 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": ""}, "learner.ranks is 2, and this process does not know which one it is: found no RANK"),
        ({"RANK": "2"}, "variable RANK: found 2, wanted 0 to 1"),
        ({"WORLD_SIZE": "3"}, "learner.ranks and WORLD_SIZE: found 2 and 3"),
        ({"MASTER_PORT": "x"}, "variable MASTER_PORT: found x"),
    ],
)
def test_a_process_that_is_no_rank_of_this_learner_is_refused(changed, message):
    with pytest.raises(ConfigError, match=message):
        TorchrunEnvironment.of(2, TORCHRUN | changed)


def test_rank_0_is_refused_where_another_rank_never_comes(free_port):
    with pytest.raises(ConfigError, match=r"not all ranks have come: found 1 of 2 .* start the others"):
        process_group(rank(0, free_port), waiting=lambda: None, join_seconds=SHORT).__enter__()


def test_rank_0_needs_no_name_of_its_own_in_dns(free_port):
    """The name of a pod is in DNS some time after its start; rank 0 is to say that it waits, and to obey a stop, meanwhile."""
    unknown = TorchrunEnvironment(rank=0, local_rank=0, world_size=2, master=Endpoint("learner-0.learner.invalid", free_port))
    with pytest.raises(ConfigError, match=r"not all ranks have come: found 1 of 2"):
        rendezvous(unknown, waiting=lambda: None, seconds=SHORT)


def test_another_rank_is_refused_where_rank_0_never_comes(free_port):
    with pytest.raises(ConfigError, match=r"rank 1 does not reach rank 0 at tcp://127.0.0.1"):
        process_group(rank(1, free_port), waiting=lambda: None, join_seconds=SHORT).__enter__()


def test_another_program_at_the_address_of_rank_0_is_no_rank_0(monkeypatch):
    monkeypatch.setattr(module, "ANSWER_SECONDS", SHORT)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ConfigError, match="does not reach rank 0"):
        rendezvous(rank(1, silent.getsockname()[1]), waiting=lambda: None, seconds=SHORT)


def test_the_successor_of_a_rank_that_ended_while_it_joined_takes_its_place(agent):
    """Rank 1 of 3 had come, and was killed before rank 2 was there: no rank waits for the process that has ended."""
    ranks = [rank(number, agent.port, world_size=3, agent_store=True) for number in range(3)]
    killed_while_it_joins(agent, ranks[1])
    with ThreadPoolExecutor(3) as pool:
        joined = [pool.submit(rendezvous, own, waiting=lambda: None, seconds=PATIENCE) for own in ranks]
        stores = [future.result(PATIENCE) for future in joined]
    for own, store in zip(ranks, stores, strict=True):
        store.set(f"came/{own.rank}", "1")
    for store in stores:  # all are in one group
        store.wait([f"came/{number}" for number in range(3)], timedelta(seconds=PATIENCE))


def test_a_rank_that_came_and_ended_is_lost_and_no_invalid_setting(agent):
    killed_while_it_joins(agent, rank(1, agent.port, agent_store=True))
    with pytest.raises(LostRankError, match="lost while the ranks joined"):
        rendezvous(rank(0, agent.port, agent_store=True), waiting=lambda: None, seconds=SHORT)


def test_two_processes_of_one_rank_are_refused(agent):
    own, second_came = rank(1, agent.port, agent_store=True), threading.Event()

    def begin_the_second():
        if not second_came.is_set() and agent.check(["rookery/rank/1"]):
            killed_while_it_joins(agent, own)
            agent.set("rookery/rank/0", "0")
            second_came.set()

    with pytest.raises(ConfigError, match=r"rank 1 is taken: found two processes with this RANK"):
        rendezvous(own, waiting=begin_the_second, seconds=PATIENCE)


def test_a_wait_for_ranks_ends_where_a_stop_is_requested(free_port):
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process_group(rank(0, free_port), waiting=stop).__enter__()


def test_a_lost_rank_is_restarted_and_not_reported_as_a_setting():
    assert LostRankError("x").exit_code == 1
