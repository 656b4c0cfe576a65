"""A run before it starts: its settings, its directory, and an address for every child, all settled and written down."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from common.errors import ConfigError, ResourceError
from common.runtime.config import COMMAND_LINE, Loaded, as_yaml, load, rooted, settle
from common.runtime.disk import write_atomically
from common.runtime.http import check_port
from common.runtime.layers import DEFAULT
from common.runtime.run_directory import RunDirectory, create, default_path, held, reopen
from common.runtime.tree import MAX_PORT, Settings, is_loopback
from common.transport.curve import LearnerKeys, PeerKeys
from common.transport.zmq import ZmqLearner
from services.cli.ports import free_ports, reachable, split_endpoint
from services.cli.search import ActorSearch
from services.cli.supervisor import LEARNER, Start, Supervisor

FIRST_ACTORS = 1
ACTORS_PER_CORE = 2  # more do not help where they compute; where they wait for the world, say so: --actors N
FIX_RESUME = "rookery train --resume --run-dir runs/NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line asks for. `overrides` are `section.key=value`, the named options among them."""

    preset: str | None
    overrides: tuple[str, ...] = ()
    run_dir: Path | None = None
    resume: bool = False
    auto_actors: bool = False  # as many as make training fastest


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that is ready to start."""

    loaded: Loaded
    directory: RunDirectory
    lock: int | None  # descriptor of the run directory's lock; None where its file system has none
    made_folder: bool  # whether the directory did not exist before
    metrics_ports: Mapping[str, int]  # by child
    resume: bool
    auto_actors: bool

    @property
    def settings(self) -> Settings:
        """What the run goes by."""
        return self.loaded.settings

    @property
    def title(self) -> str:
        """The run in two words."""
        return f"{self.settings.run.preset or 'run'}, seed {self.settings.run.seed}"

    @property
    def urls(self) -> dict[str, str]:
        """Where each child answers HTTP."""
        host = reachable(self.settings.metrics.host)
        return {child: f"http://{host}:{port}" for child, port in self.metrics_ports.items()}

    def supervisor(self) -> Supervisor:
        """The children of this run."""
        actors = FIRST_ACTORS if self.auto_actors else self.settings.actor.count
        return Supervisor(actors=actors, evaluator=self.settings.evaluator.enabled, resume=self.resume)

    def search(self) -> ActorSearch | None:
        """For the number of actors, where that is not given."""
        warmup = getattr(self.settings.algorithm, "warmup", 0)
        return ActorSearch(most=most_actors(self.settings), after=warmup, actors=FIRST_ACTORS) if self.auto_actors else None

    def keep_actors(self, actors: int) -> None:
        """Write down how many there are from now on, for whoever resumes the run."""
        found = settle(self.loaded, {"actor.count": actors})
        write_atomically(self.directory.config, as_yaml(found.settings, found.provenance).encode())

    def command(self, start: Start) -> list[str]:
        """What to run for a child: everything it needs is in the run's config.yaml."""
        role = start.child.partition("-")[0]
        words = [sys.executable, "-m", f"services.{role}", "--config", str(self.directory.config)]
        words += ["--run-dir", str(self.directory.path)] if role == LEARNER else ["--name", start.child]
        words += ["--resume"] if start.resume else []
        words += ["--run-lock", str(self.lock)] if role == LEARNER and self.lock is not None else []
        return [*words, f"metrics.port={self.metrics_ports[start.child]}"]


@contextmanager
def make_plan(request: Request, *, environ: Mapping[str, str], command_line: Sequence[str], now: datetime) -> Iterator[Plan]:
    """Check everything, then write the run directory, and hold its lock while inside. Where this raises, nothing was written."""
    with ExitStack() as until_the_end:
        if request.resume:  # before a port in use is reported: the run under way has that too
            directory = _resumed(request)
            lock = until_the_end.enter_context(held(directory))
        loaded = _load(request, environ)
        run = loaded.settings.run
        named = request.run_dir or (Path(run.dir) if run.dir else None)
        path = named or default_path(preset=run.preset, seed=run.seed, now=now)
        settled = _settle(loaded, path, now, resume=request.resume)
        ports = _metrics_ports(settled.settings, actors=most_actors(settled.settings) if request.auto_actors else None)
        keys = _keys(settled.settings, actors=request.auto_actors or settled.settings.actor.count > 0)
        ZmqLearner(settled.settings.learner.bind, keys=keys).close()  # raises what the learner would, seconds later
        settled = rooted(settled)  # only now: errors about them name the user's own paths
        text, made_folder = as_yaml(settled.settings, settled.provenance), not path.exists()
        if request.resume:
            _rewrite(directory, text, settled.settings)
        else:
            directory = create(path, config=text, command=command_line)
            lock = until_the_end.enter_context(held(directory))
        yield Plan(
            loaded=settled,
            directory=directory,
            lock=lock,
            made_folder=made_folder,
            metrics_ports=ports,
            resume=request.resume,
            auto_actors=request.auto_actors,
        )


