"""Ports for the runs that a test plans."""

from __future__ import annotations

import pytest

from services.cli.train import plan, ports
from tests.ports import ROOM, free_ports


@pytest.fixture
def first_port(monkeypatch):
    """The first of the ports that the runs of a test are given: other runs meanwhile could take that of an ended one."""
    first, *_ = free_ports(ROOM)
    monkeypatch.setattr(ports, "FIRST_PORT", first)
    monkeypatch.setattr(ports, "LAST_PORT", first + ROOM)
    monkeypatch.setattr(plan, "cores", lambda: 4)  # `--actors auto` takes ports for two actors a core
    return first
