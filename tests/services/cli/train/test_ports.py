"""Addresses of a run."""

import os
import resource
import socket

import pytest

from common.errors import ResourceError
from services.cli.train.ports import Ports
from tests.ports import ROOM

pytestmark = [pytest.mark.service, pytest.mark.usefixtures("first_port")]


@pytest.fixture
def ports():
    with Ports() as opened:
        yield opened


def test_free_ports_are_different_and_can_be_bound(ports, first_port):
    """Learner, evaluator and actors of one run each get their own."""
    found = ports.find(20)
    assert len(set(found)) == 20
    assert all(first_port <= port < first_port + ROOM for port in found)
    for port in found:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_port_in_use_is_passed_over(monkeypatch, ports, first_port):
    """A program that is no run listens on the first one tried."""
    with Ports() as ended:
        (taken,) = ended.find(1)
    with socket.socket() as other:
        other.bind(("127.0.0.1", taken))
        other.listen()
        monkeypatch.setattr("secrets.randbelow", lambda _: taken - first_port)
        assert taken not in ports.find(2)
        with Ports() as another:
            another.claim(taken)  # a port that was passed over is not claimed


def test_a_port_that_a_run_was_given_is_its_own_until_the_run_ends(monkeypatch, ports):
    """No process listens on it: the learner is being started, or started again."""
    monkeypatch.setattr("secrets.randbelow", lambda _: 7)
    with Ports() as other:
        (given,) = other.find(1)
        with pytest.raises(ResourceError, match=f"port {given} cannot be taken: found a port of another service or run"):
            ports.claim(given)
        assert given not in ports.find(2)
    ports.claim(given)


@pytest.mark.parametrize("first", [0, ROOM - 2])
def test_ports_in_a_row_have_no_gap_where_one_is_in_use_and_do_not_wrap(monkeypatch, ports, first_port, first):
    """The ranks of a learner count up from the port of rank 0."""
    monkeypatch.setattr("secrets.randbelow", lambda _: first)
    with Ports() as other:
        other.claim(first_port + 1)
        found = ports.find(3, in_a_row=True)
    assert found == list(range(found[0], found[0] + 3))
    assert found[0] > first_port + 1
    assert found[-1] < first_port + ROOM


def test_the_ports_of_a_row_that_was_given_up_are_not_claimed(monkeypatch, ports, first_port):
    with Ports() as ended:
        first = ended.find(3, in_a_row=True)[0]
    monkeypatch.setattr("secrets.randbelow", lambda _: first - first_port)
    with Ports() as other:
        other.claim(first + 1)
        ports.find(2, in_a_row=True)
        other.claim(first)


def test_at_the_limit_of_open_files_the_search_for_ports_ends_with_one_line(ports):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptor = os.open(os.devnull, os.O_RDONLY)  # the lowest one that is free
    os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor, before[1]))
    try:
        with pytest.raises(ResourceError, match="no socket for a port"):
            ports.find(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
