"""Start of the learner, in the order in which it runs: command line, run id, algorithm, run directory, record and session.

A run is new, or continues from the newest good checkpoint in its directory.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from common.algorithms.api import Algorithm, HasReplay, LoadsParameters, SavesReplay
from common.algorithms.payload import Payload
from common.algorithms.ranks import ALONE, Ranks
from common.algorithms.registry import build_algorithm, build_payload
from common.config import arguments
from common.config.layers import parse_yaml
from common.config.load import as_yaml, with_absolute_key_paths, with_chosen
from common.config.schema import RunConfig, Settings
from common.envs.spec import EnvSpec
from common.errors import ConfigError, DropReason, ResourceError
from common.models import arithmetic
from common.models.snapshot import ParameterLayout
from common.observability import logs
from common.protocol.learner_side import LearnerSide
from common.protocol.messages import ACTOR_STATE, ArraySpec
from common.protocol.registry import SessionConfig
from common.runtime import machine, run_directory
from common.runtime.checkpoint_files import POLICY, BadCheckpointError, Checkpoint, flatten_state, read, restore_state
from common.runtime.checkpoints import CheckpointStore
from common.runtime.disk import write_atomically
from common.runtime.ranks import ProcessGroup
from common.runtime.run_directory import RunDirectory
from common.runtime.store import restore_missing
from common.units import Seconds, Version
from services.learner import accounts
from services.learner.agreement import common_version
from services.learner.best import facts_of
from services.learner.lockstep import Lockstep
from services.learner.record import RunRecord

STATE = ArraySpec(name=ACTOR_STATE, dtype="uint8", shape=(-1,))

NAMED_LAYERS = 3  # in an error
STOPPED_JOB = 1  # exit code of a learner that was stopped before the end of its run, with `--job`

_log = logs.EventLog(__name__)


# --- command line ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation(arguments.Invocation):
    """Command line of the learner; `run_dir` None: `open_directory` chooses."""

    run_dir: Path | None
    resume: bool
    run_lock: int | None  # descriptor of the run directory's lock, inherited from `rookery train`
    job: bool = False  # after a stop the exit code is `STOPPED_JOB`, so that the process is started again
    config_named: bool  # whether `--config` is the run's own config.yaml: `rookery train` writes that file, the learner does not


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Invocation:
    """Read the command line. Raises `ConfigError`; argparse itself exits with 2 for an unknown option."""
    description = "Train on the experience of the actors, publish the policy, keep the run directory."
    parser = arguments.service_parser("learner", description, "rookery learner --config pong learner.bind=tcp://127.0.0.1:5700")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where the run is kept (run.dir)")
    parser.add_argument("--keys", metavar="DIR", help="folder of keys: encrypt, and accept only known workers (learner.keys)")
    parser.add_argument("--run-lock", type=int, metavar="FD", help="the run's lock, as rookery train passes it to its learner")
    parser.add_argument(
        "--job", action="store_true", help="for a Job of Kubernetes: exit code 0 at the end of the run, 1 of a stop"
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in the run directory")
    start.add_argument("--resume-if-found", action="store_true", help="the same where the directory holds a run; else begin it")
    parsed = parser.parse_intermixed_args(argv)
    continues = parsed.resume or parsed.resume_if_found
    config_named = None not in (parsed.config, parsed.run_dir) and Path(parsed.config) == RunDirectory(parsed.run_dir).config
    if parsed.config is None and continues and parsed.run_dir is not None:
        own = RunDirectory(parsed.run_dir)
        parsed.config = str(own.config) if own.begun else None  # a run continues with its own settings
    loaded = with_absolute_key_paths(arguments.settings_from_arguments(parsed, {"learner.keys": parsed.keys}, environ))
    named = loaded.settings.run.dir
    run_dir = parsed.run_dir or (Path(named) if named else None)
    if continues and run_dir is not None and restore_missing(loaded.settings.run.store, run_dir):
        _log.info("downloaded", store=loaded.settings.run.store, run_dir=run_dir)
        if parsed.config is None:
            return parse([*argv, "--config", str(RunDirectory(run_dir).config)], environ)
    if continues and run_dir is None:
        option = "--resume" if parsed.resume else "--resume-if-found"
        raise ConfigError("no run to resume", found=f"{option} alone", wanted="the run's directory", fix="set --run-dir to it")
    resume = parsed.resume or (parsed.resume_if_found and run_dir is not None and RunDirectory(run_dir).begun)
    return Invocation(
        loaded=loaded,
        run_dir=run_dir,
        resume=resume,
        run_lock=parsed.run_lock,
        config_named=config_named,
        job=parsed.job,
        linger=parsed.linger,
        debug=parsed.debug,
    )


def with_run_id(invocation: Invocation) -> Invocation:
    """Give a new run its id before anything is written, so that a resumed learner reads it in the run's config.yaml."""
    run = invocation.settings.run
    chosen = run.id or _earlier_id(invocation) or f"{run.preset or 'run'}-{secrets.token_hex(4)}"
    return replace(invocation, loaded=with_chosen(invocation.loaded, {"run.id": chosen}))


