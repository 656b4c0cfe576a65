"""The place of a process among the ranks of a learner, and ranks that do not come."""

from __future__ import annotations

import socket

import pytest

from common.config.endpoint import Endpoint
from common.errors import ConfigError, LostRankError
from common.runtime.ranks import Place, process_group

pytestmark = pytest.mark.service

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_the_variables_of_torchrun_say_which_rank_a_process_is():
    place = Place.of(2, TORCHRUN)
    assert place == Place(rank=1, local_rank=1, count=2, master=Endpoint("127.0.0.1", 29400))


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
        Place.of(2, TORCHRUN | changed)


def test_rank_0_is_refused_where_another_rank_never_comes(free_port):
    place = Place(rank=0, local_rank=0, count=2, master=Endpoint("127.0.0.1", free_port))
    with pytest.raises(ConfigError, match=r"not all ranks have come: found 1 of 2 .* start the others"):
        process_group(place, waiting=lambda: None, timeout=0.3).__enter__()


def test_another_rank_is_refused_where_rank_0_never_comes(free_port):
    place = Place(rank=1, local_rank=0, count=2, master=Endpoint("127.0.0.1", free_port))
    with pytest.raises(ConfigError, match=r"rank 1 does not reach rank 0 at tcp://127.0.0.1"):
        process_group(place, waiting=lambda: None, timeout=0.3).__enter__()


def test_a_wait_for_ranks_ends_where_a_stop_is_requested(free_port):
    place = Place(rank=0, local_rank=0, count=2, master=Endpoint("127.0.0.1", free_port))

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process_group(place, waiting=stop).__enter__()


def test_a_lost_rank_is_restarted_and_not_reported_as_a_setting():
    assert LostRankError("x").exit_code == 1
