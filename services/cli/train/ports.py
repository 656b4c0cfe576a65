"""Ports of this machine for the children of a run: those on which no process listens, in the range that runs take."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Collection
from contextlib import ExitStack, suppress

from common.config.endpoint import MAX_PORT, Endpoint, parse_endpoint
from common.config.schema import Settings
from common.errors import ConfigError, ResourceError
from common.observability.http import check_port
from services.cli.train.events import actor_names
from services.cli.train.supervisor import Supervisor

# Below the range from which Linux and macOS take the ports of outgoing connections: an actor that tries to reach a learner that
# is down could otherwise get that very port, connect to itself, and prevent the learner from binding it.
FIRST_PORT, LAST_PORT = 20_000, 32_000


# --- of a run ---


def metrics_ports(settings: Settings, *, actors: int | None) -> dict[str, int]:
    """Return a port for each child: free ones, or `metrics.port` and those above it in the order in which children start."""
    count = settings.actor.count if actors is None else actors
    ranks, workers = settings.learner.ranks, settings.policy_server.workers
    children = Supervisor(actors=count, evaluator=settings.evaluator.enabled, env_workers=workers, ranks=ranks).children
    first = settings.metrics.port
    if first == 0:
        taken = {parse_endpoint(endpoint).port for endpoint in binds(settings)}  # chosen before, and not bound yet
        block = free_block(ranks, without=taken)
        learners = [block + rank for rank in range(ranks)]
        others = free_ports(len(children) - ranks, without={*taken, *learners})
        return dict(zip(children, [*learners, *others], strict=True))
    if first + len(children) - 1 > MAX_PORT:
        raise ConfigError(
            "metrics.port leaves no ports for all services", found=first, wanted=f"at most {MAX_PORT - len(children) + 1}"
        )
    for port in range(first, first + len(children)):
        check_port(settings.metrics.host, port)
    return {child: first + number for number, child in enumerate(children)}


def binds(settings: Settings) -> list[str]:
    """Return the address of each rank of the learner: of `learner.bind`, with a port of its own."""
    bind = parse_endpoint(settings.learner.bind)
    return [str(Endpoint(bind.host, bind.port + rank)) for rank in range(settings.learner.ranks)]


def policy_servers(settings: Settings, *, without: Collection[int]) -> dict[str, Endpoint]:
    """Return an address of this machine for each policy server; empty where actors step their own environments."""
    if not settings.policy_server.workers:
        return {}
    names = actor_names(settings.actor.count)
    ports = free_ports(len(names), without=without)
    return {name: Endpoint("127.0.0.1", port) for name, port in zip(names, ports, strict=True)}


# --- of the machine ---


def free_block(count: int, *, without: Collection[int] = ()) -> int:
    """Return the first of `count` ports in a row on which no process listens, none of them in `without`.

    Raises `ResourceError` where there are none.
    """
    unusable = set(without)
    while True:
        (first,) = free_ports(1, without=unusable)
        if count == 1 or set(range(first, first + count)) <= {first, *_free(range(first + 1, first + count), unusable)}:
            return first
        unusable.add(first)


def _free(ports: Collection[int], without: Collection[int]) -> set[int]:
    """Return those of `ports` on which no process listens."""
    found = set()
    for port in set(ports) - set(without):
        with socket.socket() as candidate, suppress(OSError, OverflowError):
            candidate.bind(("127.0.0.1", port))
            found.add(port)
    return found


def free_ports(count: int, *, without: Collection[int] = ()) -> list[int]:
    """Return `count` different ports on which no process listens, none of them in `without`.

    Raises `ResourceError` where there are not as many.
    """
    ports: list[int] = []
    start, span = secrets.randbelow(LAST_PORT - FIRST_PORT), LAST_PORT - FIRST_PORT
    with ExitStack() as bound:  # all at once, so that no port is found twice
        for offset in range(span):
            if len(ports) == count:
                break
            port = FIRST_PORT + (start + offset) % span
            candidate = bound.enter_context(socket.socket())
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
            if port not in without:
                ports.append(port)
    if len(ports) < count:
        raise ResourceError("no free ports", found=len(ports), wanted=f"{count} in {FIRST_PORT}..{LAST_PORT}")
    return ports
