"""Ports of this machine for the children of a run: those on which no process listens, in the range that runs take."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Collection

from common.config.endpoint import MAX_PORT, Endpoint, parse_endpoint
from common.config.schema import Settings
from common.errors import ConfigError, ResourceError
from common.observability.http import check_port
from services.cli.train.instructions import actor_names
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
        learners = free_ports(ranks, without=taken, in_a_row=True)
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


def free_ports(count: int, *, without: Collection[int] = (), in_a_row: bool = False) -> list[int]:
    """Return `count` different ports on which no process listens, none of them in `without`; each the next one if `in_a_row`.

    Raises `ResourceError` where there are not as many.
    """
    ports: list[int] = []
    start, span = secrets.randbelow(LAST_PORT - FIRST_PORT), LAST_PORT - FIRST_PORT
    for offset in range(span):
        if len(ports) == count:
            break
        port = FIRST_PORT + (start + offset) % span
        if port in without or not _is_free(port):
            continue
        if in_a_row and ports and port != ports[-1] + 1:
            ports.clear()
        ports.append(port)
    if len(ports) < count:
        raise ResourceError("no free ports", found=len(ports), wanted=f"{count} in {FIRST_PORT}..{LAST_PORT}")
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as candidate:
        try:
            candidate.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
