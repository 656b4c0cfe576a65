"""A learner of several ranks: they join, check that they are alike, and take the decisions of the run together.

Rank 0 owns the run directory. Each other rank keeps checkpoints, accounts and results in a folder of it, or, where the machines
share no disk, in the same folder of its own disk.

Several times a second each rank votes: what it has, and what it would do. All ranks see all votes, and decide alike: when an
update begins, when a checkpoint is due, and when the run ends. A learner of one rank does not use this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.config.endpoint import Endpoint, parse_endpoint
from common.config.layers import dotted
from common.config.load import with_chosen
from common.envs.spec import EnvSpec
from common.errors import ConfigError, InternalError, ResourceError
from common.models import snapshot
from common.observability import logs
from common.runtime.lifecycle import Shutdown, on_signals
from common.runtime.machine import memory_owner
from common.runtime.process_group import ProcessGroup, TorchrunEnvironment, process_group
from common.runtime.run_directory import RunDirectory
from common.units import EnvSteps, Seconds, Version
from services.learner.coverage import Coverage
from services.learner.startup import STOPPED_JOB, Invocation, with_run_id

WARN_SECONDS: Seconds = 5.0  # before the message that other ranks are awaited
OF_ONE_RANK = (
    *("learner.bind", "learner.keys", "learner.ranks_seconds", "metrics.host", "metrics.port"),
    *("run.dir", "run.id", "log.level", "log.format"),
)
"""Settings in which ranks may differ."""

REASONS = ("", "stopped", "target reached", "env step budget spent", "wall-clock budget spent")
"""Reasons why a run ends, by the numbers under which ranks exchange them."""

_log = logs.EventLog(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """This process as one of the ranks."""

    group: ProcessGroup
    invocation: Invocation  # with what is of this rank alone, and with the run of rank 0
    local_rank: int
    local_ranks: int  # that share memory with it, itself included


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
        facts = {"run": invocation.settings.run.id, "resume": invocation.resume, "memory": memory_owner()}
        ranks = group.gather_json(facts)
        _log.info("ranks_joined", rank=own.rank, ranks=own.world_size)
        if not own.master.loopback:
            consequence = "connections between ranks are neither authenticated nor encrypted"
            _log.warning("insecure", rank_0=own.master, consequence=consequence)
        local_ranks = [rank["memory"] for rank in ranks].count(facts["memory"])
        invocation = _of_rank(invocation, own, ranks[0])
        yield Joined(group=group, invocation=invocation, local_rank=own.local_rank, local_ranks=local_ranks)


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
    settings = dotted(invocation.settings.model_dump(mode="json"))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The state of one rank."""

    ready: bool  # its batch is due, or it need not be waited for
    messages: int  # in its batch
    env_steps: EnvSteps  # in its batch
    episodes: int  # that ended in its batch
    reason: int  # why it would end the run, of `REASONS`
    save: bool  # whether it would write a checkpoint
    weights: int  # first bits of the hash of its weights; 0 where they are not compared now
    evaluated: bool = False  # whether it has results of evaluations, for which it may write the best policy next


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision of all ranks."""

    train: bool
    idle: bool = False  # whether every rank is ready, and none has experience
    env_steps: EnvSteps = 0  # of all ranks, in this update
    episodes: int = 0  # most of one rank, in this update
    reason: str = ""  # why the run ends; "": it does not
    save: bool = False
    evaluated: bool = False  # whether a rank has results of evaluations


def decide(votes: Sequence[Vote]) -> Decision:
    """Return the decision that follows from the votes of all ranks. Raises `InternalError` where their weights differ.

    The run ends where one rank would end it. An update begins when every rank is ready, and one of them has experience.
    """
    if len({vote.weights for vote in votes}) > 1:
        found = [f"{vote.weights:012x}" for vote in votes]
        raise InternalError("the weights of the ranks differ", found=found, wanted="one hash", fix="report this")
    reason = next((REASONS[vote.reason] for vote in votes if vote.reason), "")
    ready, experience = all(vote.ready for vote in votes), any(vote.messages for vote in votes)
    return Decision(
        train=not reason and ready and experience,
        idle=ready and not experience,
        env_steps=sum(vote.env_steps for vote in votes),
        episodes=max(vote.episodes for vote in votes),
        reason=reason,
        save=any(vote.save for vote in votes),
        evaluated=any(vote.evaluated for vote in votes),
    )


class Agreement:
    """The exchange of votes and results with the other ranks. The train loop's thread owns it."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def decide(self, vote: Vote) -> Decision:
        """Return the decision of all ranks. Raises `LostRankError`, and `InternalError` where the ranks' weights differ."""
        rows = self.group.gather_votes(torch.tensor(astuple(vote), dtype=torch.int64)).tolist()
        return decide([Vote(**{field.name: value for field, value in zip(fields(Vote), row, strict=True)}) for row in rows])

    def episodes(
        self, returns: Sequence[float], lengths: Sequence[float], coverage: Coverage, most: int
    ) -> tuple[list[float], list[int], Coverage]:
        """Return raw returns and lengths of the episodes of all ranks, by rank, and the coverage of all actors.

        `most` is the largest number of episodes of one rank. The coverage is of the same update as the episodes: by one of
        before them, the episodes that end first would count as those of all environments.
        """
        own = torch.full((len(coverage), 1 + most), float("nan"), dtype=torch.float64)
        own[:, 0] = torch.tensor(coverage, dtype=torch.float64)
        own[0, 1 : 1 + len(returns)] = torch.tensor(list(returns), dtype=torch.float64)
        own[1, 1 : 1 + len(lengths)] = torch.tensor(list(lengths), dtype=torch.float64)
        gathered = self.group.gather_votes(own)
        sums = map(int, gathered[:, :, 0].sum(dim=0).tolist())
        ended = gathered[:, :, 1:]
        known = ~ended[:, 1].isnan()  # a length is always a number
        lengths_of_all = [int(length) for length in ended[:, 1][known].tolist()]
        return ended[:, 0][known].tolist(), lengths_of_all, Coverage(*sums)

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Return what `work` returns on each rank, JSON values by rank, which may take minutes.

        Raises `ResourceError` on every rank where it is raised on one.
        """
        result, failure = None, None
        try:
            result = work()
        except ResourceError as error:
            failure = error
        done = self.group.gather_json([failure is None, result])
        if failure is not None:
            raise failure
        if failed := [rank for rank, (good, _) in enumerate(done) if not good]:
            raise ResourceError("another rank cannot do its part", found=f"rank {failed[0]}", fix="its log has the reason")
        return [result for _, result in done]

    def all(self, *, done: bool) -> bool:
        """Return whether every rank is done."""
        return bool(self.group.gather_votes(torch.tensor([int(done)])).all())


def common_version(group: ProcessGroup, newest: Any) -> Version:
    """Return the newest version of which every rank has a good checkpoint; -1 where there is none.

    `newest(most)` returns the newest good version of this rank that is at most `most` (None: any); -1 without one.
    """
    most: Version | None = None
    while True:
        own: Version = newest(most)
        versions = group.gather_json(own)
        if min(versions) == max(versions):
            return int(versions[0])
        most = min(versions)
        if most < 0:
            return -1