def _earlier_id(invocation: Invocation) -> str:
    """Return the id with which a resumed run began: its workers use it, though no checkpoint was written yet."""
    if not invocation.resume or invocation.run_dir is None:
        return ""
    own = RunDirectory(invocation.run_dir)
    values = parse_yaml(own.config.read_text(encoding="utf-8"), source=str(own.config)) if own.begun else None
    run = values.get("run") if isinstance(values, dict) else None
    return str(run.get("id", "")) if isinstance(run, dict) else ""


# --- algorithm ---


def build_run_algorithm(settings: Settings, env: EnvSpec, *, seed: int, ranks: Ranks = ALONE, local_rank: int = 0) -> Algorithm:
    """Return the algorithm of the run; log its scaled learning rate and the size of its replay memory, where it has them.

    Raises `ConfigError` where it cannot train on `env`, or where its memory is larger than what this machine has left.
    """
    fix, available = "lower algorithm.replay_capacity", machine.available_bytes()
    section, device = settings.algorithm.scaled(settings.scale), _device(settings.learner.device, local_rank)
    if section.learning_rate != settings.algorithm.learning_rate:
        _log.info("learning_rate_scaled", learning_rate=section.learning_rate, environments=settings.scale.environments)
    if arithmetic.native(section.precision, device) != section.precision:
        _log.info("no_bfloat16", setting="algorithm.precision", device=device.type, precision="fp32")
    try:
        algorithm = build_algorithm(section, model=settings.model, env=env, seed=seed, device=device, ranks=ranks)
    except MemoryError as error:  # larger than the system would ever promise
        wanted = None if available is None else f"at most {available / 1e9:.1f} GB"
        raise ConfigError("the replay memory cannot be allocated", found=str(error), wanted=wanted, fix=fix) from error
    if settings.checkpoint.replay and not isinstance(algorithm, SavesReplay):
        fact = f"{section.name} cannot hand over its replay memory"
        raise ConfigError(
            fact, found="checkpoint.replay true", wanted="an algorithm with the methods of rookery.SavesReplay, or false"
        )
    if isinstance(algorithm, HasReplay):
        needed = algorithm.replay_bytes
        if available is not None and needed > available:
            found, wanted = (f"{size / 1e9:.1f} GB" for size in (needed, available))
            fact = f"the replay memory of {algorithm.replay_env_steps:,} env steps is larger than what is free here"
            raise ConfigError(fact, found=found, wanted=f"at most {wanted}", fix=fix)
        _log.info("replay_allocated", env_steps=algorithm.replay_env_steps, gigabytes=round(needed / 1e9, 3))
    return algorithm


def _device(name: str, local_rank: int) -> torch.device:
    """Return the device on which the networks are trained. Raises `ConfigError` where it is missing."""
    if name == "cuda" and torch.cuda.is_available() and local_rank:
        if local_rank >= torch.cuda.device_count():
            found, wanted = f"{torch.cuda.device_count()} GPUs", f"at least {local_rank + 1}: one for each rank on this machine"
            raise ConfigError("learner.ranks needs more GPUs", found=found, wanted=wanted, fix="lower learner.ranks")
        torch.cuda.set_device(local_rank)
        return torch.device(name, local_rank)
    if name == "cuda" and not torch.cuda.is_available():
        kind = f"built for CUDA {torch.version.cuda}, and no device" if torch.version.cuda else "built for CPUs"
        raise ConfigError(
            "there is no GPU to train on",
            found=f"torch {torch.__version__}, {kind}",
            wanted="a device that CUDA sees",
            fix="run where there is one (in a container: the image rookery-learner-gpu), or set learner.device=cpu",
        )
    return torch.device(name)


# --- run directory, record and session ---


