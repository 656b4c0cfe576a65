"""The plan of a run: its settings, its directory, and an address for every child, checked and written before the start."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from common.algorithms.sections import ReplaySection
from common.conditions import COMMAND_LINE, DEFAULT, value_of, yaml_text
from common.config.endpoint import Endpoint, connectable_host, parse_endpoint
from common.config.load import CHOSEN, LoadedSettings, as_yaml, load_settings, with_absolute_key_paths, with_chosen
from common.config.schema import Settings, conflicts
from common.errors import ConfigError, ResourceError
from common.observability.deployment import ENV_WORKER, LEARNER
from common.replay.blocks import block_rows
from common.runtime.copies import check_new, check_resumed, copy_address, restore, restore_missing
from common.runtime.disk import DISK, write_atomically
from common.runtime.machine import cores
from common.runtime.run_directory import (
    RunDirectory,
    add_command,
    create,
    default_path,
    held,
    is_config_of_a_run,
    new_run_id,
    reopen,
    require_same_run,
)
from common.tracking.remote import check_tracking
from common.transport.curve import ServerKeys, WorkerKeys
from common.transport.zmq import ZmqServer
from services.cli.env_trial import check_environment
from services.cli.train.instructions import Start, actor_names, rank_names
from services.cli.train.outcome import written
from services.cli.train.ports import Ports, binds, has_port, metrics_ports, policy_servers
from services.cli.train.search import ActorSearch
from services.cli.train.supervisor import Supervisor

ACTORS_PER_CORE = 2  # that `--actors auto` tries; actors that wait for their environments need --actors N


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command line of `rookery train`. `overrides` are `section.key=value`, those of the named options included."""

    preset: str | None
    overrides: tuple[str, ...] = ()
    run_dir: Path | None = None
    store_copy: str | None = None  # address of a run's copy, which is downloaded to `run_dir` where no run is there
    resume: bool = False
    auto_actors: bool = False  # search for the fastest number
    member: bool = False  # of a series or sweep, which combined the settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that is ready to start."""

    loaded: LoadedSettings
    directory: RunDirectory
    lock: int | None  # descriptor of the run directory's lock; None where its file system has none
    created_folder: bool  # False where an empty directory existed
    metrics_ports: Mapping[str, int]  # by name of the child
    policy_servers: Mapping[str, Endpoint]  # addresses for env workers, by name of the actor; empty without env workers
    master_port: int  # where the ranks of the learner meet; 0 where it has one
    resume: bool
    auto_actors: bool
    replaced_config: bytes = b""  # config.yaml of a resumed run, as it was before this start
    earlier_commands: bytes = b""  # the same of its command.txt
    earlier_summary: tuple[int, int] | None = None  # `outcome.written` of the summary of a start before

    @property
    def settings(self) -> Settings:
        """The settings of the run."""
        return self.loaded.settings

    @property
    def title(self) -> str:
        """Preset and seed."""
        return f"{self.settings.run.preset or 'run'}, seed {self.settings.run.seed}"

    @property
    def curve_title(self) -> str:
        """Environment, algorithm and seed."""
        return f"{self.settings.env.name}, {self.settings.algorithm.name}, seed {self.settings.run.seed}"

    @property
    def urls(self) -> dict[str, str]:
        """The HTTP address of each child that the learner has in its session."""
        host, ports = connectable_host(self.settings.metrics.host), self.metrics_ports.items()
        return {child: f"http://{host}:{port}" for child, port in ports if not child.startswith(ENV_WORKER)}

    def supervisor(self) -> Supervisor:
        """Return the supervisor of this run's children."""
        return Supervisor(
            actors=self.settings.actor.count,
            evaluator=self.settings.evaluator.enabled,
            env_workers=self.settings.policy_server.workers,
            ranks=self.settings.learner.ranks,
            resume=self.resume,
        )

    def search(self) -> ActorSearch | None:
        """Return the search for the number of actors, or None where the number is given."""
        if not self.auto_actors:
            return None
        return ActorSearch(max_actors=max_actors(self.settings), actors=self.settings.actor.count)

    def write_config(self, actors: int) -> None:
        """Write config.yaml, from which the run resumes, with the number of `actors` that it has now."""
        loaded = with_chosen(self.loaded, {"actor.count": actors})
        self.directory.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.directory.config, as_yaml(loaded.settings, loaded.provenance).encode())

    def withdraw(self) -> None:
        """Leave the run directory as it was before settings that were refused: of a new run remove all files."""
        if self.resume:
            write_atomically(self.directory.config, self.replaced_config)
            with suppress(OSError):
                write_atomically(self.directory.command, self.earlier_commands)
        elif self.created_folder:
            shutil.rmtree(self.directory.path)
        else:
            for entry in self.directory.path.iterdir():
                DISK.remove_tree(entry)

    def command(self, start: Start) -> list[str]:
        """Return the command line of a child, which reads all else from the run's config.yaml."""
        role = start.child.partition("-")[0]
        module = "services.policy_server" if start.child in self.policy_servers else f"services.{role}"
        # Without -P Python would import first from the working directory, where a folder may have the name of a package.
        argv = [sys.executable, "-P", "-m", module, "--config", str(self.directory.config)]
        argv += ["--run-dir", str(self.directory.path)] if role == LEARNER else ["--name", start.child]
        argv += ["--resume"] if start.resume else []
        argv += ["--run-lock", str(self.lock)] if start.child == LEARNER and self.lock is not None else []
        # Each rank adds its number to the port.
        port = self.metrics_ports[LEARNER if role == LEARNER else start.child]
        return [*argv, *(f"{key}={value}" for key, value in self.own_settings(start.child).items()), f"metrics.port={port}"]

    def own_settings(self, child: str) -> dict[str, str]:
        """Return the values of settings that a child has in place of those in config.yaml, by dotted key."""
        role, _, rest = child.partition("-")
        if role == LEARNER:  # a rank that ends is restarted, however long it takes
            return {"learner.ranks_seconds": "null"} if self.settings.learner.ranks > 1 else {}
        if child in self.policy_servers:  # a learner that is being restarted is no reason to give up
            return {"policy_server.bind": str(self.policy_servers[child]), "policy_server.learner_seconds": "null"}
        if role == ENV_WORKER:
            return {"env_worker.policy_server": str(self.policy_servers[actor_names(int(rest.partition("-")[0]) + 1)[-1]])}
        return {}

    def environment(self, child: str) -> dict[str, str]:
        """Return the variables of a child besides those of this process: a rank of the learner gets those of torchrun."""
        names = rank_names(self.settings.learner.ranks)
        if len(names) == 1 or child not in names:
            return {}
        rank = str(names.index(child))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.master_port)}
        return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(len(names)), **address}


