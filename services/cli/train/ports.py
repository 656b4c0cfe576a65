"""Ports of this machine for the children of a run: those on which no process listens, and which no other run was given."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack

from common.conditions import DEFAULT
from common.config.endpoint import MAX_PORT, Endpoint, parse_endpoint
from common.config.load import LoadedSettings
from common.config.schema import Settings
from common.errors import ConfigError, ResourceError
from common.observability.http import check_port
from services.cli.train.instructions import actor_names, child_names

# Below the range from which Linux and macOS take the ports of outgoing connections: an actor that tries to reach a learner that
# is down could otherwise get that very port, connect to itself, and prevent the learner from binding it.
FIRST_PORT, LAST_PORT = 20_000, 32_000


class Ports(ExitStack):
    """Ports of this machine that no other run is given until this one is closed, whether a process listens on them or not.

    A UDP socket of the same number is the claim to a port: services listen on TCP alone, and the kernel gives it to one run.
    """

    def claim(self, port: int) -> None:
        """Claim a port that was chosen. Raises `ResourceError` where it is claimed already."""
        if not self._claimed(port):
            found, fix = "a port of another service or run, or one that needs rights", "set learner.bind and metrics.port"
            raise ResourceError(f"port {port} cannot be taken", found=found, wanted="a free port (0: any)", fix=fix)

    def _claimed(self, port: int) -> socket.socket | None:
        """Claim the port until the returned socket is closed; return None where it is claimed already."""
        claim = _bound(socket.SOCK_DGRAM, port)
        return claim and self.enter_context(claim)

    def find(self, count: int, *, in_a_row: bool = False) -> list[int]:
        """Find and claim `count` different ports on which no process listens, each the next one if `in_a_row`.

        Raises `ResourceError` where there are not as many.
        """
        ports: dict[int, socket.socket] = {}
        start, span = secrets.randbelow(LAST_PORT - FIRST_PORT), LAST_PORT - FIRST_PORT
        for offset in range(span):
            if len(ports) == count:
                break
            port = FIRST_PORT + (start + offset) % span
            if in_a_row and ports and port - 1 not in ports:
                while ports:
                    ports.popitem()[1].close()
            if not (claim := self._claimed(port)):  # and not tried either: the service of its run may be binding it
                continue
            if candidate := _bound(socket.SOCK_STREAM, port):
                candidate.close()
                ports[port] = claim
            else:
                claim.close()
        if len(ports) < count:
            raise ResourceError("no free ports", found=len(ports), wanted=f"{count} in {FIRST_PORT}..{LAST_PORT}")
        return list(ports)


def _bound(kind: socket.SocketKind, port: int) -> socket.socket | None:
    """Return a socket that is bound to the port; None where another is. Raises `ResourceError` at the limit of open files."""
    try:
        candidate = socket.socket(type=kind)
    except OSError as error:
        raise ResourceError("no socket for a port", found=error.strerror, wanted="one more", fix="raise ulimit -n") from error
    try:
        candidate.bind(("127.0.0.1", port))
    except OSError:
        candidate.close()
        return None
    return candidate


def metrics_ports(settings: Settings, ports: Ports, *, actors: int) -> dict[str, int]:
    """Return a port for each child: free ones, or `metrics.port` and those above it in the order in which children start."""
    ranks, workers = settings.learner.ranks, settings.policy_server.workers
    children = child_names(ranks=ranks, evaluator=settings.evaluator.enabled, actors=actors, env_workers=workers)
    first = settings.metrics.port
    if first == 0:
        return dict(zip(children, [*ports.find(ranks, in_a_row=True), *ports.find(len(children) - ranks)], strict=True))
    if first > (most := MAX_PORT - len(children) + 1):
        raise ConfigError("metrics.port leaves no ports for all services", found=first, wanted=f"at most {most}")
    for port in range(first, first + len(children)):
        check_port(settings.metrics.host, port)
        ports.claim(port)
    return {child: first + number for number, child in enumerate(children)}


def has_port(loaded: LoadedSettings) -> bool:
    """Return whether the user, or an earlier start, chose the port of the learner."""
    return loaded.provenance["learner.bind"] != DEFAULT and parse_endpoint(loaded.settings.learner.bind).port != 0


def binds(settings: Settings) -> list[str]:
    """Return the address of each rank of the learner: of `learner.bind`, with a port of its own."""
    bind = parse_endpoint(settings.learner.bind)
    return [str(Endpoint(bind.host, bind.port + rank)) for rank in range(settings.learner.ranks)]


def policy_servers(settings: Settings, ports: Ports) -> dict[str, Endpoint]:
    """Return an address of this machine for each policy server; empty where actors step their own environments."""
    names = actor_names(settings.actor.count) if settings.policy_server.workers else []
    return {name: Endpoint("127.0.0.1", port) for name, port in zip(names, ports.find(len(names)), strict=True)}