def open_directory(invocation: Invocation, argv: Sequence[str]) -> RunDirectory:
    """Return the run directory: the one of a resumed run, one that `rookery train` made, or a new one.

    Raises `ConfigError` or `ResourceError`.
    """
    run, path = invocation.settings.run, invocation.run_dir
    if path is not None and (
        invocation.resume or (RunDirectory(path).begun and not RunDirectory(path).learning_curve_csv.exists())
    ):
        return run_directory.find(path)  # a restarted learner trains on a read-only disk, with a warning
    if path is None:
        path = run_directory.default_path(preset=run.preset, seed=run.seed, now=datetime.now(UTC).astimezone())
    return run_directory.create(path, config=_config_text(invocation, path), command=["rookery", "learner", *argv])


@contextmanager
def existing_run(invocation: Invocation, argv: Sequence[str]) -> Iterator[RunDirectory | None]:
    """Hold the lock of a run that exists already while inside; yields its directory, or None for a new run.

    Raises `ConfigError` where the run is in progress. Enter it before binding ports, which the learner of that run
    needs when it restarts.
    """
    if invocation.run_dir is None or not (invocation.resume or RunDirectory(invocation.run_dir).begun):
        yield None
        return
    directory = open_directory(invocation, argv)
    with run_directory.held(directory, inherited=invocation.run_lock):
        yield directory


def open_state(
    invocation: Invocation,
    directory: RunDirectory,
    *,
    algorithm: Algorithm,
    env: EnvSpec,
    store: CheckpointStore,
    group: ProcessGroup | None = None,
) -> tuple[RunRecord, LearnerSide]:
    """Return the run's record and session: new, or as the newest good checkpoint left them, and the algorithm with them.

    The ranks of a `group` continue from the newest version of which each has a good checkpoint of this number of ranks. Without
    such a version rank 0 continues from its own newest, with the ledgers of all ranks, and the others get its weights.
    """
    settings = invocation.settings
    size = {"length": settings.rollout.length, "num_envs": settings.env.num_envs}
    payload = build_payload(settings.algorithm, model=settings.model, env=env, **size)

    def new(run_id: str) -> tuple[RunRecord, LearnerSide]:
        began = _began(directory, resumed=invocation.resume)
        record = RunRecord(settings=settings, run_id=run_id, frame_skip=env.frame_skip, started_at=began)
        config = session_config(settings, env, payload, run_id, group=group)
        return record, LearnerSide(config, check=payload.check, episodes=payload.episodes, resumed=invocation.resume)

    if group is not None and invocation.resume:
        return _open_ranks(invocation, directory, algorithm=algorithm, store=store, group=group, new=new)

    other_ranks = False  # whether the checkpoint is of another number of ranks, whose sessions no longer exist

    def restored(checkpoint: Checkpoint) -> tuple[RunRecord, LearnerSide]:
        nonlocal other_ranks
        record, session = new(checkpoint.run_id)  # workers that outlived the learner have this one
        other_ranks = _ranks_of(checkpoint) != 1
        if not other_ranks:
            restore_checkpoint(checkpoint, algorithm=algorithm, record=record, session=session, store=store)
        else:
            _restore_for_other_ranks(checkpoint, algorithm=algorithm, record=record, session=session)
        return record, session

    if not invocation.resume:
        _load_initial_weights(settings.run.init, algorithm)
        return new(settings.run.id)
    architecture, warn = ParameterLayout.of(algorithm.model).fingerprint, partial(_log.warning, "checkpoint_skipped")
    found = store.load_newest(architecture=architecture, warn=lambda detail: warn(detail=detail), restore=restored)
    if not found:
        _load_initial_weights(settings.run.init, algorithm)
    record, session = found or new(settings.run.id)
    record.best = facts_of(store.load_best(warn=lambda detail: warn(detail=detail)))
    if other_ranks:
        _forget_accounts(directory)
    else:
        _roll_back(directory, record, session)
    if found:
        _log.info("resumed", version=record.version, env_steps=record.env_steps)
    return record, session


def _forget_accounts(directory: RunDirectory) -> None:
    """Remove the accounts of sessions that no longer exist: their env steps are in the ledger of the checkpoint."""
    with suppress(OSError):
        directory.accounts.unlink()