def _rewrite(directory: RunDirectory, text: str, settings: Settings) -> None:
    """Replace a resumed run's config.yaml; where the disk refuses, keep the existing file if it holds the same settings."""
    try:
        write_atomically(directory.config, text.encode())
    except OSError as error:
        if load(preset=str(directory.config), environ={}).settings != settings:
            raise ResourceError(
                "the changed settings cannot be written",
                found=f"{error.strerror} at {directory.config}",
                wanted="a disk with space left",
                fix="free the disk, or resume without other settings",
            ) from error


def most_actors(settings: Settings) -> int:
    """That `--actors auto` tries on this machine."""
    return max(FIRST_ACTORS, min(settings.learner.max_actors, ACTORS_PER_CORE * (os.cpu_count() or 1)))


def _resumed(request: Request) -> RunDirectory:
    if request.run_dir is None:
        raise ConfigError("no run to resume", found="--resume alone", wanted="the run's directory", fix=FIX_RESUME)
    return reopen(request.run_dir)


def _load(request: Request, environ: Mapping[str, str]) -> Loaded:
    if not request.resume:
        return load(preset=request.preset, overrides=request.overrides, environ=environ)
    loaded = load(preset=str(_resumed(request).config), overrides=request.overrides, environ=environ)
    if request.preset is not None and request.preset != loaded.settings.run.preset:
        raise ConfigError(
            "the run to resume is of another preset",
            found=f"{loaded.settings.run.preset} in {request.run_dir}",
            wanted=request.preset,
            fix="leave the preset out, or name another --run-dir",
        )
    return loaded


def _settle(loaded: Loaded, path: Path, now: datetime, *, resume: bool) -> Loaded:
    """Put in what the user left open: run id, directory, addresses. A resumed run finds them in its config.yaml."""
    settings = loaded.settings
    host, port = split_endpoint(settings.learner.bind)
    if loaded.provenance["learner.bind"] == DEFAULT or port == 0:
        (port,) = free_ports(1)
    chosen: dict[str, Any] = {
        "run.id": settings.run.id or f"{settings.run.preset or 'run'}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}",
        "run.dir": str(path),
        "learner.bind": f"tcp://{host}:{port}",
    }
    for role, own in (("actor", settings.actor), ("evaluator", settings.evaluator)):
        key = f"{role}.learner"
        # A resumed run's own file has the old address: it follows the learner. Else the user leads them, as through a proxy.
        stale = resume and loaded.provenance[key].startswith("file ") and loaded.provenance["learner.bind"] == COMMAND_LINE
        if loaded.provenance[key] == DEFAULT or stale:
            chosen[key] = f"tcp://{reachable(host)}:{port}"
            # The address is this machine's own: if the learner may run without keys there, so may its workers.
            chosen[f"{role}.insecure"] = own.insecure or (settings.learner.insecure and not is_loopback(chosen[key]))
    return settle(loaded, chosen)


def _keys(settings: Settings, *, actors: bool) -> LearnerKeys | None:
    """The learner's keys, if it has any. Raises `ConfigError` where it would refuse its own actors or evaluator."""
    learner = LearnerKeys.of(settings.learner.keys)
    for role, starts, own in (("actor", actors, settings.actor), ("evaluator", settings.evaluator.enabled, settings.evaluator)):
        if not starts or not (learner or own.keys):
            continue
        peer = PeerKeys.of(own.keys)
        found = own.keys or "none"
        if learner is None or peer is None:
            wanted = "keys on both sides, or on neither"
            fix = f"set learner.keys and {role}.keys to the folders that `rookery keys` made"
            raise ConfigError(
                f"{role}.keys and learner.keys", found=f"{found} and {settings.learner.keys or 'none'}", wanted=wanted, fix=fix
            )
        if peer.learner != learner.public or peer.public not in learner.allowed:
            fix = "take both folders from one `rookery keys`"
            raise ConfigError(
                f"the learner would refuse {role}.keys", found=found, wanted=f"keys that {settings.learner.keys} allows", fix=fix
            )
    return learner


def _metrics_ports(settings: Settings, *, actors: int | None) -> dict[str, int]:
    """A port for each child: any free ones, or those from `metrics.port` upwards in the order in which children start."""
    count = settings.actor.count if actors is None else actors
    children = Supervisor(actors=count, evaluator=settings.evaluator.enabled).children
    first = settings.metrics.port
    if first == 0:
        return dict(zip(children, free_ports(len(children)), strict=True))
    if first + len(children) - 1 > MAX_PORT:
        raise ConfigError(
            "metrics.port leaves no ports for all services", found=first, wanted=f"at most {MAX_PORT - len(children) + 1}"
        )
    for port in range(first, first + len(children)):
        check_port(settings.metrics.host, port)
    return {child: first + number for number, child in enumerate(children)}