@contextmanager
def make_plan(request: Request, *, environ: Mapping[str, str], command_line: Sequence[str], now: datetime) -> Iterator[Plan]:
    """Check all settings, write the run directory, and hold its lock while inside.

    Raises `ConfigError` or `ResourceError` before anything is written.
    """
    with ExitStack() as stack:
        _download_missing(request, environ)
        resumed = _resumed(request) if request.resume else None
        lock = stack.enter_context(held(resumed)) if resumed else None  # first: a run in progress has its ports in use too
        loaded = _load(request, resumed, environ)
        check_environment(loaded.settings)
        run = loaded.settings.run
        check_tracking(run.tracking, environ)
        check_workers(loaded.settings, auto_actors=request.auto_actors)
        path = request.run_dir or (Path(run.dir) if run.dir else default_path(preset=run.preset, seed=run.seed, now=now))
        if resumed:
            for address in filter(None, {request.store_copy, run.store and copy_address(run.store, path)}):
                check_resumed(address, path, warn=_print_warning)
        ports = stack.enter_context(Ports())
        for endpoint in binds(loaded.settings) if has_port(loaded) else ():
            ports.claim(parse_endpoint(endpoint).port)  # before any is sought
        most = max_actors(loaded.settings) if request.auto_actors else loaded.settings.actor.count
        metrics = metrics_ports(loaded.settings, ports, actors=most)
        chosen = _with_addresses(loaded, path, now, ports, resume=request.resume)
        keys = _learner_keys(chosen.settings)
        for endpoint in binds(chosen.settings):
            ZmqServer(endpoint, keys=keys).close()  # raises the errors that the learner would raise later
        (master_port,) = ports.find(1) if chosen.settings.learner.ranks > 1 else (0,)
        chosen = with_absolute_key_paths(chosen)  # after the checks, whose errors name the paths as the user wrote them
        text, created_folder = as_yaml(chosen.settings, chosen.provenance), not path.exists()
        replaced = commands = b""
        if resumed:
            directory = resumed
            replaced = directory.config.read_bytes()
            commands = directory.command.read_bytes() if directory.command.exists() else b""
            require_same_run(directory, chosen)
            _rewrite(directory, text, chosen.settings)
            add_command(directory, command_line)
        else:
            check_new(run.store, path)
            directory = create(path, config=text, command=command_line)
            lock = stack.enter_context(held(directory))
        plan = Plan(
            loaded=chosen,
            directory=directory,
            lock=lock,
            created_folder=created_folder,
            metrics_ports=metrics,
            policy_servers=policy_servers(chosen.settings, ports),
            master_port=master_port,
            resume=request.resume,
            auto_actors=request.auto_actors,
            replaced_config=replaced,
            earlier_commands=commands,
            earlier_summary=written(directory.summary),
        )
        yield replace(plan, loaded=replace(chosen, notes=(*chosen.notes, *_replaced(plan))))