def _open_ranks(
    invocation: Invocation,
    directory: RunDirectory,
    *,
    algorithm: Algorithm,
    store: CheckpointStore,
    group: ProcessGroup,
    new: Callable[[str], tuple[RunRecord, LearnerSide]],
) -> tuple[RunRecord, LearnerSide]:
    """As `open_state`, for a run of several ranks that is resumed."""
    settings = invocation.settings
    architecture, warn = ParameterLayout.of(algorithm.model).fingerprint, partial(_log.warning, "checkpoint_skipped")

    def newest(most: Version | None) -> Version:
        return store.newest_good(most, fits=lambda checkpoint: _ranks_of(checkpoint) == group.count)

    version = common_version(group, newest)
    alone = version < 0  # rank 0 continues from its own checkpoint, or all ranks begin

    def restored(checkpoint: Checkpoint) -> tuple[RunRecord, LearnerSide]:
        record, session = new(checkpoint.run_id)
        if alone:
            _restore_for_other_ranks(checkpoint, algorithm=algorithm, record=record, session=session)
        else:
            restore_checkpoint(checkpoint, algorithm=algorithm, record=record, session=session, store=store)
        return record, session

    found = None
    if not alone or group.index == 0:
        most = None if alone else version
        found = store.load_newest(architecture=architecture, warn=lambda detail: warn(detail=detail), restore=restored, most=most)
        if not alone and (loaded := found[0].version if found else None) != version:
            fix = "look at the line checkpoint_skipped of this log, and remove that checkpoint of every rank"
            raise ResourceError(f"rank {group.index} cannot load the version of all ranks", found=loaded, wanted=version, fix=fix)
    if found is None:
        _load_initial_weights(settings.run.init, algorithm)
    record, session = found or new(settings.run.id)
    if alone and _share_state(group, record, algorithm, known=found is not None):
        _forget_accounts(directory)
    else:
        _roll_back(directory, record, session)
    if group.index == 0:
        record.best = facts_of(store.load_best(warn=lambda detail: warn(detail=detail)))
    if record.updates:
        _log.info("resumed", version=record.version, env_steps=record.env_steps, ranks=group.count, sessions=not alone)
    return record, session


def _ranks_of(checkpoint: Checkpoint) -> int:
    """Return the number of ranks of the learner that wrote a checkpoint."""
    return len(_ledgers_of(checkpoint))


def _ledgers_of(checkpoint: Checkpoint) -> Sequence[Mapping[str, Any]]:
    """Return the ledgers of all ranks at the time of a checkpoint."""
    ledgers: Sequence[Mapping[str, Any]] = checkpoint.counters.get("ledgers") or [checkpoint.counters["session"]["ledger"]]
    return ledgers


def _restore_for_other_ranks(checkpoint: Checkpoint, *, algorithm: Algorithm, record: RunRecord, session: LearnerSide) -> None:
    """Restore weights, record and the ledgers of all ranks from rank 0's checkpoint; the sessions of workers end."""
    record.load_state_dict(checkpoint.counters["record"], time.monotonic())
    algorithm.load_state_dict(checkpoint.state)
    session.load_ledgers(_ledgers_of(checkpoint))
    record.lockstep_broken = record.lockstep_broken or "resumed with another number of ranks"


def _share_state(group: ProcessGroup, record: RunRecord, algorithm: Algorithm, *, known: bool) -> bool:
    """Give all ranks the record and the algorithm's state of rank 0, and return True, where it has a checkpoint (`known`)."""
    now = time.monotonic()
    state = {"record": record.state_dict(now), "algorithm": algorithm.state_dict()} if known else {}
    structure, tensors = flatten_state(state)
    header = group.gather_json(structure)[0]
    data = group.gather_bytes(safetensors.torch.save(tensors) if known else b"")[0]
    if data and group.index:
        received = restore_state(header, safetensors.torch.load(data))
        record.load_state_dict(received["record"], now)
        algorithm.load_state_dict(received["algorithm"])
    return bool(data)


def _load_initial_weights(path: str, algorithm: Algorithm) -> None:
    """Load the weights of the checkpoint in `path` (`run.init`) into a run without updates; "": they stay random.

    Raises `ConfigError` or `ResourceError` where it cannot be read or does not fit.
    """
    if not path:
        return
    if not isinstance(algorithm, LoadsParameters):
        fact, wanted = "run.init: the algorithm cannot start with other weights", "one with the method of rookery.LoadsParameters"
        raise ConfigError(fact, found=type(algorithm).__name__, wanted=wanted)
    fact, fix = f"run.init {path} cannot be used", "name another checkpoint"
    try:
        checkpoint = read(Path(path))
    except BadCheckpointError as error:
        raise ResourceError(fact, found=str(error), wanted="a whole checkpoint", fix=fix) from error
    if POLICY in checkpoint.state:
        raise ResourceError(fact, found="a policy alone, as in best", wanted="all networks of a run", fix=fix)
    try:
        algorithm.load_parameters(checkpoint.state)
    except ResourceError as error:
        found, wanted = _layers(error.found), _layers(error.wanted)
        fix = "choose env, model and algorithm so that the network has the same layers"
        raise ResourceError(f"the weights of {path} do not fit", found=found, wanted=wanted, fix=fix) from error
    _log.info("weights_loaded", path=path, version=checkpoint.version, env_steps=checkpoint.env_steps, run=checkpoint.run_id)


