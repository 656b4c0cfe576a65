"""Addresses of a run."""

import socket

import pytest

from services.cli.train.ports import FIRST_PORT, LAST_PORT, free_ports

pytestmark = pytest.mark.service


def test_free_ports_are_different_and_can_be_bound():
    """Learner, evaluator and actors of one run each get their own."""
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(FIRST_PORT <= port < LAST_PORT for port in ports)
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_port_in_use_is_passed_over(monkeypatch):
    """Another run on this machine listens on the first one tried."""
    (taken,) = free_ports(1)
    with socket.socket() as other:
        other.bind(("127.0.0.1", taken))
        other.listen()
        monkeypatch.setattr("secrets.randbelow", lambda _: taken - FIRST_PORT)
        assert taken not in free_ports(2)


@pytest.mark.parametrize("first", [FIRST_PORT, LAST_PORT - 2])
def test_ports_in_a_row_have_no_gap_where_one_is_in_use_and_do_not_wrap(monkeypatch, first):
    """The ranks of a learner count up from the port of rank 0."""
    monkeypatch.setattr("secrets.randbelow", lambda _: first - FIRST_PORT)
    ports = free_ports(3, without={FIRST_PORT + 1}, in_a_row=True)
    assert ports == list(range(ports[0], ports[0] + 3))
    assert ports[0] > FIRST_PORT + 1
    assert ports[-1] < LAST_PORT
