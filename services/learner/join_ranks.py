"""Start of a learner of several ranks: join the others, check that all are of one version and one run, agree on the run.

Rank 0 owns the run directory. Each other rank keeps checkpoints, accounts and results in a folder of it, or, where the machines
share no disk, in the same folder of its own disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.config.endpoint import Endpoint, parse_endpoint
from common.config.layers import leaves
from common.config.load import with_chosen
from common.envs.spec import EnvSpec
from common.errors import ConfigError, ResourceError
from common.models import snapshot
from common.observability import logs
from common.runtime.lifecycle import Shutdown, on_signals
from common.runtime.process_group import ProcessGroup, TorchrunEnvironment, process_group
from common.runtime.run_directory import RunDirectory
from common.units import Seconds
from services.learner.startup import STOPPED_JOB, Invocation, with_run_id

WARN_SECONDS: Seconds = 5.0  # before the message that other ranks are awaited
OF_ONE_RANK = (
    *("learner.bind", "learner.keys", "learner.ranks_seconds", "metrics.host", "metrics.port"),
    *("run.dir", "run.id", "log.level", "log.format"),
)
"""Settings in which ranks may differ."""

_log = logs.EventLog(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """This process as one of the ranks."""

    group: ProcessGroup
    invocation: Invocation  # with what is of this rank alone, and with the run of rank 0
    local_rank: int


@contextmanager
def join_ranks(invocation: Invocation, environ: Mapping[str, str]) -> Iterator[Joined]:
    """Be one of the ranks of the learner while inside. Raises `ConfigError` and `LostRankError`."""
    own, learner = TorchrunEnvironment.of(invocation.settings.learner.ranks, environ), invocation.settings.learner
    check_address(own.master, insecure=learner.insecure)
    invocation = with_run_id(invocation) if own.rank == 0 else invocation
    warn_at, shutdown = time.monotonic() + WARN_SECONDS, Shutdown()

    def waiting() -> None:
        nonlocal warn_at
        if shutdown.requested:
            raise SystemExit(STOPPED_JOB if invocation.job else 0)  # nothing was begun
        if time.monotonic() >= warn_at:
            warn_at += WARN_SECONDS
            _log.info("waits_for_ranks", rank=own.rank, ranks=own.world_size, rank_0=own.master)

    with ExitStack() as stack:
        with on_signals(shutdown):
            group = stack.enter_context(process_group(own, waiting=waiting, join_seconds=learner.ranks_seconds))
        check_alike(group.gather_json(_facts(invocation)))
        first = group.gather_json({"run": invocation.settings.run.id, "resume": invocation.resume})[0]
        _log.info("ranks_joined", rank=own.rank, ranks=own.world_size)
        if not own.master.loopback:
            consequence = "connections between ranks are neither authenticated nor encrypted"
            _log.warning("insecure", rank_0=own.master, consequence=consequence)
        yield Joined(group=group, invocation=_of_rank(invocation, own, first), local_rank=own.local_rank)


def check_address(master: Endpoint, *, insecure: bool) -> None:
    """Refuse (ConfigError) ranks that connect over a network, unless `insecure` says that it is trusted."""
    if not (insecure or master.loopback):
        raise ConfigError(
            "MASTER_ADDR: connections between ranks are neither authenticated nor encrypted, with learner.keys too",
            found=master.host,
            wanted="an address of this machine alone (127.0.0.1), or learner.insecure=true",
            fix="set it only where no other process reaches the ranks over their network",
        )


def _facts(invocation: Invocation) -> dict[str, Any]:
    settings = {".".join(path): value for path, value in leaves(invocation.settings.model_dump(mode="json"))}
    versions = {"the version of rookery": version("rookery"), "the version of torch": torch.__version__}
    return versions | {name: value for name, value in settings.items() if name not in OF_ONE_RANK}


def check_alike(facts: Sequence[Mapping[str, Any]], *, fix: str = "") -> None:
    """Refuse (ConfigError) ranks whose facts, given by rank and name, differ."""
    for rank, other in enumerate(facts):
        one = facts[0]
        differ = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        if differ:
            name = differ[0]
            found = f"{one.get(name)} at rank 0 and {other.get(name)} at rank {rank}"
            raise ConfigError(f"the ranks of the learner differ in {name}", found=found, wanted="the same on all ranks", fix=fix)


def check_same_data(group: ProcessGroup, *, env: EnvSpec, run_id: str, model: nn.Module) -> None:
    """Refuse (ConfigError) ranks with another environment, or with checkpoints of another run. It waits for all ranks to load."""
    facts = {"the environment": env.signature, "the run of their checkpoints": run_id, "their weights": snapshot.digest(model)}
    fix = "install the same packages on all machines, and give each rank its own folder of this run, or an empty one"
    check_alike(group.gather_json(facts), fix=fix)


def _of_rank(invocation: Invocation, own: TorchrunEnvironment, first: Mapping[str, Any]) -> Invocation:
    """Return the invocation with the run of rank 0, the ports of this rank, and nothing that rank 0 alone writes."""
    settings = invocation.settings
    bind, port = parse_endpoint(settings.learner.bind), settings.metrics.port
    chosen: dict[str, Any] = {
        "run.id": first["run"],
        "learner.bind": str(Endpoint(bind.host, bind.port + own.local_rank if bind.port else 0)),
        "metrics.port": port + own.local_rank if port else 0,
    }
    if own.rank:
        chosen |= {"run.store": "", "run.tracking": ()}
    return replace(invocation, loaded=with_chosen(invocation.loaded, chosen), resume=first["resume"])


def open_rank_directory(group: ProcessGroup, directory: RunDirectory | None) -> RunDirectory:
    """Return the folder of this rank; `directory` is that of the run, which rank 0 opened. Raises `ResourceError`."""
    path = Path(group.broadcast_bytes(str(directory.path.absolute()).encode() if directory else b"").decode())
    own = RunDirectory(path).of_rank(group.index)
    try:
        own.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError("the folder of a rank cannot be made", found=f"{error.strerror} at {own.path}") from error
    return own