def _replaced(plan: Plan) -> Iterator[str]:
    """Yield a note where the user set what each child has of its own."""
    given = {f"{child.partition('-')[0]}.name" for child in plan.metrics_ports} - {f"{LEARNER}.name"}
    found = []
    for key in sorted(given.union(*map(plan.own_settings, plan.metrics_ports))):
        (value, default), source = value_of(plan.settings, key), plan.loaded.provenance[key]
        if value is not None and (value != default or source == COMMAND_LINE):
            found.append(f"{key}={yaml_text(value)} ({source})")
    if found:
        yield f"`rookery train` sets these for each process itself, in place of: {', '.join(found)}"


def _rewrite(directory: RunDirectory, text: str, settings: Settings) -> None:
    """Replace a resumed run's config.yaml; where the disk refuses, keep the existing file if it holds the same settings."""
    try:
        write_atomically(directory.config, text.encode())
    except OSError as error:
        if load_settings(preset=str(directory.config), environ={}).settings != settings:
            found, fix = f"{error.strerror} at {directory.config}", "free the disk, or resume without other settings"
            fact, wanted = "the changed settings cannot be written", "a disk with space left"
            raise ResourceError(fact, found=found, wanted=wanted, fix=fix) from error


def check_workers(settings: Settings, *, auto_actors: bool = False) -> None:
    """Raise `ConfigError` for numbers of actors, ranks and env workers with which some would have nothing to do.

    With `auto_actors` the number of actors is sought, whatever the settings have.
    """
    ranks, actors = settings.learner.ranks, settings.actor.count
    if 0 < actors < ranks and not auto_actors:
        wanted = f"at least {ranks} = learner.ranks: a rank without an actor trains on nothing; or 0, where all start elsewhere"
        raise ConfigError("actor.count", found=actors, wanted=wanted, fix=f"add actor.count={ranks}")
    workers = settings.policy_server.workers
    if auto_actors and (workers or settings.lockstep):
        fact = f"the number of {'policy servers' if workers else 'actors'} cannot be searched for"
        found = f"--actors auto with {f'policy_server.workers={workers}' if workers else 'run.mode=lockstep'}"
        raise ConfigError(fact, found=found, wanted="--actors N")


def max_actors(settings: Settings) -> int:
    """Return the largest number of actors that `--actors auto` tries on this machine, where it begins with that of `settings`.

    The run can be resumed with it: it agrees with the other settings, and a replay memory in checkpoints keeps its layout.
    """
    for count in range(ACTORS_PER_CORE * cores(), settings.actor.count, -1):
        tried = settings.model_copy(update={"actor": settings.actor.model_copy(update={"count": count})})
        if not any(conflicts(tried)) and (_block_rows(tried) == _block_rows(settings) or not settings.checkpoint.replay):
            return count
    return settings.actor.count


def _block_rows(settings: Settings) -> int:
    """Return the part of the layout of the replay memory that depends on the number of actors; 0 where none does."""
    algorithm, scale = settings.algorithm, settings.scale
    if not isinstance(algorithm, ReplaySection) or scale.memory:
        return 0
    sizes = {"capacity": algorithm.replay_capacity, "n_step": algorithm.n_step, "streams": scale.streams}
    return block_rows(scale.frame_stack, **sizes)


def _download_missing(request: Request, environ: Mapping[str, str]) -> None:
    """Download the run to resume from its store, where its directory is missing."""
    if request.store_copy and not request.resume:
        parent, _, name = request.store_copy.rstrip("/").rpartition("/")
        fact, wanted = "--run-dir of a new run is a local directory", f"--run-dir runs/{name} run.store={parent}"
        raise ConfigError(fact, found=request.store_copy, wanted=wanted, fix="add --resume to continue the run that is there")
    if not request.resume or request.run_dir is None or RunDirectory(request.run_dir).begun:
        return
    if request.store_copy:
        restore(request.store_copy, request.run_dir, warn=_print_warning)
        return
    named = load_settings(preset=request.preset, overrides=request.overrides, environ=environ).settings.run.store
    restore_missing(named, request.run_dir, warn=_print_warning)


def _print_warning(text: str) -> None:
    print(f"rookery train: {text}", file=sys.stderr)


def _resumed(request: Request) -> RunDirectory:
    if request.run_dir is None:
        example = "rookery train --resume --run-dir runs/NAME"
        raise ConfigError("no run to resume", found="--resume alone", wanted="the run's directory", fix=example)
    return reopen(request.run_dir)