def _layers(shapes: object) -> str:
    """Format the first shapes of parameters by name."""
    named = list(shapes.items()) if isinstance(shapes, dict) else []
    more = f" and {len(named) - NAMED_LAYERS} more" if len(named) > NAMED_LAYERS else ""
    return ", ".join(f"{name} {shape}" for name, shape in named[:NAMED_LAYERS]) + more or "no such parameters"


def _roll_back(directory: RunDirectory, record: RunRecord, session: LearnerSide) -> None:
    """Count as rolled back the messages that a killed learner had trained on after the checkpoint."""
    try:
        state = accounts.read(directory.accounts, run_id=record.run_id, produced=session.ledger.produced)
    except ResourceError as error:
        _log.warning("accounts_skipped", error=error, consequence="what was trained on after the checkpoint is not counted")
        return
    if state is not None:
        before = session.ledger.dropped[DropReason.ROLLED_BACK]
        session.load_accounts(state)
        if env_steps := session.ledger.dropped[DropReason.ROLLED_BACK] - before:
            _log.info("rolled_back", env_steps=env_steps)


def restore_checkpoint(
    checkpoint: Checkpoint, *, algorithm: Algorithm, record: RunRecord, session: LearnerSide, store: CheckpointStore
) -> None:
    """Restore all three from `checkpoint`; the replay memory too, where the run's checkpoints hold it."""
    record.load_state_dict(checkpoint.counters["record"], time.monotonic())
    session.load_state_dict(checkpoint.counters["session"])
    algorithm.load_state_dict(checkpoint.state)
    complete = not isinstance(algorithm, HasReplay)
    if isinstance(algorithm, SavesReplay) and record.settings.checkpoint.replay and checkpoint.replay is not None:
        algorithm.load_replay_state(checkpoint.replay)
        store.segment_files.read(checkpoint.files, algorithm.replay_segments())
        complete = True
    if not complete and not record.lockstep_broken:
        record.lockstep_broken = "resumed without the replay memory, wanted checkpoint.replay=true"


def _began(directory: RunDirectory, *, resumed: bool) -> Seconds:
    """Return when the run directory was made, on the monotonic clock: the start is part of the run's time, idle time is not."""
    if resumed or not directory.command.exists():  # the folder of another rank than 0
        return time.monotonic()
    age = time.time() - directory.command.stat().st_mtime
    return time.monotonic() - max(0.0, age)


def session_config(
    settings: Settings, env: EnvSpec, payload: Payload, run_id: str, *, group: ProcessGroup | None = None
) -> SessionConfig:
    """Return the session config of this run, for workers that send experience in the form of `payload`."""
    rank, ranks = (0, 1) if group is None else (group.index, group.count)
    lockstep = Lockstep.of(settings)
    return SessionConfig(
        run=run_id,
        run_config=RunConfig.of(settings, run_id=run_id).to_json(),
        env_signature=env.signature,
        schema=(*payload.schema, *([STATE] if lockstep else [])),
        credits=lockstep.share if lockstep else settings.learner.credits,
        rollout_env_steps=settings.rollout.length * settings.env.num_envs,
        batch=settings.batch,
        max_actors=lockstep.actors if lockstep else settings.learner.max_actors,
        rank=rank,
        ranks=ranks,
        lockstep=lockstep is not None,
    )


def write_config(invocation: Invocation, directory: RunDirectory) -> None:
    """Write the settings of this learner to the run's config.yaml, where an earlier process began with others.

    Call it once the run is known to continue with them. A disk that cannot be written costs a warning.
    """
    text = _config_text(invocation, directory.path)
    if invocation.config_named or not directory.begun or _values(directory.config.read_text(encoding="utf-8")) == _values(text):
        return
    try:
        write_atomically(directory.config, text.encode())
    except OSError as error:
        _log.warning("config_not_written", path=directory.config, error=error, consequence="it holds the settings of before")
    else:
        _log.info("config_written", path=directory.config, why="the run continues with other settings")


def _config_text(invocation: Invocation, path: Path) -> str:
    moved = with_chosen(invocation.loaded, {"run.dir": str(path)})
    return as_yaml(moved.settings, moved.provenance)


def _values(text: str) -> list[str]:
    """Return the lines of a configuration without the comments that name the source of each value."""
    return [line.partition("  # ")[0] for line in text.splitlines()]