def _load(request: Request, resumed: RunDirectory | None, environ: Mapping[str, str]) -> LoadedSettings:
    preset = str(resumed.config) if resumed else request.preset
    overrides = request.overrides
    if request.auto_actors:  # the first number that is tried: each rank needs an actor
        alone = "actor.count=1", "run.mode=asynchronous"  # in lockstep one actor would conflict with several ranks
        ranks = load_settings(preset=preset, overrides=(*overrides, *alone), environ=environ).settings.learner.ranks
        overrides = (*overrides, f"actor.count={ranks}")
    loaded = load_settings(preset=preset, overrides=overrides, environ=environ, strict=not request.member)
    if request.auto_actors:
        loaded = replace(loaded, provenance=MappingProxyType({**loaded.provenance, "actor.count": CHOSEN}))
        if resumed and loaded.settings.checkpoint.replay and resumed.checkpoints.is_dir():
            _require_layout(loaded.settings, load_settings(preset=preset, environ={}).settings)
    if request.resume and request.preset not in {None, loaded.settings.run.preset}:
        found, fix = f"{loaded.settings.run.preset} in {request.run_dir}", "leave the preset out, or name another --run-dir"
        raise ConfigError("the run to resume is of another preset", found=found, wanted=request.preset, fix=fix)
    return loaded


def _require_layout(first: Settings, before: Settings) -> None:
    """Raise `ConfigError` where a search that begins with `first` cannot go on with the replay memory of the run `before`."""
    if before.checkpoint.replay and _block_rows(first) != _block_rows(before):
        found = f"--actors auto, and a replay memory in the checkpoint that is laid out for {before.actor.count}"
        raise ConfigError("the number of actors cannot be searched for", found=found, wanted=f"--actors {before.actor.count}")


def _with_addresses(loaded: LoadedSettings, path: Path, now: datetime, ports: Ports, *, resume: bool) -> LoadedSettings:
    """Choose the run id, the directory and the addresses that the user left open."""
    settings = loaded.settings
    bind = parse_endpoint(settings.learner.bind)
    port = bind.port if has_port(loaded) else ports.find(settings.learner.ranks, in_a_row=True)[0]
    known = "" if not resume and is_config_of_a_run(loaded.provenance["run.id"]) else settings.run.id  # that run keeps its id
    chosen: dict[str, Any] = {
        "run.id": known or new_run_id(preset=settings.run.preset, now=now),
        "run.dir": str(path),
        "learner.bind": str(Endpoint(bind.host, port)),
    }
    for role, worker in (("actor", settings.actor), ("evaluator", settings.evaluator)):
        key = f"{role}.learner"
        # In the config.yaml of a resumed run the address is that of the old learner.bind. Any other address was chosen by the
        # user, such as that of a proxy.
        moved = loaded.provenance["learner.bind"] == COMMAND_LINE or loaded.provenance["learner.ranks"] == COMMAND_LINE
        stale = resume and loaded.provenance[key].startswith("file ") and moved
        if loaded.provenance[key] == DEFAULT or stale:
            host, ranks = connectable_host(bind.host), settings.learner.ranks if role == "actor" else 1
            chosen[key] = ",".join(str(Endpoint(host, port + rank)) for rank in range(ranks))
            # The address is of this machine: where the learner may run without keys, so may its workers.
            chosen[f"{role}.insecure"] = worker.insecure or (settings.learner.insecure and not Endpoint(host, port).loopback)
    return with_chosen(loaded, chosen)


def _learner_keys(settings: Settings) -> ServerKeys | None:
    """Return the learner's keys or None. Raises `ConfigError` where the learner would refuse the workers of this run."""
    learner = ServerKeys.of(settings.learner.keys)
    for role, starts, worker in (
        ("actor", settings.actor.count > 0, settings.actor),
        ("evaluator", settings.evaluator.enabled, settings.evaluator),
    ):
        if not starts or not (learner or worker.keys):
            continue
        worker_keys = WorkerKeys.of(worker.keys)
        found = worker.keys or "none"
        if learner is None or worker_keys is None:
            wanted = "keys on both sides, or on neither"
            fix = f"set learner.keys and {role}.keys to the folders that `rookery keys` made"
            raise ConfigError(
                f"{role}.keys and learner.keys", found=f"{found} and {settings.learner.keys or 'none'}", wanted=wanted, fix=fix
            )
        if worker_keys.server != learner.public or worker_keys.public not in learner.allowed.values():
            fix = "take both folders from one `rookery keys`"
            raise ConfigError(
                f"the learner would refuse {role}.keys", found=found, wanted=f"keys that {settings.learner.keys} allows", fix=fix
            )
    return learner
